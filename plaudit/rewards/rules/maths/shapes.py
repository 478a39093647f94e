"""What an answer can be: a value, several of them, a region of the real line, a relation, a chain of relations."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

from plaudit.rewards.rules.maths.expressions import Tree, symbols
from plaudit.rewards.rules.maths.units import NO_UNIT, Unit


@dataclass(frozen=True)
class Value:
    tree: Tree
    unit: Unit = NO_UNIT
    name: str = ""
    """The left-hand side of the equals sign, or the label before a colon: 'x', 'AC', 'f(x)', 'maximum'."""
    also: tuple[str, ...] = ()
    """In 'x = y = z = 5', all names but the first."""
    bound: str = ""
    """The variable of a function: x in f(x)."""
    others: tuple[Tree, ...] = ()
    """In 'a = b = c', all but the last; all must agree."""
    rough: Tree | None = None
    """In 'a ≈ b', b; in 'x ≈ b', where x is only a name, `tree` is b too."""
    rough_decimals: int | None = None
    """As `decimals`, of `rough`."""
    decimals: int | None = None
    """Digits after the point of a plain decimal number; None if it has no point; -1 if it is a formula with one."""


@dataclass(frozen=True)
class Many:
    kind: str
    """list (in any order), set, tuple, ratio, matrix, row, statement (a condition and what holds under it)."""
    items: tuple["Form", ...]
    joint: str = ""
    """'and' or 'or' between statements; '' for commas, which mean 'and' there, and between values."""


@dataclass(frozen=True)
class Part:
    """One interval of the real line."""

    low: Tree
    high: Tree
    low_closed: bool
    high_closed: bool


@dataclass(frozen=True)
class Region:
    parts: tuple[Part, ...]
    variable: str = ""


@dataclass(frozen=True)
class Relation:
    """left ? right, where ? is =, <, ≤ or ≠ (> and ≥ are flipped)."""

    sign: str
    left: Tree
    right: Tree


@dataclass(frozen=True)
class Chain:
    """a < b ≤ c: from the smallest to the largest."""

    trees: tuple[Tree, ...]
    signs: tuple[str, ...]


@dataclass(frozen=True)
class Member:
    """'k ∈ ℤ': the domain of a parameter in an answer."""

    name: str
    of: str


Form = Value | Many | Region | Relation | Chain | Member


@dataclass(frozen=True)
class Answer:
    """A form, and the domains that are stated with it: 'for all x ∈ ℝ', 'k ∈ ℤ'."""

    form: Form
    domains: dict[str, str] = field(default_factory=dict)

    @cached_property
    def symbols(self) -> frozenset[str]:
        return frozenset().union(*map(symbols, trees_of(self.form)))


def map_trees(form: Form, change: Callable[[Tree], Tree]) -> Form:
    """The form with every formula in it changed."""
    match form:
        case Value():
            others, rough = tuple(map(change, form.others)), form.rough and change(form.rough)
            return replace(form, tree=change(form.tree), others=others, rough=rough)
        case Many():
            return replace(form, items=tuple(map_trees(item, change) for item in form.items))
        case Region():
            parts = (replace(part, low=change(part.low), high=change(part.high)) for part in form.parts)
            return replace(form, parts=tuple(parts))
        case Relation():
            return replace(form, left=change(form.left), right=change(form.right))
        case Chain():
            return replace(form, trees=tuple(map(change, form.trees)))
    return form


def trees_of(form: Form) -> list[Tree]:
    """Every formula of a form."""
    match form:
        case Value():
            return [form.tree, *form.others, *([] if form.rough is None else [form.rough])]
        case Many():
            return [tree for item in form.items for tree in trees_of(item)]
        case Region():
            return [tree for part in form.parts for tree in (part.low, part.high)]
        case Relation():
            return [form.left, form.right]
        case Chain():
            return list(form.trees)
    return []
