"""What a rollout engine is: prompts go in, samples come out as they finish, so that scoring overlaps sampling.

Everything random is keyed by (seed, step, prompt id, sample index, token position): the same key draws the same noise, whatever
else is sampled beside it and however often a run was resumed.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from plaudit.types import Sample

# Sampled side by side where nobody says how many, by device.
MAX_SEQUENCES = {"cpu": 256, "cuda": 1024}


@dataclass(frozen=True)
class Request:
    """A prompt to continue `n` times."""

    prompt_id: str
    tokens: np.ndarray
    n: int = 1
    max_new_tokens: int | None = None
    """This prompt's own limit; default: the sampling's."""


@dataclass(frozen=True)
class Sampling:
    """How to draw tokens."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 takes the likeliest token; log-probs are then those of the untempered logits."""
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    """Strings that end a response, besides the end token; they stay in it."""
    seed: int = 0
    step: int = 0


class Engine(ABC):
    """Samples from one policy. The weights are those of the last `sync`."""

    version: int = 0
    """Steps that the weights have been trained for; samples carry it."""

    @abstractmethod
    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Sample]:
        """Samples in the order they finish. Closing the iterator early ends all of them."""

    def sync(self, version: int) -> None:
        """From here on, sample with the trainer's weights as they now are."""
        self.version = version

    def sleep(self) -> None:  # noqa: B027 (nothing to do is a fine way to do it)
        """Give memory back while others compute."""

    def wake(self) -> None:  # noqa: B027
        """Take it again."""
