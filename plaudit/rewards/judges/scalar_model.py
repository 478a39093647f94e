"""A scalar (Bradley–Terry) reward model: one score for a conversation that ends with the response.

The conversation is rendered with the model's own tokenizer and chat template, never the policy's. The model sees the response
through the reward's view, where thoughts are stripped. A conversation that is too long for it is malformed (0, or the value of
`malformed`), not truncated: half an answer would be scored as if it were complete.
"""

from collections.abc import Sequence
from typing import ClassVar, Literal

from plaudit.rewards.judges.model_rewards import LiveModelReward, ModelReward
from plaudit.types import Group, Score


class ScalarModel(ModelReward):
    kind: Literal["scalar_model"]
    """A scalar (Bradley–Terry) reward model."""

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
        results = iter(await self.backend.score(conversations))
        return [[self._score(next(results), sample.text) for sample in group.samples] for group in groups]

    def _score(self, result, view: str) -> Score:
        if result.too_long:
            trace = {"malformed": "too long for the reward model"}
            return Score(0.0, malformed=True, view=view, trace=trace, transient=result.refused)
        if result.failure is not None:
            return Score(None, failure=result.failure, view=view)
        return Score(result.value, view=view)
