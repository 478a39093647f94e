"""Turns on an event loop: those who compute on it do so for a few milliseconds at a time.

An event loop runs everything that is ready before it looks at its sockets again, so a thousand short computations block judge calls
and `/health` just as one long computation does. Every computation therefore takes a turn first. Turns are given in order until an
iteration's `SLICE_S` are used up; the others wait until the loop has looked at its sockets.

Rules stay on the loop because most of them take microseconds: handing a group to another thread costs more than scoring it, and as
long as that thread computes, each system call of the loop waits up to 5 ms for the interpreter lock. Worker processes, which would
have to be sent every response, cost more still. What cannot be divided goes to one thread (`in_thread`): one, because several would
compete with the loop for the lock.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar
from weakref import WeakKeyDictionary

SLICE_S = 0.005
"""Computing time of one iteration of the loop. A computation that has its turn may exceed it, so each should be short."""
MOST_WOKEN = 64
"""Waiting computations resumed in one iteration, at most: most take a small part of it."""

P = ParamSpec("P")
T = TypeVar("T")


class Turns:
    """The turns of one event loop. Holds no reference to it, so that both go when nobody else uses the loop."""

    def __init__(self):
        self._slice_ends = 0.0
        self._scheduled = False
        """Whether `_begin_slice` will be called in the next iteration."""
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._woken = MOST_WOKEN
        """Resumed in this iteration: about as many as there was time for in the last one, since each that is resumed for nothing
        costs as much as a short computation."""
        self._returned: list[asyncio.Future[None]] = []
        """Resumed too late in an iteration; they come first in the next one."""
        self._thread: ThreadPoolExecutor | None = None

    @property
    def over(self) -> bool:
        """Whether the loop should look at its sockets before anything else is computed. After a pause too: nobody tells us that it
        has, and to look once more costs little."""
        return time.perf_counter() >= self._slice_ends

    async def take(self) -> None:
        """Wait until there is time to compute: usually there is."""
        queue = self._waiting
        while self.over:
            if not self._scheduled:
                self._schedule()
            resumed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            queue.append(resumed)
            await resumed
            queue = self._returned

    def _schedule(self) -> None:
        self._scheduled = True
        asyncio.get_running_loop().call_soon(self._begin_slice)

    def _begin_slice(self) -> None:
        self._scheduled = False
        self._slice_ends = time.perf_counter() + SLICE_S
        too_many = len(self._returned)
        self._woken = max(self._woken - too_many, 1) if too_many else min(self._woken + self._woken // 4 + 1, MOST_WOKEN)
        self._waiting.extendleft(reversed(self._returned))
        self._returned.clear()
        for _ in range(min(self._woken, len(self._waiting))):
            resumed = self._waiting.popleft()
            if not resumed.done():  # done: whoever waited was cancelled
                resumed.set_result(None)
        if self._waiting:
            self._schedule()

    async def in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Compute something that cannot be divided, one after the other in a thread of its own."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "computing")
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(function, *args, **kwargs))

    def close(self) -> None:
        """End the thread after what it still has to compute, which may be for others on this loop; whoever takes a turn later gets
        new turns."""
        _TURNS.pop(asyncio.get_running_loop(), None)
        if self._thread is not None:
            self._thread.shutdown(wait=False)
            self._thread = None


_TURNS: WeakKeyDictionary[asyncio.AbstractEventLoop, Turns] = WeakKeyDictionary()


def turns() -> Turns:
    """Those of the running event loop."""
    loop = asyncio.get_running_loop()
    found = _TURNS.get(loop)
    if found is None:
        found = _TURNS[loop] = Turns()
    return found
