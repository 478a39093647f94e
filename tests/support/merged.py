"""LoRA computed by peft's modules, where plaudit would compute with merged weights."""

from typing import Any


def compute_by_peft(model: Any) -> None:
    """In place of `merge_adapters`."""
