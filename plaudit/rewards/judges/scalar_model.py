"""A scalar (Bradley–Terry) reward model: one score for a conversation that ends with the response.

The conversation is rendered with the model's own tokenizer and chat template, never the policy's. The model sees the response
through the reward's view, where thoughts are stripped. A conversation that is too long for it is malformed (0, or the value of
`malformed`), not truncated: half an answer would be scored as if it were complete.
"""

from collections.abc import Sequence
from typing import ClassVar, Literal

from plaudit.rewards.judges.model_rewards import LiveModelReward, PromptedReward
from plaudit.rewards.judges.templates import Unrenderable
from plaudit.types import Failure, Group, Message, Prompt, Score


class ScalarModel(PromptedReward):
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
        prompts = [self._messages(group.prompt) for group in groups]
        conversations: list[list[Message]] = [
            [*messages, {"role": "assistant", "content": sample.text}]
            for messages, group in zip(prompts, groups, strict=True)
            if not isinstance(messages, Failure)
            for sample in group.samples
        ]
        results = iter(await self.backend.score(conversations))
        return [
            [
                Score(None, failure=messages, view=sample.text)
                if isinstance(messages, Failure)
                else self._score(next(results), sample.text)
                for sample in group.samples
            ]
            for messages, group in zip(prompts, groups, strict=True)
        ]

    def _messages(self, prompt: Prompt) -> list[Message] | Failure:
        try:
            return self.settings.own_prompt(prompt).messages
        except Unrenderable as error:
            return error.failure

    def _score(self, result, view: str) -> Score:
        if result.too_long:
            trace = {"malformed": "too long for the reward model"}
            return Score(0.0, malformed=True, view=view, trace=trace, transient=result.refused)
        if result.failure is not None:
            return Score(None, failure=result.failure, view=view)
        return Score(result.value, view=view)
