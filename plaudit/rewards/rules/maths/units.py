r"""The text around a number: its unit, a currency, and the sentence that ends in it."""

import re

from plaudit.rewards.rules.maths.expressions import FUNCTIONS, Unreadable

_SAME_UNITS = {
    "cm": "centimeter centimetre", "m": "meter metre", "km": "kilometer kilometre", "mm": "millimeter millimetre",
    "s": "sec second", "h": "hr hour", "min": "minute", "kg": "kilogram", "g": "gram", "l": "liter litre",
    "ml": "milliliter millilitre", "$": "dollar usd", "€": "euro", "£": "pound", "%": "percent percentage", "deg": "degree",
    "ft": "feet foot", "in": "inch inche", "rs": "rupee rs.", "c": "cent", "mi": "mile", "th": "st nd rd",
}  # fmt: skip
_UNITS = {other: unit for unit, others in _SAME_UNITS.items() for other in others.split()}
_TRAILING = re.compile(
    r"^(.*?[\d})\]!a-z])\s*((?:\\text\s*{[^{}]*}(?:\s*\^\s*{?[-\d]+}?)?\s*/?\s*)+|\\degree\s*C?|\\?%|[€£])$", re.S
)
_TRAILING_WORDS = re.compile(r"^(.*?[\d}])\s*([A-Za-z]+\.?(?:\^{?\d}?)?(?:[\s/][A-Za-z]+\.?(?:\^{?\d}?)?){0,3})$", re.S)
_LEADING = re.compile(r"^(-?)\s*(?:\\text\s*{\s*)?(\\?\$|Rs\.?|[€£¥])\s*}?\s*(?=[\d.(\\])")
# After a number, these words change its meaning.
_MEANINGFUL = frozenset(
    re.findall(
        r"\w+",
        "or and not more less than least most about approximately between no to times of x until if when above below "
        "is are for any all where with every some either neither only",
    )
)
_PROSE = re.compile(r"^(?:\\text\s*{)?([A-Za-z][A-Za-z ,']*?\s(?:is|are|equals|be|was|has|have|get)\b|[A-Za-z ]+:)\s*}?\s*(?=\S)")


def split_unit(text: str) -> tuple[str, str]:
    """('5 \\text{ cm}^2' → '5', 'cm^2'). A word that changes the number's meaning is not a unit and makes the text unreadable."""
    if leading := _LEADING.match(text):
        rest, _ = split_unit(leading[1] + text[leading.end() :])
        symbol = leading[2].lstrip("\\").rstrip(".").lower()
        return rest, symbol
    found = _TRAILING.match(text) or _TRAILING_WORDS.match(text)
    if found is None:
        return text, ""
    raw = re.sub(r"\\text|[{}]", " ", found[2])
    plain = found[2].lstrip()
    if plain[0].isalpha() and not _is_unit(plain.split()):
        return text, ""
    names = raw.split()
    if _MEANINGFUL & {name.strip(".").lower() for name in names}:
        raise Unreadable("words that matter")
    number = found[1].strip()
    if number.endswith("^"):
        number = number[:-1]
    return number, _unit(raw)


def _is_unit(names: list[str]) -> bool:
    """Words without \\text: 'cm' and 'apples' are units; 'x', 'ab' and 'sin' are not."""
    first = re.split(r"[/^]", names[0])[0].strip(".").lower()
    known = first in _SAME_UNITS or first.removesuffix("s") in _UNITS
    if len(first) == 1:
        return False
    return known or (len(first) > 3 and first not in FUNCTIONS)


def _unit(raw: str) -> str:
    raw = raw.replace("\\degree", "deg").replace("\\%", "%").replace("\\", " ").lower()
    raw = re.sub(r"\bsquare\s+(\w+)", r"\1^2", re.sub(r"\bcubic\s+(\w+)", r"\1^3", raw)).replace(" per ", "/")
    names = re.split(r"([\s/^])", raw)
    same = [
        _UNITS.get(name.removesuffix("s"), _UNITS.get(name, name.removesuffix("s") if len(name) > 2 else name)) for name in names
    ]
    return re.sub(r"\s+", "", "".join(name.strip(".") for name in same))


def without_prose(text: str) -> str:
    """'The area is 5' → '5'; words that change the meaning are kept, which makes the text unreadable."""
    found = _PROSE.match(text)
    if found is None:
        return text
    said = set(re.findall(r"[a-z]+", found[1].lower()))
    if said & (_MEANINGFUL - {"of", "to", "x", "is", "are", "for", "with"}) or not re.search(r"[\d\\=]", text[found.end() :]):
        return text
    return text[found.end() :].strip()
