"""Whether formulas have the same value: exactly if they are rational, else to 60 digits at random points for their variables."""

import random
from typing import Any

import mpmath
from mpmath import mp

from plaudit.rewards.rules.maths.expressions import Tree, exact, symbols
from plaudit.rewards.rules.maths.forms import Relation

mp.dps = 60
CLOSE = mpmath.mpf(10) ** -45
"""Difference between 60-digit numbers that rounding can explain."""
LARGEST = mpmath.mpf(10) ** 40
"""Beyond this, 60 digits cannot show whether two numbers are equal."""
POINTS = 4
TRIES = 16


def equal(a: Tree, b: Tree) -> bool:
    if a == b:
        return True
    x, y = exact(a), exact(b)
    if x is not None and y is not None:
        return x == y
    agreed = 0
    for point in _points(a, b):
        u, v = number(a, point), number(b, point)
        if u is None or v is None:
            continue
        size = max(abs(u), abs(v))
        if size > LARGEST or abs(u - v) > CLOSE * max(size, 1):
            return False
        agreed += 1
        if agreed == POINTS or not point:
            return True
    return False


def proportional(a: Relation, b: Relation) -> bool:
    """left − right of one is a constant multiple of the other's; a positive one for inequalities."""
    f, g = (("add", one.left, ("neg", one.right)) for one in (a, b))
    if symbols(f) != symbols(g):
        return False
    ratio, agreed = None, 0
    for point in _points(f, g):
        u, v = number(f, point), number(g, point)
        if u is None or v is None or abs(v) < CLOSE or abs(u) < CLOSE or max(abs(u), abs(v)) > LARGEST:
            continue
        if ratio is None:
            ratio = u / v
        if abs(u / v - ratio) > CLOSE * abs(ratio):
            return False
        agreed += 1
        if agreed == POINTS:
            return a.sign in ("=", "!=") or (abs(mpmath.im(ratio)) < CLOSE and mpmath.re(ratio) > 0)
    return False


def _points(a: Tree, b: Tree) -> list[dict[str, Any]]:
    names = sorted(symbols(a) | symbols(b))
    if not names:
        return [{}]
    draw = random.Random(20)  # the same points for every answer, so that scores are deterministic
    whole = {name for name in names if _is_exponent_of_minus_one(a, name) or _is_exponent_of_minus_one(b, name)}
    points = []
    for attempt in range(TRIES):
        sign = 1 if attempt % 2 == 0 else -1  # √x² is not x
        points.append({
            name: mpmath.mpf(attempt + 1 + 3 * i) if name in whole else sign * mpmath.mpf(draw.randrange(10**6, 4 * 10**6)) / 10**6
            for i, name in enumerate(names)
        })  # fmt: skip
    return points


def _is_exponent_of_minus_one(tree: Tree, name: str) -> bool:
    """(-1)^n implies that n is an integer."""
    if tree[0] == "pow" and exact(tree[1]) == -1 and name in symbols(tree[2]):
        return True
    return any(_is_exponent_of_minus_one(part, name) for part in tree[1:] if isinstance(part, tuple))


_CONSTANTS = {"pi": mpmath.pi, "e": mpmath.e, "i": mpmath.mpc(0, 1)}
_FUNCTIONS = {
    "sin": mpmath.sin, "cos": mpmath.cos, "tan": mpmath.tan, "cot": mpmath.cot, "sec": mpmath.sec, "csc": mpmath.csc,
    "arcsin": mpmath.asin, "arccos": mpmath.acos, "arctan": mpmath.atan, "arccot": mpmath.acot,
    "sinh": mpmath.sinh, "cosh": mpmath.cosh, "tanh": mpmath.tanh,
    "ln": mpmath.log, "log10": mpmath.log10, "exp": mpmath.exp, "abs": abs, "floor": mpmath.floor, "ceil": mpmath.ceil,
}  # fmt: skip


def number(tree: Tree, point: dict[str, Any]) -> Any:
    """The value at a point, to 60 digits; None if it is undefined or would take too long to compute."""
    try:
        value = _evaluate(tree, point)
    except (ArithmeticError, ValueError, KeyError, TypeError, mp.NoConvergence):
        return None
    return value if mpmath.isfinite(value) else None


def _evaluate(tree: Tree, point: dict[str, Any]) -> Any:
    match tree:
        case ("num", value):
            return mpmath.mpf(value.numerator) / value.denominator
        case ("sym", name):
            return point[name]
        case ("const", name):
            return +_CONSTANTS[name]
        case ("neg", a):
            return -_evaluate(a, point)
        case ("add", a, b):
            return _evaluate(a, point) + _evaluate(b, point)
        case ("mul", a, b):
            return _evaluate(a, point) * _evaluate(b, point)
        case ("div", a, b):
            return _evaluate(a, point) / _evaluate(b, point)
        case ("pow", a, b):
            return _power(_evaluate(a, point), _evaluate(b, point))
        case ("root", n, a):
            return _root(_evaluate(n, point), _evaluate(a, point))
        case ("log", base, a):
            return mpmath.log(_bounded(_evaluate(a, point))) / mpmath.log(_bounded(_evaluate(base, point)))
        case ("binom", n, k):
            return mpmath.binomial(_bounded(_evaluate(n, point), 1e5), _bounded(_evaluate(k, point), 1e5))
        case ("call", "factorial", a):
            return mpmath.factorial(_bounded(_evaluate(a, point), 1e4))
        case ("call", "log", a):
            # Base e or 10, but the same on both sides: an arbitrary base, so that it equals neither ln nor lg.
            return mpmath.log(_bounded(_evaluate(a, point))) / 7
        case ("apply", name, a):
            # An unknown function: replaced by an arbitrary fixed one that no answer would contain.
            x = _bounded(_evaluate(a, point))
            return mpmath.sin(x * 3 + ord(name)) + x * x / 7 + ord(name)
        case ("call", name, a):
            return _FUNCTIONS[name](_bounded(_evaluate(a, point)))
    raise ValueError(tree[0])


def _bounded(value: Any, bound: float = 1e6) -> Any:
    if abs(value) > bound:
        raise ValueError("too large")  # precision, and so time, would grow with the value
    return value


def _power(base: Any, exponent: Any) -> Any:
    if abs(exponent) > 10_000 or abs(base) > LARGEST:
        raise ValueError("too large")
    return mpmath.power(base, exponent)


def _root(n: Any, value: Any) -> Any:
    # An odd root of a negative number is the real one.
    if n == int(mpmath.re(n)) and int(mpmath.re(n)) % 2 == 1 and mpmath.im(value) == 0 and value < 0:
        return -_power(-value, 1 / n)
    return mpmath.sqrt(value) if n == 2 else _power(value, 1 / n)


def rounds_to(value: Tree, rough: Tree) -> bool:
    """Whether `rough` equals `value` to its last digit."""
    a, b = number(value, {}), exact(rough)
    if a is None or b is None or mpmath.im(a) != 0:
        return False
    places = next((n for n in range(30) if (b * 10**n).denominator == 1), None)
    return places is not None and abs(a - mpmath.mpf(b.numerator) / b.denominator) <= mpmath.mpf(10) ** -places
