r"""GSM8K's rule: 1 if the final number of the response equals the ground truth's, else `format_score`.

The final number follows the last `####` (method strict), or is the last number of the response (flexible). Numbers are compared by
value: `1,000`, `$1000`, `1000.` and `1000.0` are equal. No number found: 0, malformed.

Differs from verl: numbers are compared by value, not as text (there `72.0` is not `72`); `####` is searched in the whole response,
not only in its last 300 characters; and a ground truth without a number is a failure, because no response could be right.
"""

import re
from fractions import Fraction
from typing import Any, ClassVar, Literal

from plaudit.rewards.reward import Rule
from plaudit.rewards.rules.ground_truth import no_truth, plain
from plaudit.types import Prompt, Sample, Score

MOST_DIGITS = 400
"""Longer numbers are no real answer, and slow to parse."""
NUMBER = r"[-+]?\s?\$?\s?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
MARKED = re.compile(rf"####\s*(?:\\?\$\s?)?({NUMBER})", re.ASCII)
LAST = re.compile(NUMBER, re.ASCII)
WINDOW = 10_000
"""Characters at the end of the response that flexible searches."""


class Gsm8k(Rule):
    kind: Literal["gsm8k"]
    """The final number, as in GSM8K."""
    method: Literal["strict", "flexible"] = "strict"
    """strict: the number after the last ####. flexible: the last number in the response."""
    format_score: float = 0.0
    """Value of a readable but wrong number."""

    checks_answer: ClassVar[bool] = True
    reads_answers: ClassVar[bool] = True  # pyright: ignore[reportIncompatibleMethodOverride]

    def read_answer(self, text: str) -> Fraction | None:
        return _marked(text) if self.method == "strict" else _last(text)

    def value(self, prompt: Prompt, sample: Sample) -> float | Score:
        truth = _truth(prompt.ground_truth)
        if truth is None:
            return no_truth(prompt, sample, "gsm8k", "a number, or a text with #### and a number")
        number = self.read_answer(sample.text)
        if number is None:
            return Score(0.0, malformed=True, view=sample.text)
        return 1.0 if number == truth else self.format_score


def _truth(given: Any) -> Fraction | None:
    given = plain(given)
    if isinstance(given, list | tuple) and len(given) == 1:
        given = given[0]
    if isinstance(given, bool) or not isinstance(given, str | int | float):
        return None
    text = str(given)
    if "####" in text:
        return _marked(text)
    # The whole text must be the number: '3 apples and 5 pears' has no final number.
    return _number(text.strip().removesuffix(".")) if re.fullmatch(rf"\s*{NUMBER}\.?\s*", text) else _scientific(given)


def _scientific(given: str | float) -> Fraction | None:
    """A column of floats is printed as 1e+16 or 5e-05."""
    exact = isinstance(given, float) and given == given and abs(given) != float("inf")
    return Fraction(str(given)) if exact else None


def _marked(text: str) -> Fraction | None:
    """The number after the last #### that is followed by one."""
    at = len(text)
    while (at := text.rfind("####", 0, at)) >= 0:
        if found := MARKED.match(text, at):
            return _number(found[1])
    return None


def _last(text: str) -> Fraction | None:
    found = LAST.findall(text[-WINDOW:])
    return _number(found[-1]) if found else None


def _number(text: str) -> Fraction | None:
    plain = re.sub(r"[\s,$]", "", text)
    return Fraction(plain) if len(plain) <= MOST_DIGITS else None
