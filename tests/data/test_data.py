"""Reading files into conversations and prompts, the order of rows, and packing."""

import json
import math
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plaudit.data.conversations import Source, read_conversations, read_prompts, resolve_sources
from plaudit.data.examples import cut
from plaudit.data.order import RowOrder
from plaudit.data.pack import micro_batches, pack, split_by_tokens
from plaudit.data.row_ids import name_sources
from plaudit.data.rows import read_rows
from plaudit.errors import DataError, RecipeError
from plaudit.seeding import stable_seed
from plaudit.types import Example
from support.rows import arithmetic_rows, write_jsonl

USER, ASSISTANT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}
HI_HO = [("user", "hi"), ("assistant", "ho")]


def write_parquet(path: Path, rows: list[dict], **options) -> Path:
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path, **options)
    return path


def turns(source: Source | Path) -> list[list[tuple[str, str]]]:
    """Role and content of each message, row by row."""
    source = source if isinstance(source, Source) else Source(source)
    return [[(m["role"], m["content"]) for m in c.messages] for _, c in read_conversations(source)]


def error_of(read, *arguments) -> str:
    """The one-line message of the DataError."""
    with pytest.raises(DataError) as caught:
        list(read(*arguments))
    message = str(caught.value)
    assert message
    assert "\n" not in message
    return message


# Files ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Folders written by the datasets library: one file, shards, a selection, splits, no rows."""
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    folder = tmp_path_factory.mktemp("saved")
    dataset = datasets.Dataset.from_list(arithmetic_rows())
    dataset.save_to_disk(folder / "one")
    dataset.save_to_disk(folder / "shards", num_shards=3)
    dataset.select([5, 3, 8]).save_to_disk(folder / "selected")
    datasets.DatasetDict({"train": dataset, "test": dataset}).save_to_disk(folder / "splits")
    dataset.select([]).save_to_disk(folder / "empty")
    return folder


@pytest.fixture(scope="module")
def files(tmp_path_factory, saved) -> dict[str, Path]:
    """The same rows in every format."""
    folder, rows = tmp_path_factory.mktemp("files"), arithmetic_rows()
    (folder / "list.json").write_text(json.dumps(rows, indent=1))
    (folder / "bom.json").write_text(json.dumps(rows), encoding="utf-8-sig")
    blank = write_jsonl(folder / "blank.jsonl", rows)
    blank.write_text("\n" + blank.read_text().replace("\n", "\r\n\r\n"), encoding="utf-8-sig")
    return {
        "parquet": write_parquet(folder / "rows.parquet", rows),
        "row groups": write_parquet(folder / "groups.parquet", rows, row_group_size=7),
        "jsonl": write_jsonl(folder / "rows.jsonl", rows),
        "jsonl from Windows": blank,
        "json": folder / "list.json",
        "json from Windows": folder / "bom.json",
        "json lines in .json": write_jsonl(folder / "lines.json", rows),
        "saved": saved / "one",
        "saved in shards": saved / "shards",
    }


FORMATS = ["parquet", "row groups", "jsonl", "jsonl from Windows", "json", "json from Windows", "json lines in .json", "saved",
           "saved in shards"]  # fmt: skip


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_gives_the_same_rows(files, kind):
    expected = arithmetic_rows()
    rows = read_rows(files[kind])
    assert list(rows) == expected
    assert len(rows) == len(expected)
    assert rows.columns == ["messages"]
    assert rows[7] == rows[7 - len(rows)] == expected[7]
    assert rows[2:50:11] == expected[2:50:11]
    with pytest.raises(IndexError):
        rows[len(rows)]


def test_a_saved_selection_is_read_in_its_order(saved):
    assert list(read_rows(saved / "selected")) == [arithmetic_rows()[i] for i in (5, 3, 8)]


def test_a_folder_with_several_splits_is_refused(saved):
    message = error_of(read_rows, saved / "splits")
    assert "has several splits; name one: " in message
    assert str(saved / "splits" / "train") in message
    assert str(saved / "splits" / "test") in message
    assert len(read_rows(saved / "splits" / "train")) == 60


