"""Samples as rows and as numbers: what a person reads to see what a policy does and what it is paid for."""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from plaudit.errors import redact
from plaudit.files import atomic_file
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
    "status": pa.string(),
    "tokens": pa.int32(),
    "mean_logprob": pa.float64(),
    "version": pa.int32(),
    "malformed": pa.bool_(),
    "failure": pa.string(),
}
"""And by reward: `part/…` numbers, `view/…`, `failure/…`, `trace/…` strings. Types are fixed: a folder reads as one table."""


def write_samples(file: Path, groups: Sequence[ScoredGroup]) -> None:
    """One row per sample: what was asked, written, scored (the view) and found (parts)."""
    rows = [_row(group, i) for group in groups for i in range(len(group.scores))]
    more = sorted({name for row in rows for name in row} - COLUMNS.keys())
    types = COLUMNS | {name: pa.float64() if name.startswith("part/") else pa.string() for name in more}
    with atomic_file(file) as aside:
        pq.write_table(pa.Table.from_pylist(rows, pa.schema(types)), aside)


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
        "status": sample.status,
        "tokens": len(sample),
        "mean_logprob": None if sample.untempered_logprobs is None else float(sample.untempered_logprobs.mean()),
        "version": sample.version,
        "malformed": score.malformed,
        "failure": _why(score),
        **{f"part/{name}": float(value) for name, value in score.parts.items()},
        **{f"view/{name}": scores[i].view for name, scores in group.by_reward.items()},
        **{f"failure/{name}": _why(scores[i]) for name, scores in group.by_reward.items()},
        **{f"trace/{name}": redact(_json(scores[i].trace)) for name, scores in group.by_reward.items() if scores[i].trace},
    }


def _why(score: Score) -> str | None:
    return redact(f"{score.failure.cause}: {score.failure.message}") if score.failure else None


def _text(content: Any) -> str:
    return content if isinstance(content, str) else _json(content)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)  # a parquet file may hold decimals, dates, bytes


def length_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    samples = [sample for group in groups for sample in group.group.samples]
    lengths = [len(sample) for sample in samples]
    return {
        "length": statistics.fmean(lengths),
        "length_max": float(max(lengths)),
        "truncated": statistics.fmean(sample.status == "truncated" for sample in samples),
        "sampled_tokens": float(sum(lengths)),
        # Of the untempered model, about its own samples: falls as the policy becomes sure of itself.
        "untempered_logprob": float(np.concatenate([sample.untempered_logprobs for sample in samples]).mean(dtype=np.float64)),
    }
