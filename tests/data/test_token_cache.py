"""Tokenised rows: the same tokens from one process, from several, from memory and from the cache, whatever happens to it."""

import errno
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
from datetime import date
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from plaudit.data import rows as rows_module
from plaudit.data import token_cache, token_store, tokenise_workers
from plaudit.data.control_tokens import MARKS
from plaudit.data.conversations import Source
from plaudit.data.examples import ExampleSet, load_examples
from plaudit.data.pairs import load_pairs
from plaudit.data.rows import read_rows
from plaudit.data.templates import load_model_template
from plaudit.data.token_cache import TokenCache, cache_folder, cache_limit
from plaudit.data.tokenise_workers import Tokeniser, Workers, worker_count
from plaudit.errors import DataError, RecipeError
from plaudit.files import try_lock
from plaudit.recipe import ModelSettings
from support.paths import REPOSITORY
from support.rows import pair_rows, write_jsonl

LINES: list[str] = []


@pytest.fixture(autouse=True)
def _small_files_count(monkeypatch):
    monkeypatch.setattr(token_cache, "MIN_BYTES", 1)
    LINES.clear()


@pytest.fixture
def cache(tmp_path) -> TokenCache:
    return TokenCache(["tokenizer", "template"], LINES.append, tmp_path / "cache", 10**9)


@pytest.fixture(scope="module")
def tokeniser(tiny_model) -> Tokeniser:
    return Tokeniser(ModelSettings(path=str(tiny_model)), "text", "turns")


@pytest.fixture(scope="module")
def tokenise(tokeniser):
    return tokeniser.build()


def contents(loaded: ExampleSet) -> list:
    return [(e.tokens.tolist(), e.loss_mask.tolist()) for e in loaded.examples]


def never(_):
    raise AssertionError("these rows were tokenised already")


def load(file: Path, tokenise, **more) -> ExampleSet:
    return load_examples([Source(file)], tokenise, **{"max_tokens": 64, "too_long": "filter", **more})


def entries(cache: TokenCache) -> list[Path]:
    return list(cache.folder.iterdir())


def test_a_second_start_reads_the_same_rows_from_the_cache(rows_file, tokenise, cache):
    expected = load(rows_file, tokenise)
    first, second = load(rows_file, tokenise, cache=cache), load(rows_file, never, cache=cache)
    assert contents(first) == contents(second) == contents(expected)
    assert second.summary("filter", 64) == expected.summary("filter", 64)
    assert second.counts == expected.counts
    assert second.examples.lengths == [len(example) for example in expected.examples]
    assert second.examples[0].tokens.dtype == np.int32
    assert LINES == []


def test_rows_are_memory_mapped(rows_file, tokenise, cache):
    load(rows_file, tokenise, cache=cache)
    tokens = load(rows_file, never, cache=cache).examples[0].tokens
    while isinstance(tokens, np.ndarray) and not isinstance(tokens, np.memmap):
        tokens = tokens.base
    assert isinstance(tokens, np.memmap)


def test_pairs(tmp_path, tokenise, cache):
    rows = [{**row, "margin": i / 4} for i, row in enumerate(pair_rows()[:20])]
    source = Source(write_jsonl(tmp_path / "pairs.jsonl", rows))
    read = partial(load_pairs, [source], max_tokens=256, too_long="error", margin_column="margin", cache=cache)
    first, second = read(tokenise), read(never)
    assert len(second.pairs) == 20
    for one, other in zip(first.pairs, second.pairs, strict=True):
        assert one.margin == other.margin
        for side in ("chosen", "rejected"):
            ours, theirs = getattr(one, side), getattr(other, side)
            assert ours.tokens.tolist() == theirs.tokens.tolist()
            assert ours.loss_mask.tolist() == theirs.loss_mask.tolist()
    assert second.pairs.lengths == list(map(len, first.pairs))
    assert second.counts == first.counts


@pytest.mark.parametrize("change", ["content", "schema", "settings", "inputs", "code"])
def test_anything_that_tokens_depend_on_is_another_entry(rows_file, tmp_path, tokenise, cache, monkeypatch, change):
    from plaudit.data.conversations import Schema

    file = tmp_path / "rows.jsonl"
    file.write_bytes(rows_file.read_bytes())
    source, settings = Source(file), {"max_tokens": 64, "too_long": "filter"}
    load_examples([source], tokenise, cache=cache, **settings)
    if change == "content":
        file.write_bytes(b"".join(rows_file.read_bytes().splitlines(keepends=True)[::-1]))
    elif change == "schema":
        source = Source(file, Schema(tags={"user_tag": "someone"}))
    elif change == "settings":
        settings["max_tokens"] = 63
    elif change == "inputs":
        cache = TokenCache(["tokenizer", "another template"], LINES.append, cache.folder, cache.max_bytes)
    else:
        monkeypatch.setattr(token_cache, "code_digest", lambda: "edited")
    with pytest.raises(AssertionError, match="tokenised already"):
        load_examples([source], never, cache=cache, **settings)