def test_broken_folders_are_reported(saved, tmp_path):
    assert "has no rows" in error_of(read_rows, saved / "empty")
    assert "not a folder made by save_to_disk" in error_of(read_rows, tmp_path)
    for state in ("not JSON", "{}", '{"_data_files": [{"filename": "gone.arrow"}]}'):
        (tmp_path / "state.json").write_text(state)
        assert f"{tmp_path}: not a complete save_to_disk folder" in error_of(read_rows, tmp_path)
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "cut.arrow"}]}')
    complete = (saved / "one" / "data-00000-of-00001.arrow").read_bytes()
    for size in (0, 10, len(complete) // 2):
        (tmp_path / "cut.arrow").write_bytes(complete[:size])
        assert "not a complete save_to_disk folder" in error_of(read_rows, tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", ": the file is empty"),
        ("a.parquet", b"", ": the file is empty"),
        ("a.json", b"", ": the file is empty"),
        ("a.jsonl", b"\n \n", ": has no rows"),
        ("a.json", b"[]", ": has no rows"),
        ("a.jsonl", b'{"a": 1}\n\n{"a": 2\n', ":3: not valid JSON: Expecting ',' delimiter at column"),
        ("a.jsonl", b'{"a": 1}\n[1]\n', ":2: a row should be an object with columns, not list"),
        ("a.jsonl", b'{"a": 1}\n{"a": "\xff"}\n', ":2: not UTF-8 text: invalid start byte"),
        ("a.json", b'[{"a": 1},\n{"a": 2},\n{"a"}]', ":3: not valid JSON: Expecting ':' delimiter at column"),
        ("a.json", b'[{"a": 1},\n{"a": "\xff"}]', ":2: not UTF-8 text"),
        ("a.json", b'{"a": 1}\n{"a": 2\n', ":2: not valid JSON"),
        ("a.json", b'{"rows": []}', ": should be a list of rows, not dict"),
        ("a.json", b"[1]", ": row 1: a row should be an object with columns, not int"),
        ("a.csv", b"a,b", ": cannot read *.csv files; rows come as .parquet, .jsonl, .json or a save_to_disk folder"),
        ("a", b"a,b", ": cannot read *a files"),
        ("a.parquet", b"PAR1 is not enough", ": not a complete parquet file: "),
    ],
)
def test_broken_files_are_reported(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    assert error_of(read_rows, tmp_path / name).startswith(f"{tmp_path / name}{message}")


def test_truncated_parquet_is_reported(files, tmp_path):
    complete = files["parquet"].read_bytes()
    for size in (4, len(complete) // 2, len(complete) - 1):
        (tmp_path / "cut.parquet").write_bytes(complete[:size])
        assert "cut.parquet: not a complete parquet file" in error_of(read_rows, tmp_path / "cut.parquet")


def test_parquet_without_rows_is_refused(tmp_path):
    pyarrow.parquet.write_table(pa.table({"messages": pa.array([], pa.string())}), tmp_path / "a.parquet")
    assert error_of(read_rows, tmp_path / "a.parquet").endswith("a.parquet: has no rows")


def test_a_folder_that_looks_like_a_partition_adds_no_column(tmp_path):
    (tmp_path / "lang=en").mkdir()
    assert read_rows(write_parquet(tmp_path / "lang=en" / "a.parquet", [{"a": 1}])).columns == ["a"]


def test_a_missing_file_suggests_the_nearest_one(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", [{"messages": [USER, ASSISTANT]}])
    assert error_of(read_rows, tmp_path / "tain.jsonl").endswith(f" Did you mean {tmp_path / 'train.jsonl'}?")
    missing = error_of(resolve_sources, [str(tmp_path / "trains.jsonl")], None, "data.train")
    assert missing.startswith(f"data.train: {tmp_path / 'trains.jsonl'} does not exist. Did you mean ")


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_a_missing_column_is_reported_with_those_found(tmp_path, write):
    path = write(tmp_path / ("a.jsonl" if write is write_jsonl else "a.parquet"), [{"text": "x", "label": 1}])
    message = error_of(read_conversations, Source(path))
    assert message.startswith(f"{path}: column 'messages' is missing (found: text, label). Rows for SFT have `messages`")
    assert f"{path}: column 'prompt' is missing (found: text, label)." in error_of(read_prompts, Source(path))


# Conversations -------------------------------------------------------------------------------------------------------


def sharegpt(**turns: str) -> dict:
    return {"conversations": [{"from": role, "value": text} for role, text in turns.items()]}


def parts(*texts: str) -> list[dict]:
    return [{"type": "text", "text": text} for text in texts]


ALPACA = {"instruction": "add", "input": "1 2", "output": "3", "system": "count", "history": [["hi", "ho"], ["a", "b"]]}


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": [USER, ASSISTANT]}, HI_HO),
        ({"messages": [{"role": "developer", "content": "x"}, USER, ASSISTANT]}, [("developer", "x"), *HI_HO]),
        ({"messages": [USER | {"content": parts("h", "i")}, ASSISTANT | {"content": parts("ho")}]}, HI_HO),
        ({"messages": [USER, ASSISTANT], "prompt": "other", "response": "other"}, HI_HO),
        (sharegpt(human="hi", gpt="ho"), HI_HO),
        (sharegpt(human="hi", gpt="ho") | {"system": "s"}, [("system", "s"), *HI_HO]),
        (sharegpt(system="t", human="hi", gpt="ho") | {"system": "s"}, [("system", "t"), *HI_HO]),
        (
            sharegpt(human="hi", function_call="f", observation="o", gpt="ho"),
            [("user", "hi"), ("assistant", "f"), ("tool", "o"), ("assistant", "ho")],
        ),
        ({"prompt": "hi", "response": "ho"}, HI_HO),
        ({"prompt": "hi", "completion": "ho"}, HI_HO),
        ({"prompt": [USER], "response": [ASSISTANT]}, HI_HO),
        ({"prompt": [{"role": "system", "content": "s"}, USER], "completion": "ho"}, [("system", "s"), *HI_HO]),
        ({"instruction": "hi", "output": "ho"}, HI_HO),
        ({"instruction": "hi", "input": "", "output": "ho", "system": "", "history": []}, HI_HO),
        ({"instruction": "", "input": "hi", "output": "ho"}, HI_HO),
        (ALPACA, [("system", "count"), *HI_HO, ("user", "a"), ("assistant", "b"), ("user", "add\n1 2"), ("assistant", "3")]),
    ],
)
def test_schemas_are_recognised_by_their_columns(tmp_path, write, row, expected):
    path = write(tmp_path / ("a.jsonl" if write is write_jsonl else "a.parquet"), [row])
    assert turns(path) == [expected]


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_a_file_may_mix_schemas(tmp_path, write):
    rows = [
        {"instruction": "hi", "output": "ho"},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]},
        {"question": "hi", "answer": "ho"},
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}], "answer": "7"},
    ]
    if write is write_parquet:  # a table has all columns in each row
        names = dict.fromkeys(name for row in rows for name in row)
        rows = [{name: row.get(name) for name in names} for row in rows]
    path = write(tmp_path / ("a.jsonl" if write is write_jsonl else "a.parquet"), rows)
    assert turns(path) == [HI_HO] * 4


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": None}, "has no messages (found nothing)"),
        ({"messages": []}, "has no messages (found an empty list)"),
        ({"messages": "hello"}, "has no messages (found str)"),
        ({"other": 1}, "has no messages (found nothing)"),
        ({"messages": ["hello"]}, "a message should have `role` and `content`, not str"),
        ({"messages": [{"from": "human", "value": "hi"}]}, "should have `role` and `content`, not from, value"),
        (
            {"messages": [USER | {"role": "assistent"}]},
            "role 'assistent' is not one of system, developer, user, assistant, tool. Did you mean assistant?",
        ),
        ({"messages": [USER | {"content": 7}]}, "content should be text, not int"),
        ({"messages": [USER | {"content": [{"type": "image", "image": "x"}]}]}, "not list (images and audio are not supported)"),
        ({"messages": [USER]}, "has no assistant message, so there is nothing to train on"),
        ({"messages": [USER, ASSISTANT | {"content": " \n"}]}, "every assistant message is empty"),
        ({"messages": [USER, ASSISTANT | {"content": None}]}, "every assistant message is empty"),
        ({"messages": [USER, ASSISTANT], "tools": "[{"}, "tools are not valid JSON"),
        ({"messages": [USER, ASSISTANT], "tools": {"name": "f"}}, "tools should be a list, not dict"),
        ({"conversations": [USER]}, "should have `from` and `value`, not role, content; map the names in dataset_info.json"),
        (sharegpt(bot="hi"), "role 'bot' is not one of the tags human, gpt, observation, function_call, system; map it"),
        ({"conversations": [{"from": ["gpt"], "value": "hi"}]}, "role ['gpt'] is not one of the tags"),
        ({"conversations": "hello"}, "has no messages (found str)"),
        ({"prompt": "hi", "response": None}, "has no messages (found nothing)"),
        ({"instruction": "hi", "output": None}, "every assistant message is empty"),
        ({"instruction": "hi", "output": 3}, "content should be text, not int"),
        ({"instruction": "hi", "output": "ho", "history": [["a"]]}, "history should be a list of [question, answer]"),
        ({"instruction": "hi", "output": "ho", "history": "abc"}, "history should be a list of [question, answer]"),
        ({"instruction": "hi", "output": "ho", "history": [["a", 1]]}, "content should be text, not int"),
    ],
)
def test_rows_that_cannot_be_trained_on_are_reported(tmp_path, row, message):
    good = next(
        good
        for good in (
            sharegpt(human="hi", gpt="ho"),
            {"prompt": "hi", "response": "ho"},
            {"instruction": "hi", "output": "ho"},
            {"messages": [USER, ASSISTANT]},
        )
        if good.keys() & row.keys() or "messages" in good
    )
    path = write_jsonl(tmp_path / "a.jsonl", [good, row])
    assert error_of(read_conversations, Source(path)).startswith(f"{path}: row 2: ")
    assert message in error_of(read_conversations, Source(path))


