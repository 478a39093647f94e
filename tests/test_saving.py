"""Checkpoints that are written while training continues: what waits for what, and what a failure leaves."""

import json
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from plaudit import saving
from plaudit.checkpoint import Snapshot, find_checkpoint
from plaudit.errors import RunError
from plaudit.models.host_memory import HostMemory
from plaudit.recipe import RunSettings
from plaudit.rewards.cache import ScoreCache
from plaudit.saving import Saver
from plaudit.train.saved_state import save_tensors
from plaudit.types import Score
from plaudit.world import World


class Owner:
    """Of one tensor. Its files are written once `may_write` is set."""

    def __init__(self):
        self.tensor, self.memory, self.error = torch.zeros(3), HostMemory(), None
        self.may_write, self.copied = threading.Event(), []

    def state_bytes(self) -> int:
        return 1000

    def snapshot(self, *, copy: bool) -> Snapshot:
        self.copied.append(copy)
        self.memory.begin()
        tensors = self.memory.copies("x", {"x": self.tensor}) if copy else {"x": self.tensor}
        return Snapshot({}, partial(self._write, tensors))

    def _write(self, tensors: dict, folder: Path) -> list[Path]:
        assert self.may_write.wait(60)
        if self.error is not None:
            raise self.error
        save_file(tensors, folder / "x.safetensors")
        return [folder / "x.safetensors"]


@pytest.fixture
def owner() -> Owner:
    return Owner()


@pytest.fixture
def saver(tmp_path) -> Saver:
    return Saver(tmp_path, RunSettings(dir=str(tmp_path)), World.alone())


def newest(folder: Path) -> tuple[int, list[float]] | None:
    """Step and content of the checkpoint that a run would resume from."""
    checkpoint, _ = find_checkpoint(folder / "checkpoints")
    return checkpoint and (checkpoint.step, load_file(checkpoint.folder / "x.safetensors")["x"].tolist())


def test_training_continues_while_a_checkpoint_is_written(tmp_path, saver, owner):
    notes, events = {"lengths": {"a": 1}}, []
    saver.save(owner, 1, notes, best_step=None, begin_saving=[lambda: lambda: events.append(newest(tmp_path)), lambda: None])
    owner.tensor += 1
    notes["lengths"]["b"] = 2
    assert events == []
    assert not list((tmp_path / "checkpoints").glob("step_*"))
    owner.may_write.set()
    saver.wait()
    assert events == [(1, [0.0, 0.0, 0.0])], "what was saved, on disk before anything that depends on it"
    assert json.loads((tmp_path / "checkpoints/step_000001/state.json").read_text())["lengths"] == {"a": 1}


def test_one_checkpoint_is_written_at_a_time(tmp_path, saver, owner):
    saver.save(owner, 1, {}, best_step=None)
    second = threading.Thread(target=saver.save, args=(owner, 2, {}), kwargs={"best_step": None})
    second.start()
    assert owner.copied == [True], "the second has not begun to copy"
    owner.may_write.set()
    second.join()
    assert saver.take_times().keys() == {"time/save_s", "time/save_wait_s"}
    assert saver.take_times() == {}
    saver.wait()
    assert newest(tmp_path) == (2, [0.0, 0.0, 0.0])


def test_after_ctrl_c_while_waiting_the_checkpoint_is_waited_for_again(tmp_path, saver, owner):
    saver.save(owner, 1, {}, best_step=None)
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 (the signal may come before the wait)
        threading.Timer(0.3, signal.pthread_kill, (threading.get_ident(), signal.SIGINT)).start()
        saver.wait()
    assert saver.writing == 1
    threading.Timer(0.3, owner.may_write.set).start()
    saver.wait()
    assert saver.writing is None
    assert newest(tmp_path) == (1, [0.0, 0.0, 0.0])


