r"""Units after a number, and currencies before it.

    5 \text{ cm}^2 → 5, cm^2        \$5 → 5, $        3 million dollars → 3 · 10^6, $        15th day → 15, th day

A word is a unit if it is in the lists below: units of measurement, and things that are counted. Words that are not there are kept,
but marked as unknown: an answer with such a word is right only if the reference has it too. Number words multiply.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

from plaudit.rewards.rules.maths.expressions import CONSTANTS, FUNCTIONS, Unreadable
from plaudit.rewards.rules.maths.number_words import multiplier
from plaudit.rewards.rules.maths.prose import CHANGES_MEANING

_SAME = {
    "cm": "centimeter centimetre", "m": "meter metre", "km": "kilometer kilometre kms", "mm": "millimeter millimetre",
    "dm": "decimeter decimetre", "nm": "nanometer nanometre", "s": "sec second", "h": "hr hour", "min": "minute",
    "ms": "millisecond", "kg": "kilogram kilo kgs", "g": "gram gm", "mg": "milligram", "t": "ton tonne",
    "lb": "pound-mass lbs", "oz": "ounce", "l": "liter litre ltr", "ml": "milliliter millilitre", "gal": "gallon",
    "qt": "quart", "pt": "pint", "cup": "", "$": "dollar usd buck", "€": "euro eur", "£": "pound gbp", "¥": "yen yuan rmb",
    "c": "cent", "rs": "rupee rs. inr", "%": "percent percentage pct", "deg": "degree", "rad": "radian", "ft": "feet foot",
    "in": "inch inche", "yd": "yard", "mi": "mile", "th": "st nd rd", "n": "newton", "j": "joule", "kj": "kilojoule",
    "cal": "calorie", "kcal": "kilocalorie", "w": "watt", "kw": "kilowatt", "kwh": "kilowatt-hour", "v": "volt",
    "a": "ampere amp", "ohm": "\\omega", "hz": "hertz", "pa": "pascal", "kpa": "kilopascal", "mol": "mole", "k": "kelvin",
    "mph": "", "kmph": "kph", "bit": "", "byte": "", "acre": "", "ha": "hectare", "unit": "", "unit^2": "sq.unit",
    "day": "", "week": "wk", "month": "", "year": "yr", "decade": "", "century": "",
}  # fmt: skip
_COUNTED = frozenset(
    re.findall(
        r"\w+",
        "apple orange banana pear peach cherry strawberry lemon egg cake cookie candy sweet chocolate sandwich pizza slice "
        "piece loaf cupcake muffin donut pie bottle glass can jar box bag basket bucket packet pack crate carton barrel bowl "
        "plate spoon table chair desk bed lamp door window room house apartment floor building shop store school class "
        "classroom lesson course book page letter word line chapter sheet paper pencil pen marker crayon eraser notebook card "
        "ticket stamp coin bill note penny nickel dime quarter marble ball toy doll puzzle block brick tile stone rock stick "
        "bead button shirt dress shoe sock hat glove pair car truck bus bike bicycle train plane boat ship wheel seat trip lap "
        "race game match round point goal win loss player team member person people man men woman women child children kid boy "
        "girl student teacher friend family worker employee customer guest visitor passenger voter candidate cat dog cow horse "
        "sheep goat pig chicken duck rabbit bird fish bee ant animal tree flower plant rose seed leaf branch garden field acre "
        "step stair mark question problem answer solution way method case time number integer digit element terms roots vertex "
        "edge side face angle diagonal triangle squares circle rectangle cubes pattern path route arrangement permutation "
        "combination subset triples outcome set group row column cell item object shift day night morning hour minute job task "
        "call message vote song movie photo picture video file gallon cup tablespoon teaspoon pound adult share part portion "
        "serving batch load gift present prize medal award place rank grade level degree",
    )
)
"""Things that answers count. A list that can only grow by nouns: none of them changes the number before it."""
_SPEEDS = {"kmph": "km/h", "mph": "mi/h"}
_UNITS = {other: unit for unit, others in _SAME.items() for other in [unit, *others.split()]}
_ALLOWED_BEFORE = frozenset(["square", "sq", "cubic", "cu", "per", "each", "a", "an"])
_WINDOW = 120
"""Characters at the end of a text that may be its unit: long answers cost no more than short ones."""
_MOST_PIECES = 8
_PIECE = re.compile(
    r"(?:\\text\s*{(?P<text>[^{}]*)}|(?P<word>[A-Za-z]+\.?)|(?P<degree>\\degree\s?[CF]?)|(?P<sign>\\?%|[€£¥]|\\\$))"
    r"(?:\s?\^\s?{?\s?(?P<power>-?\d)\s?}?)?$"
)
_LEADING = re.compile(r"(-?)\s?(?:\\text\s?{\s?)?(\\?\$|Rs\.?|[€£¥])\s?}?\s?(?=[\d.(\\])")
_NUMBER_END = re.compile(r"[\d})\]!]$|\\[a-z]+$")
SHORT = frozenset("mgshlJNWVAK")
"""Units of one letter, which may be variables as well: '5 m'."""
_SHORT = re.compile(r"(-?\d{1,30}(?:\.\d{1,30})?)\s([mgshlJNWVAK])", re.A)


@dataclass(frozen=True)
class Unit:
    """Words after a number, in one spelling: 'cm^2', '$', 'km/h'. `unknown`: those that are in no list."""

    name: str = ""
    unknown: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.name)


NO_UNIT = Unit()


def split_unit(text: str) -> tuple[str, Unit, Fraction]:
    """('5 \\text{ cm}^2' → '5', cm^2, 1), ('3 million' → '3', none, 10⁶). A word that changes the number's meaning, as in 'at most'
    or '3 squared', makes the text unreadable."""
    if leading := _LEADING.match(text):
        rest, unit, factor = split_unit(leading[1] + text[leading.end() :])
        currency = _UNITS[leading[2].lstrip("\\").rstrip(".").lower()]
        if unit and unit.name != currency:
            raise Unreadable("two units")
        return rest, Unit(currency), factor
    if short := _SHORT.fullmatch(text):
        return short[1], Unit(short[2]), Fraction(1)
    rest, pieces, factor = text.rstrip(), [], Fraction(1)
    for _ in range(_MOST_PIECES):
        found = _PIECE.search(rest, max(0, len(rest) - _WINDOW))
        numerator = bool(pieces) and pieces[0].startswith("/")
        if found is None or not (words := _unit_words(found, rest, numerator=numerator)):
            break
        before = rest[: found.start()].rstrip().removesuffix("^").rstrip()
        power = f"^{found['power']}" if found["power"] else ""
        divided = before.endswith("/") and not before[:-1].rstrip()[-1:].isdigit()
        kept = [word for word in words if multiplier(word) is None or word == "second"]
        for word in words:
            if word not in kept:
                factor *= multiplier(word) or 1
        if kept:
            pieces.insert(0, ("/" if divided else "") + " ".join(kept) + power)
        rest = before[:-1].rstrip() if divided else before
    if not pieces and factor == 1:
        return text, Unit(), factor
    if not _NUMBER_END.search(rest[-20:]) and not rest[-1:].isalnum():
        return text, Unit(), Fraction(1)
    unit = _as_unit(" ".join(pieces))
    if unit.name.startswith("/"):
        return text, Unit(), Fraction(1)  # 'x/s' is a formula
    if unit.name.count("%") + unit.name.count("deg") > 1 or re.search(r"([$€£¥]).*[$€£¥%]", unit.name):
        raise Unreadable("a unit twice")
    return rest, unit, factor


def _unit_words(found: re.Match[str], rest: str, *, numerator: bool = False) -> list[str]:
    """The words of a piece, if it is part of a unit; [] if it belongs to the formula. `numerator`: a unit divides it."""
    if found["degree"] is not None:
        return ["deg" + found["degree"][7:].strip().lower()]
    if found["sign"] is not None:
        return [found["sign"].lstrip("\\")]
    before = rest[: found.start()]
    if found["text"] is None:
        word = found["word"].rstrip(".").lower()
        if before.endswith(("\\", "_")):
            return []
        if (
            word in FUNCTIONS
            or word in CONSTANTS
            or (len(word) < 4 and not _known(word))
            or (
                len(word) == 1
                and not before.rstrip().endswith("/")
                and not (numerator and before[-1:].isspace() and found["word"] in SHORT)
            )
        ):
            return []  # 'x', 'ab' and 'sin' are no units
        words = [word]
    else:
        words = re.findall(r"[^\s/.,()]+|/", found["text"].lower())
        if not words or not all(re.fullmatch(r"[a-z$€£¥%°'-]+(?:\^\d)?|/", word) for word in words):
            return []
    if CHANGES_MEANING & set(words):
        raise Unreadable("words that matter")
    return words


def _known(word: str) -> bool:
    return word in _UNITS or _singular(word) in _UNITS or _singular(word) in _COUNTED or word in _COUNTED


def _singular(word: str) -> str:
    if word.endswith("ies") and len(word) > 4:
        return word[:-3] + "y"
    if word.endswith(("ches", "shes", "xes", "sses")):
        return word[:-2]
    return word.removesuffix("s") if len(word) > 2 else word


def _as_unit(raw: str) -> Unit:
    raw = re.sub(r"\b(?:square|sq)\s+(\w+)", r"\1^2", re.sub(r"\b(?:cubic|cu)\s+(\w+)", r"\1^3", raw)).replace(" per ", "/")
    names, unknown = [], set()
    for word in re.split(r"([\s/]|\^-?\d)", raw):
        if not word.strip() or word in "/" or word.startswith("^"):
            names.append(word.strip())
            continue
        if not _known(word) and word not in _ALLOWED_BEFORE and not word.startswith("deg"):
            unknown.add(_singular(word))
        names.append(_UNITS.get(word) or _UNITS.get(_singular(word)) or _singular(word))
    name = "".join(names)
    return Unit(_SPEEDS.get(name, name), frozenset(unknown))
