"""Score existing responses: the reward layer alone, for a notebook, another trainer, or `plaudit score`.

from plaudit.scoring import Scorer

with Scorer([{"kind": "exact"}]) as scorer:
    scorer.score([{"prompt": "2 + 2 =", "response": "4", "ground_truth": "4"}])
    # [{'reward': 1.0, 'parts': {'exact': 1.0}, 'malformed': False, 'failure': None, 'view': '4'}]
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

from plaudit.config import Draft
from plaudit.data.columns import has_several_responses
from plaudit.data.rollouts import parse_group
from plaudit.errors import DataError
from plaudit.input_files import InputFile, place_inputs
from plaudit.inputs import load_rewards, require_reward_files
from plaudit.recipe import RewardSettings, ScoreRecipe
from plaudit.rewards.functions.callables import reward_entries
from plaudit.rewards.reward import Reward
from plaudit.rewards.runner import RewardRunner
from plaudit.types import Group, Score, ScoredGroup

OneReward = Mapping[str, Any] | RewardSettings | Callable[..., Any]


class Scorer:
    """A recipe's rewards. They start with the first row; `close` (or the end of `with`) stops them.

    Not thread-safe. `max_failure_rate` does not apply: each failure is reported in its result. Only a key that a judge's server
    rejects raises an error, TrainingStopped.
    """

    def __init__(
        self,
        rewards: str | Path | OneReward | Sequence[OneReward],
        *,
        cache: str | Path | None = None,
        normalise: bool = False,
    ):
        """`rewards`: a recipe file, or a list as under `rewards:`, in which functions may stand for themselves; one alone needs no
        list. `cache`: a file to cache scores in. `normalise`: whether the rewards' `normalise` has an effect, for values to train
        on. (Normalised within its group, a response that is alone in it gets 0.)"""
        self._temporary = TemporaryDirectory(prefix="plaudit-")
        self._folder = Path(self._temporary.name)
        try:
            self.settings, self._functions = _settings(rewards, self._folder)
        except BaseException:
            self._temporary.cleanup()
            raise
        self._normalise = normalise
        self._cache = None if cache is None else Path(cache)
        self._runner: RewardRunner | None = None

    @property
    def rewards(self) -> list[Reward]:
        return [reward for reward in self.settings if isinstance(reward, Reward)]

    @property
    def runner(self) -> RewardRunner:
        if self._runner is None:
            for file in self._functions:  # `close` has removed them
                file.write(self._folder)
            self._runner = RewardRunner(self.settings, cache=self._cache, tolerant=True).__enter__()
        return self._runner

    def score(self, rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """For each row, in order: `reward` (None if a reward failed), `parts`, `malformed`, `failure`, `view` (by reward name if
        there are several rewards). For rows with `responses`, each of these is a list."""
        if isinstance(rows, Mapping):
            raise DataError("score() takes a list of rows, not a single row: put it into a list")
        rows = list(rows)
        groups = [parse_group(row, str(number), f"row {number}") for number, row in enumerate(rows, 1)]
        scored = self.score_groups(groups)
        return [result_of(group, many=has_several_responses(row)) for row, group in zip(rows, scored, strict=True)]

    def score_groups(self, groups: Iterable[Group]) -> list[ScoredGroup]:
        return self.runner.collect(groups, training=self._normalise)

    def close(self) -> None:
        try:
            if self._runner is not None:
                self._runner.close()
        finally:
            self._runner = None
            self._temporary.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _settings(rewards: Any, folder: Path) -> tuple[tuple[RewardSettings, ...], list[InputFile]]:
    """The rewards, and the files of functions among them, saved in `folder`."""
    if isinstance(rewards, str | Path):
        return load_rewards(Path(rewards)), []
    call = "Scorer()"
    draft = Draft(Path(call), {}, {}, call)
    draft.update({"rewards": reward_entries(rewards)})
    draft.tree, files = place_inputs(draft.tree, folder)
    recipe = draft.check("score").recipe
    assert isinstance(recipe, ScoreRecipe)
    for file in files:
        file.write(folder)
    require_reward_files(recipe)
    return recipe.rewards, files


def result_of(scored: ScoredGroup, *, many: bool, details: bool = False) -> dict[str, Any]:
    """A group's scores as columns of a row: lists if the row has `responses`, else single values. `details`: also each reward's own
    score, with what a judge was asked and answered."""
    rows = [
        result_of_sample(scored, i) | ({"by_reward": reward_scores(scored, i)} if details else {})
        for i in range(len(scored.scores))
    ]
    return {name: [row[name] for row in rows] for name in rows[0]} if many else rows[0]


def result_of_sample(scored: ScoredGroup, i: int) -> dict[str, Any]:
    score, by_reward = scored.scores[i], {name: scores[i] for name, scores in scored.by_reward.items()}
    views = {name: one.view for name, one in by_reward.items() if one.applies}
    return {
        "reward": score.value,
        "parts": dict(score.parts),
        "malformed": score.malformed,
        "failure": _failure(score, by_reward),
        "view": views if len(by_reward) > 1 else next(iter(views.values()), None),
    }


def reward_scores(scored: ScoredGroup, i: int) -> dict[str, dict[str, Any]]:
    """What each reward returned for a sample."""
    return {
        name: {
            "value": (score := scores[i]).value,
            "parts": dict(score.parts),
            "malformed": score.malformed,
            "failure": score.failure and {"reward": name, "cause": score.failure.cause, "message": score.failure.message},
            "view": score.view,
            "trace": dict(score.trace),
        }
        for name, scores in scored.by_reward.items()
    }


def _failure(score: Score, by_reward: Mapping[str, Score]) -> dict[str, str | None] | None:
    """Why there is no value; or a failure that does not affect the value."""
    name, failed = next(((name, one.failure) for name, one in by_reward.items() if one.failure is not None), (None, score.failure))
    return None if failed is None else {"reward": name, "cause": failed.cause, "message": failed.message}
