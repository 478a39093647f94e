"""A generative judge of single responses.

Its prompt is rendered from a template, and its answer parsed by one of these parsers (`plaudit/rewards/judges/parsing.py`):

    last_number_line   8                           a number alone on the last line (GRRM's pointwise model)
    tag                <score>8</score>            or a line `score: 8`
    regex              the last match of `pattern`: its first group
    json               {"score": 8, "style": 3}    `field`; its other numbers become parts
    true_false         True                        worth 1 or 0 (TinyV's verifier: question, reference and final answer)
    total_score        Total Score: 8/10           worth 0.8, and so is 4/5 (the rubric reward model)

With several `votes` the value is the mean of the readable ones; a sample fails if there is none.
"""

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any, ClassVar, Literal

from pydantic import PositiveInt, field_validator, model_validator

from plaudit.recipe.section import Section
from plaudit.reward_models.backend import GenerationRequest
from plaudit.rewards.judges.model_rewards import JudgeReward, LiveJudgeReward, Reply
from plaudit.rewards.judges.parsing import (
    FieldRule,
    Found,
    read_json,
    read_last_number,
    read_pattern,
    read_tagged,
    read_total_score,
    read_true_false,
    within,
)
from plaudit.types import Group, Prompt, Sample, Score

FIXED_SCALES = ("true_false", "total_score")


class JsonField(Section):
    """Constraints on a field of the judge's JSON."""

    name: str
    """Its name."""
    type: Literal["number", "integer", "boolean", "string"] = "number"
    """Its type."""
    minimum: float | None = None
    """Lowest number."""
    maximum: float | None = None
    """Highest number."""


class Judge(JudgeReward):
    kind: Literal["judge"]
    """A generative judge of single responses."""
    parser: Literal["last_number_line", "tag", "regex", "json", "true_false", "total_score"] = "last_number_line"
    """How the score is parsed from its answer."""
    tag: str = "score"
    """parser: tag. The tag's name."""
    pattern: str | None = None
    """parser: regex. A regular expression; its first group is the score."""
    field: str = "score"
    """parser: json. The field that is the score."""
    fields: tuple[JsonField, ...] = ()
    """parser: json. Required fields, with JSON Schema's type, minimum and maximum."""
    lowest: float | None = None
    """An answer with a lower score is unreadable. Default: 0 with the built-in template, which asks for 0 to 10; else none."""
    highest: float | None = None
    """An answer with a higher score is unreadable. Default: 10 with the built-in template; else none."""
    votes: PositiveInt = 1
    """Answers per response; the value is their mean."""

    variables: ClassVar[frozenset[str]] = frozenset({"response", "parser", "tag", "field", "lowest", "highest"})

    @field_validator("pattern")
    @classmethod
    def _check_pattern(cls, pattern: str | None) -> str | None:
        import regex

        try:
            regex.compile(pattern or "")
        except (regex.error, RecursionError) as error:
            raise ValueError(f"is not a regular expression: {error}") from None
        return pattern

    @model_validator(mode="after")
    def _check_parser(self) -> "Judge":
        if (self.parser == "regex") != (self.pattern is not None):
            raise ValueError("parser: regex needs a pattern, and no other parser has one")
        if self.parser == "regex" and self.template is None:
            raise ValueError(
                "parser: regex needs a template: the built-in one does not ask for an answer that your pattern matches"
            )
        if self.fields and self.parser != "json":
            raise ValueError("fields belong to parser: json")
        if self.parser in FIXED_SCALES and (self.lowest, self.highest) != (None, None):
            raise ValueError(f"parser: {self.parser} has a fixed scale from 0 to 1: lowest and highest are for other parsers")
        low, high = self.score_range
        if low is not None and high is not None and low >= high:
            raise ValueError(f"lowest ({low:g}) should be less than highest ({high:g})")
        if self.votes > 1 and self.sampling.temperature == 0:
            raise ValueError("votes at temperature 0 are identical; set sampling.temperature")
        return self

    @property
    def score_range(self) -> tuple[float | None, float | None]:
        """The range of valid scores: a number outside it is not the judge's score."""
        if self.template is not None or self.parser in FIXED_SCALES:
            return self.lowest, self.highest
        return 0.0 if self.lowest is None else self.lowest, 10.0 if self.highest is None else self.highest

    @property
    def default_template(self) -> str:
        return "verifier" if self.parser == "true_false" else "pointwise"

    def template_variables(self, response: str) -> dict[str, Any]:
        """Variables of its template besides the row."""
        lowest, highest = self.score_range
        own = {"parser": self.parser, "tag": self.tag, "field": self.field, "lowest": lowest, "highest": highest}
        return {"response": response, **own}

    def reader(self) -> Callable[[str], Found | None]:
        """What an answer says, or None."""
        rules = {one.name: FieldRule(one.type, one.minimum, one.maximum) for one in self.fields}
        lowest, highest = self.score_range

        def read(text: str) -> Found | None:
            match self.parser:
                case "last_number_line":
                    found = read_last_number(text)
                case "tag":
                    found = read_tagged(text, self.tag, highest)
                case "regex":
                    found = read_pattern(text, self.pattern or "")
                case "json":
                    found = read_json(text, self.field, rules)
                case "true_false":
                    found = read_true_false(text)
                case "total_score":
                    found = read_total_score(text)
            if found is None:
                return None
            found = found if isinstance(found, Found) else Found(found)
            return found if within(found.value, lowest, highest) else None

        return read

    def build(self) -> "LiveJudge":
        return LiveJudge(self)


class LiveJudge(LiveJudgeReward[Judge]):
    async def score(self, groups: Sequence[Group]) -> list[list[Score]]:
        read = self.settings.reader()
        return await self.score_each(groups, range(self.settings.votes), self._question, lambda _, text: read(text), self._score)

    async def _question(self, prompt: Prompt, sample: Sample, vote: int) -> GenerationRequest:
        return await self.build_request(prompt, vote, **self.settings.template_variables(sample.text))

    def _score(self, replies: Sequence[Reply[Found]], view: str) -> Score:
        found = [reply.value for reply in replies if reply.value is not None]
        if not found:
            return replies[-1].failed_score(view)
        trace = next(reply.trace for reply in replies if reply.value is not None)
        names = list(dict.fromkeys(name for one in found for name in one.parts))
        parts = {name: fmean(one.parts[name] for one in found if name in one.parts) for name in names}
        if self.settings.votes > 1:
            trace = {**trace, "votes": [one.value for one in found]}
            parts["votes"] = float(len(found))
        return Score(fmean(one.value for one in found), parts, view=view, trace=trace)
