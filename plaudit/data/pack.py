"""Packing: sequences laid end to end within a token budget."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

import numpy as np
import torch

from plaudit.balance import deal
from plaudit.types import Batch, Example, Pair, PairTargets

T = TypeVar("T")
Batches = Callable[[Sequence[list[int]]], Iterable[list[int]]]
"""Yields batches of indices unchanged, and reports progress meanwhile."""


def split_by_tokens(lengths: Sequence[int], budget: int, processes: int = 1) -> list[list[int]]:
    """Groups of indices within the budget; a sequence longer than that is alone. For several processes, as many groups for each,
    of about as many tokens (fewer groups if there are fewer sequences).

    Deterministic, each index exactly once; order within a group is the input order.
    """
    groups = _first_fit(lengths, budget)
    if processes == 1 or not groups:
        return groups
    rounds = -(-len(groups) // processes)
    while True:
        groups = deal(lengths, min(rounds * processes, len(lengths)))
        excess = max(sum(lengths[i] for i in group) if len(group) > 1 else 0 for group in groups) / budget
        if excess <= 1:
            return groups
        rounds = max(rounds + 1, math.ceil(rounds * min(excess, 2)))  # few attempts, whatever the lengths


def _first_fit(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """First-fit-decreasing bin packing."""
    groups: list[list[int]] = []
    # A max tree over the groups' free room (unopened groups have all of it): descending it finds the first group with enough
    # room in logarithmic time.
    leaves = 1 << max(len(lengths) - 1, 0).bit_length()
    room = [budget] * (2 * leaves)
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        node = 1
        while node < leaves:
            node *= 2
            node += room[node] < lengths[i]
        node = min(node, leaves + len(groups))  # a sequence that fits nowhere opens a group too
        if node == leaves + len(groups):
            groups.append([])
        groups[node - leaves].append(i)
        room[node] -= lengths[i]
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return [sorted(group) for group in groups]


def pack(examples: Sequence[Example], device: torch.device | str = "cpu") -> Batch:
    """Pack the examples, in order, into one batch."""
    assert examples
    assert all(len(e) and not e.loss_mask[0] for e in examples), "a first token has no context to be predicted from"
    lengths = [len(e) for e in examples]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    return Batch(
        tokens_T=tensor(np.concatenate([e.tokens for e in examples]).astype(np.int64)),
        positions_T=tensor(np.concatenate([np.arange(n) for n in lengths])),
        loss_mask_T=tensor(np.concatenate([e.loss_mask for e in examples])),
        starts_S1=tensor(starts),
        longest=max(lengths),
    )


class MicroBatches(Sequence[Batch], Generic[T]):
    """Packed when they are needed: each of several processes packs its own."""

    def __init__(self, parts: Sequence[T], pack_part: Callable[[T], Batch]):
        self._parts, self._pack = parts, pack_part

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, index: int) -> Batch:  # pyright: ignore[reportIncompatibleMethodOverride]: nobody takes slices
        return self._pack(self._parts[index])


def micro_batches(
    examples: Sequence[Example], budget: int, device: torch.device | str = "cpu", processes: int = 1
) -> Sequence[Batch]:
    """Pack the examples into batches of at most `budget` tokens."""
    groups = split_by_tokens([len(example) for example in examples], budget, processes)
    return MicroBatches(groups, lambda group: pack([examples[i] for i in group], device))


def pack_pairs(pairs: Sequence[Pair], device: torch.device | str = "cpu") -> Batch:
    """Pack the pairs, in order, into one batch: each chosen sequence is followed by its rejected one."""
    sequences = [example for pair in pairs for example in (pair.chosen, pair.rejected)]
    return replace(pack(sequences, device), pairs=pair_targets(pairs, device))


def pair_targets(pairs: Sequence[Pair], device: torch.device | str = "cpu") -> PairTargets:
    def tensor(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64).to(device, non_blocking=True)

    return PairTargets(
        num_targets=tuple(example.num_targets for pair in pairs for example in (pair.chosen, pair.rejected)),
        margins_P=tensor([pair.margin for pair in pairs]),
        ref_chosen_P=tensor([pair.ref_chosen for pair in pairs]),
        ref_rejected_P=tensor([pair.ref_rejected for pair in pairs]),
    )


def pair_micro_batches(
    pairs: Sequence[Pair], budget: int, device: torch.device | str = "cpu", processes: int = 1
) -> Sequence[Batch]:
    """Pack the pairs into batches of at most `budget` tokens; a pair is never split."""
    groups = split_by_tokens([len(pair) for pair in pairs], budget, processes)
    return MicroBatches(groups, lambda group: pack_pairs([pairs[i] for i in group], device))
