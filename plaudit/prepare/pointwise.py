"""Groups of scored candidate translations → rows that train a pointwise generative reward model: SFT, then RL.

Each candidate is a separate row. Its prompt is what `kind: judge` would send, from the same template, so that the trained model
later sees what it was trained on; its answer ends in the form that the training rule and the judge's parser expect:

    rule              answer                             truth     judge's parser
    pointwise_score   analysis, 7                        7         last_number_line
    grade             analysis, Total Score: 7/10        0.7       total_score

The analysis is the candidate's line in the group's analysis (`Translation A: …`), without its letter; for a single candidate, all
of it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from plaudit.prepare.columnar_templates import Shown
from plaudit.prepare.made_rows import BATCH_ROWS, SFT_SCHEMA, RowSummary, messages, rl_rows, rl_schema, write_rows
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
from plaudit.prepare.tables import TEXT, Pieces, Table, any_in_lists, compute
from plaudit.recipe.reward_models import RewardModel
from plaudit.rewards.judges.candidates import LETTERS
from plaudit.rewards.judges.judge import Judge
from plaudit.rewards.judges.templates import BUILT_IN

Rule = Literal["pointwise_score", "grade"]
DATA_SOURCES: dict[Rule, str] = {"pointwise_score": "mt_score", "grade": "grade"}
RL_SCHEMA = rl_schema({**EXTRA_INFO, "candidate": pa.string()})
_SCORED = {"pointwise_score": r"[0-9][\W_]*\z", "grade": r"(?i)total\W+score"}
"""What an analysis that ends with a score matches (RE2's syntax), and a few others."""


def make_pointwise_sft(
    files: Sequence[Path], out: Path, *, rule: Rule = "pointwise_score", max_characters: int | None = None,
    template: Path | None = None, columns: Columns = USUAL, skip_bad: bool = False, seed: int = 0,
    report: Callable[[str], None] = print,
) -> RowSummary:  # fmt: skip
    """Write conversations: a question about a candidate, answered with its analysis and score."""
    groups = read_groups(Table(files, skip_bad=skip_bad, report=report), columns, fewest=1, analysed=True)
    question = _Question(groups, template, rule)
    analyses = _analyses(groups, question.judge, rule)
    chosen, summary = _short_enough(groups, max_characters)
    chosen = chosen[np.random.default_rng(seed).permutation(len(chosen))]
    endings = pa.array([str(n) if rule == "pointwise_score" else f"Total Score: {n}/{HIGHEST}" for n in range(HIGHEST + 1)], TEXT)

    def batches() -> Iterator[pa.Table]:
        for start in range(0, len(chosen), BATCH_ROWS):
            items = chosen[start : start + BATCH_ROWS]
            answers = [analyses.take(pa.array(items)), "\n\n", endings.take(pa.array(groups.scores[items]))]
            yield pa.Table.from_arrays([messages(("user", question(items)), ("assistant", answers))], schema=SFT_SCHEMA)

    return write_rows(out, batches(), SFT_SCHEMA, summary)


def make_pointwise_rl(
    files: Sequence[Path], out: Path, *, rule: Rule = "pointwise_score", max_characters: int | None = None,
    template: Path | None = None, columns: Columns = USUAL, data_source: str | None = None, skip_bad: bool = False,
    report: Callable[[str], None] = print,
) -> RowSummary:  # fmt: skip
    """Write prompts with the ground truth for the rule."""
    table = Table(files, skip_bad=skip_bad, report=report)
    groups = read_groups(table, replace(columns, analysis=None), fewest=1, analysed=False)
    question = _Question(groups, template, rule)
    chosen, summary = _short_enough(groups, max_characters)
    truths = pa.array([str(n) if rule == "pointwise_score" else f"{n / HIGHEST:g}" for n in range(HIGHEST + 1)], TEXT)

    def batches() -> Iterator[pa.Table]:
        for start in range(0, len(chosen), BATCH_ROWS):
            items = chosen[start : start + BATCH_ROWS]
            extra = {**groups.extra_info(question.owner[items]), "candidate": groups.candidates.items.take(pa.array(items))}
            truth = truths.take(pa.array(groups.scores[items]))
            prompts = messages(("user", question(items)))
            yield rl_rows(RL_SCHEMA, data_source or DATA_SOURCES[rule], prompts, "scoring", truth, extra)

    return write_rows(out, batches(), RL_SCHEMA, summary)


def _short_enough(groups: ScoredGroups, max_characters: int | None) -> tuple[np.ndarray, RowSummary]:
    """Candidates within the limit; each is shown alone."""
    sizes, usable = groups.candidates.sizes, groups.table.usable
    used, summary = np.repeat(usable, sizes), RowSummary(read=int(usable.sum()), bad=groups.table.bad)
    if max_characters is not None:
        short = np.repeat(groups.text_lengths, sizes) + groups.candidate_lengths <= max_characters
        summary.leave_out("candidates were longer than --max-characters", int((used & ~short).sum()))
        used = used & short
    return np.flatnonzero(used), summary


def _analyses(groups: ScoredGroups, judge: Judge, rule: Rule) -> pa.Array:
    """The analysis of each candidate."""
    column, offsets = groups.columns.analysis, groups.candidates.offsets
    analyses = compute.utf8_trim_whitespace(split_analyses(groups, "one row per candidate")[1])

    def reject(bad: np.ndarray, cause: str, problem: str) -> None:
        def describe(i: int) -> str:
            letter = LETTERS[int(np.flatnonzero(bad[offsets[i] : offsets[i + 1]])[0])]
            return f"column {column!r}{problem.format(letter=letter)}"

        groups.table.reject(any_in_lists(bad, offsets), cause, describe)

    empty = np.asarray(compute.equal(compute.binary_length(analyses), 0))
    reject(empty, "without an analysis of each candidate", " has no analysis of candidate {letter}; an answer begins with it")
    read, scored = judge.reader(), np.asarray(compute.match_substring_regex(analyses, _SCORED[rule])).copy()
    for i in np.flatnonzero(scored).tolist():
        scored[i] = read(analyses[i].as_py()) is not None
    reject(scored, "with an analysis that is scored", ": the analysis of candidate {letter} already ends with a score")
    return analyses


class _Question:
    """The question about a candidate: `judge`'s prompt."""

    def __init__(self, groups: ScoredGroups, template: Path | None, rule: Rule):
        self.candidates = groups.candidates.items
        self.owner = np.repeat(np.arange(len(groups.table)), groups.candidates.sizes)
        self.judge = trained_judge(rule, template)
        file = template or BUILT_IN / f"{self.judge.default_template}.jinja"
        self.template = groups.judge_template(file, template_constants(self.judge), sorted(Judge.variables))

    def __call__(self, items: np.ndarray) -> Pieces:
        return self.template.fill(Shown(self.owner[items], response=self.candidates.take(pa.array(items))))


def trained_judge(rule: Rule | Literal["true_false"], template: Path | None) -> Judge:
    """The judge whose prompts and answers the rows have. `true_false`: a verifier."""
    model = RewardModel(path="the one that is trained")  # required by the settings; never called
    path = None if template is None else str(template)
    if rule in ("grade", "true_false"):
        return Judge(kind="judge", model=model, parser="total_score" if rule == "grade" else "true_false", template=path)
    return Judge(kind="judge", model=model, parser="last_number_line", template=path, lowest=LOWEST, highest=HIGHEST)


def template_constants(judge: Judge) -> dict[str, Any]:
    """Variables of its template that are the same for all responses."""
    return {name: value for name, value in judge.template_variables("").items() if name != "response"}
