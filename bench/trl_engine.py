"""vLLM in the process of TRL's trainers: one engine for all trainers of a process, since its start takes most of a minute."""

import os
from typing import Any

from trl.generation import vllm_generation

RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE")  # TRL sets them for vLLM; the next trainer would take them for a cluster's
_made: list[Any] = []


def start_vllm_once(**more: Any) -> None:
    """The next trainer gets the same engine: it hands over its weights before it samples. `more`: arguments beside TRL's."""
    make = vllm_generation.LLM

    def engine(**settings: Any) -> Any:
        if not _made:
            _made.append(make(**settings, **more))
        return _made[0]

    vllm_generation.LLM = engine


def has_started() -> bool:
    return bool(_made)


def forget_ranks() -> None:
    """Before the next trainer is made."""
    for name in RANKS:
        os.environ.pop(name, None)
