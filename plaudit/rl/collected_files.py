"""The collected groups of a step as files of a checkpoint: a run that samples ahead of training resumes without sampling or scoring
anything twice.

    groups.jsonl            a line per group: the number of its prompt's row, its samples and their scores
    tokens.safetensors      tokens and log-probs of all samples, laid end to end, and their lengths

Prompts are not saved: the data are those of the run, or it would not resume.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from plaudit.data.prompts import EncodedPrompt
from plaudit.rl.collect import Collected, Collector
from plaudit.types import Failure, Group, Sample, Score, ScoredGroup

GROUPS, TOKENS = "groups.jsonl", "tokens.safetensors"
ARRAYS = {"tokens": np.int32, "sampler_logprobs": np.float32, "untempered_logprobs": np.float32}


def write_collected(collected: Collected, folder: Path) -> list[Path]:
    """Returns the files. The metrics are the caller's to keep."""
    folder.mkdir(parents=True, exist_ok=True)
    trained_on = {id(group) for group in collected.groups}
    with (folder / GROUPS).open("w", encoding="utf-8") as file:
        for row, scored in zip(collected.rows, collected.sampled, strict=True):
            line = {"row": row, "trained_on": id(scored) in trained_on, **_as_json(scored)}
            file.write(json.dumps(line, default=_plain) + "\n")
    save_file(_arrays(collected.sampled), folder / TOKENS)
    return [folder / GROUPS, folder / TOKENS]


def read_collected(folder: Path, collector: Collector, metrics: dict[str, float]) -> Collected:
    lines = [json.loads(line) for line in (folder / GROUPS).read_text(encoding="utf-8").splitlines()]
    arrays = load_file(folder / TOKENS)
    ends = np.cumsum(arrays.pop("lengths"))[:-1]
    by_sample = {name: iter(np.split(array, ends)) for name, array in arrays.items()}
    rows = [line["row"] for line in lines]
    sampled = [_from_json(line, prompt, by_sample) for line, prompt in zip(lines, collector.prompts_of(rows), strict=True)]
    groups = [scored for scored, line in zip(sampled, lines, strict=True) if line["trained_on"]]
    return Collected(groups, sampled, rows, metrics)


def _arrays(groups: Sequence[ScoredGroup]) -> dict[str, np.ndarray]:
    samples = [sample for scored in groups for sample in scored.group.samples]
    by_name = {name: [getattr(sample, name) for sample in samples] for name in ARRAYS}
    joined = {
        name: np.concatenate(arrays, dtype=ARRAYS[name], casting="same_kind")
        for name, arrays in by_name.items()
        if all(array is not None for array in arrays)  # untempered ones: an engine's choice
    }
    return joined | {"lengths": np.array([len(sample) for sample in samples], dtype=np.int64)}


def _as_json(scored: ScoredGroup) -> dict[str, Any]:
    return {
        "samples": [
            {"text": sample.text, "status": sample.status, "version": sample.version} for sample in scored.group.samples
        ],
        "scores": [asdict(score) for score in scored.scores],
        "by_reward": {name: [asdict(score) for score in scores] for name, scores in scored.by_reward.items()},
        "baseline": None if scored.baseline is None else asdict(scored.baseline),
    }  # fmt: skip


def _from_json(line: dict[str, Any], encoded: EncodedPrompt, by_sample: dict[str, Any]) -> ScoredGroup:
    samples = tuple(
        Sample(
            prompt_id=encoded.prompt.id,
            index=index,
            tokens=next(by_sample["tokens"]),
            sampler_logprobs=next(by_sample["sampler_logprobs"]),
            untempered_logprobs=next(by_sample["untempered_logprobs"]) if "untempered_logprobs" in by_sample else None,
            **one,
        )
        for index, one in enumerate(line["samples"])
    )
    return ScoredGroup(
        Group(encoded.prompt, encoded.tokens, samples),
        tuple(map(_score, line["scores"])),
        {name: tuple(map(_score, scores)) for name, scores in line["by_reward"].items()},
        None if line["baseline"] is None else _score(line["baseline"]),
    )


def _score(saved: dict[str, Any]) -> Score:
    failure = saved["failure"]
    return Score(**{**saved, "failure": None if failure is None else Failure(**failure)})


def _plain(value: Any) -> Any:
    """numpy's numbers stay numbers; anything else becomes the text that `samples/` shows."""
    return value.item() if isinstance(value, np.generic) else str(value)
