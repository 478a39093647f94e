"""Several processes on this machine, started, watched and stopped together. Imports no torch.

    this process ── stdin: the assignment, a port; its end is the end ──▶ rank
                 ◀── status pipe: heartbeats, how the job ended ─────────
                 ◀── output of ranks > 0, shown with their rank ─────────     (rank 0 has the terminal)

All ranks are one process group, led by a shell that kills it once this process is gone, however it went. Processes that ranks start
in groups of their own (a user's reward functions, servers) have such guards themselves.
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
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, Any, Self

from plaudit.cluster.rank import SHOW_STACK, Assignment, RankJob
from plaudit.cluster.ranks import TORCHRUN, RankInfo
from plaudit.cluster.watch import Verdict, Watch, hanging_frames
from plaudit.errors import PlauditError
from plaudit.recipe import TrainingRecipe
from plaudit.redaction import redact
from plaudit.report.progress import console, restore_terminal

PROGRAM = "import sys; sys.path[:] = sys.argv[2:]; from plaudit.cluster.rank import main; main()"
GUARD = "trap '' TERM INT HUP; read line; kill -KILL 0"
"""`read` ends when the other end of its stdin, which only the launching process holds, is closed."""
PLAUDIT = Path(__file__).parents[2]
LOOK_EVERY_S = 0.1
GRACE_S = 5.0
"""How long ranks may take to stop after one has failed, or after the second Ctrl-C."""
DUMP_S = 3.0
"""How long a hanging rank may take to write down where it is."""
KILLED_S = 60.0
"""How long a process may take to end after SIGKILL: with a large memory it is not a matter of milliseconds."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
LOOPBACK_INTERFACE = {"linux": "lo", "darwin": "lo0"}


class RankProcess:
    """One process, and its pipes."""

    def __init__(self, ranks: RankInfo, job: RankJob, recipe: TrainingRecipe, group: int):
        self.rank = ranks.rank
        self.status, status_theirs = os.pipe()
        self.stack: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (as long as this object)
        self._partial: dict[str, bytes] = {"status": b"", "output": b""}
        given = Assignment(ranks, pickle.dumps(job), recipe, sys.argv, console.quiet, status_theirs, self.stack.fileno())
        environment = {name: value for name, value in os.environ.items() if name not in TORCHRUN}  # a container's, if any
        if sys.platform in LOOPBACK_INTERFACE:  # or gloo looks up the host's name, which may lead anywhere
            environment.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK_INTERFACE[sys.platform])
        try:
            self.process = subprocess.Popen(
                # -P: files in this folder must not shadow modules of the same name.
                [sys.executable, "-P", "-c", PROGRAM, f"rank={self.rank}", str(PLAUDIT), *sys.path],
                stdin=subprocess.PIPE,
                stdout=None if self.rank == 0 else subprocess.PIPE,
                stderr=None if self.rank == 0 else subprocess.STDOUT,
                bufsize=0, process_group=group, pass_fds=(status_theirs, self.stack.fileno()), env=environment,
            )  # fmt: skip
        except OSError:
            os.close(self.status)
            self.stack.close()
            raise
        finally:
            os.close(status_theirs)
        for fd in self.pipes.values():
            os.set_blocking(fd, False)
        self.send(pickle.dumps(given))

    @property
    def pipes(self) -> dict[str, int]:
        output = self.process.stdout
        return {"status": self.status} | ({} if output is None else {"output": output.fileno()})

    def send(self, content: bytes) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its end will be noticed
            self.process.stdin.write(content)

    def lines(self, pipe: str, *, ended: bool = False) -> Iterator[bytes]:
        """Complete lines that have arrived; if the process has `ended`, the last one may be incomplete."""
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self.pipes[pipe], 65536):
                *lines, self._partial[pipe] = (self._partial[pipe] + chunk).split(b"\n")
                yield from lines
        if ended and (rest := self._partial[pipe]):
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
        """Where it was when it crashed, or when it was asked."""
        return hanging_frames(os.pread(self.stack.fileno(), 1 << 20, 0).decode(errors="replace"))

    def close(self) -> None:
        os.close(self.status)
        self.stack.close()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


