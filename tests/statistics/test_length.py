"""Accuracy by length difference."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plaudit.statistics.length import length_preference


def test_length_preference_by_hand():
    #                    longer       shorter   equal  failed
    difference = np.array([5, 3, 8, 1, -2, -7, 0, 4])
    credit = np.array([1, 1, 0.5, 1, 0, 0.5, 1, np.nan])
    found = length_preference(difference, credit)
    assert (found["right_longer"].value, found["right_longer"].n) == (3.5 / 4, 4)
    assert (found["right_shorter"].value, found["right_shorter"].n) == (0.25, 2)
    assert (found["right_equal"].value, found["right_equal"].n) == (1.0, 1)
    assert found["prefers_longer"].value == pytest.approx((3.5 + 1 + 0.5) / 6)
    assert found["longer_is_right"].value == pytest.approx(4 / 6)
    assert found["right_longer"].low < 3.5 / 4 < found["right_longer"].high


def test_a_judge_that_always_prefers_the_longer_answer():
    difference = np.array([-3, -2, -1, 1, 2, 3])
    found = length_preference(difference, (difference > 0).astype(float))
    assert found["prefers_longer"].value == 1.0
    assert (found["right_longer"].value, found["right_shorter"].value) == (1.0, 0.0)
    assert found["longer_is_right"].value == 0.5


def test_a_judge_without_mistakes_prefers_what_is_right():
    found = length_preference(np.array([-3, 1, 2, 3]), np.ones(4))
    assert found["prefers_longer"].value == found["longer_is_right"].value == 0.75


def test_bins_by_quantiles():
    difference = np.arange(-50, 50)
    found = length_preference(difference, (difference >= 0).astype(float), bins=4)["bins"]
    assert [(b["low"], b["high"], b["accuracy"].n) for b in found] == [(-50, -26, 25), (-25, -1, 25), (0, 24, 25), (25, 49, 25)]
    assert [b["accuracy"].value for b in found] == [0.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("difference", "expected"),
    [
        ([0] * 5, [(0, 0, 5)]),
        ([0] * 6 + [1, 2, 3, 4], [(0, 0, 6), (1, 4, 4)]),  # equal differences are not divided
        ([-4, -3, -2, -1] + [0] * 6, [(-4, -1, 4), (0, 0, 6)]),
        ([2, 1, 3], [(1, 1, 1), (2, 3, 2)]),
    ],
)
def test_bins_of_few_different_lengths(difference, expected):
    found = length_preference(np.array(difference), np.ones(len(difference)), bins=2)["bins"]
    assert [(b["low"], b["high"], b["accuracy"].n) for b in found] == expected


def test_no_pairs():
    found = length_preference(np.array([3]), np.array([np.nan]))
    assert found["bins"] == []
    assert found["prefers_longer"].n == 0
    assert math.isnan(found["prefers_longer"].value)


@settings(max_examples=25, deadline=None)
@given(
    pairs=st.lists(st.tuples(st.integers(-9, 9), st.sampled_from([0.0, 0.5, 1.0])), min_size=1, max_size=40),
    bins=st.integers(1, 12),
)
def test_every_pair_is_in_one_bin(pairs, bins):
    difference, credit = np.array(pairs).T
    found = length_preference(difference, credit, bins=bins, resamples=2)["bins"]
    assert 1 <= len(found) <= bins
    assert sum(b["accuracy"].n for b in found) == len(pairs)
    assert sum(b["accuracy"].n * b["accuracy"].value for b in found) == pytest.approx(credit.sum())
    assert all(b["low"] <= b["high"] for b in found)
    assert all(b["high"] < following["low"] for b, following in pairwise(found))