def test_keys_added_by_parquet_are_removed(tmp_path):
    """Arrow gives every struct the keys of all rows; to a template, a key that is null counts as present."""
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    other = {"type": "function", "function": {"name": "time", "arguments": {"zone": "CET"}}}
    tools = [
        {"name": "weather", "parameters": {"city": {"type": "string"}}},
        {"name": "time", "parameters": {"zone": {"type": "string"}}},
    ]
    messages = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call, other]},
        {"role": "tool", "content": "fine", "name": "weather"},
        ASSISTANT | {"reasoning_content": "hm"},
    ]
    path = write_parquet(tmp_path / "a.parquet", [{"messages": messages, "tools": tools}])
    [(_, conversation)] = read_conversations(Source(path))
    assert conversation.messages == messages
    assert conversation.tools == tools


def test_meaningful_nulls_in_json_are_kept(tmp_path):
    call = {"type": "function", "function": {"name": "f", "arguments": {"unit": None}}}
    messages = [USER | {"name": None}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    [(_, conversation)] = read_conversations(Source(write_jsonl(tmp_path / "a.jsonl", [{"messages": messages}])))
    assert conversation.messages == [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]


@pytest.mark.parametrize(("tools", "expected"), [('[{"name": "f"}]', [{"name": "f"}]), ("", None), ("[]", None), (None, None)])
def test_tools_may_be_json_text(tmp_path, tools, expected):
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": [USER, ASSISTANT], "tools": tools}])
    [(_, conversation)] = read_conversations(Source(path))
    assert conversation.tools == expected


# dataset_info.json ---------------------------------------------------------------------------------------------------


@pytest.fixture
def info(tmp_path):
    """Writes dataset_info.json with one entry, and its data file next to it; returns the entry's source."""

    def info(entry: dict, rows: list[dict], name: str = "mine") -> Source:
        write = write_parquet if entry["file_name"].endswith(".parquet") else write_jsonl
        write(tmp_path / entry["file_name"], rows)
        (tmp_path / "dataset_info.json").write_text(json.dumps({name: entry}))
        [source] = resolve_sources([name], str(tmp_path / "dataset_info.json"), "data.train")
        return source

    return info


GRRM = {
    "file_name": "grrm.parquet",
    "formatting": "sharegpt",
    "columns": {"messages": "messages"},
    "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
}


def test_dataset_info_renames_tags(info):
    rows = [{"messages": [{"role": "system", "content": "s"}, USER, ASSISTANT]}]
    assert turns(info(GRRM, rows)) == [[("system", "s"), *HI_HO]]


def test_dataset_info_renames_columns(info):
    entry = {
        "file_name": "a.jsonl",
        "columns": {"prompt": "q", "query": "about", "response": "a", "system": "rules", "history": "before"},
    }
    row = {"q": "add", "about": "1 2", "a": "3", "rules": "count", "before": [["hi", "ho"]]}
    assert turns(info(entry, [row])) == [[("system", "count"), *HI_HO, ("user", "add\n1 2"), ("assistant", "3")]]


def test_dataset_info_without_columns_is_alpaca(info):
    assert turns(info({"file_name": "a.jsonl"}, [ALPACA])) == turns(Source(info({"file_name": "b.jsonl"}, [ALPACA]).path))


def test_only_listed_columns_are_read(info):
    """As in LLaMA-Factory: if only prompt and response are listed, a column that happens to be called input is ignored."""
    entry = {"file_name": "a.jsonl", "columns": {"prompt": "instruction", "response": "output"}}
    assert turns(info(entry, [ALPACA])) == [[("user", "add"), ("assistant", "3")]]


@pytest.mark.parametrize(
    ("entry", "column"),
    [
        (GRRM | {"columns": {"messages": "turns"}}, "turns"),
        (GRRM | {"columns": {"messages": "messages", "system": "rules"}}, "rules"),
        ({"file_name": "a.jsonl", "formatting": "sharegpt"}, "conversations"),
        ({"file_name": "a.jsonl", "columns": {"prompt": "q", "response": "a"}}, "q"),
        ({"file_name": "a.jsonl"}, "instruction"),
    ],
)
def test_a_column_named_in_dataset_info_must_exist(info, entry, column):
    message = error_of(read_conversations, info(entry, [{"messages": [USER, ASSISTANT]}]))
    assert f"column '{column}' is missing (found: messages). data.dataset_info sets this name." in message


def test_names_and_files_can_be_mixed_and_typos_are_reported(info, tmp_path):
    source = info(GRRM, [{"messages": [USER, ASSISTANT]}], name="grrm_train")
    where = str(tmp_path / "dataset_info.json")
    direct = str(write_jsonl(tmp_path / "direct.jsonl", [{"messages": [USER, ASSISTANT]}]))
    assert resolve_sources(["grrm_train", direct], where, "data.train") == [source, Source(Path(direct))]
    message = error_of(resolve_sources, ["grm_train"], where, "data.train")
    assert message == "data.train: grm_train does not exist. Did you mean grrm_train?"
    source.path.rename(tmp_path / "grrm2.parquet")
    message = error_of(resolve_sources, ["grrm_train"], where, "data.val")
    assert message == f"data.val: {source.path} does not exist. Did you mean {tmp_path / 'grrm2.parquet'}?"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"mine": {"hf_hub_url": "rows"}}', "mine: rows is not the name of a data set on the hub (org/name)"),
        ('{"mine": {"script_url": "rows.py"}}', "mine has neither file_name nor hf_hub_url"),
        ('{"mine": {"file_name": "a.jsonl", "ranking": true}}', "mine has ranked pairs, not conversations"),
        ('{"mine": {"file_name": "a.jsonl", "formatting": "openai"}}', "formatting 'openai' is not one of alpaca, sharegpt"),
        ('{"mine": {"file_name": ["a.jsonl"]}}', "dataset_info.json: mine: file_name should be text, not list"),
        ('{"mine": {"file_name": "a.jsonl", "columns": ["q", "a"]}}', 'mine: columns should be {"name": "name in the file", …}'),
        ('{"mine": {"file_name": "a.jsonl", "columns": {"prompt": ["q"]}}}', "mine: columns should be"),
        ('{"mine": {"file_name": "a.jsonl", "tags": "role"}}', "mine: tags should be"),
        ('{"mine": 3}', 'should be LLaMA-Factory\'s {"name": {"file_name": …}, …}'),
        ("[]", "should be LLaMA-Factory's"),
        ("{\n!", "dataset_info.json:2: not valid JSON"),
    ],
)
def test_unusable_entries_are_refused(tmp_path, content, message):
    (tmp_path / "dataset_info.json").write_text(content)
    assert message in error_of(resolve_sources, ["mine"], str(tmp_path / "dataset_info.json"), "data.train")


