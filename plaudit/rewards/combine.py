"""What a sample's rewards say together.

Of each reward, for each sample it was asked about:

    x = clip(scale · value, bounds) or what the recipe states for malformed answers and failures
    x = (x − mean) / (std + eps)    if it is to be normalised: by its group (divisor n − 1, as GRPO), or by all values so far
    total = combine(total, weight · x)      in the order of the recipe; the first one begins

A reward of weight 0 is measured only: it appears in the parts, and its failure takes no sample away. Parts are x before it is
normalised. A sample without a value it needs (dropped) counts in no mean and no deviation.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence, Set
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
    rewards: Sequence[RewardSettings],
    group: Group,
    by_reward: Sequence[Sequence[Score]],
    running: Mapping[str, Running] | None,
) -> tuple[Score, ...]:
    """A group's scores, by reward and sample, as one for each sample. Without running means nothing is normalised: values of a
    validation must be comparable from one to the next."""
    counted = counted_values(rewards, by_reward)
    missing = missing_values(rewards, group.prompt, by_reward, counted)
    valid = [why is None for why in missing]
    joined = [
        list(values) if running is None else _normalised(reward, values, running, valid)
        for reward, values in zip(rewards, counted, strict=True)
    ]
    scores = []
    for i in range(len(group.samples)):
        parts = _parts(rewards, [scores[i] for scores in by_reward], [values[i] for values in counted])
        total = _total(rewards, [values[i] for values in joined]) if valid[i] else None
        failure = missing[i]
        if total is not None and not math.isfinite(total):
            total, failure = None, Failure("not_a_number", f"the rewards come to {total:g} together")
        if total is not None and joined != counted:
            parts["unnormalised"] = _total(rewards, [values[i] for values in counted])
        scores.append(
            Score(
                value=total,
                parts=parts,
                malformed=any(scores[i].malformed for scores in by_reward),
                failure=failure,
                view=by_reward[0][i].view if len(by_reward) == 1 else None,
            )
        )
    return tuple(scores)


def counted_values(rewards: Sequence[RewardSettings], by_reward: Sequence[Sequence[Score]]) -> list[list[float | None]]:
    return [[counted_value(reward, score) for score in scores] for reward, scores in zip(rewards, by_reward, strict=True)]


def counted_value(reward: RewardSettings, score: Score) -> float | None:
    """What counts of a score: the recipe's value where the answer is malformed or the reward has failed; None if nothing does."""
    if score.failure is not None:
        return None if isinstance(reward.on_failure, str) else reward.on_failure
    if (score.malformed or score.unjudged) and reward.malformed is not None:
        return reward.malformed
    if score.value is None:
        return None
    low, high = reward.bounds or (None, None)
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


def _total(rewards: Sequence[RewardSettings], values: Sequence[float | None]) -> float:
    total: float | None = None
    for reward, x in zip(rewards, values, strict=True):
        if reward.weight != 0 and x is not None:
            term = reward.weight * x
            total = term if total is None else OPERATIONS[reward.combine](total, term)
    return 0.0 if total is None else total  # every gate is closed


def _parts(rewards: Sequence[RewardSettings], scores: Sequence[Score], counted: Sequence[float | None]) -> dict[str, float]:
    parts: dict[str, float] = {}
    for reward, score, value in zip(rewards, scores, counted, strict=True):
        parts |= ({} if value is None else {reward.label: value}) | {f"{reward.label}/{part}": x for part, x in score.parts.items()}
    return parts


def missing_values(
    rewards: Sequence[RewardSettings],
    prompt: Prompt,
    by_reward: Sequence[Sequence[Score]],
    counted: Sequence[Sequence[float | None]],
) -> list[Failure | None]:
    """For each sample: the first failure without which it has no value."""
    samples = range(len(by_reward[0]))
    if not has_reward(rewards, prompt):
        return [Failure(NO_REWARD, f"no reward's `when` matches this row (data_source {prompt.data_source!r})") for _ in samples]
    needed = _needed(rewards)
    return [_missing(rewards, needed, [scores[i] for scores in by_reward], [values[i] for values in counted]) for i in samples]


def _missing(
    rewards: Sequence[RewardSettings], needed: Set[str], scores: Sequence[Score], counted: Sequence[float | None]
) -> Failure | None:
    for reward, score, x in zip(rewards, scores, counted, strict=True):
        if reward.label not in needed:
            continue
        if score.failure is not None and isinstance(reward.on_failure, str):
            return Failure(score.failure.cause, f"{reward.label}: {score.failure.message}")
        if x is not None and not math.isfinite(reward.weight * x):
            return Failure("not_a_number", f"{reward.label}: scale {reward.scale:g} and weight {reward.weight:g} make it {x:g}")
    return None


def _needed(rewards: Sequence[RewardSettings]) -> set[str]:
    """Labels of those that count, and of those that open their gates: a gate that has failed is neither open nor closed."""
    needed: set[str] = set()
    for reward in reversed(rewards):  # a gate stands above what it opens
        if reward.weight != 0 or reward.label in needed:
            needed.add(reward.label)
            needed |= {reward.gate.reward} if reward.gate else set()
    return needed


def has_reward(rewards: Sequence[RewardSettings], prompt: Prompt) -> bool:
    """Whether anything that counts is said of this prompt's samples."""
    applies: dict[str, bool] = {}
    for reward in rewards:
        applies[reward.label] = reward.applies_to(prompt) and (reward.gate is None or applies[reward.gate.reward])
    return any(reward.weight != 0 and applies[reward.label] for reward in rewards)
