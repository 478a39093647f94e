"""Data sets from the Hugging Face hub, through the datasets library and a hub on this machine."""

import json
import sys
from pathlib import Path

import pytest

from plaudit.data import hub_datasets
from plaudit.data.conversations import Source, read_conversations, read_prompts, resolve_sources
from plaudit.data.hub_datasets import parse_hub_name
from plaudit.errors import DataError
from plaudit.run_identity import _fingerprint
from support.hub import commit_of, forget, serve_hub, use_hub
from support.rows import write_jsonl

pytest.importorskip("datasets")


def lines(*rows: dict) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


SUMS = [{"question": "2 + 3?", "answer": "5"}, {"question": "1 + 1?", "answer": "2"}]


@pytest.fixture
def local_hub(tmp_path, monkeypatch):
    """A hub with org/sums, which has the splits train and test, and empty caches."""
    import datasets

    datasets.disable_progress_bars()
    with serve_hub(tmp_path / "hub") as served:
        use_hub(monkeypatch, served.url, tmp_path / "cache")
        served.add("datasets", "org/sums", {"train.jsonl": lines(*SUMS), "test.jsonl": lines(SUMS[0])})
        yield served


def questions(source: Source) -> list[str]:
    return [prompt.messages[0]["content"] for prompt in read_prompts(source)]


def test_a_split_of_a_data_set(local_hub):
    [source] = resolve_sources(["org/sums:train"], None, "data.val")
    prompts = list(read_prompts(source))
    assert [(p.id, p.messages[0]["content"], p.ground_truth) for p in prompts] == [
        ("org/sums:train:1", "2 + 3?", "5"),
        ("org/sums:train:2", "1 + 1?", "2"),
    ]
    [(where, conversation), _] = read_conversations(source)
    assert (where, conversation.messages[1]["content"]) == ("org/sums:train: row 1", "5")


def test_the_default_split_is_train_for_training_only(local_hub):
    [source] = resolve_sources(["org/sums"], None, "data.train")
    assert len(source.rows()) == 2
    with pytest.raises(DataError, match=r"^data\.val: org/sums has several splits; name one: org/sums:train, org/sums:test$"):
        resolve_sources(["org/sums"], None, "data.val")
    local_hub.add("datasets", "org/one", {"test.jsonl": lines(*SUMS)})
    [source] = resolve_sources(["org/one"], None, "PROMPTS")
    assert len(source.rows()) == 2


def test_errors_name_the_setting_and_what_there_is(local_hub):
    for name, message in {
        "org/sums:tset": r"^data\.train: org/sums:tset: there is no split tset; there are train, test\. Did you mean test\?",
        "org/none": r"^data\.train: there is no file org/none here, and the Hugging Face hub has no such data set",
        "org/sums@v9:train": r"^data\.train: .* and the data set on the Hugging Face hub has no revision v9",
        "org/sums/other:train": r"^data\.train: org/sums: the data set could not be loaded .*org/sums/CONFIG:SPLIT",
    }.items():
        with pytest.raises(DataError, match=message):
            resolve_sources([name], None, "data.train")


