"""`plaudit eval verifier`: how often does a reward accept wrong answers, and reject right ones?

Rows have a question, an answer (or several), a reference and labels; an answer is accepted if its reward is at least the threshold
(`plaudit/statistics/verdicts.py`). Answers on which a reward failed are left out and reported. A rule alone, a judge alone, and the
two together (`cascade`, addon or mixed) are several recipes; `judged` is the share of answers for which a model was called: all
with a judge alone, fewer with addon.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from plaudit.audit.dumps import read_labels
from plaudit.data.columns import LABEL, PAIR, RESPONSES, RESULTS
from plaudit.data.conversations import Source
from plaudit.data.rollouts import split_responses
from plaudit.errors import DataError, did_you_mean
from plaudit.evaluation.compared import (
    ALL,
    Arrays,
    Part,
    difference_table,
    estimate_parts,
    prompt_numbers,
    split_parts,
)
from plaudit.evaluation.results import Cell, Evaluation, Figures, Table
from plaudit.evaluation.row_files import Row, RowFile, hide_in_extra_info, open_files, prompt_key
from plaudit.evaluation.scored import EvaluatedReward, RewardScores, score_rows
from plaudit.files import text_digest
from plaudit.rewards.judges.cascade import Cascade
from plaudit.rewards.judges.model_rewards import find_all_model_rewards
from plaudit.statistics.figures import Resampling
from plaudit.statistics.verdicts import verdict_figures

FIGURES = {
    "accuracy": "accuracy",
    "false_accept_rate": "false accepts, of wrong answers",
    "false_reject_rate": "false rejects, of right answers",
    "accepted": "accepted",
    "judged": "sent to a model",
}
SHOWN = ("accuracy", "false_accept_rate", "false_reject_rate")
"""Of the parts of the data, and of differences; eval.json has all."""
HINT = "Rows have a question (`prompt`), an answer (`response`), a reference (`ground_truth`) and a label; other names: --label"


@dataclass(frozen=True)
class LabelledRow:
    """A question, answers to it, and which of them are right."""

    id: str
    where: str
    """Its location, for error messages."""
    file: str
    row: Row
    """What rewards see of it, with the answers as `responses`."""
    right: tuple[bool, ...]

    @property
    def data_source(self) -> str:
        return str(self.row.get("data_source") or "")


def read_labelled(sources: Sequence[Source], label: str | None, max_items: int | None = None) -> list[LabelledRow]:
    """The rows of all files, in order."""
    return [row for file in open_files(sources, max_items) for row in _read(file, label or LABEL)]


def _read(file: RowFile, label: str) -> Iterator[LabelledRow]:
    columns = file.rows.columns
    if not ({label, f"{label}s"} & set(columns) or set(PAIR) <= set(columns)):
        near = did_you_mean(label, columns)
        raise DataError(f"--label: {file.source}: has no column {label!r} (found: {', '.join(columns)}).{near} {HINT}")
    hidden = {label, f"{label}s", *RESPONSES, *PAIR, *RESULTS, "id"}
    for one in file.located():
        row, answers = split_responses(one.row, one.where)
        right = tuple(_right(x, label, one.where) for x in read_labels(one.row, label, len(answers), one.where))
        row = {name: value for name, value in row.items() if name not in hidden} | {"responses": answers}
        row = hide_in_extra_info(row, {label, f"{label}s"}.__contains__)
        yield LabelledRow(one.id, one.where, file.name, row, right)


def _right(value: float | None, label: str, where: str) -> bool:
    if value is None:
        raise DataError(f"{where}: has no {label!r}: every answer needs one, true or false")
    if value not in (0.0, 1.0):
        raise DataError(f"{where}: {label} should be true or false (1 or 0), not {value:g}")
    return value == 1.0


@dataclass(frozen=True)
class VerifierJob:
    rewards: Sequence[EvaluatedReward]
    sources: Sequence[Source]
    out: Path
    resampling: Resampling
    threshold: float = 0.5
    label: str | None = None
    max_items: int | None = None
    tokenizer: str | None = None


def evaluate_verifier(job: VerifierJob) -> Evaluation:
    rows = read_labelled(job.sources, job.label, job.max_items)
    to_score = [(row.row, row.id, row.where) for row in rows]
    digest = text_digest(repr([row.row for row in rows]))
    right = np.array([truth for row in rows for truth in row.right])
    arrays: dict[str, Arrays] = {}
    details: dict[str, dict[str, Any]] = {}
    identity = {"evaluation": "verifier", "items": digest}
    for reward in job.rewards:
        # Not in the order of the row: of a pair, the first answer is the right one.
        scored = score_rows(reward, to_score, job.out / "scores", identity, tokenizer=job.tokenizer, given_order=False)
        arrays[reward.name] = _arrays(reward, scored, right, job.threshold)
        without = int(np.isnan(arrays[reward.name]["accuracy"]).sum())
        details[reward.name] = (
            reward.identity | {"items": len(rows), "answers": len(right), "without a value": without} | scored.report()
        )
    answers = [row for row in rows for _ in row.right]
    parts = split_parts({"data source": [row.data_source for row in answers], "file": [row.file for row in answers]})
    prompts = prompt_numbers([prompt_key(row.row, row.id) for row in answers])

    def arrays_of(part: Part) -> dict[str, Arrays]:
        return {name: {figure: array[part.items] for figure, array in own.items()} for name, own in arrays.items()}

    found, differences = estimate_parts(parts, arrays_of, prompts, job.resampling)
    inputs = {
        "files": [str(source) for source in job.sources],
        "rows": len(rows),
        "answers": len(right),
        "right": int(right.sum()),
        "threshold": job.threshold,
    }
    tables = _tables(parts, found, differences, details)
    return Evaluation("verifier", inputs, job.resampling, found, differences, details, tables=tables)


def _arrays(reward: EvaluatedReward, scored: RewardScores, right: np.ndarray, threshold: float) -> Arrays:
    values = np.array([value for row in scored.values for value in row], dtype=np.float64)
    judged = np.array([float(_calls_model(reward, parts)) for row in scored.parts for parts in row])
    return verdict_figures(values, right, threshold) | {"judged": np.where(np.isnan(values), np.nan, judged)}


def _calls_model(reward: EvaluatedReward, parts: Mapping[str, float]) -> bool:
    """Whether a model gave an answer one of its parts."""
    return any(
        (f"{one.label}/judge" if isinstance(one, Cascade) else one.label) in parts
        for one in reward.rewards
        if find_all_model_rewards(one)
    )


# Tables --------------------------------------------------------------------------------------------------------------


def _tables(
    parts: Sequence[Part],
    found: Mapping[str, Figures],
    differences: Mapping[str, Figures],
    details: Mapping[str, Mapping[str, Any]],
) -> list[Table]:
    names = list(details)

    def row(part: str, figure: str) -> list[Cell]:
        return [found.get(name, {}).get(part, {}).get(figure) for name in names]

    rows: list[tuple[str, Sequence[Cell]]] = [(label, row(ALL, figure)) for figure, label in FIGURES.items()]
    rows.append(("answers without a value", [details[name]["without a value"] for name in names]))
    tables = [Table("Verdicts", names, rows)]
    for by in dict.fromkeys(part.by for part in parts if part.by):
        inside = [part for part in parts if part.by == by]
        for figure in SHOWN:
            title = f"{FIGURES[figure].capitalize()}, by {by}"
            tables.append(Table(title, names, [(part.label, row(part.name, figure)) for part in inside]))
    if differences:
        columns = {figure: FIGURES[figure].partition(",")[0] for figure in SHOWN}
        tables.append(difference_table("Differences", differences, columns))
    return tables
