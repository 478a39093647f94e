"""Pointwise score (GRRM): the integer on the answer's last line against the ground truth's.

    |error|   0   1     2     3     more
    reward    1   0.8   0.4   0.2   0

The last non-blank line must be the integer alone; any other answer scores 0 and is malformed. Differs from GRRM's code: `7.5` is
rejected (there it is 7), and of an answer of one line the whole line is read (there, its last character).
"""

from typing import ClassVar, Literal

from plaudit.rewards.reward import Rule
from plaudit.rewards.rules.ground_truth import no_truth, read_number
from plaudit.rewards.rules.ranking_lines import read_integer
from plaudit.types import Prompt, Sample, Score

REWARD = {0: 1.0, 1: 0.8, 2: 0.4, 3: 0.2}


class PointwiseScore(Rule):
    kind: Literal["pointwise_score"]
    """The integer on the last line against the ground truth's."""

    checks_answer: ClassVar[bool] = True

    def value(self, prompt: Prompt, sample: Sample) -> Score:
        truth = read_number(prompt.ground_truth)
        if truth is None or not truth.is_integer():
            return no_truth(prompt, sample, "pointwise_score", "an integer")
        score = read_integer(sample.text.strip().rpartition("\n")[2])
        if score is None:
            return Score(0.0, malformed=True, view=sample.text)
        error = abs(score - int(truth))
        return Score(REWARD.get(error, 0.0), {"error": float(error)}, view=sample.text)
