"""Numbers in words: 'three', 'twenty-one', '3 million', 'two thirds', '2 and a half', 'third'.

A word after a number multiplies it: '3 million' is 3 · 10⁶ and '3 halves' is 3/2. Any other word is no number, and none of them
is ever dropped.
"""

import re
from fractions import Fraction

_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen "
    "nineteen twenty"
)
_PLACES = "first second third fourth fifth sixth seventh eighth ninth tenth"
_TENS = "thirty forty fifty sixty seventy eighty ninety"
SPELLED = {word: n for n, word in enumerate(_ONES.split())} | {word: 10 * n for n, word in enumerate(_TENS.split(), 3)}
ORDINALS = {word: n for n, word in enumerate(_PLACES.split(), 1)}
MULTIPLIERS = {
    "dozen": Fraction(12), "hundred": Fraction(100), "thousand": Fraction(1000), "million": Fraction(10**6),
    "billion": Fraction(10**9), "trillion": Fraction(10**12), "half": Fraction(1, 2), "halves": Fraction(1, 2),
    "quarter": Fraction(1, 4),
} | {word: Fraction(1, n) for word, n in ORDINALS.items() if n > 2} | {
    word: Fraction(1, n) for word, n in [("hundredth", 100), ("thousandth", 1000), ("millionth", 10**6)]
}  # fmt: skip
_DIGITS = re.compile(r"\d{1,30}(?:\.\d{1,30})?", re.A)


def multiplier(word: str) -> Fraction | None:
    """What a word after a number multiplies it with; None if it is no such word."""
    word = word.lower()
    return MULTIPLIERS.get(word) or (MULTIPLIERS.get(word[:-1]) if word.endswith("s") else None)


def number_in_words(text: str) -> Fraction | None:
    """The value of a text that is one number in words, or in digits and words; None for any other text."""
    words = re.sub(r"(?<=[a-z])-(?=[a-z])", " ", text.lower()).split()
    if not words or len(words) > 6 or not words[-1].isalpha():
        return None
    if words[-3:] == ["and", "a", "half"]:
        whole = _counted(words[:-3])
        return None if whole is None or whole.denominator > 1 else whole + Fraction(1, 2)
    if words == ["half"]:
        return Fraction(1, 2)
    factor, last = Fraction(1), words[-1]
    while len(words) > 1 and (one := multiplier(words[-1])) is not None:
        factor *= one
        words.pop()
    value = Fraction(1) if words in (["a"], ["an"]) and factor != 1 else _counted(words)
    if value is None or (factor < 1 and value != 1 and not last.endswith("s")):
        return None  # 'twenty third' is no fraction
    return value * factor


def _counted(words: list[str]) -> Fraction | None:
    """'three', 'twenty one', '2.5'."""
    if len(words) == 1 and _DIGITS.fullmatch(words[0]):
        return Fraction(words[0])
    numbers = [SPELLED.get(word) for word in words]
    if len(numbers) == 1 and numbers[0] is not None:
        return Fraction(numbers[0])
    if len(numbers) == 2 and numbers[0] is not None and numbers[1] is not None and numbers[0] % 10 == 0 and numbers[0] >= 20:
        return Fraction(numbers[0] + numbers[1]) if 0 < numbers[1] < 10 else None
    return None


def ordinal(text: str) -> int | None:
    """'third' → 3."""
    return ORDINALS.get(text.strip().lower())
