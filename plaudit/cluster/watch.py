"""Which rank is to blame when a run cannot continue. Handles no processes itself: it is given what ranks report and how they end.

The first failure decides, but a rank that only noticed that another one is gone is not to blame: for a moment the culprit's own
report, or its end, is waited for. A silent rank is to blame unless it waits for others; if all wait, none will ever continue.
"""

import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from plaudit.cluster.status import RankFailure
from plaudit.errors import PlauditError, ProcessFailed
from plaudit.host import describe_exit

CULPRIT_S = 3.0
"""Of processes of one machine."""
SAME_ERROR_S = 1.0
"""How long after the first: every rank makes the same mistakes, and the leading one's report needs no rank in front."""
SAVE_S = 60.0
"""The same while a rank is still at work after a user's error: the leading one may save, and close its trackers."""
START_S = 300.0
"""How long a rank may take at least until its first heartbeat: all import torch at once, perhaps from a slow disk."""
LIBRARY = re.compile(r"site-packages|/lib/python3|^<frozen ")
FRAME = re.compile(r'File "(.+)", line (\d+) in (.+)')


@dataclass
class RankState:
    """What is known of a rank."""

    heard_at: float
    doing: str = "starting"
    waiting: str | None = None
    """The collective in which it waits for the other ranks."""
    has_started: bool = False
    """Whether it has sent a heartbeat."""
    failure: RankFailure | None = None
    done: bool = False
    result: str | None = None
    exit_code: int | None = None
    lost: str = ""
    """Why nothing is known of its end: where it ran, and what has happened there."""

    @property
    def ended(self) -> bool:
        return self.done or self.failure is not None or self.exit_code is not None


@dataclass(frozen=True)
class Verdict:
    """Why all ranks have to be stopped."""

    rank: int | None
    """The one to blame; None if they wait for each other."""
    error: PlauditError | KeyboardInterrupt
    trace: str = ""
    silent: tuple[int, ...] = ()
    """The ranks of which it is worth knowing where they hang."""


