"""Samples as rows and as numbers: what a person reads to see what a policy does and what it is paid for."""

import json
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from plaudit.types import Score, ScoredGroup


def sample_rows(groups: Sequence[ScoredGroup]) -> list[dict[str, Any]]:
    """One row per sample, all with the same columns: what was asked, written, scored (the view) and found (parts)."""
    rows = [_row(group, i) for group in groups for i in range(len(group.scores))]
    columns = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in columns} for row in rows]


def _row(group: ScoredGroup, i: int) -> dict[str, Any]:
    prompt, sample, score = group.group.prompt, group.group.samples[i], group.scores[i]
    truth = prompt.ground_truth
    return {
        "prompt_id": prompt.id,
        "index": i,
        "data_source": prompt.data_source,
        "prompt": [{"role": message["role"], "content": _text(message["content"])} for message in prompt.messages],
        "response": sample.text,
        "reward": score.value,
        "reward_model": {"ground_truth": truth if isinstance(truth, str | None) else json.dumps(truth, ensure_ascii=False)},
        "status": sample.status,
        "tokens": len(sample),
        "mean_logprob": float(sample.untempered_logprobs.mean()),
        "version": sample.version,
        "malformed": score.malformed,
        "failure": _why(score),
        **{f"part/{name}": float(value) for name, value in score.parts.items()},
        **{f"view/{name}": scores[i].view for name, scores in group.by_reward.items()},
        **{f"failure/{name}": _why(scores[i]) for name, scores in group.by_reward.items()},
    }


def _why(score: Score) -> str | None:
    return f"{score.failure.cause}: {score.failure.message}" if score.failure else None


def _text(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


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
