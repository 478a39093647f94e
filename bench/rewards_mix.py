r"""The answers scored by rewards.py: 10,000 with known correctness, a third of them formulas.

    2,600  GSM8K's test set: its worked solutions, with their own result or another row's
    4,400  BigMath references (TinyV's rows): unchanged, or another row's
    3,000  generated pairs of formulas: another form of the reference, or one that is not equal but looks like it

All end in "The answer is $\boxed{…}$.". Missing data sets are replaced by generated numbers. The same seed gives the same mix.
"""

import contextlib
import json
import random
import re
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from math import comb, gcd
from pathlib import Path
from typing import Any

GSM8K, BIGMATH, GENERATED = 2600, 4400, 3000
SYMBOLIC_ONLY = 1000
"""Symbolic answers, in random order, on which the (slow) peers are timed separately."""
Pair = tuple[str, str, str]
"""A reference, another form of it, and a different formula that looks like it."""


def math_mix(data: Path, seed: int = 0) -> list[dict[str, Any]]:
    """Rows with prompt, response, ground_truth, `right`, `part`, and whether they need symbolic comparison."""
    draw = random.Random(seed)
    rows = [*_gsm8k(data / "gsm8k_test.jsonl", draw), *_bigmath(data / "bigmath_tinyv.parquet", draw), *_generated(draw)]
    draw.shuffle(rows)
    return rows


def processor_s() -> float:
    """CPU seconds of this process and all its children, including finished ones."""
    import psutil

    me = psutil.Process()
    seconds = 0.0
    for process in (me, *me.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            seconds += times.user + times.system + times.children_user + times.children_system
    return seconds


def timed(score: Callable[[Any], Any], rows: Any) -> tuple[Any, dict[str, float]]:
    """The scores, and the time they took."""
    before, start = processor_s(), time.perf_counter()
    result = score(rows)
    return result, {"seconds": time.perf_counter() - start, "processor_s": processor_s() - before, "answers": len(rows)}


def _row(part: str, question: str, worked: str, answer: str, truth: str, *, right: bool) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": question}],
        "response": f"{worked}\nThe answer is $\\boxed{{{answer}}}$.",
        "ground_truth": truth,
        "part": part,
        "right": right,
        "symbolic": not decided_plainly(answer, truth),
    }


# Answers that text or numbers decide ----------------------------------------------------------------------------------

NUMBER = re.compile(r"([-+]?)(?:(\d+)/(\d+)|\\frac\{(\d+)\}\{(\d+)\}|(\d*\.?\d+|\d+\.))(?:\\?%)?")


def bare(text: str) -> str:
    """The text without spaces, dollars, bracket sizes, and commas between digits."""
    text = re.sub(r"\\left|\\right|\\[!,; ]|[\s$]|\.$", "", text).replace("dfrac", "frac").replace("tfrac", "frac")
    return re.sub(r"(?<=\d),(?=\d{3}(\D|$))", "", text)


def number(text: str) -> Fraction | None:
    """A plain number: integer, decimal, or fraction of integers; percent signs are left to the rule."""
    found = NUMBER.fullmatch(bare(text))
    if found is None:
        return None
    sign, above, below, above_tex, below_tex, decimal = found.groups()
    if decimal is None and not int(below or below_tex):
        return None
    value = Fraction(decimal) if decimal is not None else Fraction(int(above or above_tex), int(below or below_tex))
    return -value if sign == "-" else value


def decided_plainly(answer: str, truth: str) -> bool:
    """Equal as text, or both numbers, or both words (which no algebra makes equal)."""
    both = (answer, truth)
    return (
        bare(answer) == bare(truth)
        or all(number(text) is not None for text in both)
        or all(re.fullmatch(r"(\\text\{)?[A-Za-z .]+\}?", text.strip()) and len(bare(text)) > 2 for text in both)
    )


# Real rows ------------------------------------------------------------------------------------------------------------


