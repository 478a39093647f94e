"""What several samples of a prompt are worth: pass@k, majority vote, best-of-k by a reward.

All are expectations over random subsets of k of the n samples, drawn without replacement.
"""

import math
from collections.abc import Hashable, Sequence
from functools import lru_cache
from itertools import combinations

import numpy as np


def pass_at_k(n: np.ndarray | int, correct: np.ndarray | int, k: np.ndarray | int) -> np.ndarray:
    """pass@k = 1 − C(n−c, k) / C(n, k), unbiased (Chen et al. 2021); c of n samples are correct. Arrays broadcast; NaN if k > n."""
    n, c = np.asarray(n), np.asarray(correct)
    if np.any(c < 0) or np.any(c > n):
        raise ValueError("the number of correct samples must be between 0 and n")
    return 1 - _share_of_subsets(n - c, n, np.asarray(k))


def majority(answers: Sequence[Hashable | None], correct: Sequence[float]) -> float:
    """Expected correctness of the most frequent answer; equally frequent ones are drawn at random.

    An answer is as correct as its samples are on average. None is no answer: it never wins, and if all are None the result is 0.
    NaN without samples.
    """
    return majority_at_k(answers, correct, len(answers)) if len(answers) else math.nan


def majority_at_k(
    answers: Sequence[Hashable | None], correct: Sequence[float], k: int, *, seed: int = 0, draws: int = 2000
) -> float:
    """Expected `majority` of k of the n samples: over all subsets, or over `draws` random ones if there are more. NaN if k > n."""
    if len(answers) != len(correct):
        raise ValueError(f"{len(answers)} answers, but {len(correct)} values of correct; give one for each")
    if k < 1:
        raise ValueError("k must be at least 1")
    if k > len(answers):
        return math.nan
    distinct = {answer: i for i, answer in enumerate(dict.fromkeys(a for a in answers if a is not None))}
    none = len(distinct)
    answer_N = np.array([none if answer is None else distinct[answer] for answer in answers])
    subset_SK = _subsets(len(answers), k, seed, draws)
    size = none + 1
    cell_SK = answer_N[subset_SK] + size * np.arange(len(subset_SK))[:, None]
    cells = size * len(subset_SK)
    votes_SA = np.bincount(cell_SK.ravel(), minlength=cells).reshape(-1, size)[:, :none]
    right = np.asarray(correct, dtype=np.float64)[subset_SK].ravel()
    right_SA = np.bincount(cell_SK.ravel(), right, minlength=cells).reshape(-1, size)[:, :none]
    most_S1 = votes_SA.max(axis=1, keepdims=True, initial=1)  # at least one vote wins
    winner_SA = votes_SA == most_S1
    winners_S = winner_SA.sum(axis=1)
    return float(((right_SA / most_S1 * winner_SA).sum(axis=1) / np.maximum(winners_S, 1)).mean())


def best_of_k(proxy: np.ndarray, gold: np.ndarray, k: int) -> float:
    """Expected gold of the sample with the highest proxy among k of n samples; equal proxies are drawn at random.

        P(sample of rank i is the best of k) = C(i−1, k−1) / C(n, k) = (C(i, k) − C(i−1, k)) / C(n, k),   rank 1 the lowest

    `best_of_k(proxy, proxy, k)` is the proxy's own curve. Samples where one of the two is NaN are left out; NaN if k > n.
    """
    proxy_N, gold_N = np.asarray(proxy, dtype=np.float64), np.asarray(gold, dtype=np.float64)
    known_N = ~(np.isnan(proxy_N) | np.isnan(gold_N))
    n = int(known_N.sum())
    if k > n:
        return math.nan
    _, level_N, counts_L = np.unique(proxy_N[known_N], return_inverse=True, return_counts=True)
    gold_L = np.bincount(level_N, gold_N[known_N]) / counts_L
    best_L = np.diff(_share_of_subsets(np.cumsum(counts_L), np.asarray(n), np.asarray(k)), prepend=0.0)
    return float(gold_L @ best_L)


def best_of_n_kl(n: np.ndarray | float) -> np.ndarray:
    """KL(best-of-n ‖ policy) = log n − (n − 1) / n, for distinct rewards; an upper bound with ties (Beirami et al. 2024)."""
    n = np.asarray(n, dtype=np.float64)
    return np.log(n) - (n - 1) / n


def _share_of_subsets(m: np.ndarray, n: np.ndarray, k: np.ndarray) -> np.ndarray:
    """C(m, k) / C(n, k) = Π_{i<k} (m − i) / (n − i): how many of the k-subsets of n lie in m of them. NaN if k > n."""
    m, n, k = np.broadcast_arrays(m, n, k)
    if np.any(k < 1):
        raise ValueError("k must be at least 1")
    share = np.where(k > n, np.nan, 1.0)
    for i in range(int(k.max(initial=0))):
        share = np.where(i < k, share * (m - i) / np.maximum(n - i, 1), share)  # once 0, it stays 0
    return share


@lru_cache(maxsize=64)
def _subsets(n: int, k: int, seed: int, draws: int) -> np.ndarray:
    """Indices [S, k]: all subsets if there are at most `draws`, else that many random ones, the same for every prompt."""
    if math.comb(n, k) <= draws:
        return np.array(list(combinations(range(n), k)))
    return np.argsort(np.random.default_rng(seed).random((draws, n)), axis=1)[:, :k]
