r"""Extracting the answer from a response, normalising it, and comparing plain numbers and texts.

All of it is string processing in-process, linear in the input; comparisons that need algebra are in `worker.py`.
"""

import html
import re
from collections.abc import Callable
from fractions import Fraction

from plaudit.rewards.rules.maths.boxes import BETWEEN, BRACES, boxed
from plaudit.rewards.rules.maths.number_words import number_in_words, ordinal
from plaudit.rewards.rules.maths.prose import denies, qualifies
from plaudit.rewards.rules.maths.rounding import rounds_to_reference

WINDOW = 20_000
"""Characters at the end of a response that are searched for its answer."""
LONGEST_FORMULA = 2000
LONGEST_LINE = 100
"""A longer last line is prose: only the last expression in it can be the answer."""
MOST_DIGITS = 400
"""Longer numbers are not plausible answers, and slow to parse."""
LONGEST_ANSWER = 1000
"""Longer answers (in characters) are only compared as text, and not shown to a judge: real answers are short."""

# Extraction -----------------------------------------------------------------------------------------------------------

_PHRASE = re.compile(
    r"(?:\bfinal\s+answer|\banswer|\bsolution)\W{0,4}?\s*(?:is|are|:|=)\s*(?:\*\*|:)?(?:\s*(?:equal to|therefore|thus)\b)?|####",
    re.I,
)
_DOLLARS = re.compile(r"(?<!\\)\$\$?([^$]+)(?<!\\)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.S)
_NUMBERS = re.compile(r"(?<![\w.])[-+−]?\s?\$?\d[\d,]*(?:\.\d+)?(?:\s?/\s?\d+)?\s?(?:\\?%)?")
_SENTENCE_END = re.compile(r"(?<!Rs)(?<!\bNo)[.!?](?=\s+[A-Z])")


def find_answer(response: str) -> str | None:
    """The last box; else the text after the last 'answer is', 'Answer:' or ####; else the last line, or the expression in it.

    Boxes separated only by 'or', 'and' or commas are one answer, a list. So are expressions joined by 'or'.
    """
    text = response[-WINDOW:]
    if (found := boxed(text)) is not None:
        return found
    phrase = None
    for phrase in _PHRASE.finditer(text):  # noqa: B007 (the last one)
        pass
    if phrase is not None:
        before = text[: phrase.start()]
        sentence = before[max(before.rfind(mark) for mark in (". ", "! ", "? ", "\n")) + 1 :]
        ends = _SENTENCE_END.search(text, phrase.end())
        if denies(f"{sentence} {phrase[0]}") or (ends or text.rstrip()[-1:])[0] == "?":
            return _whole_line(text)  # 'it is not true that the answer is 3'
        rest = text[phrase.end() :].strip(" \t*:")
        line = next((line for line in rest.splitlines() if line.strip(" *\t$")), "")
        if line.startswith("$$") or "\\[" in line[:3]:
            line = rest  # a displayed formula may span lines
        return _expression(_SENTENCE_END.split(line, maxsplit=1)[0], short=LONGEST_LINE) or None
    lines = text.rstrip().rsplit("\n", 1)
    return _expression(lines[-1], short=LONGEST_LINE if len(lines[-1].split()) <= 3 else 0) or None


def announces_answer(response: str) -> bool:
    """Whether a box or a phrase says which part of it is the answer; otherwise `find_answer` takes what its last line has."""
    text = response[-WINDOW:]
    return boxed(text) is not None or _PHRASE.search(text) is not None


def _whole_line(text: str) -> str | None:
    """The last line as it is: an answer that the words around it deny."""
    return text.rstrip().rsplit("\n", 1)[-1][-LONGEST_FORMULA:].strip() or None


def _expression(line: str, short: int) -> str:
    """The line itself if it is short; if long, or prose around formulas, its last formula or number; a list if 'or' joins some."""
    line = line[-LONGEST_FORMULA:].strip().strip("*").strip()
    pieces = [(m.start(), m.end(), next(filter(None, m.groups()), "")) for m in _DOLLARS.finditer(line)]
    bare = _DOLLARS.sub("", line)
    if pieces and len(pieces) == 1 and not re.search(r"\w", bare):
        return pieces[0][2].strip()
    if len(line) <= short and not (pieces and len(bare.split()) > 6):
        return line
    if not pieces:
        pieces = [(m.start(), m.end(), m[0]) for m in _NUMBERS.finditer(line)]
    if not pieces:
        return line if len(line) <= LONGEST_LINE else ""
    last = pieces[-1]
    start = max(line.rfind(mark, 0, last[0]) for mark in (". ", "! ", "? ")) + 1
    if qualifies(line[start : last[0]], line[last[1] :]):
        return line  # 'it is certainly not 3', 'less than 3'
    joined = [pieces[-1]]
    for piece in reversed(pieces[:-1]):
        between = line[piece[1] : joined[0][0]]
        if not (BETWEEN.fullmatch(between) or re.search(r"\bor\b", between)):
            break
        joined.insert(0, piece)
    return ", ".join(dict.fromkeys(piece[2].strip() for piece in joined))


# Normalisation --------------------------------------------------------------------------------------------------------

_UNICODE = {
    "−": "-", "–": "-", "—": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "∕": "/", "⁄": "/", "π": r"\pi ",
    "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "⩽": r"\le ", "⩾": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "±": r"\pm ",
    "∓": r"\mp ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∉": r"\notin ", "∅": r"\emptyset ", "°": r"\degree ",
    "º": r"\degree ", "√": r"\sqrt ", "²": "^2", "³": "^3", "¹": "^1", "⁰": "^0", "⁴": "^4", "⁵": "^5", "⁶": "^6", "⁷": "^7",
    "⁸": "^8", "⁹": "^9", "ⁿ": "^n", "₀": "_0", "₁": "_1", "₂": "_2", "₃": "_3", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}",
    "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}", "½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
    "⅔": r"\frac{2}{3}", "（": "(", "）": ")", "，": ", ", "：": ":", "；": ";", "。": ".", "％": r"\%",
    "＝": "=", "＜": "<", "＞": ">",
    "｜": "|", "∣": "|", "’": "'", "‘": "'", "“": '"', "”": '"', "\u00a0": " ", "\u2009": " ", "α": r"\alpha ", "β": r"\beta ",
    "γ": r"\gamma ", "δ": r"\delta ", "θ": r"\theta ", "λ": r"\lambda ", "μ": r"\mu ", "ρ": r"\rho ", "σ": r"\sigma ",
    "τ": r"\tau ", "φ": r"\phi ", "ω": r"\omega ", "∠": r"\angle ", "△": r"\triangle ", "∆": r"\triangle ",
    "€": r"\euro ", "£": r"\pounds ", "¥": r"\yen ", "∀": r"\forall ", "∃": r"\exists ", "、": ", ", "∖": r"\setminus ",
}  # fmt: skip
_TRANSLATE = str.maketrans(_UNICODE)

