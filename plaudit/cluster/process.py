"""Ranks on one machine: their processes and pipes, listened to and ended together. Imports no torch.

    this process ── stdin: the assignment, a port; its end is the end ──▶ rank
                 ◀── status pipe: heartbeats, how the job ended ─────────
                 ◀── stdout and stderr, unless it has the terminal ──────

All of them are one process group, led by a shell that kills it once this process is gone, however it went. Processes that ranks
start in groups of their own (a user's reward functions, servers) have such guards themselves.
"""

import contextlib
import json
import os
import pickle
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from plaudit.cluster.rank import SHOW_STACK, Assignment
from plaudit.cluster.ranks import RankInfo, WorkerInfo
from plaudit.cluster.watch import hanging_frames
from plaudit.recipe import TrainingRecipe
from plaudit.types import RewardWorkers

PROGRAM = "import sys; sys.path[:] = sys.argv[2:]; from plaudit.cluster.rank import main; main()"
GUARD = "trap '' TERM INT HUP; read line; kill -KILL 0"
"""`read` ends when the other end of its stdin, which only the launching process holds, is closed."""
PLAUDIT = Path(__file__).parents[2]
KILLED_S = 60.0
"""How long a process may take to end after SIGKILL: with a large memory it is not a matter of milliseconds."""


@dataclass(frozen=True)
class RankStart:
    """What is needed to start a rank."""

    ranks: RankInfo | WorkerInfo
    job: bytes
    """A pickled RankJob, or WorkerJob."""
    recipe: TrainingRecipe
    argv: list[str]
    quiet: bool
    environment: Mapping[str, str]
    path: Sequence[str]
    """Where modules are found."""
    has_terminal: bool
    """Whether it writes to this process's stdout and stderr."""
    reward_workers: RewardWorkers | None = None
    """Of a run that has any."""


@dataclass(frozen=True)
class RankEvent:
    """What a rank has reported or written, or that it has ended."""

    rank: int
    status: dict[str, Any] | None = None
    stream: Literal["stdout", "stderr"] | None = None
    line: str = ""
    exit_code: int | None = None
    lost: str = ""
    """Why there is no exit code: where it ran, and what has happened there."""

    @property
    def is_end(self) -> bool:
        return self.exit_code is not None or bool(self.lost)


class RankProcess:
    """One process, and its pipes."""

    def __init__(self, start: RankStart, group: int):
        self.rank = start.ranks.rank
        status, status_theirs = os.pipe()
        self._status = os.fdopen(status, "rb", buffering=0)
        self._stack: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (as long as this object)
        output = None if start.has_terminal else subprocess.PIPE
        try:
            self.process = subprocess.Popen(
                # -P: files in this folder must not shadow modules of the same name. -u: what it writes is seen at once.
                [sys.executable, "-P", "-u", "-c", PROGRAM, f"rank={self.rank}", str(PLAUDIT), *start.path],
                stdin=subprocess.PIPE, stdout=output, stderr=output, bufsize=0, process_group=group,
                pass_fds=(status_theirs, self._stack.fileno()), env=dict(start.environment),
            )  # fmt: skip
        except OSError:
            self._status.close()
            self._stack.close()
            raise
        finally:
            os.close(status_theirs)
        streams = {"status": self._status, "stdout": self.process.stdout, "stderr": self.process.stderr}
        self.pipes = {name: pipe for name, pipe in streams.items() if pipe is not None}
        for pipe in self.pipes.values():
            os.set_blocking(pipe.fileno(), False)
        self._partial = dict.fromkeys(self.pipes, b"")
        given = Assignment(
            start.ranks, start.job, start.recipe, start.argv, start.quiet, status_theirs, self._stack.fileno(), start.reward_workers
        )  # fmt: skip
        self.send(pickle.dumps(given))

    def send(self, content: bytes) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its end will be noticed
            self.process.stdin.write(content)

    def events(self, pipe: str, *, ended: bool = False) -> Iterator[RankEvent]:
        """Complete lines that have arrived; if the process has `ended`, the last one may be incomplete."""
        for line in self._lines(pipe, ended):
            if pipe == "status":
                yield RankEvent(self.rank, status=json.loads(line))
            else:
                yield RankEvent(self.rank, stream="stdout" if pipe == "stdout" else "stderr", line=line.decode(errors="replace"))

    def _lines(self, pipe: str, ended: bool) -> Iterator[bytes]:
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self.pipes[pipe].fileno(), 65536):
                *lines, self._partial[pipe] = (self._partial[pipe] + chunk).split(b"\n")
                yield from lines
        if ended and pipe != "status" and (rest := self._partial[pipe]):
            self._partial[pipe] = b""
            yield rest

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def ends_before(self, deadline: float) -> bool:
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
        return True

    def where(self) -> str:
        """Where it was when it crashed, or when it got SHOW_STACK."""
        return hanging_frames(os.pread(self._stack.fileno(), 1 << 20, 0).decode(errors="replace"))

    def close(self) -> None:
        self._stack.close()
        for pipe in (self.process.stdin, *self.pipes.values()):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


class MachineRanks:
    """The ranks that this process has started."""

    def __init__(self) -> None:
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", GUARD],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, process_group=0,
        )  # fmt: skip
        self._selector = selectors.DefaultSelector()
        self._ranks: dict[int, RankProcess] = {}
        self._ended: set[int] = set()

    def start(self, start: RankStart) -> None:
        rank = self._ranks[start.ranks.rank] = RankProcess(start, self._guard.pid)
        for name, pipe in rank.pipes.items():
            self._selector.register(pipe, selectors.EVENT_READ, (rank, name))

    def listen(self, wait_s: float) -> Iterator[RankEvent]:
        """What arrives within this time, and who has ended."""
        running = [rank for number, rank in self._ranks.items() if number not in self._ended]
        ended = [rank for rank in running if rank.process.poll() is not None]  # first, so that its last words are read
        for key, _ in self._selector.select(0.0 if ended else wait_s):
            rank, pipe = key.data
            yield from rank.events(pipe)
        for rank in ended:
            for name, pipe in rank.pipes.items():
                yield from rank.events(name, ended=True)
                self._selector.unregister(pipe)
            self._ended.add(rank.rank)
            yield RankEvent(rank.rank, exit_code=rank.process.returncode)

    def signal(self, number: signal.Signals) -> None:
        for rank in self._ranks.values():
            rank.signal(number)

    def send_port(self, port: int) -> None:
        """Where rank 0 listens, to all others."""
        for number, rank in self._ranks.items():
            if number > 0:
                rank.send(f"{port}\n".encode())

    def request_stacks(self, ranks: set[int]) -> None:
        for number in ranks & self._ranks.keys() - self._ended:
            self._ranks[number].signal(SHOW_STACK)

    def where(self, ranks: set[int]) -> dict[int, str]:
        return {number: self._ranks[number].where() for number in ranks & self._ranks.keys()}

    def close(self) -> list[str]:
        """Nothing is left, however it ended; returns the names of ranks that cannot be killed."""
        # The guard has not been reaped, so the group's id cannot belong to another one.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._guard.pid, signal.SIGKILL)
        deadline = time.monotonic() + KILLED_S
        stuck = [
            f"rank {rank.rank} (process {rank.process.pid})" for rank in self._ranks.values() if not rank.ends_before(deadline)
        ]
        for rank in self._ranks.values():
            rank.close()
        assert self._guard.stdin is not None
        self._guard.kill()
        self._guard.stdin.close()
        self._guard.wait()
        self._selector.close()
        return stuck
