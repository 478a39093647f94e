"""Scored groups → what an update learns from: samples behind their prompts, with rewards, log-probs and weights."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from plaudit.data.pack import pack, split_by_tokens
from plaudit.objectives.aggregate import sequence_weights
from plaudit.recipe import AlgorithmSettings, RLTrainSettings
from plaudit.seeding import stable_seed
from plaudit.types import Batch, Experience, ScoredGroup

Prediction = Literal["old_logprobs", "ref_logprobs", "values"]


def experiences(group: ScoredGroup, algorithm: AlgorithmSettings) -> list[Experience]:
    """The group's samples that have a value: a dropped one is not trained on, and leaves every mean."""
    prompt = group.group.prompt_tokens
    result = []
    for sample, score in zip(group.group.samples, group.scores, strict=True):
        if score.value is not None:
            tokens = np.concatenate([prompt, sample.tokens])
            loss_mask = np.arange(len(tokens)) >= len(prompt)
            old = sample.sampler_logprobs if algorithm.old_logprobs == "sampler" else None
            unknown = np.zeros(len(sample))
            result.append(Experience(tokens, loss_mask, unknown, sample.sampler_logprobs, reward=score.value, old_logprobs=old))
    return result


def baseline_apart(group: ScoredGroup) -> ScoredGroup:
    """The same without its last sample, the greedy one, whose score is the others' baseline."""
    *scores, baseline = group.scores
    samples = replace(group.group, samples=group.group.samples[:-1])
    by_reward = {name: of_reward[:-1] for name, of_reward in group.by_reward.items()}
    return ScoredGroup(samples, tuple(scores), by_reward, baseline)


def with_predictions(
    groups: Sequence[Sequence[Experience]],
    predict: Callable[[Batch], Mapping[Prediction, Tensor]],
    *,
    budget: int,
    device: torch.device,
) -> list[list[Experience]]:
    """The same groups, each sample with what models say of its tokens: their log-probs, values, or both from one pass."""
    flat = [experience for group in groups for experience in group]
    for members in split_by_tokens([len(e) for e in flat], budget):
        for which, numbers_N in predict(pack([flat[i] for i in members], device)).items():
            numbers = numbers_N.float().cpu().split([flat[i].num_targets for i in members])
            for i, own in zip(members, numbers, strict=True):
                flat[i] = replace(flat[i], **{which: own.numpy()})
    filled = iter(flat)
    return [[next(filled) for _ in group] for group in groups]


def updates(
    groups: Sequence[Sequence[Experience]],
    train: RLTrainSettings,
    algorithm: AlgorithmSettings,
    *,
    horizon: int,
    seed: int,
    step: int,
) -> Iterator[list[Experience]]:
    """What each update of a step learns from: `prompts_per_update` groups at a time, `epochs_per_step` times over."""
    per_update = train.prompts_per_update or train.prompts_per_step
    for epoch in range(train.epochs_per_step):
        order = np.arange(len(groups))
        if train.shuffle:
            np.random.RandomState(stable_seed("updates", seed, step, epoch, bits=32)).shuffle(order)
        for start in range(0, len(order), per_update):
            samples = [experience for i in sorted(order[start : start + per_update]) for experience in groups[i]]
            if samples:  # else every sample of these prompts was dropped
                yield weighted(samples, algorithm, horizon=horizon)


def weighted(samples: Sequence[Experience], algorithm: AlgorithmSettings, *, horizon: int) -> list[Experience]:
    """The samples of an update, with what a token of each counts in its loss."""

    def weights(lengths: list[int]) -> list[float]:
        return sequence_weights(torch.tensor(lengths), algorithm.aggregation, horizon=horizon).tolist()

    own = weights([sample.num_targets for sample in samples])
    samples = [replace(sample, weight=weight) for sample, weight in zip(samples, own, strict=True)]
    if algorithm.positive_sft_coefficient:
        positive = weights([int((sample.advantages > 0).sum()) for sample in samples])
        samples = [replace(sample, positive_weight=weight) for sample, weight in zip(samples, positive, strict=True)]
    return samples
