"""Agreement of predicted scores with reference scores: of candidates in a group, and of systems.

NaN is a missing score: its candidate is left out. Where a missing score counts as wrong, callers say so.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

# Sums of the same numbers in another order differ by rounding: sums this close, relative to their terms, are equal.
ROUNDING = 1e-10
# Signs of one chunk of permutations.
CHUNK_SIGNS = 2**21


def acc_eq(predicted_groups: Sequence[np.ndarray], truth_groups: Sequence[np.ndarray], epsilon: float) -> np.ndarray:
    """Share of each group's pairs whose relation (>, =, <) is equal in both; a tie against a non-tie is wrong. Predicted pairs with
    |difference| ≤ ε are ties (Deutsch et al. 2023).

    NaN for groups with fewer than two candidates.
    """
    return np.array([_agreement(*_pairs(p, t), epsilon) for p, t in zip(predicted_groups, truth_groups, strict=True)])


def best_epsilon(predicted_groups: Sequence[np.ndarray], truth_groups: Sequence[np.ndarray]) -> float:
    """The ε that maximises the mean of `acc_eq` over groups, the smallest of several: WMT's tie calibration.

    Only at an observed |difference| does the accuracy change. In ascending order, a pair that becomes a tie

        gains 1/n_g   if it is a tie in truth
        loses 1/n_g   if it is not, and was predicted in the right order

    with n_g pairs in its group, so one sort and one cumulative sum give the accuracy at every ε.
    """
    differences, gains = [], []
    for predicted, truth in zip(predicted_groups, truth_groups, strict=True):
        predicted_P, truth_P = _pairs(predicted, truth)
        if len(predicted_P):
            differences.append(np.abs(predicted_P))
            right_P = np.sign(predicted_P) == np.sign(truth_P)
            gains.append(np.where(truth_P == 0, 1.0, -1.0 * right_P) / len(predicted_P))
    if not differences:
        return 0.0
    difference_P, gain_P = np.concatenate(differences), np.concatenate(gains) / len(differences)
    epsilon_E, index_P = np.unique(np.append(difference_P, 0.0), return_inverse=True)
    accuracy_E = np.cumsum(np.bincount(index_P[:-1], gain_P, minlength=len(epsilon_E)))  # up to a constant
    return float(epsilon_E[np.argmax(accuracy_E >= accuracy_E.max() - ROUNDING)])


def kendall_tau_b(predicted: np.ndarray, truth: np.ndarray) -> float:
    """τ_b = (C − D) / √((n₀ − n₁)(n₀ − n₂)), NaN where one side is constant.

    C concordant and D discordant pairs, n₀ all pairs, n₁ and n₂ those tied in x and in y, n₃ in both:
    C + D = n₀ − n₁ − n₂ + n₃. In order of x, D is the number of inversions of y (Knight 1966).
    """
    x, y = _known(predicted, truth)
    n = len(x)
    _, x, x_counts = np.unique(x, return_inverse=True, return_counts=True)  # by rank from here
    _, y, y_counts = np.unique(y, return_inverse=True, return_counts=True)
    _, both_counts = np.unique(x * n + y, return_counts=True)
    n0, n1, n2, n3 = n * (n - 1) // 2, _pairs_within(x_counts), _pairs_within(y_counts), _pairs_within(both_counts)
    scale = math.sqrt((n0 - n1) * (n0 - n2))
    if not scale:
        return math.nan
    discordant = _inversions(y[np.lexsort((y, x))])
    return (n0 - n1 - n2 + n3 - 2 * discordant) / scale


def soft_pairwise_accuracy(
    human: np.ndarray, metric: np.ndarray, *, permutations: int = 1000, seed: int = 0, weights: np.ndarray | None = None
) -> float:
    """SPA = 1 − mean |p_human − p_metric| over pairs of systems (Thompson et al. 2024).

    Scores are [segments, systems]. p of a pair is the one-sided p-value of the first system being better, by a paired permutation
    test on the segments where both systems have both scores. With d_s the differences and signs σ_s drawn at random,

        p = (#{Σ σ_s d_s > Σ d_s} + ½ #{Σ σ_s d_s = Σ d_s}) / permutations

    Ties count half (in full in the authors' code), so that equal systems have p = ½ and SPA does not depend on the order of the
    systems. Human and metric have the same signs. `weights` are counts of segments, as bootstraps draw them: a segment that counts
    w times has w signs. Pairs without a common segment are left out; NaN if there is no pair.
    """
    human_SK, metric_SK = np.asarray(human, dtype=np.float64), np.asarray(metric, dtype=np.float64)
    if human_SK.shape != metric_SK.shape:
        raise ValueError(f"human scores are {human_SK.shape}, metric scores {metric_SK.shape}; give both as [segments, systems]")
    if weights is not None:
        counts_S = np.asarray(weights).astype(np.intp)
        if np.any(counts_S != weights) or np.any(counts_S < 0):
            raise ValueError("weights must count segments: whole numbers from 0")
        human_SK, metric_SK = np.repeat(human_SK, counts_S, axis=0), np.repeat(metric_SK, counts_S, axis=0)
    missing_SK = np.isnan(human_SK) | np.isnan(metric_SK)
    systems = human_SK.shape[1]
    first, second = np.triu_indices(systems, k=1)
    compared = ~(missing_SK[:, first] | missing_SK[:, second]).all(axis=0)
    if not compared.any():
        return math.nan
    first, second = first[compared], second[compared]
    both = np.hstack([np.where(missing_SK, np.nan, human_SK), np.where(missing_SK, np.nan, metric_SK)])
    p = _p_values(both, np.append(first, first + systems), np.append(second, second + systems), permutations, seed)
    p_human, p_metric = np.split(p, 2)
    return float(1 - np.abs(p_human - p_metric).mean())


def _p_values(scores_SK: np.ndarray, first_P: np.ndarray, second_P: np.ndarray, permutations: int, seed: int) -> np.ndarray:
    """For pairs of columns, p of the first being better, by the rows where neither is NaN."""

    def differences(x_NK: np.ndarray) -> np.ndarray:
        return x_NK[:, first_P] - x_NK[:, second_P]

    complete = not np.isnan(scores_SK).any()
    d_SP = np.nan_to_num(differences(scores_SK), nan=0.0)
    observed_P = d_SP.sum(axis=0)
    size_K = np.nansum(np.abs(scores_SK), axis=0)
    rounding_P = ROUNDING * (size_K[first_P] + size_K[second_P])
    generator = np.random.default_rng(seed)
    above_P = np.zeros(len(first_P))
    segments = len(scores_SK)
    rows = max(1, CHUNK_SIGNS // segments)
    for start in range(0, permutations, rows):
        signs_BS = 2.0 * generator.integers(2, size=(min(rows, permutations - start), segments), dtype=np.int8) - 1.0
        # Without gaps, differences of the systems' sums: fewer columns than pairs.
        permuted_BP = differences(signs_BS @ scores_SK) if complete else signs_BS @ d_SP
        excess_BP = permuted_BP - observed_P
        above_P += (excess_BP > rounding_P).sum(axis=0) + 0.5 * (np.abs(excess_BP) <= rounding_P).sum(axis=0)
    return above_P / permutations


def _known(predicted: np.ndarray, truth: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Without candidates whose score is missing."""
    x, y = np.asarray(predicted, dtype=np.float64), np.asarray(truth, dtype=np.float64)
    if x.shape != y.shape:
        raise ValueError(f"{x.size} predicted scores for {y.size} candidates; give one for each, NaN where it is missing")
    known = ~(np.isnan(x) | np.isnan(y))
    return x[known], y[known]


def _pairs(predicted: np.ndarray, truth: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Differences of all pairs, predicted and true."""
    x, y = _known(predicted, truth)
    first, second = _pair_indices(len(x))
    return _difference(x[first], x[second]), _difference(y[first], y[second])


@lru_cache(maxsize=32)
def _pair_indices(n: int) -> tuple[np.ndarray, np.ndarray]:
    first, second = np.triu_indices(n, k=1)
    return first, second


def _difference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a − b, and 0 where both are infinite and equal."""
    return np.subtract(a, b, out=np.zeros_like(a), where=a != b)


def _agreement(predicted_P: np.ndarray, truth_P: np.ndarray, epsilon: float) -> float:
    if not len(predicted_P):
        return math.nan
    relation_P = np.where(np.abs(predicted_P) <= epsilon, 0.0, np.sign(predicted_P))
    return float((relation_P == np.sign(truth_P)).mean())


def _pairs_within(sizes: np.ndarray) -> int:
    return int((sizes * (sizes - 1) // 2).sum())


def _inversions(ranks: np.ndarray) -> int:
    """Pairs i < j with ranks_i > ranks_j, for integers from 0.

    The highest bit in which two numbers differ decides which is greater: for each bit, among numbers that agree above it, count the
    pairs of a 1 before a 0.
    """
    total = 0
    for bit in range(int(ranks.max(initial=0)).bit_length()):
        same_above = ranks >> (bit + 1)
        order = np.argsort(same_above, kind="stable")
        ones = (ranks[order] >> bit) & 1
        group = same_above[order]
        ones_before = np.cumsum(ones) - ones
        ones_before -= ones_before[np.searchsorted(group, group)]  # of the same group only
        total += int(ones_before[ones == 0].sum())
    return total