def _gsm8k(file: Path, draw: random.Random) -> Iterator[dict[str, Any]]:
    if file.is_file():
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        solved = [(row["question"], *row["answer"].split("\n#### ")) for row in rows]
    else:
        solved = [(f"What is {n} + {n}?", f"{n} + {n} = {2 * n}", str(2 * n)) for n in range(GSM8K)]
    for i in range(GSM8K // 2):
        question, worked, truth = solved[i % len(solved)]
        worked = re.sub(r"<<.*?>>", "", worked)
        yield _row("gsm8k", question, worked, truth, truth, right=True)
        other = next(x for _, _, x in draw.choices(solved, k=200) if bare(x) != bare(truth))
        yield _row("gsm8k", question, worked, other, truth, right=False)


def _bigmath(file: Path, draw: random.Random) -> Iterator[dict[str, Any]]:
    if file.is_file():
        from plaudit.data.rows import read_rows

        problems = [(row["extra_info"]["question"], row["reward_model"]["ground_truth"]) for row in read_rows(file)]
        # Some references are cut off inside a brace, or empty: no answer could be right.
        complete = [
            (q, truth) for q, truth in problems if truth.count("{") == truth.count("}") and re.search(r"\d|[A-Za-z]", _words(truth))
        ]
        problems = [(question.split(" Let's think step by step")[0], truth) for question, truth in complete]
    else:
        problems = [(f"Divide {n} by 7.", f"\\frac{{{n}}}{{7}}") for n in range(1, BIGMATH + 1)]
    truths = [truth for _, truth in problems]
    for question, truth in draw.sample(problems, BIGMATH // 2):
        yield _row("bigmath", question, question, truth, truth, right=True)
        other = next(x for x in draw.choices(truths, k=200) if _surely_different(x, truth))
        yield _row("bigmath", question, question, other, truth, right=False)


def _words(truth: str) -> str:
    return re.sub(r"\\quad|\\text\b", "", truth)


def _surely_different(a: str, b: str) -> bool:
    """Whether two references differ under any rule about units, names or percents."""
    angles = [bool(re.search(r"\\pi|π|°|circ|degree", text)) for text in (a, b)]
    if all(angles):
        return False
    x, y = number(a), number(b)
    if x is not None and y is not None:
        return x not in (y, 100 * y, y / 100)
    digits, letters = ([re.findall(kind, text) for text in (a, b)] for kind in (r"\d+", r"[A-Za-z]"))
    return sorted(digits[0]) != sorted(digits[1]) if any(digits) else sorted(letters[0]) != sorted(letters[1])


# Generated pairs ------------------------------------------------------------------------------------------------------


def _signed(n: int) -> str:
    return f"+ {n}" if n >= 0 else f"- {-n}"


def _fraction(x: Fraction) -> str:
    return f"{'-' if x < 0 else ''}\\frac{{{abs(x.numerator)}}}{{{x.denominator}}}" if x.denominator > 1 else str(x.numerator)


def _factors(draw: random.Random) -> Pair:
    a, b = draw.randint(2, 30), draw.randint(-30, -2)
    wrong = f"(x {_signed(a + 1)})(x {_signed(b)})"
    return f"x^2 {_signed(a + b)}x {_signed(a * b)}".replace("+ 0x ", ""), f"(x {_signed(a)})(x {_signed(b)})", wrong


def _power(draw: random.Random) -> Pair:
    n, a = draw.randint(3, 4), draw.randint(2, 9)
    terms = [f"{comb(n, k) * a**k if k else ''}{f'x^{n - k}' if n - k > 1 else 'x' if n - k else ''}" for k in range(n + 1)]
    return " + ".join(terms), f"(x + {a})^{n}", f"(x + {a})^{n} - {draw.randint(1, 9)}x"


def _root(draw: random.Random) -> Pair:
    k, m = draw.randint(2, 12), draw.choice([2, 3, 5, 6, 7, 10, 11, 13, 15])
    return f"{k}\\sqrt{{{m}}}", f"\\sqrt{{{k * k * m}}}", f"\\sqrt{{{k * k * m + draw.randint(1, 3)}}}"


def _rationalised(draw: random.Random) -> Pair:
    p, m = draw.randint(2, 20), draw.choice([2, 3, 5, 7, 11])
    a = draw.randint(4, 9)
    exact = f"\\frac{{{p}}}{{{a} - \\sqrt{{{m}}}}}"
    return exact, f"\\frac{{{p}({a} + \\sqrt{{{m}}})}}{{{a * a - m}}}", f"\\frac{{{p}({a} - \\sqrt{{{m}}})}}{{{a * a - m}}}"


def _fractions_added(draw: random.Random) -> Pair:
    x, y = Fraction(draw.randint(1, 20), draw.randint(2, 15)), Fraction(draw.randint(1, 20), draw.randint(2, 15))
    fraction = f"\\frac{{{x.numerator}}}{{{x.denominator}}}"
    return _fraction(x + y), f"{fraction} + {_fraction(y)}", f"{fraction} + {_fraction(y + Fraction(1, 60))}"


def _exponentials(draw: random.Random) -> Pair:
    a, b = draw.randint(2, 9), draw.randint(2, 9)
    return f"e^{{{a}x + {b}}}", f"e^{{{b}}} e^{{{a}x}}", f"e^{{{b}}} + e^{{{a}x}}"


def _trigonometry(draw: random.Random) -> Pair:
    a, k = draw.randint(2, 15), draw.randint(1, 6)
    x = "x" if k == 1 else f"{k}x"
    return draw.choice(
        [
            (f"{a}\\sin({2 * k}x)", f"{2 * a}\\sin({x})\\cos({x})", f"{a}\\sin({x})\\cos({x})"),
            (f"{a}\\cos({2 * k}x)", f"{a} - {2 * a}\\sin^2({x})", f"{a} - {2 * a}\\cos^2({x})"),
            (f"{a}", f"{a}\\sin^2({x}) + {a}\\cos^2({x})", f"{a}\\sin^2({x}) - {a}\\cos^2({x})"),
        ]
    )


def _partial_fractions(draw: random.Random) -> Pair:
    a = draw.randint(2, 30)
    split = f"\\frac{{1}}{{x - {a}}} - \\frac{{1}}{{x + {a}}}"
    return f"\\frac{{{2 * a}}}{{x^2 - {a * a}}}", split, split.replace("- \\frac", "+ \\frac")


def _complex(draw: random.Random) -> Pair:
    a, b, c, d = (draw.randint(1, 9) for _ in range(4))
    real, imaginary = a * c - b * d, a * d + b * c
    return f"{real} + {imaginary}i", f"({a} + {b}i)({c} + {d}i)", f"({a} + {b}i)({c} - {d}i)"


def _logarithms(draw: random.Random) -> Pair:
    p, q = draw.sample([2, 3, 5, 7, 11], 2)
    k = draw.randint(2, 4)
    return f"\\ln {p**k * q}", f"{k}\\ln {p} + \\ln {q}", f"{k}\\ln {q} + \\ln {p}"


def _set(draw: random.Random) -> Pair:
    values = [Fraction(n, draw.choice([1, 1, 2, 3])) for n in draw.sample(range(-20, 21), 3)]
    other = [*values[:2], values[2] + 1]
    if len({*values}) < 3 or other[2] in values:
        return _set(draw)
    lists = [", ".join(map(_fraction, one)) for one in (values, values[::-1], other[::-1])]
    return f"\\{{{lists[0]}\\}}", f"\\{{{lists[1]}\\}}", f"\\{{{lists[2]}\\}}"


def _point(draw: random.Random) -> Pair:
    k, m, n = draw.randint(2, 9), draw.choice([2, 3, 5, 7]), draw.randint(2, 9)
    return (
        f"({k}\\sqrt{{{m}}}, \\frac{{1}}{{{n}}})",
        f"(\\sqrt{{{k * k * m}}}, \\frac{{2}}{{{2 * n}}})",
        f"(\\frac{{1}}{{{n}}}, {k}\\sqrt{{{m}}})",
    )


def _line(draw: random.Random) -> Pair:
    a, b = draw.randint(2, 20), draw.randint(1, 30)
    return f"y = {a}x + {b}", f"{a}x - y + {b} = 0", f"{a}x + y + {b} = 0"


def _quotient(draw: random.Random) -> Pair:
    a, b = draw.randint(2, 15), draw.randint(2, 15)
    g = gcd(a, b)
    return f"\\frac{{{a // g}\\pi}}{{{b // g}}}", f"\\frac{{{3 * a}\\pi}}{{{3 * b}}}", f"\\frac{{{3 * a + 1}\\pi}}{{{3 * b}}}"


FAMILIES: tuple[Callable[[random.Random], Pair], ...] = (
    _factors, _power, _root, _rationalised, _fractions_added, _exponentials, _trigonometry, _partial_fractions, _complex,
    _logarithms, _set, _point, _line, _quotient,
)  # fmt: skip


def _generated(draw: random.Random) -> Iterator[dict[str, Any]]:
    for i in range(GENERATED // 2):
        family = FAMILIES[i % len(FAMILIES)]
        truth, same, other = family(draw)
        question = f"Work out number {i}."
        yield _row(f"generated: {family.__name__[1:]}", question, "We rewrite it step by step.", same, truth, right=True)
        yield _row(f"generated: {family.__name__[1:]}", question, "We rewrite it step by step.", other, truth, right=False)
