"""An evaluation in the terminal."""

import sys
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from plaudit.evaluation.results import EVAL_JSON, EVAL_MD, Evaluation, show_cell
from plaudit.report.progress import print_line
from plaudit.reward_models.model_registry import describe_usage


def print_evaluation(evaluation: Evaluation, folder: Path, pictures: list[Path]) -> None:
    console = Console(highlight=False, file=sys.stdout)
    for table in evaluation.tables:
        shown = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, title=table.title, title_justify="left", title_style="bold")
        shown.add_column("", overflow="fold")
        for column in table.columns:
            shown.add_column(column, justify="right", overflow="fold")
        for label, cells in table.rows:
            shown.add_row(label, *(show_cell(cell, table.percent) for cell in cells))
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
