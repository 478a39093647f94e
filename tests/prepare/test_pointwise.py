"""`plaudit prepare pointwise-sft` and `pointwise-rl`: one row per scored translation, and training a judge on them."""

from dataclasses import replace
from pathlib import Path

import pytest

from plaudit.data.conversations import Source, read_conversations, read_prompts
from plaudit.errors import DataError, PlauditError, RecipeError
from plaudit.prepare.judge_cli import prepare_pointwise_rl, prepare_pointwise_sft
from plaudit.prepare.pointwise import Rule, make_pointwise_rl, make_pointwise_sft
from plaudit.prepare.ranking import make_ranking_rl, make_ranking_sft
from plaudit.rewards.judges.judge import Judge
from plaudit.rewards.rules.grade import Grade
from plaudit.rewards.rules.pointwise_score import PointwiseScore
from plaudit.types import Prompt
from support.judges import backend_of, collect, make
from support.rewards import group
from support.scored_groups import GROUP, MINI, before_and_after_rl, groups

RULES: list[Rule] = ["pointwise_score", "grade"]
PARSERS = {"pointwise_score": "last_number_line", "grade": "total_score"}


def sft(file: Path, out: Path, **settings) -> dict[str, str]:
    """Answers by question."""
    make_pointwise_sft([file], out, **settings)
    conversations = [conversation.messages for _, conversation in read_conversations(Source(out))]
    return {question["content"]: answer["content"] for question, answer in conversations}


def rl(file: Path, out: Path, **settings) -> list[Prompt]:
    make_pointwise_rl([file], out, **settings)
    return list(read_prompts(Source(out)))


def reward_of(rule: Rule, prompt: Prompt, answer: str) -> float | None:
    reward = PointwiseScore(kind="pointwise_score") if rule == "pointwise_score" else Grade(kind="grade")
    return reward.value(prompt, group(answer).samples[0]).value


@pytest.mark.parametrize(
    ("rule", "endings", "truths"),
    [
        ("pointwise_score", ["2", "9", "7", "7"], ["2", "9", "7", "7"]),
        ("grade", [f"Total Score: {score}/10" for score in (2, 9, 7, 7)], ["0.2", "0.9", "0.7", "0.7"]),
    ],
)
def test_each_candidate_gets_a_row_with_its_analysis_and_score(tmp_path, rule, endings, truths):
    prompts = rl(groups(tmp_path), tmp_path / "rl.parquet", rule=rule)
    targets = sft(groups(tmp_path), tmp_path / "sft.parquet", rule=rule)
    analyses = ["wrong time of day.", "no error.", "grammar.", "style."]
    assert [prompt.ground_truth for prompt in prompts] == truths
    assert [prompt.extra_info["candidate"] for prompt in prompts] == GROUP["mt_texts"]
    answers = [targets[prompt.messages[0]["content"]] for prompt in prompts]
    assert answers == [f"{line}\n\n{ending}" for line, ending in zip(analyses, endings, strict=True)]
    assert {prompt.data_source for prompt in prompts} == {"mt_score" if rule == "pointwise_score" else "grade"}


@pytest.mark.parametrize("rule", RULES)
def test_sft_targets_get_the_highest_reward_and_can_be_parsed(tmp_path, rule):
    targets = sft(groups(tmp_path), tmp_path / "sft.parquet", rule=rule)
    read = Judge(kind="judge", model={"path": "x"}, parser=PARSERS[rule]).reader()  # pyright: ignore
    for prompt in rl(groups(tmp_path), tmp_path / "rl.parquet", rule=rule):
        answer = targets[prompt.messages[0]["content"]]
        assert reward_of(rule, prompt, answer) == pytest.approx(1.0)
        found = read(answer)
        assert found is not None
        assert found.value == float(prompt.ground_truth)


