"""A user's function in processes that may hang, crash or be killed: each call has a time limit and fails alone.

A thread keeps each process: it takes calls from one queue, hands its process a few at a time, and reads the answers one by one, so
the limit is each call's own and begins when the call does. A process that is silent for longer is killed with all its children,
one that died is noticed, and the calls behind the bad one go to a new process; no call is made twice.

Differs from a pool of the standard library or pebble: processes share no pipe and no lock, so that one which dies anywhere harms
no other; they are programs of their own (fork and exec), so that neither our threads and locks nor our main module get into them.
A shell that waits for our end kills what is left when we are killed.
"""

import asyncio
import pickle
import queue
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plaudit.rewards.functions.process import Answer, Died, Process, Silent
from plaudit.rewards.reward import last_line

IMPORT_S = 300.0
"""What loading the user's file may take: it may import big libraries from a slow disk."""
CALLS_AT_ONCE = 16
"""Most calls that a process is handed at a time: enough to make the way there and back cheap."""


CANNOT_START = "cannot_start"
"""The cause of calls that no process could be started for: not their own doing, as `died` is."""


class CannotStart(Exception):
    """The process has no function to call; `answer` says why."""

    def __init__(self, answer: Answer):
        super().__init__(answer.get("message", ""))
        self.answer = answer


@dataclass(frozen=True)
class _Call:
    request: bytes
    future: Future[Answer]


class Workers:
    """Processes that call `function` of the file `path`, each with its keeper."""

    def __init__(
        self,
        path: Path,
        function: str,
        arguments: Mapping[str, Any],
        *,
        count: int,
        timeout_s: float,
        lists: Mapping[str, Any] | None = None,
    ):
        """`lists`: functions that take lists and give lists (a plugin's), instead of one that scores a sample."""
        self._path = path.resolve()
        start = {"path": str(self._path), "function": function, "arguments": dict(arguments), "sys_path": sys.path, "lists": lists}
        self._start, self._timeout_s, self._count = pickle.dumps(start), timeout_s, count
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._processes: dict[int, Process] = {}
        self._lock, self._closed = threading.Lock(), False
        self.started: list[Future[None]] = [Future() for _ in range(count)]
        """Done when each process has loaded the file; raises CannotStart where one could not."""
        self._keepers = [threading.Thread(target=self._keep, args=(i,), name=f"worker-{i}", daemon=True) for i in range(count)]
        for started, keeper in zip(self.started, self._keepers, strict=True):
            started.set_running_or_notify_cancel()  # whoever waits for it may stop waiting; it goes on
            keeper.start()

    async def ready(self) -> None:
        """Wait until every process has loaded the file; raises CannotStart if one could not."""
        await asyncio.gather(*map(asyncio.wrap_future, self.started))

    def call(self, **given: Any) -> Future[Answer]:
        """One call, to be made when a process is free. Never raises for what the function does."""
        future: Future[Answer] = Future()
        if self._closed:
            future.cancel()
            return future
        try:
            self._calls.put(_Call(pickle.dumps(given), future))
        except Exception as error:
            message = f"the row cannot be sent to a worker process: {type(error).__name__}: {error}"
            future.set_result({"cause": "exception", "message": message})
        return future

    def close(self) -> None:
        """Kill every process, at once. Calls that wait are cancelled."""
        with self._lock:
            self._closed = True
            for process in self._processes.values():
                process.kill()  # its keeper, who may be reading from it, does the rest
        for _ in self._keepers:
            self._calls.put(None)
        for keeper in self._keepers:
            keeper.join()

    # A keeper's thread ----------------------------------------------------------------------------------------------

    def _keep(self, index: int) -> None:
        try:
            self._process(index)
            self.started[index].set_result(None)
        except Exception as error:
            known = isinstance(error, CannotStart)
            self.started[index].set_exception(error if known else CannotStart({"message": last_line(error)}))
        while (call := self._calls.get()) is not None:
            batch = [call, *self._more()]
            if self._closed:
                for waiting in batch:
                    waiting.future.cancel()
                continue
            batch = [call for call in batch if call.future.set_running_or_notify_cancel()]
            try:
                self._make(batch, index)
            except Exception as error:  # ours to mend; but whoever waits for the calls must not wait for ever
                for waiting in batch:
                    waiting.future.set_result({"cause": "died", "message": last_line(error)})
                self._end(index)
        self._end(index)

    def _more(self) -> list[_Call]:
        """A fair share of what waits, so that no keeper sits on calls that another could make."""
        share = min(CALLS_AT_ONCE, self._calls.qsize() // self._count)
        taken = []
        while len(taken) < share - 1:
            try:
                call = self._calls.get_nowait()
            except queue.Empty:
                break
            if call is None:
                self._calls.put(None)  # the end is for all keepers to see
                break
            taken.append(call)
        return taken

    def _make(self, batch: list[_Call], index: int) -> None:
        """Make the calls in order; one that hangs or kills its process fails, and the next ones have a new process."""
        while batch:
            try:
                process = self._process(index)
            except CannotStart as error:
                message = f"a worker process could not start again: {error}"
                for call in batch:
                    call.future.set_result({"cause": CANNOT_START, "message": message})
                return
            process.send([call.request for call in batch])
            try:
                while batch:
                    answer = process.answer(self._timeout_s)
                    batch.pop(0).future.set_result(answer)
            except Silent:
                answer = {"cause": "timeout", "message": f"after {self._timeout_s:g} s{process.where()}"}
            except Died:
                answer = {"cause": "died", "message": process.epitaph()}
            else:
                return
            self._end(index)
            batch.pop(0).future.set_result(answer)

    def _end(self, index: int) -> None:
        with self._lock:
            process = self._processes.pop(index, None)
        if process is not None:
            process.end()

    def _process(self, index: int) -> Process:
        """This keeper's process, ready for calls: a new one if there is none, or if it has died in the meantime."""
        process = self._processes.get(index)
        if process is not None and process.alive:
            return process
        self._end(index)
        with self._lock:
            if self._closed:
                raise CannotStart({"problem": "closed", "message": "the workers are closed"})
            try:
                process = self._processes[index] = Process(self._start, self._path)
            except OSError as error:
                raise CannotStart({"problem": "system", "message": f"no process can be started: {error}"}) from error
        try:
            answer = process.answer(IMPORT_S)
        except Silent:
            answer = {"problem": "import", "message": f"not done after {IMPORT_S:g} s{process.where()}"}
        except Died:
            answer = {"problem": "import", "message": process.epitaph()}
        if "ready" not in answer:
            self._end(index)
            raise CannotStart(answer)
        return process
