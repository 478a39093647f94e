"""Arguments and options that `plaudit score`, `audit` and `serve` share: a recipe's rewards, and rows to score with them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from plaudit.errors import PlauditError

RewardRecipe = Annotated[
    Path, typer.Argument(metavar="R.yaml", help="A recipe with `rewards:`, or an RL recipe.", show_default=False)
]
Rollouts = Annotated[
    list[str],
    typer.Argument(
        metavar="ROLLOUTS… [section.name=value]…",
        help="Saved responses: files (.jsonl, .parquet, .json); for `score` also data sets on the hub, "
        "for `audit` a run folder, or a folder of verl or TRL dumps. "
        "Settings such as rewards.0.weight=2 override the recipe's.",
        show_default=False,
    ),
]
Tokenizer = Annotated[
    str | None, typer.Option(help="A model whose tokenizer counts the tokens of responses that come without a count.")
]
DataSource = Annotated[str, typer.Option(help="data_source of rows without one, as in verl and TRL dumps.")]


def split_overrides(arguments: Sequence[str], verb: str) -> tuple[list[str], list[str]]:
    """Names of rollouts, and settings that override the recipe's."""
    unknown = next((one for one in arguments if one.startswith("-") and "." not in one), None)
    if unknown is not None:
        raise PlauditError(f"plaudit {verb} has no option {unknown}. Usage: plaudit {verb} R.yaml ROLLOUTS (see {verb} --help)")
    overrides = [one for one in arguments if one.startswith("-") or ("=" in one and not Path(one).exists())]
    names = [one for one in arguments if one not in overrides]
    if not names:
        raise PlauditError(f"{verb} needs saved responses: plaudit {verb} R.yaml ROLLOUTS")
    return names, overrides
