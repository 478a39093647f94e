"""Bootstrap intervals: how much a figure would vary if other items had been drawn from the same source.

A resample draws I of I items with replacement. It is represented by the counts w_i, how often item i was drawn, so a statistic is a
function of weights: the mean is Σ w_i x_i / Σ w_i. Resamples are a function of the seed, so figures on the same items are resampled
alike. B resamples, I items.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

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


def resample_weights(n_items: int, resamples: int, seed: int, strata: np.ndarray | None = None) -> Iterator[np.ndarray]:
    """Bootstrap counts in chunks of [B, I]: rows sum to I, and within each stratum to its size if `strata` [I] is given."""
    generator = np.random.default_rng(seed)
    if strata is None:

        def draw(rows: int) -> np.ndarray:
            return generator.integers(n_items, size=(rows, n_items))
    else:
        if len(strata) != n_items:
            raise ValueError(f"{len(strata)} strata for {n_items} items; give one for each item")
        _, stratum, sizes = np.unique(strata, return_inverse=True, return_counts=True)
        members = np.argsort(stratum, kind="stable")
        size_I, first_I = np.repeat(sizes, sizes), np.repeat(np.cumsum(sizes) - sizes, sizes)

        def draw(rows: int) -> np.ndarray:
            # For each place of a stratum, a member of the same stratum: ⌊u · size⌋ with u uniform in [0, 1).
            return members[first_I + (generator.random((rows, n_items)) * size_I).astype(np.intp)]

    most_rows = max(1, CHUNK_WEIGHTS // max(1, n_items))
    for start in range(0, resamples, most_rows):
        rows = min(most_rows, resamples - start)
        cell_BI = draw(rows) + n_items * np.arange(rows)[:, None]
        yield np.bincount(cell_BI.ravel(), minlength=rows * n_items).reshape(rows, n_items).astype(np.float64)


def bootstrap(
    statistic: Callable[[np.ndarray], np.ndarray],
    n_items: int,
    *,
    seed: int = 0,
    resamples: int = 2000,
    confidence: float = 0.95,
    strata: np.ndarray | None = None,
) -> Estimate:
    """Percentile interval of `statistic`, which maps weights [B, I] to values [B]; the value is that of weights 1."""
    if n_items == 0:
        return Estimate(np.nan, np.nan, np.nan, 0)
    value = float(statistic(np.ones((1, n_items)))[0])
    values_B = np.concatenate([statistic(weights_BI) for weights_BI in resample_weights(n_items, resamples, seed, strata)])
    return percentile_interval(value, values_B, n_items, confidence)


def percentile_interval(value: float, values_B: np.ndarray, n: int, confidence: float) -> Estimate:
    """A value, and the middle `confidence` of its resamples; those that are NaN (none of their items counts) are ignored."""
    values_B = values_B[~np.isnan(values_B)]
    if np.isnan(value) or not len(values_B):
        return Estimate(value, np.nan, np.nan, n)
    outside = (1 - confidence) / 2
    low, high = np.quantile(values_B, [outside, 1 - outside])
    return Estimate(value, float(low), float(high), n)


def mean(values: np.ndarray, *, strata: np.ndarray | None = None, **options: Any) -> Estimate:
    """Of the items that are not NaN; `options` are those of `bootstrap`."""
    x_I = np.asarray(values, dtype=np.float64)
    kept_I = ~np.isnan(x_I)
    x_I = x_I[kept_I]
    strata = None if strata is None else np.asarray(strata)[kept_I]
    return bootstrap(lambda weights_BI: weights_BI @ x_I / len(x_I), len(x_I), strata=strata, **options)


def mean_difference(a: np.ndarray, b: np.ndarray, **options: Any) -> Estimate:
    """Paired: mean of a_i − b_i over the items where neither is NaN."""
    return mean(np.asarray(a, dtype=np.float64) - np.asarray(b, dtype=np.float64), **options)
