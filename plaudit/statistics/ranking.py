"""Agreement of predicted scores with reference scores: of candidates in a group, and of systems.

NaN is a missing score: its candidate is left out. Callers count what is missing; an answer that counts 0 is theirs to count.
"""

from collections.abc import Sequence

import numpy as np

# Sums of the same numbers in another order differ by rounding; below this they are equal.
ROUNDING = 1e-9
# Signs of one chunk of permutations.
CHUNK_SIGNS = 2**21


def pairwise_agreement(predicted: np.ndarray, truth: np.ndarray) -> float:
    """Share of pairs whose relation (>, =, <) is equal in both; a tie against a non-tie is wrong. NaN below two candidates."""
    return float(acc_eq([predicted], [truth], 0.0)[0])


def acc_eq(predicted_groups: Sequence[np.ndarray], truth_groups: Sequence[np.ndarray], epsilon: float) -> np.ndarray:
    """Pairwise agreement per group, where predicted pairs with |difference| ≤ ε are ties (Deutsch et al. 2023).

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
    _, x = np.unique(x, return_inverse=True)
    _, y = np.unique(y, return_inverse=True)
    n = len(x)
    n0 = n * (n - 1) // 2
    n1, n2, n3 = _tied(x), _tied(y), _tied(x * n + y)
    scale = (n0 - n1) * (n0 - n2)
    if not scale:
        return float("nan")
    discordant = _inversions(y[np.lexsort((y, x))])
    return (n0 - n1 - n2 + n3 - 2 * discordant) / scale**0.5


def soft_pairwise_accuracy(
    human: np.ndarray, metric: np.ndarray, *, permutations: int = 1000, seed: int = 0, weights: np.ndarray | None = None
) -> float:
    """SPA = 1 − mean |p_human − p_metric| over pairs of systems (Thompson et al. 2024).

    Scores are [segments, systems]. p of a pair is the one-sided p-value of the first system being better, by a paired permutation
    test on the segments where both systems have both scores. With d_s the differences and signs σ_s drawn at random,

        p = (#{Σ σ_s d_s > Σ d_s} + ½ #{Σ σ_s d_s = Σ d_s}) / permutations

    Ties count half, so that equal systems have p = ½ and SPA does not depend on the order of the systems. Human and metric have the
    same signs. `weights` are counts of segments, as bootstraps draw them: a segment that counts w times has w signs.
    Pairs without a common segment are left out; NaN if there is no pair.
    """
    human_SK, metric_SK = np.asarray(human, dtype=np.float64), np.asarray(metric, dtype=np.float64)
    segments, systems = human_SK.shape
    weights_S = np.ones(segments, dtype=np.int64) if weights is None else np.asarray(weights).astype(np.int64)
    first, second = np.triu_indices(systems, k=1)
    human_SP, metric_SP = human_SK[:, first] - human_SK[:, second], metric_SK[:, first] - metric_SK[:, second]
    missing_SP = np.isnan(human_SP) | np.isnan(metric_SP)
    compared_P = weights_S @ ~missing_SP > 0
    if not compared_P.any():
        return float("nan")
    differences_SQ = np.hstack([np.where(missing_SP, 0.0, d_SP)[:, compared_P] for d_SP in (human_SP, metric_SP)])
    observed_Q = weights_S @ differences_SQ
    rounding_Q = ROUNDING * (weights_S @ np.abs(differences_SQ))

    generator = np.random.default_rng(seed)
    greater_Q = np.zeros(len(observed_Q))
    rows = max(1, CHUNK_SIGNS // segments)
    for start in range(0, permutations, rows):
        shape = (min(rows, permutations - start), segments)
        # The sum of w signs.
        signs_BS = (2 * generator.binomial(weights_S, 0.5, size=shape) - weights_S).astype(np.float64)
        above_BQ = signs_BS @ differences_SQ - observed_Q
        greater_Q += (above_BQ > rounding_Q).sum(axis=0) + 0.5 * (np.abs(above_BQ) <= rounding_Q).sum(axis=0)
    p_human, p_metric = np.split(greater_Q / permutations, 2)
    return float(1 - np.abs(p_human - p_metric).mean())


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
    first, second = np.triu_indices(len(x), k=1)
    return _difference(x[first], x[second]), _difference(y[first], y[second])


def _difference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a − b, and 0 where both are infinite and equal."""
    return np.subtract(a, b, out=np.zeros_like(a), where=a != b)


def _agreement(predicted_P: np.ndarray, truth_P: np.ndarray, epsilon: float) -> float:
    if not len(predicted_P):
        return float("nan")
    relation_P = np.where(np.abs(predicted_P) <= epsilon, 0.0, np.sign(predicted_P))
    return float((relation_P == np.sign(truth_P)).mean())


def _tied(ranks: np.ndarray) -> int:
    _, counts = np.unique(ranks, return_counts=True)
    return int((counts * (counts - 1) // 2).sum())


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
