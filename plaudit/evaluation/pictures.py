"""Pictures of evaluations: figures with their intervals side by side, and curves."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from plaudit.evaluation.results import Figures

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
"""Okabe and Ito's, which colour-blind readers can tell apart."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


def draw_rewards(figures: Mapping[str, Figures], curves: Mapping[str, Any], path: Path) -> None:
    """Accuracy by part, with intervals; and accuracy by how much longer the right response is."""
    from matplotlib.figure import Figure

    parts = list(dict.fromkeys(part for own in figures.values() for part in own))
    height = max(3.0, 0.32 * len(parts) * max(1, len(figures) / 2) + 1.2)
    figure = Figure(figsize=(11, height), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    step = 0.7 / len(figures)
    for i, (name, own) in enumerate(figures.items()):
        found = [(place, own[part]["accuracy"]) for place, part in enumerate(parts) if "accuracy" in own.get(part, {})]
        places = [place - 0.35 + step * (i + 0.5) for place, _ in found]
        values = [100 * estimate.value for _, estimate in found]
        spans = [
            [100 * max(0.0, estimate.value - estimate.low) for _, estimate in found],
            [100 * max(0.0, estimate.high - estimate.value) for _, estimate in found],
        ]
        left.errorbar(values, places, xerr=spans, fmt=MARKERS[i % 8], color=COLOURS[i % 8], label=name, capsize=2, markersize=5)
    left.set_yticks(range(len(parts)), [_shorten(part) for part in parts], fontsize=8)
    left.invert_yaxis()
    left.axvline(50, color="0.6", linewidth=1, linestyle=":")
    left.set_xlabel("accuracy, per cent, with intervals (dotted: chance for pairs)", fontsize=8)
    left.legend(fontsize=8)
    left.grid(axis="x", alpha=0.3)
    _draw_length(right, curves)
    _save(figure, path)


def _draw_length(axes: Any, curves: Mapping[str, Sequence[Mapping[str, float]]]) -> None:
    for i, (name, bins) in enumerate(curves.items()):
        middle = [(one["from"] + one["to"]) / 2 for one in bins]
        values = [100 * one["accuracy"] for one in bins]
        axes.plot(middle, values, marker=MARKERS[i % 8], color=COLOURS[i % 8], markersize=4, linewidth=1, label=name)
        low, high = ([100 * one[side] for one in bins] for side in ("low", "high"))
        axes.fill_between(middle, low, high, color=COLOURS[i % 8], alpha=0.12, linewidth=0)
    axes.set_xscale("symlog", linthresh=100)
    axes.axvline(0, color="0.6", linewidth=1)
    axes.set_xlabel("how much longer the right response is, characters", fontsize=8)
    axes.set_ylabel("accuracy, per cent", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)


def _shorten(part: str) -> str:
    *outer, last = part.split("/")
    return "  " * len(outer) + last if outer else part


def _save(figure: Any, path: Path) -> None:
    temporary = path.with_name(f".{path.name}.aside")
    try:
        figure.savefig(temporary, dpi=120, format="png")
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
