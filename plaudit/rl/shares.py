"""Which process samples which prompts of a step.

Processes wait for the slowest one, so prompts are dealt by the tokens that they are expected to take:

    cost = prompt tokens + n · expected tokens of a response

A response is expected to be as long as the last ones to the same prompt; to a new prompt, as long as those of the step before. All
processes have seen the same groups, so they agree. Samples do not depend on who draws them: expectations need no checkpoint.
"""

from collections.abc import Sequence
from statistics import fmean

from plaudit.data.prompts import EncodedPrompt
from plaudit.train.balance import deal
from plaudit.types import ScoredGroup
from plaudit.world import World


class PromptShares:
    def __init__(self, world: World):
        self.world = world
        self._lengths: dict[str, float] = {}
        """Mean length of the last responses, by prompt."""
        self._mean = 0.0

    def own(self, prompts: Sequence[EncodedPrompt], n: int) -> list[EncodedPrompt]:
        """This process's prompts, in order."""
        if self.world.size == 1:
            return list(prompts)
        costs = [len(one.tokens) + n * self._lengths.get(one.prompt.id, self._mean) for one in prompts]
        return [prompts[i] for i in deal(costs, self.world.size)[self.world.rank]]

    def observe(self, groups: Sequence[ScoredGroup]) -> None:
        """The groups of a step."""
        if self.world.size > 1 and groups:
            lengths = {one.group.prompt.id: fmean(map(len, one.group.samples)) for one in groups}
            self._lengths |= lengths
            self._mean = fmean(lengths.values())