class RankGroup:
    def __init__(self, job: RankJob, count: int, recipe: TrainingRecipe):
        self._job, self._count, self._recipe = job, count, recipe
        self._ranks: list[RankProcess] = []
        self._signals = 0
        """Of those that ask to stop."""
        self._stop_by: float | None = None

    def __enter__(self) -> Self:
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", GUARD],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, process_group=0,
        )  # fmt: skip
        self._selector = selectors.DefaultSelector()
        try:
            for i in range(self._count):
                ranks = RankInfo(i, self._count, i, self._count, "127.0.0.1", 0)
                self._ranks.append(RankProcess(ranks, self._job, self._recipe, self._guard.pid))
        except BaseException:
            self.__exit__()
            raise
        self._watch = Watch(self._count, self._recipe.cluster.timeout_s)
        for rank in self._ranks:
            for pipe, fd in rank.pipes.items():
                self._selector.register(fd, selectors.EVENT_READ, (rank, pipe))
        return self

    def __exit__(self, _kind: object = None, error: BaseException | None = None, _trace: object = None) -> None:
        """Nothing is left, however it ended."""
        # The guard has not been reaped, so the group's id cannot belong to another one.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._guard.pid, signal.SIGKILL)
        deadline = time.monotonic() + KILLED_S
        stuck = [rank for rank in self._ranks if not rank.ends_before(deadline)]
        for rank in self._ranks:
            rank.close()
        assert self._guard.stdin is not None
        self._guard.kill()
        self._guard.stdin.close()
        self._guard.wait()
        self._selector.close()
        restore_terminal()
        if stuck:
            names = " and ".join(f"rank {rank.rank} (process {rank.process.pid})" for rank in stuck)
            why = f"{error}\n" if isinstance(error, PlauditError) else ""
            raise PlauditError(
                f"{why}{names} did not end within {KILLED_S:g} s of SIGKILL: the system waits for a disk or a GPU that does not "
                "answer. It may still hold GPU memory and the run folder. Fix that, then start the run again to resume it."
            )

    @property
    def stop_requested(self) -> bool:
        """Whether Ctrl-C or SIGTERM has come."""
        return self._signals > 0

    def wait(self) -> str | None:
        """Until all ranks are done; returns rank 0's result as text. Raises what a rank raised, or why it failed."""
        while (verdict := self._watch.verdict()) is None:
            if self._watch.all_done:
                self._wait_for_exits(GRACE_S)
                return self._watch.ranks[0].result
            if self._stop_by is not None and time.monotonic() > self._stop_by:
                raise KeyboardInterrupt
            self._look(LOOK_EVERY_S)
        self._stop(verdict)
        if self._signals and verdict.rank is not None and -self._exit_code(verdict.rank) in STOP_SIGNALS:
            raise KeyboardInterrupt  # a signal that was passed on before anything could be saved
        if verdict.trace:
            self._print(verdict.trace.rstrip(), verdict.rank)
        raise verdict.error

    def _exit_code(self, rank: int) -> int:
        return self._watch.ranks[rank].exit_code or 0

    # Watching

    def _look(self, wait_s: float) -> None:
        """Read what has arrived within this time, and see who has ended."""
        ended = [rank for rank in self._ranks if rank.process.poll() is not None]  # first, so that its last words are read
        for key, _ in self._selector.select(wait_s):
            rank, pipe = key.data
            (self._read_status if pipe == "status" else self._show_output)(rank)
        for rank in ended:
            if self._watch.ranks[rank.rank].exit_code is None:
                self._read_status(rank)
                self._show_output(rank, ended=True)
                for fd in rank.pipes.values():
                    self._selector.unregister(fd)
                self._watch.ended(rank.rank, rank.process.returncode)

    def _read_status(self, rank: RankProcess) -> None:
        for line in rank.lines("status"):
            message: dict[str, Any] = json.loads(line)
            if "port" in message:
                for other in self._ranks[1:]:
                    other.send(f"{message['port']}\n".encode())
            self._watch.heard(rank.rank, message)

    def _show_output(self, rank: RankProcess, *, ended: bool = False) -> None:
        if "output" in rank.pipes:
            for line in rank.lines("output", ended=ended):
                self._print(line.decode(errors="replace"), rank.rank)

    @staticmethod
    def _print(text: str, rank: int | None) -> None:
        """With the rank in front of every line; rank 0's progress bar may be on the current one."""
        start = "\r\x1b[2K" if sys.stderr.isatty() else ""
        name = "" if rank is None else f"rank {rank}: "
        sys.stderr.write("".join(f"{start}{name}{line}\n" for line in redact(text).splitlines()))
        sys.stderr.flush()

    # Stopping

    def _stop(self, verdict: Verdict) -> None:
        if verdict.silent:
            self._show_stacks(verdict.silent)
        elif verdict.rank is not None and self._exit_code(verdict.rank) < 0 and (where := self._ranks[verdict.rank].where()):
            self._print(f"crashed at {where}", verdict.rank)
        for rank in self._ranks:
            rank.signal(signal.SIGTERM)
        self._wait_for_exits(0.0 if verdict.silent else GRACE_S)

    def _show_stacks(self, silent: Sequence[int]) -> None:
        hanging = [rank for rank in self._ranks if rank.rank in silent and rank.process.poll() is None]
        for rank in hanging:
            rank.signal(SHOW_STACK)
        deadline = time.monotonic() + DUMP_S
        while not all(rank.where() for rank in hanging) and time.monotonic() < deadline:
            time.sleep(0.02)
        for rank in hanging:
            self._print(f"hangs at {rank.where() or 'a place that it could not report'}", rank.rank)

    def _wait_for_exits(self, within_s: float) -> None:
        """Reading on: a rank whose output nobody reads could not end."""
        deadline = time.monotonic() + within_s
        while any(state.exit_code is None for state in self._watch.ranks) and (left := deadline - time.monotonic()) > 0:
            self._look(min(left, LOOK_EVERY_S))

    @contextlib.contextmanager
    def forwarded_signals(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM reach all ranks, which save and stop together; the second time they stop at once."""
        if threading.current_thread() is not threading.main_thread():  # Python allows no others to handle signals
            yield
            return
        before = {number: signal.signal(number, self._forward) for number in STOP_SIGNALS}
        if signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL:
            before[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._suspend)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1
        for rank in self._ranks:
            rank.signal(signal.Signals(number))
        if self._signals > 1:
            self._stop_by = time.monotonic() + GRACE_S
        if self._signals > 2:
            raise KeyboardInterrupt

    def _suspend(self, number: int, frame: FrameType | None) -> None:
        """Ctrl-Z suspends all, until this process is continued."""
        for rank in self._ranks:
            rank.signal(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        for rank in self._ranks:
            rank.signal(signal.SIGCONT)
        self._watch.resumed()
