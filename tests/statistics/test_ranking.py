"""Agreement of scores: pairs, ties within a threshold, Kendall's τ_b, soft pairwise accuracy."""

import math
from fractions import Fraction
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plaudit.statistics.ranking import acc_eq, best_epsilon, kendall_tau_b, soft_pairwise_accuracy

NAN = math.nan
# Few levels, so that ties are frequent.
GROUP = st.integers(2, 6).flatmap(lambda n: st.tuples(*(st.lists(st.integers(0, 4), min_size=n, max_size=n) for _ in range(2))))


# Pairs ---------------------------------------------------------------------------------------------------------------


def agreement_of(predicted: np.ndarray, truth: np.ndarray) -> float:
    """Of one group, whose ties are equal scores."""
    return acc_eq([predicted], [truth], 0.0)[0]


@pytest.mark.parametrize(
    ("predicted", "truth", "agreement"),
    [
        ([3, 2, 1], [9, 5, 0], 1.0),
        ([1, 2, 3], [9, 5, 0], 0.0),
        ([3, 3, 1], [9, 5, 0], 2 / 3),  # a tie against a non-tie is wrong
        ([3, 2, 1], [5, 5, 0], 2 / 3),  # and a non-tie against a tie
        ([3, 3, 1], [5, 5, 0], 1.0),
        ([1, 1], [2, 2], 1.0),
        ([4, 3, 2, 1], [4, 1, 3, 2], 4 / 6),
        ([math.inf, 0, -math.inf], [3, 2, 1], 1.0),
        ([math.inf, math.inf, 0], [3, 3, 1], 1.0),
    ],
)
def test_agreement_by_hand(predicted, truth, agreement):
    assert agreement_of(np.array(predicted), np.array(truth)) == pytest.approx(agreement)


def test_agreement_needs_two_candidates():
    assert math.isnan(agreement_of(np.array([1.0]), np.array([1.0])))
    assert math.isnan(agreement_of(np.array([]), np.array([])))
    assert math.isnan(agreement_of(np.array([1.0, NAN]), np.array([1.0, 2.0])))


def test_a_candidate_without_score_is_left_out():
    assert agreement_of(np.array([3.0, NAN, 1.0]), np.array([2, 9, 1])) == 1.0
    assert kendall_tau_b(np.array([3.0, NAN, 1.0]), np.array([2, 9, 1])) == 1.0


def test_every_candidate_has_two_scores():
    with pytest.raises(ValueError, match="3 predicted scores for 2 candidates"):
        agreement_of(np.array([1.0, 2.0, 3.0]), np.array([1.0, 2.0]))


@given(group=GROUP)
def test_agreement_depends_on_relations_alone(group):
    predicted, truth = map(np.array, group)
    pairs = list(combinations(range(len(truth)), 2))
    equal = sum(np.sign(predicted[i] - predicted[j]) == np.sign(truth[i] - truth[j]) for i, j in pairs)
    agreement = agreement_of(predicted, truth)
    assert agreement == pytest.approx(equal / len(pairs))
    assert agreement_of(np.exp(predicted), 7 * truth - 3) == agreement
    assert agreement_of(predicted[::-1], truth[::-1]) == agreement
    assert agreement_of(truth, predicted) == agreement


# Ties within a threshold ---------------------------------------------------------------------------------------------


def test_tie_threshold_by_hand():
    """Six pairs with predicted differences 2, 6, 8, 4, 6, 2; the first three candidates are equal in truth."""
    predicted, truth = [np.array([0.0, 2.0, 6.0, 8.0])], [np.array([1, 1, 1, 4])]
    accuracies = {epsilon: acc_eq(predicted, truth, epsilon)[0] for epsilon in (0, 1.9, 2, 4, 6, 8)}
    assert accuracies == pytest.approx({0: 3 / 6, 1.9: 3 / 6, 2: 3 / 6, 4: 4 / 6, 6: 4 / 6, 8: 3 / 6})
    assert best_epsilon(predicted, truth) == 4  # the smaller of 4 and 6


def test_no_threshold_if_every_order_is_right():
    assert best_epsilon([np.array([0.0, 2.0, 6.0])], [np.array([1, 2, 3])]) == 0.0
    assert best_epsilon([np.array([1.0])], [np.array([1])]) == 0.0
    assert best_epsilon([], []) == 0.0


