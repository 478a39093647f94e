"""`plaudit prepare ranking-sft` and `ranking-rl`: rows from scored translations, and training a judge on them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from plaudit.data.conversations import Source, read_conversations, read_prompts
from plaudit.data.rows import read_rows
from plaudit.errors import DataError, PlauditError, RecipeError
from plaudit.prepare.judge_cli import prepare_ranking_rl, prepare_ranking_sft
from plaudit.prepare.ranking import Headings, make_ranking_rl, make_ranking_sft
from plaudit.prepare.scored_groups import Columns
from plaudit.rewards.judges.parsing import read_letters
from plaudit.rewards.rules.ranking import Ranking
from plaudit.types import Prompt
from support.judges import backend_of, collect, make
from support.rewards import group
from support.rows import write_jsonl
from support.scored_groups import GROUP, MINI, before_and_after_rl, groups


def sft(file: Path, out: Path, **settings) -> list[list[dict]]:
    make_ranking_sft([file], out, **settings)
    return [conversation.messages for _, conversation in read_conversations(Source(out))]


def rl(file: Path, out: Path, **settings) -> list[Prompt]:
    make_ranking_rl([file], out, **settings)
    return list(read_prompts(Source(out)))


def scored(prompt: Prompt, answer: str, **settings) -> float | None:
    return Ranking(kind="ranking", **settings).value(prompt, group(answer).samples[0]).value


# Targets and ground truths -------------------------------------------------------------------------------------------


def test_an_answer_has_analysis_ranking_and_scores_in_ranking_order(tmp_path):
    [[question, answer]] = sft(groups(tmp_path), tmp_path / "sft.parquet")
    assert answer["content"] == GROUP["analysis"] + "\n\nRanking:\nB > C = D > A\nScores:\nB: 9, C: 7, D: 7, A: 2"
    assert "Translate from English into German:\n\nGood morning." in question["content"]
    assert "[C]\nGut Morgen.\n" in question["content"]


@pytest.mark.parametrize(("format", "end"), [("ranking", "B > C = D > A"), ("score", "Scores:\nA: 2, B: 9, C: 7, D: 7")])
def test_an_answer_may_end_with_only_the_ranking_or_the_scores(tmp_path, format, end):
    [[_, answer]] = sft(groups(tmp_path), tmp_path / "sft.parquet", format=format)
    assert answer["content"] == f"{GROUP['analysis']}\n\n{end}"


@pytest.mark.parametrize("format", ["ranking_score", "ranking"])
def test_sft_targets_get_the_highest_reward(tmp_path, format):
    [[question, answer]] = sft(groups(tmp_path), tmp_path / "sft.parquet", format=format)
    [prompt] = rl(groups(tmp_path), tmp_path / "rl.parquet", format=format)
    assert prompt.messages == [question]
    assert scored(prompt, answer["content"], format=format) == (2.0 if format == "ranking_score" else 1.0)
    assert read_letters(answer["content"], "ABCD", format) is not None, "group_judge reads it too"


@pytest.mark.parametrize("template", [None, MINI / "mini.jinja"])
def test_prompts_match_those_of_group_judge(tmp_path, template):
    """Verbatim, if the policy's task is the same translation request: the trained judge sees prompts as in training."""
    reward = make("group_judge", "Ranking:\nA > B\nScores:\nA: 7, B: 3", template=None if template is None else str(template))
    task = [{"role": "user", "content": "Translate from English into German:\n\nGood morning."}]
    collect(reward, replace(group(*GROUP["mt_texts"][:2]), prompt=Prompt("0", task)))
    [(question, _)] = backend_of(reward).calls
    prompts = rl(groups(tmp_path), tmp_path / "rl.parquet", subgroup_augment=99, shuffle_augment=1, template=template)
    assert question in [prompt.messages[0]["content"] for prompt in prompts]


@pytest.mark.parametrize(
    "ending",
    [
        "\nRanking:", "\n\n**Scores:**\n", "\nFinal ranking: B > C = D > A", "\nB > C = D > A\nB: 9, C: 7, D: 7, A: 2",
        "\nHere are the scores:",
    ],
)  # fmt: skip
def test_an_analysis_is_cut_where_it_announces_its_result(tmp_path, ending):
    [[_, answer]] = sft(groups(tmp_path, {"analysis": GROUP["analysis"] + ending}), tmp_path / "sft.parquet")
    assert answer["content"].startswith(GROUP["analysis"] + "\n\nRanking:\nB")


