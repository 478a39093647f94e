"""A judge that scores a response by named criteria. Each criterion is a part; the value is their weighted mean.

    value = Σ weight · score / Σ weight                      scores from `lowest` to `highest`, as the judge gives them

`calls: one` requests all criteria in one call; `calls: each` makes a call for each, so that none influences the next. The answer is
a JSON object of criterion → score, or lines `criterion: score`. A response has a value only if every criterion has a score: a mean
over the readable ones would not be comparable.
"""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveFloat, model_validator

from plaudit.recipe.section import Section
from plaudit.reward_models.backend import GenerationRequest
from plaudit.rewards.judges.model_rewards import JudgeReward, LiveJudgeReward, Reply
from plaudit.rewards.judges.parsing import read_criteria, within
from plaudit.types import Group, Prompt, Sample, Score


class Criterion(Section):
    name: Annotated[str, Field(pattern=r"^[^\s:{}\"'<>*_`~#-][^:{}\"'<>*`\n]*$")]
    """Its name in the judge's answer and among the parts."""
    description: str = ""
    """Its definition, for the judge."""
    weight: PositiveFloat = 1.0
    """Its weight in the mean."""


class RubricJudge(JudgeReward):
    kind: Literal["rubric_judge"]
    """A judge that scores by criteria."""
    criteria: Annotated[tuple[Criterion, ...], Field(min_length=1)]
    """The criteria."""
    calls: Literal["one", "each"] = "one"
    """One call for all criteria, or one for each."""
    answer: Literal["json", "lines"] = "json"
    """Format of the judge's scores: a JSON object, or lines `criterion: score`."""
    lowest: float = 0.0
    """Lowest score; an answer with a lower one is unreadable."""
    highest: float = 10.0
    """Highest score; an answer with a higher one is unreadable."""

    variables: ClassVar[frozenset[str]] = frozenset({"response", "criteria", "answer", "lowest", "highest"})

    @model_validator(mode="after")
    def _check_criteria(self) -> "RubricJudge":
        names = [criterion.name.casefold() for criterion in self.criteria]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"two criteria are called {twice}")
        if self.lowest >= self.highest:
            raise ValueError(f"lowest ({self.lowest:g}) should be less than highest ({self.highest:g})")
        return self

    @property
    def default_template(self) -> str:
        return "rubric"

    def build(self) -> "LiveRubricJudge":
        return LiveRubricJudge(self)


class LiveRubricJudge(LiveJudgeReward[RubricJudge]):
    @property
    def _criteria_per_call(self) -> list[list[Criterion]]:
        return (
            [list(self.settings.criteria)]
            if self.settings.calls == "one"
            else [[criterion] for criterion in self.settings.criteria]
        )

    async def score(self, groups: Sequence[Group]) -> list[list[Score]]:
        return await self.score_each(
            groups, self._criteria_per_call, self._question, lambda some, text: self._read(text, some), self._score
        )

    async def _question(self, prompt: Prompt, sample: Sample, criteria: Sequence[Criterion]) -> GenerationRequest:
        shown: list[dict[str, Any]] = [{"name": one.name, "description": one.description, "weight": one.weight} for one in criteria]
        own = {"answer": self.settings.answer, "lowest": self.settings.lowest, "highest": self.settings.highest}
        return await self.build_request(prompt, response=sample.text, criteria=shown, **own)

    def _read(self, text: str, criteria: Sequence[Criterion]) -> dict[str, float] | None:
        scores = read_criteria(text, [criterion.name for criterion in criteria], self.settings.answer, self.settings.highest)
        return (
            scores
            if scores and all(within(score, self.settings.lowest, self.settings.highest) for score in scores.values())
            else None
        )

    def _score(self, replies: Sequence[Reply[dict[str, float]]], view: str) -> Score:
        unread = next((reply for reply in replies if reply.value is None), None)
        if unread is not None:
            return unread.failed_score(view)
        parts = {name: score for reply in replies for name, score in (reply.value or {}).items()}
        weights = {criterion.name: criterion.weight for criterion in self.settings.criteria}
        value = sum(weights[name] * score for name, score in parts.items()) / sum(weights.values())
        answers = {"answers": [reply.trace["answer"] for reply in replies]} if len(replies) > 1 else {}
        return Score(value, parts, view=view, trace={**replies[0].trace, **answers})
