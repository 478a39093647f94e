"""Parsing a judge's answer: a number, a verdict, a choice, a ranking. Pure functions; None if the answer is unreadable.

Nothing that a judge writes makes them raise, hang or return a non-finite number. If several places in an answer qualify, the last
one counts: judges deliberate first and decide at the end. Numbers are ASCII digits: `²`, `٣` and `1_0` are not numbers.

Differs from the sources: TinyV passes any answer that contains `true`; here the last line decides, and one with both words or with
`not true` is unreadable. For GRRM's pointwise model the last line counts too; there `7.5` is read as 7, here as 7.5. The rubric
reward model's code reads `Total Score: 85/100` as 10 of 10 and `4/5` as 4 of 10; here the denominator counts.
"""

import json
import re
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from plaudit.response_files import CLOSE, OPEN
from plaudit.rewards.rules.ranking_lines import filled_lines, rank, read_ranking, read_scores

NUMBER = r"[+-]?(?:[0-9]{1,15}(?:\.[0-9]{0,15})?|\.[0-9]{1,15})"
MOST_OBJECTS = 100
"""Number of places, from the end, where a JSON object is searched for."""
MAX_JSON_CHARS = 100_000
"""Length of the answer's end that is searched for them."""
MAX_NUMBER = 1e15
"""Larger numbers are unreadable, in JSON as elsewhere: their sums are soon infinite."""
MAX_PARTS, MAX_PART_NAME = 50, 100
"""Numbers besides the score that are kept, and characters in their names: each becomes a metric."""
_NUMBER = re.compile(NUMBER)
_OPENED = re.compile(rf"^[ \t]*{OPEN}", re.M)
_OUT_OF = re.compile(rf"({NUMBER})\s*(?:/\s*([0-9]{{1,9}})|points?)?\s*\.?", re.I)
_TOTAL = re.compile(r"total\s+score", re.I)
_SHARE = re.compile(rf"({NUMBER})\s*(?:points?\s*)?(?:(?:/|out\s+of|of)\s*({NUMBER})\s*(?:points?)?|(%))?", re.I)
_AROUND_TOTAL = "*_`~ \t\r\n:=|[]"
_DECORATION = "*_`~ \t\"'"
_LEADING = frozenset({
    "the", "a", "my", "our", "final", "overall", "answer", "verdict", "judgement", "judgment", "result", "conclusion",
    "it", "this", "that", "is", "so", "hence", "therefore", "thus",
})  # fmt: skip
"""Words that may precede a verdict without negating it."""


@dataclass(frozen=True)
class Found:
    """The result of parsing an answer: its value, and any other numbers in it."""

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)


def strip_thoughts(text: str, marker: str | None = None) -> str | None:
    """The answer without the judge's reasoning: the text after the last `</think>`, and within that, after the last `marker`.

    None if the reasoning is not closed or the marker is missing.
    """
    answer = text.rpartition(CLOSE)[2]
    if _OPENED.search(answer):  # opened but not closed; <think> within a line may just be mentioned
        return None
    if marker:
        _, found, answer = answer.rpartition(marker)
        if not found:
            return None
    return answer.strip() or None


# Numbers -------------------------------------------------------------------------------------------------------------


def read_number(text: str) -> float | None:
    """The number the text consists of, ignoring surrounding Markdown emphasis and quotes."""
    text = text.strip().strip(_DECORATION)
    return float(text) if len(text) < 40 and _NUMBER.fullmatch(text) else None


def read_last_number(text: str) -> float | None:
    """The last line as a number, if it is nothing else."""
    return read_number(text.strip().rpartition("\n")[2])


def read_tagged(text: str, tag: str, highest: float | None = None) -> float | None:
    """The content of the last `<score>8</score>`; without such tags, the number in the last line `score: 8` (or `8/10`).
    `highest`: the only denominator accepted, so that `4/5` is not read as 4 of 10."""
    before, closed, _ = text.rpartition(f"</{tag}>")
    if closed:
        _, opened, inside = before.rpartition(f"<{tag}>")
        return _out_of(inside, highest) if opened else None
    for line in reversed(filled_lines(text)):
        label, colon, number = line.strip(_DECORATION + "-#").partition(":")
        if colon and label.strip(_DECORATION).casefold() == tag.casefold():
            return _out_of(number, highest)
    return None


