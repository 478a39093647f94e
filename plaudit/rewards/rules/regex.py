r"""Regular expression: 1 if the pattern is found in the response, else 0.

Patterns are Python `re` patterns, matched by the `regex` package because it supports a time limit: on some responses a pattern such
as `(a|aa)+$` takes forever. A timeout is the policy's fault: 0, malformed.
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
    """The response matches a pattern."""
    pattern: str
    """A regular expression. Flags go into it: `(?i)` ignores case; with `(?s)`, `.` also matches line ends."""
    full: bool = False
    """The whole response must match, surrounding white space aside; else any part of it."""
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
        compiled = regex.compile(self.pattern)  # cached by the package
        try:
            # concurrent: releases the GIL, so that sampling continues in other threads.
            if self.full:
                found = compiled.fullmatch(sample.text.strip(), timeout=self.limits.timeout_s, concurrent=True)
            else:
                found = compiled.search(sample.text, timeout=self.limits.timeout_s, concurrent=True)
        except TimeoutError:
            return Score(0.0, {"timed_out": 1.0}, malformed=True, view=sample.text)
        return Score(float(found is not None), {"timed_out": 0.0}, view=sample.text)
