"""Groups of scored candidate translations → rows that train a generative ranking reward model (GRRM): SFT, then RL.

The prompt is what `kind: group_judge` would send for a group's candidates, from the same template, so that the trained model later
sees what it was trained on. The answer ends in the form that the `ranking` rule and `group_judge` expect:

    ranking_score   analysis, Ranking:, B > A = D > C, Scores:, B: 9, A: 7, D: 7, C: 2      descending, ties in letter order
    ranking         analysis, B > A = D > C
    score           analysis, Scores:, A: 7, B: 9, C: 2, D: 7                               in letter order; SFT only

The headings may be others: the rule and the judge look at their places, not at their words.

Differs from GRRM's code: the prompts are our own; SFT rows, too, can be augmented with subgroups and other orders, provided that
the analysis has one line per candidate (`Translation A: …`), which then moves with its candidate; RL rows have the candidates as
shown in `extra_info`, whatever their order.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa

from plaudit.prepare.augmentation import Arrangements, arrange
from plaudit.prepare.columnar_templates import Shown
from plaudit.prepare.made_rows import BATCH_ROWS, SFT_SCHEMA, RowSummary, conversations, interleave, rl_rows, rl_schema, write_rows
from plaudit.prepare.scored_groups import (
    EXTRA_INFO,
    HIGHEST,
    LOWEST,
    USUAL,
    Columns,
    ScoredGroups,
    read_groups,
    split_analyses,
)
from plaudit.prepare.tables import TEXT, Pieces, Table, compute, join_text
from plaudit.rewards.judges.candidates import LETTERS
from plaudit.rewards.judges.templates import BUILT_IN

Format = Literal["ranking_score", "ranking", "score"]
VARIABLES = ("candidates", "answer", "lowest", "highest")
"""Template variables of `group_judge`, in addition to those of every template."""
RL_SCHEMA = rl_schema(
    {**EXTRA_INFO, "analysis": pa.string(), "candidates": pa.list_(pa.string()), "shuffle_indices": pa.list_(pa.int64())}
)
EXAMPLE = ("A leaves a word out. B and C say the same, and both read well.", (4, 9, 9))
_LETTERS = pa.array(list(LETTERS), TEXT)
_NUMBERS = pa.array([str(number) for number in range(HIGHEST + 1)], TEXT)
_RELATIONS = pa.array([" > ", " = "], TEXT)


@dataclass(frozen=True)
class Headings:
    """The lines above the ranking and above the scores; an empty one is left out."""

    ranking: str = "Ranking:"
    scores: str = "Scores:"
    blank_lines: bool = False
    """A blank line below each heading and between the two parts."""


PLAIN = Headings()


def make_ranking_sft(
    files: Sequence[Path], out: Path, *, format: Format = "ranking_score", subgroup_augment: int = 0, shuffle_augment: int = 0,
    add_example: bool = False, max_characters: int | None = None, template: Path | None = None, headings: Headings = PLAIN,
    columns: Columns = USUAL, skip_bad: bool = False, seed: int = 0, report: Callable[[str], None] = print,
) -> RowSummary:  # fmt: skip
    """Write conversations: a question about a group, answered with its analysis, ranking and scores."""
    groups = read_groups(Table(files, skip_bad=skip_bad, report=report), columns, fewest=2, analysed=True)
    groups.table.reject(
        compute.equal(compute.binary_length(groups.analysis), 0),
        "without an analysis",
        lambda _: f"column {columns.analysis!r} is empty; an answer begins with the analysis",
    )
    lines = split_analyses(groups, "--subgroup-augment and --shuffle-augment") if subgroup_augment or shuffle_augment else None
    question = _Question(groups, template, format, headings, add_example)
    arranged, summary = _arranged(groups, max_characters, subgroup_augment, shuffle_augment, seed)
    arranged = arranged.select(np.random.default_rng([seed, 1]).permutation(len(arranged)))

    def batches() -> Iterator[pa.Table]:
        for some in _batches(arranged):
            turns = conversations(["user", "assistant"], question.with_answer(some, lines))
            yield pa.Table.from_arrays([turns], schema=SFT_SCHEMA)

    return write_rows(out, batches(), SFT_SCHEMA, summary)


def make_ranking_rl(
    files: Sequence[Path], out: Path, *, format: Literal["ranking_score", "ranking"] = "ranking_score", subgroup_augment: int = 0,
    shuffle_augment: int = 0, add_example: bool = False, max_characters: int | None = None, template: Path | None = None,
    headings: Headings = PLAIN, columns: Columns = USUAL, data_source: str = "mt_ranking", skip_bad: bool = False, seed: int = 0,
    report: Callable[[str], None] = print,
) -> RowSummary:  # fmt: skip
    """Write prompts with the ground truth for the `ranking` rule: the scores as JSON, or the ranking."""
    groups = read_groups(Table(files, skip_bad=skip_bad, report=report), columns, fewest=2, analysed=False)
    question = _Question(groups, template, format, headings, add_example)
    arranged, summary = _arranged(groups, max_characters, subgroup_augment, shuffle_augment, seed)

    def batches() -> Iterator[pa.Table]:
        for some in _batches(arranged):
            prompts, truths = question.with_truth(some)
            prompt = conversations(["user"], prompts)
            width = np.arange(some.places.shape[1]) < some.sizes[:, None]
            offsets = pa.array(np.concatenate([[0], np.cumsum(some.sizes)]), pa.int32())
            shown = (groups.candidates.offsets[some.groups][:, None] + some.places)[width]
            texts = groups.candidates.items.take(pa.array(shown)).cast(pa.string())
            extra_info = {
                **groups.extra_info(some.groups), "analysis": groups.analysis.take(pa.array(some.groups)),
                "candidates": pa.ListArray.from_arrays(offsets, texts),
                "shuffle_indices": pa.ListArray.from_arrays(offsets, pa.array(some.places[width].astype(np.int64))),
            }  # fmt: skip
            yield rl_rows(RL_SCHEMA, data_source, prompt, "ranking", truths, extra_info)

    return write_rows(out, batches(), RL_SCHEMA, summary)


def _arranged(
    groups: ScoredGroups, max_characters: int | None, subgroups: int, shuffles: int, seed: int
) -> tuple[Arrangements, RowSummary]:
    used, summary = groups.table.usable, RowSummary(bad=groups.table.bad)
    if max_characters is not None:
        ends = np.concatenate([[0], np.cumsum(groups.candidate_lengths)])[groups.candidates.offsets]
        short = groups.text_lengths + np.diff(ends) <= max_characters
        summary.leave_out("groups were longer than --max-characters", int((used & ~short).sum()))
        used = used & short
    chosen = np.flatnonzero(used)
    summary.read = len(chosen)
    return arrange(chosen, groups.candidates.sizes[chosen], subgroups=subgroups, shuffles=shuffles, seed=seed), summary


def _batches(arranged: Arrangements) -> Iterator[Arrangements]:
    for start in range(0, len(arranged), BATCH_ROWS):
        yield arranged.select(np.arange(start, min(start + BATCH_ROWS, len(arranged))))


# Questions and answers -----------------------------------------------------------------------------------------------


class _Question:
    """The question about a group, which is `group_judge`'s prompt, and its answer."""

    def __init__(self, groups: ScoredGroups, template: Path | None, format: Format, headings: Headings, add_example: bool):
        self.groups, self.headings = groups, headings
        self.format: Format = format
        constants = {"answer": format, "lowest": LOWEST, "highest": HIGHEST}
        self.template = groups.judge_template(template or BUILT_IN / "group.jinja", constants, VARIABLES)
        analysis, scores = [EXAMPLE[0]], np.array([EXAMPLE[1]])
        example = join_text(*answer(analysis, scores, format, headings))[0].as_py()
        self.example = [f"\nAn example of an answer:\n\n{example}\n"] if add_example else []

    def with_answer(self, some: Arrangements, lines: tuple[pa.Array, pa.Array] | None) -> pa.Array:
        """Questions and answers in turn. `lines`: each candidate's line of the analysis, before and after its letter."""
        sizes, whole = self.groups.candidates.sizes[some.groups], np.arange(some.places.shape[1])
        original = (some.sizes == sizes) & ((some.places == whole) | (whole >= some.sizes[:, None])).all(1)

        def analysis(these: Arrangements, items: np.ndarray, in_order: bool) -> Pieces:
            if in_order or lines is None:
                return [self.groups.analysis.take(pa.array(these.groups))]
            pieces: list[str | pa.Array] = []
            for j in range(items.shape[1]):
                before, after = (column.take(pa.array(items[:, j])) for column in lines)
                pieces += [before, f"{LETTERS[j]}:", after, "\n"]
            return pieces[:-1]

        def with_answer(question: Pieces, these: Arrangements, items: np.ndarray, in_order: bool) -> list[pa.Array]:
            end = answer(analysis(these, items, in_order), self.groups.scores[items], self.format, self.headings)
            return [interleave(question, end)]

        [texts] = self._by_structure(some, original, with_answer)
        return texts

    def with_truth(self, some: Arrangements) -> list[pa.Array]:
        """Questions, and their ground truths."""

        def with_truth(question: Pieces, _: Arrangements, items: np.ndarray, __: bool) -> list[pa.Array]:
            scores = self.groups.scores[items]
            truth = scores_as_json(scores) if self.format == "ranking_score" else ranking_line(scores)
            return [join_text(*question), join_text(*truth)]

        return self._by_structure(some, np.zeros(len(some), bool), with_truth)

    def _by_structure(
        self, some: Arrangements, flag: np.ndarray, make: Callable[[Pieces, Arrangements, np.ndarray, bool], list[pa.Array]]
    ) -> list[pa.Array]:
        """Columns made of questions, for all rows with as many candidates (and the same flag) together.

        A column may have several entries for each row.
        """
        keys, rows, made = some.sizes * 2 + flag, list[np.ndarray](), list[list[pa.Array]]()
        for key in np.unique(keys).tolist():
            at = np.flatnonzero(keys == key)
            these = some.select(at)
            items = self.groups.candidates.offsets[these.groups][:, None] + these.places[:, : key // 2]
            candidates = [self.groups.candidates.items.take(pa.array(items[:, j])) for j in range(key // 2)]
            question = [*self.template.fill(Shown(these.groups, candidates=candidates)), *self.example]
            rows.append(at)
            made.append(make(question, these, items, bool(key % 2)))
        if len(made) == 1:
            return made[0]
        order = np.argsort(np.concatenate(rows))
        return [_reorder(pa.concat_arrays(columns), order) for columns in zip(*made, strict=True)]


def _reorder(column: pa.Array, order: np.ndarray) -> pa.Array:
    """`order`: of rows; each has as many entries."""
    entries = len(column) // len(order)
    return column.take(pa.array((order[:, None] * entries + np.arange(entries)).ravel()))


def answer(analysis: Pieces, scores: np.ndarray, format: Format, headings: Headings) -> Pieces:
    """`scores`: one row per answer, in letter order."""
    gap = "\n\n" if headings.blank_lines else "\n"

    def part(heading: str, line: Pieces) -> Pieces:
        return [heading, gap, *line] if heading else line

    ranking, in_order = ranking_line(scores), scores_line(scores, in_ranking_order=format != "score")
    ends = {
        "ranking_score": [*part(headings.ranking, ranking), gap, *part(headings.scores, in_order)],
        "ranking": ranking,
        "score": part(headings.scores, in_order),
    }
    return [*analysis, "\n\n", *ends[format]]


# Rankings and scores as text, for all rows at once: `plaudit/rewards/rules/ranking_lines.py` reads them ---------------


def ranking_line(scores: np.ndarray) -> Pieces:
    """`B > A = D > C`: descending, ties in letter order."""
    order = np.argsort(-scores, 1, kind="stable")
    ordered = np.take_along_axis(scores, order, 1)
    pieces: list[str | pa.Array] = []
    for j in range(scores.shape[1]):
        if j:
            pieces.append(_RELATIONS.take(pa.array((ordered[:, j] == ordered[:, j - 1]).astype(np.int8))))
        pieces.append(_LETTERS.take(pa.array(order[:, j])))
    return pieces


def scores_line(scores: np.ndarray, *, in_ranking_order: bool) -> Pieces:
    """`B: 9, A: 7, D: 7, C: 2`."""
    order = np.argsort(-scores, 1, kind="stable") if in_ranking_order else np.tile(np.arange(scores.shape[1]), (len(scores), 1))
    pieces: list[str | pa.Array] = []
    for j in range(scores.shape[1]):
        score = np.take_along_axis(scores, order[:, j : j + 1], 1)[:, 0]
        pieces += [_LETTERS.take(pa.array(order[:, j])), ": ", _NUMBERS.take(pa.array(score)), ", "]
    return pieces[:-1]


def scores_as_json(scores: np.ndarray) -> Pieces:
    """`{"A": 2, "B": 9}`."""
    pieces: list[str | pa.Array] = []
    for j in range(scores.shape[1]):
        pieces += [f'{", " if j else "{"}"{LETTERS[j]}": ', _NUMBERS.take(pa.array(scores[:, j]))]
    return [*pieces, "}"]