def test_an_analysis_that_merely_mentions_scores_is_not_cut(tmp_path):
    analysis = "B is best.\nThe scores differ little: all are polite."
    [[_, answer]] = sft(groups(tmp_path, {"analysis": analysis}), tmp_path / "sft.parquet")
    assert answer["content"].startswith(analysis + "\n\n")


def test_languages_may_be_names_or_codes(tmp_path):
    named = {"src_lang": "English", "trg_lang": "Plattdeutsch"}
    [[question, _]] = sft(groups(tmp_path, named), tmp_path / "sft.parquet")
    assert "Translate from English into Plattdeutsch:" in question["content"]


def test_a_template_reads_all_of_a_row_and_judges_the_same_way(tmp_path):
    """GRRM's structure. At training time `group_judge` finds the same fields in the extra_info of `translation-rl` rows."""
    (tmp_path / "t.jinja").write_text(
        "From {{ extra_info.src_language }} to {{ extra_info.trg_language }} ({{ extra_info.doc }}).\n\nSource text:\n"
        "```\n{{ extra_info.src_text }}\n```\n\n"
        "{% for c in candidates %}Translation {{ c.letter }}:\n```\n{{ c.text }}\n```\n{% endfor %}"
    )
    two = {"doc": "talk.3", "mt_texts": ["Guten Abend.", " Guten Morgen. "], "scores": [2, 9]}
    [prompt] = rl(groups(tmp_path, two), tmp_path / "rl.parquet", template=tmp_path / "t.jinja")
    assert prompt.messages[0]["content"] == (
        "From English to German (talk.3).\n\nSource text:\n```\nGood morning.\n```\n\n"
        "Translation A:\n```\nGuten Abend.\n```\nTranslation B:\n```\nGuten Morgen.\n```\n"
    )
    reward = make("group_judge", "Ranking:\nA > B\nScores:\nA: 7, B: 3", template=str(tmp_path / "t.jinja"))
    judged = Prompt("0", [{"role": "user", "content": "any other words"}], extra_info={**prompt.extra_info, "doc": "talk.3"})
    collect(reward, replace(group("Guten Abend.", "Guten Morgen."), prompt=judged))
    [(question, _)] = backend_of(reward).calls
    texts = ("Guten Abend.", "Guten Morgen.")
    assert question in [prompt.messages[0]["content"], _swapped(prompt.messages[0]["content"], *texts)]


def _swapped(text: str, a: str, b: str) -> str:
    return text.replace(a, "\0").replace(b, a).replace("\0", b)


def test_headings_are_of_choice_and_the_rule_reads_them(tmp_path):
    headings = Headings("### Final Ranking:", "### Scores:", blank_lines=True)
    [[_, answer]] = sft(groups(tmp_path), tmp_path / "sft.parquet", headings=headings)
    end = "\n\n### Final Ranking:\n\nB > C = D > A\n\n### Scores:\n\nB: 9, C: 7, D: 7, A: 2"
    assert answer["content"] == GROUP["analysis"] + end
    [prompt] = rl(groups(tmp_path), tmp_path / "rl.parquet")
    assert scored(prompt, answer["content"]) == 2.0
    [[_, answer]] = sft(groups(tmp_path), tmp_path / "score.parquet", format="score", headings=Headings(scores=""))
    assert answer["content"] == GROUP["analysis"] + "\n\nA: 2, B: 9, C: 7, D: 7"


def test_an_unknown_language_code_is_an_error_and_a_known_one_in_capitals_is_not(tmp_path):
    with pytest.raises(DataError, match=r"row 2: column 'trg_lang': 'xx' is no known language code \(ar bg .*; write the"):
        make_ranking_rl([groups(tmp_path, {}, {"trg_lang": "xx"})], tmp_path / "rl.parquet")
    [[question, _]] = sft(groups(tmp_path, {"trg_lang": "DE"}), tmp_path / "sft.parquet")
    assert "into German:" in question["content"]