def test_entries_that_are_not_used_are_not_checked(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [ALPACA])
    entries = {"hub": {"hf_hub_url": "x"}, "odd": {"file_name": "x", "formatting": "openai"}, "mine": {"file_name": "a.jsonl"}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(entries))
    [source] = resolve_sources(["mine"], str(tmp_path / "dataset_info.json"), "data.train")
    assert source.path == path


def test_a_missing_dataset_info_suggests_the_nearest_file(tmp_path):
    (tmp_path / "dataset_info.json").write_text("{}")
    message = error_of(resolve_sources, ["mine"], str(tmp_path / "datset_info.json"), "data.train")
    assert message.startswith("data.dataset_info: ")
    assert message.endswith(f"Did you mean {tmp_path / 'dataset_info.json'}?")


# Prompts -------------------------------------------------------------------------------------------------------------


def test_verl_prompts(tmp_path):
    row = {
        "data_source": "math",
        "prompt": [{"role": "system", "content": "s"}, USER],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "42"},
        "extra_info": {"index": 3, "split": None},
    }
    [prompt] = read_prompts(Source(write_parquet(tmp_path / "a.parquet", [row])))
    assert prompt.messages == row["prompt"]
    assert (prompt.id, prompt.data_source, prompt.ground_truth) == ("a.parquet:1", "math", "42")
    assert prompt.extra_info == {"ability": "math", "index": 3, "split": None}


