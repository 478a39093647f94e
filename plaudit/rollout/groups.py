"""Prompts → groups: every prompt sampled n times, each group handed on as soon as its last sample is there."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from plaudit.data.prompts import EncodedPrompt
from plaudit.rollout.engine import Engine, Request, Sampling
from plaudit.types import Group, Sample


def sample_groups(engine: Engine, prompts: Sequence[EncodedPrompt], n: int, sampling: Sampling) -> Iterator[Group]:
    """In the order they are finished; samples within a group in the order of their index."""
    by_id = {encoded.prompt.id: encoded for encoded in prompts}
    assert len(by_id) == len(prompts), "prompts of one call have ids of their own"
    arrived: dict[str, list[Sample]] = defaultdict(list)
    for sample in engine.generate([Request(e.prompt.id, e.tokens, n) for e in prompts], sampling):
        arrived[sample.prompt_id].append(sample)
        if len(arrived[sample.prompt_id]) == n:
            encoded, samples = by_id[sample.prompt_id], arrived.pop(sample.prompt_id)
            yield Group(encoded.prompt, encoded.tokens, tuple(sorted(samples, key=lambda sample: sample.index)))
    assert not arrived, "an engine gives every sample it was asked for"


def sample_groups_and_greedy(engine: Engine, prompts: Sequence[EncodedPrompt], n: int, sampling: Sampling) -> Iterator[Group]:
    """The same, each group with one sample more, its last: the likeliest token at every place. Rewards see it beside the others,
    as one that compares samples with each other has to."""
    greedy = {group.prompt.id: group.samples[0] for group in sample_groups(engine, prompts, 1, replace(sampling, temperature=0.0))}
    for group in sample_groups(engine, prompts, n, sampling):
        yield replace(group, samples=(*group.samples, replace(greedy[group.prompt.id], index=n)))
