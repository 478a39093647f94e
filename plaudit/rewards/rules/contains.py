"""Contains: 1 if the response contains a text, else 0. The text is a setting; default: the ground truth."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, field_validator

from plaudit.recipe.section import zero_or_more
from plaudit.rewards.reward import Rule
from plaudit.rewards.rules.ground_truth import no_truth, plain, read_texts
from plaudit.types import Prompt, Sample, Score


class Contains(Rule):
    kind: Literal["contains"]
    """The response contains a text."""
    text: Annotated[tuple[str, ...], BeforeValidator(zero_or_more)] = ()
    """The text, or a list of texts; default: the ground truth."""
    need: Literal["any", "all"] = "any"
    """With several texts: one is enough, or all are required."""
    ignore_case: bool = False
    """Ignore case."""

    @property
    def checks_answer(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return not self.text

    @field_validator("text")
    @classmethod
    def _not_empty(cls, text: tuple[str, ...]) -> tuple[str, ...]:
        if not all(text):
            raise ValueError("an empty text is in every response")
        return text

    def value(self, prompt: Prompt, sample: Sample) -> float | Score:
        targets = [{text} for text in self.text] or _spellings(prompt)
        if not targets or not all(targets):
            return no_truth(prompt, sample, "contains", "a text, a number or a list of them, where no `text` is set")
        response = sample.text.casefold() if self.ignore_case else sample.text
        found = (any((text.casefold() if self.ignore_case else text) in response for text in spellings) for spellings in targets)
        return float(all(found) if self.need == "all" else any(found))


def _spellings(prompt: Prompt) -> list[set[str]]:
    """The texts of a ground truth, each with its accepted spellings."""
    truth = plain(prompt.ground_truth)
    return [set(read_texts(one)) for one in (truth if isinstance(truth, list | tuple) else [truth])]
