"""Which process samples which prompts of a step.

Processes wait for the slowest one, so prompts are dealt by the tokens that they are expected to take:

    cost = prompt tokens + n · expected tokens of a response

A response is expected to be as long as the last ones to the same prompt; to a new prompt, as long as those of the step before. All
processes have seen the same groups, so they agree. Tokens do not depend on who draws them, but on a CPU the last bits of their
log-probs depend on what else is in the batch: expectations are part of a checkpoint, so that a resumed run deals as it would have.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from plaudit.balance import deal
from plaudit.data.prompts import EncodedPrompt
from plaudit.types import ScoredGroup
from plaudit.world import World


class PromptShares:
    def __init__(self, world: World, *, passes: float = 1.0):
        """`passes`: over the prompts of training. With no more than one, none comes again, and their lengths are forgotten."""
        self.world, self._comes_again = world, passes > 1
        self._lengths: dict[str, int] = {}
        """Mean length of the last responses, by prompt."""
        self._mean = 0

    def own(self, prompts: Sequence[EncodedPrompt], n: int) -> list[EncodedPrompt]:
        """This process's prompts, in order."""
        if self.world.size == 1:
            return list(prompts)
        costs = [len(one.tokens) + n * self._lengths.get(one.prompt.id, self._mean) for one in prompts]
        return [prompts[i] for i in deal(costs, self.world.size)[self.world.rank]]

    def observe(self, groups: Sequence[ScoredGroup], *, training: bool) -> None:
        """The groups of a step or a validation."""
        if self.world.size == 1 or not groups:
            return
        lengths = {one.group.prompt.id: round(fmean(map(len, one.group.samples))) for one in groups}
        if self._comes_again or not training:
            self._lengths |= lengths
        if training:
            self._mean = round(fmean(lengths.values()))

    # State in a checkpoint

    def state(self) -> dict[str, Any]:
        return {} if self.world.size == 1 else {"lengths": self._lengths, "mean": self._mean}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._lengths, self._mean = dict(state.get("lengths", {})), state.get("mean", 0)

    def saved(self) -> None:
        pass
