"""A thread that runs one model, so that the event loop never blocks.

It takes everything in its queue (or `most_items` of it) and computes it as one batch: many small concurrent requests cost a few
passes. Loading and unloading go through the same queue, after all requests that came before.
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


class _Request(NamedTuple):
    items: Sequence[Any]
    future: Future[list[Any]]


class _Task(NamedTuple):
    do: Callable[[], Any]
    future: Future[Any]


class ModelThread(Generic[Item, Result]):
    """`compute` gets all waiting items, in order of arrival, and returns a result for each."""

    def __init__(
        self,
        name: str,
        compute: Callable[[list[Item]], list[Result]],
        device: torch.device,
        *,
        gather_s: float = 0.0,
        most_items: int | None = None,
    ):
        """`gather_s`: how long the first request waits for others to join its batch. `most_items`: a batch with as many takes no
        further request."""
        self._compute, self._device, self._gather_s, self._most_items = compute, device, gather_s, most_items
        self._queue: queue.SimpleQueue[_Request | _Task | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self.closing = threading.Event()
        """Long computations check this to stop early."""
        self.batches = 0
        self.busy_s = 0.0
        """Time spent computing."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def compute(self, items: Sequence[Item]) -> list[Result]:
        """A result for each item. A caller that is cancelled while waiting is skipped."""
        return await asyncio.wrap_future(self.put(items))

    async def do(self, task: Callable[[], Any]) -> Any:
        """Run another task in the thread, in its turn."""
        return await asyncio.wrap_future(self.put_task(task))

    def put(self, items: Sequence[Item]) -> Future[list[Result]]:
        """`compute` from another thread."""
        if items:
            return self._put(_Request(items, Future()))
        nothing: Future[list[Result]] = Future()
        nothing.set_result([])
        return nothing

    def put_task(self, task: Callable[[], Any]) -> Future[Any]:
        return self._put(_Task(task, Future()))

    async def close(self, last: Callable[[], Any]) -> None:
        """Waiting requests fail with Closed; `last` runs in the thread before it ends. A second call does nothing."""
        if not self.closing.is_set():
            done = _Task(last, Future())
            with self._lock:
                self.closing.set()
                self._queue.put(done)
                self._queue.put(None)
            await asyncio.wrap_future(done.future)
        await asyncio.to_thread(self._thread.join)

    def _put(self, waiting: "_Request | _Task") -> Future[Any]:
        with self._lock:  # nothing may follow the last task
            if self.closing.is_set():
                raise Closed("the model has been closed")
            self._queue.put(waiting)
        return waiting.future

    # In the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        on_gpu = self._device.type == "cuda"
        try:
            # Its own stream, so that it and the policy do not wait for each other.
            with torch.cuda.stream(torch.cuda.Stream(self._device)) if on_gpu else nullcontext():
                while self._serve(self._take_all()):
                    pass
        finally:
            self._end()

    def _end(self) -> None:
        """Fail what is left in the queue: no caller may wait for a thread that has ended."""
        with self._lock:
            self.closing.set()
        while not self._queue.empty():
            if (left := self._queue.get()) is not None and left.future.set_running_or_notify_cancel():
                left.future.set_exception(Closed("the model's thread has ended"))

    def _take_all(self) -> "list[_Request | _Task | None]":
        waiting = [self._queue.get()]
        if self._gather_s and isinstance(waiting[0], _Request):
            time.sleep(self._gather_s)
        items = 0
        while True:
            items += len(waiting[-1].items) if isinstance(waiting[-1], _Request) else 0
            if self._most_items is not None and items >= self._most_items:
                return waiting
            try:
                waiting.append(self._queue.get_nowait())
            except queue.Empty:
                return waiting

    def _serve(self, waiting: "list[_Request | _Task | None]") -> bool:
        """Process all of them in order, the requests between two tasks as one batch. False at the end."""
        requests: list[_Request] = []
        for entry in waiting:
            if isinstance(entry, _Request):
                requests.append(entry)
                continue
            self._answer(requests)
            requests = []
            if entry is None:
                return False
            if entry.future.set_running_or_notify_cancel():
                _settle(entry.future, entry.do)
        self._answer(requests)
        return True

    def _answer(self, requests: list[_Request]) -> None:
        requests = [request for request in requests if request.future.set_running_or_notify_cancel()]
        if self.closing.is_set():
            for request in requests:
                request.future.set_exception(Closed("the model was closed before this request"))
            return
        if not requests:
            return
        began = time.monotonic()
        batch: Future[list[Any]] = Future()
        _settle(batch, lambda: self._compute([item for request in requests for item in request.items]))
        self.batches += 1
        self.busy_s += time.monotonic() - began
        if (error := batch.exception()) is not None:
            for request in requests:
                request.future.set_exception(error)
            return
        results = iter(batch.result())
        for request in requests:
            request.future.set_result([next(results) for _ in request.items])


def _settle(future: Future[Any], do: Callable[[], Any]) -> None:
    try:
        result = do()
    except BaseException as error:  # the waiting caller must get it, whatever it is
        future.set_exception(error)
    else:
        future.set_result(result)