class Watch:
    def __init__(
        self,
        size: int,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        *,
        culprit_s: float = CULPRIT_S,
        workers: Sequence[str] = (),
    ):
        """`culprit_s`: how long the report of the rank that is to blame may come after those of its peers. `workers`: the models of
        reward workers, which come after the ranks."""
        self._timeout_s, self._clock, self._culprit_s = timeout_s, clock, culprit_s
        self._size, self._workers = size, workers
        self.ranks = [RankState(clock()) for _ in range(size + len(workers))]
        self._first_failure_at: float | None = None
        self._order: list[int] = []
        """Ranks that failed, in the order of their reports."""

    # What happens

    def heard(self, rank: int, message: dict[str, Any]) -> None:
        state = self.ranks[rank]
        state.heard_at = self._clock()
        if "doing" in message:
            state.has_started = True
            state.waiting = message["doing"] if message["waiting"] else None
            state.doing = state.doing if message["waiting"] else message["doing"]
        if "done" in message:
            state.done, state.result = True, message["done"]
        if "failure" in message:
            state.failure = RankFailure(**message["failure"])
            self._failed(rank)

    def ended(self, rank: int, code: int, *, lost: str = "") -> None:
        """Its process is gone. Called after all that it had to report. `lost`: with what it ran on."""
        state = self.ranks[rank]
        state.exit_code, state.lost = code, lost
        if not state.done and state.failure is None:
            self._failed(rank)

    def resumed(self) -> None:
        """All were suspended, which is no silence."""
        for state in self.ranks:
            state.heard_at = self._clock()

    def _failed(self, rank: int) -> None:
        self._order.append(rank)
        if self._first_failure_at is None:
            self._first_failure_at = self._clock()

    # What follows

    @property
    def all_done(self) -> bool:
        return all(state.done for state in self.training)

    @property
    def training(self) -> list[RankState]:
        """Without the reward workers, which end only when they are stopped."""
        return self.ranks[: self._size]

    def label(self, rank: int) -> str:
        return f"rank {rank}" if rank < self._size else f"reward worker {rank - self._size}"

    def verdict(self) -> Verdict | None:
        """None while there is no reason to stop."""
        if self._first_failure_at is not None:
            return self._failure_verdict(self._clock() - self._first_failure_at)
        return self._silence_verdict()

    def _failure_verdict(self, since_s: float) -> Verdict | None:
        culprits = [rank for rank in self._order if not self._lost_peer(rank)]
        if since_s < self._patience_s(culprits) and not all(state.ended for state in self.ranks):
            return None
        rank = (culprits or self._order)[0]
        state = self.ranks[rank]
        if state.failure is None:
            return Verdict(rank, ProcessFailed(f"{self._name(rank)} {self._exit(state)}."))
        failure = state.failure
        if failure.kind == "KeyboardInterrupt":
            return Verdict(rank, KeyboardInterrupt())
        leading = self.ranks[0].failure
        if leading is not None and (leading == failure or (leading.is_interruption and failure.is_interruption)):
            rank, failure = 0, leading  # all ranks have made the same mistake, or were asked to stop: as with one process
        if rank == 0 and not failure.trace:
            return Verdict(rank, failure.error(failure.message))
        if not failure.trace:
            return Verdict(rank, failure.error(f"{self._name(rank)}: {failure.message}"))
        what = "lost its connection to the others" if failure.lost_peer else "failed"
        message = f"{self._name(rank)} {what}: {failure.kind}: {failure.message.strip()}"
        return Verdict(rank, failure.error(message), failure.trace)

    def _patience_s(self, culprits: list[int]) -> float:
        """How long after the first failure the others' reports are waited for."""
        if not culprits:
            return self._culprit_s
        failure = self.ranks[culprits[0]].failure
        working = any(not state.ended and state.waiting is None for state in self.ranks)
        if failure is None or failure.trace or not working:
            return SAME_ERROR_S
        return self._timeout_s if failure.is_interruption else min(SAVE_S, self._timeout_s)

    def _lost_peer(self, rank: int) -> bool:
        failure = self.ranks[rank].failure
        return failure is not None and failure.lost_peer

    def _silence_verdict(self) -> Verdict | None:
        now = self._clock()
        alive = {rank: state for rank, state in enumerate(self.ranks) if not state.ended}
        working = {rank: state for rank, state in alive.items() if state.waiting is None}
        silent = {r: s for r, s in working.items() if now - s.heard_at > self._limit_s(r)}
        if silent:
            longest = sorted(silent, key=lambda r: silent[r].heard_at)
            over_s = now - silent[longest[0]].heard_at - self._limit_s(longest[0])
            if len(silent) < len(working) and over_s < SAME_ERROR_S:
                return None  # others may hang too, since a moment later
            return Verdict(longest[0], ProcessFailed(self._silence(longest)), silent=tuple(silent))
        training = {rank: state for rank, state in alive.items() if rank < self._size}
        waiting = [s for s in training.values() if s.waiting is not None and now - s.heard_at > self._timeout_s]
        if training and len(waiting) == len(training):
            where = ", ".join(f"{self._name(rank)} for '{state.waiting}'" for rank, state in training.items())
            done = [str(rank) for rank, state in enumerate(self.ranks) if state.done]
            over = f"; rank {' and '.join(done)} has finished" if done else ""
            message = f"all processes have waited for each other for {self._timeout_s:g} s: {where}{over}. {RAISE}"
            return Verdict(None, ProcessFailed(message), silent=tuple(training))
        return None

    def _limit_s(self, rank: int) -> float:
        started = self.ranks[rank].has_started
        return self._timeout_s if started else max(self._timeout_s, START_S)

    def _name(self, rank: int) -> str:
        model = "" if rank < self._size else f"{self._workers[rank - self._size]}, "
        return f"{self.label(rank)} ({model}{self.ranks[rank].doing})"

    def _silence(self, silent: list[int]) -> str:
        """Those that were heard of first come first: the others may hang because they do."""
        first, *others = silent
        also = f", nor have {' and '.join(map(self._name, others))}" if others else ""
        return f"{self._name(first)} has made no progress for {self._limit_s(first):g} s{also}. {RAISE}"

    @staticmethod
    def _exit(state: RankState) -> str:
        code = state.exit_code
        assert code is not None
        if state.lost:
            return f"was lost: {state.lost}"
        if code == -signal.SIGKILL:
            return "was killed by SIGKILL, as happens when the system's memory runs out"
        return f"was {describe_exit(code)}" if code < 0 else f"ended without a result ({describe_exit(code)})"


RAISE = "If it was still at work, raise cluster.timeout_s."


def hanging_frames(dump: str, count: int = 3) -> str:
    """The innermost frame of the main thread in the last of faulthandler's dumps, and those that led there from plaudit's or the
    user's code: 'x.py:12 in f, called from y.py:3 in g'."""
    main_thread = dump.rpartition("(most recent call first):")[2]  # a block per thread, the main thread's last
    frames = [(file, f"{file}:{line} in {name}") for file, line, name in FRAME.findall(main_thread)]
    own = [frame for file, frame in frames[1:] if not LIBRARY.search(file)]
    return ", called from ".join([frame for _, frame in frames[:1]] + own[: count - 1])
