"""Every form of rows that docs/rows.md lists means the same to every reader; rows are counted from 1."""

import json
import re

import pyarrow as pa
import pyarrow.parquet
import pytest

from plaudit.audit.dumps import read_rollouts
from plaudit.data.columns import has_several_responses
from plaudit.data.conversations import Source, parse_prompt, read_conversations, read_prompts
from plaudit.data.pairs import read_pairs
from plaudit.data.rollouts import parse_group
from plaudit.errors import DataError
from plaudit.prepare.pairs import make_pairs
from plaudit.scoring import Scorer
from support.paths import REPOSITORY
from support.rows import write_jsonl

QUESTION = [{"role": "user", "content": "2 + 3?"}]
RIGHT, WRONG = {"role": "assistant", "content": "It is 5."}, {"role": "assistant", "content": "It is 6."}


def examples(section: str) -> list[list[dict]]:
    """The rows of each block of JSON in a section of docs/rows.md."""
    text = (REPOSITORY / "docs/rows.md").read_text("utf-8").split(f"## {section}\n")[1].split("\n## ")[0]
    return [[json.loads(line) for line in block.splitlines()] for block in re.findall(r"```json\n(.*?)\n```", text, re.S)]


@pytest.fixture(params=["jsonl", "parquet"])
def write(request, tmp_path):
    """Writes one row as a file."""

    def write(row: dict, name: str = "rows"):
        file = tmp_path / f"{name}.{request.param}"
        if request.param == "jsonl":
            return write_jsonl(file, [row])
        pyarrow.parquet.write_table(pa.Table.from_pylist([row]), file)
        return file

    return write


def test_rows_to_sample_from(write):
    [rows] = examples("To sample from")
    for row in rows:
        [prompt] = read_prompts(Source(write(row)))
        assert (prompt.messages, prompt.ground_truth) == (QUESTION, "5"), row


def test_rows_to_score(write):
    one, two = examples("To score")
    for row, texts in [(row, ["It is 5."]) for row in one] + [(row, ["It is 5.", "It is 6."]) for row in two]:
        group = parse_group(row, "id", "row 1")
        assert (group.prompt.messages, group.prompt.ground_truth) == (QUESTION, "5"), row
        assert [sample.text for sample in group.samples] == texts, row
        assert has_several_responses(row) == (len(texts) > 1), row
        [rollout] = read_rollouts([write(row)])
        assert (rollout.prompt.messages, rollout.prompt.ground_truth) == (QUESTION, "5"), row
        assert rollout.responses == tuple(texts), row
        assert rollout.labels == ((1.0, 0.0) if "chosen" in row else (None,) * len(texts))


def test_all_forms_get_the_same_scores():
    one, two = examples("To score")
    with Scorer([{"kind": "contains"}]) as scorer:
        assert [result["reward"] for result in scorer.score(one)] == [1.0] * len(one)
        assert [result["reward"] for result in scorer.score(two)] == [[1.0, 0.0]] * len(two)


def test_rows_for_sft(write):
    [rows] = examples("For SFT")
    for row in rows:
        [(_, conversation)] = read_conversations(Source(write(row)))
        assert conversation.messages == [*QUESTION, RIGHT], row


