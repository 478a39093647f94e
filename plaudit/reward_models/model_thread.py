"""A thread that computes for one model, so that the event loop never does.

It takes everything that waits in its queue and computes it as one batch: many small questions asked side by side cost a few passes.
Loading and unloading wait in the same queue, so whatever was asked before is answered before.
"""

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any, Generic, NamedTuple, TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


class Closed(Exception):
    """The model has been closed."""


class _Ask(NamedTuple):
    items: Sequence[Any]
    future: Future[list[Any]]


class _Task(NamedTuple):
    do: Callable[[], Any]
    future: Future[Any]


class ModelThread(Generic[Item, Result]):
    """`compute` gets all items that wait, in the order they came, and gives a result for each."""

    def __init__(self, name: str, compute: Callable[[list[Item]], list[Result]], device: torch.device, *, gather_s: float = 0.0):
        """`gather_s`: how long a first question waits for others to come, before all of them are computed."""
        self._compute, self._device, self._gather_s = compute, device, gather_s
        self._queue: queue.SimpleQueue[_Ask | _Task | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self.closing = threading.Event()
        """What computes long looks here whether anyone still wants to know."""
        self.batches = 0
        self.busy_s = 0.0
        """Spent computing."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def ask(self, items: Sequence[Item]) -> list[Result]:
        """A result for each. Whoever stops waiting before it is computed is not computed for."""
        return await asyncio.wrap_future(self._put(_Ask(items, Future()))) if items else []

    async def do(self, task: Callable[[], Any]) -> Any:
        """Something else that the thread is to do, in its turn."""
        return await asyncio.wrap_future(self._put(_Task(task, Future())))

    async def close(self, last: Callable[[], Any]) -> None:
        """What still waits fails with Closed; `last` is done in the thread before it ends. Twice does no harm."""
        if not self.closing.is_set():
            done = _Task(last, Future())
            with self._lock:
                self.closing.set()
                self._queue.put(done)
                self._queue.put(None)
            await asyncio.wrap_future(done.future)
        await asyncio.to_thread(self._thread.join)

    def _put(self, waiting: "_Ask | _Task") -> Future[Any]:
        with self._lock:  # nothing comes behind the last task
            if self.closing.is_set():
                raise Closed("the model has been closed")
            self._queue.put(waiting)
        return waiting.future

    # In the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        on_gpu = self._device.type == "cuda"
        try:
            # A stream of its own: what the policy computes meanwhile need not wait for it, nor it for that.
            with torch.cuda.stream(torch.cuda.Stream(self._device)) if on_gpu else nullcontext():
                while self._serve(self._take_all()):
                    pass
        finally:
            self._end()

    def _end(self) -> None:
        """Nobody may wait for a thread that is no more, whatever it died of."""
        with self._lock:
            self.closing.set()
        while not self._queue.empty():
            if (left := self._queue.get()) is not None and left.future.set_running_or_notify_cancel():
                left.future.set_exception(Closed("the model's thread has ended"))

    def _take_all(self) -> "list[_Ask | _Task | None]":
        waiting = [self._queue.get()]
        if self._gather_s and isinstance(waiting[0], _Ask):
            time.sleep(self._gather_s)
        while True:
            try:
                waiting.append(self._queue.get_nowait())
            except queue.Empty:
                return waiting

    def _serve(self, waiting: "list[_Ask | _Task | None]") -> bool:
        """All of them, in order, with questions between two tasks as one batch. False at the end."""
        asks: list[_Ask] = []
        for one in waiting:
            if isinstance(one, _Ask):
                asks.append(one)
                continue
            self._answer(asks)
            asks = []
            if one is None:
                return False
            if one.future.set_running_or_notify_cancel():
                _settle(one.future, one.do)
        self._answer(asks)
        return True

    def _answer(self, asks: list[_Ask]) -> None:
        asks = [ask for ask in asks if ask.future.set_running_or_notify_cancel()]
        if self.closing.is_set():
            for ask in asks:
                ask.future.set_exception(Closed("the model was closed before it came to this"))
            return
        if not asks:
            return
        began = time.monotonic()
        together: Future[list[Any]] = Future()
        _settle(together, lambda: self._compute([item for ask in asks for item in ask.items]))
        self.batches += 1
        self.busy_s += time.monotonic() - began
        if (error := together.exception()) is not None:
            for ask in asks:
                ask.future.set_exception(error)
            return
        results = iter(together.result())
        for ask in asks:
            ask.future.set_result([next(results) for _ in ask.items])


def _settle(future: Future[Any], do: Callable[[], Any]) -> None:
    try:
        result = do()
    except BaseException as error:  # whoever waits must hear of it, whatever it is
        future.set_exception(error)
    else:
        future.set_result(result)
