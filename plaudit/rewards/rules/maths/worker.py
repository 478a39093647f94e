r"""The worker-process side of `kind: math`: parses two answers and decides whether they are the same.

Formulas are compared by value, not by rewriting: equal trees are equal; rational numbers are compared exactly; everything else to
60 digits, at random points for the variables. Different formulas differ at almost every point, so one evaluation rejects and
several accept: faster and stricter than `simplify`, which gives up on many that are equal.
Formulas that these parsers do not support (sums, integrals, limits) go to math-verify, with its LaTeX parser only (no code).

Runs in the processes of a `WorkerPool`, which enforces the time limit: an answer that makes one hang or crash scores 0.
"""

import itertools
import logging
import re
import sys
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any

# The loader puts this folder first on the path, where our `units` and `values` would shadow other modules of those names.
sys.path[:] = [folder for folder in sys.path if folder != str(Path(__file__).resolve().parent)]

import math_verify  # noqa: E402 (here and not where it is used: a call has a time limit)

from plaudit.rewards.rules.maths.answers import split_choice  # noqa: E402
from plaudit.rewards.rules.maths.expressions import Tree, Unreadable, exact, rename, symbols  # noqa: E402
from plaudit.rewards.rules.maths.forms import Form, Many, Member, Part, Region, Relation, Value, open_interval, read_form  # noqa: E402
from plaudit.rewards.rules.maths.values import equal, number, proportional, rounds_to  # noqa: E402

logging.disable(logging.WARNING)  # math-verify warns that its calls have no time limit; the parent process enforces ours


def compare(solution_str: str, ground_truth: str, tolerance: float = 0.0) -> dict[str, Any]:
    """1 if the answer equals the reference, else 0. `by`: what decided, the parsers here or math-verify."""
    try:
        return _compare(solution_str, ground_truth, tolerance)
    except Exception as error:  # caused by the answer, or a bug here; dropping the sample would teach the policy to write it
        return {"score": 0.0, "malformed": True, "by": f"{type(error).__name__}: {error}"[:300]}


def _compare(solution_str: str, ground_truth: str, tolerance: float) -> dict[str, Any]:
    truth = _reference(ground_truth)
    try:
        answer = read_form(split_choice(solution_str)[1] or solution_str)
    except Unreadable:
        answer = None
    if truth is not None and answer is not None:
        return {"score": float(_Comparison(tolerance).same(truth, answer)), "by": "form"}
    if _is_formula(ground_truth) and _is_formula(solution_str):
        return {"score": float(_math_verify(ground_truth, solution_str)), "by": "math_verify"}
    return {"score": 0.0, "by": "text"}


@lru_cache(maxsize=4096)
def _reference(text: str) -> Form | None:
    try:
        return read_form(split_choice(text)[1] or text)
    except Unreadable:
        return None


