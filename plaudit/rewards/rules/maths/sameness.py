"""Whether two forms are the same answer. The reference determines the required form, and what may be left out."""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeGuard

from plaudit.rewards.rules.maths.expressions import Tree, Unreadable, exact, read_expression, rename, symbols
from plaudit.rewards.rules.maths.labels import is_label
from plaudit.rewards.rules.maths.parameters import with_same_letter
from plaudit.rewards.rules.maths.products import with_products
from plaudit.rewards.rules.maths.regions import open_interval
from plaudit.rewards.rules.maths.rounding import half_a_digit, is_a_decimal
from plaudit.rewards.rules.maths.shapes import Answer, Chain, Form, Many, Member, Part, Region, Relation, Value
from plaudit.rewards.rules.maths.units import SHORT, Unit
from plaudit.rewards.rules.maths.values import equal, number, rounds_to, same_relation, within

_DEPENDENT = {"y": {"x"}, "rho": {"theta"}, "r": {"theta"}, "z": {"x", "y"}, "s": {"t"}, "v": {"t"}}
"""What a formula without a left-hand side stands for, by its variables: 6/x for xy = 6."""
_PRODUCT = re.compile(r"[a-z]{2}")
_LETTER = re.compile(r"[A-Za-z]")
EMPTY = Value(("sym", "\\emptyset"))
_ONE: Tree = ("num", Fraction(1))


