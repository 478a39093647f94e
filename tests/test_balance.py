"""Dealing work to processes."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plaudit.balance import deal, idle_share

COSTS = st.lists(st.integers(0, 10_000), max_size=60)
SIZES = st.integers(1, 9)
no_deadline = settings(deadline=None)  # the machine may be busy


def loads(costs: list[int], hands: list[list[int]]) -> list[int]:
    return [sum(costs[i] for i in hand) for hand in hands]


@no_deadline
@given(COSTS, SIZES, st.booleans())
def test_every_item_is_dealt_once(costs, size, equal_counts):
    hands = deal(costs, size, equal_counts=equal_counts)
    assert len(hands) == size
    assert sorted(i for hand in hands for i in hand) == list(range(len(costs)))
    assert all(hand == sorted(hand) for hand in hands)
    assert hands == deal(costs, size, equal_counts=equal_counts)


@no_deadline
@given(COSTS, SIZES)
def test_equal_counts(costs, size):
    counts = [len(hand) for hand in deal(costs, size, equal_counts=True)]
    assert max(counts) - min(counts) <= (1 if len(costs) % size else 0)


@no_deadline
@given(COSTS, SIZES, st.booleans())
def test_processes_differ_by_no_more_than_the_most_expensive_item(costs, size, equal_counts):
    dealt = loads(costs, deal(costs, size, equal_counts=equal_counts))
    assert max(dealt) - min(dealt) <= max(costs, default=0)


@no_deadline
@given(st.lists(st.integers(0, 100), min_size=1, max_size=7), st.integers(1, 3))
def test_at_most_a_third_worse_than_the_best_division(costs, size):
    """Graham's bound: 4/3 − 1/(3 size), against every division there is."""
    best = min(
        max(loads(costs, [[i for i, r in enumerate(ranks) if r == rank] for rank in range(size)]))
        for ranks in product(range(size), repeat=len(costs))
    )
    assert max(loads(costs, deal(costs, size))) <= best * (4 / 3 - 1 / (3 * size)) + 1e-9


def test_by_hand():
    costs = [3, 9, 4, 7, 1, 5]
    # 9 and 7 open; 5 joins 7 (12), 4 joins 9 (13), 3 joins the 12 (15), 1 joins the 13 (14).
    assert deal(costs, 2) == [[1, 2, 4], [0, 3, 5]]
    assert deal([10, 1, 1, 1], 2) == [[0], [1, 2, 3]]
    # Rounds (10, 1) and (1, 1): the second round's first goes to the process with the least to do.
    assert deal([10, 1, 1, 1], 2, equal_counts=True) == [[0, 3], [1, 2]]
    assert deal([0, 0, 0, 0], 4) == [[0], [1], [2], [3]], "items without cost are spread too"
    assert deal([], 3) == [[], [], []]


@pytest.mark.parametrize(("loads", "share"), [([4, 4], 0.0), ([4, 0], 0.5), ([9, 6, 3], 1 / 3), ([0, 0], 0.0)])
def test_idle_share(loads, share):
    assert idle_share(loads) == pytest.approx(share)
