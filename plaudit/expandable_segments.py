"""How torch takes memory from a GPU's driver: in segments that grow and shrink, or in pieces of fixed size.

A piece is free for something larger only when nothing is left in it, so what sampling and training leave to each other does not fit
together. Segments that expand have no such pieces. The memory plan was measured with them (bench/README.md).
"""

import os
import sys
from collections.abc import Mapping

VARIABLE, SETTING = "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"
"""Torch reads it when it is imported, or when it first uses a GPU."""
OTHER_NAME = "PYTORCH_ALLOC_CONF"


def use_expandable_segments() -> None:
    """In this process and those that it starts, unless the user has set up torch's allocator, or torch has been imported."""
    if "torch" not in sys.modules and OTHER_NAME not in os.environ:
        os.environ.setdefault(VARIABLE, SETTING)


def segments_expand() -> bool:
    return any(SETTING in os.environ.get(name, "") for name in (VARIABLE, OTHER_NAME))


def without_own_setting(environment: Mapping[str, str]) -> dict[str, str]:
    """For a server: vLLM can neither sleep nor share memory with other processes in segments that expand."""
    return {name: value for name, value in environment.items() if (name, value) != (VARIABLE, SETTING)}
