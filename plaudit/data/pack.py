"""Packing: sequences laid end to end within a token budget.

Samples of a prompt begin with the same tokens, as do the two answers of a pair. Such tokens need to be in a batch only once: hidden
states depend on the tokens before them alone.

    examples        p p p p a a a     p p p p b b     p p p p c c c c
    batch           p p p p a a a             b b             c c c c       each attends to the tokens above or before it
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from plaudit.balance import deal
from plaudit.types import Batch, Example, Pair, PairTargets, SharedPrompts

T = TypeVar("T")
FEWEST_SHARED = 8
"""Tokens that two examples must have in common: to share fewer costs more than it saves."""
KEYS_PER_TOKEN = 4
"""Keys that a batch has at most for each token of its budget: those of shared tokens are copied for every sequence, layer by layer,
which takes memory and time."""

Batches = Callable[[Sequence[list[int]]], Iterable[list[int]]]
"""Yields batches of indices unchanged, and reports progress meanwhile."""


def to_device(numbers: Sequence[float] | np.ndarray, device: torch.device | str, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Copy to the device without waiting for work in progress, as a copy from memory that is not pinned would."""
    tensor, device = torch.as_tensor(numbers, dtype=dtype), torch.device(device)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


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


def split_examples(examples: Sequence[Example], budget: int, processes: int = 1, *, share: bool = False) -> list[list[int]]:
    """`split_by_tokens` of examples. `share`: those that share a prompt and follow one another stay together, as far as the budget
    allows, and its tokens count once."""
    if not share:
        return split_by_tokens([len(example) for example in examples], budget, processes)
    # Small enough that processes can be given about as many tokens each.
    unit_budget = budget if processes == 1 else min(budget, max(1, _cost(examples) // (2 * processes)))
    units = _divide_largest(_sharing_units(examples, unit_budget), processes)
    costs = [_cost([examples[i] for i in unit]) for unit in units]
    return [[i for number in part for i in units[number]] for part in split_by_tokens(costs, budget, processes)]


def _sharing_units(examples: Sequence[Example], budget: int) -> list[list[int]]:
    """Neighbours of which each shares at least half of its prompt with the one before it, within the budget."""
    units: list[list[int]] = []
    tokens = keys = 0
    for i, (example, shared) in enumerate(zip(examples, shared_lengths(examples), strict=True)):
        own = len(example) - shared
        fits = tokens + own <= budget and keys + len(example) <= KEYS_PER_TOKEN * budget
        if units and shared and shared >= _shareable(example) // 2 and fits:
            units[-1].append(i)
            tokens, keys = tokens + own, keys + len(example)
        else:
            units.append([i])
            tokens = keys = len(example)
    return units


def _divide_largest(units: list[list[int]], processes: int) -> list[list[int]]:
    """At least one unit for each process, if there are enough examples."""
    while len(units) < processes and any(len(unit) > 1 for unit in units):
        at = max(range(len(units)), key=lambda number: len(units[number]))
        half = len(units[at]) // 2
        units[at : at + 1] = [units[at][:half], units[at][half:]]
    return units


def _cost(examples: Sequence[Example]) -> int:
    """Share of a budget, in tokens: where most tokens are shared, their keys are what fills it."""
    return max(_own_tokens(examples), -(-sum(map(len, examples)) // KEYS_PER_TOKEN))


def _own_tokens(examples: Sequence[Example]) -> int:
    """Tokens in a batch of these examples that share what they can."""
    return sum(map(len, examples)) - sum(shared_lengths(examples))


def shared_lengths(examples: Sequence[Example]) -> list[int]:
    """How many tokens each example shares with the one before it: the first ones that are equal and come before its targets."""
    lengths = [0] * len(examples)
    for i in range(1, len(examples)):
        before, example = examples[i - 1].tokens, examples[i]
        limit = min(len(before), _shareable(example))
        differ = before[:limit] != example.tokens[:limit]
        common = int(differ.argmax()) if differ.any() else limit
        lengths[i] = common if common >= FEWEST_SHARED else 0
    return lengths


def _shareable(example: Example) -> int:
    """Tokens before the first target; without targets, all but the last one, whose hidden state is the sequence's own."""
    return int(example.loss_mask.argmax()) or len(example) - 1


def pack(examples: Sequence[Example], device: torch.device | str = "cpu", *, share: bool = False) -> Batch:
    """Pack the examples, in order, into one batch. `share`: tokens that an example has in common with the one before it, and that
    come before its targets, are in the batch only once."""
    assert examples
    assert all(len(e) and not e.loss_mask[0] for e in examples), "a first token has no context to be predicted from"
    shared = shared_lengths(examples) if share else [0] * len(examples)
    lengths = [len(e) - common for e, common in zip(examples, shared, strict=True)]
    starts = _starts(lengths)

    def tensor(array: np.ndarray) -> torch.Tensor:
        return to_device(array, device)

    def own(arrays: Iterable[np.ndarray]) -> np.ndarray:
        return np.concatenate([array[common:] for array, common in zip(arrays, shared, strict=True)])

    loss_mask_T = own(e.loss_mask for e in examples)
    return Batch(
        tokens_T=tensor(own(e.tokens for e in examples).astype(np.int64)),
        positions_T=tensor(own(np.arange(len(e)) for e in examples)),
        loss_mask_T=tensor(loss_mask_T),
        places_N=tensor(np.flatnonzero(loss_mask_T)),
        starts_S1=tensor(starts),
        longest=max(lengths),
        shared=_shared_prompts(examples, shared, starts, tensor) if any(shared) else None,
    )


def _shared_prompts(
    examples: Sequence[Example], shared: Sequence[int], starts: np.ndarray, tensor: Callable[[np.ndarray], torch.Tensor]
) -> SharedPrompts:
    keys: list[np.ndarray] = []  # of each sequence; the first ones may be those of the sequence before it
    for common, start, end in zip(shared, starts[:-1], starts[1:], strict=True):
        own = np.arange(start, end, dtype=np.int64)
        keys.append(np.concatenate([keys[-1][:common], own]) if common else own)
    keys_U = np.concatenate(keys)
    return SharedPrompts(
        keys_U=tensor(keys_U),
        starts_S1=tensor(_starts([len(of_sequence) for of_sequence in keys])),
        longest=max(map(len, keys)),
        predictors_N=tensor(np.concatenate([k[np.flatnonzero(e.loss_mask) - 1] for k, e in zip(keys, examples, strict=True)])),
        copies_U=tensor(np.argsort(keys_U, kind="stable").astype(np.int32)),
        copy_starts_T1=tensor(_starts(np.bincount(keys_U, minlength=starts[-1]))),
    )


def _starts(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


class MicroBatches(Sequence[Batch], Generic[T]):
    """Packed when they are needed: each of several processes packs its own."""

    def __init__(self, parts: Sequence[T], pack_part: Callable[[T], Batch]):
        self._parts, self._pack = parts, pack_part

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, index: int) -> Batch:  # pyright: ignore[reportIncompatibleMethodOverride]: nobody takes slices
        return self._pack(self._parts[index])

    def __add__(self, others: "MicroBatches[Any]") -> "MicroBatches[Any]":
        parts = [(batches, index) for batches in (self, others) for index in range(len(batches))]
        return MicroBatches(parts, lambda part: part[0][part[1]])


def micro_batches(
    examples: Sequence[Example], budget: int, device: torch.device | str = "cpu", processes: int = 1
) -> Sequence[Batch]:
    """Pack the examples into batches of at most `budget` tokens."""
    parts = split_examples(examples, budget, processes)
    return MicroBatches(parts, lambda part: pack([examples[i] for i in part], device))


def pack_pairs(pairs: Sequence[Pair], device: torch.device | str = "cpu", *, share: bool = False) -> Batch:
    """Pack the pairs, in order, into one batch: each chosen sequence is followed by its rejected one. `share`: as for `pack`."""
    return replace(pack(_sequences(pairs), device, share=share), pairs=pair_targets(pairs, device))


def _sequences(pairs: Sequence[Pair]) -> list[Example]:
    return [example for pair in pairs for example in (pair.chosen, pair.rejected)]


def pair_targets(pairs: Sequence[Pair], device: torch.device | str = "cpu") -> PairTargets:
    def tensor(values: list[float]) -> torch.Tensor:
        return to_device(values, device, torch.float64)

    return PairTargets(
        num_targets=tuple(example.num_targets for example in _sequences(pairs)),
        margins_P=tensor([pair.margin for pair in pairs]),
        ref_chosen_P=tensor([pair.ref_chosen for pair in pairs]),
        ref_rejected_P=tensor([pair.ref_rejected for pair in pairs]),
    )


def split_pairs(pairs: Sequence[Pair], budget: int, processes: int = 1, *, share: bool = False) -> list[list[int]]:
    """`split_by_tokens` of pairs, which are never split. `share`: what the two have in common counts once."""
    costs = [_own_tokens((pair.chosen, pair.rejected)) if share else len(pair) for pair in pairs]
    return split_by_tokens(costs, budget, processes)


def pair_micro_batches(
    pairs: Sequence[Pair], budget: int, device: torch.device | str = "cpu", processes: int = 1, *, share: bool = False
) -> Sequence[Batch]:
    """Pack the pairs into batches of at most `budget` tokens; a pair is never split."""
    parts = split_pairs(pairs, budget, processes, share=share)
    return MicroBatches(parts, lambda part: pack_pairs([pairs[i] for i in part], device, share=share))
