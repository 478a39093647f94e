"""The worker process: loads a user's file, calls its functions, and reports the result of each call.

A process of its own, forked by `guard.py`, so that little but this file and the user's is imported: no torch, no second run of the
training program. Calls and answers go through `channel.py`. Whatever the user's code prints goes to a pipe, of which plaudit keeps
the end, and stdin is empty.
"""

import contextlib
import faulthandler
import inspect
import math
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Set
from functools import cache
from pathlib import Path
from typing import Any

from plaudit.rewards.functions.channel import WorkerEnd, out_of_the_way

LONGEST_TEXT = 10_000
"""Characters of a message or a trace that are kept."""


def work(channel: int) -> None:
    """Make calls until there are no more, or the parent is dead."""
    del sys.argv[1:]  # ours
    parent = WorkerEnd(channel)
    _report_crashes()
    start = parent.receive()
    sys.path[:] = start["sys_path"]
    code = Code(start)
    problem = code.load()
    parent.answer(problem or {"ready": True})
    if problem is not None:
        return
    with contextlib.suppress(EOFError):
        while True:
            for request in parent.receive():
                parent.answer(code.call(request))


def _report_crashes() -> None:
    output = out_of_the_way(os.dup(2))  # still there when the user's code has closed stderr
    faulthandler.enable(file=output)  # a crash prints its line
    faulthandler.register(signal.SIGUSR1, file=output, all_threads=False)  # so does a process that hangs, when it is signalled
    # When memory runs out, the system should end this process, not the training.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


class Code:
    """The user's file: what `UserCode` describes, loaded."""

    def __init__(self, start: Mapping[str, Any]):
        self._start, self._file = start, Path(start["path"])
        self._functions: dict[str, Callable] = {}
        self._accepted: list[str] = []
        """Which of the offered keyword arguments the function takes."""
        self._takes_columns = False
        """Whether it takes any further keyword argument."""
        self._columns: dict[str, bool] = {}
        """The columns that it names, and whether it needs them."""
        self._tokenizer: Any = None

    def load(self) -> dict | None:
        """None if all went well, else what is wrong, for the parent to explain."""
        from plaudit.plugins import module_from

        try:
            module = module_from(self._file)
        except BaseException as error:
            return {"problem": "import", "message": _describe(error, self._file)}
        for name in self._start["functions"]:
            function = getattr(module, name, None)
            if not callable(function):
                defined = [n for n, f in vars(module).items() if inspect.isfunction(f) and not n.startswith("_")]
                return {"problem": "missing", "missing": name, "functions": defined}
            self._functions[name] = function
        return self._match_parameters() or self._load_tokenizer()

    def _match_parameters(self) -> dict | None:
        offered, required, arguments = (self._start[key] for key in ("parameters", "required", "arguments"))
        if not offered:
            return None
        [(name, function)] = self._functions.items()
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):  # some callables written in C have none
            self._accepted = [n for n in offered if n not in arguments]
            return None
        takes_all = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
        self._accepted = [n for n in offered if (takes_all or n in signature.parameters) and n not in arguments]
        if self._start["columns"]:
            self._takes_columns, named = takes_all, signature.parameters.values()
            named = [p for p in named if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in arguments]
            self._columns = {p.name: p.default is p.empty for p in named}
            return None  # which columns there are is known with the first call
        try:
            signature.bind(**dict.fromkeys(self._accepted), **arguments)
            if required and required not in self._accepted:
                raise TypeError(f"it does not take {required}")
        except TypeError as error:
            return {"problem": "arguments", "message": str(error), "signature": f"{name}{signature}"}
        return None

    def _load_tokenizer(self) -> dict | None:
        if self._start["tokenizer"] is None:
            return None
        try:
            from transformers import AutoTokenizer

            trusted = self._start["trust_remote_code"]
            self._tokenizer = AutoTokenizer.from_pretrained(self._start["tokenizer"], trust_remote_code=trusted)
        except BaseException as error:
            return {"problem": "tokenizer", "message": _describe(error, self._file)}
        return None

    def call(self, pickled: bytes) -> dict:
        """The result as an answer (`process.Answer`), or a `cause` with its `message`."""
        try:
            request = pickle.loads(pickled)
            positional = [*request["positional"], *([self._tokenizer] if request["pass_tokenizer"] else [])]
            keywords = self._keywords(request["keywords"])
            result = self._functions[request["function"]](*positional, **keywords, **self._start["arguments"])
            if inspect.isawaitable(result):
                result = _event_loop().run_until_complete(result)
            match self._start["returns"]:
                case "score":
                    return _as_answer(result)
                case "scores":
                    return _as_entries(result, lambda i, entry: _as_answer(entry, f"entry {i} is"))
                case "optional scores":
                    return _as_entries(
                        result, lambda i, entry: {"value": None} if entry is None else _as_answer(entry, f"entry {i} is")
                    )
                case _:
                    return _as_entries(result, lambda _, entry: _as_entry(entry))
        except BaseException as error:  # sys.exit() too: an exception fails this call and nothing else
            return {"cause": "exception", "message": _describe(error, self._file, self._functions.values())}

    def _keywords(self, given: Mapping[str, Any]) -> dict[str, Any]:
        if not self._start["columns"]:
            return {name: given[name] for name in self._accepted}
        if missing := [name for name, needed in self._columns.items() if needed and name not in given]:
            raise TypeError(f"it needs {', '.join(missing)}, and the row has only {', '.join(given)}")
        return {name: value for name, value in given.items() if self._takes_columns or name in self._columns}


