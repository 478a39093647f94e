"""Imports of torch and transformers, without a search for garbage.

They make a million objects, none of them garbage, and Python would traverse them again and again while it imports more, and once
more when it exits: about a quarter of the time that a short command takes.

A program that calls plaudit may have garbage of its own when it does. So objects are set aside for good (`gc.freeze`) only in
plaudit's own processes, the command and its ranks.
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_in_own_process = False


def set_own_process() -> None:
    """This process runs nothing but plaudit. Called where it starts."""
    global _in_own_process
    _in_own_process = True


def is_own_process() -> bool:
    return _in_own_process


@contextmanager
def heavy_imports() -> Iterator[None]:
    """No search for garbage in this block. In plaudit's own processes, what is imported in it is never searched, nor is anything
    else that is there when it ends."""
    modules, collects = len(sys.modules), gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        imported = len(sys.modules) > modules  # otherwise all were there already, and garbage made since then would be kept
        if imported and _in_own_process:
            gc.freeze()
        if collects:
            gc.enable()
