r"""Regular expression: 1 if the pattern is found in the response, else 0.

Patterns are Python `re` patterns, matched by the `regex` package because it supports a time limit: on some responses a pattern such
as `(a|aa)+$` takes forever. A timeout is the policy's fault: 0, malformed.

A search gets `QUICK_S` on the event loop, where nearly all of them end within microseconds. The others start again in a thread,
which leaves the interpreter to the loop while it searches. One thread for each reward: the limit counts the CPU time of the whole
process, so that searches side by side would shorten each other's.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import regex
from pydantic import PositiveFloat, field_validator

from plaudit.recipe.limits import Limits
from plaudit.rewards.reward import LONG_TEXT, LiveRule, Rule
from plaudit.turns import turns
from plaudit.types import Prompt, Sample, Score

QUICK_S = 0.002
"""CPU seconds for a search on the event loop."""


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
        try:
            return self.search(sample.text, self.limits.timeout_s)
        except TimeoutError:
            return Score(0.0, {"timed_out": 1.0}, malformed=True, view=sample.text)

    def search(self, text: str, limit_s: float) -> Score:
        """Raises TimeoutError after `limit_s`."""
        compiled = regex.compile(self.pattern)  # cached by the package
        # concurrent: releases the GIL, so that other threads continue.
        concurrent = limit_s > QUICK_S
        if self.full:
            found = compiled.fullmatch(text.strip(), timeout=limit_s, concurrent=concurrent)
        else:
            found = compiled.search(text, timeout=limit_s, concurrent=concurrent)
        return Score(float(found is not None), {"timed_out": 0.0}, view=text)

    def build(self) -> "LiveRegex":
        return LiveRegex(self)


class LiveRegex(LiveRule):
    settings: Regex

    def __init__(self, settings: Regex):
        super().__init__(settings)
        self._thread = ThreadPoolExecutor(1, "regex")

    async def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)  # a search ends within its limit

    async def _score(self, prompt: Prompt, sample: Sample) -> Score:
        turn = turns()
        if turn.over:
            await turn.take()
        if len(sample.text) <= LONG_TEXT:
            try:
                return self.settings.search(sample.text, min(QUICK_S, self.settings.limits.timeout_s))
            except TimeoutError:
                pass
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.score_now, prompt, sample)
