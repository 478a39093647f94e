"""A scalar (Bradley–Terry) reward model: one number for a conversation that ends with the response.

The conversation is rendered with the model's own tokenizer and chat template, never the policy's. What the model sees of the
response is the reward's view: thoughts are stripped there. A conversation that is too long for it is malformed (0, or what
`malformed` states), not cut: half of an answer would be scored as if it were all of it.
"""

from collections.abc import Sequence
from typing import ClassVar, Literal

from plaudit.rewards.judges.model_rewards import LiveModelReward, ModelReward
from plaudit.types import Group, Score


class ScalarModel(ModelReward):
    kind: Literal["scalar_model"]
    """A reward model that gives a number (Bradley–Terry)."""

    scalar: ClassVar[bool] = True

    @property
    def rounded_together(self) -> bool:
        return self.model.placement in ("resident", "offload")

    def build(self) -> "LiveScalarModel":
        return LiveScalarModel(self)


class LiveScalarModel(LiveModelReward[ScalarModel]):
    async def score(self, groups: Sequence[Group]) -> list[list[Score]]:
        flat = [(group.prompt, sample) for group in groups for sample in group.samples]
        conversations = [[*prompt.messages, {"role": "assistant", "content": sample.text}] for prompt, sample in flat]
        verdicts = iter(await self.backend.score(conversations))
        return [[self._score(next(verdicts), sample.text) for sample in group.samples] for group in groups]

    def _score(self, verdict, view: str) -> Score:
        if verdict.too_long:
            trace = {"malformed": "too long for the reward model"}
            return Score(0.0, malformed=True, view=view, trace=trace, passing=verdict.refused)
        if verdict.failure is not None:
            return Score(None, failure=verdict.failure, view=view)
        return Score(verdict.value, view=view)