def test_bad_rows_can_be_left_out_named_and_counted(tmp_path):
    lines: list[str] = []
    bad = [{"trg_lang": "xx"}, {"scores": [1, 2, 3, "x"]}, {"mt_texts": ["one"], "scores": [1]}, {"scores": [1]}]
    made = make_ranking_rl([groups(tmp_path, {}, *bad)], tmp_path / "rl.parquet", skip_bad=True, report=lines.append)
    assert str(made) == (
        "1 rows of 1 groups; 4 bad rows were left out (1 with an unknown language, 1 without 2 to 26 mt_texts, "
        "1 without a score in scores for each candidate, 1 with a score that is no integer from 0 to 10)"
    )
    assert [line.partition("groups.jsonl: ")[2].partition(":")[0] for line in lines] == ["row 2", "row 4", "row 5", "row 3"]
    with pytest.raises(DataError, match="more rows have this problem; --skip-bad-rows"):
        make_ranking_rl([groups(tmp_path, {"src_text": ""}, {"src_text": ""})], tmp_path / "rl2.parquet")


def test_jsonl_and_parquet_have_the_same_rows(tmp_path):
    for name in ("rl.parquet", "rl.jsonl"):
        make_ranking_rl([groups(tmp_path, {}, {"src_text": "„x“ \u2028"})], tmp_path / name, shuffle_augment=2)
    assert list(read_rows(tmp_path / "rl.parquet")) == list(read_rows(tmp_path / "rl.jsonl"))


# Augmentation --------------------------------------------------------------------------------------------------------


def test_without_augmentation_rl_rows_keep_the_original_order(tmp_path):
    file = groups(tmp_path, {}, {"src_text": "Good night."})
    first, second = rl(file, tmp_path / "rl.parquet")
    assert first.ground_truth == '{"A": 2, "B": 9, "C": 7, "D": 7}'
    assert first.extra_info["shuffle_indices"] == [0, 1, 2, 3]
    assert second.extra_info["src_text"] == "Good night."
    row = read_rows(tmp_path / "rl.parquet")[0]
    assert set(row) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}


def test_subgroups_and_permutations_are_distinct_and_scored_as_shown(tmp_path):
    prompts = rl(groups(tmp_path), tmp_path / "rl.parquet", subgroup_augment=4, shuffle_augment=4)
    shown = [tuple(prompt.extra_info["shuffle_indices"]) for prompt in prompts]
    sets = {frozenset(places) for places in shown}
    assert len(set(shown)) == len(shown)
    assert len(sets) == 5, "the full group and four subgroups"
    assert all(shown.count(places) == 1 for places in shown)
    assert sum(len(places) == 4 for places in shown) == 5, "the original order and four others"
    assert all(sum(set(places) == set(pair) for places in shown) == 2 for pair in sets if len(pair) == 2), "a pair has two orders"
    for prompt, places in zip(prompts, shown, strict=True):
        assert list(json.loads(prompt.ground_truth).values()) == [GROUP["scores"][i] for i in places]
        assert prompt.extra_info["candidates"] == [GROUP["mt_texts"][i] for i in places]
        assert all(
            f"[{letter}]\n{GROUP['mt_texts'][i]}\n" in prompt.messages[0]["content"]
            for letter, i in zip("ABCD", places, strict=False)
        )


def test_augmentation_stops_at_all_subgroups_and_permutations(tmp_path):
    """For four candidates: 24 orders; 4 subgroups of three with 6 orders each, 6 pairs with 2."""
    assert len(rl(groups(tmp_path), tmp_path / "rl.parquet", subgroup_augment=99, shuffle_augment=99)) == 24 + 4 * 6 + 6 * 2


