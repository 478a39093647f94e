"""`plaudit sample`: n responses to each prompt, one line of JSON per prompt, written as soon as its last response is there.

Started again, it goes on with the prompts that have no line yet. Beside the output lies a file with what it was sampled with; an
output that was sampled differently is not continued.
"""

import fcntl
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

from plaudit.data.conversations import Source
from plaudit.data.prompts import EncodedPrompt, load_prompts
from plaudit.data.templates import ChatTemplate, template_of
from plaudit.errors import RunError
from plaudit.files import digest_of, fingerprint, sketch, write_atomic
from plaudit.models.policy import load_policy, resolve_device
from plaudit.recipe import Model
from plaudit.report.progress import StepProgress, counted, say
from plaudit.rollout.engine import Sampling
from plaudit.rollout.groups import sample_groups
from plaudit.rollout.native.engine import NativeEngine
from plaudit.train.trainer import compute_repeatably
from plaudit.types import Group


@dataclass(frozen=True)
class SampleJob:
    model: Model
    sources: Sequence[Source]
    out: Path
    n: int
    sampling: Sampling
    max_prompt_tokens: int
    too_long: Literal["filter", "error", "cut_left"]
    max_prompts: int | None = None
    max_sequences: int | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"


def sample(job: SampleJob) -> int:
    """Sample what the output does not have yet; returns how many prompts it has in the end."""
    template = template_of(job.model)
    found = load_prompts(
        job.sources,
        template,
        max_prompt_tokens=job.max_prompt_tokens,
        too_long=job.too_long,
        progress=lambda rows: counted(rows, "reading prompts"),
    )
    prompts = found.prompts[: job.max_prompts]
    say(found.summary(job.too_long, job.max_prompt_tokens))
    with _held(job.out) as file:  # before it is looked at: a line that another process is writing must not be taken for a cut one
        done = _continue(job, digest_of(template.text))
        left = [encoded for encoded in prompts if encoded.prompt.id not in done]
        if done:
            rest = "; going on with the rest" if left else ""
            say(f"{job.out}: has {len(prompts) - len(left):,} of {len(prompts):,} prompts{rest}")
        if left:
            _sample(job, left, template, len(prompts), file)
    return len(prompts)


def _sample(job: SampleJob, left: list[EncodedPrompt], template: ChatTemplate, total: int, file: TextIO) -> None:
    device = resolve_device(job.device)
    compute_repeatably(device)
    policy = load_policy(job.model, template, device)
    engine = NativeEngine(policy.model, template.tokenizer, max_sequences=job.max_sequences)
    began, tokens, done = time.perf_counter(), 0, total - len(left)
    with StepProgress("sample", total, done) as progress:
        for group in sample_groups(engine, left, job.n, job.sampling):
            file.write(json.dumps(_row(group), ensure_ascii=False, default=str) + "\n")
            file.flush()
            tokens, done = tokens + sum(map(len, group.samples)), done + 1
            progress.update(done, {"time/tokens_per_s": tokens / (time.perf_counter() - began)})
        os.fsync(file.fileno())


def _row(group: Group) -> dict[str, Any]:
    """What `plaudit score` and every later stage read: the prompt's own columns, and its responses."""
    prompt, samples = group.prompt, group.samples
    return {
        "id": prompt.id,
        "data_source": prompt.data_source,
        "prompt": prompt.messages,
        **({"tools": prompt.tools} if prompt.tools else {}),
        "reward_model": {"ground_truth": prompt.ground_truth},
        "extra_info": prompt.extra_info,
        "responses": [sample.text for sample in samples],
        "status": [sample.status for sample in samples],
        "tokens": [len(sample) for sample in samples],
        "logprob": [round(float(sample.untempered_logprobs.sum()), 4) for sample in samples],
    }


# Going on ------------------------------------------------------------------------------------------------------------


@contextmanager
def _held(out: Path) -> Iterator[TextIO]:
    """The output, open to be added to, for this process alone."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        file = out.open("a", encoding="utf-8")
    except OSError as error:
        raise RunError(f"--out: {out} cannot be written: {error}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RunError(f"--out: another process is writing to {out}; wait for it, or choose another file") from None
        yield file


def _continue(job: SampleJob, template: str) -> set[str]:
    """Ids that the output has already; a last line that was cut short is taken off it."""
    about_file = job.out.with_name(f"{job.out.name}.about.json")
    about = json.loads(json.dumps({
        "model": job.model.model_dump(),
        "weights": sketch(Path(job.model.path)),
        "chat template": template,
        "prompts": {str(source.path): fingerprint(source.path) for source in job.sources},
        "n": job.n,
        **asdict(job.sampling),
        "max_prompt_tokens": job.max_prompt_tokens,
        "too_long": job.too_long,
    }))  # fmt: skip
    try:
        if not job.out.stat().st_size:
            write_atomic(about_file, json.dumps(about, indent=1))
            return set()
        _same_or_refuse(job.out, about_file, about)
        return _finished_lines(job.out)
    except OSError as error:
        raise RunError(f"--out: {job.out} cannot be written: {error}") from None


def _same_or_refuse(out: Path, about_file: Path, about: dict[str, Any]) -> None:
    if not about_file.exists():
        raise RunError(f"--out: {out} exists, and was not written by plaudit sample; choose another file")
    before = json.loads(about_file.read_text(encoding="utf-8"))
    differ = [name for name in about if before.get(name) != about[name]]
    if differ:
        lines = [f"  {name}: {json.dumps(before.get(name))} there, {json.dumps(about[name])} now" for name in differ]
        raise RunError("\n".join([f"--out: {out} was sampled differently; choose another file, or sample as before:", *lines]))


def _finished_lines(out: Path) -> set[str]:
    whole, cut, rest = out.read_bytes().rpartition(b"\n")
    if rest:
        with out.open("r+b") as file:
            file.truncate(len(whole) + len(cut))
    try:
        return {json.loads(line)["id"] for line in whole.split(b"\n") if line}
    except (ValueError, LookupError, TypeError):
        raise RunError(f"--out: {out} has lines that plaudit sample did not write; choose another file") from None
