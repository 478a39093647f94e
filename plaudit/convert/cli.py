"""`plaudit convert`."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from plaudit.errors import PlauditError
from plaudit.files import write_atomic
from plaudit.wrapping import wrapped


def convert(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="A launch script, a YAML file, a Python script, or lines key=value.", show_default=False
        ),
    ],
    system: Annotated[
        Literal["auto", "verl", "llamafactory", "trl", "openrlhf"], typer.Option("--from", help="The system that it is for.")
    ] = "auto",
    out: Annotated[
        Path | None, typer.Option(metavar="R.yaml", help="The recipe to write. Default: print it, and the report to stderr.")
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="GPUs of the original run, where its batch size depends on them.", show_default=False)
    ] = None,
    defaults: Annotated[
        Literal["auto", "verl", "tinyv", "rrm"], typer.Option(help="Whose defaults a verl command relies on: its own, or a fork's.")
    ] = "auto",
) -> None:
    """Convert settings of verl, LLaMA-Factory, TRL or OpenRLHF into a recipe, with a report of every key.

    The file is read, never run. What it leaves open is listed under "needs you"; see docs/convert.md.
    """
    from plaudit.convert.converted import convert as convert_file

    if out is not None and out.exists():
        raise PlauditError(f"--out: {out} exists already; name a new file")
    converted = convert_file(file, system, gpus=gpus, defaults=defaults)
    if out is None:
        print(converted.recipe, end="")
        print(wrapped(f"\n{converted.report}", sys.stderr), file=sys.stderr)
        return
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(out, converted.recipe)
    except OSError as error:
        raise PlauditError(f"--out: {out} cannot be written: {error}") from None
    print(wrapped(converted.report, sys.stdout))
    print(f"{out}: a recipe for `plaudit {converted.tree['stage']}`")
