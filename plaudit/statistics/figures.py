"""Many figures of the same items, each with its interval, from one set of resamples: so that their differences are paired.

A figure is an array with one value per item, NaN where it does not apply. Prompts are resampled, not items: items of one prompt are
drawn together.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from plaudit.statistics.intervals import Estimate, percentile_interval, resample_weights

K = TypeVar("K", bound=Hashable)
"""What identifies a figure."""


@dataclass(frozen=True)
class Resampling:
    """How intervals are computed."""

    seed: int = 0
    resamples: int = 2000
    confidence: float = 0.95


def weighted_means(weights_BI: np.ndarray, values_I: np.ndarray) -> np.ndarray:
    """Σ w_i x_i / Σ w_i over the items that are not NaN; NaN where none is drawn."""
    known = ~np.isnan(values_I)
    weights, values = weights_BI[:, known], values_I[known]
    centre = values.mean() if len(values) else 0.0  # equal values have exactly their mean
    total = weights.sum(1)
    return centre + np.divide(weights @ (values - centre), total, out=np.full(len(weights), np.nan), where=total > 0)


def means_by_name(weights_BI: np.ndarray, figures: Mapping[K, np.ndarray]) -> dict[K, np.ndarray]:
    """`weighted_means` of many figures, by two matrix products."""
    if not figures:
        return {}
    values_IF = np.stack(list(figures.values()), 1)
    known_IF = ~np.isnan(values_IF)
    counts_F = np.maximum(known_IF.sum(0), 1)
    centre_F = np.where(known_IF, values_IF, 0.0).sum(0) / counts_F
    total_BF = weights_BI @ known_IF.astype(np.float64)
    sums_BF = weights_BI @ np.where(known_IF, values_IF - centre_F, 0.0)
    means_BF = centre_F + np.divide(sums_BF, total_BF, out=np.full(sums_BF.shape, np.nan), where=total_BF > 0)
    return dict(zip(figures, means_BF.T, strict=True))


def estimate_all(
    statistic: Callable[[np.ndarray], Mapping[K, np.ndarray]],
    items_of: Mapping[K, int],
    prompts: Sequence[int] | np.ndarray,
    resampling: Resampling,
) -> dict[K, Estimate]:
    """Percentile intervals of all that `statistic` returns: weights [B, I] of the items → values [B] of each figure.

    `items_of`: how many items are behind each figure. `prompts`: the number of each item's prompt, from 0.
    """
    prompt_I = np.asarray(prompts, dtype=np.intp)
    if not len(prompt_I):
        return {}
    values = {name: float(found[0]) for name, found in statistic(np.ones((1, len(prompt_I)))).items()}
    drawn: dict[K, list[np.ndarray]] = {name: [] for name in values}
    for weights_BP in resample_weights(int(prompt_I.max()) + 1, resampling.resamples, resampling.seed):
        for name, found in statistic(weights_BP[:, prompt_I]).items():
            drawn[name].append(found)
    return {
        name: percentile_interval(value, np.concatenate(drawn[name]), items_of[name], resampling.confidence)
        for name, value in values.items()
    }


def estimate_means(
    figures: Mapping[K, np.ndarray], prompts: Sequence[int] | np.ndarray, resampling: Resampling
) -> dict[K, Estimate]:
    """The mean of each figure over its items."""
    counts = {name: int((~np.isnan(values)).sum()) for name, values in figures.items()}
    return estimate_all(lambda weights: means_by_name(weights, figures), counts, prompts, resampling)
