r"""Regular expression: 1 if the pattern is found in the response, else 0.

Patterns are those of Python's `re`, read by the `regex` package, for it can be stopped: a pattern such as `(a|aa)+$` takes longer
than anyone waits on some responses. That the search ran out of time is due to what the policy wrote: 0, and malformed.
"""

from typing import Literal

import regex
from pydantic import PositiveFloat, field_validator

from plaudit.recipe.limits import Limits
from plaudit.rewards.reward import Rule
from plaudit.types import Prompt, Sample, Score


class RegexLimits(Limits):
    timeout_s: PositiveFloat = 1.0
    """Time limit for one call, which searches one response, in CPU seconds of the process."""


class Regex(Rule):
    kind: Literal["regex"]
    """A pattern that is found in the response."""
    pattern: str
    """A regular expression. Flags stand in it: `(?i)` ignores case; with `(?s)`, `.` matches line ends too."""
    full: bool = False
    """The whole response must match, white space around it aside; else any place in it."""
    limits: RegexLimits = RegexLimits()  # pyright: ignore[reportIncompatibleVariableOverride]
    """Concurrency, rates, time limits, retries, and when it is given up."""

    @field_validator("pattern")
    @classmethod
    def _can_be_read(cls, pattern: str) -> str:
        try:
            regex.compile(pattern)
        except (regex.error, RecursionError) as error:
            raise ValueError(f"is not a regular expression: {error}") from None
        return pattern

    def value(self, prompt: Prompt, sample: Sample) -> float | Score:
        compiled = regex.compile(self.pattern)  # kept by the package
        try:
            # concurrent: sampling goes on meanwhile, in other threads.
            if self.full:
                found = compiled.fullmatch(sample.text.strip(), timeout=self.limits.timeout_s, concurrent=True)
            else:
                found = compiled.search(sample.text, timeout=self.limits.timeout_s, concurrent=True)
        except TimeoutError:
            return Score(0.0, {"timed_out": 1.0}, malformed=True, view=sample.text)
        return Score(float(found is not None), {"timed_out": 0.0}, view=sample.text)
