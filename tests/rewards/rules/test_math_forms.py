r"""Right answers in other forms than the reference's, and wrong ones that look like them: tables by kind, and generated pairs."""

import random
import re
from typing import Any

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st
from sympy.parsing.sympy_parser import parse_expr

from plaudit.rewards.rules.math import Math, references
from plaudit.rewards.rules.maths import units, values
from plaudit.rewards.rules.maths.answers import find_answer
from plaudit.rewards.rules.maths.expressions import read_expression
from plaudit.rewards.rules.maths.number_words import number_in_words
from support import math_answers, math_probes
from support.math_answers import is_right

TABLES = {math_answers: (12, 12), math_probes: (7, 14)}
"""The fewest right and wrong answers of each kind."""
RIGHT, WRONG = math_answers.RIGHT | math_probes.RIGHT, math_answers.WRONG | math_probes.WRONG
WHOLE_RESPONSES = math_answers.WHOLE_RESPONSES | math_probes.WHOLE_RESPONSES


def rated_wrongly(kind: str, rows: list[tuple[str, str]], right: bool) -> list[str]:
    found = [(truth, answer, (find_answer(answer) or "") if kind in WHOLE_RESPONSES else answer) for truth, answer in rows]
    return [f"{truth} <- {answer}" for truth, answer, alone in found if is_right(truth, alone) != right]


@pytest.mark.parametrize("kind", RIGHT)
def test_right_in_another_form(kind):
    assert rated_wrongly(kind, RIGHT[kind], right=True) == []


@pytest.mark.parametrize("kind", WRONG)
def test_near_misses_are_wrong(kind):
    assert rated_wrongly(kind, WRONG[kind], right=False) == []


@pytest.mark.parametrize("table", TABLES)
def test_every_kind_has_enough_of_both(table):
    assert table.RIGHT.keys() == table.WRONG.keys()
    for rows, fewest in zip((table.RIGHT, table.WRONG), TABLES[table], strict=True):
        assert min(map(len, rows.values())) >= fewest
    assert not math_answers.RIGHT.keys() & math_probes.RIGHT.keys()


# Strict ---------------------------------------------------------------------------------------------------------------

LOOSE = [
    ("30.52", "\\frac{1587}{52}"), ("6.67\\%", "\\frac{1}{15}"), ("6.67", "20:3"), ("5,1", "1, 5"), ("$8$,$4$", "4, 8"),
    ("1,3", "Maximum: 3, Minimum: 1"), ("7,14,18", "Paolo: 18, Qing: 14, Rayna: 7"), ("1, 2, 3", "3, 2, 1"),
]  # fmt: skip
ALSO_STRICT = [
    ("\\{1, 2\\}", "\\{2, 1\\}"), ("5,1", "5, 1"), ("x = 1, y = 2", "y = 2, x = 1"), ("\\frac{600}{7}", "\\frac{1200}{14}"),
    ("0.5", "\\frac{1}{2}"), ("k\\pi", "n\\pi"), ("xy = 6", "\\frac{6}{x}"),
]  # fmt: skip


@pytest.mark.parametrize(("truth", "answer"), LOOSE)
def test_strict_switches_loose_forms_off(truth, answer):
    assert is_right(truth, answer)
    assert not is_right(truth, answer, strict=True)


@pytest.mark.parametrize(("truth", "answer"), ALSO_STRICT)
def test_strict_keeps_the_others(truth, answer):
    assert is_right(truth, answer, strict=True)


def test_strict_is_a_setting():
    assert not Math(kind="math").strict
    assert Math.model_validate({"kind": "math", "strict": True}).strict


# Random points --------------------------------------------------------------------------------------------------------


def test_an_answer_made_for_the_points_of_one_key_fails_with_another(monkeypatch):
    """With sin x in it, nothing is decided exactly: only points that the answer's author does not know keep it from passing."""
    monkeypatch.setattr(values, "same_quotient", lambda a, b: None)
    known = [point for point, _ in values._points(read_expression("\\sin x"), read_expression("x"), 1)]
    roots = "".join(f"(x - {sympy.Rational(str(point['x']))})" for point in known[: values.POINTS])
    attack = read_expression(f"\\sin x + {roots} / 10^{{9}}")
    honest = read_expression("\\cos(\\frac{\\pi}{2} - x)")
    answer_at_known_points = [values.number(attack, point) - values.number(honest, point) for point in known[: values.POINTS]]
    assert max(map(abs, answer_at_known_points)) < 1e-40
    assert all(not values.equal(read_expression("\\sin x"), attack, key) for key in range(2, 12))
    assert all(values.equal(read_expression("\\sin x"), honest, key) for key in range(2, 12))


