"""Single groups that wait for models which take turns on the device. Loading is slow, so each load serves every group in the queue
by then."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from plaudit.types import Group, Score

Scores = dict[str, tuple[Score, ...]]
"""By the label of the reward."""


class DeviceQueue:
    """Lives on the rewards' event loop."""

    def __init__(self, device: asyncio.Lock, score: Callable[[list[tuple[Group, Scores]]], Awaitable[None]]):
        """`device`: held while models are loaded there. `score` adds the scores of groups to those found so far."""
        self._device, self._score = device, score
        self._waiting: list[tuple[Group, Scores, asyncio.Future[None]]] = []
        self._draining: asyncio.Task[None] | None = None

    async def score(self, group: Group, found: Scores) -> None:
        """A cancelled group leaves the queue."""
        waiting = (group, found, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain())
        try:
            await waiting[2]
        finally:
            self._waiting = [one for one in self._waiting if one is not waiting]

    async def _drain(self) -> None:
        try:
            while self._waiting:
                async with self._device:
                    together, self._waiting = self._waiting, []
                    await self._score_batch(together)
        finally:
            self._draining = None

    async def _score_batch(self, together: Sequence[tuple[Group, Scores, asyncio.Future[None]]]) -> None:
        error: BaseException | None = None
        try:
            await self._score([(group, found) for group, found, _ in together])
        except BaseException as problem:  # whatever it is, the waiting groups must get it
            error = problem
            if not isinstance(problem, Exception):
                raise
        finally:
            for *_, future in together:
                if not future.done():  # done already where the caller was cancelled
                    future.set_result(None) if error is None else future.set_exception(error)
