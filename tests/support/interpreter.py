"""Triton's interpreter, in which tests run kernels without a GPU. With a GPU the same tests run them compiled."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KERNELS, SHARED = "plaudit.rollout.native.kernels", "plaudit.models.kernels"
_ours: dict[str, ModuleType] = {}


def is_swapped(name: str) -> bool:
    """Triton and the kernels it decorates. Its C extension can be loaded only once and is shared."""
    return (name.split(".")[0] == "triton" and not name.startswith("triton._C")) or name.startswith((KERNELS, SHARED))


@contextmanager
def interpreter() -> Iterator[None]:
    """Triton interprets kernels only if TRITON_INTERPRET is set before its first import. Other tests may have imported it already,
    and child processes must not inherit the variable, so tests of kernels get a separate copy of Triton."""
    if DEVICE.type == "cuda":
        yield
        return
    packages = [importlib.import_module(name.rpartition(".")[0]) for name in (KERNELS, SHARED)]
    theirs = {name: sys.modules.pop(name) for name in list(sys.modules) if is_swapped(name)}
    sys.modules.update(_ours)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            yield
    finally:
        _ours.update({name: sys.modules.pop(name) for name in list(sys.modules) if is_swapped(name)})
        sys.modules.update(theirs)
        for package, name in zip(packages, (KERNELS, SHARED), strict=True):
            vars(package).pop("kernels", None)
            if name in theirs:
                vars(package)["kernels"] = theirs[name]
