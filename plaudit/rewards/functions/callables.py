"""Python functions as rewards: what a recipe says about a function that a script or a notebook passes as an object.

A function of an importable file is named by that file (`path: rewards.py, function: my_reward`). All others (defined in a script's
main module or a notebook, closures, lambdas, callable objects, functions of packages) are saved by value as a Python file in the
run folder, which worker processes load like any other; so the same limits apply, and the run resumes from the command line.

How a function is called follows from the names of its parameters (`Function.scores`):

    solution_str                       sample: one response, as verl calls it
    responses                          group: all responses to a prompt
    completions or completion_ids      trl: all responses to a prompt, as TRL calls it
"""

import base64
import hashlib
import importlib.machinery
import inspect
import os
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from plaudit.errors import RecipeError
from plaudit.files import text_digest
from plaudit.input_files import InputFile, function_file_name
from plaudit.recipe import RewardSettings

SCORES = {"solution_str": "sample", "responses": "group", "completions": "trl", "completion_ids": "trl"}
"""What a function scores, by the name of a parameter."""
MAX_SAVED_BYTES = 64 << 20


def reward_entries(rewards: Any) -> Any:
    """Rewards from Python, or a single one, as under `rewards:` in a recipe. Functions become entries; `path` may be an InputFile.
    Anything else is returned as it is: checking the recipe reports it."""
    if callable(rewards) or isinstance(rewards, Mapping | RewardSettings):
        rewards = [rewards]
    if isinstance(rewards, str) or not isinstance(rewards, Iterable):
        return rewards
    entries: list[Any] = []
    for reward in rewards:
        if isinstance(reward, RewardSettings):
            entries.append(reward.model_dump(mode="json", exclude_unset=True))
        elif isinstance(reward, Mapping) and callable(function := reward.get("function")):
            entries.append(_function_entry(function, reward, entries))
        elif callable(reward):
            entries.append(_function_entry(reward, {}, entries))
        else:
            entries.append(dict(reward) if isinstance(reward, Mapping) else reward)
    return entries


def _function_entry(function: Callable[..., Any], settings: Mapping[str, Any], others: Sequence[Any]) -> dict[str, Any]:
    """The entry of a function, with further settings of it."""
    name, taken = _name(function), [entry.get("name") for entry in others if isinstance(entry, Mapping)]
    label = str(settings.get("name") or next(n for i in count(1) if (n := name if i == 1 else f"{name}_{i}") not in taken))
    entry = {"kind": "function", "scores": _scores(function, label), **settings, "name": label}
    file = _importable_file(function)
    if file is not None:
        return {**entry, "path": file, "function": function.__name__}
    return {**entry, "path": _save(function, name, label), "function": name}


def _name(function: Callable[..., Any]) -> str:
    """An identifier for it: its own name, if it has one."""
    inner = function.func if isinstance(function, partial) else function
    name = getattr(inner, "__name__", type(inner).__name__)
    return name if name.isidentifier() else "reward"


def _scores(function: Callable[..., Any], label: str) -> str:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        parameters = {}
    for parameter, scores in SCORES.items():
        if parameter in parameters:
            return scores
    raise RecipeError(
        f"reward '{label}': plaudit passes arguments by name and finds none of {', '.join(SCORES)} in {label}"
        f"({', '.join(parameters)}). A reward is called as in verl: (data_source, solution_str, ground_truth, extra_info); as in "
        "TRL: (prompts, completions, **columns); or for a group: (prompts, responses, ground_truths, extra_infos)."
    )


def _importable_file(function: Callable[..., Any]) -> str | None:
    """The file of a function that worker processes can load from it: a top-level name in a module that is not in a package."""
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    name, file = getattr(function, "__name__", ""), getattr(module, "__file__", None)
    if module is None or module.__name__ == "__main__" or "." in module.__name__ or not file or not file.endswith(".py"):
        return None
    if not isinstance(function, FunctionType) or vars(module).get(name) is not function:
        return None
    relative = os.path.relpath(file)
    return file if relative.startswith("..") else relative


# Saving by value -----------------------------------------------------------------------------------------------------


def _save(function: Callable[..., Any], name: str, label: str) -> InputFile:
    import cloudpickle

    try:
        with _unimportable_modules_by_value(function):
            pickled = cloudpickle.dumps(function)
    except Exception as error:  # pickling runs methods of any object that the function refers to
        raise RecipeError(
            f"reward '{label}': {name} cannot be sent to worker processes: {type(error).__name__}: {error}. It refers to an object "
            "that cannot be pickled (an open file, a connection, a lock): create it inside the function, or put the function into "
            "a file and pass {'kind': 'function', 'path': 'my_rewards.py', 'function': ...}."
        ) from None
    if len(pickled) > MAX_SAVED_BYTES:
        raise RecipeError(
            f"reward '{label}': {name} refers to {len(pickled) >> 20} MB of data, which every worker process would get. Load them "
            "inside the function, or put it into a file that does."
        )
    # The pickle differs between sessions that ran the same notebook; the digest of the code does not.
    digest = code_digest(function)
    return InputFile(function_file_name(label, digest), digest, _as_file(function, name, pickled, digest).encode())