def test_further_columns_are_in_extra_info_and_do_not_replace_it(tmp_path):
    row = {"prompt": "hi", "lang": "en", "level": None, "index": 1, "extra_info": {"index": 3}}
    [prompt] = read_prompts(Source(write_jsonl(tmp_path / "a.jsonl", [row])))
    assert prompt.extra_info == {"lang": "en", "index": 3}
    assert prompt.is_text


@pytest.mark.parametrize("text", ['{"index": 3}', ' {"index": 3}\n'])
def test_further_columns_join_extra_info_that_is_json_text(tmp_path, text):
    row = {"prompt": "hi", "lang": "en", "index": 1, "extra_info": text}
    [prompt] = read_prompts(Source(write_jsonl(tmp_path / "a.jsonl", [row])))
    assert prompt.extra_info == {"lang": "en", "index": 3}


@pytest.mark.parametrize("text", ['{"index": 3', "[3]", "three"])
def test_text_in_extra_info_that_is_no_object_is_reported(tmp_path, text):
    row = {"prompt": "hi", "lang": "en", "extra_info": text}
    with pytest.raises(DataError, match="row 1: extra_info should be an object, not str"):
        list(read_prompts(Source(write_jsonl(tmp_path / "a.jsonl", [row]))))


def test_prompts_need_no_other_columns(tmp_path):
    first, second = read_prompts(Source(write_jsonl(tmp_path / "a.jsonl", [{"prompt": "hi"}, {"prompt": [USER]}])))
    assert first.messages == second.messages == [USER]
    assert (second.id, second.data_source, second.ground_truth, second.extra_info) == ("a.jsonl:2", "", None, {})


