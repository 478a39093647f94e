"""Bootstrap intervals: resamples, means, paired differences, and how often they contain the truth."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plaudit.statistics import intervals
from plaudit.statistics.figures import Resampling, estimate_means
from plaudit.statistics.intervals import Estimate, percentile_interval, resample_weights


def all_weights(*arguments) -> np.ndarray:
    return np.concatenate(list(resample_weights(*arguments)))


def mean(values: np.ndarray, **options) -> Estimate:
    """Of items that all have a prompt of their own."""
    return estimate_means({"x": values}, range(len(values)), Resampling(**options))["x"]


# Resamples -----------------------------------------------------------------------------------------------------------


def test_resamples_count_draws_with_replacement():
    weights = all_weights(20, 4000, 0)
    assert weights.shape == (4000, 20)
    assert (weights.sum(axis=1) == 20).all()
    # Each count is binomial with 20 draws and probability 1/20: mean 1, variance 0.95.
    np.testing.assert_allclose(weights.mean(axis=0), 1, atol=0.06)
    np.testing.assert_allclose(weights.var(axis=0), 0.95, atol=0.1)


def test_resamples_depend_on_the_seed_alone(monkeypatch):
    weights = all_weights(7, 50, 3)
    assert not np.array_equal(weights, all_weights(7, 50, 4))
    monkeypatch.setattr(intervals, "CHUNK_WEIGHTS", 30)
    chunks = list(resample_weights(7, 50, 3))
    assert [len(chunk) for chunk in chunks] == [4] * 12 + [2]
    np.testing.assert_array_equal(np.concatenate(chunks), weights)


# Intervals -----------------------------------------------------------------------------------------------------------


def test_interval_of_two_items_by_hand():
    # Resamples of (0, 1) have means 0, ½, ½, 1: both ends are beyond the middle 95 %, and inside the middle 40 %.
    assert mean(np.array([0.0, 1.0])) == Estimate(0.5, 0.0, 1.0, 2)
    assert mean(np.array([0.0, 1.0]), confidence=0.4) == Estimate(0.5, 0.5, 0.5, 2)


def test_interval_has_the_width_of_the_normal_approximation():
    right = (np.arange(1000) < 300).astype(float)
    estimate = mean(right)
    half = 1.96 * math.sqrt(0.3 * 0.7 / 1000)
    assert estimate.value == pytest.approx(0.3)
    assert estimate.low == pytest.approx(0.3 - half, abs=0.1 * half)
    assert estimate.high == pytest.approx(0.3 + half, abs=0.1 * half)
    narrower = mean(right, confidence=0.68)
    assert narrower.high - narrower.low == pytest.approx((estimate.high - estimate.low) / 1.96, rel=0.1)


def test_intervals_contain_the_truth_as_often_as_they_say():
    items = np.random.default_rng(1).normal(3.0, 2.0, size=(800, 60))
    estimates = [mean(values, seed=i, resamples=200, confidence=0.9) for i, values in enumerate(items)]
    above, below = (np.mean(missed) for missed in zip(*((e.low > 3.0, e.high < 3.0) for e in estimates), strict=True))
    # 5 % on each side; about half a percent more with 60 items and 200 resamples. The standard error here is 0.8 %.
    assert above == pytest.approx(0.055, abs=0.02)
    assert below == pytest.approx(0.055, abs=0.02)


def test_missing_items_are_excluded():
    values = np.array([1.0, np.nan, 0.0, 0.0, np.nan])
    assert mean(values) == mean(np.array([1.0, 0.0, 0.0]))
    # The first item is the only one of its stratum that is left: it is in every resample.


def test_no_items_no_number():
    estimate = mean(np.array([np.nan]))
    assert estimate.n == 0
    assert all(math.isnan(number) for number in (estimate.value, estimate.low, estimate.high))


def test_paired_differences_are_narrower_than_separate_ones():
    difficulty = np.linspace(0, 1, 200)
    a, b = difficulty + 0.05, difficulty + 0.01 * (np.arange(200) % 2)
    estimate = mean(a - b)
    assert estimate.value == pytest.approx(0.045)
    assert 0.04 < estimate.low < estimate.high < 0.05
    assert mean(a).low < mean(b).high  # separate intervals overlap


def test_a_pair_with_a_missing_side_is_excluded():
    estimate = mean(np.array([1.0, np.nan, 3.0, 4.0]) - np.array([0.0, 0.0, np.nan, 2.0]))
    assert (estimate.value, estimate.n) == (1.5, 2)


def test_resamples_without_a_counting_item_are_ignored():
    assert percentile_interval(7.0, np.array([np.nan, 7.0, 7.0, np.nan]), 3, 0.95) == Estimate(7.0, 7.0, 7.0, 3)
    estimate = mean(np.array([7.0, np.nan, np.nan]))  # not drawn in (2/3)³ of the resamples
    assert estimate == Estimate(7.0, 7.0, 7.0, 1)


def test_a_statistic_without_value_has_no_interval():
    estimate = percentile_interval(np.nan, np.full(5, np.nan), 3, 0.95)
    assert estimate.n == 3
    assert all(math.isnan(number) for number in (estimate.value, estimate.low, estimate.high))


@settings(max_examples=30, deadline=None)
@given(
    values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20),
    shift=st.floats(-10, 10),
    seed=st.integers(0, 2**32),
)
def test_mean_moves_with_its_items(values, shift, seed):
    x = np.array(values)
    estimate, moved = mean(x, seed=seed, resamples=50), mean(x + shift, seed=seed, resamples=50)
    assert estimate == mean(x, seed=seed, resamples=50)
    assert x.min() - 1e-9 <= estimate.low <= estimate.high <= x.max() + 1e-9
    for name in ("value", "low", "high"):
        assert getattr(moved, name) == pytest.approx(getattr(estimate, name) + shift, abs=1e-8)
