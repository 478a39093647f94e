"""The samples that one server draws: requested, awaited, requested again from a server that was lost."""

import queue
import time
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from plaudit.rollout.engine import Request
from plaudit.rollout.served.server import PolicyServer

PROBE_EVERY_S = 5.0


@dataclass(frozen=True)
class Job:
    """One sample to be drawn."""

    request: Request
    index: int
    limit: int
    """Of new tokens."""
    body: dict[str, Any]

    @property
    def key(self) -> tuple[str, int]:
        return self.request.prompt_id, self.index


@dataclass(frozen=True)
class SampleAnswer:
    share: "Share"
    round: int
    job: Job
    result: Any
    """Tokens and log-probs, or an exception."""

    @property
    def is_current(self) -> bool:
        """Not one of a server that was lost since."""
        return self.round == self.share.round


class Share:
    """One server's share of the jobs of a call."""

    def __init__(self, server: PolicyServer, jobs: Iterable[Job], version: int, answers: "queue.SimpleQueue[SampleAnswer]"):
        self.server, self.left = server, {job.key: job for job in jobs}
        self.round = 0
        self._version, self._answers = version, answers
        self._pending: list[Future[None]] = []
        self._probe: Future[float | None] | None = None
        self._computed: float | None = None
        self._heard = self._probed = time.monotonic()

    def ask(self) -> None:
        """Request all that is left."""
        self.round += 1
        self._heard = time.monotonic()
        self._pending = [self.server.submit(self._sample(job, self.round)) for job in self.left.values()]

    def cancel(self) -> None:
        """Closes the connections, which ends their requests."""
        for future in self._pending:
            future.cancel()

    def arrived(self, job: Job) -> None:
        del self.left[job.key]
        self._heard = time.monotonic()

    def silent_for(self) -> float:
        """Seconds since the server is known to have computed a token."""
        now = time.monotonic()
        if self.server.reports_progress and now - max(self._heard, self._probed) > PROBE_EVERY_S and self._probe is None:
            self._probed, self._probe = now, self.server.submit(self.server.tokens_computed())
        if self._probe is not None and self._probe.done():
            computed, self._probe = self._probe.result(), None
            if computed is not None and computed != self._computed:
                self._computed, self._heard = computed, now
        return now - self._heard if self.left else 0.0

    async def _sample(self, job: Job, round: int) -> None:
        try:
            result: Any = await self.server.sample(job.body, self._version)
        except Exception as error:
            result = error
        self._answers.put(SampleAnswer(self, round, job, result))