def test_ids_of_files_with_the_same_name_differ(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("a", "b"):
        Path(folder).mkdir()
        write_jsonl(Path(folder, "train.jsonl"), [{"prompt": "hi"}])
    a, b = (Source(Path(folder, "train.jsonl")) for folder in ("a", "b"))
    assert name_sources([a, b, a]) == ["a/train.jsonl", "b/train.jsonl", "a/train.jsonl"]
    assert name_sources([a]) == name_sources([b]) == ["train.jsonl"]
    assert name_sources([a], others=[a, b]) == ["a/train.jsonl"]


def test_ids_do_not_depend_on_the_folder(tmp_path, monkeypatch):
    """They seed the samples."""
    monkeypatch.chdir(tmp_path)
    write_jsonl(Path("train.jsonl"), [{"prompt": "hi"}])
    Path("other").mkdir()
    write_jsonl(Path("other/train.jsonl"), [{"prompt": "hi"}])
    paths = ("train.jsonl", tmp_path / "train.jsonl", "other/../train.jsonl", "other/train.jsonl")
    assert {prompt.id for path in paths for prompt in read_prompts(Source(Path(path)))} == {"train.jsonl:1"}


def test_prompts_may_have_tools(tmp_path):
    tool = {"type": "function", "function": {"name": "add"}}
    for write, name in ((write_jsonl, "a.jsonl"), (write_parquet, "a.parquet")):
        rows = [{"prompt": "hi", "tools": [tool]}, {"prompt": "hi", "tools": None}]
        assert [prompt.tools for prompt in read_prompts(Source(write(tmp_path / name, rows)))] == [[tool], None]
    [prompt] = read_prompts(Source(write_jsonl(tmp_path / "text.jsonl", [{"prompt": "hi", "tools": json.dumps([tool])}])))
    assert prompt.tools == [tool]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"other": 1}, "row 2: has no messages (found nothing)"),
        ({"prompt": None}, "row 2: has no messages (found nothing)"),
        ({"prompt": [{"role": "usr", "content": "x"}]}, "Did you mean user?"),
        ({"prompt": "hi", "extra_info": "x"}, "row 2: extra_info should be an object, not str"),
        (
            {"prompt": "hi", "reward_model": [1]},
            "row 2: reward_model should be an object with ground_truth, or the reference",
        ),
        ({"prompt": "hi", "data_source": ["math"]}, "row 2: data_source should be text, not list"),
        ({"prompt": "hi", "tools": "{"}, "row 2: tools are not valid JSON"),
        ({"prompt": "hi \ud800"}, "row 2: its text has an unpaired surrogate: \\ud800"),
        ({"prompt": "hi", "reward_model": {"ground_truth": "\udc00"}}, "row 2: its text has an unpaired surrogate: \\udc00"),
    ],
)
def test_rows_that_cannot_be_sampled_are_reported(tmp_path, row, message):
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "hi"}, row])
    assert message in error_of(read_prompts, Source(path))


@pytest.mark.parametrize(
    ("name", "count", "data_source", "has_truth"),
    [("wildchat_if_val", 250, "wildchat-if", False), ("bigmath_tinyv", 5000, "bigmath_rl_tinyv", True)],
)
def test_real_prompts(real_data, name, count, data_source, has_truth):
    prompts = list(read_prompts(Source(real_data / f"{name}.parquet")))
    assert len({prompt.id for prompt in prompts}) == len(prompts) == count
    assert {prompt.data_source for prompt in prompts} == {data_source}
    assert all(prompt.messages[-1]["role"] == "user" and prompt.messages[-1]["content"].strip() for prompt in prompts)
    assert all((prompt.ground_truth is not None) == has_truth for prompt in prompts)
    assert all({"index", "split"} <= prompt.extra_info.keys() for prompt in prompts)


# Odd JSON ------------------------------------------------------------------------------------------------------------


def test_an_unpaired_surrogate_is_reported_with_its_row(tmp_path):
    """json reads a lone surrogate; the tokenizer would fail on it with a TypeError."""
    good, bad = {"messages": [USER, ASSISTANT]}, {"messages": [USER, {"role": "assistant", "content": "so \ud83d"}]}
    message = error_of(read_conversations, Source(write_jsonl(tmp_path / "a.jsonl", [good, bad])))
    assert message.startswith(f"{tmp_path}/a.jsonl: row 2: its text has an unpaired surrogate: \\ud83d")
    smile = {"messages": [USER, {"role": "assistant", "content": "so \U0001f600"}]}  # written as a surrogate pair
    assert turns(write_jsonl(tmp_path / "b.jsonl", [smile]))[0][1] == ("assistant", "so \U0001f600")
    tools = write_parquet(tmp_path / "a.parquet", [good | {"tools": '["\\ud800"]'}])
    assert "row 1: its text has an unpaired surrogate" in error_of(read_conversations, Source(tools))