@pytest.mark.parametrize("own_template", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_prompts_match_those_of_judge(tmp_path, rule, own_template):
    """Verbatim, if the policy's task is the same translation request; with a custom template the judge is given the scale."""
    template, scale = None, {}
    if own_template:
        (template := tmp_path / "t.jinja").write_text("{{ task }}|{{ response }}|{{ parser }}|{{ lowest }} to {{ highest }}\n")
        scale = {"lowest": 0, "highest": 10} if rule == "pointwise_score" else {}
    answer = {"pointwise_score": "7", "grade": "Total Score: 7/10"}[rule]
    reward = make("judge", answer, parser=PARSERS[rule], template=None if template is None else str(template), **scale)
    task = [{"role": "user", "content": "Translate from English into German:\n\nGood morning."}]
    collect(reward, replace(group(*GROUP["mt_texts"]), prompt=Prompt("0", task)))
    questions = {text for text, _ in backend_of(reward).calls}
    prompts = rl(groups(tmp_path), tmp_path / "rl.parquet", rule=rule, template=template)
    assert questions == {prompt.messages[0]["content"] for prompt in prompts}


def test_an_analysis_that_cannot_be_split_is_an_error_only_for_sft(tmp_path):
    file = groups(tmp_path, {"analysis": "B is best."})
    with pytest.raises(DataError, match="column 'analysis' cannot be split by candidate, as needed for one row per candidate"):
        make_pointwise_sft([file], tmp_path / "sft.parquet")
    assert not (tmp_path / "sft.parquet").exists()
    assert len(rl(file, tmp_path / "rl.parquet")) == 4


def test_rows_without_any_analysis_can_be_left_out(tmp_path):
    with pytest.raises(DataError, match=r"no rows could be made \(0 rows of 0 groups; 2 bad rows were left out"):
        make_pointwise_sft(
            [groups(tmp_path, {"analysis": ""}, {"analysis": None})], tmp_path / "sft.parquet", skip_bad=True, report=lambda _: None
        )


def test_a_single_candidate_gets_the_full_analysis(tmp_path):
    alone = {"mt_texts": ["Guten Abend."], "scores": [2]}
    for analysis in ("Wrong time of day.", "Translation A: Wrong time of day."):
        [answer] = sft(groups(tmp_path, alone | {"analysis": analysis}), tmp_path / "sft.parquet").values()
        assert answer == "Wrong time of day.\n\n2"


def test_long_candidates_are_left_out_individually(tmp_path):
    texts = ["x" * 50, "y" * 10, "z" * 51, "w"]
    file = groups(tmp_path, {"src_text": "t" * 50, "mt_texts": texts})
    made = make_pointwise_rl([file], tmp_path / "rl.parquet", max_characters=100)
    assert str(made) == "3 rows of 1 groups; 1 candidates were longer than --max-characters"
    assert "zz" not in "".join(sft(file, tmp_path / "sft.parquet", max_characters=100))
    with pytest.raises(DataError, match=r"no rows could be made .*; 4 candidates were longer than --max-characters"):
        make_pointwise_rl([file], tmp_path / "none.parquet", max_characters=10)


@pytest.mark.parametrize(
    ("line", "rule", "message"),
    [
        ("", "pointwise_score", "column 'analysis' has no analysis of candidate D"),
        ("9", "pointwise_score", "the analysis of candidate D already ends with a score"),
        ("fine. Total Score: 3/10", "grade", "the analysis of candidate D already ends with a score"),
    ],
)
def test_an_analysis_unusable_as_a_target_is_refused(tmp_path, line, rule, message):
    file = groups(tmp_path, {"analysis": GROUP["analysis"].replace("style.", line)})
    with pytest.raises(DataError, match=message):
        make_pointwise_sft([file], tmp_path / "sft.parquet", rule=rule)
    assert len(rl(file, tmp_path / "rl.parquet", rule=rule)) == 4


def test_rl_ignores_the_analysis(tmp_path):
    assert len(rl(groups(tmp_path, {"analysis": ["what", "ever"]}), tmp_path / "rl.parquet")) == 4


@pytest.mark.parametrize("make_rows", [make_pointwise_sft, make_pointwise_rl, make_ranking_sft, make_ranking_rl])
@pytest.mark.parametrize(
    ("needs", "message"),
    [
        ("ground_truth", "prepare: template: .*lacks something t.jinja needs"),
        ("extra_info.style", "t.jinja needs extra_info.style; the rows have no such column .found: src_text, src_lang"),
    ],
)
def test_a_template_that_needs_missing_fields_is_reported(tmp_path, make_rows, needs, message):
    (tmp_path / "t.jinja").write_text("{{ " + needs + " }}")
    with pytest.raises(RecipeError, match=message):
        make_rows([groups(tmp_path)], tmp_path / "rows.parquet", template=tmp_path / "t.jinja")


def test_bad_rows_and_templates_are_reported(tmp_path):
    with pytest.raises(DataError, match=r"row 1: column 'scores': 11 should be an integer from 0 to 10"):
        make_pointwise_rl([groups(tmp_path, {"scores": [1, 2, 3, 11]})], tmp_path / "rl.parquet")
    (tmp_path / "t.jinja").write_text("{{ candidates }}")
    with pytest.raises(RecipeError, match="uses candidates, which this kind does not provide"):
        make_pointwise_rl([groups(tmp_path)], tmp_path / "rl.parquet", template=tmp_path / "t.jinja")


def test_commands_never_overwrite_a_file(tmp_path, capsys):
    file = groups(tmp_path)
    for name, verb in (("sft", prepare_pointwise_sft), ("rl", prepare_pointwise_rl)):
        verb([file], tmp_path / f"{name}.parquet")
        assert capsys.readouterr().out == f"{tmp_path / name}.parquet: 4 rows of 1 groups\n"
        with pytest.raises(PlauditError, match="exists; choose another name"):
            verb([file], tmp_path / f"{name}.parquet")


def test_the_same_seed_gives_the_same_bytes(tmp_path):
    file = groups(tmp_path, *({"src_text": f"{i}"} for i in range(9)))
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        make_pointwise_sft([file], tmp_path / name, seed=seed)
    a, b, c = ((tmp_path / name).read_bytes() for name in "abc")
    assert a == b != c


def test_sft_targets_of_real_candidates_get_the_highest_reward(tmp_path, real_data):
    file = real_data / "mt_ranking_ende_test.parquet"
    for rule in RULES:
        prompts = rl(file, tmp_path / f"{rule}.parquet", rule=rule)
        targets = sft(file, tmp_path / f"{rule}-sft.parquet", rule=rule)
        assert len(prompts) > 400
        assert all(reward_of(rule, prompt, targets[prompt.messages[0]["content"]]) == pytest.approx(1.0) for prompt in prompts)


@pytest.mark.slow
def test_rl_improves_on_sft_on_held_out_candidates(tmp_path, real_data):
    """A shorter version of the small run in docs/generative_reward_models.md. RL mainly learns the most common score."""
    rule = "pointwise_score"
    short = {"rule": rule, "max_characters": 400, "template": MINI / "mini_score.jinja"}
    train, test = (real_data / f"mt_ranking_ende_{part}.parquet" for part in ("train", "test"))
    make_pointwise_sft([train], tmp_path / "sft.parquet", **short)
    make_pointwise_rl([train], tmp_path / "rl.parquet", **short)
    make_pointwise_rl([test], tmp_path / "val.parquet", **short)
    cold, rewarded = ["run.max_steps=100", "train.rows_per_step=16"], [f"rewards=[{{kind: {rule}}}]"]
    before, after = before_and_after_rl(tmp_path, cold, rewarded)
    assert after["val/reward"] > before["val/reward"] + 0.05
