"""Rendering and tokenising in several processes.

Started as programs of their own, not by multiprocessing, which would run the user's script again in each of them. Conversations go
in as JSON, tokens come back as bytes, in frames with their length in front. A worker ends when its input does: no worker outlives
this process, however it ends. Whatever a worker cannot do is done here.
"""

import json
import os
import queue
import signal
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import IO, TYPE_CHECKING, Any, Literal, Self, TypeVar

import numpy as np

from plaudit.data.control_tokens import SpecialTokens
from plaudit.errors import DataError
from plaudit.recipe import ModelSettings
from plaudit.threads import usable_cores
from plaudit.types import Conversation, Example

if TYPE_CHECKING:
    from plaudit.data.templates import ChatTemplate

T = TypeVar("T")
Located = tuple[str, Conversation]
"""A conversation and its location for error messages."""
Tokenise = Callable[[Sequence[Located]], Sequence[Example]]
MIN_BYTES = 16 << 20
"""Size of the data files from which on workers, which take seconds to start, are worth it."""
MAX_WORKERS = 16
"""Reading rows, which one process does, keeps no more busy."""
SIZE = struct.Struct("<Q")
# Run with -P: without it, `import json` would find a json.py of the current folder.
START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from plaudit.data.tokenise_workers import work; work()"


@dataclass(frozen=True)
class Tokeniser:
    """How conversations become tokens, so that another process can do the same."""

    model: ModelSettings
    special_tokens: SpecialTokens
    form: Literal["turns", "transcript"]
    """turns: with masks, for a policy. transcript: as a scalar model reads them."""
    train_on: Literal["all", "last"] = "all"

    def build(self, template: "ChatTemplate | None" = None) -> Tokenise:
        """`template`: the model's, if it is loaded already."""
        from plaudit.data.templates import load_model_template

        template = template or load_model_template(self.model, self.special_tokens)
        if self.form == "turns":
            return lambda conversations: template.examples(conversations, self.train_on)
        from plaudit.data.transcript import Transcript

        return Transcript(template.tokenizer, template.text, self.special_tokens).examples


class Workers:
    """Worker processes for one tokeniser; a context manager. With a count of 0, all work is done in this process."""

    def __init__(
        self, tokenise: Tokenise, tokeniser: Tokeniser | None = None, count: int = 0, report: Callable[[str], object] = print
    ):
        """`tokenise`: what `tokeniser` builds, in this process."""
        self._tokenise, self._report = tokenise, report
        self._processes = [] if tokeniser is None else self._start(tokeniser, count)
        self._free: queue.SimpleQueue[_Process] = queue.SimpleQueue()
        for process in self._processes:
            self._free.put(process)
        self._ending = False
        self._threads = ThreadPoolExecutor(max(1, len(self._processes)))

    def _start(self, tokeniser: Tokeniser, count: int) -> "list[_Process]":
        """As many as can be started."""
        start = asdict(tokeniser) | {"model": tokeniser.model.model_dump(mode="json")}
        processes = []
        try:
            for _ in range(count):
                processes.append(_Process(start))
        except OSError as error:  # a limit on processes or memory
            rest = "" if processes else "; the main process does their work"
            self._report(
                f"{len(processes)} of {count} processes to tokenise rows could be started ({error.strerror or error}){rest}"
            )
        return processes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._ending = True
        for process in self._processes:
            process.end()
        self._threads.shutdown(cancel_futures=True)

    def map(self, items: Iterable[tuple[T, Sequence[Located]]]) -> Iterator[tuple[T, Sequence[Example]]]:
        """Tokenise each item's conversations; results are in order."""
        if not self._processes:
            yield from ((item, self._tokenise(conversations)) for item, conversations in items)
            return
        ahead: deque[tuple[T, Sequence[Located], Future[list[Example] | None]]] = deque()
        for item, conversations in items:
            ahead.append((item, conversations, self._threads.submit(self._request, conversations)))
            if len(ahead) > 2 * len(self._processes):
                yield self._result(*ahead.popleft())
        while ahead:
            yield self._result(*ahead.popleft())

    def _result(
        self, item: T, conversations: Sequence[Located], future: "Future[list[Example] | None]"
    ) -> tuple[T, Sequence[Example]]:
        examples = future.result()
        return item, self._tokenise(conversations) if examples is None else examples

    def _request(self, conversations: Sequence[Located]) -> list[Example] | None:
        """None if it has to be done here."""
        process = self._free.get()
        try:
            return process.tokenise(conversations)
        except DataError:  # the row's fault
            raise
        except (OSError, EOFError, ValueError) as error:
            if not process.failed and not self._ending:
                process.failed = True
                self._report(f"a process that tokenised rows has ended ({error!r}); the main process does its work")
            return None
        except TypeError:  # values that JSON has no form for, as parquet files may have
            return None
        finally:
            self._free.put(process)


