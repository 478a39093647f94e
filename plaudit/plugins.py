"""A name or a path → the thing it names. There is no registry: a file in the right folder is enough."""

import importlib
import importlib.util
import re
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import plaudit


@cache
def kinds(room: str) -> tuple[str, ...]:
    """What may stand behind `kind:` in a room (`rewards`): its files with a class of their own name that takes settings."""
    files = sorted((Path(plaudit.__file__).parent / room).glob("*.py"))
    return tuple(
        f.stem for f in files if re.search(rf"^class {_class_name(f.stem)}\((?:\w*Reward|Rule)\):", f.read_text("utf-8"), re.M)
    )


def kind(room: str, name: str) -> Any:
    """The class behind `kind: name`: `PointwiseScore` of `pointwise_score.py`."""
    return getattr(importlib.import_module(f"plaudit.{room}.{name}"), _class_name(name))


def _class_name(file: str) -> str:
    return "".join(word.capitalize() for word in file.split("_"))


def module_from(path: Path) -> ModuleType:
    """A user's Python file as a module; what lies beside it can be imported from it."""
    path = path.resolve()
    name = f"plaudit_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    return module
