"""A cheap rule and a judge that costs something, in one value.

    only     the judge alone
    addon    1 where the rule passes; where it does not, judge_weight · judge, which is asked about these samples alone
    mixed    judge_weight · judge + (1 − judge_weight) · rule

A rule passes if it gives more than `pass_above`. Where the judge fails, so does the sample: the rule's verdict does not stand in
for it. Where the rule fails, the judge is not asked, unless `on_failure` of the rule gives a value to go on with.
"""

import asyncio
from collections.abc import Sequence
from typing import Literal

from pydantic import PrivateAttr, model_validator

from plaudit.recipe import RewardSettings
from plaudit.recipe.rewards import OneReward
from plaudit.rewards.asking import NOT_ASKED, Asker
from plaudit.rewards.combine import counted_value
from plaudit.rewards.reward import Reward, failed
from plaudit.types import Group, Score

OUTSIDE = ("when", "gate", "normalise", "weight", "combine", "cache", "max_failure_rate")
"""Settings that the whole cascade has."""


class Cascade(Reward):
    kind: Literal["cascade"]
    """A rule first, a judge where it is needed."""
    rule: OneReward | None = None
    """The rule: a reward of any kind. Not for mode: only."""
    judge: OneReward
    """The judge: a reward of any kind."""
    mode: Literal["only", "addon", "mixed"] = "addon"
    """How they become one value."""
    judge_weight: float = 1.0
    """What the judge's value is multiplied by; in mixed, its share."""
    pass_above: float = 0.5
    """A rule's value above this is a pass."""

    _askers: tuple[Asker | None, Asker] | None = PrivateAttr(None)

    @model_validator(mode="after")
    def _fits_together(self) -> "Cascade":
        if (self.rule is None) != (self.mode == "only"):
            raise ValueError("mode: only has no rule; addon and mixed need one")
        if self.mode == "mixed" and not 0.0 <= self.judge_weight <= 1.0:
            raise ValueError(f"mode: mixed shares 1 between judge and rule; judge_weight is {self.judge_weight:g}")
        for inner in self.inner:
            changed = [name for name in OUTSIDE if getattr(inner, name) != type(inner).model_fields[name].get_default()]
            if changed or inner.on_failure == "stop":
                names = ", ".join(changed) or "on_failure: stop"
                raise ValueError(f"{names}: a rule or judge inside a cascade cannot have that; the cascade can")
        return self

    @property
    def inner(self) -> list[RewardSettings]:
        return [reward for reward in (self.rule, self.judge) if reward is not None]

    async def open(self) -> None:
        askers = [Asker(reward) if isinstance(reward, Reward) else None for reward in (self.rule, self.judge)]
        assert askers[1] is not None, "settings become rewards when a recipe is read"
        self._askers = askers[0], askers[1]
        await asyncio.gather(*(asker.reward.open() for asker in askers if asker is not None))

    @property
    def waits_for_all(self) -> bool:
        return any(isinstance(reward, Reward) and reward.waits_for_all for reward in (self.rule, self.judge))

    async def load(self) -> None:
        for reward in (self.rule, self.judge):
            if isinstance(reward, Reward):
                await reward.load()

    async def unload(self) -> None:
        for reward in (self.rule, self.judge):
            if isinstance(reward, Reward):
                await reward.unload()

    async def close(self) -> None:
        for reward in (self.rule, self.judge):
            if isinstance(reward, Reward):
                await reward.close()

    async def score(self, groups: Sequence[Group]) -> list[list[Score]]:
        return list(await asyncio.gather(*map(self._score, groups)))

    async def _score(self, group: Group) -> list[Score]:
        assert self._askers is not None, "a reward is opened before it scores"
        rule, judge = self._askers
        ruled = [NOT_ASKED] * len(group.samples) if rule is None else list(await rule.ask(group))
        judged = await judge.ask(group, [self._needs_judge(score) for score in ruled])
        return [self._together(*both) for both in zip(ruled, judged, strict=True)]

    def _needs_judge(self, ruled: Score) -> bool:
        if self.rule is None:
            return True
        value = counted_value(self.rule, ruled)
        return value is not None and not (self.mode == "addon" and value > self.pass_above)

    def _together(self, ruled: Score, judged: Score) -> Score:
        parts: dict[str, float] = {}
        values: dict[str, float | None] = {"rule": None, "judge": None}
        for name, reward, score in (("rule", self.rule, ruled), ("judge", self.judge, judged)):
            if reward is None or not score.asked:
                continue
            values[name] = counted_value(reward, score)
            if values[name] is None:
                assert score.failure is not None
                return failed(score.failure.cause, f"{name}: {score.failure.message}", score.view)
            parts |= {name: values[name]} | {f"{name}/{part}": x for part, x in score.parts.items()}  # pyright: ignore
        rule, judge = values["rule"], values["judge"]
        if judge is None:
            assert rule is not None
            assert rule > self.pass_above, "without a judge's value the rule has passed it"
            value = 1.0
        elif self.mode == "mixed":
            assert rule is not None
            value = self.judge_weight * judge + (1.0 - self.judge_weight) * rule
        else:
            value = self.judge_weight * judge
        deciding = judged if judge is not None else ruled
        return Score(value, parts=parts, malformed=deciding.malformed, view=deciding.view, trace=deciding.trace)