def test_everything_about_a_tokenizer_that_tokens_depend_on_is_an_input(tiny_model, tmp_path, monkeypatch):
    def inputs(folder: Path = tiny_model, text: str = "", **changes):
        template = load_model_template(ModelSettings(path=str(folder)))
        template.text += text
        for name, value in changes.items():
            setattr(template.tokenizer, name, value)
        return token_cache.template_inputs(template)

    same = inputs()
    copy = shutil.copytree(tiny_model, tmp_path / "copy")
    assert inputs(copy) == same is not None
    assert inputs(eos_token="!") != same
    assert inputs(bos_token="!") not in (same, inputs(eos_token="!"))
    assert inputs(split_special_tokens=True) != same
    config = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps(config | {"add_prefix_space": True}))
    assert inputs(copy) != same

    dated = inputs(text="{# strftime_now #}")
    monkeypatch.setattr(token_cache, "date", type("Later", (date,), {"today": classmethod(lambda _: date(2100, 1, 1))}))
    assert inputs(text="{# strftime_now #}") != dated
    assert inputs() == same


def test_code_that_a_tokenizer_comes_with_is_an_input(tiny_model, tmp_path, monkeypatch):
    template = load_model_template(ModelSettings(path=str(tiny_model)))
    file = tmp_path / "own_tokenizer.py"
    file.write_text("class Mixin: pass")
    monkeypatch.syspath_prepend(tmp_path)
    own = type(template.tokenizer)
    template.tokenizer.__class__ = type(
        "Own", (importlib.import_module("own_tokenizer").Mixin, own), {"__module__": "own_tokenizer"}
    )
    before = token_cache.template_inputs(template)
    file.write_text("class Mixin: edited = True")
    assert token_cache.template_inputs(template) != before


@pytest.mark.parametrize("name", ["tokens", "targets", "ends", "margins", "about.json"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_a_damaged_entry_is_built_again_with_a_line(rows_file, tokenise, cache, name, damage):
    first = contents(load(rows_file, tokenise, cache=cache))
    [entry] = entries(cache)
    file = entry / name
    content = bytearray(file.read_bytes())
    if name == "margins" and damage != "remove":
        content += b"x"  # it is empty
    elif damage == "flip":
        content[len(content) // 2] ^= 4
    file.unlink()
    if damage != "remove":
        file.write_bytes(content[:-1] if damage == "truncate" and name != "margins" else content)
    assert contents(load(rows_file, tokenise, cache=cache)) == first
    assert len(LINES) == 1
    assert "damaged" in LINES[0]
    assert contents(load(rows_file, never, cache=cache)) == first


def test_a_full_disk_falls_back_to_memory_with_a_line(rows_file, tokenise, cache, monkeypatch):
    expected = contents(load(rows_file, tokenise))
    monkeypatch.setattr(token_store, "BLOCK", 1000)
    written = []

    def flush(column):
        written.append(column)
        if len(written) > 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(column)

    real = token_store._Column.flush
    monkeypatch.setattr(token_store._Column, "flush", flush)
    assert contents(load(rows_file, tokenise, cache=cache)) == expected
    assert [
        f"{cache.folder} cannot be written (No space left on device): tokenised rows are in memory, and not kept for the next start"
    ] == LINES
    assert entries(cache) == []


def test_a_cache_that_cannot_be_written_falls_back_to_memory(rows_file, tokenise, tmp_path):
    (tmp_path / "file").write_text("")
    cache = TokenCache([], LINES.append, tmp_path / "file" / "cache", 10**9)
    assert contents(load(rows_file, tokenise, cache=cache)) == contents(load(rows_file, tokenise))
    assert "cannot be written (Not a directory)" in LINES[0]


def test_a_folder_that_disappears_falls_back_to_memory(rows_file, tokenise, cache, monkeypatch):
    def rename(building, target):
        shutil.rmtree(building.parent)
        return target

    expected = contents(load(rows_file, tokenise))
    monkeypatch.setattr(Path, "rename", rename)
    assert contents(load(rows_file, tokenise, cache=cache)) == expected
    assert len(LINES) == 1
    assert "No such file or directory" in LINES[0]
    assert entries(cache) == []


def test_a_start_leaves_the_folder_of_another_that_has_not_locked_it_yet(rows_file, tokenise, cache, monkeypatch):
    def lock_after_another_start(file):
        monkeypatch.setattr(token_cache, "try_lock", try_lock)
        cache._remove_abandoned()
        return try_lock(file)

    monkeypatch.setattr(token_cache, "try_lock", lock_after_another_start)
    load(rows_file, tokenise, cache=cache)
    assert contents(load(rows_file, never, cache=cache)) == contents(load(rows_file, tokenise))
    assert LINES == []


@pytest.mark.parametrize("files", [[], ["unlocked"]], ids=["empty", "not locked"])
def test_what_was_left_before_it_was_locked_is_removed_by_a_later_start(rows_file, tokenise, cache, files):
    for name in (".old.1", ".new.1", ".notes"):
        (cache.folder / name).mkdir(parents=True)
        for file in [*files, *(["mine.txt"] if name == ".notes" else [])]:
            (cache.folder / name / file).touch()
    for name in (".old.1", ".notes"):
        os.utime(cache.folder / name, (0, 0))
    load(rows_file, tokenise, cache=cache)
    assert {path.name for path in cache.folder.glob(".*")} == {".new.1", ".notes"}


def test_a_wrong_row_leaves_nothing(tmp_path, tokenise, cache):
    file = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "1", "response": "2"}, {"prompt": "1", "response": ""}])
    with pytest.raises(DataError, match="row 2"):
        load(file, tokenise, cache=cache)
    assert entries(cache) == []


