"""What a sample's rewards say together: value = Σ weight · value, over the rewards that are trained on.

A reward of weight 0 is measured only: it appears in the parts, and its failure takes no sample away.
"""

from collections.abc import Mapping, Sequence

from plaudit.recipe import RewardSettings
from plaudit.types import Failure, Score


def combine(rewards: Sequence[RewardSettings], scores: Sequence[Score]) -> Score:
    """One sample's scores, in the order of the rewards, as one."""
    counted = [counted_value(reward, score) for reward, score in zip(rewards, scores, strict=True)]
    parts: dict[str, float] = {}
    for reward, score, value in zip(rewards, scores, counted, strict=True):
        parts |= _parts(reward.label, score, value)
    missing = _missing(rewards, scores, counted)
    total = sum(reward.weight * value for reward, value in zip(rewards, counted, strict=True) if value is not None)
    return Score(
        value=None if missing else total,
        parts=parts,
        malformed=any(score.malformed for score in scores),
        failure=missing,
        view=scores[0].view if len(scores) == 1 else None,
    )


def counted_value(reward: RewardSettings, score: Score) -> float | None:
    """What counts of a score: the recipe's value where the answer is malformed or the reward has failed; None if nothing does."""
    if score.failure is not None:
        return None if isinstance(reward.on_failure, str) else reward.on_failure
    if score.malformed and reward.malformed is not None:
        return reward.malformed
    return score.value


def _parts(label: str, score: Score, value: float | None) -> Mapping[str, float]:
    whole = {} if value is None else {label: value}
    return whole | {f"{label}/{part}": x for part, x in score.parts.items()}


def _missing(rewards: Sequence[RewardSettings], scores: Sequence[Score], counted: Sequence[float | None]) -> Failure | None:
    """The first failure without which the sample has no value."""
    for reward, score, value in zip(rewards, scores, counted, strict=True):
        if value is None and reward.weight != 0:
            assert score.failure is not None, "a score has a value or a failure"
            return Failure(score.failure.cause, f"{reward.label}: {score.failure.message}")
    return None
