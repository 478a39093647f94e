r"""Parsing an answer into its form: a value, a list, a tuple, a region of the real line, an equation, a ratio, a matrix, or words.

5 \text{ cm}, x = 5, f(x) = x^2       Value, with its unit and the name it is assigned to
2, -8 ; 2 \text{ or } -8 ; \pm 3      Many('list'), in any order        \{2, -8\}  Many('set')
(1, 2)                                 Many('tuple'), in this order; also the open interval
[1, 2), x > 3, \{x | x < 1\}, \mathbb{R}   Region: intervals, ends open or closed; 'or' and \cup unite
8x - 3y + 5 = 0                        Relation                          b < a < c  Chain
2:1                                    Many('ratio')

`read_answer` is the order of the stages: prose, domains, quantifiers, environments, lists, then item by item: labels, ±, relations,
brackets, ratios, units, numbers in words, and last the formula itself.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from math import gcd

from plaudit.rewards.rules.maths.answers import plain_number, without_figures
from plaudit.rewards.rules.maths.expressions import Tree, Unreadable, read_expression, symbols
from plaudit.rewards.rules.maths.labels import same_label, split_label
from plaudit.rewards.rules.maths.number_words import number_in_words, ordinal
from plaudit.rewards.rules.maths.prose import split_domains, without_prose
from plaudit.rewards.rules.maths.regions import EVERYTHING, MINUS_OO, OO, as_region, intersection, union, without
from plaudit.rewards.rules.maths.shapes import Answer, Chain, Form, Many, Member, Part, Region, Relation, Value
from plaudit.rewards.rules.maths.splitting import balanced, split
from plaudit.rewards.rules.maths.units import Unit, split_unit

MOST_ITEMS = 100
LONGEST = 2000
"""Longer answers, in characters, are not read."""
_JOINTS = {",", ";", "or", "and", "\\text{or}", "\\text{and}", "\\lor", "\\land", "\\cup"}
_SAID = {"or": "or", "\\lor": "or", "and": "and", "\\land": "and"}
_NAME = re.compile(r"\\?[A-Za-z]+'?(?:_(?:{[^{}]*(?:{[^{}]*})?[^{}]*}|\w))?(?:\\text\s*{[^{}]*})?")
_FUNCTION = re.compile(r"({?\\?[A-Za-z]}?(?:_\w)?)\s*\(\s*(\\?[A-Za-z]+)\s*\)")
_FUNCTION_VALUE = re.compile(r"[A-Za-z]\s*\(\s*-?\d+\s*\)")
_SET_NAME = re.compile(r"[A-Z]\s*\\c[au]p\s*[A-Z]\s*=")
_POINT = re.compile(r"[A-Z]'?\s*(\(.*\))", re.S)
_SEQUENCE = re.compile(r"([A-Za-z])_(?:{([a-z])}|([a-z]))")
_FORALL = re.compile(r"\\(forall|exists)(?![a-zA-Z])([^,;:]*)[,;:](.*)", re.S)
_MINUS_SET = re.compile(r"(?:(?<=\\})\s?-|\\(?:setminus|backslash)(?![a-zA-Z]))\s?(?=\\{)")
_RELATIONS = {"=": "=", "<": "<", ">": ">", "\\le": "<=", "\\ge": ">=", "\\ne": "!=", "\\approx": "~", "\\in": "in"}
_TURNED = {">": "<", ">=": "<="}
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}|\d{1,2}/\d{1,2}/\d{4}", re.A)
_TIME = re.compile(r"\d{1,2}:[0-5]\d", re.A)
_TEXT = re.compile(r"\\text\s?{([^{}]*)}")
_DECIMAL = re.compile(r"-?\d*\.(\d+)", re.A)


def read_answer(text: str) -> Answer:
    """The form of a normalised answer, and the domains stated with it; raises Unreadable."""
    if len(text) > LONGEST:
        raise Unreadable("too long")
    text, domains = split_domains(without_prose(without_figures(text)))
    form = read_form(text)
    if isinstance(form, Many) and form.kind == "list":
        for member in form.items:
            if isinstance(member, Member) and domains.setdefault(member.name, member.of) != member.of:
                raise Unreadable("two domains")
        form = _flat_list([item for item in form.items if not isinstance(item, Member)] or form.items, form.joint)
    return Answer(form, domains)


def read_form(text: str) -> Form:
    """The form of a text without prose; raises Unreadable."""
    text = _SET_NAME.sub("", text, count=1) if _SET_NAME.match(text) else text
    if "\\begin" in text:
        return _matrix(text)
    if quantified := _FORALL.fullmatch(text):
        # A statement of its own kind, which equals only one with the same condition.
        return Many(quantified[1], (read_form(quantified[2].strip()), read_form(quantified[3].strip())))
    pieces, joints = split(text, _JOINTS)
    if len(pieces) == 1 and not joints:
        return _read_item(pieces[0])
    if not 1 < len(pieces) <= MOST_ITEMS:
        raise Unreadable("no items, or too many")
    if all(joint == "," for joint in joints) and plain_number(text) is not None:
        return _read_item(text)  # 81,213
    if (mixed := _mixed(pieces, joints)) is not None:
        return mixed
    items = [_read_item(piece) for piece in pieces]
    if "\\cup" in joints:
        if set(joints) != {"\\cup"}:
            raise Unreadable("a union in a list")
        return union([as_region(item) for item in items])
    if any(isinstance(item, Region) for item in items):
        return _join_regions(items, joints)
    return _flat_list(items, _joint(items, joints))


def _joint(items: list[Form], joints: list[str]) -> str:
    """'and' or 'or' where it matters which: 'x = 1 or y = 2', p ∧ q; '' between values of one name: 'x = 1 or 2'."""
    said = {_SAID[joint] for joint in joints if joint in _SAID}
    values = [item for item in items if isinstance(item, Value)]
    several = len({re.sub(r"_?\d+$", "", value.name) for value in values if value.name}) > 1
    statements = several or any(isinstance(item, Relation | Chain) for item in items)
    if not said or not (statements or any(value.tree[0] == "sym" and not value.name for value in values)):
        return ""
    if len(said) > 1:
        raise Unreadable("'and' and 'or'")
    return said.pop()


def _mixed(pieces: list[str], joints: list[str]) -> Form | None:
    """'2 and 1/2', '2 and a half': a number, not a list."""
    if joints != ["and"] or not re.fullmatch(r"\d{1,12}|[a-z]+", pieces[0]):
        return None
    value = number_in_words(f"{pieces[0]} and {pieces[1]}")
    return None if value is None else Value(("num", value))


def _join_regions(items: list[Form], joints: list[str]) -> Form:
    """'x < 1 or x > 3' is one region; 'x > 0 and x ≠ 1', or the same with a comma, is the intersection; other lists stay lists."""
    regions = [item for item in items if isinstance(item, Region)]
    names = {region.variable for region in regions}
    if set(joints) <= {"or", "\\lor", ","} and {"or", "\\lor"} & set(joints):
        names |= {item.name for item in items if isinstance(item, Value)}
        if len(names) > 1:
            raise Unreadable("regions of several variables")
        return union([as_region(item) for item in items])
    excluded = any(_is_gap(region) for region in regions)
    if len(regions) == len(items) and len(names) == 1 and (excluded or set(joints) <= {"and", "\\land"}):
        try:
            both = regions[0]
            for region in regions[1:]:
                both = intersection(both, region)
            return both
        except Unreadable:
            pass
    return Many("list", tuple(items))


def _is_gap(region: Region) -> bool:
    """x ≠ 1."""
    return len(region.parts) == 2 and region.parts[0].high == region.parts[1].low


def _flat_list(items: Sequence[Form], joint: str = "") -> Form:
    flat: list[Form] = []
    for item in items:
        flat.extend(item.items if isinstance(item, Many) and item.kind == "list" else [item])
    return Many("list", tuple(flat), joint) if len(flat) > 1 else flat[0]


# One item ------------------------------------------------------------------------------------------------------------


def _read_item(text: str) -> Form:
    text = text.strip()
    label, text = split_label(text)
    if "\\pm" in text or "\\mp" in text:
        return _both_signs(text, label)
    form = _read_unlabelled(text)
    if not label:
        return form
    if not isinstance(form, Value) or form.name:
        raise Unreadable("a label of what?")
    return replace(form, name=label)


def _both_signs(text: str, label: str) -> Form:
    """1 ± √2 is two values, with the upper and the lower signs; (±1, ±2) is four points, one for every choice."""
    bracketed = re.fullmatch(r"(\(|\\{)(.*)(\)|\\})", text, re.S)
    if bracketed and balanced(bracketed[2]):
        pieces, _ = split(bracketed[2], {",", ";"})
        if len(pieces) > 1 and bracketed[1] == "(":
            choices = [""]
            for piece in pieces:
                signs = _signs(piece)
                choices = [f"{choice}, {sign}" if choice else sign for choice in choices for sign in signs]
                if len(choices) > MOST_ITEMS:
                    raise Unreadable("too many items")
            return _flat_list([_read_unlabelled(f"({choice})") for choice in choices])
        if len(pieces) > 1 or bracketed[1] == "\\{":
            return Many("set", tuple(_read_unlabelled(sign) for piece in pieces for sign in _signs(piece)))
    items = [_read_unlabelled(sign) for sign in _signs(text)]
    return _flat_list([replace(item, name=label) if label and isinstance(item, Value) else item for item in items])


def _signs(text: str) -> list[str]:
    if "\\pm" not in text and "\\mp" not in text:
        return [text]
    swapped = text.replace("\\mp", "\0").replace("\\pm", "\\mp").replace("\0", "\\pm")
    return [re.sub(r"\\pm", "+", re.sub(r"\\mp", "-", sign)) for sign in (text, swapped)]


def _read_unlabelled(text: str) -> Form:
    if difference := _MINUS_SET.search(text):
        return without(as_region(_read_item(text[: difference.start()])), as_region(_read_item(text[difference.end() :])))
    pieces, signs = split(text, set(_RELATIONS))
    if len(pieces) > 1 or (signs and pieces):
        return _relation(pieces, [_RELATIONS[sign] for sign in signs])
    point = _POINT.fullmatch(text)
    bracketed = _bracketed(point[1] if point and "," in text.replace(";", ",") else text)
    if bracketed is not None:
        return bracketed
    if re.fullmatch(r"\\mathbb{[RZNQC]}|\\emptyset", text):
        return EVERYTHING if "R" in text else Value(("sym", text))
    if _DATE.fullmatch(text):
        raise Unreadable("a date")  # no difference: 2024-01-05 is not 2024-05-01
    ratio, _ = split(text, {":"})
    if len(ratio) > 1:
        if _TIME.fullmatch(text) and gcd(*map(int, ratio)) > 1:
            raise Unreadable("a time")  # 2:30 is not 1:15; a ratio would be in lowest terms
        return Many("ratio", tuple(Value(read_expression(piece)) for piece in ratio))
    return _quantity(text)


def _quantity(text: str) -> Value:
    """A formula with its unit; a number in words."""
    said = (_TEXT.sub(r"\1", text) if "\\text" in text else text).strip()
    if (place := ordinal(said)) is not None:
        return Value(("num", Fraction(place)), Unit("th"))
    if (spelled := number_in_words(said)) is not None:
        return Value(("num", spelled))
    if said.lower() in ("infinity", "infinite", "infinitely many"):
        return Value(OO)
    rest, unit, factor = split_unit(text)
    if (spelled := number_in_words(rest)) is not None:
        return Value(("num", spelled * factor), unit)
    tree = read_expression(re.sub(r"[,\s]", "", rest) if plain_number(rest) is not None else rest)
    decimal = _DECIMAL.fullmatch(rest)
    decimals = len(decimal[1]) if decimal else -1 if re.search(r"\.\d", rest) else None
    return Value(tree if factor == 1 else ("mul", tree, ("num", factor)), unit, decimals=decimals if factor == 1 else None)


def _formula(text: str) -> Tree:
    """A formula whose unit does not matter, for it must have the value of another one that has it too."""
    value = _quantity(text)
    if value.unit.unknown:
        raise Unreadable("an unknown unit")
    return value.tree


def _bracketed(text: str) -> Form | None:
    """A tuple, an interval or a set, if one pair of brackets encloses the entire text."""
    if text[:1] == "{" and text[-1:] == "}" and re.search(r"[,|]", text) and balanced(text[1:-1]):
        text = f"\\{text[:-1]}\\}}"  # {0, 1} for \{0, 1\}
    opening = "\\{" if text.startswith("\\{") else text[:1]
    closing = "\\}" if text.endswith("\\}") else text[-1:]
    if opening not in ("(", "[", "\\{") or closing not in (")", "]", "\\}") or (opening == "\\{") != (closing == "\\}"):
        return None
    inside = text[len(opening) : len(text) - len(closing)]
    if not balanced(inside):
        return None
    if opening == "\\{":
        builder, _ = split(inside, {"|", ":"})
        if len(builder) == 2 and inside.count("|") <= 1:
            return _set_builder(*builder)
    pieces, joints = split(re.sub(r",(?=\d)", ", ", inside), {",", ";"})
    if len(pieces) > MOST_ITEMS:
        raise Unreadable("too many items")
    if opening == "\\{":
        items = [_read_item(piece) for piece in pieces]
        return Many(
            "set",
            tuple(one for item in items for one in (item.items if isinstance(item, Many) and item.kind == "list" else [item])),
        )
    if len(pieces) < 2 or set(joints) - {",", ";"}:
        return None
    items = tuple(map(_read_item, pieces))
    if opening + closing == "()":
        return Many("tuple", items)
    if len(items) != 2:
        return Many("tuple", items) if opening + closing == "[]" else None
    low, high = items
    if not isinstance(low, Value) or not isinstance(high, Value):
        raise Unreadable("an interval of what?")
    return Region((Part(low.tree, high.tree, opening == "[", closing == "]"),))


def _set_builder(element: str, condition: str) -> Form:
    name = re.sub(r"\\in\s*\\mathbb{R}", "", element).strip()
    form = read_form(condition)
    if isinstance(form, Region) and form.variable == name:
        return replace(form, variable="")
    if isinstance(form, Value) and form.name == name:
        return Many("set", (replace(form, name=""),))
    if isinstance(form, Many) and form.kind == "list":
        regions = [item for item in form.items if isinstance(item, Region) and item.variable == name]
        if len(regions) == len(form.items):
            return Many("list", tuple(replace(region, variable="") for region in regions))
    raise Unreadable("a set of another kind")


def _matrix(text: str) -> Form:
    found = re.fullmatch(r"([^\\]*=)?\s*\\begin\s*{([bp]?matrix|array)}(?:{[lcr|]*})?(.*)\\end\s*{\2}\s*", text, re.S)
    if found is None or "\\begin" in found[3]:
        raise Unreadable("an environment")
    rows = [row for row in re.split(r"\\\\", found[3]) if row.strip()]
    if sum(row.count("&") + 1 for row in rows) > MOST_ITEMS:
        raise Unreadable("too many items")
    cells = [[_read_item(cell) for cell in row.split("&")] for row in rows]
    if all(len(row) == 1 for row in cells):
        return Many("tuple", tuple(row[0] for row in cells))  # a column is a vector
    return Many("matrix", tuple(Many("row", tuple(row)) for row in cells))


# Relations -----------------------------------------------------------------------------------------------------------


def _relation(pieces: list[str], signs: list[str]) -> Form:
    if len(pieces) != len(signs) + 1:
        raise Unreadable("a relation without an end")
    if signs == ["in"]:
        return _membership(*pieces)
    if set(signs) <= {"=", "~"}:
        return _equation(pieces, signs)
    if len(signs) == 1:
        return _inequality(pieces[0], signs[0], pieces[1])
    return _between(pieces, signs)


def _membership(name: str, of: str) -> Form:
    if re.fullmatch(r"\\mathbb{[ZNQCR]}(?:\^[*+]|_\+)?", of) and of != r"\mathbb{R}":
        return Member(name.lstrip("\\"), of[8] + ("+" if of[-1] in "+*" else ""))
    form = read_form(of)
    return replace(form, variable=name) if isinstance(form, Region) else replace(as_region(form), variable=name)


def _equation(pieces: list[str], signs: list[str]) -> Form:
    """'x = 5' is the value 5 of x; '1 + 4 = 5' is 5; '2x + y = 5' is an equation."""
    name, bound = _named(pieces[0])
    if not name:
        left = pieces[0]
        if left.startswith("(") and len(pieces) == 2 and balanced(left[1:-1]) and "," in left:
            form = read_form(pieces[1])
            return _assignments(split(left[1:-1], {","})[0], _as_rough(form) if signs == ["~"] else form)
        tree = _formula(left)
        if symbols(tree) and signs == ["="]:
            return Relation("=", tree, read_expression(pieces[1]))
        if symbols(tree):
            raise Unreadable("a chain of equations")
        values = pieces
    else:
        values = pieces[1:]
    also = []
    while name and not bound and len(values) > 1 and re.fullmatch(r"\\?[A-Za-z](?:_\w)?", values[0]) and set(signs) == {"="}:
        also.append(_named(values.pop(0))[0])
    if "~" in signs[:-1]:
        raise Unreadable("a chain of rough equations")
    rough = _quantity(values.pop()) if signs[-1] == "~" and len(values) > 1 else None
    if rough and rough.unit.unknown:
        raise Unreadable("an unknown unit")
    last = read_form(values[-1])
    if signs[-1] == "~":
        last = _as_rough(last, rough)
    if isinstance(last, Region | Many) and len(values) == 1 and not also:
        return replace(last, variable=name) if isinstance(last, Region) else last
    if not isinstance(last, Value) or last.name:
        raise Unreadable("an equation of another kind")
    others = tuple(_formula(value) for value in values[:-1])
    return replace(last, name=name, also=tuple(sorted(also)), bound=bound, others=others)


def _as_rough(form: Form, to: Value | None = None) -> Form:
    """'form ≈ to'; without `to`, a form that is itself rough: 'x ≈ 1.5', '(x, y) ≈ (1.5, 2.5)'."""
    if isinstance(form, Many) and to is None:
        return replace(form, items=tuple(map(_as_rough, form.items)))
    if not isinstance(form, Value):
        raise Unreadable("a rough region")
    to = to or form
    return replace(form, rough=to.tree, rough_decimals=to.decimals)


def _named(text: str) -> tuple[str, str]:
    """('f(x)' → 'f', 'x'), ('a_n' → 'a', 'n'), ('x' → 'x', ''): the name that is assigned a value, and its variable."""
    text = text.strip()
    if function := _FUNCTION.fullmatch(text):
        return function[1].strip("{}"), function[2].lstrip("\\")
    if sequence := _SEQUENCE.fullmatch(text):
        return sequence[1] + "_", sequence[2] or sequence[3]
    text = re.sub(r"^\\text\s*{([A-Za-z ]+)}$", r"\1", text)
    if re.fullmatch(r"[A-Za-z][A-Za-z ]{2,39}", text) and not text.isupper():
        label, _ = split_label(f"{text}: 0")
        if not label:
            raise Unreadable("a name that is none")  # 'minus = 3'
        return same_label(text), ""
    if _NAME.fullmatch(text) or _FUNCTION_VALUE.fullmatch(text):
        return re.sub(r"[\s{}]|\\text|\\", "", text), ""
    return "", ""


def _assignments(names: list[str], values: Form) -> Form:
    """(x, y) = (1, 2): the tuple, with the names of its entries."""
    if not isinstance(values, Many):
        raise Unreadable("names without values")
    if values.kind == "list":
        return Many("list", tuple(_assignments(names, value) for value in values.items))
    if len(values.items) != len(names):
        raise Unreadable("more names than values")
    called = [_named(name) for name in names]
    items = [
        replace(v, name=n, bound=b) if isinstance(v, Value) and not v.name else v
        for v, (n, b) in zip(values.items, called, strict=True)
    ]
    return Many("tuple", tuple(items))


def _inequality(left: str, sign: str, right: str) -> Form:
    if sign in _TURNED:
        left, sign, right = right, _TURNED[sign], left
    a, b = read_expression(left), read_expression(right)
    if sign == "!=" and a[0] == "sym" and not symbols(b):
        return Region((Part(MINUS_OO, b, False, False), Part(b, OO, False, False)), a[1])
    if sign in ("<", "<="):
        closed = sign == "<="
        if a[0] == "sym" and a[1] not in symbols(b):
            return Region((Part(MINUS_OO, b, False, closed),), a[1])
        if b[0] == "sym" and b[1] not in symbols(a):
            return Region((Part(a, OO, closed, False),), b[1])
    return Relation(sign, a, b)


def _between(pieces: list[str], signs: list[str]) -> Form:
    """1 < x ≤ 2 is an interval, b < a < c a chain; both are read from the smallest to the largest."""
    if set(signs) <= {">", ">="}:
        pieces, signs = pieces[::-1], [_TURNED[sign] for sign in reversed(signs)]
    if not set(signs) <= {"<", "<="} or len(pieces) > MOST_ITEMS:
        raise Unreadable("relations in both directions")
    trees = tuple(map(read_expression, pieces))
    if len(trees) == 3 and trees[1][0] == "sym" and trees[1][1] not in symbols(trees[0]) | symbols(trees[2]):
        return Region((Part(trees[0], trees[2], signs[0] == "<=", signs[1] == "<="),), trees[1][1])
    return Chain(trees, tuple(signs))
