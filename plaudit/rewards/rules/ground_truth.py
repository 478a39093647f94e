"""Ground truths as data sets store them, and how rules read them."""

import math
from collections.abc import Iterator
from typing import Any

from plaudit.rewards.reward import failed
from plaudit.types import Prompt, Sample, Score


def read_texts(truth: Any) -> Iterator[str]:
    """All accepted texts: the text itself, a number's usual spellings, any entry of a list.

    Blank text is not accepted, or an empty response would be right.
    """
    truth = plain(truth)
    if isinstance(truth, str):
        if truth.strip():
            yield truth.strip()
    elif isinstance(truth, bool):
        yield from (str(truth), str(truth).lower())
    elif isinstance(truth, int | float):
        yield str(truth)
        # An integer column with missing values is read as floats: 72.0 was written as 72.
        if isinstance(truth, float) and truth.is_integer():
            yield str(int(truth))
    elif isinstance(truth, list | tuple):
        for one in truth:
            yield from read_texts(one)


def read_number(truth: Any) -> float | None:
    """A finite number, also from its text."""
    truth = plain(truth)
    if isinstance(truth, bool) or not isinstance(truth, int | float | str):
        return None
    try:
        number = float(truth)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def plain(truth: Any) -> Any:
    """numpy scalars and arrays as Python objects."""
    return truth.tolist() if hasattr(truth, "tolist") else truth


def no_truth(prompt: Prompt, sample: Sample, rule: str, needs: str) -> Score:
    """A failure due to the data, not the policy: no response could be right."""
    given = "has no ground truth" if prompt.ground_truth is None else f"has the ground truth {prompt.ground_truth!r:.80}"
    message = f"row {prompt.id} {given}; {rule} needs (in `reward_model.ground_truth`) {needs}"
    return failed("no_ground_truth", message, sample.text)
