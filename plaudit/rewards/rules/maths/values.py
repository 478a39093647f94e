"""Whether formulas have the same value: exactly where they are rational, else to 60 digits at random points for their variables.

Two different formulas agree at almost no point, so one point rejects and several accept: p = q at n independent points drawn from
S has a probability of at most (degree / |S|)^n, with |S| = 10^18 here. That holds only for points which the author of the answer
does not know: they are drawn from a key, which is a hash of the run's seed and the row.
"""

import random
import zlib
from collections.abc import Iterator
from typing import Any

import mpmath
from mpmath import mp

from plaudit.rewards.rules.maths.expressions import Tree, exact, symbols
from plaudit.rewards.rules.maths.rational import ratio_of_equations, same_quotient
from plaudit.rewards.rules.maths.shapes import Relation

mp.dps = 60
CLOSE = mpmath.mpf(10) ** -45
"""Difference between 60-digit numbers that rounding can explain."""
LARGEST = mpmath.mpf(10) ** 40
"""Beyond this, 60 digits cannot show whether two numbers are equal."""
SMALLEST = mpmath.mpf(10) ** -30
"""A smaller number could be lost in a sum without a trace: formulas that contain one are not compared at that point."""
NOISE = mpmath.mpf(10) ** -40
"""What is left of a 0 that was computed with 60 digits, as sin π, is smaller than this."""
POINTS, POINTS_WITH_BRANCHES = 6, 24
FEWEST_POINTS = 4
"""Formulas that are undefined at most points must agree at this many."""
SCALES = ((1, 4), (-4, -1), (0, 1), (-1, 0), (4, 20), (-20, -4), (20, 10**4), (-(10**4), -20))
"""Ranges of the points, taken in turn: |x| is x on half of them, and max(0, 1 − |x|) is 0 on most."""
TRIES = 80


def equal(a: Tree, b: Tree, key: int) -> bool:
    if a == b:
        return True
    x, y = exact(a), exact(b)
    if x is not None and y is not None:
        return x == y
    needed = POINTS
    if symbols(a) or symbols(b):
        if (decided := same_quotient(a, b)) is not None:
            return decided
        if (branches := _has_branches(a)) != _has_branches(b):
            return False  # |f| is f wherever f is positive, which may be at every point
        needed = POINTS_WITH_BRANCHES if branches else POINTS
    agreed = 0
    for point, mixed in _points(a, b, key):
        u, v = number(a, point), number(b, point)
        if u is None or v is None or (point and max(abs(u), abs(v)) > LARGEST):
            continue
        if mixed and (mpmath.im(u) or mpmath.im(v)):
            continue  # √x · √y is √(xy) only for x and y of the same sign
        size = max(abs(u), abs(v))
        if size > LARGEST or abs(u - v) > CLOSE * max(size, 1):
            return False
        agreed += 1
        if agreed == needed or not point:
            return True
    return agreed >= FEWEST_POINTS


def same_relation(a: Relation, b: Relation, key: int) -> bool:
    """Equations: their numerators are the same up to a constant factor (xy = 6 and y = 6/x), or left − right is, at random points.
    Inequalities: left − right is, up to a positive constant factor."""
    f, g = (("add", one.left, ("neg", one.right)) for one in (a, b))
    if a.sign != b.sign or symbols(f) != symbols(g):
        return False
    if not symbols(f):
        return equal(a.left, b.left, key) and equal(a.right, b.right, key)  # all true statements are proportional
    exactly = ratio_of_equations(f, g)
    if exactly is not None:
        ratio, undivided = exactly
        return a.sign == "=" or (undivided and (a.sign == "!=" or ratio > 0))
    ratio, agreed = None, 0
    for point, _ in _points(f, g, key):
        u, v = number(f, point), number(g, point)
        if u is None or v is None or abs(v) < CLOSE or abs(u) < CLOSE or max(abs(u), abs(v)) > LARGEST:
            continue
        if ratio is None:
            ratio = u / v
        if abs(u / v - ratio) > CLOSE * abs(ratio):
            return False
        agreed += 1
        if agreed == POINTS:
            break
    if ratio is None or agreed < FEWEST_POINTS:
        return False
    return a.sign in ("=", "!=") or (abs(mpmath.im(ratio)) < CLOSE and mpmath.re(ratio) > 0)


