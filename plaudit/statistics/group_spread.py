"""How much a reward tells the samples of a prompt apart. Where it does not, it has no say in which of them is better.

With x_gi the value of sample i of group g, over the G groups that have two values or more:

    spread = 1/G · Σ_g std_i(x_gi)        signal = 1/G · Σ_g [max_i x_gi > min_i x_gi]
"""

from typing import NamedTuple

import numpy as np


class GroupSpread(NamedTuple):
    spread: float
    """Mean standard deviation within a group."""
    signal: float
    """Share of groups whose values differ."""


def group_spread(values: np.ndarray, groups: np.ndarray) -> GroupSpread | None:
    """`groups`: each value's group. Values that are not finite are left out; None if no group has two."""
    known = np.isfinite(values)
    values, (_, groups) = values[known], np.unique(groups[known], return_inverse=True)
    counts = np.bincount(groups)
    several = counts > 1
    if not several.any():
        return None
    lows, highs = np.full(len(counts), np.inf), np.full(len(counts), -np.inf)
    np.minimum.at(lows, groups, values)
    np.maximum.at(highs, groups, values)
    differs = highs > lows
    deviations = values - (np.bincount(groups, values) / counts)[groups]
    stds = np.where(differs, np.sqrt(np.bincount(groups, deviations**2) / counts), 0.0)  # equal values: exactly 0
    return GroupSpread(float(stds[several].mean()), float(differs[several].mean()))
