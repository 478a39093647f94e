"""Correlation of two lists of numbers. If one of them does not vary, it is undefined: None, not 0.

    Pearson    r = Σ (x−x̄)(y−ȳ) / √(Σ (x−x̄)² Σ (y−ȳ)²)
    Spearman   ρ = r of the ranks; equal values share the mean of their ranks

Within strata (a prompt's group, responses with the same label), x and y are centred by stratum: what remains is their correlation
among otherwise similar responses. Where strata would be too small (labels on a scale), the part explained by a third list z is
removed from both:

    partial    ρ_xy·z = (ρ_xy − ρ_xz ρ_yz) / √((1 − ρ_xz²)(1 − ρ_yz²))
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence

import numpy as np


def ranks(values: Sequence[float]) -> np.ndarray:
    """1 for the smallest; equal values share the mean of their ranks."""
    _, group, count = np.unique(np.asarray(values, dtype=np.float64), return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    return (last - (count - 1) / 2)[group]


def pearson(x: Sequence[float] | np.ndarray, y: Sequence[float] | np.ndarray) -> float | None:
    x_N, y_N = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if len(x_N) < 2:
        return None
    return _cosine(x_N - x_N.mean(), y_N - y_N.mean())


def spearman(x: Sequence[float], y: Sequence[float]) -> float | None:
    return pearson(ranks(x), ranks(y))


def spearman_within(x: Sequence[float], y: Sequence[float], strata: Sequence[Hashable]) -> float | None:
    """Of overall ranks, centred by stratum. Strata of size one carry no information."""
    members: dict[Hashable, list[int]] = defaultdict(list)
    for i, stratum in enumerate(strata):
        members[stratum].append(i)
    pooled = [indices for indices in members.values() if len(indices) > 1]
    if not pooled:
        return None
    x_N, y_N = ranks(x), ranks(y)
    return _cosine(*(np.concatenate([r_N[indices] - r_N[indices].mean() for indices in pooled]) for r_N in (x_N, y_N)))


def spearman_partial(x: Sequence[float], y: Sequence[float], z: Sequence[float]) -> float | None:
    """None if z explains all of x or y."""
    xy, xz, yz = spearman(x, y), spearman(x, z), spearman(y, z)
    if xy is None or xz is None or yz is None:
        return xy
    left = (1 - xz * xz) * (1 - yz * yz)
    return max(-1.0, min(1.0, (xy - xz * yz) / math.sqrt(left))) if left > 1e-9 else None


def _cosine(dx: np.ndarray, dy: np.ndarray) -> float | None:
    scale = math.sqrt(float(dx @ dx) * float(dy @ dy))
    # Below this, the variation is rounding error.
    return max(-1.0, min(1.0, float(dx @ dy) / scale)) if scale > 1e-9 else None
