"""`plaudit audit`: what a reward rewards and what fools it, before anything is trained on it."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from plaudit.errors import PlauditError
from plaudit.options import DataSource, RewardRecipe, Rollouts, Tokenizer, split_overrides
from plaudit.shipped import find_shipped, is_shipped

if TYPE_CHECKING:
    from plaudit.audit.dumps import Rollout
    from plaudit.audit.inspection import Report
    from plaudit.recipe import RewardSettings
    from plaudit.recipe.audit import AuditSettings


def audit(
    recipe: RewardRecipe,
    rollouts: Rollouts,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the report. Default: audit/ next to the rollouts (runs/audit/NAME for shipped ones, with the recipe's "
            "name).",
            show_default=False,
        ),
    ] = None,
    label: Annotated[
        str | None,
        typer.Option(help="Column with the label: true, false or a number. Default: label, if present."),
    ] = None,
    threshold: Annotated[
        float | None, typer.Option(help="Responses with this reward or more are accepted. Default: the middle of the range.")
    ] = None,
    max_responses: Annotated[
        int | None, typer.Option(min=1, help="Audit about this many responses: complete groups, drawn at random.")
    ] = None,
    probes: Annotated[bool, typer.Option(help="Also try adversarial probes and other formats.")] = True,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of the random choices. Default: the recipe's audit.seed.")] = None,
    data_source: DataSource = "",
    tokenizer: Tokenizer = None,
) -> None:
    """Check a reward before training on it: against labels, for biases, and with adversarial probes.

    Writes audit.html and audit.json; the exit code is 1 if a check fails. Bounds are set under `audit:` in the recipe
    (`plaudit config R.yaml --explain`); docs/audit.md explains each check.
    """
    names, overrides = split_overrides(rollouts, "audit")
    paths = [find_shipped(Path(name)) for name in names]
    rewards, settings = _load(recipe, overrides)
    settings = _with_options(settings, threshold, seed, probes)

    from rich.console import Console

    from plaudit.audit.dumps import read_rollouts
    from plaudit.audit.inspection import inspect
    from plaudit.audit.terminal import print_report
    from plaudit.data.rollouts import token_counter

    groups = read_rollouts(paths, label=label, data_source=data_source)
    if max_responses is not None:
        groups = draw_groups(groups, max_responses, settings.seed)
    if (count_tokens := token_counter(tokenizer)) is not None:
        groups = [_with_token_counts(group, count_tokens) for group in groups]
    folder = out or _folder_beside(paths[0], recipe)
    _create(folder)  # before the work, so that an error costs nothing
    report = inspect(str(recipe), [str(path) for path in paths], rewards, groups, settings)
    write_report(report, folder)
    print_report(report, Console(highlight=False))
    print(f"report: {folder / 'audit.html'}\nnumbers: {folder / 'audit.json'}")
    raise typer.Exit(0 if report.passed else 1)


def _load(recipe: Path, overrides: list[str]) -> "tuple[tuple[RewardSettings, ...], AuditSettings]":
    """Load a recipe's rewards and audit settings; check that the rewards' files exist."""
    from plaudit.config import load
    from plaudit.inputs import require_reward_files
    from plaudit.recipe import RewardedRecipe
    from plaudit.recipe.audit import AuditSettings

    loaded = load(recipe, overrides).recipe
    if not isinstance(loaded, RewardedRecipe):
        raise PlauditError(f"{recipe} is a recipe for `plaudit {loaded.stage}`: it has no rewards to audit")
    require_reward_files(loaded)
    return loaded.rewards, getattr(loaded, "audit", None) or AuditSettings()


def _with_options(settings: "AuditSettings", threshold: float | None, seed: int | None, probes: bool) -> "AuditSettings":
    options = {"threshold": threshold, "seed": seed, "probe_prompts": None if probes else 0}
    return settings.model_copy(update={name: value for name, value in options.items() if value is not None})


def _with_token_counts(rollout: "Rollout", count: Callable[[str], int]) -> "Rollout":
    counts = [count(text) if known is None else known for text, known in zip(rollout.responses, rollout.tokens, strict=True)]
    return replace(rollout, tokens=tuple(counts))


def draw_groups(groups: "Sequence[Rollout]", max_responses: int, seed: int) -> "list[Rollout]":
    """Draw complete groups at random, up to `max_responses` but at least one group; in their original order."""
    order = list(range(len(groups)))
    random.Random(seed).shuffle(order)
    chosen: list[int] = []
    rows = 0
    for g in order:
        if chosen and rows + len(groups[g]) > max_responses:
            break
        chosen.append(g)
        rows += len(groups[g])
    return [groups[g] for g in sorted(chosen)]


def _folder_beside(rollouts: Path, recipe: Path) -> Path:
    """Reports on files that ship with plaudit go into the current folder, never into the installation."""
    if is_shipped(rollouts):
        return Path("runs/audit") / recipe.stem
    return (rollouts if rollouts.is_dir() else rollouts.parent) / "audit"


def _create(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlauditError(f"--out: {folder} cannot be created: {error}") from None


def write_report(report: "Report", folder: Path) -> None:
    from plaudit.audit.page import draw_page
    from plaudit.files import write_atomic
    from plaudit.redaction import redact

    try:
        write_atomic(folder / "audit.json", redact(json.dumps(report.as_dict(), indent=1, ensure_ascii=False)) + "\n")
        write_atomic(folder / "audit.html", draw_page(report))
    except OSError as error:
        raise PlauditError(f"--out: {folder} cannot be written: {error}") from None
