r"""Free integers and constants, which may have any name: kπ is nπ, x² + C is x² + K.

A letter is free if a domain says so (k ∈ ℤ), if the formula is linear in it with a rational multiple of π as its slope (π/4 + kπ),
or if it is a constant of integration, added to a function of one variable. Other letters are given by the problem: n + 1 is not
k + 1.
"""

from fractions import Fraction

from plaudit.rewards.rules.maths.expressions import Tree, exact, rename, symbols
from plaudit.rewards.rules.maths.shapes import Answer, Form, map_trees, trees_of

_INTEGERS = frozenset(["k", "n", "m", "l", "j", "z", "N", "K"])
_CONSTANTS = frozenset(["C", "c", "K", "C_1", "c_1"])
_INTEGRATED = frozenset(["x", "y", "t", "u", "s", "theta"])


def with_same_letter(truth: Answer, answer: Answer) -> Form:
    """The answer's form with its free letter named as the reference's; unchanged if that is not clearly the same letter."""
    if not truth.symbols or truth.symbols == answer.symbols:
        return answer.form
    wanted, given = truth.symbols - answer.symbols, answer.symbols - truth.symbols
    if len(wanted) != 1 or len(given) != 1:
        return answer.form
    [old], [new] = given, wanted
    kinds = _kind(answer, old), _kind(truth, new)
    if not kinds[0] or kinds[0] != kinds[1]:
        return answer.form
    return map_trees(answer.form, lambda tree: rename(tree, old, new))


def _kind(answer: Answer, name: str) -> str:
    """'integer', 'constant', or '' if the letter is not free."""
    declared = answer.domains.get(name, "")
    if declared:
        return "integer" if declared == "Z" else f"in {declared}"
    trees = [tree for tree in trees_of(answer.form) if name in symbols(tree)]
    if name in _INTEGERS and all(_counts_turns(tree, name) for tree in trees):
        return "integer"
    return "constant" if name in _CONSTANTS and all(_is_added(tree, name) for tree in trees) else ""


def _counts_turns(tree: Tree, name: str) -> bool:
    """The formula is a + q·name·π, with a rational q."""
    match tree:
        case ("add", a, b):
            sides = [side for side in (a, b) if name in symbols(side)]
            return len(sides) == 1 and _counts_turns(sides[0], name)
        case ("neg", a):
            return _counts_turns(a, name)
    return _without(tree, ("sym", name), ("const", "pi")) is not None


def _without(tree: Tree, *factors: Tree) -> Fraction | None:
    """q, if the tree is a product of q and exactly these factors."""
    left, value = list(factors), Fraction(1)

    def take(part: Tree, inverse: bool) -> bool:
        nonlocal value
        if part in left and not inverse:
            left.remove(part)
            return True
        if part[0] == "mul" or part[0] == "div":
            return take(part[1], inverse) and take(part[2], inverse != (part[0] == "div"))
        if part[0] == "neg":
            value = -value
            return take(part[1], inverse)
        number = exact(part)
        if not number:
            return False
        value = value / number if inverse else value * number
        return True

    return value if take(tree, False) and not left else None


def _is_added(tree: Tree, name: str) -> bool:
    """The formula is f(x) + name, for one variable x."""
    others = symbols(tree) - {name}
    return len(others) == 1 and others <= _INTEGRATED and _is_term(tree, name)


def _is_term(tree: Tree, name: str) -> bool:
    match tree:
        case ("add", a, b):
            sides = [side for side in (a, b) if name in symbols(side)]
            return len(sides) == 1 and _is_term(sides[0], name)
    return tree == ("sym", name)
