"""`plaudit prepare thoughts-sft`: conversations with and without thoughts."""

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plaudit.data.conversations import Source, read_conversations
from plaudit.prepare.thoughts_sft import compose_answer
from plaudit.recipe import View
from plaudit.rewards.view import see
from support.rows import write_jsonl

USER = {"role": "user", "content": "What is 2 + 2?"}
ROW = {"id": "a", "messages": [USER], "thought": "Two and two.", "response": "4", "source": "mine"}


@pytest.fixture
def make(tmp_path, plaudit):
    def run(rows: list[dict], *options: str, out: str = "sft.jsonl") -> tuple[int, str, str, list[dict]]:
        file = write_jsonl(tmp_path / "thoughts.jsonl", rows)
        result = plaudit("prepare", "thoughts-sft", file, "--out", tmp_path / out, *options)
        made = list(Source(tmp_path / out).rows()) if result[0] == 0 else []
        return (*result, made)

    return run


def test_the_turn_has_the_thoughts_before_the_response(make):
    code, out, err, [row] = make([ROW])
    assert code == 0, err
    answer = {"role": "assistant", "content": "<think>\nTwo and two.\n</think>\n\n4"}
    assert row == {"id": "a", "source": "mine", "messages": [USER, answer]}
    assert "1 conversations of 1 rows\n" in out


def test_without_thoughts_the_response_is_the_turn(make):
    _, _, _, [row] = make([ROW], "--without-thoughts", out="sft.parquet")
    assert row["messages"] == [USER, {"role": "assistant", "content": "4"}]
    code, _, _, [row] = make([{"prompt": "Hi", "response": " Hello "}], "--without-thoughts")
    assert code == 0
    assert row == {
        "id": "thoughts.jsonl:1",
        "source": "thoughts.jsonl",
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}],
    }


def test_an_old_answer_is_replaced(make):
    """Files of other systems hold the question with the answer that the data set came with."""
    _, _, _, [row] = make([ROW | {"messages": [USER, {"role": "assistant", "content": "five"}]}])
    assert [message["content"] for message in row["messages"]] == [USER["content"], "<think>\nTwo and two.\n</think>\n\n4"]


@pytest.mark.parametrize("without", [[], ["--without-thoughts"]])
def test_rows_that_cannot_be_trained_on_are_left_out_and_counted(make, without):
    rows = [
        ROW,
        ROW | {"response": "another"},
        ROW | {"id": "b", "response": "</think> 4"},
        ROW | {"id": "c", "thought": "so <response>"},
        ROW | {"id": "d", "response": " "},
        ROW | {"id": "e"},
    ]
    code, out, _, made = make(rows, *without)
    assert code == 0
    assert [row["id"] for row in made] == ["a", "e"]
    assert "4" in made[0]["messages"][-1]["content"]
    assert "2 conversations of 6 rows; 2 left out: tags of thoughts inside; 1 left out: the id of an earlier row" in out


def test_parquet_rows_and_their_nulls(tmp_path, plaudit):
    rows = [ROW, {"id": "b", "messages": [USER | {"name": "Eve"}], "thought": None, "response": "4", "source": None}]
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    code, out, err = plaudit("prepare", "thoughts-sft", tmp_path / "rows.parquet", "--out", tmp_path / "sft.parquet")
    assert code == 0, err
    assert "1 left out: no response, or no thought" in out
    [(_, conversation)] = read_conversations(Source(tmp_path / "sft.parquet"))
    assert conversation.messages[0] == USER


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "response": "b"}, "column 'thought' is missing"),
        ({"prompt": "a", "thought": "b"}, "column 'response' is missing"),
        (ROW | {"thought": ["a"]}, "thoughts.jsonl: row 1: column 'thought' should be text, not list"),
        (ROW | {"messages": []}, "thoughts.jsonl: row 1: has no messages"),
        (ROW | {"thought": ""}, "no conversations could be made"),
    ],
)
def test_rows_of_another_kind_are_named(make, row, message):
    code, _, err, _ = make([row])
    assert code == 2
    assert message in err


def test_an_existing_file_is_not_overwritten(make):
    assert make([ROW])[0] == 0
    code, _, err, _ = make([ROW])
    assert code == 2
    assert "exists; choose another name" in err


WORDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<>"), min_size=1).filter(str.strip)


@given(WORDS, WORDS)
def test_a_reward_sees_the_response_of_a_turn(thought, response):
    answer = compose_answer(thought, response)
    assert answer is not None
    assert see(View(think="strict"), answer).text == response.strip()
