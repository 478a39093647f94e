"""Rankings and scores as lines of text: parsing them, and measuring how far two of them agree.

A ranking line is `B > A = D > C`: one capital letter per candidate, joined by exactly ` > ` or ` = `, so k candidates take 4k − 3
characters. A scores line is `B: 9, A: 7, D: 7, C: 2`; spaces around `:` and `,` are optional. With r(x, y) ∈ {>, =, <} the relation
of two candidates and Δ(x, y) the difference of their scores, over all pairs of candidates:

    ranking part = share of pairs with r_predicted = r_truth              (a tie against a non-tie is wrong)
    score part   = mean of f(|Δ_predicted − Δ_truth|),                    f(0) = 1, f(1) = 0.6, f(2) = 0.2, else 0

Differs from GRRM's code: a line with two scores for a letter is rejected (there the last one counts), and an integer is at most
nine ASCII digits with an optional sign (there `int` also accepts `1_0` and the digits of every script).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

Tiers = tuple[frozenset[str], ...]
"""A ranking: the best candidates first, ties in one set."""

SCORE_PART = {0: 1.0, 1: 0.6, 2: 0.2}
_RANKING = re.compile(r"[A-Z](?: [>=] [A-Z])*")
_ITEM = re.compile(r"([A-Z])\s*:\s*([+-]?[0-9]{1,9})")
_INTEGER = re.compile(r"[+-]?[0-9]{1,9}")


# Reading -------------------------------------------------------------------------------------------------------------


def read_integer(text: str) -> int | None:
    """The text as an integer, ignoring surrounding white space."""
    text = text.strip()
    return int(text) if _INTEGER.fullmatch(text) else None


def read_ranking(line: str) -> Tiers | None:
    """The tiers of a ranking line, ignoring surrounding white space; None if it is malformed or names a candidate twice."""
    line = line.strip()
    # A longer line must repeat a letter; this avoids matching megabytes.
    if len(line) > 4 * 26 - 3 or not _RANKING.fullmatch(line):
        return None
    tiers = [tier.split(" = ") for tier in line.split(" > ")]
    letters = [letter for tier in tiers for letter in tier]
    return tuple(map(frozenset, tiers)) if len(set(letters)) == len(letters) else None


def read_scores(line: str) -> dict[str, int] | None:
    """Letter → score, in the line's order; None if an item is not `LETTER: INT` or a candidate is named twice."""
    scores: dict[str, int] = {}
    for item in line.split(","):
        found = _ITEM.fullmatch(item.strip())
        if found is None or found[1] in scores:
            return None
        scores[found[1]] = int(found[2])
    return scores


@dataclass(frozen=True)
class RankedAnswer:
    """A parsed answer: its analysis, ranking and scores."""

    analysis: str
    tiers: Tiers
    scores: Mapping[str, int] | None = None


def read_ranked_scores(text: str, *, analysis: bool = True) -> RankedAnswer | None:
    """An answer that ends in heading, ranking line, heading, scores line, with an analysis before them. Blank lines are ignored.

    Without `analysis`: just a ranking line and a scores line. None unless the scores imply exactly that ranking.
    """
    lines = filled_lines(text)
    if analysis and len(lines) >= 5:
        *before, _, ranking_line, _, scores_line = lines
    elif not analysis and len(lines) == 2:
        before, (ranking_line, scores_line) = [], lines
    else:
        return None
    tiers, scores = read_ranking(ranking_line), read_scores(scores_line)
    if tiers is None or scores is None or len(scores) < 2 or tiers != rank(scores):
        return None
    return RankedAnswer("\n".join(before), tiers, scores)


def read_ranked(text: str, *, analysis: bool = True) -> RankedAnswer | None:
    """An answer whose last line is a ranking, with an analysis before it that does not contain the same ranking.

    Without `analysis`: just a ranking line.
    """
    before, _, line = text.strip().rpartition("\n")
    before, line = before.strip(), line.strip()
    tiers = read_ranking(line)
    if tiers is None or len(letters_of(tiers)) < 2 or bool(before) != analysis or line in before:
        return None
    return RankedAnswer(before, tiers)


def filled_lines(text: str) -> list[str]:
    """The non-blank lines, stripped."""
    return [line for line in map(str.strip, text.split("\n")) if line]


# Rankings ------------------------------------------------------------------------------------------------------------


def letters_of(tiers: Tiers) -> frozenset[str]:
    return frozenset().union(*tiers)


def rank(scores: Mapping[str, int]) -> Tiers:
    """The ranking implied by scores: descending, equal scores tied."""
    by_score: dict[int, set[str]] = {}
    for letter, score in scores.items():
        by_score.setdefault(score, set()).add(letter)
    return tuple(frozenset(by_score[score]) for score in sorted(by_score, reverse=True))


def write_ranking(tiers: Tiers) -> str:
    """`B > A = D > C`: ties in letter order."""
    return " > ".join(" = ".join(sorted(tier)) for tier in tiers)


def relation(tiers: Tiers, x: str, y: str) -> int:
    """1 if x ranks above y, −1 if below, 0 if they are tied."""
    place = {letter: i for i, tier in enumerate(tiers) for letter in tier}
    return (place[x] < place[y]) - (place[x] > place[y])


# Agreement -----------------------------------------------------------------------------------------------------------


def pairwise_share(predicted: Tiers, truth: Tiers) -> float:
    """The ranking part: the share of pairs whose relation matches the truth. Both must rank the same candidates, at least two."""
    assert letters_of(predicted) == letters_of(truth), "rankings of different candidates cannot be compared"
    pairs = list(combinations(sorted(letters_of(truth)), 2))
    return sum(relation(predicted, x, y) == relation(truth, x, y) for x, y in pairs) / len(pairs)


def score_part(predicted: Mapping[str, int], truth: Mapping[str, int]) -> float:
    """The score part: how well score differences match. Both must score the same candidates, at least two."""
    assert predicted.keys() == truth.keys(), "scores of different candidates cannot be compared"
    pairs = list(combinations(sorted(truth), 2))
    errors = [abs((predicted[x] - predicted[y]) - (truth[x] - truth[y])) for x, y in pairs]
    return sum(SCORE_PART.get(error, 0.0) for error in errors) / len(pairs)