def _as_file(function: Callable[..., Any], name: str, pickled: bytes, digest: str) -> str:
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):  # defined by exec, or an object
        source = "(not available)"
    version, folder = sys.version_info[:2], os.path.abspath(sys.path[0] or ".")
    lines = [
        f'"""The reward function {name}, saved by plaudit so that its run can be resumed. To change it, pass another one."""',
        "",
        *(f"#   {line}".rstrip() for line in source.splitlines()),
        f"# Digest of its code: {digest}",
        "",
        "import base64",
        "import pickle",
        "import sys",
        "",
        f"if sys.version_info[:2] != {version}:",
        f'    raise ImportError("saved by Python {version[0]}.{version[1]}: use that, or pass the function again")',
        f"sys.path.append({folder!r})",
        f"{name} = pickle.loads(base64.b85decode({base64.b85encode(pickled).decode()!r}))",
        "",
    ]
    return "\n".join(lines)


@contextmanager
def _unimportable_modules_by_value(function: Callable[..., Any]) -> Iterator[None]:
    """Modules that only this process knows (loaded from a path, built at run time) travel with the function."""
    import cloudpickle

    module = sys.modules.get(getattr(function, "__module__", None) or "")
    if module is None or module.__name__ == "__main__" or _importable(module.__name__):
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


# Identity ------------------------------------------------------------------------------------------------------------


def code_digest(function: Callable[..., Any]) -> str:
    """A digest of what a function computes: its code and the functions and values it refers to, not where it is defined."""
    digest = hashlib.blake2b(digest_size=16)
    for part in _identity(function, {}):
        digest.update(part.encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()


def _identity(value: Any, seen: dict[int, Any]) -> Iterator[str]:
    """`seen`: objects by id. It holds them, because the id of a freed one is given to another."""
    if isinstance(value, str | bytes | int | float | complex | bool | type(None) | type(...)):
        yield repr(value)
        return
    if isinstance(value, ModuleType):
        yield f"module {value.__name__}"
        return
    if id(value) in seen:
        yield "seen"
        return
    seen[id(value)] = value
    if isinstance(value, CodeType):
        yield from (value.co_code.hex(), repr(value.co_names), repr(value.co_varnames))
        yield from _identity(value.co_consts, seen)
    elif isinstance(value, FunctionType):
        yield f"function {value.__name__}"
        yield from _identity(value.__code__, seen)
        for part in (value.__defaults__, value.__kwdefaults__, _closure(value), _globals(value)):
            yield from _identity(part, seen)
    elif isinstance(value, MethodType):
        yield from _identity([value.__func__, value.__self__], seen)
    elif isinstance(value, staticmethod | classmethod):
        yield from _identity([type(value), value.__func__], seen)
    elif isinstance(value, property):
        yield from _identity([value.fget, value.fset, value.fdel], seen)
    elif isinstance(value, partial):
        yield from _identity([value.func, value.args, value.keywords], seen)
    elif isinstance(value, type):
        yield f"class {value.__module__}.{value.__qualname__}"
        if _importable(value.__module__):
            return
        yield from _identity({name: each for name, each in vars(value).items() if name not in ("__dict__", "__weakref__")}, seen)
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _identity(key, seen)
            yield from _identity(one, seen)
    elif isinstance(value, list | tuple):
        yield f"{type(value).__name__} of {len(value)}"
        for one in value:
            yield from _identity(one, seen)
    elif isinstance(value, set | frozenset):
        yield from sorted(text_digest("\0".join(_identity(one, {}))) for one in value)
    else:
        yield from _identity(type(value), seen)
        yield from _identity(getattr(value, "__dict__", None) or _pickled(value), seen)


def _closure(function: FunctionType) -> dict[str, Any]:
    """The variables of enclosing functions that it refers to."""
    captured: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # not assigned yet
            captured[name] = cell.cell_contents
    return captured


def _globals(function: FunctionType) -> dict[str, Any]:
    """The global variables that its code refers to, also in comprehensions, lambdas and functions inside it."""
    names, codes = set[str](), [function.__code__]
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return {name: function.__globals__[name] for name in sorted(names & function.__globals__.keys())}


def _importable(module: str) -> bool:
    """Whether another process, with the same sys.path, can import it."""
    top = module.partition(".")[0]
    found = top in sys.builtin_module_names or importlib.machinery.PathFinder.find_spec(top) is not None
    return found and top != "__main__"


def _pickled(value: Any) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception:
        return b""  # its type has to do
