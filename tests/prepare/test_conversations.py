"""`plaudit prepare conversations`: which turns become a prompt, what is left out, and the split."""

import pyarrow as pa
import pyarrow.parquet
import pytest

from plaudit.data.conversations import Source, read_prompts
from plaudit.data.templates import load_template, load_tokenizer
from support.rows import write_jsonl


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict:
    return {"role": "assistant", "content": text}


TURNS = [user("Hello there"), assistant("Hi!"), user("Tell me a joke"), assistant("No.")]


@pytest.fixture
def make(tmp_path, plaudit):
    def run(rows: list[dict], *options: object) -> tuple[int, str, str]:
        file = write_jsonl(tmp_path / "chats.jsonl", rows)
        return plaudit("prepare", "conversations", file, "--out", tmp_path / "out", *options)

    return run


@pytest.fixture
def prompts(tmp_path):
    def read(split: str = "train", format: str = "parquet") -> list:
        return list(read_prompts(Source(tmp_path / f"out/{split}.{format}")))

    return read


@pytest.mark.parametrize(
    "row",
    [
        {"conversation": [turn | {"language": "English", "toxic": False} for turn in TURNS], "language": "English"},
        {"messages": TURNS},
        {"conversations": [{"from": "human" if t["role"] == "user" else "gpt", "value": t["content"]} for t in TURNS]},
        {"prompt": "Hello there"},
        {"instruction": "Hello there"},
    ],
)
def test_the_first_user_message_is_the_prompt(make, prompts, row):
    code, _, err = make([row | {"id": 7, "source": "web"}], "--data-source", "wildchat")
    assert code == 0, err
    [prompt] = prompts()
    assert prompt.messages == TURNS[:1]
    assert prompt.data_source == "wildchat"
    assert prompt.ground_truth is None
    assert prompt.extra_info == {"split": "train", "index": 0, "id": "7", "source": "web", "ability": "chat"}


def test_all_turns_end_with_the_last_user_message(make, prompts):
    system = {"role": "system", "content": "Be kind."}
    assert make([{"messages": [system, *TURNS, user(" "), assistant("")]}], "--all-turns")[0] == 0
    [prompt] = prompts()
    assert prompt.messages == [system, *TURNS[:3]]
    assert prompt.extra_info["id"] == "chats.jsonl:1"


def test_what_is_left_out_is_counted_by_reason(make, prompts):
    rows = [
        {"messages": [user("Write a poem about the sea")]},
        {"messages": [user("  write a POEM\nabout the sea ")]},
        {"messages": [assistant("Hello")]},
        {"messages": [user("Schreib mir bitte ein Gedicht über das Meer und die Berge")]},
        {"messages": [user("Write a poem")], "language": "Welsh"},
        {"messages": [user("x" * 200)]},
        {"messages": [user("y")]},
    ]
    code, out, err = make(rows, "--english", "--min-characters", 3, "--max-characters", 100)
    assert code == 0, err
    assert [prompt.messages[0]["content"] for prompt in prompts()] == ["Write a poem about the sea"]
    assert "1 prompts to train on, 0 to validate on, of 7 rows; 2 left out: not in English; " in out
    for reason in ("the prompt of an earlier row", "no user message", "longer than 100 characters", "shorter than 3 characters"):
        assert f"1 left out: {reason}" in out


def test_duplicates_can_be_kept(make, prompts):
    assert make([{"prompt": "same"}, {"prompt": "Same "}], "--keep-duplicates", "--val", 0)[0] == 0
    assert len(prompts()) == 2


def test_the_limit_in_tokens_is_the_template_s(make, prompts, tiny_model):
    template = load_template(load_tokenizer(str(tiny_model)), None)
    limit = len(template.prompt_tokens([user("short")]))
    code, out, _ = make([{"prompt": "short"}, {"prompt": "much longer " * 9}], "--max-tokens", limit, "--tokenizer", tiny_model)
    assert code == 0
    assert [prompt.messages[0]["content"] for prompt in prompts()] == ["short"]
    assert f"1 left out: longer than {limit} tokens" in out


def test_the_split_follows_the_seed_and_is_disjoint(tmp_path, plaudit):
    file = write_jsonl(tmp_path / "chats.jsonl", [{"prompt": f"question {i}"} for i in range(100)])
    read = {}
    for name, options in {"a": [], "again": [], "b": ["--seed", 1], "count": ["--val", 10, "--max-prompts", 50]}.items():
        code, _, err = plaudit("prepare", "conversations", file, "--out", tmp_path / name, "--format", "jsonl", *options)
        assert code == 0, err
        read[name] = [(tmp_path / name / f"{split}.jsonl").read_text() for split in ("train", "val")]
    assert read["a"] == read["again"] != read["b"]
    assert [text.count("\n") for text in read["a"]] == [97, 3]
    assert [text.count("\n") for text in read["count"]] == [40, 10]
    train, val = ({p.messages[0]["content"] for p in read_prompts(Source(tmp_path / f"a/{s}.jsonl"))} for s in ("train", "val"))
    assert len(train | val) == 100


def test_parquet_with_nulls_for_the_keys_of_other_rows(tmp_path, plaudit):
    rows = [{"conversation": [user("Hi") | {"country": "UK"}]}, {"conversation": [user("Hello")]}, {"conversation": None}]
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    code, _, err = plaudit("prepare", "conversations", tmp_path / "rows.parquet", "--out", tmp_path / "out")
    assert code == 2
    assert "rows.parquet: row 3: has no messages" in err


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([{"text": "a"}], [], "column 'messages' is missing"),
        ([{"messages": [{"role": "user"}]}], [], "chats.jsonl: row 1: a message should have `role` and `content`"),
        ([{"prompt": "a"}], ["--val", 1], "--val: 1 of 1 prompts leave none to train on"),
        ([{"prompt": " "}], [], "no prompts could be made"),
        ([{"prompt": "a"}], ["--max-tokens", 5], "--max-tokens and --tokenizer belong together"),
        ([], [], "the file is empty"),
    ],
)
def test_mistakes_are_named(make, rows, options, message):
    code, _, err = make(rows, *options)
    assert code == 2
    assert message in err


def test_real_prompts(real_data, tmp_path, plaudit):
    code, out, err = plaudit(
        "prepare", "conversations", real_data / "wildchat_if_val.parquet", "--out", tmp_path / "out", "--english", "--val", 50
    )
    assert code == 0, err
    assert "to train on, 50 to validate on, of 250 rows" in out
    assert len(list(read_prompts(Source(tmp_path / "out/train.parquet")))) > 150
