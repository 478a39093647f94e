"""Imports of torch and transformers, without a search for garbage.

They make a million objects, none of them garbage, and Python would traverse them again and again while it imports more, and once
more when it exits: about a quarter of the time that a short command takes.
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def heavy_imports() -> Iterator[None]:
    """What is imported in this block is never searched for garbage, nor is anything else that is there when it ends."""
    modules, collects = len(sys.modules), gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > modules:  # otherwise they were there already, and garbage made since then would be kept
            gc.freeze()
        if collects:
            gc.enable()
