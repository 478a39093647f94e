"""Repetition: a penalty for repeated n-grams.

reward = −penalty · (1 − distinct / total)          over the response's n-grams; 0 if it is too short to have any
"""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat

from plaudit.rewards.reward import Rule
from plaudit.rewards.rules.words import count_distinct_ngrams, split_words
from plaudit.types import Prompt, Sample, Score


class Repetition(Rule):
    kind: Literal["repetition"]
    """A penalty for repeated n-grams."""
    n: Annotated[int, Field(ge=1, le=64)] = 4
    """Length of the n-grams."""
    unit: Literal["words", "characters"] = "words"
    """n-grams of words between white space, or of characters (without white space), for languages such as Chinese."""
    penalty: NonNegativeFloat = 1.0
    """The penalty for nothing but repetition."""

    def value(self, prompt: Prompt, sample: Sample) -> Score:
        words = split_words(sample.text)
        share = repeated_share(words if self.unit == "words" else "".join(words), self.n)
        return Score(0.0 - self.penalty * share, {"repeated": share}, view=sample.text)


def repeated_share(items: Sequence[str], n: int) -> float:
    """1 − distinct / total n-grams; 0 if there are none."""
    total = len(items) - n + 1
    if total < 1:
        return 0.0
    return 1 - count_distinct_ngrams(items, n) / total
