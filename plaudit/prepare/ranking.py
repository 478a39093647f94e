"""Groups of scored candidate translations → rows that train a generative ranking reward model (GRRM): SFT, then RL.

The prompt is what `kind: group_judge` would send for a group's candidates, from the same template, so that the trained model later
sees what it was trained on. The answer ends in the form that the `ranking` rule and `group_judge` expect:

    ranking_score   analysis, Ranking:, B > A = D > C, Scores:, B: 9, A: 7, D: 7, C: 2      descending, ties in letter order
    ranking         analysis, B > A = D > C
    score           analysis, Scores:, A: 7, B: 9, C: 2, D: 7                               in letter order; SFT only

Differs from GRRM's code: the prompts are our own; SFT rows, too, can be augmented with subgroups and other orders, provided that
the analysis has one line per candidate (`Translation A: …`), which then moves with its candidate.
"""

import json
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import pyarrow as pa

from plaudit.errors import DataError
from plaudit.prepare.scored_groups import (
    HIGHEST,
    LOWEST,
    SFT_SCHEMA,
    TEXT,
    USUAL,
    Candidates,
    Columns,
    RowSummary,
    read_groups,
    render_question,
    rl_row,
    rl_schema,
    split_analysis,
    write_rows,
)
from plaudit.rewards.judges.candidates import LETTERS
from plaudit.rewards.judges.templates import BUILT_IN, JudgeTemplate
from plaudit.rewards.rules.ranking_lines import rank, write_ranking
from plaudit.types import Message

Format = Literal["ranking_score", "ranking", "score"]
VARIABLES = ("candidates", "answer", "lowest", "highest")
"""Template variables of `group_judge`, in addition to those of every template."""
RL_SCHEMA = rl_schema(
    {
        "src_text": TEXT, "src_lang": TEXT, "trg_lang": TEXT, "analysis": TEXT, "candidates": pa.list_(TEXT),
        "shuffle_indices": pa.list_(pa.int64()),
    }
)  # fmt: skip


def make_ranking_sft(
    files: Sequence[Path], out: Path, *, format: Format = "ranking_score", subgroup_augment: int = 0, shuffle_augment: int = 0,
    add_example: bool = False, max_characters: int | None = None, template: Path | None = None, columns: Columns = USUAL,
    seed: int = 0,
) -> RowSummary:  # fmt: skip
    """Write conversations: a question about a group, answered with its analysis, ranking and scores."""
    question, rng, summary, rows = _Question(template, format, add_example), random.Random(seed), RowSummary(), []
    for group in _short_enough(read_groups(files, columns, fewest=2, analysed=True), max_characters, summary):
        if not group.analysis:
            raise DataError(f"{group.where}: column {columns.analysis!r} is empty; an answer begins with the analysis")
        for shown in _augment(group, subgroup_augment, shuffle_augment, rng):
            analysis = group.analysis if shown.places == group.places else _reordered(group, shown.places, columns.analysis)
            rows.append(
                {"messages": [*question(shown), {"role": "assistant", "content": _answer(analysis, shown.by_letter, format)}]}
            )
    rng.shuffle(rows)
    return write_rows(out, rows, SFT_SCHEMA, summary)


def make_ranking_rl(
    files: Sequence[Path], out: Path, *, format: Literal["ranking_score", "ranking"] = "ranking_score", subgroup_augment: int = 0,
    shuffle_augment: int = 0, add_example: bool = False, max_characters: int | None = None, template: Path | None = None,
    columns: Columns = USUAL, data_source: str = "mt_ranking", seed: int = 0,
) -> RowSummary:  # fmt: skip
    """Write prompts with the ground truth for the `ranking` rule: the scores as JSON, or the ranking."""
    question, rng, summary, rows = _Question(template, format, add_example), random.Random(seed), RowSummary(), []
    for group in _short_enough(read_groups(files, columns, fewest=2, analysed=False), max_characters, summary):
        for shown in _augment(group, subgroup_augment, shuffle_augment, rng):
            truth = json.dumps(shown.by_letter) if format == "ranking_score" else write_ranking(rank(shown.by_letter))
            source, target = shown.languages
            extra_info = {
                "src_text": shown.text, "src_lang": source, "trg_lang": target, "analysis": shown.analysis,
                "candidates": list(shown.candidates), "shuffle_indices": list(shown.places),
            }  # fmt: skip
            rows.append(rl_row(data_source, question(shown), "ranking", truth, extra_info))
    return write_rows(out, rows, RL_SCHEMA, summary)


