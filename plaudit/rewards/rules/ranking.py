"""Ranking accuracy (GRRM): how well an answer ranks and scores the candidates in the prompt.

    reward = score_scale · (ranking part + score part)            both in [0, 1]; formulas in `ranking_lines.py`

Answers are parsed from the end; one that violates the format scores 0 with `valid` 0, and is malformed. Formats:

    ranking_score   analysis, heading, ranking line, heading, scores line; blank lines are ignored
    ranking         analysis, ranking line; the ranking must not occur elsewhere in the answer. The ranking part alone
    zero            as `ranking`, with at least 50 characters of analysis per candidate: for base models
    no_analysis     the ranking line alone (the ranking part), or the ranking line and the scores line (both parts)

Differs from GRRM's code: `ranking` accepts an answer with an analysis (there, the entire answer is taken as the ranking line);
items of the scores line are stricter (`ranking_lines.py`); blank lines are ignored in `no_analysis` too.
"""

import json
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import PositiveFloat

from plaudit.rewards.reward import Rule
from plaudit.rewards.rules.ground_truth import no_truth, plain
from plaudit.rewards.rules.ranking_lines import (
    RankedAnswer,
    Tiers,
    letters_of,
    pairwise_share,
    rank,
    read_ranked,
    read_ranked_scores,
    read_ranking,
    score_part,
)
from plaudit.types import Prompt, Sample, Score

ANALYSIS_PER_CANDIDATE = 50
"""Characters, not counting surrounding white space."""


class Ranking(Rule):
    kind: Literal["ranking"]
    """Ranking and scores of candidates against the ground truth's."""
    format: Literal["ranking_score", "ranking", "zero", "no_analysis"] = "ranking_score"
    """The answer's format: analysis, ranking and scores; analysis and ranking; the same with a long analysis; or no analysis."""
    score_scale: PositiveFloat = 1.0
    """Factor of the reward; its parts are not scaled."""

    checks_answer: ClassVar[bool] = True

    def value(self, prompt: Prompt, sample: Sample) -> Score:
        scores = _true_scores(prompt.ground_truth)
        tiers = rank(scores) if scores else _true_ranking(prompt.ground_truth)
        needs_scores = self.format == "ranking_score"
        if tiers is None or (needs_scores and scores is None):
            needs = 'the score of each candidate, as JSON: {"A": 9, "B": 7}' + ("" if needs_scores else ", or their ranking: A > B")
            return no_truth(prompt, sample, "ranking", needs)

        parts = {"ranking": 0.0}
        if needs_scores or (self.format == "no_analysis" and scores):
            parts["score"] = 0.0
        answer = self._read(sample.text, len(letters_of(tiers)), scored=scores is not None)
        valid = answer is not None and letters_of(answer.tiers) == letters_of(tiers)
        if answer is not None and valid:
            parts["ranking"] = pairwise_share(answer.tiers, tiers)
            if answer.scores and scores:
                parts["score"] = score_part(answer.scores, scores)
        total = self.score_scale * sum(parts.values())
        return Score(total, parts | {"valid": float(valid)}, malformed=not valid, view=sample.text)

    def _read(self, text: str, candidates: int, *, scored: bool) -> RankedAnswer | None:
        """The parsed answer, if it has the format. A scores line is allowed only if the ground truth has scores."""
        match self.format:
            case "ranking_score":
                return read_ranked_scores(text)
            case "ranking":
                return read_ranked(text)
            case "zero":
                answer = read_ranked(text)
                return answer if answer and len(answer.analysis) >= ANALYSIS_PER_CANDIDATE * candidates else None
            case "no_analysis":
                return read_ranked(text, analysis=False) or (read_ranked_scores(text, analysis=False) if scored else None)


# The ground truth ----------------------------------------------------------------------------------------------------


def _true_scores(truth: Any) -> dict[str, int] | None:
    """Letter → score, from a dict or its JSON text."""
    if isinstance(truth, str):
        try:
            truth = json.loads(truth)
        except (ValueError, RecursionError):
            return None
    elif isinstance(truth, Mapping):
        # In Parquet every row of a column has the same letters; letters that a row lacks are None.
        truth = {letter: score for letter, score in truth.items() if score is not None}
    if not isinstance(truth, Mapping) or not truth:
        return None
    scores = {letter: _whole(score) for letter, score in truth.items() if _is_letter(letter)}
    known = {letter: score for letter, score in scores.items() if score is not None}
    return known if len(known) == len(truth) else None


def _true_ranking(truth: Any) -> Tiers | None:
    return read_ranking(truth) if isinstance(truth, str) else None


def _is_letter(key: Any) -> bool:
    return isinstance(key, str) and len(key) == 1 and "A" <= key <= "Z"


def _whole(score: Any) -> int | None:
    """A score as an integer. Whole floats are accepted: an integer column with missing values is read as floats."""
    score = plain(score)
    if isinstance(score, bool) or not isinstance(score, int | float):
        return None
    return int(score) if isinstance(score, int) or score.is_integer() else None