# Results -------------------------------------------------------------------------------------------------------------


def _as_entries(result: Any, convert: Callable[[int, Any], dict]) -> dict:
    """`entries`: each entry of the returned list, converted. A set is no list: its order means nothing."""
    if isinstance(result, str | bytes | Mapping | Set) or not hasattr(result, "__iter__"):
        return {"cause": "bad_result", "message": f"it returned {_short(result)[:300]}, not a list"}
    return {"entries": [convert(i, entry) for i, entry in enumerate(result)]}


def _as_entry(entry: Any) -> dict:
    if isinstance(entry, str):
        return {"text": entry}
    if isinstance(entry, list) and entry and all(isinstance(message, Mapping) and "role" in message for message in entry):
        return {"messages": [{str(key): str(value) for key, value in message.items()} for message in entry]}
    return _as_answer(entry)


@cache
def _event_loop() -> Any:
    import asyncio

    return asyncio.new_event_loop()  # one for all calls: objects that the function keeps may be bound to it


def _as_answer(result: Any, subject: str = "the function returned") -> dict:
    if not isinstance(result, Mapping):
        value = _number(result)
        return {"value": value} if value is not None else _not_a_number(subject, result)
    if "score" not in result:
        keys = ", ".join(map(str, result)) or "nothing"
        return {"cause": "bad_result", "message": f"{subject} a dict without 'score' (it has: {keys})"[:LONGEST_TEXT]}
    value = _number(result["score"])
    if value is None:
        return _not_a_number("'score' is", result["score"])
    answer = {"value": value, "parts": {}, "trace": {}, "malformed": False}
    for key, entry in result.items():
        if key == "malformed" and isinstance(entry, bool):
            answer["malformed"] = entry
        elif key != "score":
            part = _number(entry)
            where, what = ("parts", part) if part is not None else ("trace", _short(entry))
            answer[where][str(key)] = what
    return answer


def _number(result: Any) -> float | None:
    """A finite number as a float; also from a numpy scalar or a tensor of one number, not from text."""
    if callable(getattr(result, "item", None)) and getattr(result, "size", 1) != 0:
        with contextlib.suppress(ValueError, RuntimeError):  # more than one entry
            result = result.item()
    if not isinstance(result, int | float):  # a bool is an int
        return None
    try:
        number = float(result)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _not_a_number(what: str, result: Any) -> dict:
    return {"cause": "not_a_number", "message": f"{what} {_short(result)}"[:300]}


def _short(result: Any) -> str:
    return (result if isinstance(result, str) else repr(result))[:LONGEST_TEXT]


def _defined_in(function: Callable) -> str | None:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return None if code is None else code.co_filename


def _describe(error: BaseException, file: Path, functions: Iterable[Callable] = ()) -> str:
    """'ValueError: no digits, at reward.py:12': the innermost line in the user's file."""
    try:
        text = str(error)
    except Exception:
        text = "(its message cannot be printed)"
    if isinstance(error, SyntaxError) and error.lineno is not None:
        return f"{type(error).__name__}: {error.msg}, at {Path(error.filename or file).name}:{error.lineno}"
    # A function that was saved by value remembers where it was defined: a script, or a notebook's cell.
    saved = {name for name in map(_defined_in, functions) if name is not None}
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [(name, line) for name, line in frames if name == str(file) or name in saved]
    where = f", at {Path(own[-1][0]).name}:{own[-1][1]}" if own else ""
    return f"{type(error).__name__}: {text[:300]}{where}"
