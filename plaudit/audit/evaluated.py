"""Training can require an evaluation of its rewards: an eval.json that covers exactly them, with figures within bounds."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from plaudit.audit.certificate import digest_rewards
from plaudit.errors import PlauditError, did_you_mean, nearest_path
from plaudit.recipe import RewardSettings
from plaudit.recipe.evaluation import EvalSettings

SHARES = ("rewards", "ranking", "verifier")
"""Evaluations whose figures are at most 1."""
AGAIN = "Evaluate them with: plaudit eval rewards FILE --rewards R.yaml"


def require_evaluated(settings: EvalSettings, rewards: Sequence[RewardSettings]) -> str:
    """Raise unless the eval.json named in the settings covers exactly these rewards and is within the bounds; return their name."""
    assert settings.require is not None
    path = Path(settings.require).expanduser()
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        kind, details, figures = str(report["kind"]), dict(report["details"]), dict(report["figures"])
        covered = {name: own["rewards"] for name, own in details.items() if "rewards" in own}
    except FileNotFoundError:
        raise PlauditError(f"eval.require: {path} does not exist.{nearest_path(path)} {AGAIN}") from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise PlauditError(f"eval.require: {path} is not an eval.json ({type(error).__name__}: {error}). {AGAIN}") from None
    if not covered:
        raise PlauditError(f"eval.require: {path} is an evaluation of {kind}, not of rewards. {AGAIN}")
    now = digest_rewards(rewards)
    name = next((name for name, evaluated in covered.items() if evaluated == now), None)
    if name is None:
        raise PlauditError(
            f"eval.require: {path} covers {', '.join(covered)}, which are not these rewards as they are now. {AGAIN}"
        )
    try:
        problems = list(_problems(settings, figures[name], details[name]))
        problems += _in_per_cent(settings) if kind in SHARES else []
    except PlauditError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise PlauditError(f"eval.require: {path} is damaged ({type(error).__name__}: {error}). {AGAIN}") from None
    if problems:
        raise PlauditError(f"eval.require: {path}: {'; '.join(problems)}. Improve the reward, or change the bounds under `eval:`.")
    return name


def _problems(settings: EvalSettings, figures: Mapping[str, Any], details: Mapping[str, Any]) -> Iterator[str]:
    failed, items = int(details["failed"]), int(details["items"])
    if failed > settings.max_failure_rate * items:
        yield f"{failed:,} of {items:,} items have no value, and eval.max_failure_rate is {settings.max_failure_rate:g}"
    for bounds, sign, relation in ((settings.at_least, 1, "less"), (settings.at_most, -1, "more")):
        for where, bound in bounds.items():
            for part, estimate in _find(figures, where):
                end = "value" if settings.by == "value" else "low" if sign > 0 else "high"
                value = estimate[end]
                if value is None or sign * (value - bound) < 0:
                    shown = "nothing" if value is None else f"{value:.4g}{'' if end == 'value' else ' at the end of its interval'}"
                    yield f"{part}: {where.rpartition(': ')[2]} is {shown}, {relation} than {bound:g}"


def _in_per_cent(settings: EvalSettings) -> list[str]:
    """Bounds that no figure exceeds: tables are in per cent, bounds are not."""
    return [
        f"at_most of {where!r} is {bound:g}, but figures are between 0 and 1: 5 % is 0.05"
        for where, bound in settings.at_most.items()
        if bound > 1
    ]


def _find(figures: Mapping[str, Any], where: str) -> list[tuple[str, Mapping[str, Any]]]:
    """`accuracy`: of all data, by benchmark or file. `PART: accuracy`: of that part."""
    part, _, figure = where.rpartition(": ")
    parts = [part] if part else [name for name in figures if "/" not in name]
    missing = next((name for name in parts if figure not in figures.get(name, {})), None)
    if missing is not None or not parts:
        known = [f"{name}: {one}" for name, own in figures.items() for one in own]
        near = did_you_mean(where, [*known, *(k.rpartition(": ")[2] for k in known)])
        raise PlauditError(f"eval.require: {where!r} is not in the evaluation.{near}")
    return [(name, figures[name][figure]) for name in parts]
