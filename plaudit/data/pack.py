"""Packing: sequences laid end to end, as many as a token budget allows."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from plaudit.types import Batch, Example, Pair, PairTargets


def split_by_tokens(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices in as few groups as first-fit-decreasing finds, each within the budget; one longer than it stands alone.

    Deterministic, every index once; order within a group is the given one.
    """
    groups: list[list[int]] = []
    # A tree whose leaves are the groups' room (those that are not begun have all of it), and whose other nodes the greatest below:
    # the first group with room enough is found by going down, also among a hundred thousand.
    leaves = 1 << max(len(lengths) - 1, 0).bit_length()
    room = [budget] * (2 * leaves)
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        node = 1
        while node < leaves:
            node *= 2
            node += room[node] < lengths[i]
        node = min(node, leaves + len(groups))  # one that fits nowhere begins a group too
        if node == leaves + len(groups):
            groups.append([])
        groups[node - leaves].append(i)
        room[node] -= lengths[i]
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return [sorted(group) for group in groups]


def pack(examples: Sequence[Example], device: torch.device | str = "cpu") -> Batch:
    """One batch of the examples, in order."""
    assert examples
    assert all(len(e) and not e.loss_mask[0] for e in examples), "a first token has nothing that predicts it"
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


def micro_batches(examples: Sequence[Example], budget: int, device: torch.device | str = "cpu") -> list[Batch]:
    """The examples in packed batches of at most `budget` tokens."""
    return [pack([examples[i] for i in group], device) for group in split_by_tokens([len(e) for e in examples], budget)]


def pack_pairs(pairs: Sequence[Pair], device: torch.device | str = "cpu") -> Batch:
    """One batch of the pairs, in order: the chosen and the rejected sequence of each stand side by side."""
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


def pair_micro_batches(pairs: Sequence[Pair], budget: int, device: torch.device | str = "cpu") -> list[Batch]:
    """The pairs in packed batches of at most `budget` tokens; the two of a pair are never parted."""
    return [pack_pairs([pairs[i] for i in group], device) for group in split_by_tokens([len(p) for p in pairs], budget)]