def _short_enough(groups: Iterator[Candidates], max_characters: int | None, summary: RowSummary) -> Iterator[Candidates]:
    for group in groups:
        if max_characters is not None and group.characters > max_characters:
            summary.too_long += 1
        else:
            summary.groups += 1
            yield group


# Augmentation --------------------------------------------------------------------------------------------------------


def _augment(group: Candidates, subgroups: int, shuffles: int, rng: random.Random) -> Iterator[Candidates]:
    """The group and some of its subgroups, each in its original order and in others."""
    for places in [group.places, *_subsets(len(group.places), subgroups, rng)]:
        yield from (group.select(order) for order in _orders(places, shuffles, rng))


def _subsets(count: int, most: int, rng: random.Random) -> list[tuple[int, ...]]:
    """Up to `most` distinct subsets of 2 to count − 1 elements."""
    subsets: dict[tuple[int, ...], None] = {}
    while len(subsets) < min(most, 2**count - count - 2):
        subsets[tuple(sorted(rng.sample(range(count), rng.randint(2, count - 1))))] = None
    return list(subsets)


def _orders(places: Sequence[int], shuffles: int, rng: random.Random) -> list[tuple[int, ...]]:
    """The original order, and up to `shuffles` distinct others."""
    orders = {tuple(places): None}
    while len(orders) < min(1 + shuffles, math.factorial(len(places))):
        orders[tuple(rng.sample(places, len(places)))] = None
    return list(orders)


def _reordered(group: Candidates, order: Sequence[int], column: str | None) -> str:
    """The analysis of a reordered subgroup: each line moves with its candidate and gets its new letter."""
    lines = split_analysis(group, column, "--subgroup-augment and --shuffle-augment")
    return "\n".join(f"{lines[i][0]}{letter}:{lines[i][1]}" for letter, i in zip(LETTERS, order, strict=False))


# Questions and answers -----------------------------------------------------------------------------------------------


class _Question:
    """Renders the question about a group: `group_judge`'s prompt."""

    def __init__(self, template: Path | None, format: Format, add_example: bool):
        self.template = JudgeTemplate(template or BUILT_IN / "group.jinja", VARIABLES, "prepare")
        self.format: Format = format
        self.example = f"\nAn example of an answer:\n\n{_answer(*EXAMPLE, format)}\n" if add_example else ""

    def __call__(self, group: Candidates) -> list[Message]:
        shown = [{"letter": letter, "text": text} for letter, text in zip(LETTERS, group.candidates, strict=False)]
        variables = {"candidates": shown, "answer": self.format, "lowest": LOWEST, "highest": HIGHEST}
        [message] = render_question(self.template, group, variables)
        return [{**message, "content": message["content"] + self.example}]


EXAMPLE = ("A leaves a word out. B and C say the same, and both read well.", {"A": 4, "B": 9, "C": 9})


def _answer(analysis: str, scores: dict[str, int], format: Format) -> str:
    tiers = rank(scores)
    letters = sorted(scores) if format == "score" else [letter for tier in tiers for letter in sorted(tier)]
    ranking, line = write_ranking(tiers), ", ".join(f"{letter}: {scores[letter]}" for letter in letters)
    ends = {"ranking_score": f"Ranking:\n{ranking}\nScores:\n{line}", "ranking": ranking, "score": f"Scores:\n{line}"}
    return f"{analysis}\n\n{ends[format]}"
