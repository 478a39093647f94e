"""Rows scored by a reward that is evaluated: one resumable file per reward, with each judge's prompt and answer."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plaudit.audit.certificate import digest_rewards
from plaudit.errors import PlauditError
from plaudit.inputs import load_rewards
from plaudit.loops.score import LocatedRow, RowsToScore, ScoreJob, score
from plaudit.recipe import RewardSettings
from plaudit.recipe.rewards import nested_rewards
from plaudit.reward_models.model_registry import UsageTotals
from plaudit.rewards.judges.group_judge import GroupJudge
from plaudit.rewards.judges.pairwise_judge import PairwiseJudge
from plaudit.rewards.reward import Reward


@dataclass(frozen=True)
class EvaluatedReward:
    """The rewards of a recipe, which are evaluated together, by a name."""

    name: str
    recipe: Path
    rewards: tuple[RewardSettings, ...]

    @property
    def compares(self) -> bool:
        """Whether a response's value depends on the others, and so perhaps on their order."""
        inside = [one for reward in self.rewards if reward.weight for _, one in nested_rewards(reward, reward.label)]
        return any(isinstance(one, Reward) and not one.scores_alone for one in inside)

    @property
    def identity(self) -> dict[str, Any]:
        return {"recipe": str(self.recipe), "rewards": digest_rewards(self.rewards)}


def load_evaluated(recipes: Sequence[str]) -> list[EvaluatedReward]:
    """The rewards of recipes, each named by its file, or as in NAME=R.yaml."""
    given = [_named(recipe) for recipe in recipes]
    stems = [name or path.stem for name, path in given]
    names = [name or (path.stem if stems.count(path.stem) == 1 else f"{path.parent.name}/{path.stem}") for name, path in given]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise PlauditError(f"--rewards: two of them are called {twice!r}; name them: --rewards first={given[0][1]} …")
    return [EvaluatedReward(name, path, load_rewards(path)) for name, (_, path) in zip(names, given, strict=True)]


def _named(recipe: str) -> tuple[str | None, Path]:
    name, equals, path = recipe.partition("=")
    return (name, Path(path)) if equals and not Path(recipe).exists() else (None, Path(recipe))


def in_given_order(reward: RewardSettings) -> RewardSettings:
    """The same reward, but a judge that compares shows the responses once, in the order of the samples."""
    changes: dict[str, Any] = {
        name: in_given_order(inner)
        for name in type(reward).model_fields
        if isinstance(inner := getattr(reward, name), RewardSettings)
    }
    if isinstance(reward, PairwiseJudge):
        changes |= {"order": "given", "both_orders": False}
    if isinstance(reward, GroupJudge):
        changes |= {"order": "given"}
    return reward.model_copy(update=changes)


@dataclass(frozen=True)
class RewardScores:
    values: list[list[float | None]]
    """The reward of each response of each row."""
    failed: int
    """Rows on which a reward failed."""
    malformed: int
    """Responses."""
    failures: Counter[str]
    """Responses without a value, by cause."""
    messages: Mapping[str, str]
    """The first message of each cause."""
    usage: Mapping[str, UsageTotals] = field(default_factory=dict)
    per_s: float = 0.0
    """Responses scored per second; 0 if all scores were there."""

    def report(self) -> dict[str, Any]:
        return {
            "failed": self.failed,
            "failures": dict(self.failures),
            "messages": dict(self.messages),
            "malformed": self.malformed,
            "usage": {name: dict(totals) for name, totals in self.usage.items()},
            "responses_per_s": round(self.per_s, 1),
        }


def score_rows(
    reward: EvaluatedReward, rows: Sequence[LocatedRow], folder: Path, identity: Mapping[str, Any], *, tokenizer: str | None = None
) -> RewardScores:
    """Score what the reward's file lacks, and again what failed."""
    out = folder / f"{reward.name.replace('/', '-')}.jsonl"
    settings = [in_given_order(one) for one in reward.rewards]
    to_score = RowsToScore(lambda: iter(rows), len(rows), identity)
    job = ScoreJob(settings, to_score, out, tokenizer, details=True, verb="eval", label=reward.name)
    summary = score(job)
    values, failed = [], 0
    with out.open(encoding="utf-8", newline="\n") as file:
        for line in file:
            row = json.loads(line)
            values.append(row["reward"] if isinstance(row["reward"], list) else [row["reward"]])
            failed += None in values[-1]
    return RewardScores(values, failed, summary.malformed, summary.failures, summary.messages, summary.models, summary.per_s)
