"""`plaudit prepare pairs`: which responses may be in a pair, and pairs of all candidates of a group."""

import json
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plaudit.data.conversations import Source
from plaudit.data.pairs import read_pairs
from plaudit.data.rollouts import parse_group
from plaudit.data.templates import load_template, load_tokenizer
from plaudit.prepare.pairs import PairRules, _choose
from support.rows import write_jsonl
from support.scored_groups import GROUP


def row(responses: list, rewards: list, prompt: str = "?", **columns) -> dict:
    return {"prompt": [{"role": "user", "content": prompt}], "responses": responses, "reward": rewards, **columns}


@pytest.fixture
def pairs(tmp_path, plaudit):
    def run(rows: list[dict], *options: object) -> tuple[int, str, str, list[dict]]:
        file = write_jsonl(tmp_path / "scored.jsonl", rows)
        result = plaudit("prepare", "pairs", file, "--out", tmp_path / "pairs", "--val-share", 0, *options)
        made = tmp_path / "pairs/train.jsonl"
        return (*result, [json.loads(line) for line in made.read_text().splitlines()] if made.exists() else [])

    return run


def sides(made: list[dict]) -> list[tuple[str, str]]:
    return sorted((pair["chosen"], pair["rejected"]) for pair in made)


# Which responses -----------------------------------------------------------------------------------------------------


def test_a_malformed_response_is_never_rejected(pairs):
    """Its score says nothing about its answer: nobody has read it."""
    code, out, _, made = pairs([row(["a", "b", "c"], [3.0, -9.0, 1.0], malformed=[False, True, False])])
    assert code == 0
    assert sides(made) == [("a", "c")]
    assert "; responses left out: 1 malformed\n" in out


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), float("-inf")])
def test_a_reward_that_is_not_finite_is_no_score(pairs, reward):
    code, out, _, made = pairs([row(["a", "b", "c"], [reward, 1.0, 2.0])])
    assert code == 0
    assert sides(made) == [("c", "b")]
    assert "; responses left out: 1 without a score\n" in out


def test_what_was_left_out_is_counted_by_reason(pairs):
    rows = [
        row(
            ["a", "b", "cut", " ", "none", "long", "bad"], [2.0, 1.0, 9.0, 9.0, None, 9.0, 9.0],
            status=["finished"] * 2 + ["truncated"] + ["finished"] * 4, tokens=[1, 1, 9, 1, 1, 99, 1],
            malformed=[False] * 6 + [True],
        ),
    ]  # fmt: skip
    _, out, _, made = pairs(rows, "--max-response-tokens", 50)
    assert sides(made) == [("a", "b")]
    for reason in ("1 truncated", "1 empty", "1 without a score", "1 malformed", "1 longer than 50 tokens"):
        assert reason in out.partition("responses left out: ")[2]


def test_the_limit_is_on_prompt_and_response_together(pairs, tiny_model):
    template = load_template(load_tokenizer(str(tiny_model)), None)
    long_prompt = row(["yes", "no"], [1.0, 0.0], prompt="word " * 40)
    short_prompt = row(["yes", "no", "word " * 40], [1.0, 0.0, -1.0])
    limit = len(template.conversation_tokens([*short_prompt["prompt"], {"role": "assistant", "content": "yes"}]))
    code, out, _, made = pairs([long_prompt, short_prompt], "--max-tokens", limit, "--tokenizer", tiny_model)
    assert code == 0
    assert sides(made) == [("yes", "no")]
    assert f"1 had too few responses; responses left out: 3 longer than {limit} tokens with the prompt\n" in out


def test_a_limit_on_tokens_needs_a_tokenizer(pairs):
    for options in (["--max-tokens", 5], ["--tokenizer", "models/none"]):
        code, _, err, _ = pairs([row(["a", "b"], [1.0, 0.0])], *options)
        assert code == 2
        assert "--max-tokens and --tokenizer belong together" in err


def test_prompts_with_few_responses_are_left_out(pairs):
    _, out, _, made = pairs([row(["a", "b", "c"], [1.0, 2.0, 3.0]), row(["d", "e"], [1.0, 2.0])], "--min-responses", 3)
    assert sides(made) == [("c", "a")]
    assert "1 had too few responses" in out


def test_thoughts_and_answers_become_the_text_of_the_policy(pairs):
    """As it was sampled, if the row has that; else as SFT on thoughts writes it."""
    responses = [
        {"thought": "hm", "answer": "4"},
        {"thought": "so", "answer": "5", "text": "<think> so </think> <response> 5 </response>"},
        {"thought": "never ends", "answer": None},
    ]
    _, out, _, made = pairs([row(responses, [1.0, 0.0, -5.0])])
    assert sides(made) == [("<think>\nhm\n</think>\n\n4", "<think> so </think> <response> 5 </response>")]
    assert "left out: 1 malformed" in out


def test_a_column_of_another_length_is_named(pairs):
    for column in ("status", "malformed"):
        code, _, err, _ = pairs([row(["a", "b"], [1.0, 2.0], **{column: [True]})])
        assert code == 2
        assert f"scored.jsonl: row 1: `{column}` should be a list with an entry for each of the 2 responses" in err


