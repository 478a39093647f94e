"""An exact answer to a rounded reference: 1587/52 for 30.52, 1/15 for 6.67 %.

The answer must round to the reference in its last digit: |answer − reference| ≤ ½ · 10^−decimals. Decimal answers do not count, for
a wrong one is as close as a right one; nor do references of fewer than three digits, which are more often exact than rounded.
"""

import re
from fractions import Fraction

FEWEST_DIGITS = 3
LARGEST_DENOMINATOR = 40
_ROUNDED = re.compile(r"-?0*(\d*)\.(\d+)", re.A)


def half_a_digit(value: Fraction, decimals: int | None) -> Fraction | None:
    """How far an exact answer may be from a decimal reference; None if the reference cannot be taken for a rounded number."""
    if decimals is None or decimals < 1:
        return None
    digits = len(str(abs(int(value * 10**decimals))))
    return Fraction(1, 2 * 10**decimals) if digits >= FEWEST_DIGITS else None


def is_a_decimal(value: Fraction) -> bool:
    """30519/1000 is a decimal number in disguise; 27/8 is not."""
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest == 1 and value.denominator > LARGEST_DENOMINATOR


def rounds_to_reference(answer: str, value: Fraction, truth: str, reference: Fraction) -> bool:
    """For plain numbers, as texts and values."""
    found = _ROUNDED.fullmatch(truth.replace(",", ""))
    allowed = half_a_digit(reference, len(found[2])) if found else None
    written_exactly = "." not in answer and ("/" in answer or "frac" in answer) and not is_a_decimal(value)
    return allowed is not None and written_exactly and abs(value - reference) <= allowed
