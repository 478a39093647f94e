"""The other side of a user's function: a process that loads the file, calls the function, and says what came of each call.

Started by `workers.py` as a script, so that nothing but this file and the user's is imported: no torch, no second
run of the program that trains. What it is asked comes as pickles on stdin, what it answers goes as lines of JSON to stdout;
both are moved out of the function's reach first. Whatever the function prints ends in stderr, of which the parent keeps the end.
"""

import contextlib
import faulthandler
import inspect
import json
import math
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

LONGEST_TEXT = 10_000
"""Characters of a message or a trace that are kept."""
ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""What verl gives a function. One that takes fewer of them is given fewer."""


def main() -> None:
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.dup(1)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    _prepare_for_the_worst()
    start = pickle.load(requests)
    sys.path[:] = start["sys_path"]
    file, pid = Path(start["path"]), os.getpid()
    if (lists := start.get("lists")) is not None:
        function, names, problem = _load_lists(file, lists)
    else:
        function, names, problem = _load(file, start["function"], start["arguments"])
    _say(answers, problem or {"ready": True})
    if function is None:
        return
    while True:
        try:
            batch: list[bytes] = pickle.load(requests)
        except EOFError:
            return  # the parent is done, or dead
        for request in batch:
            if lists is not None:
                answer = _call_lists(function, request, file)
            else:
                answer = _call(function, names, start["arguments"], request, file)
            if os.getpid() != pid:
                os._exit(0)  # a child that the function forked, and that came back out of it
            _say(answers, answer)


def _prepare_for_the_worst() -> None:
    faulthandler.enable()  # a crash names its line
    faulthandler.register(signal.SIGUSR1, all_threads=False)  # and so does what hangs, when the parent asks
    # When memory runs out, the system should end this process, not the training.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _say(answers: int, answer: dict) -> None:
    line = memoryview(json.dumps(answer).encode() + b"\n")
    while line:
        line = line[os.write(answers, line) :]


# Loading -------------------------------------------------------------------------------------------------------------


def _load(file: Path, name: str, arguments: Mapping[str, Any]) -> tuple[Callable | None, list[str], dict]:
    """The function and which of ARGUMENTS it takes; or what is wrong with it, for the parent to tell."""
    from plaudit.plugins import module_from

    try:
        module = module_from(file)
    except BaseException as error:
        return None, [], {"problem": "import", "message": _describe(error, file)}
    function = getattr(module, name, None)
    if not callable(function):
        here = [n for n, f in vars(module).items() if inspect.isfunction(f) and not n.startswith("_")]
        return None, [], {"problem": "missing", "functions": here}
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some callables written in C do not tell
        return function, list(ARGUMENTS), {}
    takes_all = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    names = [n for n in ARGUMENTS if (takes_all or n in signature.parameters) and n not in arguments]
    try:
        signature.bind(**dict.fromkeys(names), **arguments)
        if "solution_str" not in names:
            raise TypeError("it does not take solution_str, the response")
    except TypeError as error:
        return None, [], {"problem": "arguments", "message": str(error), "signature": f"{name}{signature}"}
    return function, names, {}


def _load_lists(file: Path, lists: Mapping[str, Any]) -> tuple[Callable | None, list[str], dict]:
    """A function that calls those that `lists` names; or what is wrong with them."""
    from plaudit.plugins import module_from

    try:
        module = module_from(file)
    except BaseException as error:
        return None, [], {"problem": "import", "message": _describe(error, file)}
    functions: dict[str, Any] = {name: getattr(module, name, None) for name in lists["functions"]}
    if missing := [name for name, function in functions.items() if not callable(function)]:
        here = [n for n, f in vars(module).items() if inspect.isfunction(f) and not n.startswith("_")]
        return None, [], {"problem": "missing", "missing": missing, "functions": here}
    tokenizer = None
    if lists["tokenizer"] is not None:
        try:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(lists["tokenizer"], trust_remote_code=lists["trust_remote_code"])
        except BaseException as error:
            return None, [], {"problem": "tokenizer", "message": _describe(error, file)}

    def call(name: str, given: list[list], *, with_tokenizer: bool) -> Any:
        return functions[name](*given, *([tokenizer] if with_tokenizer else []))

    return call, [], {}


# Calling -------------------------------------------------------------------------------------------------------------


def _call(function: Callable, names: list[str], arguments: dict, request: bytes, file: Path) -> dict:
    """`value` with its `parts`, or a `cause` with its `message`."""
    try:
        given = pickle.loads(request)
        result = function(**{name: given[name] for name in names}, **arguments)
        if inspect.isawaitable(result):
            result = _event_loop().run_until_complete(result)
        return _as_answer(result)
    except BaseException as error:  # sys.exit() too: what a function raises fails its sample and nothing else
        return {"cause": "exception", "message": _describe(error, file)}


def _call_lists(function: Callable, request: bytes, file: Path) -> dict:
    """`entries`: for each entry of the list that came back, `text` or `messages`, or what `_as_answer` makes of it."""
    try:
        result = function(**pickle.loads(request))
        if inspect.isawaitable(result):
            result = _event_loop().run_until_complete(result)
        if isinstance(result, str | Mapping) or not hasattr(result, "__iter__"):
            return {"cause": "bad_result", "message": f"it returned {_short(result)[:300]}, not a list"}
        return {"entries": [_as_entry(entry) for entry in result]}
    except BaseException as error:
        return {"cause": "exception", "message": _describe(error, file)}


def _as_entry(entry: Any) -> dict:
    if isinstance(entry, str):
        return {"text": entry}
    if isinstance(entry, list) and entry and all(isinstance(message, Mapping) and "role" in message for message in entry):
        return {"messages": [{str(key): str(value) for key, value in message.items()} for message in entry]}
    return _as_answer(entry)


@cache
def _event_loop() -> Any:
    import asyncio

    return asyncio.new_event_loop()  # one for all calls: what the function keeps between them may belong to it


def _as_answer(result: Any) -> dict:
    if not isinstance(result, Mapping):
        value = _number(result)
        return {"value": value} if value is not None else _not_a_number("the function returned", result)
    if "score" not in result:
        keys = ", ".join(map(str, result)) or "nothing"
        return {"cause": "bad_result", "message": f"the function returned a dict without 'score' (it has: {keys})"[:LONGEST_TEXT]}
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


def _number(given: Any) -> float | None:
    """A finite number as a float; a numpy scalar or a tensor of one number counts as one, text does not."""
    if callable(getattr(given, "item", None)) and getattr(given, "size", 1) != 0:
        with contextlib.suppress(ValueError, RuntimeError):  # more than one entry
            given = given.item()
    if not isinstance(given, int | float):  # a bool is an int
        return None
    try:
        number = float(given)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _not_a_number(what: str, given: Any) -> dict:
    return {"cause": "not_a_number", "message": f"{what} {_short(given)}"[:300]}


def _short(given: Any) -> str:
    return (given if isinstance(given, str) else repr(given))[:LONGEST_TEXT]


def _describe(error: BaseException, file: Path) -> str:
    """'ValueError: no digits, at reward.py:12', the line being the user's own."""
    try:
        text = str(error)
    except Exception:
        text = "(its message cannot be printed)"
    if isinstance(error, SyntaxError) and error.lineno is not None:
        return f"{type(error).__name__}: {error.msg}, at {Path(error.filename or file).name}:{error.lineno}"
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == str(file)]
    where = f", at {file.name}:{lines[-1]}" if lines else ""
    return f"{type(error).__name__}: {text[:300]}{where}"


if __name__ == "__main__":
    main()