class _Comparison:
    """The reference determines the required form, and what may be left out."""

    def __init__(self, tolerance: float):
        self.tolerance = tolerance

    def same(self, truth: Form, answer: Form) -> bool:
        if isinstance(truth, Many) and truth.kind == "set" and len(truth.items) == 1 and not isinstance(answer, Many):
            truth = truth.items[0]
        if isinstance(answer, Many) and answer.kind == "set" and len(answer.items) == 1 and not isinstance(truth, Many):
            answer = answer.items[0]
        if isinstance(truth, Region) or isinstance(answer, Region):
            return self.same_region(truth, answer)
        match truth, answer:
            case Value(), Value():
                return self.same_value(truth, answer)
            case Many(), Many():
                return self.same_many(truth, answer)
            case Relation(), Relation():
                return truth.sign == answer.sign and proportional(truth, answer)
            case (Relation(sign="="), Value()) | (Value(), Relation(sign="=")):
                return _as_one_relation(truth, answer)
            case Member(), Member():
                return truth == answer
            case (Many(kind="ratio"), Value()) | (Value(), Many(kind="ratio")):
                return self.same_ratio(truth, answer)
        return False

    def same_value(self, truth: Value, answer: Value) -> bool:
        tree = answer.tree
        if truth.bound and answer.bound and truth.bound != answer.bound:
            if truth.bound in symbols(tree):
                return False
            tree = rename(tree, answer.bound, truth.bound)  # f(t) = t² is f(x) = x²
        if not _same_name(truth, answer) or not _consistent(truth) or not _consistent(answer):
            return False
        if truth.others and answer.others and not truth.name and not answer.name:
            return False  # '8 + 16 = 24' and '6 · 4 = 24': it is unclear which side was required; equal texts never get here
        values = [tree]
        if answer.rough is not None:
            if not rounds_to(answer.tree, answer.rough):
                return False  # '3 ≈ 5' is two answers
            values.append(answer.rough)
        wanted = [truth.tree] if truth.rough is None else [truth.tree, truth.rough]
        return any(self.same_quantity(one, truth.unit, value, answer.unit) for one in wanted for value in values)

    def same_quantity(self, truth: Tree, truth_unit: str, answer: Tree, answer_unit: str) -> bool:
        """A unit may be left out, or added to a reference without one; two units must be the same."""
        if truth_unit == answer_unit:
            return self.equal(truth, answer)
        if "%" in (truth_unit, answer_unit):
            if truth_unit and answer_unit:
                return False
            if self.equal(_scaled(truth, truth_unit), _scaled(answer, answer_unit)):
                return True  # 50 % = 0.5
            # If a percentage is required, '50' is 50 %. But a bare reference of at most 1 may be a share, so '1 %' is not 1.
            bare = exact(truth) if answer_unit else None
            return self.equal(truth, answer) and (not answer_unit or (bare is not None and abs(bare) > 1))
        if "deg" in (truth_unit, answer_unit):
            radians = self.equal(_scaled(truth, truth_unit), _scaled(answer, answer_unit))
            return radians or (not (truth_unit and answer_unit) and self.equal(truth, answer))
        return not (truth_unit and answer_unit) and self.equal(truth, answer)

    def equal(self, truth: Tree, answer: Tree) -> bool:
        if equal(truth, answer):
            return True
        if not self.tolerance or symbols(truth) or symbols(answer):
            return False
        a, b = number(truth, {}), number(answer, {})
        return a is not None and b is not None and abs(a - b) <= self.tolerance * abs(a)

    # Several --------------------------------------------------------------------------------------------------------

    def same_many(self, truth: Many, answer: Many) -> bool:
        kinds = {truth.kind, answer.kind}
        if kinds == {"ratio"}:
            return self.same_ratio(truth, answer)
        if len(truth.items) != len(answer.items):
            return False
        named = _names(truth), _names(answer)
        if kinds <= {"list", "set"}:
            if all(named):
                return named[0] == named[1] and self.same_any_order(truth.items, answer.items)
            # 'x = 2, y = 3' and '2, 3' are compared in order, 'x = 2 or x = 3' in any order.
            return self.same_in_order(truth.items, answer.items) if any(named) else self.same_any_order(truth.items, answer.items)
        if kinds == {"tuple", "list"} and any(named):
            return self.same_in_order(truth.items, answer.items)
        return len(kinds) == 1 and self.same_in_order(truth.items, answer.items)

    def same_in_order(self, truths: Sequence[Form], answers: Sequence[Form]) -> bool:
        return all(self.same(truth, answer) for truth, answer in zip(truths, answers, strict=True))

    def same_any_order(self, truths: Sequence[Form], answers: Sequence[Form]) -> bool:
        left = list(answers)
        for truth in truths:
            found = next((i for i, answer in enumerate(left) if self.same(truth, answer)), None)
            if found is None:
                return False
            left.pop(found)
        return not left

    def same_ratio(self, truth: Form, answer: Form) -> bool:
        sides = [form.items if isinstance(form, Many) else (form, Value(("num", Fraction(1)))) for form in (truth, answer)]
        if len(sides[0]) != len(sides[1]):
            return False
        trees = [[form.tree for form in side if isinstance(form, Value)] for side in sides]
        pairs = itertools.combinations(range(len(trees[0])), 2)
        crossed = all(equal(("mul", trees[0][i], trees[1][j]), ("mul", trees[0][j], trees[1][i])) for i, j in pairs)
        zero: Tree = ("num", Fraction(0))
        return crossed and not any(equal(tree, zero) for tree in trees[1])

    def same_region(self, truth: Form, answer: Form) -> bool:
        regions = [form if isinstance(form, Region) else open_interval(form) for form in (truth, answer)]
        one, other = regions
        if one is None or other is None or len(one.parts) != len(other.parts):
            return False
        if one.variable and other.variable and one.variable != other.variable:
            return False
        return any(
            all(_same_part(part, match) for part, match in zip(one.parts, order, strict=True))
            for order in ([other.parts] if len(other.parts) > 4 else itertools.permutations(other.parts))
        )


