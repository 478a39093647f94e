"""Exact match: 1 if the response equals the ground truth, else 0. Surrounding white space is ignored."""

from typing import ClassVar, Literal

from plaudit.rewards.reward import Rule
from plaudit.rewards.rules.ground_truth import no_truth, read_texts
from plaudit.types import Prompt, Sample, Score


class Exact(Rule):
    kind: Literal["exact"]
    """Exact match with the ground truth."""
    ignore_case: bool = False
    """Ignore case."""

    checks_answer: ClassVar[bool] = True
    reads_answers: ClassVar[bool] = True  # pyright: ignore[reportIncompatibleMethodOverride]

    def read_answer(self, text: str) -> str | None:
        return (text.strip().casefold() if self.ignore_case else text.strip()) or None

    def value(self, prompt: Prompt, sample: Sample) -> float | Score:
        truths = set(read_texts(prompt.ground_truth))
        if not truths:
            return no_truth(prompt, sample, "exact", "a text, a number or a list of them")
        response = sample.text.strip()
        if self.ignore_case:
            return float(response.casefold() in {truth.casefold() for truth in truths})
        return float(response in truths)
