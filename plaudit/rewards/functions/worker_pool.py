"""Worker processes for user code that may hang, crash or be killed: every call has a time limit and fails alone.

`WorkerPool` is the whole life cycle, shared by every kind that needs it (function, plugin, math): check the file, start the
processes, wait until they have loaded it, call, close.

Each process has a supervisor thread, which takes calls from a common queue, sends its process a few at a time and reads the
answers one by one, so that the limit applies to each call and starts with it. Each answer is proven to belong to its call
(`channel.py`). A process that exceeds its time or memory, or whose answer does not match, is killed with all its descendants
(`guard.py`), one that died is noticed, and the calls behind the bad one go to a new process. Only calls behind a mismatched answer,
which cannot be trusted either, may be made twice.

Differs from a pool of the standard library or pebble: processes share no pipe and no lock, so one that dies cannot harm another;
they are separate programs (fork and exec), so they inherit neither our threads and locks nor our main module. If we are killed,
their guards end them.
"""

import asyncio
import contextlib
import pickle
import queue
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from plaudit.errors import RecipeError, did_you_mean, nearest, nearest_path
from plaudit.rewards.functions.channel import Tampered
from plaudit.rewards.functions.process import Answer, Died, Silent, WorkerProcess
from plaudit.rewards.reward import last_line

IMPORT_S = 300.0
"""Time limit for loading the user's file, which may import big libraries from a slow disk."""
CALLS_AT_ONCE = 16
"""Most calls sent to a process at a time: enough to make the round trip cheap."""
DELIVERY_S = 0.005
"""How long an answer may wait for the next ones: they are delivered together, for each wake-up of the event loop costs."""
CANNOT_START = "cannot_start"
"""Cause of calls for which no process could be started; unlike `died`, not the call's fault."""


@dataclass(frozen=True)
class UserCode:
    """A Python file and how its functions are called; sent to every worker process."""

    path: str
    functions: tuple[str, ...]
    parameters: tuple[str, ...] = ()
    """Keyword arguments that every call offers; a function that declares fewer gets fewer."""
    required: str = ""
    """The one of these that the function must take."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further keyword arguments, the same in every call."""
    columns: bool = False
    """Calls may have further keyword arguments, which the function gets as far as it takes them."""
    returns: Literal["score", "scores", "optional scores", "list"] = "score"
    """One score; a list of scores; the same, with None where it does not apply; or a list of texts, messages or scores."""
    setting: str | None = None
    """The setting that names the function, if there is one."""
    tokenizer: str | None = None
    """Loaded in the process, for calls that pass it on."""
    trust_remote_code: bool = False


class CannotStart(Exception):
    """The process could not load what it is to call; `answer` is its report."""

    def __init__(self, answer: Answer):
        super().__init__(answer.get("message", ""))
        self.answer = answer


@dataclass(frozen=True)
class _Call:
    request: bytes
    future: asyncio.Future[Answer]