def _points(a: Tree, b: Tree, key: int) -> Iterator[tuple[dict[str, Any], bool]]:
    """Values for the variables: all on one scale and of one sign, or, every other time, mixed."""
    names = sorted(symbols(a) | symbols(b))
    if not names:
        yield {}, False
        return
    draw = random.Random(key)
    whole = {name for name in names if _is_exponent_of_minus_one(a, name) or _is_exponent_of_minus_one(b, name)}
    for attempt in range(TRIES):
        mixed = len(names) > 1 and attempt % 2 == 1
        point = {}
        for name in names:
            low, high = draw.choice(SCALES[:6]) if mixed else SCALES[(attempt if len(names) == 1 else attempt // 2) % len(SCALES)]
            point[name] = low + (high - low) * mpmath.mpf(draw.randrange(1, 10**18)) / 10**18
            if name in whole:
                point[name] = mpmath.mpf(draw.randrange(1, 60))
        yield point, mixed


def _has_branches(tree: Tree) -> bool:
    """Whether it contains |…|, ⌊…⌋, a root or an inverse function of a variable, which are other formulas on other ranges."""
    match tree:
        case ("call", "abs" | "floor" | "ceil", a) | ("root", _, a) if symbols(a):
            return True
        case ("call", str(name), a) if name.startswith("arc") and symbols(a):
            return True
        case ("pow", a, b) if (
            symbols(tree) and (b[0] == "div" or exact(b) is not None) and getattr(exact(b), "denominator", 2) != 1
        ):
            return True
    return any(_has_branches(part) for part in tree[1:] if isinstance(part, tuple))


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
            return _not_lost(mpmath.mpf(value.numerator) / value.denominator)
        case ("sym", name):
            return point[name]
        case ("const", name):
            return +_CONSTANTS[name]
        case ("neg", a):
            return -_evaluate(a, point)
        case ("add", a, b):
            return _evaluate(a, point) + _evaluate(b, point)
        case ("mul", a, b):
            return _product(_evaluate(a, point), _evaluate(b, point))
        case ("div", a, b):
            above = _evaluate(a, point)
            quotient = above / _evaluate(b, point)
            return quotient if abs(above) < NOISE else _not_lost(quotient)
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
            x, which = _bounded(_evaluate(a, point)), zlib.crc32(name.encode()) / mpmath.mpf(2**24)
            return mpmath.sin(x * 3 + which) + x * x / 7 + which
        case ("call", name, a):
            value = _FUNCTIONS[name](_bounded(_evaluate(a, point)))
            return _not_lost(value) if name == "exp" else value
    raise ValueError(tree[0])


def _bounded(value: Any, bound: float = 1e6) -> Any:
    if abs(value) > bound:
        raise ValueError("too large")  # precision, and so time, would grow with the value
    return value


def _power(base: Any, exponent: Any) -> Any:
    if abs(exponent) > 10_000 or abs(base) > LARGEST:
        raise ValueError("too large")
    return _not_lost(mpmath.power(base, exponent))


def _product(a: Any, b: Any) -> Any:
    product = a * b
    return product if abs(a) < NOISE or abs(b) < NOISE else _not_lost(product)


def _not_lost(value: Any) -> Any:
    if value and abs(value) < SMALLEST:
        raise ValueError("too small")
    return value


def _root(n: Any, value: Any) -> Any:
    # An odd root of a negative number is the real one.
    if n == int(mpmath.re(n)) and int(mpmath.re(n)) % 2 == 1 and mpmath.im(value) == 0 and value < 0:
        return -_power(-value, 1 / n)
    return mpmath.sqrt(value) if n == 2 else _power(value, 1 / n)


def rounds_to(value: Tree, rough: Tree, decimals: int | None) -> bool:
    """Whether `value`, rounded to the digits of `rough`, is `rough`: |value − rough| ≤ ½ · 10^−decimals. `decimals`: those of a
    plain number; -1 if it is a formula with a point, as 1.5 · 10³, whose shortest decimal counts; None if it has no point."""
    b = exact(rough)
    if b is None:
        return False
    tried = range(30) if decimals == -1 else [decimals or 0]
    places = next((n for n in tried if (b * 10**n).denominator == 1), None)
    return places is not None and within(value, b, mpmath.mpf(10) ** -places / 2)


def within(tree: Tree, value: Any, distance: Any) -> bool:
    """Whether a formula without variables is a real number at most this far from a rational one."""
    a = number(tree, {})
    return (
        a is not None and mpmath.im(a) == 0 and abs(a - mpmath.mpf(value.numerator) / value.denominator) <= distance * (1 + CLOSE)
    )
