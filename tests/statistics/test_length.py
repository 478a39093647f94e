"""Bins of length differences."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plaudit.statistics.length import length_bins


def bins_of(difference: np.ndarray, bins: int) -> list[tuple[float, float, int]]:
    """The least and the greatest difference of each bin that has items, and their number."""
    found = length_bins(difference, bins)
    return [(inside.min(), inside.max(), len(inside)) for b in range(bins) if len(inside := difference[found == b])]


def test_bins_by_quantiles():
    assert bins_of(np.arange(-50, 50), 4) == [(-50, -26, 25), (-25, -1, 25), (0, 24, 25), (25, 49, 25)]


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
    assert bins_of(np.array(difference), 2) == expected


@settings(max_examples=25, deadline=None)
@given(difference=st.lists(st.integers(-9, 9), min_size=1, max_size=40), bins=st.integers(1, 12))
def test_every_pair_is_in_one_bin(difference, bins):
    found = bins_of(np.array(difference), bins)
    assert 1 <= len(found) <= bins
    assert sum(count for _, _, count in found) == len(difference)
    assert all(high < low for (_, high, _), (low, _, _) in pairwise(found))
