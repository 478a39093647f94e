"""Samples as parquet rows, to inspect what a policy writes and what it is rewarded for, and their length metrics."""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from plaudit.files import atomic_file
from plaudit.redaction import redact
from plaudit.report.fitting import Part, cut, fit, folded, printable
from plaudit.types import Experience, Score, ScoredGroup

COLUMNS = {
    "prompt_id": pa.string(),
    "index": pa.int32(),
    "data_source": pa.string(),
    "prompt": pa.list_(pa.struct({"role": pa.string(), "content": pa.string()})),
    "tools": pa.string(),
    "response": pa.string(),
    "reward": pa.float64(),
    "reward_model": pa.struct({"ground_truth": pa.string()}),
    "extra_info": pa.string(),
    "status": pa.string(),
    "tokens": pa.int32(),
    "mean_logprob": pa.float64(),
    "version": pa.int32(),
    "malformed": pa.bool_(),
    "failure": pa.string(),
    "advantage": pa.float64(),
}
"""Plus, per reward, `part/…` numbers and `view/…`, `failure/…`, `trace/…` strings, and of some samples `token/…` lists. Fixed types
let a folder read as one table."""
TYPES = {"part/": pa.float64(), "token/text": pa.list_(pa.string()), "token/": pa.list_(pa.float32())}
"""Of columns that are not in every file, by how their names begin; all others are strings."""
ROW_GROUP = 256
"""Samples that a reader of one of them has to read with it."""

Trained = Mapping[tuple[int, int], Experience]
"""What was trained on of a sample, by the identity of its group and its index."""


@dataclass(frozen=True)
class TokenDetails:
    """Which samples are written token by token."""

    groups: int
    """Of each step, the first ones."""
    decode: Callable[[list[int]], str]


def write_samples(
    file: Path, groups: Sequence[ScoredGroup], trained: Trained | None = None, tokens: TokenDetails | None = None
) -> None:
    """Write one row per sample: prompt, response, scored text (view), score, its parts, and the advantage of those trained on."""
    rows = []
    for number, group in enumerate(groups):
        for i in range(len(group.scores)):
            experience = (trained or {}).get((id(group.group), i))
            detail = _tokens(group, i, experience, tokens.decode) if tokens and number < tokens.groups else {}
            rows.append(_row(group, i, experience) | detail)
    optional = sorted({name for row in rows for name in row} - COLUMNS.keys())
    types = COLUMNS | {name: _type(name) for name in optional}
    with atomic_file(file) as temporary:
        pq.write_table(pa.Table.from_pylist(rows, pa.schema(types)), temporary, row_group_size=ROW_GROUP)


def _type(name: str) -> pa.DataType:
    return next((kind for start, kind in TYPES.items() if name.startswith(start)), pa.string())


def _tokens(group: ScoredGroup, i: int, experience: Experience | None, decode: Callable[[list[int]], str]) -> dict[str, Any]:
    """Each token's text and numbers. Only what the step has computed anyway: no model is run for it."""
    sample = group.group.samples[i]
    values: dict[str, Any] = {
        "logprob": sample.sampler_logprobs if sample.untempered_logprobs is None else sample.untempered_logprobs
    }
    if experience is not None:
        current = experience.old_logprobs if experience.old_logprobs is not None else experience.sampler_logprobs
        values["advantage"] = experience.advantages
        if experience.old_logprobs is not None and experience.old_logprobs is not experience.sampler_logprobs:
            values["mismatch"] = experience.old_logprobs - experience.sampler_logprobs
        if experience.ref_logprobs is not None:
            values["kl"] = current - experience.ref_logprobs
        if experience.entropies is not None:
            values["entropy"] = experience.entropies
        if experience.values is not None:
            values["value"] = experience.values
    numbers = {f"token/{name}": array.astype(np.float32).tolist() for name, array in values.items()}
    return {"token/text": [decode([int(token)]) for token in sample.tokens], **numbers}


def _row(group: ScoredGroup, i: int, experience: Experience | None) -> dict[str, Any]:
    prompt, sample, score = group.group.prompt, group.group.samples[i], group.scores[i]
    truth = prompt.ground_truth
    return {
        "prompt_id": prompt.id,
        "index": i,
        "data_source": prompt.data_source,
        "prompt": [{"role": message["role"], "content": _text(message["content"])} for message in prompt.messages],
        "tools": _json(prompt.tools) if prompt.tools else None,
        "response": sample.text,
        "reward": score.value,
        "reward_model": {"ground_truth": None if truth is None else _json(truth) if isinstance(truth, dict | list) else str(truth)},
        "extra_info": redact(_json(prompt.extra_info)) if prompt.extra_info else None,
        "status": sample.status,
        "tokens": len(sample),
        "mean_logprob": _mean(sample.untempered_logprobs),
        "version": sample.version,
        "malformed": score.malformed,
        "failure": _failure_text(score),
        "advantage": None if experience is None else _mean(experience.advantages),
        **{f"part/{name}": float(value) for name, value in score.parts.items()},
        **{f"view/{name}": scores[i].view for name, scores in group.by_reward.items()},
        **{f"failure/{name}": _failure_text(scores[i]) for name, scores in group.by_reward.items()},
        **{f"trace/{name}": redact(_json(scores[i].trace)) for name, scores in group.by_reward.items() if scores[i].trace},
    }


