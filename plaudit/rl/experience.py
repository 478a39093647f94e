"""Scored groups → what updates train on.

    ScoredGroup → StepSamples (sequences, rewards) → predictions of the models, advantages → Experience → Update → micro-batches

Sequences are packed once per step: the passes of policy, reference and critic, and an update that takes the whole step, share one
token budget and so the same micro-batches. An `Experience` is made when all its fields are known.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from plaudit.data.pack import MicroBatches, pack, split_examples, to_device
from plaudit.objectives.aggregate import sequence_weights
from plaudit.recipe import AlgorithmSettings, RLTrainSettings
from plaudit.seeding import stable_seed
from plaudit.types import Batch, Example, Experience, ScoredGroup, Targets
from plaudit.world import World

T = TypeVar("T")


@dataclass(frozen=True)
class StepSamples:
    """The samples of a step that have a reward, S of P groups, in prompt order. A dropped one is not trained on."""

    sequences: list[Example]
    """Prompt and response; the loss mask marks the response."""
    sampler_logprobs: list[np.ndarray]
    rewards: list[float]
    sizes: list[int]
    """Samples per group; 0 where all of a group were dropped."""
    greedy_rewards: list[float | None]
    """Per group, where each has a greedy baseline (ReMax); None where that was dropped."""

    @classmethod
    def from_groups(cls, groups: Sequence[ScoredGroup]) -> Self:
        kept = [
            [(sample, score.value) for sample, score in zip(g.group.samples, g.scores, strict=True) if score.value is not None]
            for g in groups
        ]
        flat = [(scored.group, sample, reward) for scored, group in zip(groups, kept, strict=True) for sample, reward in group]
        return cls(
            sequences=[_sequence(group.prompt_tokens, sample.tokens) for group, sample, _ in flat],
            sampler_logprobs=[sample.sampler_logprobs for _, sample, _ in flat],
            rewards=[reward for *_, reward in flat],
            sizes=[len(group) for group in kept],
            greedy_rewards=[scored.baseline.value for scored in groups if scored.baseline is not None],
        )

    @property
    def lengths(self) -> list[int]:
        """Tokens of each response."""
        return [len(logprobs) for logprobs in self.sampler_logprobs]


def _sequence(prompt: np.ndarray, response: np.ndarray) -> Example:
    tokens = np.concatenate([prompt, response])
    return Example(tokens, np.arange(len(tokens)) >= len(prompt))


def experiences_by_sample(groups: Sequence[ScoredGroup], experiences: Sequence[Experience]) -> dict[tuple[int, int], Experience]:
    """Experiences, which are in the order of the samples that have a reward, by the identity of their group and their index."""
    places = [(id(g.group), i) for g in groups for i, score in enumerate(g.scores) if score.value is not None]
    return dict(zip(places, experiences, strict=True)) if experiences else {}


class PackedSequences:
    """Sequences in micro-batches of at most `budget` tokens, packed when they are first needed. Every process of a world knows the
    split, and packs and computes its own share."""

    def __init__(self, sequences: Sequence[Example], budget: int, world: World, *, share: bool):
        """`share`: the samples of a prompt share its tokens."""
        self.sequences, self.budget, self.world, self.share = sequences, budget, world, share
        self._packed: dict[int, Batch] = {}

    @cached_property
    def parts(self) -> list[list[int]]:
        """The indices of each micro-batch's sequences."""
        return split_examples(self.sequences, self.budget, self.world.size, share=self.share)

    def batch(self, number: int) -> Batch:
        if number not in self._packed:
            self._packed[number] = pack([self.sequences[i] for i in self.parts[number]], self.world.device, share=self.share)
        return self._packed[number]

    def predict(self, forward: Callable[[Batch], Mapping[str, Tensor]], *, equal: bool = False) -> dict[str, list[np.ndarray]]:
        """What a model predicts for the target tokens of every sequence, by name, from one pass over the micro-batches. `equal`:
        every process makes as many passes as the others."""
        own: dict[str, dict[int, np.ndarray]] = {}
        for number, part in self.world.shard(self.parts, equal=equal):
            self.world.heartbeat.beat()
            lengths = [self.sequences[i].num_targets for i in part]
            for name, values_N in forward(self.batch(number)).items():
                values = values_N.float().cpu().split(lengths)
                own.setdefault(name, {}).update({i: one.numpy() for i, one in zip(part, values, strict=True)})
        predictions: dict[str, list[np.ndarray]] = {}
        for theirs in self.world.gather(own, "predictions"):
            for name, by_index in theirs.items():
                rows = predictions.setdefault(name, [np.empty(0)] * len(self.sequences))
                for i, values in by_index.items():
                    rows[i] = values
        return predictions


