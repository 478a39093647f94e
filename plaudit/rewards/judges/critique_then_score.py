"""Critique, then score: one model writes a critique of the response, another reward scores response and critique together.

The second reward is a `scalar_model` (critique-then-BT) or a `judge`. It scores response + `join` + critique, as if the policy had
written all of it; that string is the score's view, the critique is in its trace. If the first call fails, so does the sample: a
score without its critique would be on a different scale.

Two models that share the device take turns: all critiques of a step are generated with the critic loaded, then all scores with the
scorer loaded.
"""

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import model_validator

from plaudit.recipe.limits import Limits
from plaudit.recipe.rewards import OneReward, RewardSettings
from plaudit.rewards.cache import keys
from plaudit.rewards.judges.judge import Judge
from plaudit.rewards.judges.model_rewards import JudgeReward, LiveJudgeReward, Reply, shortened
from plaudit.rewards.judges.scalar_model import ScalarModel
from plaudit.rewards.judges.templates import Unrenderable
from plaudit.rewards.reward import PREPARED, LiveReward, Loadable, Reward, build
from plaudit.types import Group, Sample, Score


class CritiqueThenScore(JudgeReward):
    kind: Literal["critique_then_score"]
    """A critique first, then a score of response and critique."""
    scorer: OneReward
    """The reward that scores them: kind scalar_model or judge, with its own model."""
    join: str = "\n\nCritique:\n"
    """Text between response and critique."""

    @model_validator(mode="after")
    def _check_scorer(self) -> "CritiqueThenScore":
        inner = self.scorer
        if not isinstance(inner, ScalarModel | Judge):
            raise ValueError(f"scorer must be of kind scalar_model or judge, not {inner.kind}")
        common = {
            name: info.default for name, info in RewardSettings.model_fields.items() if name not in ("kind", "name", "limits")
        }
        changed = [name for name, default in common.items() if getattr(inner, name) != default]
        # Only limits on calls apply to a scorer: groups are scored by the reward around it.
        of_groups = {name: info.default for name, info in Limits.model_fields.items()}
        changed += [f"limits.{name}" for name, default in of_groups.items() if getattr(inner.limits, name) != default]
        if changed:
            raise ValueError(f"a scorer cannot have {', '.join(changed)}; set it on the reward around it")
        return self

    @property
    def default_template(self) -> str:
        return "critique"

    @property
    def files(self) -> list[Path]:
        return [*self.scorer.files, *super().files]

    @property
    def own_files(self) -> list[Path]:
        return [*self.scorer.own_files, *super().own_files]

    @property
    def models(self) -> list[str]:
        return [*self.scorer.models, *super().models]

    @property
    def waits_for_all(self) -> bool:
        return super().waits_for_all or (isinstance(self.scorer, Reward) and self.scorer.waits_for_all)

    @property
    def rounded_together(self) -> bool:
        return isinstance(self.scorer, Reward) and self.scorer.rounded_together

    def build(self) -> "LiveCritiqueThenScore":
        return LiveCritiqueThenScore(self)


class LiveCritiqueThenScore(LiveJudgeReward[CritiqueThenScore]):
    def __init__(self, settings: CritiqueThenScore):
        super().__init__(settings)
        self._scorer = build(settings.scorer)
        self._critiques: dict[str, Reply[str]] = {}

    @property
    def inner(self) -> dict[str, LiveReward]:
        return {"scorer": self._scorer}

    @property
    def served_names(self) -> list[str]:
        return [*self._scorer.served_names, *super().served_names]

    async def open(self) -> None:
        for error in await asyncio.gather(super().open(), self._scorer.open(), return_exceptions=True):
            if error is not None:
                raise error

    @property
    def phases(self) -> list[Loadable | None]:
        [critic], [scorer] = super().phases, self._scorer.phases
        return [critic] if critic is scorer else [critic, scorer]

    async def close(self) -> None:
        await asyncio.gather(super().close(), self._scorer.close())

    async def score(self, groups: Sequence[Group]) -> list[list[Score]]:
        return list(await asyncio.gather(*map(self._score, groups)))

    async def prepare(self, groups: Sequence[Group], phase: int) -> list[list[Score]]:
        return list(await asyncio.gather(*map(self._prepare, groups)))

    async def _prepare(self, group: Group) -> list[Score]:
        try:
            critiques = await self._criticise(group)
        except Unrenderable as error:
            return [Score(None, failure=error.failure, view=sample.text) for sample in group.samples]
        self._critiques |= zip(keys("", group, scores_alone=True), critiques, strict=True)
        pairs = zip(critiques, group.samples, strict=True)
        return [PREPARED if reply.failure is None else reply.failed_score(sample.text) for reply, sample in pairs]

    def forget(self) -> None:
        self._critiques.clear()

    async def _criticise(self, group: Group) -> list[Reply[str]]:
        questions = [await self.build_request(group.prompt, response=sample.text) for sample in group.samples]
        # A truncated critique is still a critique.
        return await self.query(questions, lambda _, text: text, complete=False)

    async def _score(self, group: Group) -> list[Score]:
        known = [self._critiques.get(key) for key in keys("", group, scores_alone=True)]
        critiques = [reply for reply in known if reply is not None]
        if len(critiques) < len(known):
            try:
                critiques = await self._criticise(group)
            except Unrenderable as error:
                return [Score(None, failure=error.failure, view=sample.text) for sample in group.samples]
        scores = {i: reply.failed_score(group.samples[i].text) for i, reply in enumerate(critiques) if reply.value is None}
        left = [i for i in range(len(critiques)) if i not in scores]
        if left:
            joined = [self._joined(group.samples[i], critiques[i]) for i in left]
            [scored] = await self._scorer.score([dataclasses.replace(group, samples=tuple(joined))])
            for i, score in zip(left, scored, strict=True):
                trace = {**score.trace, "critique": shortened(critiques[i].value or "")}
                scores[i] = dataclasses.replace(score, trace=trace)
        return [scores[i] for i in range(len(group.samples))]

    def _joined(self, sample: Sample, critique: Reply[str]) -> Sample:
        return dataclasses.replace(sample, text=f"{sample.text}{self.settings.join}{critique.value}")
