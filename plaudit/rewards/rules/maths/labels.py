r"""Labels before values, and enumerations.

Maximum: 3, Minimum: 1 → maximum = 3, minimum = 1           Sequence 1: 1, 2 and Sequence 2: 3, 4 → 1, 2, 3, 4
Paolo: 18, Qing: 14 → paolo = 18, qing = 14                  AB:BC = 1:2 has no label, it is a ratio
maximum 3, min value 1 → maximum = 3, minimum = 1            minus 3 has no label: without a colon, other words may be operations
"""

import re

from plaudit.rewards.rules.maths.number_words import MULTIPLIERS
from plaudit.rewards.rules.maths.prose import CHANGES_MEANING, words_of

_LABEL = re.compile(r"(?:\\text\s?{\s?)?([A-Za-z][A-Za-z ]{1,40}?)\s?(\d{0,2})\s?:(?!\s?\d+\s?:)\s?}?\s?(?=\S)")
_WITHOUT_COLON = re.compile(
    r"(?:\\text\s?{\s?)?(?:[Tt]he\s)?([Mm]ax(?:imum)?|[Mm]in(?:imum)?)(?:\svalue)?\s?}?\s(?=[-+\d.$]|\\(?:frac|sqrt|pi|\$))"
)
_ENUMERATED = frozenset(["sequence", "solution", "case", "root", "answer", "part", "value", "option", "list", "set"])
_SAME = {"max": "maximum", "min": "minimum", "greatest": "maximum", "least": "minimum", "largest": "maximum", "smallest": "minimum"}
_FORBIDDEN = (CHANGES_MEANING | set(MULTIPLIERS) | {"half", "square", "cube", "opposite"}) - {
    "least",
    "all",
    "of",
    "with",
    "for",
    "point",
    "to",
}


def split_label(text: str) -> tuple[str, str]:
    """('Maximum: 3' → 'maximum', '3'); no label if there is none, or if it might change the value: 'Minus: 3'."""
    if plain := _WITHOUT_COLON.match(text):
        return same_label(plain[1]), text[plain.end() :]
    found = _LABEL.match(text)
    if found is None or not re.search(r"[a-z]{2}", found[1]) or words_of(found[1]) & _FORBIDDEN:
        return "", text
    rest = text[found.end() :]
    name = found[1].strip().lower()
    if name in _ENUMERATED or name.removesuffix("s") in _ENUMERATED:
        return "", rest
    return same_label(name) + found[2], rest


def same_label(name: str) -> str:
    """One name for 'max', 'Maximum' and 'maximum value'."""
    words = [word for word in name.lower().split() if word not in ("the", "value", "values", "is", "of")]
    return "".join(_SAME.get(word, word) for word in words) if words else name.lower()


def is_label(name: str) -> bool:
    """A word, as opposed to the name of a variable, a point or a function."""
    return len(name) > 2 and name.isascii() and name[:3].isalpha() and not name.isupper()
