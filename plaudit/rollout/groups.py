"""Prompts → groups: every prompt sampled n times, each group passed on as soon as its last sample has finished.

Samples are checked as they arrive: a misaligned log-prob or a sample of another version would train without an error.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import get_args, get_type_hints

from plaudit.data.prompts import EncodedPrompt
from plaudit.errors import TrainingStopped
from plaudit.rollout.engine import Engine, Request, Sampling
from plaudit.rollout.faults import engine_faults
from plaudit.types import Group, Sample

STATUSES = get_args(get_type_hints(Sample)["status"])


def _ignore(sample: Sample) -> None:
    pass


def sample_groups(
    engine: Engine,
    prompts: Sequence[EncodedPrompt],
    n: int,
    sampling: Sampling,
    *,
    version: int,
    on_sample: Callable[[Sample], None] = _ignore,
) -> Iterator[Group]:
    """Groups in the order they finish; samples within a group by index. `version`: of the weights, as last synced. `on_sample` is
    called with every sample as it arrives."""
    by_id = {encoded.prompt.id: encoded for encoded in prompts}
    assert len(by_id) == len(prompts), "prompts of one call have distinct ids"
    running: dict[str, dict[int, Sample]] = {prompt_id: {} for prompt_id in by_id}
    for sample in _generate(engine, [Request(e.prompt.id, e.tokens, n) for e in prompts], sampling):
        if fault := _fault(sample, running, n, version):
            raise TrainingStopped(f"rollout.engine {type(engine).__name__}: {fault}")
        samples = running[sample.prompt_id]
        samples[sample.index] = sample
        on_sample(sample)
        if len(samples) == n:
            encoded, samples = by_id[sample.prompt_id], running.pop(sample.prompt_id)
            yield Group(encoded.prompt, encoded.tokens, tuple(samples[index] for index in range(n)))
    for prompt_id, samples in running.items():
        raise TrainingStopped(f"rollout.engine {type(engine).__name__}: prompt {prompt_id}: {len(samples)} of {n} samples returned")


def sample_groups_with_greedy(
    engine: Engine,
    prompts: Sequence[EncodedPrompt],
    n: int,
    sampling: Sampling,
    *,
    version: int,
    on_sample: Callable[[Sample], None] = _ignore,
) -> Iterator[Group]:
    """The same, with one greedy sample more at the end of each group. Rewards see it with the others, as one that compares
    samples with each other must."""
    likeliest = sample_groups(engine, prompts, 1, replace(sampling, temperature=0.0), version=version, on_sample=on_sample)
    greedy = {group.prompt.id: group.samples[0] for group in likeliest}
    for group in sample_groups(engine, prompts, n, sampling, version=version, on_sample=on_sample):
        yield replace(group, samples=(*group.samples, replace(greedy[group.prompt.id], index=n)))


def _generate(engine: Engine, requests: Sequence[Request], sampling: Sampling) -> Iterator[Sample]:
    with engine_faults(type(engine)):
        samples = engine.generate(requests, sampling)
        if not isinstance(samples, Iterable):
            raise TypeError(f"generate returned {samples!r:.100}, not an iterator of samples")
        yield from samples


def _fault(sample: Sample, running: Mapping[str, Mapping[int, Sample]], n: int, version: int) -> str | None:
    """What is wrong with a sample, if anything."""
    if not isinstance(sample, Sample):
        return f"generate yielded {sample!r:.100}, not a Sample"
    name, length = f"prompt {sample.prompt_id}, sample {sample.index}", len(sample.tokens)
    if sample.prompt_id not in running:
        return f"{name}: no sample of this prompt was requested, or all {n} were returned before"
    if sample.index not in range(n) or sample.index in running[sample.prompt_id]:
        return f"{name}: indices are 0 to {n - 1}, each once"
    if not length:
        return f"{name} has no tokens; a response includes its end token"
    if sample.sampler_logprobs is None or len(sample.sampler_logprobs) != length:
        got = "none" if sample.sampler_logprobs is None else len(sample.sampler_logprobs)
        return f"{name}: sampler_logprobs has one entry per token: {length}, not {got}"
    if sample.untempered_logprobs is not None and len(sample.untempered_logprobs) != length:
        return f"{name}: untempered_logprobs has one entry per token: {length}, not {len(sample.untempered_logprobs)}; or is None"
    if sample.status not in STATUSES:
        return f"{name}: status is one of {', '.join(STATUSES)}, not {sample.status!r}"
    if sample.version != version:
        return f"{name}: version is {sample.version}, and the weights of the last sync are version {version}"
    return None