def worker_count(num_bytes: int) -> int:
    """Workers that are worth their start for data files of this size."""
    cores = usable_cores()
    return min(cores, MAX_WORKERS) if num_bytes >= MIN_BYTES and cores > 1 and sys.executable else 0


class _Process:
    def __init__(self, start: dict[str, Any]):
        self.failed = False
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", START, json.dumps(sys.path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        with suppress(OSError):  # it has ended at once: the first request says so
            _write(self._in, json.dumps(start).encode())

    def tokenise(self, conversations: Sequence[Located]) -> list[Example]:
        rows = [(where, c.messages, c.tools, c.train_from) for where, c in conversations]
        request = json.dumps(rows).encode()
        if self.failed:
            raise EOFError
        _write(self._in, request)
        answer = json.loads(_read(self._out))
        if "error" in answer:
            raise DataError(answer["error"])
        tokens = np.frombuffer(_read(self._out), dtype=np.int32)
        targets = np.frombuffer(_read(self._out), dtype=bool)
        cuts = np.cumsum(answer["lengths"])[:-1]
        return [Example(*columns) for columns in zip(np.split(tokens, cuts), np.split(targets, cuts), strict=True)]

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._in, self._out):
            with suppress(OSError):
                pipe.close()


def _write(pipe: IO[bytes], content: bytes) -> None:
    pipe.write(SIZE.pack(len(content)) + content)
    pipe.flush()


def _read(pipe: IO[bytes]) -> bytes:
    [size] = SIZE.unpack(_read_exactly(pipe, SIZE.size))
    return _read_exactly(pipe, size)


def _read_exactly(pipe: IO[bytes], size: int) -> bytes:
    content = pipe.read(size)
    if len(content) < size:
        raise EOFError
    return content


# In the worker -------------------------------------------------------------------------------------------------------


def work() -> None:
    """Answer requests until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    try:
        start = json.loads(_read(requests))
        model = ModelSettings(**start["model"])
        if not model.trust_remote_code:  # a tokenizer needs no torch, but transformers imports it if it can: seconds, and 300 MB
            sys.modules["torch"] = None  # pyright: ignore[reportArgumentType]
        tokenise = Tokeniser(**start | {"model": model}).build()
        while True:
            _answer(answers, tokenise, json.loads(_read(requests)))
    except (EOFError, BrokenPipeError):
        return


def _answer(answers: IO[bytes], tokenise: Tokenise, rows: list[list[Any]]) -> None:
    try:
        examples = tokenise([(where, Conversation(messages, tools, train_from)) for where, messages, tools, train_from in rows])
    except DataError as error:
        _write(answers, json.dumps({"error": str(error)}).encode())
        return
    _write(answers, json.dumps({"lengths": list(map(len, examples))}).encode())
    for column in ("tokens", "loss_mask"):
        _write(answers, b"".join(getattr(example, column).tobytes() for example in examples))
