"""Graded answers → rows that train a rubric reward model by RL: question, rubric, answer, and the grade as ground truth.

The prompt is what `kind: judge` with `parser: total_score` sends for an answer, from the same template: the question, the rubric as
`extra_info.criteria`, the answer as `response`. The `grade` rule compares the `Total Score` of the model's response, out of 10,
with the truth, out of 1. The policy that is later trained against the model has rows with the same `criteria` column (`math-rl`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from plaudit.prepare.columnar_templates import ColumnarTemplate, Shown
from plaudit.prepare.made_rows import BATCH_ROWS, RowSummary, messages, rl_rows, rl_schema, write_rows
from plaudit.prepare.pointwise import template_constants, trained_judge
from plaudit.prepare.tables import TEXT, Table, describe_text, is_blank
from plaudit.rewards.judges.judge import Judge

RL_SCHEMA = rl_schema({"question": pa.string(), "criteria": pa.string(), "answer": pa.string()})


@dataclass(frozen=True)
class GradedColumns:
    """Names of a row's columns."""

    question: str = "question"
    answer: str = "answer"
    rubric: str = "criteria"
    """Text, or a list of criteria."""
    truth: str = "score"


def make_rubric_rl(
    files: Sequence[Path], out: Path, *, template: Path, columns: GradedColumns, highest: float = 1.0, data_source: str = "grade",
    skip_bad: bool = False, report: Callable[[str], None] = print,
) -> RowSummary:  # fmt: skip
    """Write prompts with grades from 0 to 1. `highest`: the best grade in the file."""
    table = Table(files, skip_bad=skip_bad, report=report)
    table.require(columns.question, columns.answer, columns.rubric, columns.truth)
    questions, answers = table.text(columns.question), table.value(columns.answer)
    criteria = _rubrics(table, columns.rubric)
    grades, grade_of = np.unique(table.numbers(columns.truth, 0.0, highest) / highest, return_inverse=True)
    truths = pa.array([f"{grade:.6g}" for grade in grades.tolist()], TEXT)
    constants, own = template_constants(trained_judge("grade", template)), sorted(Judge.variables)
    question = ColumnarTemplate(template, table, lambda: questions, constants, {"question": questions, "criteria": criteria}, own)
    rows = np.flatnonzero(table.usable)
    summary = RowSummary("answers", read=len(rows), bad=table.bad)

    def batches() -> Iterator[pa.Table]:
        for start in range(0, len(rows), BATCH_ROWS):
            some = rows[start : start + BATCH_ROWS]
            indices = pa.array(some)
            prompts = question.fill(Shown(some, response=answers.take(indices)))
            extra = {"question": questions, "criteria": criteria, "answer": answers}
            extra = {name: column.take(indices) for name, column in extra.items()}
            truth = truths.take(pa.array(grade_of[some]))
            yield rl_rows(RL_SCHEMA, data_source, messages(("user", prompts)), "grading", truth, extra)

    return write_rows(out, batches(), RL_SCHEMA, summary)


def _rubrics(table: Table, name: str) -> pa.Array:
    """A list of criteria becomes a line for each."""

    def lines(value: Any) -> Any:
        return "\n".join(f"- {one}" for one in value if str(one).strip()) if isinstance(value, list) else value

    def describe(i: int) -> str:
        value = lines(table.row(i).get(name))
        problem = describe_text(value) if isinstance(value, str) and value.strip() else "empty"
        return f"column {name!r} is {problem}; an answer is graded by its criteria"

    column = table.printed(name, lines)
    table.reject(is_blank(column), f"without {name}", describe)
    return column
