r"""Regions of the real line: unions of intervals, and what can be done with them.

(1, 2) ∪ [2, 3] = (1, 3]        x > 0 and x ≠ 1: (0, 1) ∪ (1, ∞)        {x | x < 3/2} − {−6}: (−∞, −6) ∪ (−6, 3/2)
"""

from dataclasses import replace
from functools import cmp_to_key
from typing import Any

import mpmath

from plaudit.rewards.rules.maths.expressions import Tree, Unreadable, symbols
from plaudit.rewards.rules.maths.shapes import Form, Many, Part, Region, Value
from plaudit.rewards.rules.maths.values import CLOSE, number

OO: Tree = ("const", "oo")
MINUS_OO: Tree = ("neg", OO)
EVERYTHING = Region((Part(MINUS_OO, OO, False, False),))


def as_region(form: Form) -> Region:
    """An interval, a set of numbers, or a number; raises Unreadable."""
    if isinstance(form, Region):
        return form
    if isinstance(form, Many) and form.kind in ("set", "list"):
        return union([as_region(item) for item in form.items])
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


def union(regions: list[Region]) -> Region:
    parts = tuple(part for region in regions for part in region.parts)
    return _merged(Region(parts, next((one.variable for one in regions if one.variable), "")))


def without(region: Region, points: Region) -> Region:
    """The region without single points."""
    for part in points.parts:
        if part.low != part.high:
            raise Unreadable("a difference of intervals")
        here = part.low
        gap = Region((Part(MINUS_OO, here, False, False), Part(here, OO, False, False)))
        region = intersection(region, gap)
    return region


def intersection(a: Region, b: Region) -> Region:
    """Of two regions whose ends are numbers; raises Unreadable for others."""
    if a.variable and b.variable and a.variable != b.variable:
        raise Unreadable("regions of several variables")
    parts = []
    for one in a.parts:
        for other in b.parts:
            low = max((one.low, one.low_closed), (other.low, other.low_closed), key=cmp_to_key(_later_start))
            high = min((one.high, one.high_closed), (other.high, other.high_closed), key=cmp_to_key(_later_end))
            if (order := _compare(low[0], high[0])) < 0 or (order == 0 and low[1] and high[1]):
                parts.append(Part(low[0], high[0], low[1], high[1]))
    if not parts:
        raise Unreadable("an empty region")
    return Region(tuple(parts), a.variable or b.variable)


def _later_start(a: tuple[Tree, bool], b: tuple[Tree, bool]) -> int:
    return _compare(a[0], b[0]) or b[1] - a[1]  # (1, … starts after [1, …


def _later_end(a: tuple[Tree, bool], b: tuple[Tree, bool]) -> int:
    return _compare(a[0], b[0]) or a[1] - b[1]


def _merged(region: Region) -> Region:
    """In order, with parts that overlap or touch as one. Regions whose ends are no numbers stay as they are written."""
    if any(_end(tree) is None for part in region.parts for tree in (part.low, part.high)):
        return region
    ordered = sorted(region.parts, key=cmp_to_key(lambda a, b: _later_start((a.low, a.low_closed), (b.low, b.low_closed))))
    parts = [ordered[0]]
    for part in ordered[1:]:
        last = parts[-1]
        gap = _compare(part.low, last.high)
        if gap > 0 or (gap == 0 and not (part.low_closed or last.high_closed)):
            parts.append(part)
        elif _later_end((part.high, part.high_closed), (last.high, last.high_closed)) > 0:
            parts[-1] = replace(last, high=part.high, high_closed=part.high_closed)
        else:
            raise Unreadable("a part of another part")  # 'x > 3 or x = 977' is a guess more
    return replace(region, parts=tuple(parts))


def _compare(a: Tree, b: Tree) -> int:
    if a == b:
        return 0
    x, y = _end(a), _end(b)
    if x is None or y is None:
        raise Unreadable("an end that is no number")
    if x == y or abs(x - y) < CLOSE:
        return 0
    return 1 if x > y else -1


def _end(tree: Tree) -> Any:
    if tree in (OO, MINUS_OO):
        return mpmath.inf if tree == OO else -mpmath.inf
    value = None if symbols(tree) else number(tree, {})
    return None if value is None or mpmath.im(value) != 0 else mpmath.re(value)
