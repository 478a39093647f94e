"""Groups of scored candidate translations → rows that train a generative ranking reward model (GRRM): SFT, then RL.

The prompt is the one that `kind: group_judge` fills in for a group's candidates, with the same template, so that the trained model
is asked later what it was asked here. The answer ends as the `ranking` rule and `group_judge` read it:

    ranking_score   analysis, Ranking:, B > A = D > C, Scores:, B: 9, A: 7, D: 7, C: 2      descending, ties in letter order
    ranking         analysis, B > A = D > C
    score           analysis, Scores:, A: 7, B: 9, C: 2, D: 7                               in letter order; SFT alone

Differs from GRRM's code: prompts are of our own writing; SFT rows, too, may show parts of groups and further orders, where the
analysis has a line for each candidate (`Translation A: …`), which then goes with its candidate.
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
    Made,
    fill_in,
    lines_of,
    read_groups,
    rl_row,
    rl_schema,
    write_rows,
)
from plaudit.rewards.judges.candidates import LETTERS
from plaudit.rewards.judges.templates import OURS, JudgeTemplate
from plaudit.rewards.rules.ranking_lines import rank, write_ranking
from plaudit.types import Message

Format = Literal["ranking_score", "ranking", "score"]
VARIABLES = ("candidates", "answer", "lowest", "highest")
"""What `group_judge` gives its template besides what every template has."""
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
) -> Made:  # fmt: skip
    """Write conversations: the question about a group, and the analysis, ranking and scores it should be answered with."""
    ask, chance, made, rows = _Question(template, format, add_example), random.Random(seed), Made(), []
    for group in _short_enough(read_groups(files, columns, fewest=2, analysed=True), max_characters, made):
        if not group.analysis:
            raise DataError(f"{group.where}: column {columns.analysis!r} is empty: an answer begins with the analysis")
        for shown in _shown(group, subgroup_augment, shuffle_augment, chance):
            analysis = group.analysis if shown.places == group.places else _reordered(group, shown.places, columns.analysis)
            rows.append({"messages": [*ask(shown), {"role": "assistant", "content": _answer(analysis, shown.by_letter, format)}]})
    chance.shuffle(rows)
    return write_rows(out, rows, SFT_SCHEMA, made)


def make_ranking_rl(
    files: Sequence[Path], out: Path, *, format: Literal["ranking_score", "ranking"] = "ranking_score", subgroup_augment: int = 0,
    shuffle_augment: int = 0, add_example: bool = False, max_characters: int | None = None, template: Path | None = None,
    columns: Columns = USUAL, data_source: str = "mt_ranking", seed: int = 0,
) -> Made:  # fmt: skip
    """Write prompts with the truth, for the `ranking` rule: the scores as JSON, or the ranking."""
    ask, chance, made, rows = _Question(template, format, add_example), random.Random(seed), Made(), []
    for group in _short_enough(read_groups(files, columns, fewest=2, analysed=False), max_characters, made):
        for shown in _shown(group, subgroup_augment, shuffle_augment, chance):
            truth = json.dumps(shown.by_letter) if format == "ranking_score" else write_ranking(rank(shown.by_letter))
            source, target = shown.languages
            about = {
                "src_text": shown.text, "src_lang": source, "trg_lang": target, "analysis": shown.analysis,
                "candidates": list(shown.candidates), "shuffle_indices": list(shown.places),
            }  # fmt: skip
            rows.append(rl_row(data_source, ask(shown), "ranking", truth, about))
    return write_rows(out, rows, RL_SCHEMA, made)


def _short_enough(groups: Iterator[Candidates], max_characters: int | None, made: Made) -> Iterator[Candidates]:
    for group in groups:
        if max_characters is not None and group.characters > max_characters:
            made.too_long += 1
        else:
            made.groups += 1
            yield group


# Orders --------------------------------------------------------------------------------------------------------------


def _shown(group: Candidates, subgroups: int, further_orders: int, chance: random.Random) -> Iterator[Candidates]:
    """The group and parts of it, each in its own order and in further ones."""
    for some in [group.places, *_subsets(len(group.places), subgroups, chance)]:
        yield from (group.shown(order) for order in _orders(some, further_orders, chance))


def _subsets(count: int, most: int, chance: random.Random) -> list[tuple[int, ...]]:
    """Different subsets of two to all but one."""
    found: dict[tuple[int, ...], None] = {}
    while len(found) < min(most, 2**count - count - 2):
        found[tuple(sorted(chance.sample(range(count), chance.randint(2, count - 1))))] = None
    return list(found)


def _orders(some: Sequence[int], further: int, chance: random.Random) -> list[tuple[int, ...]]:
    """Their own order, and further different ones."""
    found = {tuple(some): None}
    while len(found) < min(1 + further, math.factorial(len(some))):
        found[tuple(chance.sample(some, len(some)))] = None
    return list(found)


def _reordered(group: Candidates, order: Sequence[int], column: str | None) -> str:
    """The analysis of part of a group, in any order: each line goes with its candidate and gets its new letter."""
    found = lines_of(group, column, "--subgroup-augment and --shuffle-augment ask")
    return "\n".join(f"{found[i][0]}{letter}:{found[i][1]}" for letter, i in zip(LETTERS, order, strict=False))


# Questions and answers -----------------------------------------------------------------------------------------------


class _Question:
    """What the model is asked about a group: `group_judge`'s prompt."""

    def __init__(self, template: Path | None, format: Format, add_example: bool):
        self.template = JudgeTemplate(template or OURS / "group.jinja", VARIABLES, "prepare")
        self.format: Format = format
        self.example = f"\nAn example of an answer:\n\n{_answer(*EXAMPLE, format)}\n" if add_example else ""

    def __call__(self, group: Candidates) -> list[Message]:
        shown = [{"letter": letter, "text": text} for letter, text in zip(LETTERS, group.candidates, strict=False)]
        variables = {"candidates": shown, "answer": self.format, "lowest": LOWEST, "highest": HIGHEST}
        [message] = fill_in(self.template, group, variables)
        return [{**message, "content": message["content"] + self.example}]


EXAMPLE = ("A leaves a word out. B and C say the same, and both read well.", {"A": 4, "B": 9, "C": 9})


def _answer(analysis: str, scores: dict[str, int], format: Format) -> str:
    tiers = rank(scores)
    letters = sorted(scores) if format == "score" else [letter for tier in tiers for letter in sorted(tier)]
    ranking, line = write_ranking(tiers), ", ".join(f"{letter}: {scores[letter]}" for letter in letters)
    ends = {"ranking_score": f"Ranking:\n{ranking}\nScores:\n{line}", "ranking": ranking, "score": f"Scores:\n{line}"}
    return f"{analysis}\n\n{ends[format]}"