def test_rl_rows_are_no_sft_rows(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", [{"prompt": QUESTION, "reward_model": {"ground_truth": "5"}}])
    with pytest.raises(DataError, match="Rows for SFT have"):
        list(read_conversations(Source(file)))


def test_pairs(write):
    [rows] = examples("Pairs")
    for row in rows:
        [(_, pair)] = read_pairs(Source(write(row)))
        assert (pair.chosen.messages, pair.rejected.messages) == ([*QUESTION, RIGHT], [*QUESTION, WRONG]), row


def test_scored_rows_of_any_form_make_pairs(tmp_path):
    _, rows = examples("To score")
    scored = [row | {"reward": [1.0, 0.0]} for row in rows if "chosen" not in row]
    question = {"question": "2 + 3?", "completions": ["It is 5.", "It is 6."], "reward": [1.0, 0.0]}
    make_pairs([write_jsonl(tmp_path / "scored.jsonl", [*scored, question])], tmp_path / "pairs", val_share=0)
    pairs = [pair for _, pair in read_pairs(Source(tmp_path / "pairs/train.jsonl"))]
    assert [(pair.chosen.messages, pair.rejected.messages) for pair in pairs] == [([*QUESTION, RIGHT], [*QUESTION, WRONG])] * 3


@pytest.mark.parametrize(
    ("row", "truth"),
    [
        ({"reward_model": {"ground_truth": "5"}, "ground_truth": "6"}, "5"),
        ({"reward_model": {"ground_truth": None}, "ground_truth": "6"}, "6"),
        ({"reward_model": "5", "answer": "6"}, "5"),
        ({"reward_model": 5}, 5),
        ({"reward_model": "", "answer": "6"}, "6"),
        ({"reward_model": '{"style": "rule", "ground_truth": "5"}'}, "5"),
        ({"reward_model": '{"A": 9}'}, '{"A": 9}'),
        ({"reward_model": "{5"}, "{5"),
        ({"ground_truth": ["5", "five"], "answer": "6"}, ["5", "five"]),
        ({"answer": "5", "solution": "2 + 3 = 5"}, "5"),
        ({"ground_truth": 0}, 0),
        ({}, None),
    ],
)
def test_the_first_ground_truth_counts(row, truth):
    assert parse_prompt({"prompt": "2 + 3?", **row}, "id", "row 1").ground_truth == truth


def test_nulls_that_a_table_adds_do_not_count(tmp_path):
    rows = [{"prompt": "2 + 3?", "question": None, "answer": "5"}, {"prompt": None, "question": "2 + 3?", "answer": "5"}]
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert [(p.messages, p.ground_truth) for p in read_prompts(Source(tmp_path / "a.parquet"))] == [(QUESTION, "5")] * 2


def test_extra_info_may_be_json_text():
    assert parse_prompt({"prompt": "p", "extra_info": '{"a": 1}'}, "id", "row 1").extra_info == {"a": 1}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "p"}, r"row 7: has no response \(found: prompt\)\. A row to score has `prompt` and `response`"),
        ({"messages": QUESTION}, "row 7: its messages do not end with an assistant message, so there is no response"),
        ({"messages": [RIGHT]}, "row 7: has no message before the assistant's"),
        ({"prompt": "p", "completions": "It is 5."}, "row 7: `completions` should be a list of texts"),
        ({"prompt": "p", "response": QUESTION}, "row 7: a response should be text, not None"),
        ({"prompt": "p", "chosen": "a", "rejected": 3}, r"row 7: rejected: has no messages \(found int\)"),
        (
            {"chosen": [*QUESTION, RIGHT, *QUESTION, RIGHT], "rejected": [*QUESTION, WRONG, *QUESTION, RIGHT]},
            "row 7: chosen and rejected differ before their last answers",
        ),
    ],
)
def test_rows_without_a_response_are_reported(row, message):
    with pytest.raises(DataError, match=message):
        parse_group(row, "id", "row 7")


def test_a_response_of_several_messages_is_its_last_assistant_message():
    tool = {"role": "tool", "content": "5"}
    row = {"prompt": "2 + 3?", "completion": [RIGHT | {"content": "I add them."}, tool, RIGHT]}
    assert parse_group(row, "id", "row 1").samples[0].text == "It is 5."


def test_rows_are_counted_from_one_everywhere(tmp_path):
    """The second row is at fault each time, and `row 2` in each message."""
    good, bad = {"prompt": "p", "chosen": "a", "rejected": "b"}, {"prompt": 3, "chosen": "a", "rejected": "b"}
    file = write_jsonl(tmp_path / "a.jsonl", [good, bad])
    conversations = write_jsonl(tmp_path / "c.jsonl", [{"messages": [*QUESTION, RIGHT]}, {"messages": 3}])
    scored = write_jsonl(tmp_path / "s.jsonl", [{"prompt": "p", "responses": ["a", "b"], "reward": r} for r in ([1, 0], 3)])
    readers = [
        lambda: list(read_prompts(Source(file))),
        lambda: list(read_pairs(Source(file))),
        lambda: list(read_conversations(Source(conversations))),
        lambda: read_rollouts([file]),
        lambda: Scorer([{"kind": "exact"}]).score([good, bad]),
        lambda: make_pairs([scored], tmp_path / "out"),
    ]
    for read in readers:
        with pytest.raises(DataError, match="row 2: "):
            read()
    assert [prompt.id for prompt in read_prompts(Source(write_jsonl(file, [good])))] == [f"{file.name}:1"]
