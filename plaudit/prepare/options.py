"""Options that several verbs of `plaudit prepare` share."""

from pathlib import Path
from typing import Annotated

import typer

from plaudit.shipped import find_shipped

OutFile = Annotated[Path, typer.Option(help="New file to write: NAME.parquet or NAME.jsonl.")]
SkipBadRows = Annotated[
    bool,
    typer.Option("--skip-bad-rows", help="Leave out rows that cannot be used, and name them, instead of stopping at the first."),
]
RowOrderSeed = Annotated[int, typer.Option(min=0, help="Seed of the row order.")]


def find_template(file: Path | None) -> Path | None:
    return None if file is None else find_shipped(file)


def report(line: str) -> None:
    """About a row that is left out."""
    typer.echo(line, err=True)
