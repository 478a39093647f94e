"""All ranks of a run, wherever they are: waited for, shown, signalled and stopped together. Imports no torch."""

import contextlib
import os
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, Self

from plaudit.cluster.process import KILLED_S, RankEvent
from plaudit.cluster.watch import CULPRIT_S, Verdict, Watch
from plaudit.errors import PlauditError
from plaudit.recipe import TrainingRecipe
from plaudit.redaction import redact
from plaudit.report.progress import restore_terminal

LOOK_EVERY_S = 0.1
GRACE_S = 5.0
"""How long ranks may take to stop after one has failed, or after the second Ctrl-C."""
DUMP_S = 3.0
"""How long a hanging rank may take to write down where it is."""
WRITTEN_S = 0.5
"""What a rank wrote down is complete when this long nothing was added."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class WatchedGroup(ABC):
    """Where ranks run is a subclass's business: it starts them when it is entered, and leaves none when it is left."""

    def __init__(self, recipe: TrainingRecipe):
        self._recipe = recipe
        self._logs = RankLogs(Path(recipe.run.dir))
        self._received: list[signal.Signals] = []
        """Signals that were not passed on yet."""
        self._stop_requests = 0
        self._stop_by: float | None = None
        self._workers_listen: dict[int, tuple[str, int]] = {}
        """The addresses of reward workers."""

    @abstractmethod
    def __enter__(self) -> Self:
        """Starts the ranks, then `_watch_ranks`."""

    def __exit__(self, *raised: object) -> None:
        """Nothing is left, however it ended."""
        stuck = self._end()
        restore_terminal()
        if stuck:
            why = "".join(f"{error}\n" for error in raised if isinstance(error, PlauditError))
            raise PlauditError(
                f"{why}{' and '.join(stuck)} did not end within {KILLED_S:g} s of SIGKILL: the system waits for a disk or a GPU "
                "that does not answer. It may still hold GPU memory and the run folder. Fix that, then start the run again to "
                "resume it."
            )

    @abstractmethod
    def _end(self) -> list[str]:
        """Kill all ranks; returns the names of those that cannot be killed."""

    @abstractmethod
    def _listen(self, wait_s: float) -> Iterable[RankEvent]:
        """What arrives within this time, and who has ended."""

    @abstractmethod
    def _signal(self, number: signal.Signals) -> None:
        """To all ranks."""

    @abstractmethod
    def _send_port(self, port: int) -> None:
        """Where rank 0 listens, to all others."""

    @abstractmethod
    def _request_stacks(self, ranks: set[int]) -> None:
        """Let these ranks write down where they are."""

    @abstractmethod
    def _where(self, ranks: set[int]) -> dict[int, str]:
        """What they have written down, also when they crashed."""

    @property
    def stop_requested(self) -> bool:
        """Whether Ctrl-C or SIGTERM has come."""
        return self._stop_requests > 0

    def wait(self) -> str | None:
        """Until all ranks are done; returns rank 0's result as text. Raises what a rank raised, or why it failed."""
        try:
            return self._wait()
        finally:
            self._logs.close()

    def _wait(self) -> str | None:
        while (verdict := self._watch.verdict()) is None:
            if self._watch.all_done:
                self._wait_for_exits(GRACE_S)
                return self._watch.ranks[0].result
            if self._stop_by is not None and time.monotonic() > self._stop_by:
                raise KeyboardInterrupt
            self._look(LOOK_EVERY_S)
        self._stop(verdict)
        if self._stop_requests and verdict.rank is not None and -self._exit_code(verdict.rank) in STOP_SIGNALS:
            raise KeyboardInterrupt  # a signal that was passed on before anything could be saved
        if verdict.trace:
            self._print(verdict.trace.rstrip(), verdict.rank)
        raise verdict.error

    def _exit_code(self, rank: int) -> int:
        return self._watch.ranks[rank].exit_code or 0

    # Watching

    def _watch_ranks(self, size: int, culprit_s: float = CULPRIT_S, workers: Sequence[str] = ()) -> None:
        self._watch = Watch(size, self._recipe.cluster.timeout_s, culprit_s=culprit_s, workers=workers)

    def _look(self, wait_s: float) -> None:
        """Handle what arrives within this time, and signals that this process has received."""
        while self._received:
            self._pass_on(self._received.pop(0))
        for event in self._listen(wait_s):
            self._handle(event)

    def _handle(self, event: RankEvent) -> None:
        if event.status is not None:
            if "port" in event.status:
                self._send_port(event.status["port"])
            if "listening" in event.status:
                self._workers_listen[event.rank] = tuple(event.status["listening"])
            self._watch.heard(event.rank, event.status)
        elif event.stream is not None:
            self._logs.write(self._watch.label(event.rank), event.line)
            if event.rank == 0:
                stream = sys.stdout if event.stream == "stdout" else sys.stderr
                print(redact(event.line), file=stream, flush=True)
            elif event.stream == "stderr":
                self._print(event.line, event.rank)
        elif self._watch.ranks[event.rank].exit_code is None:
            self._watch.ended(event.rank, -signal.SIGKILL if event.exit_code is None else event.exit_code, lost=event.lost)

    def _print(self, text: str, rank: int | None) -> None:
        """With the rank in front of every line; rank 0's progress bar may be on the current one."""
        start = "\r\x1b[2K" if sys.stderr.isatty() else ""
        name = "" if rank is None else f"{self._watch.label(rank)}: "
        sys.stderr.write("".join(f"{start}{name}{line}\n" for line in redact(text).splitlines()))
        sys.stderr.flush()

    # Stopping

    def _stop(self, verdict: Verdict) -> None:
        if verdict.silent:
            self._show_stacks(set(verdict.silent))
        elif verdict.rank is not None and self._exit_code(verdict.rank) < 0 and not self._watch.ranks[verdict.rank].lost:
            where = self._where({verdict.rank}).get(verdict.rank)
            if where:
                self._print(f"crashed at {where}", verdict.rank)
        self._signal(signal.SIGTERM)
        self._wait_for_exits(0.0 if verdict.silent else GRACE_S)

    def _show_stacks(self, silent: set[int]) -> None:
        self._request_stacks(silent)
        deadline = time.monotonic() + DUMP_S
        where, written_at = self._where(silent), time.monotonic()
        # A rank writes down one thread after another, the main thread last.
        while not (all(where.values()) and time.monotonic() - written_at > WRITTEN_S) and time.monotonic() < deadline:
            time.sleep(0.02)
            if (now := self._where(silent)) != where:
                where, written_at = now, time.monotonic()
        for rank in sorted(where):
            self._print(f"hangs at {where[rank] or 'a place that it could not report'}", rank)

    def _wait_for_exits(self, within_s: float) -> None:
        """Reading on: a rank whose output nobody reads could not end."""
        deadline = time.monotonic() + within_s
        while any(state.exit_code is None for state in self._watch.training) and (left := deadline - time.monotonic()) > 0:
            self._look(min(left, LOOK_EVERY_S))

    # Signals

    @contextlib.contextmanager
    def forwarded_signals(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM reach all ranks, which save and stop together; the second time they stop at once."""
        if threading.current_thread() is not threading.main_thread():  # Python allows no others to handle signals
            yield
            return
        before = {number: signal.signal(number, self._receive) for number in STOP_SIGNALS}
        if signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL:
            before[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._receive)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        """Passed on between two looks at the ranks: a handler may interrupt anything."""
        self._received.append(signal.Signals(number))
        if number in STOP_SIGNALS:
            self._stop_requests += 1
            if self._stop_requests > 2:
                raise KeyboardInterrupt

    def _pass_on(self, number: signal.Signals) -> None:
        if number == signal.SIGTSTP:
            self._suspend()
            return
        self._signal(number)
        if self._stop_requests > 1:
            self._stop_by = time.monotonic() + GRACE_S

    def _suspend(self) -> None:
        """Ctrl-Z suspends all, until this process is continued."""
        self._signal(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        self._signal(signal.SIGCONT)
        self._watch.resumed()


class RankLogs:
    """What processes write, in the run folder: logs/rank_0003.log. Files are made when something is written."""

    def __init__(self, run_folder: Path):
        self._folder = run_folder.absolute() / "logs"
        self._files: dict[str, IO[str]] = {}

    def write(self, label: str, line: str) -> None:
        """`label`: `rank 3`"""
        with contextlib.suppress(OSError):  # a full disk ends the run with a message of its own
            if label not in self._files:
                self._folder.mkdir(parents=True, exist_ok=True)
                *words, number = label.split()
                name = "_".join([*words, number.zfill(4)])
                self._files[label] = (self._folder / f"{name}.log").open("a", buffering=1, encoding="utf-8")
            self._files[label].write(redact(line) + "\n")

    def close(self) -> None:
        while self._files:
            with contextlib.suppress(OSError):
                self._files.popitem()[1].close()
