"""Groups of samples, and rewards that score them."""

from pathlib import Path
from textwrap import dedent

import numpy as np

from plaudit.rewards.functions.function import Function
from plaudit.rewards.reward import Reward
from plaudit.rewards.runner import RewardRunner
from plaudit.types import Failure, Group, Prompt, Sample, Score, ScoredGroup

NONE = np.zeros(0)


def group(*texts: str, truth="4", id="p", **prompt) -> Group:
    samples = tuple(Sample(id, i, NONE, text, "finished", NONE, NONE, 0) for i, text in enumerate(texts))
    return Group(Prompt(id, [{"role": "user", "content": "2 + 2?"}], ground_truth=truth, **prompt), NONE, samples)


def collect(reward: Reward, *groups: Group) -> list[ScoredGroup]:
    with RewardRunner([reward]) as rewards:
        return rewards.collect(groups)


def values(scored: ScoredGroup) -> list[float | None]:
    return [score.value for score in scored.scores]


def function(path: Path, **settings) -> Function:
    return Function(kind="function", path=str(path), **{"workers": 1, "max_failure_rate": 1.0, **settings})


def write_function(tmp_path: Path, body: str) -> Path:
    path = tmp_path / "reward.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(dedent(body))
    return path


BROKEN = Score(None, failure=Failure("timeout", "after 60 s"))
