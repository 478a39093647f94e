r"""Words around an answer: sentences that end in it, words that change what it means, and the domain it is stated for.

The area is 5 → 5                              only x = 0 → x = 0
f(x) = 1 \text{ for all } x \in \mathbb{R} → f(x) = 1, {x: R}
k\pi, \text{ where } k \text{ is an integer} → k\pi, {k: Z}
"""

import re

from plaudit.rewards.rules.maths.number_words import multiplier

NEGATIONS = frozenset(
    re.findall(
        r"\S+",
        "not no never nope nobody hardly barely unlikely doubt deny denies error mistake none nor neither cannot can't isn't "
        "aren't wasn't weren't don't doesn't didn't won't wouldn't couldn't shouldn't ain't n't without except but unlike wrong "
        "false incorrect untrue mistaken refuse refuses differ differs unequal excluding impossible opposite anything everything "
        "other different instead",
    )
)
COMPARISONS = frozenset(
    re.findall(
        r"\S+",
        "bound bounds less more fewer greater smaller larger bigger higher lower than least most minimum maximum about "
        "approximately approx nearly almost roughly around close near below above under over beyond between up until within "
        "exceeding exceeds exceed beneath too",
    )
)
_OPERATIONS = frozenset(
    re.findall(
        r"\S+",
        "plus minus times negative squared cubed factorial point over divided multiplied root power powers reciprocal inverse "
        "twice thrice double doubled triple tripled modulo mod remainder squares cubes percent-of to of or and x any all some "
        "if when where with every only is are for maybe perhaps possibly either unknown undefined",
    )
)
_CHANGES_NUMBERS = _OPERATIONS - frozenset(
    re.findall(r"\w+", "to of or and x any all some if when where with every only is are for")
)
CHANGES_MEANING = NEGATIONS | (COMPARISONS - {"minimum", "maximum"}) | _OPERATIONS
"""After a number, these words make it another one, or none."""

_HARMLESS = frozenset(
    ["of", "to", "x", "is", "are", "for", "with", "all", "only", "point", "root", "minimum", "maximum", "when", "where"]
)
_IN_A_SUBJECT = frozenset(["half", "square", "cube", "double", "third", "quarter", "sign"])
_PROSE = re.compile(r"(?:\\text\s?{\s?)?([A-Za-z][A-Za-z ,']{0,200}?\s(?:is|are|equals|be|was|has|have|get)\b)\s?}?\s?(?=\S)")
_SO = re.compile(r"(?:\\text\s?{\s?)?(?:only|exactly|so|thus|hence|therefore)\b,?\s?}?\s?(?=\S)", re.I)


def words_of(text: str) -> set[str]:
    return set(re.findall(r"[a-z]+(?:'[a-z]+)?", text.lower()))


def without_prose(text: str) -> str:
    """'The area is 5' → '5'; words that change the meaning are kept, which makes the text unreadable."""
    text = _SO.sub("", text, count=1) if _SO.match(text) else text
    found = _PROSE.match(text)
    if found is None:
        return text
    said = words_of(found[1])
    if said & ((CHANGES_MEANING | _IN_A_SUBJECT) - _HARMLESS) or not re.search(r"[\d\\=]", text[found.end() :]):
        return text
    return text[found.end() :].strip()


_CLAUSE = re.compile(r"[,;:]|\b(?:so|then|thus|hence|therefore|because|since)\b", re.I)


def qualifies(before: str, after: str = "") -> bool:
    """Whether the words before or after a number, in its clause, deny it or compare something with it: 'it is certainly not 3'."""
    clause = _CLAUSE.split(before[-300:])[-1]
    following = re.match(r"\W*([A-Za-z]+)", after)
    if "?" in after[-3:] or (following and (multiplier(following[1]) is not None or following[1].lower() in _CHANGES_NUMBERS)):
        return True  # '3 million', '3 squared'
    return bool(words_of(clause.replace("’", "'") + " " + after[:100]) & (NEGATIONS | COMPARISONS)) or clause.rstrip().endswith(
        ("~", "<", ">", "≈")
    )


def denies(before: str) -> bool:
    """Whether the clause before 'the answer is' denies what follows: 'it is not true that', 'the wrong'."""
    return bool(words_of(_CLAUSE.split(before[-300:])[-1].replace("’", "'")) & (NEGATIONS - {"other", "different", "instead"}))


# Domains -------------------------------------------------------------------------------------------------------------

_SETS = {
    "real": "R",
    "reals": "R",
    "integer": "Z",
    "integers": "Z",
    "rational": "Q",
    "rationals": "Q",
    "natural": "N",
    "complex": "C",
}
_FILLER = frozenset(
    ["number", "numbers", "value", "values", "an", "a", "arbitrary", "the", "set", "of", "that", "are", "is", "in", "whole"]
)
_QUANTIFIED = re.compile(
    r",?\s?(?:\\text\s?{[\s,]?)?(?:(?<![a-zA-Z])(?:for|where|with|and)\s(?:all|any|every|each|some)\b|(?<![a-zA-Z\\])where\b|\\forall(?![a-zA-Z]))"
    r"([^,;]{0,120})(?=$|[,;])"
)
_SET_COMMAND = re.compile(r"\\mathbb{([RZNQC])}(?:_{?\s?>\s?0\s?}?|\^{?[+*]}?|_{?[0+]}?)?")


def split_domains(text: str) -> tuple[str, dict[str, str]]:
    """The text without 'for all x ∈ ℝ', 'where k is an integer', and what they say. Conditions such as 'for all x > 0' remain."""
    domains: dict[str, str] = {}

    def take(found: re.Match[str]) -> str:
        said = _domain(found[1])
        if said is not None and "some" in found[0] and said[1] != "Z":
            said = None  # 'f(x) = 3 for some x' says less than 'f(x) = 3'
        if said is None or domains.get(said[0], said[1]) != said[1] or not found.start():
            return found[0]
        domains[said[0]] = said[1]
        return ""

    return _QUANTIFIED.sub(take, text).strip(), domains


def _domain(text: str) -> tuple[str, str] | None:
    """'x \\in \\mathbb{R}' → x, R; 'positive integers n' → n, Z+; None if it says anything else."""
    commands = _SET_COMMAND.findall(text)
    sign = "+" if re.search(r"\bpositive\b|\\mathbb{\w}(?:_{?\s?>|\^{?\+|_{?\+)", text) else ""
    bare = re.sub(r"\\text|\\in(?![a-z])|[{}$.\s]+", " ", _SET_COMMAND.sub(" ", text))
    words = [word for word in bare.split() if word not in _FILLER and word != "positive"]
    sets = commands + [_SETS[word] for word in words if word in _SETS]
    names = [word for word in words if word not in _SETS]
    if len(names) > 1 or len(set(sets)) > 1 or (names and not re.fullmatch(r"\\?[A-Za-z]+", names[0])):
        return None
    if names and len(names[0].lstrip("\\")) > 1 and not names[0].startswith("\\"):
        return None
    return (names[0].lstrip("\\") if names else "", (sets[0] if sets else "") + sign) if names or sets else None