def kept_steps(steps: Sequence[int], limit: int) -> set[int]:
    """Which of these steps keep their samples: half of the limit are the newest; of those before, every 2ᵏ-th stays."""
    newest = set(steps[-max(1, limit // 2) :])
    older, stride = [step for step in steps if step not in newest], 1
    while len(older) > limit - len(newest):
        stride *= 2
        older = [step for step in older if step % stride == 0]
    return newest | set(older)


@dataclass(frozen=True)
class ShownSample:
    """A sample to look at."""

    which: str
    """best, worst, or a number: the same prompts in every validation."""
    reward: float
    prompt: str
    """The last message."""
    response: str

    parts: Mapping[str, float] = field(default_factory=dict)
    """Of the reward, by component."""

    def lines(self, width: int) -> list[str]:
        """For a terminal, whatever its text contains: the scores, then prompt and response, each folded to a few lines."""
        parts = [Part(f"{printable(name)} {value:.4g}", i + 1) for i, (name, value) in enumerate(self.parts.items())]
        scores = fit([Part(f"{self.which:5} {self.reward:.4f}", 0), *(parts if len(parts) > 1 else [])], width)
        return [scores, *folded(self.prompt, width, "  › "), *folded(self.response, width, "  ")]


def best_and_worst(groups: Sequence[ScoredGroup]) -> list[ShownSample]:
    """The samples with the highest and the lowest reward, the first ones if there are several; one sample if all are equal."""
    scored = [(group, i) for group in groups for i in range(len(group.scores)) if group.scores[i].value is not None]
    if not scored:
        return []
    best, worst = max(scored, key=_value), min(scored, key=_value)
    return [_shown("best", *best)] + ([_shown("worst", *worst)] if _value(worst) < _value(best) else [])


def samples_to_follow(groups: Sequence[ScoredGroup], prompts: int = 6) -> list[ShownSample]:
    """The best and the worst sample, and the first one of the first prompts, to be compared from validation to validation."""
    followed = [(str(number), group) for number, group in enumerate(groups[:prompts], 1) if group.scores[0].value is not None]
    return best_and_worst(groups) + [_shown(number, group, 0) for number, group in followed]


def source_line(rewards: Mapping[str, float], width: int) -> str:
    """The mean reward of each data source on one line of a terminal; the first ones if it is too short for all."""
    shown = [Part(f"{cut(printable(source), 40)} {reward:.4f}", i) for i, (source, reward) in enumerate(rewards.items())]
    return fit([Part("val/reward by data_source:", 0), *shown], width)


def _value(sample: tuple[ScoredGroup, int]) -> float:
    group, i = sample
    value = group.scores[i].value
    assert value is not None
    return value


def _shown(which: str, group: ScoredGroup, i: int) -> ShownSample:
    messages = group.group.prompt.messages
    prompt = _text(messages[-1]["content"]) if messages else ""
    return ShownSample(which, _value((group, i)), prompt, group.group.samples[i].text, group.scores[i].parts)


def _mean(logprobs: np.ndarray | None) -> float | None:
    """None also for a sample without tokens."""
    return None if logprobs is None or not len(logprobs) else float(logprobs.mean())


def _failure_text(score: Score) -> str | None:
    return redact(f"{score.failure.cause}: {score.failure.message}") if score.failure else None


def _text(content: Any) -> str:
    return content if isinstance(content, str) else _json(content)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)  # parquet rows may hold decimals, dates, bytes


def length_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    samples = [sample for group in groups for sample in group.group.samples]
    lengths = [len(sample) for sample in samples]
    untempered = [sample.untempered_logprobs for sample in samples if sample.untempered_logprobs is not None]
    all_logprobs = np.concatenate(untempered) if untempered else np.empty(0)
    return {
        "length": statistics.fmean(lengths),
        "length_max": float(max(lengths)),
        "truncated": statistics.fmean(sample.status == "truncated" for sample in samples),
        "sampled_tokens": float(sum(lengths)),
        # Mean log-prob at temperature 1 of the policy's own samples: approaches 0 as the policy becomes more certain.
        **({"untempered_logprob": float(all_logprobs.mean(dtype=np.float64))} if len(all_logprobs) else {}),
    }
