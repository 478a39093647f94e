"""Other systems than the one tests run on, shown with patched answers."""

import ast
import ctypes
import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys

import pytest
import torch

from plaudit import files
from plaudit.files import try_lock, write_atomic
from plaudit.host import OPEN_FILES, describe_exit, raise_open_file_limit
from plaudit.models import devices
from plaudit.models.devices import resolve_device
from plaudit.resumable import open_resumable
from support.paths import REPOSITORY


def test_windows_is_refused_with_a_way_out(plaudit, monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    code, _, err = plaudit("recipes")
    assert code == 2
    assert err.startswith("plaudit runs on Linux and macOS. On Windows, install it in WSL")


def test_only_kernels_need_triton():
    """macOS has none. Kernels are imported inside functions, and only for a GPU."""
    for module in (REPOSITORY / "plaudit").rglob("*.py"):
        if "kernels" in module.parts:
            continue
        for node in ast.parse(module.read_text(encoding="utf-8")).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            source = getattr(node, "module", None) or ""
            assert "triton" not in {*names, source.split(".")[0]}, module
            assert "kernels" not in {*names, *source.split(".")}, module


def test_an_unused_apple_gpu_is_reported_once(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    devices._report_unused_apple_gpu.cache_clear()
    assert [resolve_device(device).type for device in ("cpu", "auto", "auto")] == ["cpu", "cpu", "cpu"]
    assert capsys.readouterr().err == "Apple's GPU is not used yet: plaudit computes on the CPU here\n"


def test_nothing_is_reported_without_one(monkeypatch, capsys):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    devices._report_unused_apple_gpu.cache_clear()
    resolve_device("auto")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("soft", "hard", "raised"),
    [(256, -1, OPEN_FILES), (256, 4096, 4096), (1024, 2**20, OPEN_FILES), (2**16, 2**20, None), (-1, -1, None)],
)
def test_the_limit_of_open_files_is_raised(monkeypatch, soft, hard, raised):
    import resource

    calls = []
    monkeypatch.setattr(resource, "RLIM_INFINITY", -1)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: calls.append(limits))
    raise_open_file_limit()
    assert calls == ([] if raised is None else [(raised, hard)])


def test_a_limit_that_must_not_be_raised_stays(monkeypatch):
    import resource

    def refuse(*_):
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    raise_open_file_limit()


# Memory --------------------------------------------------------------------------------------------------------------

FREE_EVERY_OTHER_TENSOR = """
import psutil, torch
from plaudit.host import return_freed_memory
return_freed_memory()
torch.ones(30 * 2**18)  # after it is freed, glibc would keep blocks of up to its size
blocks = [torch.ones(2**21) for _ in range(20)]
before = psutil.Process().memory_info().rss
del blocks[::2]
print(round((before - psutil.Process().memory_info().rss) / 2**23))  # a few pages may be added meanwhile
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="needs glibc")
@pytest.mark.parametrize(("chosen", "returned"), [(None, 10), (str(2**25), 0)])
def test_freed_tensors_return_their_memory_unless_the_user_says_otherwise(chosen, returned):
    environment = {name: value for name, value in os.environ.items() if name != "MALLOC_MMAP_THRESHOLD_"}
    environment |= {} if chosen is None else {"MALLOC_MMAP_THRESHOLD_": chosen}
    done = subprocess.run([sys.executable, "-c", FREE_EVERY_OTHER_TENSOR], capture_output=True, text=True, env=environment)
    assert (done.stdout, done.stderr) == (f"{returned}\n", "")


# File systems --------------------------------------------------------------------------------------------------------


def test_a_file_is_locked_for_one_process_at_a_time(tmp_path):
    with (tmp_path / "a").open("w") as one, (tmp_path / "a").open("w") as other:
        assert try_lock(one)
        with pytest.raises(BlockingIOError):
            try_lock(other)


def test_a_file_system_without_locks_is_not_another_process(tmp_path, monkeypatch, capsys):
    def unsupported(*_):
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with open_resumable(tmp_path / "out.jsonl", {}, "score") as file:
        assert file.done == []
    assert "has no locks; make sure that no other process writes to it" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(("number", "accepted"), [(errno.EINVAL, True), (errno.ENOTSUP, True), (errno.EIO, False)])
def test_folders_that_cannot_be_synced(tmp_path, monkeypatch, number, accepted):
    """Some network file systems sync files, not folders; a broken disk is an error."""
    sync = os.fsync

    def fsync(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        sync(descriptor)

    monkeypatch.setattr(files.os, "fsync", fsync)
    if accepted:
        write_atomic(tmp_path / "file", "text")
    else:
        with pytest.raises(OSError, match=os.strerror(number)):
            write_atomic(tmp_path / "file", "text")


# Processes -----------------------------------------------------------------------------------------------------------


def test_exits_are_described():
    assert describe_exit(3) == "exit code 3"
    assert describe_exit(-signal.SIGSEGV) == "killed by SIGSEGV"


@pytest.mark.skipif(not hasattr(signal, "SIGRTMIN"), reason="this system has no real-time signals")
def test_a_signal_without_a_name_is_described():
    number = signal.SIGRTMIN + 3
    code = subprocess.run(["/bin/sh", "-c", f"kill -{number} $$"]).returncode
    assert describe_exit(code) == f"killed by signal {number}"