def test_tie_threshold_of_groups_with_missing_scores():
    """Reference values: the regression example of mt-metrics-eval's tau_optimization."""
    predicted = [[0, 5, 2, 3, 2], [NAN, 2, 1, 5, 3], [9, 1, 5, 3, 8], [9, 3, 4, 4, 1], [NAN] * 5]
    truth = [[1, 5, 2, 1, 1], [4, 2, 2, 1, 4], [5, 9, 2, 8, 7], [7, 6, NAN, 3, 2], [NAN] * 5]
    predicted, truth = [np.array(p, float) for p in predicted], [np.array(t, float) for t in truth]
    expected = [0.466666667, 0.491666667, 0.383333333, 0.291666667, 0.266666667, 0.2, 0.158333333, 0.158333333, 0.116666667]
    for epsilon, accuracy in enumerate(expected):
        groups = acc_eq(predicted, truth, epsilon)
        assert np.isnan(groups).tolist() == [False] * 4 + [True]
        assert np.nanmean(groups) == pytest.approx(accuracy)
    assert best_epsilon(predicted, truth) == 1.0


def test_rounding_does_not_choose_the_threshold():
    # One of three pairs is right at ε = 0, another at ε = 3; thirds of thirds do not add up exactly.
    predicted, truth = (
        [np.array([2, 0, 3]), np.array([3, 3]), np.array([1, 1])],
        [np.array([1, 0, 0]), np.array([0, 0]), np.array([2, 2])],
    )
    assert acc_eq(predicted, truth, 0).tolist() == acc_eq(predicted, truth, 3).tolist() == [1 / 3, 1, 1]
    assert best_epsilon(predicted, truth) == 0.0


@settings(max_examples=60, deadline=None)
@given(groups=st.lists(GROUP, min_size=1, max_size=6))
def test_best_threshold_is_the_smallest_of_the_best(groups):
    predicted, truth = [np.array(p) for p, _ in groups], [np.array(t) for _, t in groups]

    def exact_accuracy(epsilon: int) -> Fraction:
        total = Fraction(0)
        for p, t in groups:
            pairs = list(combinations(range(len(t)), 2))
            relations = [(0 if abs(p[i] - p[j]) <= epsilon else np.sign(p[i] - p[j]), np.sign(t[i] - t[j])) for i, j in pairs]
            total += Fraction(sum(a == b for a, b in relations), len(pairs))
        return total / len(groups)

    by_epsilon = {epsilon: exact_accuracy(epsilon) for epsilon in range(5)}
    best = min(epsilon for epsilon in by_epsilon if by_epsilon[epsilon] == max(by_epsilon.values()))
    found = best_epsilon(predicted, truth)
    assert found == best
    assert acc_eq(predicted, truth, found).mean() == pytest.approx(float(by_epsilon[best]))


# Kendall -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "y", "tau"),
    [
        ([1, 2, 3, 4], [1, 3, 2, 4], 4 / 6),  # 5 pairs agree, 1 does not
        ([1, 2, 2, 3], [1, 2, 3, 3], 4 / 5),  # one pair tied in each
        ([12, 2, 1, 12, 2], [1, 4, 7, 1, 0], -0.47140452079103173),  # scipy's documentation
        ([1, 1, 1], [1, 2, 3], NAN),
        ([1, 2, 3], [5, 5, 5], NAN),
        ([1], [1], NAN),
        ([], [], NAN),
    ],
)
def test_kendall_by_hand(x, y, tau):
    assert kendall_tau_b(np.array(x), np.array(y)) == pytest.approx(tau, nan_ok=True)


def cosine_of_signs(x: np.ndarray, y: np.ndarray) -> float:
    """τ_b by its definition: over all pairs."""
    dx, dy = (np.sign(v[:, None] - v[None, :]).ravel() for v in (x, y))
    return dx @ dy / math.sqrt((dx @ dx) * (dy @ dy)) if dx.any() and dy.any() else NAN


@given(group=GROUP)
def test_kendall_of_all_pairs(group):
    x, y = map(np.array, group)
    assert kendall_tau_b(x, y) == pytest.approx(cosine_of_signs(x, y), nan_ok=True)


@pytest.mark.parametrize(("n", "levels"), [(64, 1000), (255, 256), (400, 7)])
def test_kendall_of_many(n, levels):
    generator = np.random.default_rng(n)
    x = generator.integers(levels, size=n)
    y = x + generator.integers(levels, size=n)
    assert kendall_tau_b(x, y) == pytest.approx(cosine_of_signs(x, y), rel=1e-12)
    assert kendall_tau_b(x, x) == 1.0
    assert kendall_tau_b(-x, x) == -1.0


@pytest.mark.slow  # importing scipy takes seconds
def test_kendall_matches_scipy():
    stats = pytest.importorskip("scipy.stats")
    generator = np.random.default_rng(0)
    for n, levels in ((5, 3), (64, 1000), (1000, 7), (100_000, 5000)):
        x = generator.integers(levels, size=n)
        y = x + generator.integers(levels, size=n)
        assert kendall_tau_b(x, y) == pytest.approx(stats.kendalltau(x, y).statistic, rel=1e-12)


# Soft pairwise accuracy ----------------------------------------------------------------------------------------------


