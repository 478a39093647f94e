"""How fast servers are asked: calls a second, and tokens a minute.

What a call will cost in tokens is known when it is over. So each one reserves what calls have cost on average, and waits while less
than that is left:

    left += tokens_per_minute / 60 · seconds,   at most a minute's

Calls of one rate come evenly, in the order in which they asked for their turn.
"""

import asyncio
import time


class RateLimiter:
    """Of one model's servers together. Without rates nobody waits."""

    def __init__(self, per_s: float | None = None, tokens_per_minute: int | None = None):
        self._between_s = 0.0 if per_s is None else 1.0 / per_s
        self._next = 0.0
        self._most = tokens_per_minute
        self._left, self._at = float(tokens_per_minute or 0), time.monotonic()
        self._queue = asyncio.Lock()
        self._tokens, self._calls = 0, 0

    async def begin(self, guess: float) -> float:
        """Wait until one more question may be asked; returns the tokens that are reserved for it, to be released when it is over.
        `guess`: how many it may cost, while no call has shown it."""
        reserved = await self._reserve(guess)
        now = time.monotonic()
        turn = max(now, self._next)
        self._next = turn + self._between_s
        try:
            if turn > now:
                await asyncio.sleep(turn - now)
        except asyncio.CancelledError:
            self.release(reserved)
            raise
        return reserved

    def repeat(self) -> None:
        """A question is asked again. It has waited already, and its clock runs: those that come after it wait longer."""
        self._next += self._between_s

    async def _reserve(self, guess: float) -> float:
        if self._most is None:
            return 0.0
        async with self._queue:
            wanted = min(self._tokens / self._calls if self._calls else guess, float(self._most))
            while (short := wanted - self._refilled()) > 0:
                await asyncio.sleep(short * 60.0 / self._most)
            self._left -= wanted
            return wanted

    def release(self, reserved: float) -> None:
        self._left += reserved

    def spend(self, tokens: int) -> None:
        """What a question really cost."""
        self._tokens, self._calls = self._tokens + tokens, self._calls + 1
        self._left -= tokens

    def _refilled(self) -> float:
        assert self._most is not None
        now = time.monotonic()
        self._left = min(float(self._most), self._left + (now - self._at) * self._most / 60.0)
        self._at = now
        return self._left
