"""Rate limits for a model's servers: calls per second and tokens per minute.

A call's tokens are known only when it is done, so each call reserves the average of the calls before it, and waits while less than
that is left in a token bucket:

    left += tokens_per_minute / 60 · seconds,   at most one minute's tokens

Calls start at even intervals, in order of arrival.
"""

import asyncio
import time


class RateLimiter:
    """One model's limits, over all its servers. Without limits it never waits."""

    def __init__(self, calls_per_s: float | None = None, tokens_per_minute: int | None = None):
        self._interval_s = 0.0 if calls_per_s is None else 1.0 / calls_per_s
        self._next = 0.0
        self._capacity = tokens_per_minute
        self._left, self._at = float(tokens_per_minute or 0), time.monotonic()
        self._queue = asyncio.Lock()
        self._tokens, self._calls = 0, 0

    async def begin(self, guess: float) -> float:
        """Wait until the next call may start; returns the tokens reserved for it, to be released when it is done.
        `guess`: its tokens, used until a first call has shown how many they are."""
        reserved = await self._reserve(guess)
        now = time.monotonic()
        turn = max(now, self._next)
        self._next = turn + self._interval_s
        try:
            if turn > now:
                await asyncio.sleep(turn - now)
        except asyncio.CancelledError:
            self.release(reserved)
            raise
        return reserved

    def repeat(self) -> None:
        """Count a retry. Its time limit already runs, so it does not wait; the calls after it wait longer."""
        self._next += self._interval_s

    async def _reserve(self, guess: float) -> float:
        if self._capacity is None:
            return 0.0
        async with self._queue:
            amount = min(self._tokens / self._calls if self._calls else guess, float(self._capacity))
            while (missing := amount - self._refilled()) > 0:
                await asyncio.sleep(missing * 60.0 / self._capacity)
            self._left -= amount
            return amount

    def release(self, reserved: float) -> None:
        self._left += reserved

    def spend(self, tokens: int) -> None:
        """Count the tokens a call used."""
        self._tokens, self._calls = self._tokens + tokens, self._calls + 1
        self._left -= tokens

    def _refilled(self) -> float:
        assert self._capacity is not None
        now = time.monotonic()
        self._left = min(float(self._capacity), self._left + (now - self._at) * self._capacity / 60.0)
        self._at = now
        return self._left
