"""What a judge's answer says: a number, a verdict, a choice, a ranking. Pure functions; None where it cannot be read.

Nothing that a judge writes makes them raise, hang, or give a number that is not finite. Where several places of an answer could be
meant, the last one counts: judges weigh first and decide at the end. Numbers are ASCII digits: `²`, `٣` and `1_0` are none.

Differs from the sources: TinyV takes any answer that contains `true` for a pass; here the last line decides, and one that says both
or `not true` is not read. GRRM's pointwise model is read by the last line too; there `7.5` is 7, here it is 7.5.
"""

import json
import math
import re
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from plaudit.rewards.rules.grade import read_total
from plaudit.rewards.rules.ranking_lines import filled_lines, rank, read_ranking, read_scores

CLOSE = "</think>"
NUMBER = r"[+-]?(?:[0-9]{1,15}(?:\.[0-9]{0,15})?|\.[0-9]{1,15})"
MOST_OBJECTS = 100
"""Places at which a JSON object is looked for, from the end."""
_NUMBER = re.compile(NUMBER)
_OPENED = re.compile(r"^[ \t]*<think>", re.M)
_OUT_OF = re.compile(rf"({NUMBER})\s*(?:/\s*([0-9]{{1,9}})|points?)?\s*\.?", re.I)
_DECORATION = "*_`~ \t\"'"
_LEADING = frozenset({
    "the", "a", "my", "our", "final", "overall", "answer", "verdict", "judgement", "judgment", "result", "conclusion",
    "it", "this", "that", "is", "so", "hence", "therefore", "thus",
})  # fmt: skip
"""What may stand before a verdict without turning it round."""


@dataclass(frozen=True)
class Found:
    """What an answer says: its value, and what else it states in numbers."""

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)


def strip_thoughts(text: str, marker: str | None = None) -> str | None:
    """The answer without the judge's thoughts: what follows the last `</think>`, and of that, what follows the last `marker`.

    None if the thoughts do not end, or the marker is not there.
    """
    answer = text.rpartition(CLOSE)[2]
    if _OPENED.search(answer):  # and not closed; a judge may well speak of <think> within a line
        return None
    if marker:
        _, found, answer = answer.rpartition(marker)
        if not found:
            return None
    return answer.strip() or None


# Numbers -------------------------------------------------------------------------------------------------------------


def read_number(text: str) -> float | None:
    """The number that the text is; Markdown's stars and quotes around it do not count."""
    text = text.strip().strip(_DECORATION)
    return float(text) if len(text) < 40 and _NUMBER.fullmatch(text) else None


def read_last_number(text: str) -> float | None:
    """The number that is the last line, all of it."""
    return read_number(text.strip().rpartition("\n")[2])


def read_tagged(text: str, tag: str, highest: float | None = None) -> float | None:
    """What the last `<score>8</score>` holds; in an answer without such tags, what the last line `score: 8` (or `8/10`) says.
    `highest`: `4/5` is not 4 of 10."""
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
    if found is None or (found[2] is not None and highest is not None and float(found[2]) != highest):
        return None
    return float(found[1])


def read_pattern(text: str, pattern: str, timeout_s: float = 0.1) -> float | None:
    """The last place where the pattern is found: its first group as a number, or all of it if it has no group. Everyone else
    waits meanwhile, so a pattern that searches long has found nothing."""
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
    """`Total Score: 8/10` is worth 0.8; more than 10 counts as 10."""
    total = read_total(text)
    return None if total is None else Found(min(10.0, total) / 10, {"total": total})


# Verdicts ------------------------------------------------------------------------------------------------------------


def read_true_false(text: str) -> float | None:
    """1 or 0: the last line is the word True or False, alone, behind a colon, or behind `the answer is` and the like. (Not behind
    anything else: `it isn't true`, `that can hardly be true`.)"""
    line = text.strip().rpartition("\n")[2].casefold()[-1000:]
    label, _, verdict = line.rpartition(":")
    words, before = re.findall(r"[^\W\d_]+", verdict), set(re.findall(r"[^\W\d_]+", label))
    if not words or words[-1] not in ("true", "false") or not set(words[:-1]) <= _LEADING or before & {"true", "false", "not"}:
        return None
    return float(words[-1] == "true")


def read_choice(text: str, choices: Collection[str]) -> str | None:
    """Which of the choices the last line names: `A`, `**B**`, `[[tie]]`, `Winner: A`. None if it is none, or says anything else."""
    line = text.strip().rpartition("\n")[2]
    word = line.rpartition(":")[2].strip().strip(_DECORATION + "[]().").casefold()
    return next((choice for choice in choices if choice.casefold() == word), None)


# JSON ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FieldRule:
    """What a field of the object must be: the part of JSON Schema that judges need."""

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
    """The last JSON object that has the field, and fits all rules: the field's number, and its other numbers as parts."""
    for given in objects_in(text):
        if name not in given:
            continue
        value = as_number(given[name])
        if value is None or not all(rule.allows(given.get(key)) for key, rule in (rules or {}).items()):
            return None
        others = {key: as_number(other) for key, other in given.items() if key != name}
        return Found(value, {key: number for key, number in others.items() if number is not None})
    return None


def objects_in(text: str) -> list[dict[str, Any]]:
    """The JSON objects in an answer, fenced or not, the last one first; those inside of others come after them."""
    decoder = json.JSONDecoder()
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
        # From the end: what lies inside of this one was found before it.
        inside = next((i for i, (begun, ended, _) in enumerate(found) if start < begun and ended <= stop), len(found))
        found.insert(inside, (start, stop, value))
    return [value for _, _, value in found if isinstance(value, dict)]


def as_number(value: Any) -> float | None:
    """A finite number; a boolean is 1 or 0, a text that is a number is that number."""
    if isinstance(value, str):
        return read_number(value)
    if not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def within(number: float, lowest: float | None, highest: float | None) -> bool:
    return (lowest is None or number >= lowest) and (highest is None or number <= highest)


# Several scores ------------------------------------------------------------------------------------------------------


def read_criteria(
    text: str, names: Sequence[str], form: Literal["json", "lines"], highest: float | None = None
) -> dict[str, float] | None:
    """A score for each name: fields of the last JSON object that has them all, or lines `name: score`, in any case."""
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
    """What an answer about several candidates gives each letter: its score or, in a ranking, the share of others that it beats.

    The last line is the scores line (`B: 9, A: 7`), or the ranking line (`B > A = D`). In `ranking_score` the ranking line stands
    before the scores line, with a heading between them or without, and is the one that the scores imply. All letters are there.
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
    """Of the others, the share below, ties half: 1 for the best alone, 0 for the worst alone."""
    count, above, shares = sum(map(len, tiers)), 0, {}
    for tier in tiers:
        below = count - above - len(tier)
        shares |= dict.fromkeys(sorted(tier), (below + (len(tier) - 1) / 2) / max(count - 1, 1))
        above += len(tier)
    return shares