def test_augmentation_keeps_each_analysis_line_with_its_candidate(tmp_path):
    rows = sft(groups(tmp_path), tmp_path / "sft.parquet", subgroup_augment=99, shuffle_augment=23)
    assert len(rows) == len({row[0]["content"] for row in rows}) == 24 + 4 * 6 + 6 * 2
    analyses = dict(zip(GROUP["mt_texts"], ["wrong time of day.", "no error.", "grammar.", "style."], strict=True))
    scores = dict(zip(GROUP["mt_texts"], GROUP["scores"], strict=True))
    for question, answer in rows:
        lines = answer["content"].split("\n")
        given = dict(item.split(": ") for item in lines[-1].split(", "))
        for i, letter in enumerate(sorted(given)):
            text = question["content"].split(f"[{letter}]\n")[1].split("\n")[0]
            assert lines[i] == f"Translation {letter}: {analyses[text]}"
            assert int(given[letter]) == scores[text]


def test_the_same_seed_gives_the_same_bytes(tmp_path):
    def made(name: str, verb, **settings) -> bytes:
        verb([groups(tmp_path, {}, {"src_text": "Bye."})], tmp_path / name, shuffle_augment=3, **settings)
        return (tmp_path / name).read_bytes()

    for verb in (make_ranking_sft, make_ranking_rl):
        assert made("a.parquet", verb, seed=3) == made("b.parquet", verb, seed=3) != made("c.parquet", verb, seed=4)


def test_long_groups_are_left_out_and_counted(tmp_path):
    file = groups(tmp_path, {}, {"src_text": "x" * 500})
    made = make_ranking_rl([file], tmp_path / "rl.parquet", max_characters=200)
    assert str(made) == "1 rows of 1 groups; 1 groups were longer than --max-characters"
    with pytest.raises(DataError, match=r"no rows could be made .*; 2 groups were longer than --max-characters"):
        make_ranking_rl([file], tmp_path / "none.parquet", max_characters=10)
    assert not (tmp_path / "none.parquet").exists()


def test_the_rule_can_read_the_example_in_the_prompt(tmp_path):
    [plain], [prompt] = rl(groups(tmp_path), tmp_path / "a.parquet"), rl(groups(tmp_path), tmp_path / "b.parquet", add_example=True)
    shown = prompt.messages[0]["content"].removeprefix(plain.messages[0]["content"])
    assert read_letters(shown, "ABC", "ranking_score") is not None


# Bad input -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": [1, 2, 3]}, r"row 2: column 'scores' should have a score for each of the 4 candidates, not 3"),
        ({"scores": [1, 2, 3, 11]}, r"column 'scores': 11 should be an integer from 0 to 10"),
        ({"scores": [1, 2, 3, 4.5]}, r"column 'scores': 4.5 should be"),
        ({"scores": [1, 2, 3, True]}, r"column 'scores': True should be"),
        ({"scores": None}, r"column 'scores' should have a score for each of the 4 candidates, not nothing"),
        ({"mt_texts": ["one"], "scores": [1]}, r"column 'mt_texts' should have 2 to 26 candidates, not 1"),
        ({"mt_texts": "one"}, r"column 'mt_texts' should have 2 to 26 candidates, not str"),
        ({"mt_texts": ["a", "b", None, "d"]}, r"column 'mt_texts', candidate 2 should be text, not nothing"),
        ({"src_text": " "}, r"column 'src_text' should be text"),
        ({"trg_lang": None}, r"column 'trg_lang' should be text, not nothing"),
        ({"analysis": ["a"]}, r"column 'analysis' should be text, not list"),
        ({"analysis": "Ranking:"}, r"column 'analysis' is empty; an answer begins with the analysis"),
    ],
)
def test_a_bad_row_is_reported_with_its_number(tmp_path, change, message):
    with pytest.raises(DataError, match=message):
        make_ranking_sft([groups(tmp_path, {}, change)], tmp_path / "sft.parquet")
    assert not (tmp_path / "sft.parquet").exists()


@pytest.mark.parametrize(
    "analysis",
    [
        "B is best.",
        "A: x\nB: y\nC: z",
        *(GROUP["analysis"].replace("style", text) for text in ("as Translation C", "so B is better", "worse than A", "C and D")),
    ],
)
def test_an_analysis_that_cannot_be_split_is_an_error_only_with_augmentation(tmp_path, analysis):
    file = groups(tmp_path, {"analysis": analysis})
    assert len(sft(file, tmp_path / "one.parquet")) == 1
    with pytest.raises(DataError, match="cannot be split by candidate, as needed for --subgroup-augment and --shuffle-augment"):
        make_ranking_sft([file], tmp_path / "sft.parquet", shuffle_augment=1)
    assert len(rl(file, tmp_path / "rl.parquet", shuffle_augment=1)) == 2, "RL rows need no analysis"