def test_deeply_nested_json_is_reported_with_its_line(tmp_path):
    deep = "[" * 100_000 + "]" * 100_000
    (tmp_path / "a.jsonl").write_text(f'{{"messages": []}}\n{{"messages": {deep}}}\n')
    assert error_of(read_rows, tmp_path / "a.jsonl").startswith(f"{tmp_path}/a.jsonl:2: the JSON that begins here is nested too")
    (tmp_path / "dataset_info.json").write_text(deep)
    assert "nested too deeply" in error_of(resolve_sources, ["a"], str(tmp_path / "dataset_info.json"), "data.train")
    row = {"messages": [USER, ASSISTANT], "tools": deep}
    assert "row 1: tools are nested too deeply" in error_of(read_conversations, Source(write_jsonl(tmp_path / "t.jsonl", [row])))


def test_a_huge_number_is_reported_with_its_line(tmp_path):
    (tmp_path / "a.jsonl").write_text(f'{{"messages": {"9" * 5000}}}\n')
    assert f"{tmp_path}/a.jsonl:1: the JSON that begins here cannot be read" in error_of(read_rows, tmp_path / "a.jsonl")


# Truncation ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("left", [False, True])
def test_a_truncated_row_does_not_keep_the_full_one_alive(left):
    short = cut(example(1000), 10, left=left)
    assert len(short) == 10
    assert short.tokens.base is None
    assert short.loss_mask.base is None


# Order ---------------------------------------------------------------------------------------------------------------


def stream(order: RowOrder) -> list[int]:
    return list(chain.from_iterable(order.rows(step) for step in range(order.num_steps)))