def exact_spa(human: np.ndarray, metric: np.ndarray) -> float:
    """By all sign permutations of the segments that a pair has in common."""
    errors = []
    for i, j in combinations(range(human.shape[1]), 2):
        common = ~np.isnan(human + metric)[:, [i, j]].any(axis=1)
        if common.any():
            p = []
            for scores in (human, metric):
                d = (scores[:, i] - scores[:, j])[common]
                sums = np.array(list(product((-1, 1), repeat=len(d)))) @ d
                tied = np.isclose(sums, d.sum())
                p.append(((sums > d.sum()) & ~tied).mean() + tied.mean() / 2)
            errors.append(abs(p[0] - p[1]))
    return 1 - float(np.mean(errors))


def scores_of(segments: int, systems: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    human = generator.integers(0, 6, size=(segments, systems)) + np.arange(systems) / 2
    return human, human + generator.normal(0, 2, size=human.shape)


def test_spa_by_hand():
    # Sums of ±1 ±1 are 2, 0, 0, −2: p = ⅛ for a difference of 2, ⅞ for −2, and ½ between equal systems.
    better, equal = np.array([[1.0, 0.0], [1.0, 0.0]]), np.zeros((2, 2))
    many = {"permutations": 40_000}
    assert soft_pairwise_accuracy(better, better, **many) == 1.0
    assert soft_pairwise_accuracy(better, 5 * better, **many) == 1.0  # p does not depend on scale
    assert soft_pairwise_accuracy(better, -better, **many) == pytest.approx(1 - 6 / 8, abs=0.01)
    assert soft_pairwise_accuracy(better, equal, **many) == pytest.approx(1 - 3 / 8, abs=0.01)
    assert soft_pairwise_accuracy(equal, equal) == 1.0


def test_spa_matches_all_permutations():
    human, metric = scores_of(7, 4, seed=0)
    assert soft_pairwise_accuracy(human, metric, permutations=40_000) == pytest.approx(exact_spa(human, metric), abs=0.01)


def test_rounding_does_not_break_ties_between_permutations():
    human = np.array([[0.1, 0.0], [0.2, 0.0], [0.0, 0.3], [0.3, 0.0], [0.7, 0.6], [0.0, 0.1]])  # 0.1 + 0.2 − 0.3 is not 0
    metric = np.zeros_like(human)
    found = soft_pairwise_accuracy(human, metric, permutations=40_000)
    assert found == pytest.approx(exact_spa(human, metric), abs=0.01)


def test_spa_uses_segments_that_both_systems_have():
    human, metric = scores_of(7, 4, seed=1)
    human[0, 0] = human[1, 0] = human[5, 3] = metric[2, 1] = NAN
    found = soft_pairwise_accuracy(human, metric, permutations=40_000)
    assert found == pytest.approx(exact_spa(human, metric), abs=0.01)


def test_pairs_without_a_common_segment_are_left_out():
    human, metric = scores_of(40, 3, seed=2)
    absent = np.full((40, 1), NAN)
    whole = soft_pairwise_accuracy(human, metric)
    assert soft_pairwise_accuracy(np.hstack([human, absent]), np.hstack([metric, absent])) == pytest.approx(whole, abs=1e-12)
    assert math.isnan(soft_pairwise_accuracy(absent, absent))
    assert math.isnan(soft_pairwise_accuracy(human[:, :1], metric[:, :1]))
    assert math.isnan(soft_pairwise_accuracy(human[:0], metric[:0]))


def test_spa_does_not_depend_on_the_order_of_systems():
    human, metric = scores_of(9, 5, seed=3)  # few segments of whole numbers: ties between permutations
    order = [3, 0, 4, 2, 1]
    assert soft_pairwise_accuracy(human, metric) == pytest.approx(
        soft_pairwise_accuracy(human[:, order], metric[:, order]), abs=1e-12
    )


def test_spa_is_a_function_of_the_seed():
    human, metric = scores_of(30, 4, seed=4)
    found = [soft_pairwise_accuracy(human, metric, seed=seed) for seed in (0, 0, 1)]
    assert found[0] == found[1] != found[2]
    assert found[0] == pytest.approx(found[2], abs=0.03)


def test_weights_count_segments():
    human, metric = scores_of(6, 4, seed=5)
    rows = [0, 0, 0, 2, 3, 5]
    weights = np.array([3.0, 0.0, 1.0, 1.0, 0.0, 1.0])
    assert soft_pairwise_accuracy(human, metric, weights=weights) == soft_pairwise_accuracy(human[rows], metric[rows])
    assert math.isnan(soft_pairwise_accuracy(human, metric, weights=np.zeros(6)))
    with pytest.raises(ValueError, match="whole numbers"):
        soft_pairwise_accuracy(human, metric, weights=weights / 2)


def test_scores_have_one_shape():
    with pytest.raises(ValueError, match=r"\(6, 4\), metric scores \(4, 6\)"):
        soft_pairwise_accuracy(np.zeros((6, 4)), np.zeros((4, 6)))
