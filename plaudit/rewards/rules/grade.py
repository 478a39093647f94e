"""Grade (training a rubric reward model): the total score stated in the answer against the ground truth.

    reward = (1 − |min(10, s) / 10 − truth|)²                     truth in [0, 1]

s is the text after the last `Total Score`, without `:`, `[`, `points`, `point`, `*`, `|` and `'`, up to the first `/`. If it is not
a number, the reward is 0 and the answer malformed. Differs from the original: the same holds if s is negative or not finite (there,
`-100` scores 81 to 100), if `Total Score` is missing (there, s is the whole answer), and if s is not in ASCII digits (there,
`1_0` and the digits of every script are numbers too).

The judge that uses the model (`parser: total_score`) also reads the scale behind the `/`: both agree on scores out of 10 only.
"""

import math
import re
from typing import ClassVar, Literal

from plaudit.rewards.reward import Rule
from plaudit.rewards.rules.ground_truth import no_truth, read_number
from plaudit.types import Prompt, Sample, Score

HEADING = "Total Score"
_DECORATION = re.compile(r"points?|[:\[*|']")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


class Grade(Rule):
    kind: Literal["grade"]
    """The answer's `Total Score` (out of 10) against the ground truth (out of 1)."""

    checks_answer: ClassVar[bool] = True

    def value(self, prompt: Prompt, sample: Sample) -> Score:
        truth = read_number(prompt.ground_truth)
        if truth is None or not 0.0 <= truth <= 1.0:
            return no_truth(prompt, sample, "grade", "a number from 0 to 1")
        total = read_total(sample.text)
        if total is None:
            return Score(0.0, malformed=True, view=sample.text)
        error = abs(min(10.0, total) / 10 - truth)
        return Score((1 - error) ** 2, {"error": error}, view=sample.text)


def read_total(text: str) -> float | None:
    """The total score stated in an answer, if finite and not negative; else None."""
    _, heading, behind = text.rpartition(HEADING)
    if not heading:
        return None
    number = _DECORATION.sub("", behind.partition("/")[0]).strip()
    if len(number) > 100 or not _NUMBER.fullmatch(number):
        return None
    total = float(number)
    return total if math.isfinite(total) and total >= 0 else None
