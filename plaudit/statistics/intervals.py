"""Bootstrap intervals: how much a figure would vary if other items had been drawn from the same source.

A resample draws I of I items with replacement. It is represented by the counts w_i, how often item i was drawn, so a statistic is a
function of weights: the mean is Σ w_i x_i / Σ w_i. Resamples are a function of the seed, so figures on the same items are resampled
alike. B resamples, I items.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

# Weights of one chunk: 2 MiB, which stay in a CPU's cache.
CHUNK_WEIGHTS = 2**18


@dataclass(frozen=True)
class Estimate:
    """A figure with its confidence interval. Without items, all three are NaN.

    Few items give intervals that are too narrow, and one item, or items that are all equal, an interval of width 0.
    """

    value: float
    low: float
    high: float
    n: int
    """Items behind it."""


def resample_weights(n_items: int, resamples: int, seed: int) -> Iterator[np.ndarray]:
    """Bootstrap counts in chunks of [B, I]; rows sum to I."""
    generator = np.random.default_rng(seed)
    most_rows = max(1, CHUNK_WEIGHTS // max(1, n_items))
    for start in range(0, resamples, most_rows):
        rows = min(most_rows, resamples - start)
        cell_BI = generator.integers(n_items, size=(rows, n_items)) + n_items * np.arange(rows)[:, None]
        yield np.bincount(cell_BI.ravel(), minlength=rows * n_items).reshape(rows, n_items).astype(np.float64)


def percentile_interval(value: float, values_B: np.ndarray, n: int, confidence: float) -> Estimate:
    """A value, and the middle `confidence` of its resamples; those that are NaN (none of their items counts) are ignored."""
    values_B = values_B[~np.isnan(values_B)]
    if np.isnan(value) or not len(values_B):
        return Estimate(value, np.nan, np.nan, n)
    outside = (1 - confidence) / 2
    low, high = np.quantile(values_B, [outside, 1 - outside])
    return Estimate(value, float(low), float(high), n)
