"""Which process samples which prompts of a step.

Processes wait for the slowest one, so prompts are dealt by the tokens that they are expected to take:

    cost = prompt tokens + n · expected tokens of a response

A response is expected to be as long as the last ones to the same prompt; to a new prompt, as long as those of the step before. All
processes have seen the same groups, so they agree. Tokens do not depend on who draws them, but on a CPU the last bits of their
log-probs depend on what else is in the batch: expectations are part of a checkpoint, so that a resumed run deals as it would have.
"""

import base64
import zlib
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from plaudit.balance import deal
from plaudit.data.prompts import EncodedPrompt
from plaudit.types import ScoredGroup
from plaudit.world import World

EMPTY = base64.b64encode(zlib.compress(b"")).decode()
LENGTHS = np.dtype("<u2")
"""Two bytes: a checkpoint has one for every prompt, of which there may be a million."""


class PromptShares:
    def __init__(self, world: World, recurring: Sequence[EncodedPrompt] = ()):
        """`recurring`: prompts that are sampled more than once. The lengths of others are forgotten."""
        self.world = world
        self._numbers = {one.prompt.id: i for i, one in enumerate(recurring)} if world.size > 1 else {}
        self._lengths = np.zeros(len(recurring) if world.size > 1 else 0, LENGTHS)
        """1 + the mean length of the last responses to each of them; 0: not sampled yet."""
        self._mean = 0

    def own(self, prompts: Sequence[EncodedPrompt], n: int) -> list[EncodedPrompt]:
        """This process's prompts, in order."""
        if self.world.size == 1:
            return list(prompts)
        costs = [len(one.tokens) + n * self._expected(one.prompt.id) for one in prompts]
        return [prompts[i] for i in deal(costs, self.world.size)[self.world.rank]]

    def _expected(self, id: str) -> int:
        number = self._numbers.get(id)
        known = 0 if number is None else int(self._lengths[number])
        return known - 1 if known else self._mean

    def observe(self, groups: Sequence[ScoredGroup], *, training: bool) -> None:
        """The groups of a step or a validation."""
        if self.world.size == 1 or not groups:
            return
        lengths = {one.group.prompt.id: round(fmean(map(len, one.group.samples))) for one in groups}
        for id, length in lengths.items():
            if (number := self._numbers.get(id)) is not None:
                self._lengths[number] = min(length + 1, np.iinfo(LENGTHS).max)
        if training:
            self._mean = round(fmean(lengths.values()))

    # State in a checkpoint

    def state(self) -> dict[str, Any]:
        if self.world.size == 1:
            return {}
        return {"packed_lengths": base64.b64encode(zlib.compress(self._lengths.tobytes())).decode(), "mean": self._mean}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._mean = state.get("mean", 0)
        saved = np.frombuffer(zlib.decompress(base64.b64decode(state.get("packed_lengths", EMPTY))), LENGTHS)
        self._lengths = saved.copy() if len(saved) == len(self._lengths) else np.zeros_like(self._lengths)

    def saving(self) -> None:
        pass
