"""What a sample's rewards say together.

Of each reward, for each sample it was asked about:

    x = clip(scale · value)         or what the recipe states for malformed answers and failures
    x = (x − mean) / (std + eps)    if it is to be normalised: by its group (divisor n − 1, as GRPO), or by all values so far
    total = combine(total, weight · x)      in the order of the recipe; the first one begins

A reward of weight 0 is measured only: it appears in the parts, and its failure takes no sample away. Parts are x before it is
normalised. A sample without a value it needs (dropped) counts in no mean and no deviation.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from plaudit.recipe import RewardSettings
from plaudit.types import Failure, Group, Prompt, Score

EPS = 1e-6
OPERATIONS: Mapping[str, Callable[[float, float], float]] = {
    "add": lambda a, b: a + b,
    "multiply": lambda a, b: a * b,
    "min": min,
    "max": max,
}
NO_REWARD = "no_reward"


@dataclass
class Running:
    """Mean and deviation of all values so far (Welford, merged step by step)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """Σ (x − mean)²."""

    def add(self, values: Sequence[float]) -> None:
        for x in values:
            self.count += 1
            off = x - self.mean
            self.mean += off / self.count
            self.squares += off * (x - self.mean)

    def normalised(self, x: float) -> float:
        std = math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0
        return (x - self.mean) / (std + EPS) if self.count > 1 else 0.0


def combine(
    rewards: Sequence[RewardSettings], group: Group, by_reward: Sequence[Sequence[Score]], running: Mapping[str, Running]
) -> tuple[Score, ...]:
    """A group's scores, by reward and sample, as one for each sample."""
    counted = [
        [counted_value(reward, score) for score in scores] for reward, scores in zip(rewards, by_reward, strict=True)
    ]  # fmt: skip
    needed = [reward.weight != 0 for reward in rewards]
    missing = [_missing(rewards, [scores[i] for scores in by_reward], group.prompt) for i in range(len(group.samples))]
    joined = [
        _normalised(reward, values, running, [why is None for why in missing])
        for reward, values in zip(rewards, counted, strict=True)
    ]
    return tuple(
        Score(
            value=_total(rewards, [values[i] for values in joined], needed) if missing[i] is None else None,
            parts=_parts(rewards, [scores[i] for scores in by_reward], [values[i] for values in counted]),
            malformed=any(scores[i].malformed for scores in by_reward),
            failure=missing[i],
            view=by_reward[0][i].view if len(by_reward) == 1 else None,
        )
        for i in range(len(group.samples))
    )


def counted_value(reward: RewardSettings, score: Score) -> float | None:
    """What counts of a score: the recipe's value where the answer is malformed or the reward has failed; None if nothing does."""
    if score.failure is not None:
        return None if isinstance(reward.on_failure, str) else reward.on_failure
    if score.malformed and reward.malformed is not None:
        return reward.malformed
    if score.value is None:
        return None
    low, high = reward.clip or (None, None)
    x = reward.scale * score.value
    return min(max(x, -math.inf if low is None else low), math.inf if high is None else high)


def _normalised(
    reward: RewardSettings, values: Sequence[float | None], running: Mapping[str, Running], valid: Sequence[bool]
) -> list[float | None]:
    if reward.normalise == "none":
        return list(values)
    if reward.normalise == "running":
        return [None if x is None else running[reward.label].normalised(x) for x in values]
    counted = [x for x, ok in zip(values, valid, strict=True) if x is not None and ok]
    if len(counted) < 2:
        return [None if x is None else 0.0 for x in values]
    mean, std = statistics.fmean(counted), statistics.stdev(counted)
    # Equal values differ from their mean by rounding, which a deviation near 0 would make large.
    flat = max(counted) == min(counted)
    return [None if x is None else 0.0 if flat else (x - mean) / (std + EPS) for x in values]


def _total(rewards: Sequence[RewardSettings], values: Sequence[float | None], needed: Sequence[bool]) -> float:
    total: float | None = None
    for reward, x, counts in zip(rewards, values, needed, strict=True):
        if counts and x is not None:
            term = reward.weight * x
            total = term if total is None else OPERATIONS[reward.combine](total, term)
    return 0.0 if total is None else total  # every gate is closed


def _parts(rewards: Sequence[RewardSettings], scores: Sequence[Score], counted: Sequence[float | None]) -> dict[str, float]:
    parts: dict[str, float] = {}
    for reward, score, value in zip(rewards, scores, counted, strict=True):
        parts |= ({} if value is None else {reward.label: value}) | {f"{reward.label}/{part}": x for part, x in score.parts.items()}
    return parts


def _missing(rewards: Sequence[RewardSettings], scores: Sequence[Score], prompt: Prompt) -> Failure | None:
    """The first failure without which the sample has no value."""
    if not has_reward(rewards, prompt):
        return Failure(NO_REWARD, f"no reward's `when` matches this row (data_source {prompt.data_source!r})")
    for reward, score in zip(rewards, scores, strict=True):
        if score.failure is not None and reward.weight != 0 and isinstance(reward.on_failure, str):
            return Failure(score.failure.cause, f"{reward.label}: {score.failure.message}")
    return None


def has_reward(rewards: Sequence[RewardSettings], prompt: Prompt) -> bool:
    """Whether anything that counts is said of this prompt's samples."""
    return any(reward.weight != 0 and reward.applies_to(prompt) for reward in rewards)
