"""Classes by kind, and user files as modules. There is no registry: a file in the right folder is enough."""

import importlib
import importlib.util
import re
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import plaudit
from plaudit.errors import RecipeError, did_you_mean


@cache
def _modules(package: str) -> dict[str, str]:
    """The module of each kind: a file of the package that defines a class named after it."""
    root = Path(plaudit.__file__).parent
    return {
        file.stem: ".".join(("plaudit", *file.relative_to(root).with_suffix("").parts))
        for file in sorted((root / package).rglob("*.py"), key=lambda file: file.stem)
        if re.search(rf"^class {_class_name(file.stem)}\((?:\w*Reward|Rule)\):", file.read_text("utf-8"), re.M)
    }


def kinds(package: str) -> tuple[str, ...]:
    """The valid values of `kind:` in a package (`rewards`)."""
    return tuple(_modules(package))


def kind(package: str, name: str) -> Any:
    """The class of `kind: name`: `PointwiseScore` in `pointwise_score.py`, in any folder of the package."""
    return getattr(importlib.import_module(_modules(package)[name]), _class_name(name))


def _class_name(file: str) -> str:
    return "".join(word.capitalize() for word in file.split("_"))


def module_from(path: Path) -> ModuleType:
    """A user's Python file as a module; it can import modules from its folder."""
    path = path.resolve()
    name = f"plaudit_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    # Not through the loader: cached bytecode is looked up by the file's size and its time in whole seconds, so that code
    # written within the same second would be the old code; and the cache would lie in the run's folder.
    exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)
    return module


def load_attribute(reference: str) -> Any:
    """What `path/file.py:Name` refers to."""
    path, _, name = reference.rpartition(":")
    file = Path(path).expanduser()
    if not file.is_file():
        raise RecipeError(f"{reference}: {file} does not exist")
    try:
        module = module_from(file)
    except Exception as error:
        raise RecipeError(f"{file} cannot be imported: {type(error).__name__}: {error}") from error
    if not hasattr(module, name):
        raise RecipeError(f"{file} has no {name}.{did_you_mean(name, vars(module))}")
    return getattr(module, name)