# Published references often contain escapes that a JSON parser has consumed ('\frac' as a form feed and 'rac').
_EATEN = [
    (re.compile("\x0c(?=rac)"), r"\\f"),
    (re.compile("\t(?=ext|imes|heta|an[^a-z])"), r"\\t"),
    (re.compile("\x08(?=inom|eta|ar)"), r"\\b"),
    (re.compile(r"\n(?=eq?\b)"), r"\\n"),
    (re.compile(r"\n(?=arctan\b)"), r"\\"),
]
_HTML = re.compile(r"<(su[bp])>([^<>]{1,100})</\1>", re.I)
_CIRCLED = re.compile("[①-⑳](?:[\\s,]?[①-⑳])*")
# '$8$, $4$' are formulas, '$8, $4' is money: a formula neither begins nor ends with a space or a separator.
_FORMULAS = re.compile(r"(?<![\\$])\$(?![\s$])([^$]{1,2000}?)(?<![\s\\$,;-])\$(?![\d$])")
_VECTOR = r"\\(?:vec|hat|mathbf|boldsymbol|bm)\s?{\s?([A-Za-z])\s?}"
# Applied in this order. The first entry has texts of which every match contains one: they are found faster than the pattern.
_REWRITES: list[tuple[str, re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    ("{", re.compile(r"\\(?:operatorname|mathrm|text)\*?\s*{\s*((?:arc|a)?(?:sin|cos|tan|cot)|ln|log|lg|exp)\s*}"), r"\\\1 "),
    ("\\in", re.compile(r"\\text\s*{\s*(?:for|where)\s*}(?=\s*[a-z]\s*\\in)"), ","),
    ("\\left ig style limits",
     re.compile(r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|limits|nolimits)(?![a-zA-Z])\.?"), " "),
    ("frac", re.compile(r"\\[dtc]frac(?![a-zA-Z])"), r"\\frac"),
    ("binom", re.compile(r"\\[dt]binom(?![a-zA-Z])"), r"\\binom"),
    ("\\text \\mathrm", re.compile(r"(?<=\d)\s?(?:\^\s?)?{?\s?\\(?:text|mathrm|textrm)\s?{\s?(st|nd|rd|th)\s?}\s?}?"), r"\1"),
    ("^", re.compile(r"(?<=\d)\s?\^\s?{\s?(st|nd|rd|th)\s?}"), r"\1"),
    ("~", re.compile(r"^\s?~|(?<=[\s=(])~\s?(?=[-\d.$])"), r"\\approx "),
    ("}.", re.compile(r"(?<=})\.(?=\s?[\])])"), ""),
    ("\\leq", re.compile(r"\\(?:leqslant|leqq|leq)(?![a-zA-Z])"), r"\\le"),
    ("\\geq", re.compile(r"\\(?:geqslant|geqq|geq)(?![a-zA-Z])"), r"\\ge"),
    ("\\neq", re.compile(r"\\neq(?![a-zA-Z])"), r"\\ne"),
    ("\\lt", re.compile(r"\\lt(?![a-zA-Z])"), "<"),
    ("\\gt", re.compile(r"\\gt(?![a-zA-Z])"), ">"),
    ("<=", re.compile(r"<="), r"\\le "),
    (">=", re.compile(r">="), r"\\ge "),
    ("=", re.compile(r"!=|\\not\s*="), r"\\ne "),
    ("lbrace", re.compile(r"\\lbrace"), r"\\{"),
    ("rbrace", re.compile(r"\\rbrace"), r"\\}"),
    ("vert mid", re.compile(r"\\(?:vert|lvert|rvert|mid)(?![a-zA-Z])"), "|"),
    ("\\varnothing \\O", re.compile(r"\\(?:varnothing|O)(?![a-zA-Z])"), r"\\emptyset "),
    ("^", re.compile(r"\^\s*(?:{\s*)?\\(?:circ|textcirc|degree)(?![a-zA-Z])(?:\s*})?"), r"\\degree "),
    ("degree", re.compile(r"\\(?:textdegree|degrees)(?![a-zA-Z])"), r"\\degree "),
    ("^", re.compile(r"(?<=\d)\^(?:\s*\n|$)"), r"\\degree "),  # '60^\circ' after a parser dropped the rest
    ("mathbb", re.compile(r"\\mathbb\s*(?:{\s*([RZNQC])\s*}|([RZNQC]))"), lambda m: rf"\mathbb{{{m[1] or m[2]}}}"),
    ("vec hat bar tilde", re.compile(r"\\(vec|hat|bar|tilde)\s([A-Za-z])"), r"\\\1{\2}"),
    # The estimate in a regression line is written y as well; the unit vectors i, j, k in bold, with an arrow, a hat or nothing.
    ("hat", re.compile(r"^\s?\\(?:wide)?hat\s?{\s?y\s?}\s?="), "y ="),
    ("\\times \\cdot", re.compile(rf"{_VECTOR}(?=\s?\\(?:times|cdot)(?![a-zA-Z]))"), r"\\vec{\1}"),
    ("vec hat", re.compile(r"\\(?:vec|hat)\s?(?={\s?[ijk]\s?}(?!\s?\\(?:times|cdot)(?![a-zA-Z])))"), ""),
    ("math bold bm operatorname \\rm \\bf",
     re.compile(r"\\(?:mathrm|mathbf|boldsymbol|bm|mathit|mathsf|mathcal|operatorname|rm|bf)(?![a-zA-Z])\s*(?={)"), ""),
    ("\\text box \\emph", re.compile(r"\\(?:textbf|textit|textrm|textsf|mbox|hbox|textnormal|emph)(?![a-zA-Z])"), r"\\text"),
    (",", re.compile(r"(?<=\d)(?:\{,\}|,\\!)(?=\d{3}(?!\d))"), ""),
    ("{,}", re.compile(r"\{,\}"), ","),
    ("\\!", re.compile(r"\\!"), ""),
    ("\\ ~", re.compile(r"(?<=\d)(?:\\[,; ]|\\thinspace|~)(?=\d{3}(?!\d))"), ""),
    ("\\ ~", re.compile(r"(?<!\\)\\[,;: ]|\\q?quad(?![a-zA-Z])|~|\\thinspace(?![a-zA-Z])|\\hspace\s*{[^{}]*}"), " "),
    ("euro EUR", re.compile(r"\\(?:euro|EUR)(?![a-zA-Z])"), "€"),
    ("dollar", re.compile(r"\\(?:textdollar|dollar)(?![a-zA-Z])(?:\s*{})?"), r"\\$"),
    ("pounds", re.compile(r"\\pounds(?![a-zA-Z])"), "£"),
    ("yen", re.compile(r"\\yen(?![a-zA-Z])"), "¥"),
    ("\\ $ ` **", re.compile(r"(?<!\\)\\[()\[\]]|(?<!\\)\$(?=\s*$)|`|(?<![\w)\]}])\*\*|\*\*(?![\w({\\.-])"), " "),
    ("", re.compile(r"[\x00-\x08\x0e-\x1f\x7f]"), ""),
    ("", re.compile(r"\s+"), " "),
]  # fmt: skip


_GUARDED = [(tuple(hints.split()) or ("",), pattern, replacement) for hints, pattern, replacement in _REWRITES]
_SIMPLE = re.compile(r"[-+]?\d[\d,.]*", re.A)


def normalise(text: str) -> str:
    """The answer in canonical spelling: Unicode as LaTeX, one name per command, no spacing commands, no decoration."""
    if _SIMPLE.fullmatch(text):
        return text.rstrip(".,")
    if not text.isprintable():
        for pattern, replacement in _EATEN:
            text = pattern.sub(replacement, text)
    text = _plain_markup(text.strip())
    # '$763.89$' is a formula, '$763.89' is money.
    if text.count("$") - text.count("\\$") == 2 and text[0] == text[-1] == "$":
        text = text[1:-1]
    if not text.isascii():
        text = text.translate(_TRANSLATE)
    if "\\\\" in text and "\\begin" not in text:
        text = re.sub(r"\\\\(?=[a-zA-Z{}])", r"\\", text)  # escaped twice; in a matrix, \\ ends a row
    for hints, pattern, replacement in _GUARDED:
        for hint in hints:
            if hint in text:
                text = pattern.sub(replacement, text)
                break
    text = (_without_stray_braces(text) if "}" in text else text).strip().rstrip(".,;: ").strip()
    return text[1:].lstrip() if text.startswith("= ") else text


def _plain_markup(text: str) -> str:
    """Sub- and superscripts from HTML, numbers in circles, and formulas each in their own dollars, as LaTeX without them."""
    if "<" in text or "&" in text:
        text = _HTML.sub(lambda found: f"{'^' if found[1].lower() == 'sup' else '_'}{{{found[2]}}}", text)
        text = html.unescape(text) if re.search(r"&(?:[a-z]{2,8}|#\d{1,5});", text) else text
    if not text.isascii():
        text = _CIRCLED.sub(lambda found: ", ".join(str(ord(one) - ord("①") + 1) for one in found[0] if one >= "①"), text)
    return _FORMULAS.sub(r"\1", text) if text.count("$") - text.count("\\$") > 1 else text


def _without_stray_braces(text: str) -> str:
    """Drop unmatched closing braces, as in '[0, 1]}'."""
    depth, kept, start = 0, [], 0
    for brace in BRACES.finditer(text):
        if brace[0] == "{":
            depth += 1
        elif brace[0] == "}":
            if depth == 0:
                kept.append(text[start : brace.start()])
                start = brace.end()
            else:
                depth -= 1
    return "".join([*kept, text[start:]])


# Comparison without algebra -------------------------------------------------------------------------------------------

_INTEGER = rf"(?:\d{{1,3}}(?:,\d{{3}})+|\d{{1,3}}(?: \d{{3}})+|\d{{1,{MOST_DIGITS}}})"
_PLAIN = re.compile(rf"([-+]?)\s?({_INTEGER}(?:\.\d{{0,{MOST_DIGITS}}})?|\.\d{{1,{MOST_DIGITS}}})(?:\s?/\s?({_INTEGER}))?", re.A)
_FRACTION = re.compile(rf"([-+]?)\s?\\frac\s?{{\s?(-?{_INTEGER})\s?}}\s?{{\s?({_INTEGER})\s?}}", re.A)
_TEXT = re.compile(r"\\text\s*{([^{}]*)}")
_LOOSE_SPACE = re.compile(r"(?<![^\W_]) | (?![^\W_])")
_WORD = r"[^\W\d_]+(?:['-][^\W\d_]+)*"
_WORDS = re.compile(rf"{_WORD}(?:,? {_WORD})*[.!?]?")
_CHOICE = re.compile(r"(?:\\text\s*{)?\s*\(?([A-J])(?:\)|\.|:|(?=\s*}|\s*$))\s*}?\s*(.*)", re.S)
_OPTION = re.compile(r"(?:\\text\s*{\s*)?(?:[Oo]ption|[Cc]hoice)\s*}?\s*(?:\(([A-J])\)|(?<![A-Za-z])([A-J]))\s*}?")
_BASE = re.compile(r"\(?0*([0-9A-F]{1,60}?)\)?\s?_\s?{?\s?(\d{1,2})\s?}?", re.A)
"""A numeral and its base: (201)_{4}."""
_FIGURE = re.compile(r"\\(angle|triangle)(?![a-zA-Z])")
_OPERATOR = re.compile(r"[}\s]*(?:[\^+*/=!_<>]|-(?!\d))")


def plain_number(text: str) -> Fraction | None:
    """The exact value of an integer, a decimal or a fraction of integers; None for anything else. `text` is normalised."""
    found = _PLAIN.fullmatch(text) or _FRACTION.fullmatch(text)
    if found is None:
        return None
    digits = found[2].replace(",", "").replace(" ", "")
    value = Fraction(int(digits)) if "." not in digits else Fraction(digits)
    if found[3]:
        below = int(found[3].replace(",", "").replace(" ", ""))
        if below == 0:
            return None
        value /= below
    return -value if found[1] == "-" else value


def _untext(text: str) -> str:
    return _TEXT.sub(r" \1 ", text) if "\\text" in text else text


def key(text: str) -> str:
    """A key shared by all spellings of the same text: case matters, \\text does not, nor white space, except between letters or
    digits: '3 4' is not 34."""
    text = " ".join(_untext(text).replace("$", " ").split())
    return _LOOSE_SPACE.sub("", text)


def words(text: str) -> str:
    """An answer in plain words, without case, articles and the final stop; empty if it is anything else: signs and operators, even
    between letters, are no words ('-sin x')."""
    text = " ".join(_untext(text).split())
    if not _WORDS.fullmatch(text) or not re.search(r"[a-z]{3}|[A-Z][a-z]{2}", text) or text.endswith("!"):
        return ""
    found = re.findall(rf"{_WORD}|,", text.rstrip(".?"))
    kept = [word for i, word in enumerate(found) if not _is_article(word, i, len(found))]
    return re.sub(r"(?:,|\band\b|\s)*(?:,|\band\b)\s?", ", ", " ".join(kept).casefold().replace("-", " "))


def _is_article(word: str, at: int, count: int) -> bool:
    """'a' and 'A' are articles before another word only: 'Team A' has a name."""
    return at < count - 1 and (word in ("the", "an", "a") or (at == 0 and word in ("The", "An", "A")))


def split_choice(text: str) -> tuple[str, str]:
    """('(A) 5 cm' → 'A', '5 cm'), and 'A. 5 cm', 'A: 5 cm', 'Option A', '\\text{A}'; no letter if two are named: 'A or B'."""
    if option := _OPTION.fullmatch(text):
        return option[1] or option[2], ""
    found = _CHOICE.fullmatch(text)
    if found is None or _OPERATOR.match(found[2]) or re.search(r"\b[A-J]\b|\bor\b", found[2]):
        return "", text
    return found[1], found[2].strip()


def without_figures(text: str) -> str:
    """The text without the signs for angles and triangles, which may be left out: '\\angle A = 60' is 'A = 60'."""
    return _FIGURE.sub("", text).strip().removeprefix("= ")


def compare_plainly(answer: str, truth: str, tolerance: float = 0.0, strict: bool = False) -> bool | None:
    """True or False, or None if plain comparison cannot decide. Both texts are normalised."""
    if answer == truth:
        return True
    a, b = plain_number(answer), plain_number(truth)
    if a is not None and b is not None:
        return _same_number(answer, a, truth, b, tolerance, strict)
    if "angle" in answer or "angle" in truth:
        figures = [frozenset(_FIGURE.findall(text)) for text in (answer, truth)]
        if all(figures) and figures[0] != figures[1]:
            return False
        answer, truth = without_figures(answer), without_figures(truth)
    if key(answer) == key(truth):
        return True
    said, wanted = words(answer), words(truth)
    if said and wanted and (said == wanted or (_is_long(said) and _is_long(wanted))):
        return said == wanted
    bases = _BASE.fullmatch(answer), _BASE.fullmatch(truth)
    if bases[0] and bases[1]:
        return bases[0].groups() == bases[1].groups()
    (letter, chosen), (right_letter, wanted) = split_choice(answer), split_choice(truth)
    if letter and right_letter and (letter != right_letter or not chosen or not wanted):
        return letter == right_letter
    a, b = plain_number(chosen), plain_number(wanted)
    return None if a is None or b is None else _same_number(chosen, a, wanted, b, tolerance, strict)


def _same_number(answer: str, a: Fraction, truth: str, b: Fraction, tolerance: float, strict: bool) -> bool:
    if a == b or abs(a - b) <= Fraction(tolerance) * abs(b):
        return True
    return not strict and rounds_to_reference(answer, a, truth, b)


def _is_long(said: str) -> bool:
    """A word that is no product of letters, and no number in words."""
    return bool(re.search(r"\w{5}", said)) and number_in_words(said) is None and ordinal(said) is None