def test_a_write_that_cannot_begin_is_not_waited_for(saver, owner, monkeypatch):
    """At a limit of threads, say."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            saver.save(owner, 1, {}, best_step=None)
    assert saver.writing is None
    saver.wait()


@pytest.mark.parametrize("noticed", ["at the next save", "at the end"])
def test_a_failed_write_is_raised_in_the_training_thread(tmp_path, saver, owner, noticed):
    owner.may_write.set()
    saver.save(owner, 1, {}, best_step=None)
    saver.wait()
    owner.error, called = OSError(28, "No space left on device"), []
    saver.save(owner, 2, {}, best_step=None, begin_saving=[lambda: lambda: called.append(2)])
    with pytest.raises(RunError, match=r"step_000002: could not be written \(.*No space left.*; step_000001 is intact\. Fix"):
        saver.save(owner, 3, {}, best_step=None) if noticed == "at the next save" else saver.wait()
    assert called == []
    assert newest(tmp_path) == (1, [0.0, 0.0, 0.0])
    saver.wait()  # raised once


def test_without_memory_for_a_copy_training_waits(tmp_path, saver, owner, capsys, monkeypatch):
    monkeypatch.setattr(saving, "available_memory", lambda: 1000)
    owner.may_write.set()
    for step in (1, 2):
        saver.save(owner, step, {}, best_step=None)
        assert newest(tmp_path) == (step, [0.0, 0.0, 0.0])
    assert owner.copied == [False, False]
    assert capsys.readouterr().err.count("run.save_in_background: the copy of a checkpoint takes 0.0 GB of host memory") == 1


def test_saving_in_the_background_can_be_switched_off(tmp_path, owner):
    saver = Saver(tmp_path, RunSettings(dir=str(tmp_path), save_in_background=False), World.alone())
    owner.may_write.set()
    saver.save(owner, 1, {}, best_step=1)
    assert newest(tmp_path) == (1, [0.0, 0.0, 0.0])
    assert (tmp_path / "best").resolve() == tmp_path / "checkpoints/step_000001"
    assert owner.copied == [False]


def test_a_tensor_with_several_names_is_copied_once():
    memory, tensor = HostMemory(), torch.arange(4.0)
    memory.begin()
    first, second = memory.copies("model", {"a": tensor, "tied": tensor}), memory.copies("trainer", {"weight/a": tensor.detach()})
    assert first["a"] is first["tied"] is second["weight/a"]
    other = memory.copies("model", {"part": tensor[:2]})["part"]
    tensor += 1
    assert first["a"].tolist() == [0, 1, 2, 3]
    assert other.tolist() == [0, 1]
    memory.begin()
    assert memory.copies("model", {"a": tensor})["a"].data_ptr() == first["a"].data_ptr(), "its memory is kept"


def test_a_process_without_tensors_writes_no_file(tmp_path):
    """It would replace that of the process that has them."""
    [file] = save_tensors({"a": torch.ones(2)}, tmp_path)
    assert save_tensors({}, tmp_path) == []
    assert load_file(file)["a"].tolist() == [1, 1]


def test_scores_stored_while_a_checkpoint_is_written_are_kept(tmp_path):
    cache = ScoreCache(tmp_path / "c.sqlite")
    cache.put({"before": Score(1.0)})
    cache.begin_clear()
    cache.put({"since": Score(2.0)})
    cache.clear()
    assert cache.get(["before", "since"]) == {"since": Score(2.0)}
    cache.begin_clear()
    cache.close()
    cache.clear()  # a save may end after the rewards have


def test_a_save_begins_when_the_one_before_has_ended(tmp_path, owner, saver):
    """Otherwise an owner would begin a second save before it knows that the first is on disk, and scores kept in between would
    be taken for old ones."""
    events: list[str] = []

    def begin(name: str) -> Callable[[], Callable[[], None]]:
        def begin_saving() -> Callable[[], None]:
            events.append(f"{name} begins")
            return lambda: events.append(f"{name} is safe")

        return begin_saving

    threading.Timer(0.2, owner.may_write.set).start()  # while the second save waits
    for step, name in ((1, "first"), (2, "second")):
        saver.save(owner, step, {}, best_step=None, begin_saving=[begin(name)])
    saver.wait()
    assert events == ["first begins", "first is safe", "second begins", "second is safe"]