def test_files_and_paths_are_never_looked_up(local_hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("org").mkdir()
    write_jsonl(Path("org/sums"), [])
    write_jsonl(Path("org/mine.jsonl"), SUMS)
    for name in ("./new/sums", "new/sums.jsonl", "/new/sums", "org/mine", "sums", "new/sums.parquet:train"):
        with pytest.raises(DataError, match="does not exist"):
            resolve_sources([name], None, "data.train")
    assert resolve_sources(["org/mine.jsonl", "org/sums"], None, "data.train") == [
        Source(Path("org/mine.jsonl")),
        Source(Path("org/sums")),
    ]
    assert local_hub.requests == []


def test_a_cached_data_set_needs_no_hub_and_changed_rows_are_noticed(local_hub, tmp_path, monkeypatch):
    [source] = resolve_sources(["org/sums:train"], None, "data.train")
    before, commit = _fingerprint(source), commit_of(local_hub.root / "datasets/org/sums")
    use_hub(monkeypatch, "http://127.0.0.1:1", tmp_path / "cache")
    [again] = resolve_sources(["org/sums:train"], None, "data.train")
    assert (questions(again), _fingerprint(again)) == (["2 + 3?", "1 + 1?"], before)
    [pinned] = resolve_sources([f"org/sums@{commit}:train"], None, "data.train")
    assert _fingerprint(pinned) == before
    with pytest.raises(DataError, match="could not be reached"):  # not whichever revision is in the cache
        resolve_sources([f"org/sums@{'0' * 40}:train"], None, "data.train")
    with pytest.raises(DataError, match="there is no file org/new here, and the Hugging Face hub could not be reached"):
        resolve_sources(["org/new"], None, "data.train")

    use_hub(monkeypatch, local_hub.url, tmp_path / "cache")
    local_hub.add("datasets", "org/sums", {"README.md": b"Sums."})
    assert _fingerprint(source) == before  # another revision, the same rows
    forget(hub_datasets._load)
    local_hub.add("datasets", "org/sums", {"train.jsonl": lines(*SUMS[::-1])})
    assert _fingerprint(source) != before


def test_revisions_in_the_cache_need_no_hub(local_hub, tmp_path, monkeypatch):
    [source] = resolve_sources(["org/sums:train"], None, "data.train")
    before, commit = _fingerprint(source), commit_of(local_hub.root / "datasets/org/sums")
    use_hub(monkeypatch, "http://127.0.0.1:1", tmp_path / "cache")
    [main] = resolve_sources(["org/sums@main:train"], None, "data.train")
    assert _fingerprint(main) == before
    with pytest.raises(DataError, match=rf"could not be reached.*; revision v1 is not in the cache, which has org/sums@{commit}$"):
        resolve_sources(["org/sums@v1:train"], None, "data.train")


def test_changed_rows_of_a_data_set_in_memory_are_noticed(local_hub, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "IN_MEMORY_MAX_SIZE", 1 << 20)
    [source] = resolve_sources(["org/sums:train"], None, "data.train")
    before = _fingerprint(source)
    forget(hub_datasets._load)
    assert _fingerprint(source) == before
    forget(hub_datasets._load)
    local_hub.add("datasets", "org/sums", {"train.jsonl": lines(*SUMS[::-1])})
    assert _fingerprint(source) != before


def test_without_the_library_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    forget(hub_datasets._load)
    with pytest.raises(DataError, match=r"data\.train: there is no file org/sums here; .*pip install 'datasets>="):
        resolve_sources(["org/sums"], None, "data.train")


def test_entries_of_dataset_info_may_be_on_the_hub(local_hub, tmp_path):
    entry = {"hf_hub_url": "org/sums", "split": "test", "columns": {"prompt": "question", "response": "answer"}}
    (tmp_path / "dataset_info.json").write_text(json.dumps({"mine": entry}))
    [source] = resolve_sources(["mine"], str(tmp_path / "dataset_info.json"), "data.train")
    [(_, conversation)] = read_conversations(source)
    assert [message["content"] for message in conversation.messages] == ["2 + 3?", "5"]


def test_names_with_revision_and_config():
    found = parse_hub_name("org/name@v1.0/main:train")
    assert found is not None
    assert (found.repository, found.revision, found.config, found.split) == ("org/name", "v1.0", "main", "train")
    assert [parse_hub_name(name) for name in ("data/arithmetic/train.parquet", "org/sums/x.jsonl", "models/tiny")] == [None] * 3


def test_sample_and_score_take_data_sets(local_hub, plaudit, tmp_path):
    local_hub.add("datasets", "org/answers", {"train.jsonl": lines(*({"response": row["answer"], **row} for row in SUMS))})
    (tmp_path / "r.yaml").write_text("rewards: [{kind: exact}]")
    code, _, err = plaudit("score", tmp_path / "r.yaml", "org/answers", "--out", tmp_path / "out.jsonl")
    assert code == 0, err
    scored = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(row["id"], row["reward"]) for row in scored] == [("org/answers:1", 1.0), ("org/answers:2", 1.0)]
