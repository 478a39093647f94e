"""A cheap rule and an expensive judge, combined into one value.

    only     the judge alone
    addon    1 where the rule passes; elsewhere judge_weight · judge, which scores only those samples
    mixed    judge_weight · judge + (1 − judge_weight) · rule

The rule passes if its value exceeds `pass_above`. If the judge fails, so does the sample: the rule's value does not replace it. If
the rule fails, the judge is not called, unless the rule's `on_failure` gives a value to use instead.
"""

import asyncio
from collections.abc import Hashable, Sequence
from typing import Literal

from pydantic import model_validator

from plaudit.recipe import RewardSettings
from plaudit.recipe.rewards import OneReward
from plaudit.reward_models.backend import UNAUTHORISED
from plaudit.rewards.cache import keys
from plaudit.rewards.client import NOT_SCORED, RewardClient
from plaudit.rewards.combine import effective_value
from plaudit.rewards.reward import PREPARED, LiveReward, Loadable, Reward, build, failed
from plaudit.types import Group, Score

CASCADE_ONLY = ("when", "gate", "normalise", "weight", "combine", "cache", "max_failure_rate")
"""Settings of the cascade, not of the rewards in it."""


class Cascade(Reward):
    kind: Literal["cascade"]
    """A rule first, a judge where it is needed."""
    rule: OneReward | None = None
    """The rule: a reward of any kind. Not for mode: only."""
    judge: OneReward
    """The judge: a reward of any kind."""
    mode: Literal["only", "addon", "mixed"] = "addon"
    """How they are combined."""
    judge_weight: float = 1.0
    """Factor of the judge's value; in mixed, its share."""
    pass_above: float = 0.5
    """The rule passes if its value exceeds this."""

    @model_validator(mode="after")
    def _check_mode(self) -> "Cascade":
        if (self.rule is None) != (self.mode == "only"):
            raise ValueError("mode: only has no rule; addon and mixed need one")
        if self.mode == "mixed" and not 0.0 <= self.judge_weight <= 1.0:
            raise ValueError(f"mode: mixed shares 1 between judge and rule; judge_weight is {self.judge_weight:g}")
        for inner in self.inner:
            changed = [name for name in CASCADE_ONLY if getattr(inner, name) != type(inner).model_fields[name].get_default()]
            if changed or inner.on_failure == "stop":
                names = ", ".join(changed) or "on_failure: stop"
                raise ValueError(f"{names}: set this on the cascade, not on the rule or judge inside it")
        return self

    @property
    def inner(self) -> list[RewardSettings]:
        return [reward for reward in (self.rule, self.judge) if reward is not None]

    @property
    def checks_answer(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return isinstance(self.rule, Reward) and self.rule.checks_answer

    @property
    def reads_answers(self) -> bool:
        return self._reader is not None

    def read_answer(self, text: str) -> Hashable | None:
        """By its rule, or else its judge. `text` is what the one that decided saw."""
        return None if self._reader is None else self._reader.read_answer(text)

    @property
    def _reader(self) -> Reward | None:
        return next((inner for inner in self.inner if isinstance(inner, Reward) and inner.reads_answers), None)

    @property
    def scores_alone(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return all(reward.scores_alone for reward in self.inner if isinstance(reward, Reward))

    @property
    def rounded_together(self) -> bool:
        return any(reward.rounded_together for reward in self.inner if isinstance(reward, Reward))

    @property
    def waits_for_all(self) -> bool:
        return any(reward.waits_for_all for reward in self.inner if isinstance(reward, Reward))

    def build(self) -> "LiveCascade":
        return LiveCascade(self)


class LiveCascade(LiveReward[Cascade]):
    def __init__(self, settings: Cascade):
        super().__init__(settings)
        self._rule = None if settings.rule is None else RewardClient(build(settings.rule))
        self._judge = RewardClient(build(settings.judge))
        self._kept: dict[tuple[str, str], Score] = {}
        """Results of earlier passes, by name and sample: `ruled` (scores), `rule` and `judge` (failures)."""

    @property
    def inner(self) -> dict[str, LiveReward]:
        return ({} if self._rule is None else {"rule": self._rule.live}) | {"judge": self._judge.live}

    async def open(self) -> None:
        await asyncio.gather(*(live.open() for live in self.inner.values()))

    async def close(self) -> None:
        for live in self.inner.values():
            await live.close()

    @property
    def served_names(self) -> list[str]:
        return [name for live in self.inner.values() for name in live.served_names]

    async def score(self, groups: Sequence[Group]) -> list[list[Score]]:
        return list(await asyncio.gather(*map(self._score, groups)))

    async def _score(self, group: Group) -> list[Score]:
        ruled = await self._ruled(group)
        judged = await self._judge.score(group, [self._needs_judge(score) for score in ruled], self._recall("judge", group))
        return [self._together(*both) for both in zip(ruled, judged, strict=True)]

    async def _ruled(self, group: Group) -> list[Score]:
        rule = self._rule
        if rule is None:
            return [NOT_SCORED] * len(group.samples)
        known = self._recall("ruled", group)
        ruled = [score for score in known if score is not None]
        return ruled if len(ruled) == len(known) else list(await rule.score(group, None, self._recall("rule", group)))

    # Models that share the device: the rule's passes, then the judge's ------------------------------------------------

    @property
    def _passes(self) -> list[tuple[Loadable | None, list[tuple[str, int]]]]:
        """For each pass, the model on the device and the work done then: (`rule` or `judge`, its phase)."""
        passes: list[tuple[Loadable | None, list[tuple[str, int]]]] = []
        for name, live in self.inner.items():
            for phase, needed in enumerate(live.phases):
                if not passes or passes[-1][0] is not needed:
                    passes.append((needed, []))
                passes[-1][1].append((name, phase))
        return passes

    @property
    def phases(self) -> list[Loadable | None]:
        return [needed for needed, _ in self._passes]

    async def prepare(self, groups: Sequence[Group], phase: int) -> list[list[Score]]:
        _, parts = self._passes[phase]
        await asyncio.gather(*(self._prepare(group, parts) for group in groups))
        return [[PREPARED] * len(group.samples) for group in groups]  # failures are reported with the scores

    async def _prepare(self, group: Group, parts: Sequence[tuple[str, int]]) -> None:
        rule, judge = self._rule, self._judge
        for name, phase in parts:
            before = self._recall(name, group)
            if name == "judge":
                wanted = [self._needs_judge(score) for score in await self._ruled(group)]
                self._keep(name, group, await judge.prepare(group, wanted, phase, before))
            elif rule is not None and phase < len(rule.live.phases) - 1:
                self._keep(name, group, await rule.prepare(group, None, phase, before))
            elif rule is not None:
                self._keep("ruled", group, await rule.score(group, None, before))

    def _keep(self, name: str, group: Group, found: Sequence[Score | None]) -> None:
        names = keys("", group, scores_alone=self.settings.scores_alone)
        self._kept |= {(name, key): score for key, score in zip(names, found, strict=True) if score is not None}

    def _recall(self, name: str, group: Group) -> list[Score | None]:
        return [self._kept.get((name, key)) for key in keys("", group, scores_alone=self.settings.scores_alone)]

    def forget(self) -> None:
        self._kept.clear()
        for live in self.inner.values():
            live.forget()

    # Combining rule and judge -----------------------------------------------------------------------------------------

    def _needs_judge(self, ruled: Score) -> bool:
        if self.settings.rule is None:
            return True
        value = None if _key_rejected(ruled) else effective_value(self.settings.rule, ruled)
        return value is not None and not (self.settings.mode == "addon" and value > self.settings.pass_above)

    def _together(self, ruled: Score, judged: Score) -> Score:
        parts: dict[str, float] = {}
        values: dict[str, float | None] = {"rule": None, "judge": None}
        for name, reward, score in (("rule", self.settings.rule, ruled), ("judge", self.settings.judge, judged)):
            if reward is None or not score.applies:
                continue
            values[name] = None if _key_rejected(score) else effective_value(reward, score)
            if values[name] is None:
                assert score.failure is not None
                return failed(score.failure.cause, f"{name}: {score.failure.message}", score.view)
            parts |= {name: values[name]} | {f"{name}/{part}": x for part, x in score.parts.items()}  # pyright: ignore
        rule, judge = values["rule"], values["judge"]
        if judge is None:
            assert rule is not None
            assert rule > self.settings.pass_above, "without a judge's value the rule has passed it"
            value = 1.0
        elif self.settings.mode == "mixed":
            assert rule is not None
            value = self.settings.judge_weight * judge + (1.0 - self.settings.judge_weight) * rule
        else:
            value = self.settings.judge_weight * judge
        deciding = judged if judge is not None else ruled
        return Score(value, parts=parts, malformed=deciding.malformed, view=deciding.view, trace=deciding.trace)


def _key_rejected(score: Score) -> bool:
    """No `on_failure` gives such a failure a value: the run has to stop."""
    return score.failure is not None and score.failure.cause == UNAUTHORISED
