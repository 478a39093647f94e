"""Overlong: a soft cost for responses near a length limit (DAPO).

    reward = −penalty · clip((l − (L − B)) / B, 0, 1)        l: the response's tokens, L: max_tokens, B: buffer_tokens

Differs from DAPO: the cost stops growing at `penalty`, unless `capped: false` leaves the upper end open.
"""

from typing import Literal

from pydantic import NonNegativeFloat, PositiveInt, model_validator

from plaudit.rewards.reward import Rule
from plaudit.rewards.rules.length import no_tokens
from plaudit.types import Prompt, Sample, Score


class Overlong(Rule):
    kind: Literal["overlong"]
    """A soft cost for responses near a length limit."""
    max_tokens: PositiveInt
    """Length at which the full penalty applies; usually the rollout's max_new_tokens."""
    buffer_tokens: PositiveInt
    """The penalty starts this many tokens before the limit."""
    penalty: NonNegativeFloat = 1.0
    """The cost at max_tokens."""
    capped: bool = True
    """The penalty stops growing at max_tokens; false leaves it open-ended."""

    @model_validator(mode="after")
    def _begins_at_a_length(self) -> "Overlong":
        if self.buffer_tokens > self.max_tokens:
            raise ValueError(f"buffer_tokens ({self.buffer_tokens}) is greater than max_tokens ({self.max_tokens})")
        return self

    def value(self, prompt: Prompt, sample: Sample) -> float | Score:
        length = sample.num_tokens
        if length is None:
            return no_tokens("overlong", sample)
        over = max(0.0, (length - (self.max_tokens - self.buffer_tokens)) / self.buffer_tokens)
        return 0.0 - self.penalty * (min(over, 1.0) if self.capped else over)
