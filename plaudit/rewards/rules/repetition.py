"""Repetition: a cost for saying things again. Of all n-grams of a response, in a row:

reward = −penalty · (1 − distinct / total)                    0 for a response that is too short for one
"""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat

from plaudit.rewards.reward import Rule
from plaudit.types import Prompt, Sample, Score


class Repetition(Rule):
    kind: Literal["repetition"]
    """A cost for n-grams that are repeated."""
    n: Annotated[int, Field(ge=1, le=64)] = 4
    """How many of them in a row make an n-gram."""
    unit: Literal["words", "characters"] = "words"
    """What n-grams are made of: words between white space; or characters (without white space), for languages such as Chinese."""
    penalty: NonNegativeFloat = 1.0
    """What nothing but repetition would cost."""

    def value(self, prompt: Prompt, sample: Sample) -> Score:
        words = sample.text.split()
        share = repeated_share(words if self.unit == "words" else "".join(words), self.n)
        return Score(0.0 - self.penalty * share, {"repeated": share}, view=sample.text)


def repeated_share(items: Sequence[str], n: int) -> float:
    """1 − distinct / total n-grams; 0 if there are none."""
    total = len(items) - n + 1
    if total < 1:
        return 0.0
    return 1 - len(set(zip(*(items[i:] for i in range(n)), strict=False))) / total
