"""Length: 1 for a response whose length l is within bounds; outside, it falls linearly to 0.

reward = max(0, 1 − d / slack)        d = max(at_least − l, l − at_most, 0): distance from the bounds; without slack, 0 for d > 0
"""

from typing import Literal

from pydantic import NonNegativeInt, model_validator

from plaudit.rewards.reward import Rule, failed
from plaudit.rewards.rules.words import split_words
from plaudit.types import Prompt, Sample, Score


class Length(Rule):
    kind: Literal["length"]
    """A length within bounds."""
    unit: Literal["tokens", "words", "characters"] = "tokens"
    """Tokens of the whole response including the end token, words between white space, or characters."""
    at_least: NonNegativeInt = 0
    """The shortest length that scores 1."""
    at_most: NonNegativeInt | None = None
    """The longest length that scores 1; null for no bound."""
    slack: NonNegativeInt = 0
    """Distance from the bounds at which the reward reaches 0; 0: immediately."""

    @model_validator(mode="after")
    def _bounds(self) -> "Length":
        if self.at_least == 0 and self.at_most is None:
            raise ValueError("set at_least, at_most or both: without them every length scores 1")
        if self.at_most is not None and self.at_least > self.at_most:
            raise ValueError(f"at_least ({self.at_least}) is greater than at_most ({self.at_most})")
        return self

    def value(self, prompt: Prompt, sample: Sample) -> Score:
        length = self._count(sample)
        if length is None:
            return no_tokens("length", sample)
        above = 0 if self.at_most is None else length - self.at_most
        outside = max(self.at_least - length, above, 0)
        value = max(0.0, 1 - outside / self.slack) if self.slack else float(outside == 0)
        return Score(value, {"length": float(length)}, view=sample.text)

    def _count(self, sample: Sample) -> int | None:
        match self.unit:
            case "tokens":
                return sample.num_tokens
            case "words":
                return len(split_words(sample.text))
            case "characters":
                return len(sample.text)


def no_tokens(rule: str, sample: Sample) -> Score:
    """A failure: the response was read from a file without token counts."""
    message = f"{rule} needs the number of tokens: give rows with `tokens`, or a tokenizer"
    return failed("no_tokens", message, sample.text)
