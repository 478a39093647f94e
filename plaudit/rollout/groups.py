"""Prompts → groups: every prompt sampled n times, each group passed on as soon as its last sample has finished."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from plaudit.data.prompts import EncodedPrompt
from plaudit.rollout.engine import Engine, Request, Sampling
from plaudit.types import Group, Sample


def sample_groups(engine: Engine, prompts: Sequence[EncodedPrompt], n: int, sampling: Sampling) -> Iterator[Group]:
    """Groups in the order they finish; samples within a group by index."""
    by_id = {encoded.prompt.id: encoded for encoded in prompts}
    assert len(by_id) == len(prompts), "prompts of one call have distinct ids"
    finished: dict[str, list[Sample]] = defaultdict(list)
    for sample in engine.generate([Request(e.prompt.id, e.tokens, n) for e in prompts], sampling):
        finished[sample.prompt_id].append(sample)
        if len(finished[sample.prompt_id]) == n:
            encoded, samples = by_id[sample.prompt_id], finished.pop(sample.prompt_id)
            yield Group(encoded.prompt, encoded.tokens, tuple(sorted(samples, key=lambda sample: sample.index)))
    assert not finished, "an engine returns every requested sample"


def sample_groups_with_greedy(engine: Engine, prompts: Sequence[EncodedPrompt], n: int, sampling: Sampling) -> Iterator[Group]:
    """The same, with one greedy sample more at the end of each group. Rewards see it with the others, as one that compares
    samples with each other must."""
    greedy = {group.prompt.id: group.samples[0] for group in sample_groups(engine, prompts, 1, replace(sampling, temperature=0.0))}
    for group in sample_groups(engine, prompts, n, sampling):
        yield replace(group, samples=(*group.samples, replace(greedy[group.prompt.id], index=n)))