def _out_of(text: str, highest: float | None) -> float | None:
    """`8`, `8/10` or `8 points`."""
    text = text.strip().strip(_DECORATION + "[]")
    found = _OUT_OF.fullmatch(text) if len(text) < 60 else None
    if found is None or (found[2] is not None and (float(found[1]) > float(found[2]) or highest not in (None, float(found[2])))):
        return None
    return float(found[1])


def read_pattern(text: str, pattern: str, timeout_s: float = 0.1) -> float | None:
    """The last match of the pattern as a number: its first group, or the full match if it has no group. The search blocks other
    requests, so a pattern that takes too long counts as no match."""
    import regex

    compiled = regex.compile(pattern)
    try:
        last = next(iter(deque(compiled.finditer(text, timeout=timeout_s, concurrent=True), maxlen=1)), None)
    except TimeoutError:
        return None
    if last is None:
        return None
    number = last.group(1 if compiled.groups else 0)
    return None if number is None else read_number(number)


def read_total_score(text: str) -> Found | None:
    """`Total Score: 8/10`, at the end of the answer, is 0.8; so are `4/5`, `4 out of 5`, `80 %` and `8`, which is out of 10. Above
    its scale, or with another number or any word behind it, it is unreadable."""
    heading = next(iter(deque(_TOTAL.finditer(text), maxlen=1)), None)
    if heading is None or len(text) - heading.end() > 100:
        return None
    sentence = re.split(r"[.!?]\s|\n", text[max(0, heading.start() - 1000) : heading.start()])[-1].casefold()
    stated = text[heading.end() :].lstrip(_AROUND_TOTAL).rstrip(_AROUND_TOTAL + ".")
    found = _SHARE.fullmatch(re.sub(r"^is\b[\s:]*", "", stated))
    # `It says: Total Score: 10/10` and `"Total Score: 10/10"` are about another text.
    if found is None or not set(re.findall(r"[^\W\d_]+", sentence)) <= _LEADING or re.search('["“”«»]', sentence):
        return None
    total, scale = float(found[1]), float(found[2] or (100 if found[3] else 10))
    return Found(total / scale, {"total": 10 * total / scale}) if 0 <= total <= scale and scale > 0 else None


# Verdicts ------------------------------------------------------------------------------------------------------------


def read_true_false(text: str) -> float | None:
    """1 or 0: the last line is True or False, alone, after a colon, or after `the answer is` and the like. Anything else before it
    makes it unreadable: `it isn't true`, `that can hardly be true`."""
    line = text.strip().rpartition("\n")[2].casefold()[-1000:]
    label, _, verdict = line.rpartition(":")
    words, before = re.findall(r"[^\W\d_]+", verdict), set(re.findall(r"[^\W\d_]+", label))
    if not words or words[-1] not in ("true", "false") or not set(words[:-1]) <= _LEADING or before & {"true", "false", "not"}:
        return None
    return float(words[-1] == "true")


def read_choice(text: str, choices: Collection[str]) -> str | None:
    """The choice named by the last line: `A`, `**B**`, `[[tie]]`, `Winner: A`. None if it names none, or contains anything else."""
    line = text.strip().rpartition("\n")[2]
    word = line.rpartition(":")[2].strip().strip(_DECORATION + "[]().").casefold()
    return next((choice for choice in choices if choice.casefold() == word), None)


# JSON ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FieldRule:
    """Constraints on a field of the object: the subset of JSON Schema that judges need."""

    type: Literal["number", "integer", "boolean", "string"] = "number"
    minimum: float | None = None
    maximum: float | None = None

    def allows(self, value: Any) -> bool:
        match self.type:
            case "boolean":
                return isinstance(value, bool)
            case "string":
                return isinstance(value, str)
        number = as_number(value)
        if number is None or isinstance(value, bool) or (self.type == "integer" and not number.is_integer()):
            return False
        return within(number, self.minimum, self.maximum)


