"""Combines the scores of a sample's rewards into one.

For each reward that applies to the sample:

    x = clip(scale · value, bounds) or the recipe's value for malformed answers and failures
    x = (x − mean) / (std + eps)    if normalised: over its group (divisor n − 1, as in GRPO), or over all values so far
    total = combine(total, weight · x)      in the order of the recipe; the first reward starts the total

A reward of weight 0 is only measured: it appears in the parts, and its failure drops no sample. Parts are x before normalisation. A
dropped sample (one that lacks a value it needs) counts in no mean and no standard deviation.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass

from plaudit.objectives.normalise import standardise
from plaudit.recipe import RewardSettings
from plaudit.types import DECLINED, LARGEST_REWARD, Failure, Group, Prompt, Score

OPERATIONS: Mapping[str, Callable[[float, float], float]] = {
    "add": lambda a, b: a + b,
    "multiply": lambda a, b: a * b,
    "min": min,
    "max": max,
}
NO_REWARD = "no_reward"


@dataclass
class RunningMoments:
    """Mean and standard deviation of all values so far (Welford's algorithm)."""

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
        return standardise(x, self.mean, std) if self.count > 1 else 0.0


def combine(
    rewards: Sequence[RewardSettings],
    group: Group,
    by_reward: Sequence[Sequence[Score]],
    running: Mapping[str, RunningMoments] | None,
) -> tuple[Score, ...]:
    """A group's scores, by reward and sample, combined into one per sample. With `running` None (validation) nothing is normalised,
    so that values are comparable between validations."""
    counted = effective_values(rewards, by_reward)
    failures = blocking_failures(rewards, group.prompt, by_reward, counted)
    valid = [why is None for why in failures]
    joined = [
        list(values) if running is None else _normalised(reward, values, running, valid)
        for reward, values in zip(rewards, counted, strict=True)
    ]
    scores = []
    for i in range(len(group.samples)):
        parts = _parts(rewards, [scores[i] for scores in by_reward], [values[i] for values in counted])
        total = _total(rewards, [values[i] for values in joined]) if valid[i] else None
        failure = failures[i]
        if total is not None and not abs(total) <= LARGEST_REWARD:
            total, failure = None, _too_large(f"the combined reward is {total:g}", total)
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


def effective_values(rewards: Sequence[RewardSettings], by_reward: Sequence[Sequence[Score]]) -> list[list[float | None]]:
    return [[effective_value(reward, score) for score in scores] for reward, scores in zip(rewards, by_reward, strict=True)]


def effective_value(reward: RewardSettings, score: Score) -> float | None:
    """The value used in training: the recipe's where the answer is malformed or the reward failed; None if there is none."""
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
    reward: RewardSettings, values: Sequence[float | None], running: Mapping[str, RunningMoments], valid: Sequence[bool]
) -> list[float | None]:
    if reward.normalise == "none":
        return list(values)
    if reward.normalise == "running":
        return [None if x is None else running[reward.label].normalised(x) for x in values]
    counted = [x for x, ok in zip(values, valid, strict=True) if x is not None and ok]
    if len(counted) < 2:
        return [None if x is None else 0.0 for x in values]
    mean, std = statistics.fmean(counted), statistics.stdev(counted)
    # Equal values may differ from their mean by rounding, which dividing by a std near 0 would amplify.
    flat = max(counted) == min(counted)
    return [None if x is None else 0.0 if flat else standardise(x, mean, std) for x in values]


def _total(rewards: Sequence[RewardSettings], values: Sequence[float | None]) -> float:
    total: float | None = None
    for reward, x in zip(rewards, values, strict=True):
        if reward.weight != 0 and x is not None:
            term = reward.weight * x
            total = term if total is None else OPERATIONS[reward.combine](total, term)
    return 0.0 if total is None else total  # None: every gate is closed


def _parts(rewards: Sequence[RewardSettings], scores: Sequence[Score], counted: Sequence[float | None]) -> dict[str, float]:
    parts: dict[str, float] = {}
    for reward, score, value in zip(rewards, scores, counted, strict=True):
        if value is not None and abs(value) <= LARGEST_REWARD:  # a reward that is only measured may be scaled beyond
            parts[reward.label] = value
        parts |= {f"{reward.label}/{part}": x for part, x in score.parts.items()}
    return parts


def blocking_failures(
    rewards: Sequence[RewardSettings],
    prompt: Prompt,
    by_reward: Sequence[Sequence[Score]],
    counted: Sequence[Sequence[float | None]],
) -> list[Failure | None]:
    """For each sample: the first failure that leaves it without a value."""
    samples = range(len(by_reward[0]))
    if not any_reward_applies(rewards, prompt):
        return [Failure(NO_REWARD, f"no reward's `when` matches this row (data_source {prompt.data_source!r})") for _ in samples]
    needed = labels_needed(rewards)
    return [
        _blocking_failure(rewards, needed, [scores[i] for scores in by_reward], [values[i] for values in counted]) for i in samples
    ]


def _blocking_failure(
    rewards: Sequence[RewardSettings], needed: Set[str], scores: Sequence[Score], counted: Sequence[float | None]
) -> Failure | None:
    for reward, score, x in zip(rewards, scores, counted, strict=True):
        if reward.label not in needed:
            continue
        if score.failure is not None and isinstance(reward.on_failure, str):
            return Failure(score.failure.cause, f"{reward.label}: {score.failure.message}")
        for made in () if x is None else (x, reward.weight * x):
            if not abs(made) <= LARGEST_REWARD:
                what = f"{reward.label}: scale {reward.scale:g} and weight {reward.weight:g} make it {made:g}"
                return _too_large(what, made)
    weighted = [score for reward, score in zip(rewards, scores, strict=True) if reward.weight != 0]
    if any(score is DECLINED for score in weighted) and not any(score.applies for score in weighted):
        return Failure(NO_REWARD, "no reward applies to this response: those that were called returned None")
    return None


def _too_large(what: str, value: float) -> Failure:
    if math.isnan(value):
        return Failure("not_a_number", what)
    return Failure("too_large", f"{what}; rewards are within ±{LARGEST_REWARD:g}")


def labels_needed(rewards: Sequence[RewardSettings]) -> set[str]:
    """Labels of the rewards with a weight, and of their gates: a gate that failed is neither open nor closed."""
    needed: set[str] = set()
    for reward in reversed(rewards):  # a gate is listed before the rewards it gates
        if reward.weight != 0 or reward.label in needed:
            needed.add(reward.label)
            needed |= {reward.gate.reward} if reward.gate else set()
    return needed


def any_reward_applies(rewards: Sequence[RewardSettings], prompt: Prompt) -> bool:
    """Whether any reward with a weight applies to this prompt."""
    applies: dict[str, bool] = {}
    for reward in rewards:
        applies[reward.label] = reward.applies_to(prompt) and (reward.gate is None or applies[reward.gate.reward])
    return any(reward.weight != 0 and applies[reward.label] for reward in rewards)
