"""What an evaluation found: figures with intervals, tables of them, and the file eval.json."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from plaudit import __version__
from plaudit.errors import PlauditError
from plaudit.files import write_atomic
from plaudit.redaction import redact
from plaudit.statistics.figures import Resampling
from plaudit.statistics.intervals import Estimate

Figures = dict[str, dict[str, Estimate]]
"""Part of the data (a benchmark, a subset) → figure → estimate."""
Cell = Estimate | int | float | str | None
EVAL_JSON = "eval.json"
EVAL_MD = "eval.md"


@dataclass(frozen=True)
class Table:
    """Figures as they are shown: in the terminal, and in markdown."""

    title: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Cell]]]
    percent: bool = True
    """Estimates are shares, shown in per cent."""
    note: str = ""


@dataclass(frozen=True)
class Evaluation:
    kind: str
    """rewards, ranking, verifier or policy."""
    inputs: Mapping[str, Any]
    """Files, options and numbers of items."""
    resampling: Resampling
    figures: Mapping[str, Figures]
    """By the name of what was evaluated: a reward, or a model."""
    differences: Mapping[str, Figures] = field(default_factory=dict)
    """Paired, on the items that both have values for: "a - b" → figures."""
    details: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By name: failures by cause, usage of models, what identifies the reward."""
    curves: Mapping[str, Any] = field(default_factory=dict)
    """What pictures show."""
    tables: Sequence[Table] = ()

    def as_dict(self) -> dict[str, Any]:
        found = {
            "kind": self.kind,
            "plaudit": __version__,
            "inputs": dict(self.inputs),
            "intervals": {"method": "percentile bootstrap over prompts", **asdict(self.resampling)},
            "figures": self.figures,
            "differences": self.differences,
            "details": self.details,
            "curves": self.curves,
        }
        return _json_ready(found)


def _json_ready(value: Any) -> Any:
    """Estimates as objects; NaN, which JSON lacks, as null."""
    match value:
        case Estimate():
            return _json_ready(asdict(value))
        case Mapping():
            return {str(key): _json_ready(inner) for key, inner in value.items()}
        case list() | tuple():
            return [_json_ready(inner) for inner in value]
        case float() if not math.isfinite(value):
            return None
    return value


# Cells as text -------------------------------------------------------------------------------------------------------


def show_cell(cell: Cell, percent: bool) -> str:
    """64.0 [61.2, 66.9] of an estimate, 50.0 if all items are equal; other numbers as they are."""
    match cell:
        case None:
            return "–"
        case Estimate():
            if math.isnan(cell.value):
                return "–"
            value, low, high = (_number(number, percent) for number in (cell.value, cell.low, cell.high))
            return value if math.isnan(cell.low) or cell.low == cell.high else f"{value} [{low}, {high}]"
        case float():
            return _number(cell, percent)
        case int():
            return f"{cell:,}"
    return cell


def _number(value: float, percent: bool) -> str:
    value = round(value, 12) + 0.0  # neither -0.0 nor -1e-17
    return f"{round(100 * value, 1) + 0.0:.1f}" if percent else f"{value:.3g}"


def markdown(evaluation: Evaluation) -> str:
    """The tables, for a model card."""
    confidence = f"{100 * evaluation.resampling.confidence:g} %"
    lines: list[str] = []
    for table in evaluation.tables:
        unit = "In per cent, w" if table.percent else "W"
        head = ["", *table.columns]
        lines += [f"**{table.title}**", ""]
        lines += [_line(head), _line(["---", *["---:"] * len(table.columns)])]
        lines += [_line([_indented(label), *(show_cell(cell, table.percent) for cell in cells)]) for label, cells in table.rows]
        note = f" {table.note}" if table.note else ""
        lines += ["", f"{unit}ith {confidence} intervals (bootstrap over prompts).{note}", ""]
    return "\n".join(lines)


def _indented(label: str) -> str:
    """Markdown drops spaces at the start of a cell."""
    inner = label.lstrip(" ")
    return "&emsp;" * ((len(label) - len(inner)) // 2) + inner


def _line(cells: Sequence[str]) -> str:
    """Of a table: a cell is one line, and only what separates cells is a bar."""
    return f"| {' | '.join(' '.join(cell.split()).replace('|', chr(92) + '|') for cell in cells)} |"


# Files ---------------------------------------------------------------------------------------------------------------


def create_folder(folder: Path) -> None:
    """Before the work, so that an error costs nothing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlauditError(f"--out: {folder} cannot be created: {error}") from None


def write_evaluation(evaluation: Evaluation, folder: Path) -> None:
    try:
        write_atomic(folder / EVAL_JSON, redact(json.dumps(evaluation.as_dict(), indent=1, ensure_ascii=False)) + "\n")
        write_atomic(folder / EVAL_MD, redact(markdown(evaluation)))
    except OSError as error:
        raise PlauditError(f"--out: {folder} cannot be written: {error}") from None
