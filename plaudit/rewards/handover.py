"""Work handed from the caller's thread to an event loop: a task for each piece, results in the order of the pieces.

`asyncio.run_coroutine_threadsafe` does this for one piece. It wakes the loop each time, which is a system call and a switch of the
interpreter lock: for a rule that takes microseconds, most of the time. Here the loop is woken once for all pieces that were added
since it last looked.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

Piece = TypeVar("Piece")
Result = TypeVar("Result")


class Handover(Generic[Piece, Result]):
    """`add` pieces, `wait`, take the `results`; `cancel` whenever they are no longer wanted. All from one thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, work: Callable[[Piece], Coroutine[Any, Any, Result]]):
        self._loop, self._work = loop, work
        self._added: deque[Piece] = deque()
        """Pieces without a task."""
        self._tasks: list[asyncio.Task[Result]] = []
        self._loop_will_look, self._complete, self._cancelled = False, False, False
        self._failure: BaseException | None = None
        self._pieces = self._done = 0
        self._ended = threading.Event()

    def add(self, piece: Piece) -> None:
        self._pieces += 1
        self._added.append(piece)
        if not self._loop_will_look:
            self._loop_will_look = True
            self._loop.call_soon_threadsafe(self._start)

    def wait(self, every_s: float, report: Callable[[], None]) -> None:
        """Until all pieces are done, or one has failed. `report` is called meanwhile, and once at the end."""
        self._complete = True
        if self._done == self._pieces:
            self._ended.set()
        while not self._ended.wait(every_s):
            report()
        report()

    def results(self) -> list[Result]:
        """After `wait`. Raises the first exception that a piece has raised."""
        if self._failure is not None:
            raise self._failure
        return [task.result() for task in self._tasks]

    def cancel(self) -> None:
        """Cancel what is not done; does not wait."""
        self._loop.call_soon_threadsafe(self._cancel)

    # On the event loop --------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._loop_will_look = False  # before looking: what is added from now on wakes the loop again
        while self._added and not self._cancelled:
            task = self._loop.create_task(self._work(self._added.popleft()))
            self._tasks.append(task)
            task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[Result]) -> None:
        self._done += 1
        failure = asyncio.CancelledError() if task.cancelled() else task.exception()
        if failure is not None and self._failure is None:
            self._failure = failure
        if failure is not None or (self._complete and self._done == self._pieces):
            self._ended.set()

    def _cancel(self) -> None:
        self._cancelled = True
        for task in self._tasks:
            task.cancel()
