"""vLLM in the process of TRL's trainers: one engine for all trainers of a process, since its start takes most of a minute."""

import gc
import os
from typing import Any

from trl.generation import vllm_generation

RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE")  # TRL sets them for vLLM; the next trainer would take them for a cluster's
_made: list[Any] = []
_failed: list[str] = []  # no exception: its frames would hold a trainer


def start_vllm_once(**more: Any) -> None:
    """The next trainer gets the same engine: it hands over its weights before it samples. `more`: arguments beside TRL's."""
    make = vllm_generation.LLM

    def engine(**settings: Any) -> Any:
        check_start()
        if _made:
            # As vLLM does when it starts: what exists by then, trainer and model among it, is left out of collections.
            gc.collect()
            gc.freeze()
            return _made[0]
        try:
            _made.append(make(**settings, **more))
        except Exception as error:
            _failed.append(f"{type(error).__name__}: {error}")
            raise
        return _made[0]

    vllm_generation.LLM = engine


def check_start() -> None:
    """An engine that did not start will not start for the next trainer either, and each try takes a minute."""
    if _failed:
        raise RuntimeError(f"vLLM did not start: {_failed[0]}")


def has_started() -> bool:
    return bool(_made)


def forget_ranks() -> None:
    """Before the next trainer is made."""
    for name in RANKS:
        os.environ.pop(name, None)
