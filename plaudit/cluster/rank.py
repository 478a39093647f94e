"""The program of a rank that `launch.py` starts.

Its stdin brings the job, later the port where rank 0 listens, and stays open for as long as the launching process lives: at its end
this process ends too, with all processes of its group.
"""

import faulthandler
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

from plaudit.cluster.ranks import RankInfo, WorkerInfo
from plaudit.cluster.status import RankFailure, StatusPipe
from plaudit.heavy_imports import heavy_imports, set_own_process
from plaudit.recipe import TrainingRecipe
from plaudit.types import RewardWorkers

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

    from plaudit.world import World

RankJob = Callable[["World"], Any]
"""What every rank runs: a function that can be pickled. Rank 0's result is the run's, as text."""
SHOW_STACK = signal.SIGUSR1
"""A rank that gets this signal writes down where it is."""


@dataclass(frozen=True)
class Assignment:
    """What a rank is given."""

    ranks: RankInfo | WorkerInfo
    job: bytes
    """A pickled RankJob, or WorkerJob: to read it may import anything, and take its time."""
    recipe: TrainingRecipe
    argv: list[str]
    """The command's, for messages."""
    quiet: bool
    status_fd: int
    stack_fd: int
    """Where the stacks of its threads are written if it crashes or is asked for them."""
    reward_workers: RewardWorkers | None


class Lifeline:
    """What the launching process sends after the assignment."""

    def __init__(self, pipe: BinaryIO):
        self._pipe = pipe
        self._port: int | None = None
        self._has_port = threading.Event()
        threading.Thread(target=self._watch, name="lifeline", daemon=True).start()

    def _watch(self) -> None:
        for line in self._pipe:
            self._port = int(line)
            self._has_port.set()
        os.killpg(0, signal.SIGKILL)  # the launching process is gone

    def port(self) -> int:
        self._has_port.wait()
        assert self._port is not None
        return self._port


def main(work: "RankMain | None" = None) -> None:
    set_own_process()
    # Nothing else that runs here may read what is meant for us, or keep it open.
    lifeline_pipe = os.fdopen(os.dup(0), "rb", buffering=0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    given: Assignment = pickle.load(_Unbuffered(lifeline_pipe))
    run_rank(given, Lifeline(lifeline_pipe), work or _program(given))


def run_rank(given: Assignment, lifeline: Lifeline, work: "RankMain") -> None:
    """Work, and report how it ended. Does not return."""
    status = StatusPipe(given.status_fd)
    os.set_inheritable(given.stack_fd, False)
    faulthandler.enable(given.stack_fd)
    faulthandler.register(SHOW_STACK, given.stack_fd, all_threads=True)
    with suppress(ValueError, OSError):
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # this is not the terminal's foreground group, but rank 0 prints there
    sys.argv = given.argv
    code = 0
    try:
        status.done(work(given, lifeline, status))
    except BaseException as error:
        status.failed(RankFailure.of(error))
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)  # threads of the libraries, and NCCL's orderly end, may wait for peers that are gone


RankMain = Callable[[Assignment, Lifeline, StatusPipe], Any]


def _program(given: Assignment) -> RankMain:
    if isinstance(given.ranks, RankInfo):
        return join_and_work

    with heavy_imports():
        from plaudit.cluster.reward_worker import serve

    return serve


def join_and_work(given: Assignment, lifeline: Lifeline, status: StatusPipe) -> Any:
    with heavy_imports():
        from plaudit.cluster.join import join
        from plaudit.report.progress import set_quiet
        from plaudit.world import Heartbeat

    assert isinstance(given.ranks, RankInfo)
    set_quiet(given.quiet)
    job: RankJob = pickle.loads(given.job)
    heartbeat = Heartbeat(status.beat)
    heartbeat.beat("the other processes to start", waiting=True)
    store = _store(given.ranks, lifeline, status)
    with join(given.ranks, given.recipe, store=store, heartbeat=heartbeat, reward_workers=given.reward_workers) as world:
        return job(world)


def _store(ranks: RankInfo, lifeline: Lifeline, status: StatusPipe) -> "Store":
    """Rank 0 listens on whatever port is free, and the launching process passes it on: no other program can have taken it."""
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    if ranks.rank == 0:
        store = TCPStore(ranks.address, 0, ranks.size, is_master=True, wait_for_workers=False)
        status.port(store.port)
        return store
    return TCPStore(ranks.address, lifeline.port(), ranks.size, is_master=False)


class _Unbuffered:
    """Reads no byte more than pickle asks for."""

    def __init__(self, pipe: BinaryIO):
        self._pipe = pipe

    def read(self, count: int) -> bytes:
        content = b""
        while len(content) < count and (chunk := self._pipe.read(count - len(content))):
            content += chunk
        return content

    def readline(self) -> bytes:
        return self._pipe.readline()
