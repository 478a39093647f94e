"""pass@k, majority vote and best-of-k against enumeration of all subsets."""

import math
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plaudit.statistics.best_of import best_of_k, best_of_n_kl, majority, majority_at_k, pass_at_k

NAN = math.nan
SAMPLES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=7)


# pass@k --------------------------------------------------------------------------------------------------------------


def test_pass_at_k_by_hand():
    assert float(pass_at_k(4, 1, 1)) == pytest.approx(1 / 4)
    assert float(pass_at_k(4, 2, 2)) == pytest.approx(5 / 6)  # of six pairs one has both wrong samples
    assert float(pass_at_k(4, 2, 3)) == 1.0
    assert float(pass_at_k(4, 0, 4)) == 0.0


def test_pass_at_k_broadcasts():
    curve = pass_at_k(np.array([[4], [2]]), np.array([[1], [1]]), np.array([1, 2, 4]))
    np.testing.assert_allclose(curve, [[1 / 4, 2 / 4, 1], [1 / 2, 1, NAN]])


@given(n=st.integers(1, 8), data=st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample(n, data):
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    subsets = list(combinations([True] * c + [False] * (n - c), k))
    assert float(pass_at_k(n, c, k)) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@pytest.mark.parametrize(("n", "c", "k"), [(1000, 1, 500), (1000, 400, 3), (2000, 3, 1000), (10_000, 5000, 100)])
def test_pass_at_k_is_exact_for_many_samples(n, c, k):
    exact = 1 - Fraction(math.comb(n - c, k), math.comb(n, k))
    assert float(pass_at_k(n, c, k)) == pytest.approx(float(exact), rel=1e-12)


def test_pass_at_k_rejects_impossible_counts():
    for c in (-1, 5):
        with pytest.raises(ValueError, match="between 0 and n"):
            pass_at_k(4, c, 1)


# Majority vote -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answers", "correct", "expected"),
    [
        (["7", "7", "8"], [1, 1, 0], 1.0),
        (["7", "8", "8"], [1, 0, 0], 0.0),
        (["7", "8"], [1, 0], 0.5),  # a tie is broken at random
        (["7", "7", "8", "8", "9"], [1, 1, 0, 0, 0], 0.5),
        ([None, None, "7"], [0, 0, 1], 1.0),  # no answer does not win
        ([None, None], [1, 1], 0.0),
        (["7", "7", "8"], [1, 0, 0], 0.5),  # an answer is as correct as its samples
        (["7", None, "7"], [1, 1, 0], 0.5),
        ([(1, 2), (1, 2), 3], [1, 1, 0], 1.0),
        ([], [], NAN),
    ],
)
def test_majority_by_hand(answers, correct, expected):
    assert majority(answers, correct) == pytest.approx(expected, nan_ok=True)


def test_majority_of_some_samples_by_hand():
    answers, correct = ["7", "7", "8", "9"], [1, 1, 0, 0]
    assert majority_at_k(answers, correct, 1) == pytest.approx(1 / 2)
    # Pairs: 77 is right; 78, 79 twice each are ties; 89 is wrong.
    assert majority_at_k(answers, correct, 2) == pytest.approx((1 + 4 * 0.5) / 6)
    assert majority_at_k(answers, correct, 3) == pytest.approx((2 * 1 + 2 / 3 * 0 + 2 * 1 / 3) / 4)
    assert majority_at_k(answers, correct, 4) == 1.0
    assert math.isnan(majority_at_k(answers, correct, 5))


@settings(deadline=None)
@given(samples=SAMPLES, data=st.data())
def test_majority_at_k_is_the_mean_over_subsets(samples, data):
    k = data.draw(st.integers(1, len(samples)))
    answers, correct = [a or None for a, _ in samples], [c / 4 for _, c in samples]

    def by_counting(subset: tuple[int, ...]) -> float:
        votes = [answers[i] for i in subset if answers[i] is not None]
        most = max(map(votes.count, votes), default=0)
        winners = {vote for vote in votes if votes.count(vote) == most}
        return (
            float(np.mean([np.mean([correct[i] for i in subset if answers[i] == winner]) for winner in winners]))
            if winners
            else 0.0
        )

    expected = np.mean([by_counting(subset) for subset in combinations(range(len(samples)), k)])
    assert majority_at_k(answers, correct, k) == pytest.approx(expected)


def test_drawn_subsets_estimate_the_mean_over_all():
    answers = [str(i % 3) if i % 4 else None for i in range(14)]
    correct = [float(answer == "1") for answer in answers]
    exact = majority_at_k(answers, correct, 7, draws=math.comb(14, 7))
    drawn = [majority_at_k(answers, correct, 7, seed=seed, draws=1500) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn == pytest.approx([exact] * 3, abs=0.04)


def test_every_answer_is_graded():
    with pytest.raises(ValueError, match="2 answers, but 1"):
        majority(["7", "8"], [1.0])


# Best of k -----------------------------------------------------------------------------------------------------------


def test_best_of_k_by_hand():
    proxy, gold = np.array([1.0, 2.0, 3.0]), np.array([5.0, 9.0, 1.0])
    assert [best_of_k(proxy, gold, k) for k in (1, 2, 3)] == pytest.approx([5.0, (9 + 1 + 1) / 3, 1.0])
    assert [best_of_k(proxy, proxy, k) for k in (1, 2, 3)] == pytest.approx([2.0, (2 + 3 + 3) / 3, 3.0])
    assert math.isnan(best_of_k(proxy, gold, 4))
    assert best_of_k(np.zeros(3), gold, 3) == pytest.approx(5.0)  # the proxy cannot tell them apart


def test_samples_without_a_score_cannot_be_the_best():
    proxy, gold = np.array([1.0, NAN, 3.0, 4.0]), np.array([5.0, 9.0, 1.0, NAN])
    assert best_of_k(proxy, gold, 2) == 1.0
    assert math.isnan(best_of_k(proxy, gold, 3))


@settings(deadline=None)
@given(samples=SAMPLES, data=st.data())
def test_best_of_k_is_the_mean_over_subsets(samples, data):
    k = data.draw(st.integers(1, len(samples)))
    proxy, gold = np.array(samples, dtype=float).T
    best = []
    for subset in combinations(range(len(samples)), k):
        chosen = [i for i in subset if proxy[i] == max(proxy[list(subset)])]
        best.append(gold[chosen].mean())
    assert best_of_k(proxy, gold, k) == pytest.approx(np.mean(best))


def test_best_of_k_with_a_correct_proxy_is_pass_at_k():
    correct = np.arange(300) < 7
    for k in (1, 4, 64, 300):
        assert best_of_k(correct, correct, k) == pytest.approx(float(pass_at_k(300, 7, k)))


def test_kl_of_best_of_n():
    np.testing.assert_allclose(best_of_n_kl(np.array([1, 2, 16])), [0, math.log(2) - 1 / 2, math.log(16) - 15 / 16])
    # The best of n of continuous rewards has density n u^(n−1) over the policy's quantiles u: its KL, integrated.
    u = (np.arange(100_000) + 0.5) / 100_000
    density = 16 * u**15
    assert float(best_of_n_kl(16)) == pytest.approx(np.mean(density * np.log(density)), rel=1e-4)


def test_k_is_at_least_one():
    for call in (lambda: pass_at_k(4, 2, 0), lambda: majority_at_k(["7"], [1.0], 0), lambda: best_of_k(np.ones(2), np.ones(2), 0)):
        with pytest.raises(ValueError, match="k must be at least 1"):
            call()