def _same_part(a: Part, b: Part) -> bool:
    return (a.low_closed, a.high_closed) == (b.low_closed, b.high_closed) and equal(a.low, b.low) and equal(a.high, b.high)


def _consistent(value: Value) -> bool:
    """All sides of 'a = b = c' are the same number: '3 = 5' is two answers, 'A = B = 60' assigns more than A."""
    return all(equal(other, value.tree) for other in value.others)


def _same_name(truth: Value, answer: Value) -> bool:
    """'x = 5' is '5', but not 'y = 5'; 'y = x²' is 'f(x) = x²', and 'x_1' is 'x'."""
    if not truth.name or not answer.name or truth.name == answer.name:
        return True
    if bool(truth.bound) != bool(answer.bound):
        return "y" in (truth.name, answer.name)
    return False


def _names(form: Many) -> tuple[str, ...] | None:
    """The names in 'x = 2, y = 3', sorted; None if all are the same name, or some item has none."""
    names = [re.sub(r"_?\d+$", "", item.name) if isinstance(item, Value) else "" for item in form.items]
    return tuple(sorted(names)) if all(names) and len(set(names)) > 1 else None


def _scaled(tree: Tree, unit: str) -> Tree:
    if unit == "%":
        return ("div", tree, ("num", Fraction(100)))
    return ("mul", tree, ("div", ("const", "pi"), ("num", Fraction(180)))) if unit == "deg" else tree


def _as_one_relation(truth: Form, answer: Form) -> bool:
    """'y = 2x + 1' equals '2x - y + 1 = 0'."""
    sides = []
    for form in (truth, answer):
        if isinstance(form, Value):
            if not form.name or form.bound or form.others or form.unit:
                return False
            form = Relation("=", ("sym", form.name), form.tree)
        assert isinstance(form, Relation)
        sides.append(form)
    return proportional(*sides)


# Fallback to math-verify ----------------------------------------------------------------------------------------------

_FORMULA = re.compile(r"[\w\s\\{}()\[\]^+\-*/=|,.]{1,200}", re.A)
_LONG_NUMBER = re.compile(r"\d{6}|\^\s*{?\s*\(?\d{4}|\^\s*[({][^)}]*\^|\^[^^]*\^[^^]*\^|!|\*\*")
_RELATION = re.compile(r"\\(?:le|ge|ne|in|equiv|approx|sim)(?![a-zA-Z])|(?<!_{\w)=|[\d})]\s*_|\\text")


def _is_formula(text: str) -> bool:
    """Whether math-verify may compare the text. No prose; nothing huge, since sympy evaluates powers and factorials while parsing;
    no relation, which it would solve for minutes or accept for shared solutions alone; no \\text or numeric base: it drops both."""
    bare = re.sub(r"\\[a-zA-Z]+", " ", text)
    return (
        bool(_FORMULA.fullmatch(text))
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
