r"""The content of the last \boxed{}, or of several that are one answer; and what is said around it.

so \boxed{4} → 4                   \boxed{3} or \boxed{5} → 3, 5          \boxed{4} and then \boxed{5 → 4 (the second is cut off)
-\boxed{3} → -(3)                  4 + \boxed{3} = 7 → 3 (a gap filled)   not \boxed{3} → the whole line, which is no answer
"""

import re

MOST_BOXES = 16
"""Boxes that are considered, from the last one backwards."""
BRACES = re.compile(r"\\.|[{}]", re.S)
BETWEEN = re.compile(r"(?:[\s$,;.()]|\\[()\[\],;: ]|\\q?quad|\\text|\\mbox|[{}]|\bor\b|\band\b|\bund\b)*")
"""What may be between two boxes, or formulas, that are one answer."""
_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_WORD = re.compile(r"[^\s$.,]+")
_NEAR = 40
"""Characters around a box in which a denial or an operator is looked for."""
# Not 'x is not equal to \boxed{3}': that may be what was asked for.
_DENIED_BEFORE = re.compile(r"(?:\banswer\s+(?:is\s+not|isn['’]t|is\s+never)|(?:^|[.!?\n])\s*not)[\s$({\[\\]*$", re.I)
_DENIED_AFTER = re.compile(r"[\s$)\]\\}]*(?:text\s?{)?\s*(?:is|was)(?:\s+not|n['’]t|\s+wrong|\s+incorrect|\s+false)\b", re.I)
_OPERATOR_BEFORE = re.compile(r"(?:[-−+/^\d]|\\(?:cdot|times|div)|\\(?:[dt]?frac|sqrt)\s?{|}\s?{)\s?$")
_OPERATOR_AFTER = re.compile(r"\s?(?:[-−+/]|\^(?!\s?{?\s?\\circ)|\\(?:cdot|times|div))")
_SIGN = re.compile(r"(?:^|[^\w\s)}\]])\s*[-−]$")
_ITEM = re.compile(r"\s*(?:[-+]|\d+[.)])\s+$")
_ENDS = ("$", "\\(", "\\[", "\\)", "\\]", "\n")
_RELATION = re.compile(r"[=<>≤≥≈→]|\\(?:[lg]eq?|neq?|approx|sim|to|implies|Rightarrow|rightarrow)(?![a-zA-Z])")
_NO_FORMULA = re.compile(r"\\(?:text|boxed|fbox)|(?<![\\a-zA-Z])[a-zA-Z]{2}")


def boxed(text: str) -> str | None:
    """The answer in the last box, or None. Boxes separated only by 'or', 'and' or commas are one answer, a list."""
    boxes: list[tuple[int, str]] = []
    at = len(text)
    for _ in range(MOST_BOXES):
        at = max(text.rfind("\\boxed", 0, at), text.rfind("\\fbox", 0, at))
        if at < 0:
            break
        found = _BOX.match(text, at)
        box = found and _braced(text, found.end())
        if not box or not (content := box[1].strip()):
            continue  # cut off, or empty
        if boxes and not BETWEEN.fullmatch(text, box[0], boxes[0][0]):
            break
        if not boxes and (said := _said_around(text, at, box[0], content)):
            return said
        boxes.insert(0, (at, content))
    return ", ".join(dict.fromkeys(content for _, content in boxes)) or None


def _braced(text: str, at: int) -> tuple[int, str] | None:
    """End and content of the group that starts at `at`. Without braces, the group is the next word."""
    if text[at : at + 1] != "{":
        word = _WORD.match(text, at)
        return (word.end(), word[0]) if word else None
    depth = 0
    for brace in BRACES.finditer(text, at):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return brace.end(), text[at + 1 : brace.start()]
    return None


def _said_around(text: str, at: int, end: int, content: str) -> str | None:
    """The answer if it is more than the box's content: the box is denied, or part of a formula. None if it is simply boxed."""
    before, after = text[max(0, at - _NEAR) : at], text[end : end + _NEAR]
    if _DENIED_BEFORE.search(before) or _DENIED_AFTER.match(after):
        return f"{before}{content}{after}"
    if not _OPERATOR_BEFORE.search(before) and not _OPERATOR_AFTER.match(after):
        return None
    start = max((found + len(mark) for mark in _ENDS if (found := text.rfind(mark, 0, at)) >= 0), default=0)
    stop = min((found for mark in _ENDS if (found := text.find(mark, end)) >= 0), default=len(text))
    left, right = text[start:at], text[end:stop]
    if _SIGN.search(left) and not _OPERATOR_AFTER.match(right) and not _RELATION.search(right):
        return f"-({content})"
    if _ITEM.fullmatch(left) or _RELATION.search(left + right) or _NO_FORMULA.search(left) or _NO_FORMULA.search(right):
        return None
    return f"{left}({content}){right}".strip(" .,;")