class WorkerPool:
    """Processes that call a user's functions. `open` starts them, `close` kills them; all in one event loop."""

    _loop: asyncio.AbstractEventLoop

    def __init__(self, code: UserCode, label: str, *, count: int, timeout_s: float, memory_gb: float | None):
        """`label`: the reward's, for messages. The limits apply to one call, and to one process with its descendants."""
        self._code, self._label, self._count, self._timeout_s, self._memory_gb = code, label, count, timeout_s, memory_gb
        self._path = Path(code.path).expanduser()
        self._program = self._path.resolve()
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._processes: dict[int, WorkerProcess] = {}
        self._supervisors: list[threading.Thread] = []
        self._lock, self._closed = threading.Lock(), False

    async def open(self) -> None:
        """Start the processes and wait until each has loaded the file. Raises a RecipeError if one cannot."""
        if not self._path.is_file():
            folder = self._path.is_dir()
            problem = "is a folder; name a Python file in it." if folder else f"does not exist.{nearest_path(self._path)}"
            raise RecipeError(f"reward '{self._label}': {self._path} {problem}")
        self._loop = asyncio.get_running_loop()
        start = pickle.dumps({**asdict(self._code), "path": str(self._program), "sys_path": sys.path})
        loaded: list[Future[None]] = [Future() for _ in range(self._count)]
        for index, future in enumerate(loaded):
            future.set_running_or_notify_cancel()  # a waiter that is cancelled does not stop the start
            thread = threading.Thread(target=self._supervise, args=(index, start, future), name=f"worker-{index}", daemon=True)
            self._supervisors.append(thread)
            thread.start()
        try:
            await asyncio.gather(*map(asyncio.wrap_future, loaded))
        except CannotStart as error:
            raise RecipeError(f"reward '{self._label}': {self._explain(error.answer)}") from None

    async def close(self) -> None:
        """Kill every process at once and cancel the calls that are waiting."""
        await asyncio.to_thread(self._close)

    def call(
        self,
        function: str,
        *positional: Any,
        pass_tokenizer: bool = False,
        columns: Mapping[str, Any] | None = None,
        **keywords: Any,
    ) -> asyncio.Future[Answer]:
        """One call, made when a process is free. Whatever the function does, the future has an answer. `columns`: keyword arguments
        with any names."""
        keywords = {**(columns or {}), **keywords}
        request = {"function": function, "positional": positional, "keywords": keywords, "pass_tokenizer": pass_tokenizer}
        assert self._supervisors, "a reward is opened before it scores"
        future: asyncio.Future[Answer] = self._loop.create_future()
        if self._closed:
            future.cancel()
            return future
        try:
            self._calls.put(_Call(pickle.dumps(request), future))
        except Exception as error:
            message = f"the row cannot be sent to a worker process: {type(error).__name__}: {error}"
            future.set_result({"cause": "exception", "message": message})
        return future

    def _explain(self, answer: Answer) -> str:
        """Why a process could not start, in terms of the user's file."""
        path = self._path
        match answer.get("problem"):
            case "import":
                return f"{path} cannot be imported: {answer['message']}"
            case "missing":
                name, defined = answer["missing"], answer["functions"]
                hint = did_you_mean(name, defined)
                if self._code.setting is not None and defined:
                    hint += f" The setting `{self._code.setting}: {nearest(name, defined) or defined[0]}` names another."
                return f"{path} has no function {name} (it has: {', '.join(defined) or 'none'}).{hint}"
            case "arguments":
                *most, last = self._code.parameters
                passed = f"It is passed {', '.join(most)} and {last}, as far as it takes them, and the settings under `arguments`."
                return f"{path}: {answer['signature']} cannot be called: {answer['message']}. {passed}"
            case "tokenizer":
                return f"no tokenizer could be loaded from {self._code.tokenizer} for {path.name}: {answer['message']}"
            case _:
                return str(answer.get("message"))

    def _close(self) -> None:
        with self._lock:
            self._closed = True
            for process in self._processes.values():
                process.kill()  # its supervisor, which may be reading from it, does the rest
        for _ in self._supervisors:
            self._calls.put(None)
        for thread in self._supervisors:
            thread.join()

    # A supervisor's thread --------------------------------------------------------------------------------------------

    def _supervise(self, index: int, start: bytes, loaded: Future[None]) -> None:
        try:
            self._process(index, start)
            loaded.set_result(None)
        except Exception as error:
            loaded.set_exception(error if isinstance(error, CannotStart) else CannotStart({"message": last_line(error)}))
        while (call := self._calls.get()) is not None:
            batch = [call, *self._take_share()]
            if self._closed:
                self._run_in_loop(_cancel, batch)
                continue
            batch = [call for call in batch if not call.future.cancelled()]
            try:
                self._make_calls(batch, index, start)
            except Exception as error:  # a bug here must not leave a caller waiting for ever
                self._fail(batch, "died", last_line(error))
                self._end(index)
        self._end(index)

    def _take_share(self) -> list[_Call]:
        """A fair share of the waiting calls, so that no supervisor holds calls that another could make."""
        share = min(CALLS_AT_ONCE, self._calls.qsize() // self._count)
        calls = []
        while len(calls) < share - 1:
            try:
                call = self._calls.get_nowait()
            except queue.Empty:
                break
            if call is None:
                self._calls.put(None)  # the end mark of another supervisor
                break
            calls.append(call)
        return calls

    def _make_calls(self, batch: list[_Call], index: int, start: bytes) -> None:
        """Make the calls in order; one that hangs or kills its process fails, and the rest continue in a new process."""
        while batch:
            try:
                process = self._process(index, start)
            except CannotStart as error:
                self._fail(batch, CANNOT_START, f"a worker process could not start again: {error}")
                return
            process.send([call.request for call in batch])
            answers: list[Answer] = []
            try:
                while batch:
                    answers.append(process.answer(self._timeout_s))
                    if len(answers) == len(batch) or not process.has_more(DELIVERY_S):
                        self._deliver(batch, answers)
            except Silent:
                answers.append(process.timeout(self._timeout_s))
            except Tampered as error:
                answers.append(process.tampering(error))
            except Died:
                answers.append(process.death())
            else:
                return
            self._end(index)
            self._deliver(batch, answers)

    def _deliver(self, batch: list[_Call], answers: list[Answer]) -> None:
        """Give answers to the first calls of the batch, and remove both."""
        settled = list(zip(batch, answers, strict=False))
        del batch[: len(settled)]
        answers.clear()
        self._run_in_loop(_settle, settled)

    def _fail(self, batch: list[_Call], cause: str, message: str) -> None:
        self._deliver(batch, [{"cause": cause, "message": message} for _ in batch])

    def _run_in_loop(self, action: Callable[[list[Any]], None], content: list[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(action, content)

    def _end(self, index: int) -> None:
        with self._lock:
            process = self._processes.pop(index, None)
        if process is not None:
            process.end()

    def _process(self, index: int, start: bytes) -> WorkerProcess:
        """This supervisor's process, ready for calls: a new one if there is none yet or the last one has died."""
        process = self._processes.get(index)
        if process is not None and process.idle:
            return process
        self._end(index)
        with self._lock:
            if self._closed:
                raise CannotStart({"problem": "closed", "message": "the workers are closed"})
            try:
                process = self._processes[index] = WorkerProcess(start, self._program, self._memory_gb)
            except OSError as error:
                raise CannotStart({"problem": "system", "message": f"no process can be started: {error}"}) from error
        try:
            answer = process.answer(IMPORT_S)
        except Silent:
            answer = {"problem": "import", "message": f"not done {process.timeout(IMPORT_S)['message']}"}
        except Tampered as error:
            answer = {"problem": "import", **process.tampering(error)}
        except Died:
            answer = {"problem": "import", **process.death()}
        if "ready" not in answer:
            self._end(index)
            raise CannotStart(answer)
        return process


def _settle(answers: list[tuple[_Call, Answer]]) -> None:
    for call, answer in answers:
        if not call.future.done():  # cancelled while its answer was on the way
            call.future.set_result(answer)


def _cancel(calls: list[_Call]) -> None:
    for call in calls:
        call.future.cancel()
