"""The device that a setting means. Imports torch only."""

import sys
from functools import cache
from typing import Literal

import torch

from plaudit.errors import RecipeError


def resolve_device(device: Literal["auto", "cpu", "cuda"], setting: str = "run.device") -> torch.device:
    if device == "cuda" and not torch.cuda.is_available():
        raise RecipeError(f"{setting} is cuda, but torch sees no GPU here. Set {setting}=cpu, or install torch with CUDA.")
    if device == "auto" and not torch.cuda.is_available() and torch.backends.mps.is_available():
        _report_unused_apple_gpu()
    return torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")


@cache
def _report_unused_apple_gpu() -> None:
    """Once per process."""
    print("Apple's GPU is not used yet: plaudit computes on the CPU here", file=sys.stderr)
