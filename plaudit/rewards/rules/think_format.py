"""Think format: 1 if thoughts and answer are well-formed, else 0.

    <think> thoughts </think> answer                                     white space is free around each
    <think> thoughts </think> <response> answer </response>              with `answer_tag: response`

Each tag occurs exactly once in the response, in this order, with nothing before the first one (and with an answer tag, nothing
between or after); neither thoughts nor answer are blank. If the chat template writes `<think>`, the response begins with the
thoughts. A badly formed response is the policy's fault: 0, malformed.
"""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from plaudit.response_files import CLOSE, OPEN
from plaudit.rewards.reward import Rule
from plaudit.types import Prompt, Sample, Score


class ThinkFormat(Rule):
    kind: Literal["think_format"]
    """Well-formed thoughts followed by an answer."""
    opening: Annotated[str, Field(min_length=1)] = OPEN
    """The tag before the thoughts."""
    closing: Annotated[str, Field(min_length=1)] = CLOSE
    """The tag after the thoughts."""
    prefilled: bool | None = None
    """The chat template writes `opening`, so the response must not; null: either is accepted."""
    empty_thoughts: bool = False
    """Accept blank thoughts."""
    answer_tag: Annotated[str, Field(pattern=r"^[A-Za-z][\w-]*$")] | None = None
    """Name of the tag around the answer: `response` for <response> … </response>; null: no tag."""

    @model_validator(mode="after")
    def _tags_differ(self) -> "ThinkFormat":
        tags = [self.opening, self.closing, *self._answer_tags()]
        for tag in tags:
            if any(tag in other for other in tags if other is not tag) or tags.count(tag) > 1:
                raise ValueError(f"the tags {', '.join(tags)} are ambiguous: {tag} is part of another one")
        return self

    def value(self, prompt: Prompt, sample: Sample) -> Score:
        well_formed = self._is_well_formed(sample.text)
        return Score(float(well_formed), malformed=not well_formed, view=sample.text)

    def _is_well_formed(self, text: str) -> bool:
        text = text.strip()
        opened = text.count(self.opening)
        if text.count(self.closing) != 1 or opened > 1 or (self.prefilled is not None and self.prefilled == bool(opened)):
            return False
        if opened and not text.startswith(self.opening):
            return False
        thoughts, _, answer = text.removeprefix(self.opening).partition(self.closing)
        if not thoughts.strip() and not self.empty_thoughts:
            return False
        return self._is_an_answer(answer.strip()) and not any(tag in thoughts for tag in self._answer_tags())

    def _is_an_answer(self, answer: str) -> bool:
        if self.answer_tag is None:
            return bool(answer)
        first, last = self._answer_tags()
        whole = answer.count(first) == answer.count(last) == 1 and answer.startswith(first) and answer.endswith(last)
        return whole and bool(answer.removeprefix(first).removesuffix(last).strip())

    def _answer_tags(self) -> tuple[str, ...]:
        return () if self.answer_tag is None else (f"<{self.answer_tag}>", f"</{self.answer_tag}>")