@dataclass(frozen=True)
class Comparison:
    key: int
    """Of the random points: a hash of the run's seed and the row."""
    tolerance: float = 0.0
    strict: bool = False
    """No rounding, no lists in another order, no labels that the reference does not have."""

    def same_answer(self, truth: Answer, answer: Answer) -> bool:
        form = with_same_letter(truth, answer)
        for name, domain in answer.domains.items():
            if truth.domains.get(name, domain) != domain:
                return False
        return self.same(truth.form, form)

    def same(self, truth: Form, answer: Form) -> bool:
        if _is_single(truth) and not isinstance(answer, Many):
            truth = truth.items[0]
        if _is_single(answer) and not isinstance(truth, Many):
            answer = answer.items[0]
        if isinstance(truth, Region) or isinstance(answer, Region):
            return self.same_region(truth, answer)
        match truth, answer:
            case Value(), Value():
                return self.same_value(truth, answer) or (bool(symbols(answer.tree)) and self.same_product(truth, answer))
            case Many(), Many():
                return self.same_many(truth, answer)
            case Relation(), Relation():
                return same_relation(truth, answer, self.key)
            case (Relation(sign="="), Value()) | (Value(), Relation(sign="=")):
                return self.as_one_relation(truth, answer)
            case Chain(), Chain():
                both = zip(truth.trees, answer.trees, strict=False)
                return truth.signs == answer.signs and all(equal(a, b, self.key) for a, b in both)
            case Member(), Member():
                return truth == answer
            case (Many(kind="ratio"), Value()) | (Value(), Many(kind="ratio")):
                return self.same_ratio(truth, answer)
        return False

    # Values -----------------------------------------------------------------------------------------------------------

    def same_value(self, truth: Value, answer: Value) -> bool:
        tree = answer.tree
        if truth.bound and answer.bound and truth.bound != answer.bound:
            if truth.bound in symbols(tree):
                return False
            tree = rename(tree, answer.bound, truth.bound)  # f(t) = t² is f(x) = x²
        if not _same_name(truth, answer) or not self.consistent(truth) or not self.consistent(answer):
            return False
        if answer.also and answer.also != truth.also:
            return False  # 'A = B = 60' says more than 'A = 60'
        if truth.others and answer.others and not truth.name and not answer.name:
            return False  # '8 + 16 = 24' and '6 · 4 = 24': it is unclear which side was required; equal texts never get here
        values = [tree]
        if answer.rough is not None:
            if not rounds_to(answer.tree, answer.rough, answer.rough_decimals):
                return False  # '3 ≈ 5' is two answers
            # A whole number, or a formula, is exact: 'π ≈ 3' is not 3.
            rough_is_enough = truth.decimals is not None or truth.rough is not None
            values = [] if answer.rough == answer.tree else values
            values += [answer.rough] if rough_is_enough else []
        wanted = [truth.tree] if truth.rough is None else [truth.tree, truth.rough]
        if any(self.same_quantity(one, truth.unit, value, answer.unit) for one in wanted for value in values):
            return True
        return answer.decimals is None and answer.rough is None and self.rounded(truth, tree, answer.unit)

    def same_quantity(self, truth: Tree, truth_unit: Unit, answer: Tree, answer_unit: Unit) -> bool:
        """A unit may be left out, or added to a reference without one; two units must be the same. A word that is no known unit
        must be in the reference."""
        if not answer_unit.unknown <= truth_unit.unknown:
            return False
        truth, truth_unit = _with_letters(truth, truth_unit, answer)
        answer, answer_unit = _with_letters(answer, answer_unit, truth)
        a, b = truth_unit.name, answer_unit.name
        if a == b:
            return self.equal(truth, answer)
        if "%" in (a, b):
            if a and b:
                return False
            if self.equal(_scaled(truth, a), _scaled(answer, b)):
                return True  # 50 % = 0.5
            # If a percentage is required, '50' is 50 %. But a bare reference of at most 1 may be a share, so '1 %' is not 1.
            bare = exact(truth) if b else None
            return self.equal(truth, answer) and (not b or (bare is not None and abs(bare) > 1))
        if "deg" in (a, b):
            radians = self.equal(_scaled(truth, a), _scaled(answer, b))
            return radians or (not (a and b) and self.equal(truth, answer))
        return (not (a and b) or (bool(truth_unit.unknown) and b in a)) and self.equal(truth, answer)

    def rounded(self, truth: Value, answer: Tree, answer_unit: Unit) -> bool:
        """An exact answer whose rounding to the reference's decimals is the reference."""
        value = exact(truth.tree)
        allowed = None if value is None or self.strict else half_a_digit(value, truth.decimals)
        a, b = truth.unit.name, answer_unit.name
        if value is None or allowed is None or symbols(answer) or answer_unit.unknown or (a and b and a != b) or "deg" in (a, b):
            return False
        given = exact(answer)
        if given is not None and is_a_decimal(given):
            return False
        as_percent: Tree = ("mul", answer, ("num", Fraction(100)))
        return within(answer, value, allowed) or (a == "%" and not b and within(as_percent, value, allowed))

    def equal(self, truth: Tree, answer: Tree) -> bool:
        if equal(truth, answer, self.key):
            return True
        products = with_products(truth, answer)
        if products != (truth, answer) and equal(*products, self.key):
            return True
        if not self.tolerance or symbols(truth) or symbols(answer):
            return False
        a, b = number(truth, {}), number(answer, {})
        return a is not None and b is not None and abs(a - b) <= self.tolerance * abs(a)

    def consistent(self, value: Value) -> bool:
        """All sides of 'a = b = c' are the same number: '3 = 5' is two answers, 'A = B + C = 60' assigns more than A."""
        return all(equal(other, value.tree, self.key) for other in value.others)

    def same_product(self, truth: Value, answer: Value) -> bool:
        """'xy = 6' is a value of xy, and an equation: '6/x' is its solution."""
        if not _PRODUCT.fullmatch(truth.name) or truth.unit or truth.others or truth.also:
            return False
        factors: list[Tree] = [("sym", letter) for letter in truth.name]
        return self.as_one_relation(Relation("=", ("mul", factors[0], factors[1]), truth.tree), answer)

    # Several ----------------------------------------------------------------------------------------------------------

    def same_many(self, truth: Many, answer: Many) -> bool:
        kinds = {truth.kind, answer.kind}
        if kinds == {"ratio"}:
            return self.same_ratio(truth, answer)
        if len(truth.items) != len(answer.items) or (truth.joint == "or") != (answer.joint == "or"):
            return False
        named = _names(truth), _names(answer)
        if "set" in kinds and _count_sets(truth) != _count_sets(answer):
            return False  # {{1}} is not {1}
        if kinds <= {"list", "set"}:
            return self.same_list(truth, answer, *named)
        if kinds == {"tuple"} and all(named) and named[0] == named[1]:
            return self.same_any_order(truth.items, answer.items)  # (x, y) = (1, 2) is (y, x) = (2, 1)
        if kinds == {"tuple"} and not named[0] and named[1] and not _in_order(answer):
            return False  # (y, x) = (1, 2) is (2, 1)
        if kinds == {"tuple", "list"} and any(named):
            return self.same_in_order(truth.items, answer.items)
        return len(kinds) == 1 and self.same_in_order(truth.items, answer.items)

    def same_list(self, truth: Many, answer: Many, wanted: tuple[str, ...] | None, given: tuple[str, ...] | None) -> bool:
        """'x = 2, y = 3' and '2, 3' are compared in order; 'x = 2 or x = 3', and values with labels ('Maximum: 3, Minimum: 1') that
        the reference does not have, in any order."""
        if wanted and given:
            return wanted == given and self.same_any_order(truth.items, answer.items)
        if given and not self.strict and all(map(is_label, given)):
            return self.labels_fit(answer) and self.same_any_order(truth.items, answer.items)
        if wanted or given or (self.strict and {truth.kind, answer.kind} == {"list"}):
            return self.same_in_order(truth.items, answer.items)
        return self.same_any_order(truth.items, answer.items)

    def labels_fit(self, answer: Many) -> bool:
        """A maximum is no smaller than a minimum."""
        values = {item.name: number(item.tree, {}) for item in answer.items if isinstance(item, Value)}
        if "maximum" not in values or "minimum" not in values:
            return True
        high, low = values["maximum"], values["minimum"]
        return high is not None and low is not None and high >= low

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
        sides = [form.items if isinstance(form, Many) else (form, Value(_ONE)) for form in (truth, answer)]
        if len(sides[0]) != len(sides[1]):
            return False
        trees = [[form.tree for form in side if isinstance(form, Value)] for side in sides]
        if any(equal(tree, ("num", Fraction(0)), self.key) for tree in trees[1]):
            return False
        if isinstance(truth, Value) and len(trees[1]) == 2 and self.rounded(truth, ("div", trees[1][0], trees[1][1]), Unit()):
            return True
        pairs = itertools.combinations(range(len(trees[0])), 2)
        return all(equal(("mul", trees[0][i], trees[1][j]), ("mul", trees[0][j], trees[1][i]), self.key) for i, j in pairs)

    # Regions and relations --------------------------------------------------------------------------------------------

    def same_region(self, truth: Form, answer: Form) -> bool:
        regions = [form if isinstance(form, Region) else open_interval(form) for form in (truth, answer)]
        one, other = regions
        if one is None or other is None or len(one.parts) != len(other.parts):
            return False
        if one.variable and other.variable and one.variable != other.variable:
            return False
        return any(
            all(self.same_part(part, match) for part, match in zip(one.parts, order, strict=True))
            for order in ([other.parts] if len(other.parts) > 4 else itertools.permutations(other.parts))
        )

    def same_part(self, a: Part, b: Part) -> bool:
        ends = (a.low_closed, a.high_closed) == (b.low_closed, b.high_closed)
        return ends and equal(a.low, b.low, self.key) and equal(a.high, b.high, self.key)

    def as_one_relation(self, truth: Form, answer: Form) -> bool:
        """'y = 2x + 1' equals '2x - y + 1 = 0'; '6/x' answers 'xy = 6', for it can only be y."""
        sides = []
        for form, other in ((truth, answer), (answer, truth)):
            if isinstance(form, Value):
                name = form.name or (_dependent(form, other) if form is answer else "")
                if not name or form.bound or form.others or form.unit or form.also:
                    return False
                form = Relation("=", ("sym", name), form.tree)
            assert isinstance(form, Relation)
            sides.append(form)
        return same_relation(sides[0], sides[1], self.key)


