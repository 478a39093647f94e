"""Labelled answers → conversations that train a verifier (TinyV): question, reference and final answer, then True or False.

The prompt is what `kind: judge` with `parser: true_false` sends for an answer, from the same template, so that the trained verifier
later sees what it was trained on. A verifier in a `cascade` sees final answers only (`view: {extract: answer}`): complete responses
are reduced to theirs in the same way, and those without one, which the verifier would never see, are left out.

Differs from TinyV: there the builder of the balanced rows is not published; the prompt's words are our own.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa

from plaudit.data.columns import GROUND_TRUTHS, LABEL, PROMPTS, RESPONSES
from plaudit.prepare.columnar_templates import ColumnarTemplate, Shown
from plaudit.prepare.made_rows import BATCH_ROWS, SFT_SCHEMA, RowSummary, messages, write_rows
from plaudit.prepare.pointwise import template_constants, trained_judge
from plaudit.prepare.tables import TEXT, Table
from plaudit.recipe import View
from plaudit.rewards.judges.judge import Judge
from plaudit.rewards.judges.templates import BUILT_IN
from plaudit.rewards.view import see

Extract = Literal["none", "answer", "boxed", "line", "codeblock", "oneline"]
"""Of a response: as in `view`."""
ANSWERS = tuple(name for name in RESPONSES if not name.endswith("s"))
"""Columns with one answer."""
VERDICTS = pa.array(["False", "True"], TEXT)


@dataclass(frozen=True)
class LabelledColumns:
    """Names of a row's columns; None: the first of the usual names."""

    question: str | None = None
    reference: str | None = None
    answer: str | None = None
    label: str = LABEL
    """Whether the answer is right."""


USUAL = LabelledColumns()


def make_verifier_sft(
    files: Sequence[Path], out: Path, *, columns: LabelledColumns = USUAL, extract: Extract = "none", balance: bool = False,
    template: Path | None = None, skip_bad: bool = False, seed: int = 0, report: Callable[[str], None] = print,
) -> RowSummary:  # fmt: skip
    """Write conversations, shuffled. `balance`: as many right answers as wrong ones, drawn from those that are more."""
    table = Table(files, skip_bad=skip_bad, report=report)
    question = table.find(columns.question, PROMPTS, "--question-column")
    answer = table.find(columns.answer, ANSWERS, "--answer-column")
    reference = table.find(columns.reference, [name for name in GROUND_TRUTHS if name != answer], "--reference-column")
    table.require(columns.label, hint="--label-column names another one.")
    questions, references, answers = table.text(question), table.value(reference), table.value(answer)
    is_right = table.flags(columns.label)

    judge = trained_judge("true_false", template)
    prompt = ColumnarTemplate(
        template or BUILT_IN / f"{judge.default_template}.jinja", table, lambda: questions, template_constants(judge),
        {"question": questions}, sorted(Judge.variables), references,
    )  # fmt: skip
    used, summary = table.usable.copy(), RowSummary("answers", bad=table.bad)
    if extract != "none":
        answers, found = _extracts(answers, used, View(extract=extract))
        summary.leave_out(f"had nothing that --extract {extract} finds", int((used & ~found).sum()))
        used &= found
    rng = np.random.default_rng(seed)
    right, wrong = (rng.permutation(np.flatnonzero(used & (is_right == flag))) for flag in (True, False))
    if not len(right) or not len(wrong):
        report(f"{table.source}: no answer is {'wrong' if len(right) else 'right'}: a verifier is trained on both kinds")
    if balance:
        fewer = min(len(right), len(wrong))
        summary.leave_out("right answers were left out by --balance", len(right) - fewer)
        summary.leave_out("wrong answers were left out by --balance", len(wrong) - fewer)
        right, wrong = right[:fewer], wrong[:fewer]
    rows = rng.permutation(np.concatenate([right, wrong]))
    summary.read, summary.unit = len(rows), f"answers, {len(right):,} of them right"

    def batches() -> Iterator[pa.Table]:
        for start in range(0, len(rows), BATCH_ROWS):
            some = rows[start : start + BATCH_ROWS]
            shown = prompt.fill(Shown(some, response=answers.take(pa.array(some))))
            verdicts = VERDICTS.take(pa.array(is_right[some].astype(np.int8)))
            yield pa.Table.from_arrays([messages(("user", shown), ("assistant", [verdicts]))], schema=SFT_SCHEMA)

    return write_rows(out, batches(), SFT_SCHEMA, summary)


def _extracts(answers: pa.Array, used: np.ndarray, view: View) -> tuple[pa.Array, np.ndarray]:
    """What a reward with this view sees of each answer, and whether there is any."""
    texts, found = [""] * len(answers), np.zeros(len(answers), bool)
    for i in np.flatnonzero(used).tolist():
        seen = see(view, answers[i].as_py())
        texts[i], found[i] = seen.text, seen.scorable
    return pa.array(texts, TEXT), found