@pytest.mark.parametrize("text", ["A word is missing.", 'minor style in "Plan B" and in „Vitamin C“', "as E would have it"])
def test_a_capital_letter_that_is_not_a_candidate_is_plain_text(tmp_path, text):
    file = groups(tmp_path, {"analysis": GROUP["analysis"].replace("style.", text)})
    assert len(sft(file, tmp_path / "sft.parquet", shuffle_augment=3)) == 4


def test_rl_rows_need_no_analysis_and_accept_integral_floats(tmp_path):
    row = {name: value for name, value in GROUP.items() if name != "analysis"} | {"scores": [2.0, 9.0, 7.0, 7.0]}
    [prompt] = rl(write_jsonl(tmp_path / "groups.jsonl", [row]), tmp_path / "rl.parquet")
    assert json.loads(prompt.ground_truth) == {"A": 2, "B": 9, "C": 7, "D": 7}
    with pytest.raises(DataError, match="column 'analysis' is missing"):
        make_ranking_sft([tmp_path / "groups.jsonl"], tmp_path / "sft.parquet")


def test_a_missing_column_and_an_unknown_template_variable_are_reported(tmp_path):
    with pytest.raises(DataError, match="column 'translations' is missing"):
        make_ranking_rl([groups(tmp_path)], tmp_path / "rl.parquet", columns=Columns(candidates="translations"))
    (tmp_path / "t.jinja").write_text("{{ response }}")
    with pytest.raises(RecipeError, match="uses response, which this kind does not provide"):
        make_ranking_rl([groups(tmp_path)], tmp_path / "rl.parquet", template=tmp_path / "t.jinja")


def test_commands_never_overwrite_a_file(tmp_path, capsys):
    file, out = groups(tmp_path), tmp_path / "new" / "rl.parquet"
    prepare_ranking_rl([file], out, template=MINI / "mini.jinja")
    assert capsys.readouterr().out == f"{out}: 1 rows of 1 groups\n"
    for verb in (prepare_ranking_rl, prepare_ranking_sft):
        with pytest.raises(PlauditError, match="exists; choose another name"):
            verb([file], out)
        with pytest.raises(PlauditError, match=r"should end with .jsonl or .parquet"):
            verb([file], tmp_path / "rows.csv")


# Real groups ---------------------------------------------------------------------------------------------------------


def test_sft_targets_of_real_groups_get_the_highest_reward(tmp_path, real_data):
    file = real_data / "mt_ranking_ende_test.parquet"
    prompts = rl(file, tmp_path / "rl.parquet")
    assert len(prompts) == 114
    target = {question["content"]: answer["content"] for question, answer in sft(file, tmp_path / "sft.parquet", shuffle_augment=2)}
    assert len(target) == 3 * 114
    assert [scored(prompt, target[prompt.messages[0]["content"]]) for prompt in prompts] == [2.0] * 114


@pytest.mark.slow
def test_rl_improves_on_sft_on_held_out_groups(tmp_path, real_data):
    """A shorter version of the small run in docs/generative_reward_models.md. RL mainly makes answers readable."""
    short = {"format": "ranking", "max_characters": 400, "template": MINI / "mini.jinja"}
    train, test = (real_data / f"mt_ranking_ende_{part}.parquet" for part in ("train", "test"))
    make_ranking_sft([train], tmp_path / "sft.parquet", shuffle_augment=23, **short)
    make_ranking_rl([train], tmp_path / "rl.parquet", shuffle_augment=23, **short)
    make_ranking_rl([test], tmp_path / "val.parquet", **short)
    before, after = before_and_after_rl(
        tmp_path, ["run.max_steps=120", "train.rows_per_step=16"], ["run.max_steps=12", "run.validate_every=12"]
    )
    assert after["val/parts/ranking/valid"] > before["val/parts/ranking/valid"] + 0.1
    assert after["val/parts/ranking/ranking"] > before["val/parts/ranking/ranking"] + 0.03