def test_points_depend_on_the_key_only():
    x = read_expression("x + y")
    assert list(values._points(x, x, 5)) == list(values._points(x, x, 5))
    assert list(values._points(x, x, 5)) != list(values._points(x, x, 6))


@pytest.mark.parametrize(
    "tiny", ["10^{-60}", "e^{-200}", "\\pi^{-90}", "(10^{-20} \\pi)(10^{-20} \\pi)", "\\frac{\\pi}{10^{50}}", "\\sin(10^{-50})"]
)
def test_no_term_is_too_small_to_count(tiny):
    assert not is_right("\\sin x", f"\\sin x + {tiny}")
    assert not is_right("\\sqrt{2}", f"\\sqrt{{2}} + {tiny}")


# Generated pairs ------------------------------------------------------------------------------------------------------


def formula(draw: random.Random, depth: int) -> str:
    """A random formula in LaTeX, of x, y, small numbers and a few functions."""
    if depth == 0:
        return draw.choice(["x", "y", "x", "2", "3", "5", "\\frac{1}{2}", "\\sqrt{2}", "\\pi"])
    a, b = formula(draw, depth - 1), formula(draw, draw.randrange(depth))
    return draw.choice(
        [
            f"({a}) + ({b})",
            f"({a}) - ({b})",
            f"({a}) \\cdot ({b})",
            f"({a})^2",
            f"\\sin({a})",
            f"\\frac{{{a}}}{{{b}}}",
            f"-({a})",
            f"e^{{{a}}}",
        ]
    )


def mutated(draw: random.Random, text: str) -> str:
    """The formula with one small change, which may or may not change its value; or another way to write it."""
    changes = [
        lambda t: re.sub(r"\d", lambda d: str(int(d[0]) % 9 + 1), t, count=1),
        lambda t: t.replace("+", "-", 1),
        lambda t: t.replace("-", "+", 1),
        lambda t: t.replace("x", "y", 1),
        lambda t: t.replace("\\sin", "\\cos", 1),
        lambda t: t.replace("^2", "^3", 1),
        lambda t: t.replace("\\cdot", "+", 1),
        lambda t: f"-({t})",
        lambda t: f"({t}) \\cdot 2 - ({t})",
        lambda t: f"\\frac{{2 ({t})}}{{2}}",
        lambda t: f"{t} + 10^{{-{draw.choice([3, 20, 70])}}}",
        lambda t: f"({t}) squared",
        lambda t: f"{t} million",
        lambda t: f"not {t}",
        lambda t: f"{t}, 1",
        lambda t: f"\\pm ({t})",
        lambda t: f"~{t}",
        lambda t: f"|{t}|",
        lambda t: f"\\sqrt{{({t})^2}}",
    ]
    return draw.choice(changes)(text)


def sympy_value(text: str, point: dict[str, Any]) -> Any:
    """The value of a formula at a point by sympy, from its own text and without the rule's parser; None if it is no formula."""
    python = text.replace("\\cdot", "*").replace("\\sin", "sin").replace("\\cos", "cos").replace("\\pi", "pi")
    python = re.sub(r"\|(.*)\|", r"Abs(\1)", python)
    while (shorter := re.sub(r"\\frac\{((?:[^{}]|\{[^{}]*\})*)\}\{((?:[^{}]|\{[^{}]*\})*)\}", r"((\1)/(\2))", python)) != python:
        python = shorter
    python = (
        re.sub(r"\\sqrt\{((?:[^{}]|\{[^{}]*\})*)\}", r"sqrt(\1)", python).replace("{", "(").replace("}", ")").replace("^", "**")
    )
    python = re.sub(r"(?<![a-z])e\*\*", "E**", python)
    if python.endswith(" million"):
        python = f"({python.removesuffix(' million')})*10**6"
    if re.search(r"squared|not|,|\\pm|~", python):
        return None
    python = re.sub(r"(?<=[\d)]) ?(?=[(A-Za-z])(?<!n\b)", "*", python)
    names = {name: getattr(sympy, name) for name in ("sin", "cos", "pi", "sqrt", "Abs", "E")}
    return sympy.N(parse_expr(python, {**names, **point}), 80)


