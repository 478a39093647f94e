"""Run folders as a training run leaves them, made without training."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from plaudit.report.samples import write_samples
from plaudit.types import Failure, Group, Prompt, Sample, Score, ScoredGroup

RECIPE: dict[str, Any] = {
    "stage": "rl", "model.path": "models/small", "run.dir": "runs/made", "run.max_steps": 4, "optim.lr": 1e-5,
    "rewards.0.kind": "exact", "rewards.0.name": None, "rewards.0.weight": 1.0, "rewards.0.combine": "add",
    "rewards.1.kind": "judge", "rewards.1.name": "tone", "rewards.1.weight": 0.5, "rewards.1.combine": "add",
}  # fmt: skip


def scored_group(
    id: str,
    responses: Sequence[str],
    rewards: Sequence[float | None],
    *,
    prompt: str = "What is 1 + 1?",
    tokens: Sequence[int] | None = None,
    parts: Sequence[dict[str, float]] | None = None,
    trace: dict[str, Any] | None = None,
    data_source: str = "sums",
    failure: str = "timeout",
) -> ScoredGroup:
    """A reward of None has failed."""
    samples, scores, of_judge = [], [], []
    for i, (text, reward) in enumerate(zip(responses, rewards, strict=True)):
        length = tokens[i] if tokens is not None else len(text)
        logprobs = np.full(length, -0.5, np.float32)
        samples.append(Sample(id, i, np.zeros(length, np.int32), text, "finished", logprobs, logprobs, 0))
        failed = Failure(failure, "tone: no answer after 60 s") if reward is None else None
        scores.append(Score(reward, parts[i] if parts is not None else {"exact": reward or 0.0}, failure=failed))
        of_judge.append(Score(reward, view=f"scored: {text}", failure=failed, trace=trace or {}))
    group = Group(Prompt(id, [{"role": "user", "content": prompt}], data_source, "2"), np.zeros(3, np.int32), tuple(samples))
    return ScoredGroup(group, tuple(scores), {"tone": tuple(of_judge)})


def make_run(
    folder: Path, steps: dict[int, Sequence[ScoredGroup]], *, recipe: dict[str, Any] | None = None, split: str = "train"
) -> Path:
    """A run that was killed after its last step."""
    (folder / "samples").mkdir(parents=True, exist_ok=True)
    description = {"recipe": RECIPE | (recipe or {}), "inputs": {}, "versions": {}, "git": None, "trackers": {}}
    (folder / "run.json").write_text(json.dumps(description))
    (folder / "recipe.yaml").write_text("stage: rl\n")
    for step, groups in steps.items():
        write_samples(folder / "samples" / f"{split}_{step:06d}.parquet", groups)
    with (folder / "metrics.jsonl").open("a") as file:
        for step, groups in steps.items():
            rewards = [score.value for group in groups for score in group.scores if score.value is not None]
            mean = sum(rewards) / len(rewards) if rewards else None
            file.write(json.dumps({"step": step, "reward": mean, "time/step_s": 2.0}) + "\n")
    return folder