def _dependent(value: Value, relation: Form) -> str:
    assert isinstance(relation, Relation)
    given = symbols(value.tree)
    missing = (symbols(relation.left) | symbols(relation.right)) - given
    [name] = missing if len(missing) == 1 else [""]
    return name if given and given == _DEPENDENT.get(name) else ""


def _same_name(truth: Value, answer: Value) -> bool:
    """'x = 5' is '5', but not 'y = 5'; 'y = x²' is 'f(x) = x²', and 'x_1' is 'x'."""
    if not truth.name or not answer.name or truth.name == answer.name:
        return True
    if bool(truth.bound) != bool(answer.bound):
        return "y" in (truth.name, answer.name)
    return False


def _is_single(form: Form) -> TypeGuard[Many]:
    """{2}, which may stand for 2; {∅} is not ∅."""
    return isinstance(form, Many) and form.kind == "set" and len(form.items) == 1 and form.items[0] != EMPTY


def _count_sets(form: Many) -> int:
    return sum(item == EMPTY or (isinstance(item, Many) and item.kind == "set") for item in form.items)


def _names(form: Many) -> tuple[str, ...] | None:
    """The names in 'x = 2, y = 3', sorted; None if all are the same name, or some item has none."""
    names = [re.sub(r"_?\d+$", "", item.name) if isinstance(item, Value) else "" for item in form.items]
    return tuple(sorted(names)) if all(names) and len(set(names)) > 1 else None


def _in_order(form: Many) -> bool:
    """(x, y), (a, b, c): the names are in the order of the alphabet, or are no letters."""
    names = [item.name for item in form.items if isinstance(item, Value)]
    return names == sorted(names) or any(len(name) > 1 for name in names)


def _with_letters(tree: Tree, unit: Unit, other: Tree) -> tuple[Tree, Unit]:
    """'5 m' is 5 times m where the other side has the variable m; '5 m/s' is '5m/s', which is read as a formula."""
    if not (unit.name in SHORT or "/" in unit.name) or not symbols(other).issuperset(_LETTER.findall(unit.name)):
        return tree, unit
    try:
        return ("mul", tree, read_expression(unit.name)), Unit()
    except Unreadable:
        return tree, unit


def _scaled(tree: Tree, unit: str) -> Tree:
    if unit == "%":
        return ("div", tree, ("num", Fraction(100)))
    return ("mul", tree, ("div", ("const", "pi"), ("num", Fraction(180)))) if unit == "deg" else tree
