r"""The worker-process side of `kind: math`: parses two answers and decides whether they are the same.

Formulas are compared by value, not by rewriting: equal trees are equal; rational numbers are compared exactly; everything else to
60 digits, at random points for the variables. Different formulas differ at almost every point, so one evaluation rejects and
several accept: faster and stricter than `simplify`, which gives up on many that are equal. The points are drawn from a key that the
answer's author does not know.
Formulas that these parsers do not support (sums, integrals, limits) go to math-verify, with its LaTeX parser only (no code).

Runs in the processes of a `WorkerPool`, which enforces the time limit: an answer that makes one hang or crash scores 0.
"""

import logging
import re
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

# The loader puts this folder first on the path, where our `units` and `values` would shadow other modules of those names.
sys.path[:] = [folder for folder in sys.path if folder != str(Path(__file__).resolve().parent)]

import math_verify  # noqa: E402 (here and not where it is used: a call has a time limit)

from plaudit.rewards.rules.maths.answers import split_choice  # noqa: E402
from plaudit.rewards.rules.maths.expressions import FUNCTIONS, GREEK, Unreadable  # noqa: E402
from plaudit.rewards.rules.maths.forms import read_answer  # noqa: E402
from plaudit.rewards.rules.maths.sameness import Comparison  # noqa: E402
from plaudit.rewards.rules.maths.shapes import Answer  # noqa: E402

logging.disable(logging.WARNING)  # math-verify warns that its calls have no time limit; the parent process enforces ours


def compare(solution_str: str, ground_truth: str, key: int, tolerance: float = 0.0, strict: bool = False) -> dict[str, Any]:
    """1 if the answer equals the reference, else 0. `key`: of the random points. `by`: what decided, our parsers or math-verify."""
    try:
        return _compare(solution_str, ground_truth, Comparison(key, tolerance, strict))
    except Exception as error:  # caused by the answer, or a bug here; dropping the sample would teach the policy to write it
        return {"score": 0.0, "malformed": True, "by": f"{type(error).__name__}: {error}"[:300]}


def _compare(solution_str: str, ground_truth: str, comparison: Comparison) -> dict[str, Any]:
    truth = _reference(ground_truth)
    try:
        answer = read_answer(split_choice(solution_str)[1] or solution_str)
    except Unreadable:
        answer = None
    if truth is not None and answer is not None:
        return {"score": float(comparison.same_answer(truth, answer)), "by": "form"}
    if _OPERATORS.search(ground_truth + solution_str) and _is_formula(ground_truth) and _is_formula(solution_str):
        if not _free_letters(ground_truth) <= _letters(solution_str) or not _free_letters(solution_str) <= _letters(ground_truth):
            return {"score": 0.0, "by": "letters"}
        return {"score": float(_math_verify(ground_truth, solution_str)), "by": "math_verify"}
    return {"score": 0.0, "by": "text"}


@lru_cache(maxsize=4096)
def _reference(text: str) -> Answer | None:
    try:
        return read_answer(split_choice(text)[1] or text)
    except Unreadable:
        return None


# Fallback to math-verify ----------------------------------------------------------------------------------------------

_FORMULA = re.compile(r"[\w\s\\{}()\[\]^+\-*/=|,.]{1,200}", re.A)
_LONG_NUMBER = re.compile(r"\d{6}|\^\s*{?\s*\(?\d{4}|\^\s*[({][^)}]*\^|\^[^^]*\^[^^]*\^|!|\*\*")
_RELATION = re.compile(r"\\(?:le|ge|ne|in|equiv|approx|sim)(?![a-zA-Z])|(?<!_{\w)=|[\d})]\s*_|\\text")
_OPERATORS = re.compile(r"\\(?:sum|prod|int|lim|max|min|gcd|lcm|det|partial)(?![a-zA-Z])")
"""What the parsers here do not read, and math-verify does."""
_COMMANDS = (
    frozenset(re.findall(r"\w+", "sum prod int lim max min gcd lcm det partial frac sqrt binom pi infty cdot times to"))
    | FUNCTIONS
    | GREEK
)


_LETTER = re.compile(r"\\([a-zA-Z]+)|([a-zA-Z])")
_BOUND = re.compile(r"(?:_\s?{?\s?|,\s?)(?:\\(\w+)|([a-zA-Z]))\s?(?:=|\\to|,)|(?<![a-zA-Z])d\s?(?:\\(\w+)|([a-zA-Z]))")
"""The variable of a sum, a limit or an integral."""


def _letters(text: str) -> set[str]:
    return {letter or command for command, letter in _LETTER.findall(text) if letter or command in GREEK}


def _free_letters(text: str) -> set[str]:
    """Those that the value depends on: another formula without them has another value. math-verify takes a second to see that."""
    return _letters(text) - {name for names in _BOUND.findall(text) for name in names} - {"d", "e", "i"}


def _is_formula(text: str) -> bool:
    """Whether math-verify may compare the text. No prose; nothing huge, since sympy evaluates powers and factorials while parsing;
    no relation, which it would solve for minutes or accept for shared solutions alone; no \\text, numeric base or command that it
    might drop."""
    bare = re.sub(r"\\[a-zA-Z]+", " ", text)
    return (
        bool(_FORMULA.fullmatch(text))
        and set(re.findall(r"\\([a-zA-Z]+)", text)) <= _COMMANDS
        and not re.search(r"[A-Za-z]{3}", bare)
        and not (_LONG_NUMBER.search(text) or _RELATION.search(text))
    )


def _math_verify(truth: str, answer: str) -> bool:
    gold, given = _parsed(truth), _parsed(answer)
    return bool(gold and given and math_verify.verify(list(gold), list(given), float_rounding=12, timeout_seconds=None))


@lru_cache(maxsize=4096)
def _parsed(text: str) -> tuple[Any, ...]:
    found = math_verify.parse(f"${text}$", [math_verify.LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None)  # pyright: ignore
    return tuple(one for one in found if not isinstance(one, str))
