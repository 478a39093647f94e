"""How torch takes memory from a GPU's driver: in segments that grow and shrink, or in pieces of fixed size.

A piece can be used for something larger only when nothing is left in it, so memory that sampling has freed is too fragmented for
training, and the other way round. In segments that expand, freed memory joins. The memory plan was measured with them
(bench/README.md).
"""

import os
import sys
from collections.abc import Mapping

from plaudit.heavy_imports import is_own_process

VARIABLE, SETTING = "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"
"""Torch reads it when it is imported, or when it first uses a GPU."""
OTHER_NAME = "PYTORCH_ALLOC_CONF"


def use_expandable_segments() -> None:
    """In this process and those that it starts, if it is plaudit's own: another program may start servers, too. Not if the user has
    set up torch's allocator, or torch has been imported."""
    if is_own_process() and "torch" not in sys.modules and OTHER_NAME not in os.environ:
        os.environ.setdefault(VARIABLE, SETTING)


def segments_expand() -> bool:
    return any(SETTING in os.environ.get(name, "") for name in (VARIABLE, OTHER_NAME))


def without_own_setting(environment: Mapping[str, str]) -> dict[str, str]:
    """For a server: vLLM can neither sleep nor share memory with other processes in segments that expand."""
    return {name: value for name, value in environment.items() if name not in (VARIABLE, OTHER_NAME) or value != SETTING}
