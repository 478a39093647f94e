"""Subgroups and orders of candidates."""

from collections import Counter

import numpy as np
import pytest

from plaudit.prepare.augmentation import arrange


def arranged(sizes: list[int], **settings) -> list[list[tuple[int, ...]]]:
    """The arrangements of each group."""
    made = arrange(np.arange(len(sizes)), np.array(sizes), **{"subgroups": 4, "shuffles": 4, "seed": 0} | settings)
    shown: list[list[tuple[int, ...]]] = [[] for _ in sizes]
    for group, size, places in zip(made.groups, made.sizes, made.places, strict=True):
        shown[group].append(tuple(places[:size].tolist()))
    return shown


def test_the_number_of_rows_is_that_of_grrm():
    """5 + four times 2 (a pair) or 5 (a triple) for four candidates."""
    for size, expected in ((2, {2}), (3, {11}), (4, {13, 16, 19, 22, 25})):
        counts = {len(shown) for shown in arranged([size] * 3000)}
        assert counts == expected


@pytest.mark.parametrize("size", [2, 3, 4, 6, 7, 11])
def test_arrangements_are_distinct_and_begin_with_the_original(size):
    for shown in arranged([size, size]):
        assert shown[0] == tuple(range(size))
        assert len(set(shown)) == len(shown)
        subsets = list(dict.fromkeys(tuple(sorted(places)) for places in shown))
        assert all(subset in shown for subset in subsets), "each subset in its original order too"
        assert all(2 <= len(subset) < size for subset in subsets[1:])
        assert len(subsets) == 1 + min(4, 2**size - size - 2)
        assert all(max(places) < size for places in shown)


def test_all_subsets_and_orders_are_equally_likely():
    shown = arranged([4] * 6000, subgroups=1, shuffles=1, seed=3)
    subsets = Counter(tuple(sorted(places[2])) for places in shown)
    assert len(subsets) == 10
    assert all(500 < count < 700 for count in subsets.values()), "600 are expected, with a standard deviation of 23"
    orders = Counter(places[1] for places in shown)
    assert len(orders) == 23
    assert all(190 < count < 335 for count in orders.values()), "261, with 16"


def test_the_order_of_groups_is_kept_and_without_augmentation_nothing_is_added():
    assert arranged([3, 2, 4], subgroups=0, shuffles=0) == [[(0, 1, 2)], [(0, 1)], [(0, 1, 2, 3)]]
    assert arrange(np.arange(0), np.arange(0), subgroups=4, shuffles=4, seed=0).groups.tolist() == []
    assert arranged([4], seed=1) == arranged([4], seed=1) != arranged([4], seed=2)
