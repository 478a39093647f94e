r"""Exact comparison of formulas as quotients of polynomials: p/q = r/s exactly if p·s = r·q, coefficient by coefficient.

Variables are indeterminates. So is everything that is no sum, product, quotient or whole power: \sqrt{2}, \sin x, π. Equal
quotients are therefore equal formulas whatever these stand for; different ones differ for certain only if all are variables.
"""

from fractions import Fraction
from typing import Any

from plaudit.rewards.rules.maths.expressions import Tree, exact

Monomial = tuple[tuple[Any, int], ...]
Polynomial = dict[Monomial, Fraction]
Quotient = tuple[Polynomial, Polynomial]

MOST_TERMS = 80
HIGHEST_POWER = 24
_ONE: Polynomial = {(): Fraction(1)}
_AS_QUOTIENT = {"tan": ("sin", "cos"), "cot": ("cos", "sin"), "sec": (None, "cos"), "csc": (None, "sin")}


class _TooLarge(Exception):
    """Expanding it would take too long, or divide by zero."""


def same_quotient(a: Tree, b: Tree) -> bool | None:
    """Whether two formulas are the same quotient of polynomials; None if this cannot tell."""
    try:
        (p, q), (r, s) = _quotient(a), _quotient(b)
        same = _times(p, s) == _times(r, q)
    except _TooLarge:
        return None
    if same:
        return True
    # Of x, y, … alone, a formula has one such form; sin²x + cos²x and 1 are the same in two.
    return False if all(_is_plain(one) for one in (p, q, r, s)) else None


def ratio_of_equations(a: Tree, b: Tree) -> tuple[Fraction, bool] | None:
    """c with numerator(a) = c · numerator(b): then a = 0 and b = 0 are the same equation. Also whether a and b themselves, not only
    their numerators, differ by a constant factor. None if there is no such c, or this cannot tell."""
    try:
        (p, q), (r, s) = _quotient(a), _quotient(b)
    except _TooLarge:
        return None
    if not p or p.keys() != r.keys():  # no common factor is divided out: x(y − 1) = 0 has more solutions than y = 1
        return None
    ratios = {p[monomial] / r[monomial] for monomial in p}
    return (ratios.pop(), set(q) == set(s) == {()}) if len(ratios) == 1 else None


def _is_plain(p: Polynomial) -> bool:
    return all(isinstance(atom, str) for monomial in p for atom, _ in monomial)


def _quotient(tree: Tree) -> Quotient:
    value = exact(tree)
    if value is not None:
        return ({(): value} if value else {}), _ONE
    match tree:
        case ("sym", name):
            return {((name, 1),): Fraction(1)}, _ONE
        case ("neg", a):
            p, q = _quotient(a)
            return {monomial: -coefficient for monomial, coefficient in p.items()}, q
        case ("add", a, b):
            (p, q), (r, s) = _quotient(a), _quotient(b)
            return (_plus(p, r), q) if q == s else (_plus(_times(p, s), _times(r, q)), _times(q, s))
        case ("mul", a, b):
            (p, q), (r, s) = _quotient(a), _quotient(b)
            return _times(p, r), _times(q, s)
        case ("div", a, b):
            (p, q), (r, s) = _quotient(a), _quotient(b)
            if not r:
                raise _TooLarge
            return _times(p, s), _times(q, r)
        case ("pow", a, b):
            n = exact(b)
            if n is not None and n.denominator == 1 and abs(n) <= HIGHEST_POWER:
                p, q = _quotient(a)
                if n < 0:
                    p, q = q, p
                if not q:
                    raise _TooLarge
                return _power(p, abs(int(n))), _power(q, abs(int(n)))
        case ("call", name, a) if name in _AS_QUOTIENT:
            above, below = _AS_QUOTIENT[name]
            return (_ONE if above is None else _atom(("call", above, a))), _atom(("call", below, a))
    return _atom(tree), _ONE


def _atom(tree: Tree) -> Polynomial:
    """A formula as one indeterminate; formulas inside it are the same if their quotients are written the same."""
    parts = []
    for part in tree[1:]:
        if isinstance(part, tuple):
            p, q = _quotient(part)
            parts.append((frozenset(p.items()), frozenset(q.items())))
        else:
            parts.append(part)
    return {(((tree[0], *parts), 1),): Fraction(1)}


def _plus(p: Polynomial, r: Polynomial) -> Polynomial:
    total = dict(p)
    for monomial, coefficient in r.items():
        left = total.get(monomial, Fraction(0)) + coefficient
        if left:
            total[monomial] = left
        else:
            total.pop(monomial, None)
    return _within_bounds(total)


def _times(p: Polynomial, r: Polynomial) -> Polynomial:
    if p == _ONE or r == _ONE:
        return r if p == _ONE else p
    if len(p) * len(r) > MOST_TERMS**2:
        raise _TooLarge
    product: Polynomial = {}
    for one, a in p.items():
        for other, b in r.items():
            powers = dict(one)
            for atom, power in other:
                powers[atom] = powers.get(atom, 0) + power
            monomial = tuple(sorted(powers.items(), key=_order))
            total = product.get(monomial, Fraction(0)) + a * b
            if total:
                product[monomial] = total
            else:
                product.pop(monomial, None)
    return _within_bounds(product)


def _order(power: tuple[Any, int]) -> tuple[bool, str, int]:
    atom = power[0]
    return (True, atom, 0) if isinstance(atom, str) else (False, atom[0], hash(atom))


def _power(p: Polynomial, n: int) -> Polynomial:
    result = _ONE
    for _ in range(n):
        result = _times(result, p)
    return result


def _within_bounds(p: Polynomial) -> Polynomial:
    if len(p) > MOST_TERMS or any(max(abs(c.numerator), c.denominator).bit_length() > 2000 for c in p.values()):
        raise _TooLarge
    return p