def test_a_file_that_changes_meanwhile_is_not_kept(rows_file, tmp_path, tokenise, cache):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(rows_file.read_bytes())

    def progress(rows):
        yield from rows
        file.write_bytes(b'{"prompt": "1", "response": "2"}\n')

    assert len(load(file, tokenise, cache=cache, progress=progress).examples) > 1
    assert entries(cache) == []
    assert len(load(file, tokenise, cache=cache).examples) == 1


def test_what_a_killed_process_was_building_is_removed(rows_file, tokenise, cache):
    """Only once its process is gone."""
    code = f"""if True:
        import sys
        from pathlib import Path
        from plaudit.data import token_cache
        from plaudit.data.conversations import Source
        from plaudit.data.examples import load_examples
        token_cache.MIN_BYTES = 1

        def progress(rows):
            print("building", flush=True)
            sys.stdin.readline()
            yield from rows

        cache = token_cache.TokenCache(["another"], print, Path({str(cache.folder)!r}), 10**9)
        source = Source(Path({str(rows_file)!r}))
        load_examples([source], None, max_tokens=64, too_long="filter", cache=cache, progress=progress)
    """
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    assert process.stdout is not None
    assert process.stdout.readline() == b"building\n"
    load(rows_file, tokenise, cache=cache)
    assert len(entries(cache)) == 2
    process.send_signal(signal.SIGKILL)
    process.communicate()
    load(rows_file, tokenise, cache=cache, max_tokens=63)
    assert [entry.name for entry in entries(cache) if entry.name.startswith(".")] == []
    assert len(entries(cache)) == 2


def test_the_least_recently_used_entries_are_removed_beyond_the_limit(rows_file, tokenise, cache):
    for max_tokens in (61, 62, 63):
        load(rows_file, tokenise, cache=cache, max_tokens=max_tokens)
    size = max(sum(file.stat().st_size for file in entry.iterdir()) for entry in entries(cache))
    for about in cache.folder.glob("*/about.json"):
        os.utime(about, (500, 500))
    for i, max_tokens in enumerate((62, 63, 61)):  # used in this order
        load(rows_file, never, cache=cache, max_tokens=max_tokens)
        about = max(cache.folder.glob("*/about.json"), key=lambda file: file.stat().st_mtime_ns)
        os.utime(about, (1000 + i, 1000 + i))
    small = TokenCache(cache.inputs, LINES.append, cache.folder, int(2.5 * size))
    load(rows_file, tokenise, cache=small, max_tokens=64)
    assert len(entries(cache)) == 2
    load(rows_file, never, cache=small, max_tokens=61)
    with pytest.raises(AssertionError, match="tokenised already"):
        load(rows_file, never, cache=small, max_tokens=62)


def test_small_files_and_a_limit_of_zero_keep_nothing(rows_file, tokenise, cache, monkeypatch):
    load(rows_file, tokenise, cache=TokenCache([], LINES.append, cache.folder, 0))
    monkeypatch.setattr(token_cache, "MIN_BYTES", 10**9)
    load(rows_file, tokenise, cache=cache)
    assert not cache.folder.exists()


