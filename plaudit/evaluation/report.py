"""An evaluation in the terminal."""

import sys
from collections.abc import Iterator
from pathlib import Path

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from plaudit.evaluation.results import EVAL_JSON, EVAL_MD, Evaluation, Table, show_cell
from plaudit.report.progress import print_line
from plaudit.reward_models.model_registry import describe_usage

LABEL_WIDTH, NAME_WIDTH, GAP = 34, 20, 3
"""Longer ones are folded."""


def print_evaluation(evaluation: Evaluation, folder: Path, pictures: list[Path]) -> None:
    console = Console(highlight=False, file=sys.stdout)
    for table in evaluation.tables:
        for shown in _as_wide_as(table, console.width):
            console.print(shown)
        if table.note:
            console.print(table.note, style="dim")
    for name, details in evaluation.details.items():
        for cause, count in details.get("failures", {}).items():
            print_line(f"{name}: {count:,} responses without a value ({cause}): {details['messages'].get(cause, '')}", "yellow")
        for model, usage in details.get("usage", {}).items():
            print_line(f"{name}: {model}: {describe_usage(usage)}")
    confidence = f"{100 * evaluation.resampling.confidence:g} %"
    print(f"intervals: {confidence}, {evaluation.resampling.resamples:,} resamples of the prompts")
    for what, file in [("numbers", folder / EVAL_JSON), ("model card", folder / EVAL_MD), *(("picture", one) for one in pictures)]:
        print(f"{what}: {file}")


def _as_wide_as(table: Table, width: int) -> Iterator[RichTable]:
    """The table, or several with some of its columns each: an interval is easier to read in one line."""
    cells = [[show_cell(cell, table.percent) for cell in row] for _, row in table.rows]
    label_width = min(LABEL_WIDTH, max((cell_len(label) for label, _ in table.rows), default=0))
    widths = [max(min(NAME_WIDTH, cell_len(name)), *(cell_len(row[c]) for row in cells), 1) for c, name in enumerate(table.columns)]
    start = 0
    while start < len(widths) or not start:
        end, used = start, label_width + 2  # and the edges
        while end < len(widths) and (end == start or used + GAP + widths[end] <= width):
            used += GAP + widths[end]
            end += 1
        shown = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, title=Text(table.title), title_justify="left", title_style="bold")
        shown.add_column("", overflow="fold", min_width=label_width)
        for c in range(start, end):
            shown.add_column(Text(table.columns[c]), justify="right", overflow="fold", min_width=widths[c], max_width=widths[c])
        for (label, _), row in zip(table.rows, cells, strict=True):
            shown.add_row(Text(label), *map(Text, row[start:end]))
        yield shown
        start = max(end, start + 1)
