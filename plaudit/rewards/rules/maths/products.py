r"""P(1 + r): a function value, or a product? The other formula says: in P + Pr, P is a variable.

A letter that usually denotes a function is a factor only if the other formula has it as a variable and never applies it, and if
the bracket holds a sum with a number, as growth factors do: P(1 + r), P(1 - d). T(n - 1), P(A + B), E(X + 1) and f(1 + x) remain
function values: their arguments are indices, events, random variables and x.
"""

from plaudit.rewards.rules.maths.expressions import Tree, exact, symbols

_FACTORS = frozenset("FGEPT")
_RATES = frozenset("abcdpqrvw")
_ARGUMENTS = frozenset("xyznkmj")
"""Variables of functions and sequences."""


def with_products(a: Tree, b: Tree) -> tuple[Tree, Tree]:
    """Both formulas, with P(1 + r) as a product where the other one has P as a variable."""
    applied, other_applied = _applied(a), _applied(b)
    if not applied and not other_applied:
        return a, b
    return (
        _as_products(a, (applied & symbols(b)) - other_applied),
        _as_products(b, (other_applied & symbols(a)) - applied),
    )


def _applied(tree: Tree) -> frozenset[str]:
    """The letters that are applied to something."""
    found = frozenset().union(*(_applied(part) for part in tree[1:] if isinstance(part, tuple)))
    return found | {tree[1]} if tree[0] == "apply" else found


def _as_products(tree: Tree, letters: frozenset[str]) -> Tree:
    if not letters:
        return tree
    match tree:
        case ("pow", ("apply", name, a), n) if name in letters & _FACTORS and _is_growth(a):
            return ("mul", ("sym", name), ("pow", a, n))
        case ("apply", name, a) if name in letters & _FACTORS and _is_growth(a):
            return ("mul", ("sym", name), a)
    return tuple(_as_products(part, letters) if isinstance(part, tuple) else part for part in tree)


def _is_growth(tree: Tree) -> bool:
    """1 + r, 1 - d, 1 + rt."""
    names = symbols(tree)
    if tree[0] != "add" or not names & _RATES or names & _ARGUMENTS or not all(name.islower() for name in names):
        return False
    return any(exact(term) is not None for term in tree[1:])