def differs(truth: str, answer: str, draw: random.Random) -> bool | None:
    """Whether the two have different values at some random point, by sympy; None if neither is known to have one."""
    for _ in range(3):
        point = {name: sympy.Rational(draw.randrange(1, 10**9), 10**8) for name in ("x", "y")}
        try:
            a, b = sympy_value(truth, point), sympy_value(answer, point)
        except (TypeError, ValueError, SyntaxError, ZeroDivisionError, OverflowError):
            return None
        if b is None:
            return True  # more than a formula, or another one: no answer to this reference
        if a is None or not (a.is_finite and b.is_finite) or abs(a) > 10**30:
            return None
        if abs(a - b) > abs(a) * sympy.Float("1e-75", 80):
            return True
    return False


def check_generated(count: int, seed: int) -> tuple[int, int]:
    draw, different, accepted = random.Random(seed), 0, 0
    while different < count:
        truth = formula(draw, draw.randrange(1, 4))
        answer = mutated(draw, truth) if draw.random() < 0.8 else formula(draw, draw.randrange(1, 4))
        unequal = differs(truth, answer, draw)
        if unequal is None:
            continue
        verdict = is_right(truth, answer, key=draw.randrange(2**60))
        assert not (unequal and verdict), (truth, answer)
        different += unequal
        accepted += verdict
    return different, accepted


def test_no_generated_answer_of_another_value_is_accepted():
    different, accepted = check_generated(60, seed=1)
    assert different == 60
    assert accepted > 0


@pytest.mark.slow
def test_none_of_5000_generated_answers_of_another_value_is_accepted():
    different, accepted = check_generated(5000, seed=2)
    assert different == 5000
    assert accepted > 300


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(["million", "thousand", "dozen", "hundred", "halves", "thirds"]))
def test_number_words_multiply(n, word):
    value = number_in_words(f"{n} {word}")
    assert value is not None
    written = f"{value.numerator}/{value.denominator}"
    assert is_right(written, f"{n} {word}")
    assert is_right(str(n), f"{n} {word}") == (n == 0)


# Hostile answers ------------------------------------------------------------------------------------------------------

SIZE = 20_000
HOSTILE = [
    "1" + "\\text{a}/" * (SIZE // 9) + "!", "1" + "\\text{a} " * (SIZE // 9) + "!", "1 " + "a " * (SIZE // 2) + "!",
    "1" + " cm" * (SIZE // 3), "1" + "\\text{cm}^2/" * (SIZE // 12), "\\text " * (SIZE // 6), "5 " * (SIZE // 2), "a" * SIZE,
    "a " * (SIZE // 2) + "!", "a-" * (SIZE // 2), "a' " * (SIZE // 3) + "1", "the " * (SIZE // 4) + "is",
    "for all " * (SIZE // 8), "\\forall " * (SIZE // 8) + "!", ", where " * (SIZE // 8), "<sup>" * (SIZE // 5),
    "<sup>1</sup>" * (SIZE // 12), "&lt;" * (SIZE // 4), "$" + "1$ $" * (SIZE // 4), "$" * SIZE, "①" * SIZE, "①, " * (SIZE // 3),
    "~" * SIZE, "**" * (SIZE // 2), "2**" * (SIZE // 3) + "2", "1e9" * (SIZE // 3), "maximum: " * (SIZE // 9) + "1",
    "a: " * (SIZE // 3), "1 < " * (SIZE // 4) + "2", "x = " * (SIZE // 4) + "2", "\\{1\\} - " * (SIZE // 8),
    "\\pm 1, " * (SIZE // 8), "(\\pm 1," * 2000, "twenty-" * (SIZE // 7) + "one", "one and " * (SIZE // 8) + "a half",
    " " * SIZE + "1", "1" + " " * SIZE + "cm", "(A) " * (SIZE // 4), "1:" * (SIZE // 2), "x_{" * (SIZE // 3),
    "1,000" * (SIZE // 5), "1 000" * (SIZE // 5), "\\frac{1}{2}" * (SIZE // 11), "or " * (SIZE // 3), "[" * SIZE,
    "1." * (SIZE // 2),
]  # fmt: skip


@pytest.mark.parametrize("answer", HOSTILE, ids=lambda text: text[:12])
def test_a_hostile_answer_of_20_kb_is_refused(answer):
    """Every step is linear in its input: a step that is not would take hours for some of these."""
    for truth in ("7", "x = 7 \\text{ cm}", "[1, 2)", "yes"):
        assert not is_right(truth, answer)
        assert not is_right(truth, find_answer(f"So it is {answer}") or "")
    if references(answer):
        assert is_right(answer, answer)


def test_a_unit_is_looked_for_at_the_end_only():
    rest, unit, _ = units.split_unit("5" + " \\text{cm}" * 10_000)
    assert rest.startswith("5 \\text{cm}")
    assert unit.name
