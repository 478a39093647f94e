"""Samples as parquet rows, to inspect what a policy writes and what it is rewarded for, and their length metrics."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.cells import cell_len

from plaudit.files import atomic_file
from plaudit.redaction import redact
from plaudit.report.fitting import Part, cut, fit, printable
from plaudit.types import Score, ScoredGroup

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
}
"""Plus, per reward, `part/…` numbers and `view/…`, `failure/…`, `trace/…` strings. Fixed types let a folder read as one table."""


def write_samples(file: Path, groups: Sequence[ScoredGroup]) -> None:
    """Write one row per sample: prompt, response, scored text (view), score and its parts."""
    rows = [_row(group, i) for group in groups for i in range(len(group.scores))]
    per_reward = sorted({name for row in rows for name in row} - COLUMNS.keys())
    types = COLUMNS | {name: pa.float64() if name.startswith("part/") else pa.string() for name in per_reward}
    with atomic_file(file) as temporary:
        pq.write_table(pa.Table.from_pylist(rows, pa.schema(types)), temporary)


def _row(group: ScoredGroup, i: int) -> dict[str, Any]:
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
        **{f"part/{name}": float(value) for name, value in score.parts.items()},
        **{f"view/{name}": scores[i].view for name, scores in group.by_reward.items()},
        **{f"failure/{name}": _failure_text(scores[i]) for name, scores in group.by_reward.items()},
        **{f"trace/{name}": redact(_json(scores[i].trace)) for name, scores in group.by_reward.items() if scores[i].trace},
    }


@dataclass(frozen=True)
class ShownSample:
    """A sample to look at."""

    which: str
    """best, worst, or a number: the same prompts in every validation."""
    reward: float
    prompt: str
    """The last message."""
    response: str

    def line(self, width: int) -> str:
        """On one line of a terminal, whatever its text contains."""
        start = f"{self.which:5} {self.reward:.4f}  "
        prompt = cut(printable(self.prompt), (width - len(start)) // 3)
        return f"{start}{prompt} → {cut(printable(self.response), width - len(start) - cell_len(prompt) - 3)}"


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
    return ShownSample(which, _value((group, i)), _text(messages[-1]["content"]) if messages else "", group.group.samples[i].text)


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
