"""A step's scores as metrics. A metric without data (no sample has a value, no group has two samples) is left out, not zero."""

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from plaudit.recipe import RLRecipe
from plaudit.rewards.reward import read_answer
from plaudit.statistics.group_spread import group_spread
from plaudit.statistics.prompt_samples import PromptSamples
from plaudit.types import Score, ScoredGroup

MAX_SOURCES = 50
"""Data sources with metrics of their own: a data set may name each row's."""


def metrics(scored: Sequence[ScoredGroup]) -> dict[str, float]:
    """Means over samples, and counts. A dropped sample (no value) is in the counts, but in no statistic of the reward."""
    scores = _scores(scored)
    if not scores:
        return {}
    values = [score.value for score in scores if score.value is not None]
    result: dict[str, float] = {}
    if values:
        result["reward"] = statistics.fmean(values)
        result["reward_std"] = statistics.pstdev(values)
        result["reward_min"] = min(values)
        result["reward_max"] = max(values)
    result |= _parts(scores)
    result["malformed"] = statistics.fmean(score.malformed for score in scores)
    result["dropped"] = float(len(scores) - len(values))
    if several := [group for group in scored if len(group.scores) > 1]:
        result["groups_without_signal"] = statistics.fmean(not has_signal(group) for group in several)
        result |= _spreads(several)
    causes = Counter(cause for name, score in _by_reward(scored) if score.failure for cause in _keys(name, score.failure.cause))
    return result | {f"failures/{key}": float(count) for key, count in sorted(causes.items())}


def metrics_by_source(scored: Sequence[ScoredGroup]) -> dict[str, float]:
    """`SOURCE/reward` and `SOURCE/parts/…` for the rows of each data source; of more than MAX_SOURCES, the most frequent ones."""
    result = {f"{source}/reward": reward for source, reward in rewards_by_source(scored).items()}
    for source, groups in _sources(scored):
        result |= {f"{source}/{name}": mean for name, mean in _parts(_scores(groups)).items()}
    return dict(sorted(result.items()))


def rewards_by_source(scored: Sequence[ScoredGroup]) -> dict[str, float]:
    """The mean reward of each data source, the most frequent one first."""
    values = {source: [score.value for score in _scores(groups) if score.value is not None] for source, groups in _sources(scored)}
    return {source: statistics.fmean(found) for source, found in values.items() if found}


def metrics_of_k(scored: Sequence[ScoredGroup], recipe: RLRecipe) -> dict[str, float]:
    """validation.metrics: means over prompts, and `SOURCE/pass@4` over those of each data source. A prompt with fewer than k values
    is left out."""
    settings = recipe.validation
    if not settings.metrics:
        return {}
    result: dict[str, float] = {}
    for prefix, groups in [("", scored), *((f"{source}/", groups) for source, groups in _sources(scored))]:
        samples = [_samples(group, recipe) for group in groups]
        for name, (kind, k) in zip(settings.metrics, settings.metrics_of_k, strict=True):
            known = [value for one, reward in samples if not math.isnan(value := _value(kind, k, one, reward))]
            result |= {f"{prefix}{name}": statistics.fmean(known)} if known else {}
    return result


def _samples(group: ScoredGroup, recipe: RLRecipe) -> tuple[PromptSamples, np.ndarray]:
    """A prompt's samples by what counts, and their combined rewards."""
    gold = recipe.validation.gold
    counted = group.scores if gold is None else group.by_reward[gold]
    rewards = [reward for reward in recipe.rewards if gold in (None, reward.label)]
    answers = [
        read_answer(rewards, {name: scores[i].view for name, scores in group.by_reward.items() if scores[i].applies})
        for i in range(len(group.scores))
    ]
    values, combined = (np.array([score.value for score in scores], dtype=np.float64) for scores in (counted, group.scores))
    return PromptSamples(values, answers, recipe.validation.threshold), combined


def _value(kind: str, k: int, samples: PromptSamples, reward: np.ndarray) -> float:
    match kind:
        case "pass":
            return samples.pass_at(k)
        case "majority":
            return samples.majority_at(k)
    return samples.best_of(k, reward)


def _sources(scored: Sequence[ScoredGroup]) -> list[tuple[str, list[ScoredGroup]]]:
    """The groups of each data source, the most frequent one first."""
    sources: dict[str, list[ScoredGroup]] = {}
    for group in scored:
        if group.group.prompt.data_source:
            sources.setdefault(group.group.prompt.data_source, []).append(group)
    return sorted(sources.items(), key=lambda item: -len(_scores(item[1])))[:MAX_SOURCES]


def _scores(groups: Sequence[ScoredGroup]) -> list[Score]:
    return [score for group in groups for score in group.scores]


def _parts(scores: Sequence[Score]) -> dict[str, float]:
    return {
        f"parts/{part}": statistics.fmean(score.parts[part] for score in scores if part in score.parts)
        for part in sorted({part for score in scores for part in score.parts})
    }


def _spreads(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Of each reward, how much it differs within groups, and in which share of them it does."""
    numbers = np.repeat(np.arange(len(groups)), [len(group.scores) for group in groups])
    result: dict[str, float] = {}
    for name in sorted({name for group in groups for name in group.by_reward}):
        found = group_spread(np.array([score.parts.get(name, np.nan) for score in _scores(groups)]), numbers)
        result |= {} if found is None else {f"group_std/{name}": found.spread, f"signal/{name}": found.signal}
    return result


def has_signal(group: ScoredGroup) -> bool:
    """Whether its values differ: a group of equal values has advantage 0 and trains nothing."""
    return len({score.value for score in group.scores if score.value is not None}) > 1


def _by_reward(scored: Sequence[ScoredGroup]) -> Iterator[tuple[str, Score]]:
    return ((name, score) for group in scored for name, scores in group.by_reward.items() for score in scores)


def _keys(name: str, cause: str) -> tuple[str, str]:
    return cause, f"{name}/{cause}"
