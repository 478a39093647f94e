"""Exact match: 1 if the response is the ground truth, else 0. White space around either does not count."""

from collections.abc import Iterator
from typing import Any, Literal

from plaudit.rewards.reward import Rule, failed
from plaudit.types import Prompt, Sample, Score


class Exact(Rule):
    kind: Literal["exact"]
    """Exact match with the ground truth."""
    ignore_case: bool = False
    """Upper and lower case are the same."""

    def value(self, prompt: Prompt, sample: Sample) -> float | Score:
        truths = set(_texts(prompt.ground_truth))
        if not truths:
            given = "has no ground truth" if prompt.ground_truth is None else f"has the ground truth {prompt.ground_truth!r:.80}"
            # The data's fault, not the policy's: no response could be right here.
            message = f"row {prompt.id} {given}; exact needs (in `reward_model.ground_truth`) a text, a number or a list of them"
            return failed("no_ground_truth", message, sample.text)
        response = sample.text.strip()
        if self.ignore_case:
            return float(response.casefold() in {truth.casefold() for truth in truths})
        return float(response in truths)


def _texts(truth: Any) -> Iterator[str]:
    """All texts that a ground truth accepts: the text itself, a number's usual spellings, any entry of a list.

    Blank text is none: an empty response would be right.
    """
    if hasattr(truth, "tolist"):  # numpy's scalars and arrays
        truth = truth.tolist()
    if isinstance(truth, str):
        if truth.strip():
            yield truth.strip()
    elif isinstance(truth, bool):
        yield from (str(truth), str(truth).lower())
    elif isinstance(truth, int | float):
        yield str(truth)
        # A column of whole numbers with a gap in it is read as floats: 72.0 was written as 72.
        if isinstance(truth, float) and truth.is_integer():
            yield str(int(truth))
    elif isinstance(truth, list | tuple):
        for one in truth:
            yield from _texts(one)