@dataclass(frozen=True)
class Update:
    """What one optimiser update trains on."""

    samples: Sequence[Experience]
    weights: Sequence[float]
    """Weight of each of a sample's tokens in the loss; the update's normaliser is in it."""
    positive_weights: Sequence[float] | None = None
    """The same for the supervised term, over tokens with A > 0; None without that term."""

    @property
    def num_tokens(self) -> int:
        return sum(sample.num_targets for sample in self.samples)

    def micro_batches(self, packed: PackedSequences, *, has_signal: bool = True) -> MicroBatches[int]:
        """The packed samples with their targets."""
        assert len(packed.sequences) == len(self.samples)

        def batch(number: int) -> Batch:
            targets = self._targets(packed.parts[number], packed.world.device)
            return replace(packed.batch(number), targets=targets, has_signal=has_signal)

        return MicroBatches(range(len(packed.parts)), batch)

    def by_signal(self) -> tuple["Update", "Update"]:
        """Two halves of this update: samples whose advantages are all 0, and the others."""
        signal = [bool(sample.advantages.any()) for sample in self.samples]
        return self._select(np.flatnonzero(np.logical_not(signal))), self._select(np.flatnonzero(signal))

    def _select(self, indices: Iterable[int]) -> "Update":
        def select(values: Sequence[T]) -> list[T]:
            return [values[i] for i in indices]

        positive = None if self.positive_weights is None else select(self.positive_weights)
        return Update(select(self.samples), select(self.weights), positive)

    def _targets(self, part: Sequence[int], device: torch.device | str) -> Targets:
        samples = [self.samples[i] for i in part]

        def tensor(arrays: Sequence[np.ndarray]) -> Tensor:
            return to_device(np.concatenate(arrays).astype(np.float32), device)

        def optional(arrays: Sequence[np.ndarray | None]) -> Tensor | None:
            present = [array for array in arrays if array is not None]
            assert len(present) in (0, len(arrays)), "all samples of a batch have it, or none"
            return tensor(present) if present else None

        positive = None
        if self.positive_weights is not None:
            positive = tensor([self.positive_weights[i] * (self.samples[i].advantages > 0) for i in part])
        return Targets(
            weights_N=tensor([np.full(self.samples[i].num_targets, self.weights[i]) for i in part]),
            advantages_N=tensor([sample.advantages for sample in samples]),
            sampler_logprobs_N=tensor([sample.sampler_logprobs for sample in samples]),
            old_logprobs_N=optional([sample.old_logprobs for sample in samples]),
            ref_logprobs_N=optional([sample.ref_logprobs for sample in samples]),
            positive_weights_N=positive,
            values_N=optional([sample.values for sample in samples]),
            returns_N=optional([sample.returns for sample in samples]),
        )


def update_schedule(sizes: Sequence[int], train: RLTrainSettings, *, seed: int, step: int) -> Iterator[list[int]]:
    """The samples of each update of a step, by index: `prompts_per_update` groups at a time, `epochs_per_step` times over."""
    per_update = train.prompts_per_update or train.prompts_per_step
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(int)
    for epoch in range(train.epochs_per_step):
        order = np.arange(len(sizes))
        if train.shuffle:
            np.random.RandomState(stable_seed("updates", seed, step, epoch, bits=32)).shuffle(order)
        for start in range(0, len(order), per_update):
            indices = [i for g in sorted(order[start : start + per_update]) for i in range(starts[g], starts[g + 1])]
            if indices:  # else every sample of these prompts was dropped
                yield indices


def make_update(samples: Sequence[Experience], algorithm: AlgorithmSettings, *, horizon: int) -> Update:
    """The update on these samples, weighted by `algorithm.aggregation`; `horizon`: the longest response allowed."""

    def weights(lengths: list[int]) -> list[float]:
        return sequence_weights(torch.tensor(lengths), algorithm.aggregation, horizon=horizon).tolist()

    positive = None
    if algorithm.positive_sft_coefficient:
        positive = weights([int((sample.advantages > 0).sum()) for sample in samples])
    return Update(samples, weights([sample.num_targets for sample in samples]), positive)