@settings(deadline=None)
@given(
    num_rows=st.integers(1, 50),
    per_step=st.integers(1, 70),
    tenths=st.integers(1, 40),
    seed=st.integers(0, 2**40),
    data=st.data(),
)
def test_each_epoch_is_a_permutation(num_rows, per_step, tenths, seed, data):
    def order() -> RowOrder:
        return RowOrder(num_rows, per_step=per_step, epochs=tenths / 10, seed=seed)

    rows = stream(order())
    assert len(rows) == order().total_rows == -(-num_rows * tenths // 10)
    for start in range(0, len(rows), num_rows):
        epoch = rows[start : start + num_rows]
        assert len(set(epoch)) == len(epoch)
        assert set(epoch) <= set(range(num_rows))
    # Only the last step may be short, and a step is the same whatever ran before it.
    step = data.draw(st.integers(0, order().num_steps - 1))
    assert order().rows(step) == rows[step * per_step : (step + 1) * per_step]
    assert step == order().num_steps - 1 or len(order().rows(step)) == per_step


def test_data_that_end_before_the_steps_wanted():
    order = RowOrder(100, per_step=30, epochs=1, seed=0)
    assert [order.steps(most) for most in (None, 3, 9)] == [4, 3, 4]
    assert [order.ends_early(wanted) for wanted in (None, 4)] == [None, None]
    message = "the data ends after 4 steps (run.epochs = 1), before run.max_steps = 5: raise run.epochs to train that long"
    assert order.ends_early(5) == message


def test_order_depends_on_seed_and_epoch():
    rows = stream(RowOrder(100, per_step=30, epochs=2, seed=0))
    assert rows[:100] != rows[100:]
    assert rows != stream(RowOrder(100, per_step=30, epochs=2, seed=1))
    # How many rows a step takes does not change their order.
    assert rows == stream(RowOrder(100, per_step=7, epochs=2, seed=0))


def test_steps_span_epochs_and_the_last_is_short():
    order = RowOrder(10, per_step=4, epochs=2.5, seed=0)
    assert [len(order.rows(step)) for step in range(order.num_steps)] == [4, 4, 4, 4, 4, 4, 1]
    assert sorted(order.rows(0) + order.rows(1) + order.rows(2)[:2]) == list(range(10))


def test_dropping_the_last_batch_leaves_whole_steps_of_one_epoch_each():
    order = RowOrder(10, per_step=4, epochs=2.5, seed=0, last_batch="drop")
    steps = [order.rows(step) for step in range(order.num_steps)]
    assert [len(rows) for rows in steps] == [4, 4, 4, 4, 4]  # two in each epoch, one in the half
    for epoch in (0, 1):
        rows = steps[2 * epoch] + steps[2 * epoch + 1]
        assert len(set(rows)) == 8
        assert rows == RowOrder(10, per_step=10, epochs=3, seed=0).rows(epoch)[:8]  # of the same permutation
    assert order.dropped() == "each epoch leaves 2 of 10 rows out (train.last_batch: drop)"
    # 7,544 prompts at 64 per step, two epochs
    assert RowOrder(7544, per_step=64, epochs=2, seed=0, last_batch="drop").num_steps == 234
    assert RowOrder(7544, per_step=64, epochs=2, seed=0).num_steps == 236


def test_dropping_nothing_changes_nothing():
    kept, dropped = (RowOrder(12, per_step=4, epochs=2, seed=3, last_batch=last) for last in ("keep", "drop"))
    assert stream(kept) == stream(dropped)
    assert dropped.dropped() is None


@pytest.mark.parametrize(("per_step", "epochs"), [(11, 3), (4, 0.3)])
def test_dropping_every_row_is_refused(per_step, epochs):
    with pytest.raises(RecipeError, match=r"train.last_batch is drop, and .* of 10 rows are less than one step of .*: take fewer"):
        RowOrder(10, per_step=per_step, epochs=epochs, seed=0, last_batch="drop")


@pytest.mark.parametrize(("epochs", "rows"), [(1.1, 110), (0.07, 7), (0.29, 29), (1e-9, 1), (3, 300)])
def test_fractional_epochs_are_exact(epochs, rows):
    assert RowOrder(100, per_step=8, epochs=epochs, seed=0).total_rows == rows


def test_order_never_changes():
    """Runs of an older version must resume to the same rows."""
    assert stable_seed("order", 0, 0, bits=32) == 192948299
    assert RowOrder(8, per_step=8, epochs=1, seed=0).rows(0) == [5, 1, 0, 6, 2, 3, 7, 4]


# Packing -------------------------------------------------------------------------------------------------------------


@given(lengths=st.lists(st.integers(1, 40), max_size=60), budget=st.integers(1, 50))
def test_groups_hold_each_sequence_once_within_the_budget(lengths, budget):
    groups = split_by_tokens(lengths, budget)
    assert sorted(chain.from_iterable(groups)) == list(range(len(lengths)))
    assert all(len(group) == 1 or sum(lengths[i] for i in group) <= budget for group in groups)
    assert all(group == sorted(group) for group in groups)
    assert split_by_tokens(list(lengths), budget) == groups
    oversized = sum(length > budget for length in lengths)
    fitting = sum(length for length in lengths if length <= budget)
    assert len(groups) <= min(len(lengths), 2 * math.ceil(fitting / budget) + oversized)


def test_packing_is_tight():
    assert split_by_tokens([6, 5, 4, 3, 2], 10) == [[0, 2], [1, 3, 4]]
    assert split_by_tokens([3, 30, 3], 10) == [[1], [0, 2]]
    assert split_by_tokens([], 10) == []


def example(length: int, start: int = 0) -> Example:
    mask = np.ones(length, dtype=bool)
    mask[0] = False
    return Example(np.arange(start, start + length), mask)


def test_pack_lays_sequences_end_to_end():
    batch = pack([example(3, 10), example(1, 20), example(2, 30)])
    assert batch.tokens_T.tolist() == [10, 11, 12, 20, 30, 31]
    assert batch.positions_T.tolist() == [0, 1, 2, 0, 0, 1]
    assert batch.loss_mask_T.tolist() == [False, True, True, False, False, True]
    assert batch.starts_S1.tolist() == [0, 3, 4, 6]
    assert str(batch.starts_S1.dtype) == "torch.int32"
    assert (batch.longest, batch.num_tokens, batch.num_targets) == (3, 6, 3)


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=30), budget=st.integers(1, 50))
def test_micro_batches_hold_every_token_once(lengths, budget):
    starts = np.concatenate([[0], np.cumsum(lengths)])[:-1]
    batches = micro_batches([example(n, start) for n, start in zip(lengths, starts, strict=True)], budget)
    assert sorted(chain.from_iterable(b.tokens_T.tolist() for b in batches)) == list(range(sum(lengths)))
    assert sum(b.num_targets for b in batches) == sum(lengths) - len(lengths)
    for batch in batches:
        bounds = batch.starts_S1.tolist()
        assert bounds[-1] == batch.num_tokens
        assert batch.longest == max(b - a for a, b in pairwise(bounds))
        assert batch.num_tokens <= budget or len(bounds) == 2


def test_a_first_token_cannot_be_a_target():
    with pytest.raises(AssertionError):
        pack([Example(np.arange(3), np.ones(3, dtype=bool))])


def test_unusual_prompts(tmp_path):
    def read(prompt):
        return [p.messages for p in read_prompts(Source(write_jsonl(tmp_path / "a.jsonl", [{"prompt": prompt}])))]

    assert read("hi") == [[USER]]
    assert read(json.dumps([USER])) == [[USER]], "messages that went through a CSV file"
    assert read("[1, 2] is a list") == [[{"role": "user", "content": "[1, 2] is a list"}]]
    with pytest.raises(DataError, match=r"row 1: a message should have `role` and `content`, not role, text"):
        read([{"role": "user", "text": "hi"}])
    with pytest.raises(DataError, match=r"row 1: its prompt ends with an assistant message"):
        read([USER, ASSISTANT])


@given(st.lists(st.integers(1, 40), max_size=60), st.integers(1, 50))
def test_grouping_is_first_fit_decreasing(lengths, budget):
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fits = next((group for group in groups if sum(lengths[j] for j in group) + lengths[i] <= budget), None)
        groups.append([i]) if fits is None else fits.append(i)
    assert split_by_tokens(lengths, budget) == [sorted(group) for group in groups]
