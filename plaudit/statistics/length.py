"""Does a judge prefer longer answers?"""

from typing import Any, TypedDict

import numpy as np

from plaudit.statistics.intervals import Estimate, mean

BINS = 10


class LengthBin(TypedDict):
    low: float
    """The least length difference in the bin, chosen minus rejected."""
    high: float
    accuracy: Estimate


class LengthPreference(TypedDict):
    right_longer: Estimate
    """Accuracy where the right answer is the longer one."""
    right_shorter: Estimate
    right_equal: Estimate
    prefers_longer: Estimate
    """Share of verdicts for the longer answer, where lengths differ."""
    longer_is_right: Estimate
    """Share of the same pairs whose longer answer is right: what `prefers_longer` would be without mistakes."""
    bins: list[LengthBin]
    """Accuracy by quantiles of the length difference, in ascending order."""


def length_bins(difference: np.ndarray, bins: int = BINS) -> np.ndarray:
    """The bin of each length difference, from 0: by quantiles, so that each has about as many items."""
    # Equal differences share the quantile in their middle, and so a bin.
    _, level, counts = np.unique(difference, return_inverse=True, return_counts=True)
    quantile = ((np.cumsum(counts) - counts / 2) / max(1, len(difference)))[level]
    return (quantile * bins).astype(np.intp)


def length_preference(
    chosen_minus_rejected_length: np.ndarray, credit: np.ndarray, *, bins: int = BINS, **options: Any
) -> LengthPreference:
    """Accuracy by length difference. Credit is 1 for a right verdict, 0 for a wrong one, ½ for a tie, NaN for none (left out).

    Among pairs of different lengths, the verdict is for the longer answer

        credit        if the right answer is the longer one
        1 − credit    if it is the shorter one
    """
    difference, credit = np.asarray(chosen_minus_rejected_length, dtype=np.float64), np.asarray(credit, dtype=np.float64)
    known = ~(np.isnan(difference) | np.isnan(credit))
    difference, credit = difference[known], credit[known]
    longer, shorter = difference > 0, difference < 0
    unequal = longer | shorter
    bin_of = length_bins(difference, bins)
    return {
        "right_longer": mean(credit[longer], **options),
        "right_shorter": mean(credit[shorter], **options),
        "right_equal": mean(credit[~unequal], **options),
        "prefers_longer": mean(np.where(longer, credit, 1 - credit)[unequal], **options),
        "longer_is_right": mean(longer[unequal], **options),
        "bins": [
            {"low": float(inside.min()), "high": float(inside.max()), "accuracy": mean(credit[bin_of == b], **options)}
            for b in range(bins)
            if len(inside := difference[bin_of == b])
        ],
    }