# All pairs -----------------------------------------------------------------------------------------------------------

SCORED = st.lists(st.tuples(st.integers(0, 4).map(float), st.text("ab", min_size=1, max_size=2)), min_size=2, max_size=6)


@given(SCORED, st.sampled_from([0.0, 1.0]))
def test_all_pairs_are_those_whose_scores_differ(scored, margin):
    made = _choose(scored, PairRules(min_margin=margin, all_pairs=True))
    expected = [pair for pair in combinations(scored, 2) if abs(pair[0][0] - pair[1][0]) > margin and pair[0][1] != pair[1][1]]
    assert [{*pair} for pair in made] == [{*pair} for pair in expected]
    assert all(good[0] > bad[0] for good, bad in made)
    best = _choose(scored, PairRules(min_margin=margin))
    assert len(best) <= 1
    for good, bad in best:
        assert (good[0], bad[0]) == (max(scored)[0], min(scored)[0])


def test_groups_of_scored_translations_make_pairs_for_a_reward_model(tmp_path, plaudit):
    """Scores 2, 9, 7, 7: five of the six pairs differ."""
    file = write_jsonl(tmp_path / "groups.jsonl", [GROUP])
    code, out, err = plaudit("prepare", "pairs", file, "--out", tmp_path / "pairs", "--all-pairs")
    assert code == 0, err
    assert "5 pairs to train on, 0 to validate on, of 1 prompts" in out
    first, second, third, fourth = GROUP["mt_texts"]
    made = [pair for _, pair in read_pairs(Source(tmp_path / "pairs/train.jsonl"))]
    assert {(pair.chosen.messages[-1]["content"], pair.rejected.messages[-1]["content"]) for pair in made} == {
        (second, first), (third, first), (fourth, first), (second, third), (second, fourth),
    }  # fmt: skip
    prompt = made[0].chosen.messages[0]["content"]
    assert prompt.startswith("Translate from ")
    assert prompt.endswith(GROUP["src_text"])


def test_pairs_of_one_group_are_all_on_one_side(tmp_path, plaudit):
    rows = [GROUP | {"src_text": f"Text {i}"} for i in range(20)]
    file = write_jsonl(tmp_path / "groups.jsonl", rows)
    assert plaudit("prepare", "pairs", file, "--out", tmp_path / "pairs", "--all-pairs", "--val-share", 0.2)[0] == 0
    train, val = (
        {pair.chosen.messages[0]["content"] for _, pair in read_pairs(Source(tmp_path / f"pairs/{name}.jsonl"))}
        for name in ("train", "val")
    )
    assert len(train) + len(val) == 20
    assert not train & val


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"src_text": ""}, "groups.jsonl: row 1: column 'src_text' should be text"),
        ({"trg_lang": "xx"}, "row 1: column 'trg_lang': 'xx' is no known language code"),
        ({"scores": [1, 2]}, "row 1: there should be a score for each of the 4 responses, not 2"),
        ({"scores": [1, 2, "good", 4]}, "row 1: column 'scores': 'good' should be a number"),
        ({"scores": 3}, "row 1: column 'scores' should be a list of numbers, not int"),
    ],
)
def test_a_group_that_cannot_be_used_is_named(tmp_path, plaudit, change, message):
    file = write_jsonl(tmp_path / "groups.jsonl", [GROUP | change])
    code, _, err = plaudit("prepare", "pairs", file, "--out", tmp_path / "pairs", "--all-pairs")
    assert code == 2
    assert message in err


# Scoring responses that have their thoughts apart --------------------------------------------------------------------

EXACT = """
rewards:
  - {kind: exact, view: {VIEW}}
"""


@pytest.mark.parametrize("view", ["{}", "{think: strip}", "{think: strict}", "{extract: line}"])
def test_only_the_answer_is_scored(tmp_path, plaudit, view):
    """Whatever the view says of thoughts: they are apart already."""
    responses = [{"thought": "is it 5?", "answer": "4"}, {"thought": "4", "answer": "5"}, {"thought": "4", "answer": None}]
    file = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "2 + 2?", "responses": responses, "ground_truth": "4"}])
    (tmp_path / "r.yaml").write_text(EXACT.replace("{VIEW}", view))
    code, _, err = plaudit("score", tmp_path / "r.yaml", file, "--out", tmp_path / "scored.jsonl")
    assert code == 0, err
    [scored] = Source(tmp_path / "scored.jsonl").rows()
    assert scored["reward"] == [1.0, 0.0, 0.0]
    assert scored["malformed"] == [False, False, True]
    assert scored["view"][:2] == ["4", "5"]
    assert scored["responses"] == responses, "the thoughts stay in the row"


def test_a_single_response_may_have_its_thoughts_apart():
    group = parse_group({"prompt": "?", "response": {"thought": "a", "answer": "b"}}, "id", "here")
    [sample] = group.samples
    assert (sample.text, sample.answer) == ("<think>\na\n</think>\n\nb", "b")  # pyright: ignore
    with pytest.raises(ValueError, match="here: the thought and the answer of a response should be text"):
        parse_group({"prompt": "?", "response": {"thought": 1, "answer": "b"}}, "id", "here")
