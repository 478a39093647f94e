"""Subgroups and other orders of groups of candidates, for all groups at once.

Besides the complete group, `subgroups` different subsets of 2 to k − 1 of its candidates, all equally likely; each of these, and
the complete group, in its original order and in `shuffles` different others. Fewer if there are fewer. With 4 and 4:

    k = 2   2 orders                                     2 rows
    k = 3   5 orders, 3 pairs with 2 each                11
    k = 4   5 orders, 4 subsets: pairs with 2 orders, triples with 5      13 to 25
"""

import math
from dataclasses import dataclass
from functools import cache
from itertools import combinations, permutations

import numpy as np

MOST_LISTED = 720
"""Orders, or subsets, that are listed to choose from. Where there are more, some are drawn until they differ."""
BLOCK = 8192
"""Groups that are drawn for together; each takes up to MOST_LISTED random numbers."""


@dataclass(frozen=True)
class Arrangements:
    """Which candidates of which group are shown, and in which order: entry i shows places[i, : sizes[i]] of group groups[i]."""

    groups: np.ndarray
    sizes: np.ndarray
    places: np.ndarray

    def __len__(self) -> int:
        return len(self.groups)

    def select(self, indices: np.ndarray) -> "Arrangements":
        return Arrangements(self.groups[indices], self.sizes[indices], self.places[indices])


def arrange(groups: np.ndarray, sizes: np.ndarray, *, subgroups: int, shuffles: int, seed: int) -> Arrangements:
    """Arrangements of the given groups, in their order. `sizes`: number of candidates of each."""
    rng = np.random.default_rng(seed)
    blocks = [_arrange(groups[i : i + BLOCK], sizes[i : i + BLOCK], subgroups, shuffles, rng) for i in range(0, len(groups), BLOCK)]
    widest = max((block.places.shape[1] for block in blocks), default=0)
    places = [np.pad(block.places, ((0, 0), (0, widest - block.places.shape[1]))) for block in blocks]
    return Arrangements(
        np.concatenate([groups[:0], *(block.groups for block in blocks)]),
        np.concatenate([sizes[:0], *(block.sizes for block in blocks)]),
        np.concatenate([np.zeros((0, widest), np.int8), *places]),
    )


def _arrange(groups: np.ndarray, sizes: np.ndarray, subgroups: int, shuffles: int, rng: np.random.Generator) -> Arrangements:
    widest = int(sizes.max())
    found: list[tuple[np.ndarray, ...]] = []  # position in the block, subset's number, order's number, size, places
    for k in np.unique(sizes).tolist():
        positions = np.flatnonzero(sizes == k)
        subsets = {k: [(positions, np.zeros_like(positions), np.tile(np.arange(k), (len(positions), 1)))]}
        for number, chosen in enumerate(_draw_subsets(k, len(positions), subgroups, rng), 1):
            for size in np.unique(chosen.sum(1)).tolist():
                these = np.flatnonzero(chosen.sum(1) == size)
                members = np.nonzero(chosen[these])[1].reshape(len(these), size)
                subsets.setdefault(size, []).append((positions[these], np.full(len(these), number), members))
        for size, some in sorted(subsets.items()):
            position, number, members = (np.concatenate(parts) for parts in zip(*some, strict=True))
            for order, permutation in enumerate(_draw_orders(size, len(members), shuffles, rng)):
                places = np.zeros((len(members), widest), np.int8)
                places[:, :size] = np.take_along_axis(members, permutation, 1)
                found.append((position, number, np.full(len(members), order), np.full(len(members), size), places))
    position, number, order, size, places = (np.concatenate(parts) for parts in zip(*found, strict=True))
    arranged = np.lexsort((order, number, position))
    return Arrangements(groups[position[arranged]], size[arranged], places[arranged])


def _draw_orders(size: int, count: int, shuffles: int, rng: np.random.Generator) -> list[np.ndarray]:
    """The original order for each of `count` groups, then another one, then another, all different for each group."""
    wanted = min(shuffles, math.factorial(size) - 1)
    original = np.tile(np.arange(size), (count, 1))
    if not wanted:
        return [original]
    if math.factorial(size) <= MOST_LISTED:
        listed = _orders(size)
        return [original, *(listed[1 + chosen] for chosen in _choose(len(listed) - 1, count, wanted, rng))]
    drawn = np.empty((wanted, count, size), np.int64)
    for i in range(count):
        different = {tuple(range(size)): None}
        while len(different) <= wanted:
            different[tuple(rng.random(size).argsort().tolist())] = None
        drawn[:, i] = list(different)[1:]
    return [original, *drawn]


def _draw_subsets(size: int, count: int, subgroups: int, rng: np.random.Generator) -> list[np.ndarray]:
    """For each of `count` groups a subset, as flags of its members, then another one, …"""
    number = 2**size - size - 2
    wanted = min(subgroups, number)
    if not wanted:
        return []
    if number <= MOST_LISTED:
        listed = _subsets(size)
        return [listed[chosen] for chosen in _choose(len(listed), count, wanted, rng)]
    drawn = np.empty((wanted, count, size), bool)
    for i in range(count):
        different: dict[tuple[bool, ...], None] = {}
        while len(different) < wanted:
            flags = rng.random(size) < 0.5
            if 2 <= flags.sum() < size:
                different[tuple(flags.tolist())] = None
        drawn[:, i] = list(different)
    return list(drawn)


def _choose(number: int, count: int, wanted: int, rng: np.random.Generator) -> np.ndarray:
    """`wanted` different numbers below `number` for each of `count` groups: one row per choice."""
    return rng.random((count, number)).argsort(1, kind="stable")[:, :wanted].T


@cache
def _orders(size: int) -> np.ndarray:
    return np.array(list(permutations(range(size))))


@cache
def _subsets(size: int) -> np.ndarray:
    subsets = [set(chosen) for members in range(2, size) for chosen in combinations(range(size), members)]
    return np.array([[i in chosen for i in range(size)] for chosen in subsets])
