"""`plaudit sample`: n responses per prompt as JSONL, one line per prompt, written as soon as its last response is complete.

Run again, it resumes with the prompts that have no line yet. A file next to the output records the settings; output sampled with
other settings is not resumed. The model is in this process, or on a server. If its folder says where thoughts end, a response is
written as `{"thought": …, "answer": …, "text": …}`, with a null answer where a delimiter is missing.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from plaudit.data.conversations import Source
from plaudit.data.prompts import EncodedPrompt, load_prompts
from plaudit.data.templates import ChatTemplate, load_model_template
from plaudit.errors import RunError
from plaudit.files import text_digest, weights_fingerprint
from plaudit.hub import model_folder
from plaudit.models.devices import resolve_device
from plaudit.models.trainable import load_policy
from plaudit.recipe import ModelSettings, SampleSettings
from plaudit.recipe.limits import ModelLimits
from plaudit.recipe.reward_models import RewardModel
from plaudit.report.activity import Activity
from plaudit.report.progress import StepProgress, print_line, show_progress
from plaudit.response_files import Longcot, stop_strings
from plaudit.resumable import ResumableJsonl, open_resumable
from plaudit.reward_models.model_registry import describe_usage
from plaudit.rollout.engine import MAX_SEQUENCES, Sampling
from plaudit.rollout.groups import sample_groups
from plaudit.rollout.native.engine import NativeEngine
from plaudit.train.trainer import compute_repeatably
from plaudit.types import Failure, Group


@dataclass(frozen=True)
class SampleJob:
    model: ModelSettings
    sources: Sequence[Source]
    out: Path
    n: int
    sampling: Sampling
    max_prompt_tokens: int
    too_long: Literal["filter", "error", "cut_left"]
    max_prompts: int | None = None
    max_sequences: int | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    special_tokens: Literal["text", "control"] = "text"
    longcot: Longcot | None = None
    """Where thoughts end, if responses are to be written as thought and answer."""
    prefill: str = ""
    """What every response begins with."""
    server: RewardModel | None = None
    """Where the model is, if not in this process."""


def sample(job: SampleJob) -> list[str]:
    """Sample the prompts that the output lacks; return the ids of all that have responses now, in the order of the prompts."""
    template = load_model_template(job.model, job.special_tokens)
    loaded = load_prompts(
        job.sources,
        template,
        max_prompt_tokens=job.max_prompt_tokens,
        too_long=job.too_long,
        progress=lambda rows: show_progress(rows, "reading prompts"),
    )
    loaded.use_first(job.max_prompts, "--max-prompts")
    prompts = loaded.prompts
    begun = np.asarray(template.prefill_tokens(job.prefill), dtype=np.int32)
    job = job if begun.size else replace(job, prefill="")  # the template itself begins responses with it
    prompts = [replace(encoded, tokens=np.concatenate([encoded.tokens, begun])) for encoded in prompts]
    print_line(loaded.summary(job.too_long, job.max_prompt_tokens))
    with open_resumable(job.out, _inputs(job, text_digest(template.text)), "sample") as file:
        done = set(file.done)
        left, left_out = [encoded for encoded in prompts if encoded.prompt.id not in done], set[str]()
        if done:
            rest = "; resuming with the rest" if left else ""
            print_line(f"{job.out}: has {len(prompts) - len(left):,} of {len(prompts):,} prompts{rest}")
        if left and job.server is not None:
            left_out = _sample_served(job, job.server, left, len(prompts), file)
        elif left:
            _sample(job, left, template, len(prompts), file)
    return [encoded.prompt.id for encoded in prompts if encoded.prompt.id not in left_out]


def sample_table(model: ModelSettings, sources: Sequence[Source], settings: SampleSettings) -> pa.Table:
    """The same in memory: a table with a row per prompt, in order."""
    template = load_model_template(model, settings.special_tokens)
    loaded = load_prompts(sources, template, max_prompt_tokens=settings.max_prompt_tokens, too_long=settings.too_long)
    engine = load_engine(model, template, device=settings.device, max_sequences=settings.max_sequences)
    sampled = sample_groups(engine, loaded.prompts, settings.n, sampling_of(settings, model), version=engine.version)
    groups = {group.prompt.id: group for group in sampled}
    return pa.Table.from_pylist([group_row(groups[encoded.prompt.id]) for encoded in loaded.prompts])


def sampling_of(settings: SampleSettings, model: ModelSettings) -> Sampling:
    given: dict[str, Any] = {field.name: getattr(settings, field.name) for field in fields(Sampling) if field.name != "step"}
    return Sampling(**{**given, "stop": stop_strings(model.path, settings.stop)})


def _sample(job: SampleJob, left: list[EncodedPrompt], template: ChatTemplate, total: int, file: ResumableJsonl) -> None:
    engine = load_engine(job.model, template, device=job.device, max_sequences=job.max_sequences)
    began, tokens, done = time.perf_counter(), 0, total - len(left)
    activity = Activity()
    with (
        StepProgress("sample", total, done, activity=activity) as progress,
        activity.phase("sample", prompts=len(left), samples=len(left) * job.n, scores=False) as phase,
    ):
        engine.on_step = phase.engine_step
        for group in sample_groups(engine, left, job.n, job.sampling, version=engine.version, on_sample=phase.sample_done):
            phase.update(phase.sampled + 1, 0, 0)
            file.write(group_row(group, job.prefill, job.longcot))
            tokens, done = tokens + sum(map(len, group.samples)), done + 1
            progress.update(done, {"time/tokens_per_s": tokens / (time.perf_counter() - began)})
        file.sync()


def _sample_served(job: SampleJob, server: RewardModel, left: list[EncodedPrompt], total: int, file: ResumableJsonl) -> set[str]:
    """The ids of prompts that are left out."""
    from plaudit.loops.served_sampling import sample_from_server

    began, tokens, done = time.perf_counter(), 0, total - len(left)
    left_out: dict[str, Failure] = {}
    limits = ModelLimits(max_concurrent_calls=job.max_sequences or MAX_SEQUENCES["cuda"])
    with StepProgress("sample", total, done) as progress:

        def keep(group: Group) -> None:
            nonlocal tokens, done
            file.write(group_row(group, job.prefill, job.longcot))
            tokens, done = tokens + sum(sample.num_tokens or 0 for sample in group.samples), done + 1
            progress.update(done, {"time/tokens_per_s": tokens / (time.perf_counter() - began)})

        def leave_out(encoded: EncodedPrompt, failure: Failure) -> None:
            left_out[encoded.prompt.id] = failure

        report = sample_from_server(server, limits, left, job.n, job.sampling, keep, leave_out, answered=done > 0)
    file.sync()
    print_line(describe_usage(report.totals))
    if report.failures:
        raise RunError(
            f"{total - done - len(left_out):,} of {total:,} prompts have no responses: {report.causes}. Fix the cause, then run "
            f"the same command to resume; {job.out} keeps the others."
        )
    for cause, count in Counter(failure.cause for failure in left_out.values()).items():
        first = next(failure.message for failure in left_out.values() if failure.cause == cause)
        print_line(f"{count:,} of {total:,} prompts left out, which the server rejects: {first}", "yellow")
    return set(left_out)


def _served_model(server: RewardModel) -> dict[str, Any]:
    """The model that the server has, so that another one in its place is noticed."""
    from plaudit.reward_models.server_client import ServerClient

    info = asyncio.run(ServerClient(server).require_server())
    return {"server": {"path": info.name, "weights": info.weights, "dialect": server.dialect}}


def load_engine(
    model: ModelSettings, template: ChatTemplate, *, device: Literal["auto", "cpu", "cuda"], max_sequences: int | None = None
) -> NativeEngine:
    """A model, ready to be sampled."""
    on = resolve_device(device)
    compute_repeatably(on)
    return NativeEngine(load_policy(model, template, on).model, template.tokenizer, max_sequences=max_sequences)


def group_row(group: Group, prefill: str = "", longcot: Longcot | None = None) -> dict[str, Any]:
    """A row for `plaudit score` and later stages: the prompt's columns and its responses, which begin with `prefill`."""
    prompt, samples = group.prompt, group.samples
    return {
        "id": prompt.id,
        "data_source": prompt.data_source,
        "prompt": prompt.messages,
        **({"tools": prompt.tools} if prompt.tools else {}),
        "reward_model": {"ground_truth": prompt.ground_truth},
        "extra_info": prompt.extra_info,
        "responses": [_response(prefill + sample.text, longcot) for sample in samples],
        "status": [sample.status for sample in samples],
        "tokens": [sample.num_tokens for sample in samples],
        "logprob": [
            None if sample.untempered_logprobs is None else round(float(sample.untempered_logprobs.sum()), 4) for sample in samples
        ],
    }


def _response(text: str, longcot: Longcot | None) -> str | dict[str, str | None]:
    if longcot is None or longcot.start is None:
        return text
    thought, answer = longcot.split(text) or (None, None)
    return {"thought": thought, "answer": answer, "text": text}


def _inputs(job: SampleJob, template: str) -> dict[str, Any]:
    """Everything the responses depend on."""
    return {
        "model": job.model.model_dump(exclude={"liger"}),  # affects training only
        **(_served_model(job.server) if job.server else {"weights": weights_fingerprint(model_folder(job.model.path))}),
        "prefill": job.prefill or None,
        "longcot": job.longcot and asdict(job.longcot),
        "chat template": template,
        "prompts": {str(source): source.fingerprint() for source in job.sources},
        "n": job.n,
        **asdict(job.sampling),
        "max_prompt_tokens": job.max_prompt_tokens,
        "too_long": job.too_long,
        "special_tokens": job.special_tokens,
    }
