"""Dealing work to processes so that they finish together: prompts, by the lengths that are expected of them.

Longest first: the most expensive item that is left goes to the process with the least to do (LPT). The most loaded process then has
at most 4/3 of what the best division would give it. If every process must have the same number of items (a sharded forward pass
is a collective), items are dealt in rounds, most expensive first, one to each process in every round, the largest of a round to the
process with the least to do. Processes then differ by no more than the most expensive item.

Both depend on nothing but the costs: processes that know them agree without messages.
"""

from collections.abc import Sequence
from heapq import heapify, heapreplace


def deal(costs: Sequence[float], size: int, *, equal_counts: bool = False) -> list[list[int]]:
    """Each process's items, as indices in ascending order. `equal_counts`: their numbers differ by at most one; they are equal if
    `size` divides the number of items."""
    assert size > 0
    assert all(cost >= 0 for cost in costs)
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    hands = _in_rounds(costs, order, size) if equal_counts else _longest_first(costs, order, size)
    return [sorted(hand) for hand in hands]


def idle_share(loads: Sequence[float]) -> float:
    """Share of all processes' time that is spent waiting for the most loaded one: 1 − mean / max."""
    return 1 - sum(loads) / len(loads) / max(loads) if any(loads) else 0.0


def _longest_first(costs: Sequence[float], order: Sequence[int], size: int) -> list[list[int]]:
    hands: list[list[int]] = [[] for _ in range(size)]
    # Load, then count, so that items without cost are spread too; then rank.
    least: list[tuple[float, int, int]] = [(0.0, 0, rank) for rank in range(size)]
    heapify(least)
    for item in order:
        load, count, rank = least[0]
        hands[rank].append(item)
        heapreplace(least, (load + costs[item], count + 1, rank))
    return hands


def _in_rounds(costs: Sequence[float], order: Sequence[int], size: int) -> list[list[int]]:
    hands: list[list[int]] = [[] for _ in range(size)]
    loads = [0.0] * size
    for begin in range(0, len(order), size):
        ranks = sorted(range(size), key=lambda rank: (loads[rank], rank))
        for rank, item in zip(ranks, order[begin : begin + size], strict=False):  # the last round may be short
            hands[rank].append(item)
            loads[rank] += costs[item]
    return hands