def test_the_folder_and_its_limit_come_from_the_environment(monkeypatch):
    monkeypatch.delenv("PLAUDIT_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/plaudit")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "plaudit"
    monkeypatch.setenv("PLAUDIT_CACHE", "~/elsewhere")
    assert cache_folder() == Path.home() / "elsewhere"
    monkeypatch.setenv("PLAUDIT_CACHE_GB", "0.5")
    assert cache_limit() == 500_000_000
    for wrong in ("much", "-1", "nan"):
        monkeypatch.setenv("PLAUDIT_CACHE_GB", wrong)
        with pytest.raises(RecipeError, match="PLAUDIT_CACHE_GB"):
            cache_limit()


# Several processes ---------------------------------------------------------------------------------------------------


@pytest.mark.slow  # each worker imports transformers
def test_workers_tokenise_as_one_process_does(tmp_path, tokenise, tokeniser):
    rows = [{"prompt": f"What is {i} + 1? <|im_end|>", "response": f"{i + 1} 東京"} for i in range(1500)]
    file = write_jsonl(tmp_path / "rows.jsonl", rows)
    ours = load(file, tokenise, workers=partial(Workers, never, tokeniser, 2, LINES.append))
    assert contents(ours) == contents(load(file, tokenise))
    unmarkable = load_model_template(tokeniser.model).control_tokens.names[0] + "".join(MARKS)
    wrong = write_jsonl(tmp_path / "wrong.jsonl", [*rows, {"prompt": unmarkable, "response": "1"}])
    with pytest.raises(DataError, match=r"wrong\.jsonl: row 1501"):
        load(wrong, tokenise, workers=partial(Workers, never, tokeniser, 2, LINES.append))
    assert LINES == []


@pytest.mark.slow
def test_the_work_of_a_worker_that_dies_is_done_here(rows_file, tokenise, tokeniser):
    with Workers(tokenise, tokeniser, 1, LINES.append) as workers:
        workers._processes[0]._process.kill()
        loaded = load(rows_file, tokenise, workers=lambda: workers)
    assert contents(loaded) == contents(load(rows_file, tokenise))
    assert len(LINES) == 1
    assert "has ended" in LINES[0]


@pytest.mark.parametrize("started", [0, 1])
def test_workers_that_cannot_be_started_are_done_without(rows_file, tokenise, tokeniser, monkeypatch, started):
    class Process:
        failed = False

        def __init__(self, _):
            if len(processes) == started:
                raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
            processes.append(self)

        def tokenise(self, conversations):
            used.append(self)
            return tokenise(conversations)

        def end(self):
            processes.remove(self)

    processes, used = [], []
    monkeypatch.setattr(tokenise_workers, "_Process", Process)
    loaded = load(rows_file, tokenise, workers=partial(Workers, tokenise, tokeniser, 3, LINES.append))
    assert contents(loaded) == contents(load(rows_file, tokenise))
    assert bool(used) == bool(started)
    assert processes == []
    assert len(LINES) == 1
    assert "Resource temporarily unavailable" in LINES[0]


def test_workers_import_nothing_from_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("json.py").write_text("open('imported', 'w')")
    process = tokenise_workers._Process({})
    process._process.wait()
    process.end()
    assert not Path("imported").exists()


def test_small_files_need_no_workers():
    assert worker_count(1000) == 0


# Large JSONL files ---------------------------------------------------------------------------------------------------


def test_a_large_jsonl_file_stays_on_disk(tmp_path, monkeypatch):
    rows = [{"a": i, **({"b": "東京"} if i % 3 else {})} for i in range(50)]
    text = "\ufeff" + "\n\n".join(json.dumps(row, ensure_ascii=i % 2 == 0) for i, row in enumerate(rows))
    file = tmp_path / "rows.jsonl"
    file.write_text(text, encoding="utf-8")
    small = read_rows(file)
    monkeypatch.setattr(rows_module, "LARGE_BYTES", 1)
    large = read_rows(file)
    assert not isinstance(large._table, list)
    assert len(large) == len(small) == 50
    assert list(large) == list(small) == rows
    assert large.columns == small.columns
    assert [large[i] for i in (0, 7, -1)] == [small[i] for i in (0, 7, -1)]
    assert large[3:9:2] == small[3:9:2]
    assert large.nulls_mean_absent == small.nulls_mean_absent
    assert list(large.located())[4] == list(small.located())[4]
    file.write_text(text + "\n{", encoding="utf-8")
    with pytest.raises(DataError, match=r"rows\.jsonl:100: not valid JSON"):
        read_rows(file)


def test_a_template_loaded_before_is_used(tiny_model, tokeniser, rows_file):
    template = load_model_template(tokeniser.model)
    assert contents(load(rows_file, tokeniser.build(template))) == contents(load(rows_file, tokeniser.build()))