def read_json(text: str, name: str, rules: Mapping[str, FieldRule] | None = None) -> Found | None:
    """The last JSON object with the field, if it satisfies all rules: the field's number, and its other numbers as parts."""
    for given in objects_in(text):
        if name not in given:
            continue
        value = as_number(given[name])
        if value is None or not all(rule.allows(given.get(key)) for key, rule in (rules or {}).items()):
            return None
        others = {key: as_number(other) for key, other in given.items() if key != name and len(key) <= MAX_PART_NAME}
        return Found(value, dict([(key, number) for key, number in others.items() if number is not None][:MAX_PARTS]))
    return None


def objects_in(text: str) -> list[dict[str, Any]]:
    """The JSON objects in an answer, fenced or not, last one first; nested objects follow the ones that contain them."""
    decoder, text = json.JSONDecoder(), text[-MAX_JSON_CHARS:]
    found: list[tuple[int, int, dict[str, Any]]] = []
    end = len(text)
    for _ in range(MOST_OBJECTS):
        start = text.rfind("{", 0, end)
        if start < 0:
            break
        end = start
        try:
            value, stop = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            continue
        # Scanning from the end, objects nested in this one have already been found.
        inside = next((i for i, (begun, ended, _) in enumerate(found) if start < begun and ended <= stop), len(found))
        found.insert(inside, (start, stop, value))
    return [value for _, _, value in found if isinstance(value, dict)]


def as_number(value: Any) -> float | None:
    """A number; a boolean is 1 or 0, a numeric string its number. None if it is not finite, or too large."""
    if isinstance(value, str):
        return read_number(value)
    return float(value) if isinstance(value, int | float) and abs(value) <= MAX_NUMBER else None


def within(number: float, lowest: float | None, highest: float | None) -> bool:
    return (lowest is None or number >= lowest) and (highest is None or number <= highest)


# Several scores ------------------------------------------------------------------------------------------------------


def read_criteria(
    text: str, names: Sequence[str], form: Literal["json", "lines"], highest: float | None = None
) -> dict[str, float] | None:
    """A score for each name: fields of the last JSON object that has them all, or lines `name: score`; case is ignored."""
    if form == "lines":
        scores = {name: read_tagged(text, name, highest) for name in names}
    else:
        objects = ({key.casefold(): value for key, value in one.items()} for one in objects_in(text))
        given = next((one for one in objects if all(name.casefold() in one for name in names)), {})
        scores = {name: as_number(given.get(name.casefold())) for name in names}
    known = {name: score for name, score in scores.items() if score is not None}
    return known if len(known) == len(names) else None


def read_letters(
    text: str, letters: Collection[str], form: Literal["ranking_score", "ranking", "score"]
) -> dict[str, float] | None:
    """The value of each letter in an answer about several candidates: its score or, in a ranking, the share of others it beats.

    The last line is the scores line (`B: 9, A: 7`) or the ranking line (`B > A = D`). In `ranking_score` the ranking line precedes
    the scores line, with or without a heading between them, and must be the ranking that the scores imply. All letters must occur.
    """
    lines = [line.strip(_DECORATION) for line in filled_lines(text)]
    if not lines:
        return None
    if form == "ranking":
        tiers = read_ranking(lines[-1])
        if tiers is None or frozenset().union(*tiers) != frozenset(letters):
            return None
        return _shares(tiers)
    scores = read_scores(lines[-1])
    if scores is None or scores.keys() != frozenset(letters):
        return None
    if form == "ranking_score" and rank(scores) not in [read_ranking(line) for line in lines[-3:-1]]:
        return None
    return {letter: float(score) for letter, score in scores.items()}


def _shares(tiers: Sequence[frozenset[str]]) -> dict[str, float]:
    """Share of the other candidates ranked below, ties counting half: 1 for a sole best, 0 for a sole worst."""
    count, above, shares = sum(map(len, tiers)), 0, {}
    for tier in tiers:
        below = count - above - len(tier)
        shares |= dict.fromkeys(sorted(tier), (below + (len(tier) - 1) / 2) / max(count - 1, 1))
        above += len(tier)
    return shares
