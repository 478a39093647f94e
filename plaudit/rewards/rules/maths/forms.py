r"""Parsing an answer into its form: a value, a list, a tuple, a region of the real line, an equation, a ratio, a matrix, or words.

5 \text{ cm}, x = 5, f(x) = x^2       Value, with its unit and the name it is assigned to
2, -8 ; 2 \text{ or } -8 ; \pm 3      Many('list'), in any order        \{2, -8\}  Many('set')
(1, 2)                                 Many('tuple'), in this order; also the open interval
[1, 2), x > 3, \{x | x < 1\}, \mathbb{R}   Region: intervals, ends open or closed; 'or' and \cup unite
8x - 3y + 5 = 0                        Relation
2:1                                    Many('ratio')
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from plaudit.rewards.rules.maths.answers import plain_number
from plaudit.rewards.rules.maths.expressions import Tree, Unreadable, read_expression, symbols
from plaudit.rewards.rules.maths.units import split_unit, without_prose

MOST_ITEMS = 100


@dataclass(frozen=True)
class Value:
    tree: Tree
    unit: str = ""
    name: str = ""
    """The left-hand side of the equals sign: 'x', 'AC', 'f(x)'."""
    bound: str = ""
    """The variable of a function: x in f(x)."""
    others: tuple[Tree, ...] = ()
    """In 'a = b = c', all but the last; all must agree."""
    rough: Tree | None = None
    """In 'a ≈ b', b."""


@dataclass(frozen=True)
class Many:
    kind: str
    items: tuple["Form", ...]


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
class Member:
    """'k ∈ ℤ': the domain of a parameter in an answer."""

    name: str
    of: str


Form = Value | Many | Region | Relation | Member

OO: Tree = ("const", "oo")
MINUS_OO: Tree = ("neg", OO)
_OPEN, _CLOSE = frozenset("([{"), frozenset(")]}")
_PIECES = re.compile(r"\\[a-zA-Z]+|\\.|[a-zA-Z]+|.", re.S)
_NAME = re.compile(r"\\?[A-Za-z]+'?(?:_(?:{[^{}]*(?:{[^{}]*})?[^{}]*}|\w))?(?:\\text\s*{[^{}]*})?")
_FUNCTION = re.compile(r"({?\\?[A-Za-z]}?(?:_\w)?)\s*\(\s*(\\?[A-Za-z]+)\s*\)")
_FUNCTION_VALUE = re.compile(r"[A-Za-z]\s*\(\s*-?\d+\s*\)")
_SET_NAME = re.compile(r"^[A-Z]\s*\\c[au]p\s*[A-Z]\s*=")
_POINT = re.compile(r"[A-Z]'?\s*(\(.*\))", re.S)
_SEQUENCE = re.compile(r"([A-Za-z])_(?:{([a-z])}|([a-z]))")
_RELATIONS = {"=": "=", "<": "<", ">": ">", "\\le": "<=", "\\ge": ">=", "\\ne": "!=", "\\approx": "~", "\\in": "in"}
_TURNED = {">": "<", ">=": "<="}


def read_form(text: str) -> Form:
    """The form of a normalised answer; raises Unreadable."""
    text = _SET_NAME.sub("", without_prose(text))
    if "\\begin" in text:
        return _matrix(text)
    if "\\pm" in text or "\\mp" in text:
        swapped = text.replace("\\mp", "\0").replace("\\pm", "\\mp").replace("\0", "\\pm")
        both = [re.sub(r"\\pm", "+", re.sub(r"\\mp", "-", sign)) for sign in (text, swapped)]
        return _flat_list([read_form(sign) for sign in both])
    pieces, joints = _split(text, {",", ";", "or", "and", "\\text{or}", "\\text{and}", "\\lor", "\\land", "\\cup"})
    if len(pieces) == 1 and not joints:
        return _read_item(pieces[0])
    if not 1 < len(pieces) <= MOST_ITEMS:
        raise Unreadable("no items, or too many")
    if all(joint == "," for joint in joints) and plain_number(text) is not None:
        return _read_item(text)  # 81,213
    items = [_read_item(piece) for piece in pieces]
    if "\\cup" in joints:
        if set(joints) != {"\\cup"}:
            raise Unreadable("a union in a list")
        return _union([_as_region(item) for item in items])
    if any(isinstance(item, Region) for item in items):
        return _join_regions(items, joints)
    return _flat_list(items)


def _join_regions(items: list[Form], joints: list[str]) -> Form:
    """'x < 1 or x > 3' is one region; 'x > 0 and x ≠ 1', or the same with a comma, is an intersection and stays a list."""
    united = set(joints) <= {"or", ","} and "or" in joints
    names = {item.variable for item in items if isinstance(item, Region)}
    if united and len(names) == 1:
        return _union([_as_region(item) for item in items])
    if united:
        raise Unreadable("regions of several variables")
    return Many("list", tuple(items))


def _flat_list(items: Sequence[Form]) -> Form:
    flat: list[Form] = []
    for item in items:
        flat.extend(item.items if isinstance(item, Many) and item.kind == "list" else [item])
    return Many("list", tuple(flat)) if len(flat) > 1 else flat[0]


def _union(regions: list[Region]) -> Region:
    return Region(tuple(part for region in regions for part in region.parts), regions[0].variable)


def _as_region(form: Form) -> Region:
    if isinstance(form, Region):
        return form
    if isinstance(form, Many) and form.kind in ("set", "list"):
        return _union([_as_region(item) for item in form.items])
    interval = open_interval(form)
    if interval is not None:
        return interval
    if isinstance(form, Value) and not form.unit and not form.others:
        return Region((Part(form.tree, form.tree, True, True),), form.name)
    raise Unreadable("no region")


def open_interval(form: Form) -> Region | None:
    """(1, 2) as an interval."""
    if isinstance(form, Many) and form.kind == "tuple" and len(form.items) == 2:
        low, high = form.items
        if isinstance(low, Value) and isinstance(high, Value) and not (low.name or high.name or low.unit or high.unit):
            return Region((Part(low.tree, high.tree, False, False),))
    return None


def _split(text: str, at: set[str]) -> tuple[list[str], list[str]]:
    """The pieces between separators outside brackets, and the separators."""
    text = re.sub(r"\\text\s*{\s*(or|and|if and only if|where)\s*}", r" \1 ", text)
    pieces, joints, start, depth, end = [], [], 0, 0, 0
    for found in _PIECES.finditer(text):
        piece = found[0]
        depth += (piece[-1] in _OPEN) - (piece[-1] in _CLOSE) if len(piece) == 1 or piece in ("\\{", "\\}") else 0
        if depth <= 0 and piece in at and not (piece == "," and _is_thousands(text, found.start())):
            pieces.append(text[start : found.start()].strip())
            joints.append(piece)
            start = found.end()
        end = found.end()
    pieces.append(text[start:end].strip())
    # 'a, and b' is one joint.
    kept = [(piece, joint) for piece, joint in zip(pieces, [*joints, ""], strict=True) if piece]
    return [piece for piece, _ in kept], [joint for _, joint in kept[:-1]]


def _is_thousands(text: str, comma: int) -> bool:
    """A comma without a space between one to three digits and exactly three: 81,213. In brackets a comma always separates."""
    return bool(
        re.match(r",\d{3}(?![\d])", text[comma : comma + 5])
        and re.search(r"(?<![\d.])(?:[1-9]\d{0,2}(?:,\d{3})*)$", text[:comma][-40:])
    )


# One item ------------------------------------------------------------------------------------------------------------


def _read_item(text: str) -> Form:
    text = text.strip()
    pieces, signs = _split(text, set(_RELATIONS))
    if len(pieces) > 1 or (signs and pieces):
        return _relation(pieces, [_RELATIONS[sign] for sign in signs])
    point = _POINT.fullmatch(text)
    bracketed = _bracketed(point[1] if point and "," in text.replace(";", ",") else text)
    if bracketed is not None:
        return bracketed
    if re.fullmatch(r"\\mathbb{[RZNQC]}|\\emptyset", text):
        return Region((Part(MINUS_OO, OO, False, False),)) if "R" in text else Value(("sym", text))
    ratio, _ = _split(text, {":"})
    if len(ratio) > 1:
        return Many("ratio", tuple(Value(read_expression(piece)) for piece in ratio))
    rest, unit = split_unit(text)
    return Value(read_expression(rest.replace(",", "") if plain_number(rest) is not None else rest), unit)


def _bracketed(text: str) -> Form | None:
    """A tuple, an interval or a set, if one pair of brackets encloses the entire text."""
    if text[:1] == "{" and text[-1:] == "}" and re.search(r"[,|]", text) and _balanced(text[1:-1]):
        text = f"\\{text[:-1]}\\}}"  # {0, 1} for \{0, 1\}
    opening = "\\{" if text.startswith("\\{") else text[:1]
    closing = "\\}" if text.endswith("\\}") else text[-1:]
    if opening not in ("(", "[", "\\{") or closing not in (")", "]", "\\}") or (opening == "\\{") != (closing == "\\}"):
        return None
    inside = text[len(opening) : len(text) - len(closing)]
    if not _balanced(inside):
        return None
    if opening == "\\{":
        builder, _ = _split(inside, {"|", ":"})
        if len(builder) == 2 and inside.count("|") <= 1:
            return _set_builder(*builder)
    pieces, joints = _split(re.sub(r",(?=\d)", ", ", inside), {",", ";"})
    if opening == "\\{":
        return Many("set", tuple(map(_read_item, pieces)))
    if len(pieces) < 2 or set(joints) - {",", ";"}:
        return None
    if len(pieces) > MOST_ITEMS:
        raise Unreadable("too many items")
    items = tuple(map(_read_item, pieces))
    if opening + closing == "()":
        return Many("tuple", items)
    if len(items) != 2:
        return Many("tuple", items) if opening + closing == "[]" else None
    low, high = items
    if not isinstance(low, Value) or not isinstance(high, Value):
        raise Unreadable("an interval of what?")
    return Region((Part(low.tree, high.tree, opening == "[", closing == "]"),))


def _balanced(text: str) -> bool:
    depth = 0
    for found in _PIECES.finditer(text):
        if len(found[0]) == 1 or found[0] in ("\\{", "\\}"):
            depth += (found[0][-1] in _OPEN) - (found[0][-1] in _CLOSE)
            if depth < 0:
                return False
    return depth == 0


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
    found = re.fullmatch(r"(.*?=)?\s*\\begin\s*{([bp]?matrix|array)}(?:{[lcr|]*})?(.*)\\end\s*{\2}\s*", text, re.S)
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
    if len(signs) == 2:
        return _between(pieces, signs)
    raise Unreadable("a chain of relations")


def _membership(name: str, of: str) -> Form:
    if re.fullmatch(r"\\mathbb{[ZNQCR]}(?:\^[*+]|_\+)?", of) and of != r"\mathbb{R}":
        return Member(name, of)
    form = read_form(of)
    return replace(form, variable=name) if isinstance(form, Region) else replace(_as_region(form), variable=name)


def _equation(pieces: list[str], signs: list[str]) -> Form:
    """'x = 5' is the value 5 of x; '1 + 4 = 5' is 5; '2x + y = 5' is an equation."""
    name, bound = _named(pieces[0])
    if not name:
        left = pieces[0]
        names = _bracketed(left) if left.startswith("(") else None
        if isinstance(names, Many) and len(pieces) == 2:
            return _assignments(names, read_form(pieces[1]))
        tree = read_expression(split_unit(left)[0])
        if symbols(tree) and len(pieces) == 2:
            return Relation("=", tree, read_expression(pieces[1]))
        if symbols(tree):
            raise Unreadable("a chain of equations")
        values = pieces
    else:
        values = pieces[1:]
    rough = None
    if signs[-1] == "~" and len(values) > 1:
        rough = read_expression(split_unit(values.pop())[0])
        signs = signs[:-1]
    if "~" in signs[: len(signs) - 1] or not values:
        raise Unreadable("a chain of rough equations")
    last = read_form(values[-1])
    if isinstance(last, Region | Many) and len(values) == 1:
        return replace(last, variable=name) if isinstance(last, Region) else last
    if not isinstance(last, Value) or last.name:
        raise Unreadable("an equation of another kind")
    others = tuple(read_expression(split_unit(value)[0]) for value in values[:-1])
    return replace(last, name=name, bound=bound, others=others, rough=rough)


def _named(text: str) -> tuple[str, str]:
    """('f(x)' → 'f', 'x'), ('a_n' → 'a', 'n'), ('x' → 'x', ''): the name that is assigned a value, and its variable."""
    text = text.strip()
    if function := _FUNCTION.fullmatch(text):
        return function[1].strip("{}"), function[2].lstrip("\\")
    if sequence := _SEQUENCE.fullmatch(text):
        return sequence[1] + "_", sequence[2] or sequence[3]
    text = re.sub(r"^\\text\s*{([A-Za-z ]+)}$", r"\1", text)
    if _NAME.fullmatch(text) or _FUNCTION_VALUE.fullmatch(text) or (re.fullmatch(r"[A-Za-z][A-Za-z ]*", text) and len(text) < 40):
        return re.sub(r"[\s{}]|\\text|\\", "", text), ""
    return "", ""


def _assignments(names: Many, values: Form) -> Form:
    if not isinstance(values, Many):
        raise Unreadable("names without values")
    if values.kind == "list":
        return Many("list", tuple(_assignments(names, value) for value in values.items))
    if len(values.items) != len(names.items):
        raise Unreadable("more names than values")
    return Many("tuple", values.items)


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
    if set(signs) <= {">", ">="}:
        pieces, signs = pieces[::-1], [_TURNED[sign] for sign in reversed(signs)]
    low, middle, high = map(read_expression, pieces)
    if not set(signs) <= {"<", "<="} or middle[0] != "sym" or middle[1] in symbols(low) | symbols(high):
        raise Unreadable("a chain of relations")
    return Region((Part(low, high, signs[0] == "<=", signs[1] == "<="),), middle[1])
