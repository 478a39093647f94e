"""Pictures of evaluations: figures with their intervals side by side, and curves."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from plaudit.errors import PlauditError
from plaudit.evaluation.results import Figures
from plaudit.statistics.intervals import Estimate

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
"""Okabe and Ito's, which colour-blind readers can tell apart."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


def draw_rewards(figures: Mapping[str, Figures], curves: Mapping[str, Any], path: Path) -> None:
    """Accuracy by part, with intervals; and accuracy by how much longer the right response is."""
    figure, (left, right) = _side_by_side(figures, right_height=4.0)
    _draw_parts(left, figures, "accuracy", 100)
    left.axvline(50, color="0.6", linewidth=1, linestyle=":")
    left.set_xlabel("accuracy, per cent, with intervals (dotted: chance for pairs)", fontsize=8)
    _draw_length(right, curves)
    _draw_legend(figure, left)
    _save(figure, path)


def draw_ranking(figures: Mapping[str, Figures], path: Path) -> None:
    """Pairwise accuracy and Kendall's τ_b by part, with intervals."""
    figure, (left, right) = _side_by_side(figures)
    _draw_parts(left, figures, "accuracy", 100)
    left.set_xlabel("pairwise accuracy, per cent, with intervals", fontsize=8)
    _draw_parts(right, figures, "tau_b", 1)
    right.axvline(0, color="0.6", linewidth=1, linestyle=":")
    right.set_xlabel("Kendall's τ_b, with intervals (dotted: chance)", fontsize=8)
    _draw_legend(figure, left)
    _save(figure, path)


def draw_verifier(figures: Mapping[str, Mapping[str, Estimate]], path: Path) -> None:
    """Wrong answers that are accepted against right ones that are rejected: a point per reward, with intervals."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 5), layout="constrained")
    axes = figure.subplots()
    for i, (name, own) in enumerate(figures.items()):
        if {"false_accept_rate", "false_reject_rate"} <= own.keys():
            x, y = own["false_accept_rate"], own["false_reject_rate"]
            # Rewards that agree have the same point: later ones are smaller.
            style = _style(i, size=max(4, 12 - 2 * i))
            spans = {"xerr": _spans([x], 100), "yerr": _spans([y], 100)}
            axes.errorbar([100 * x.value], [100 * y.value], label=_plain(name), **spans, **style)
    axes.set_xlabel("false accepts, per cent of wrong answers", fontsize=8)
    axes.set_ylabel("false rejects, per cent of right answers", fontsize=8)
    axes.set_xlim(left=min(-2.0, axes.get_xlim()[0]))
    axes.set_ylim(bottom=min(-2.0, axes.get_ylim()[0]))
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
    _draw_legend(figure, axes)
    _save(figure, path)


def draw_policy(figures: Mapping[str, Figures], curves: Mapping[str, Any], gold: str, ks: Sequence[int], path: Path) -> None:
    """pass@k and majority vote against k; and for each reward that chooses, what it and gold give the best of n."""
    from matplotlib.figure import Figure

    proxies = [reward for reward in next(iter(curves.values()), {}) if reward != gold]
    panels = 1 + len(proxies)
    columns = min(3, panels)
    figure = Figure(figsize=(5.2 * columns, 4.2 * -(-panels // columns)), layout="constrained")
    axes = figure.subplots(-(-panels // columns), columns, squeeze=False).ravel()
    _draw_passes(axes[0], figures, ks)
    for panel, proxy in zip(axes[1:], proxies, strict=False):
        _draw_best_of(panel, {name: own[proxy] for name, own in curves.items()}, proxy, gold)
    for unused in axes[panels:]:
        unused.remove()
    _draw_legend(figure, axes[0])
    _save(figure, path)


def _draw_passes(axes: Any, figures: Mapping[str, Figures], ks: Sequence[int]) -> None:
    for i, (name, own) in enumerate(figures.items()):
        for figure, line, label in (("pass", "-", name), ("majority", "--", f"{name}, majority of k")):
            points = [(k, own["all"][f"{figure}@{k}"]) for k in ks if f"{figure}@{k}" in own.get("all", {})]
            _draw_curve(axes, points, i, line, _plain(label), 100)
    _label_ks(axes, ks)
    axes.set_xlabel("k responses", fontsize=8)
    axes.set_ylabel("pass@k, per cent, with intervals (dashed: majority vote)", fontsize=8)


def _draw_best_of(axes: Any, curves: Mapping[str, Sequence[Mapping[str, Any]]], proxy: str, gold: str) -> None:
    """Over-optimisation: gold on the left, the reward that chooses on the right; they have scales of their own."""
    right = axes.twinx()
    for i, points in enumerate(curves.values()):
        for own, which, line in ((axes, "gold", "-"), (right, "proxy", ":")):
            _draw_curve(own, [(point["n"], point[which]) for point in points if point[which] is not None], i, line, "", 1)
    ks = [point["n"] for point in next(iter(curves.values()))]
    _label_ks(axes, ks)
    top = axes.secondary_xaxis("top")
    top.set_xticks(ks, [f"{point['root_kl']:.2f}" for point in next(iter(curves.values()))], fontsize=7)
    top.set_xticks([], minor=True)
    top.set_xlabel("√KL(best of n ‖ policy)", fontsize=8)
    axes.set_xlabel(_plain(f"best of n by {proxy}"), fontsize=8)
    axes.set_ylabel(_plain(f"{gold} (solid)"), fontsize=8)
    right.set_ylabel(_plain(f"{proxy} (dotted)"), fontsize=8)
    right.tick_params(labelsize=8)


def _draw_curve(axes: Any, points: Sequence[tuple[int, Estimate]], i: int, line: str, label: str, unit: float) -> None:
    if not points:
        return
    x, estimates = [k for k, _ in points], [estimate for _, estimate in points]
    colour = COLOURS[i % 8]
    style = {"marker": MARKERS[i % 8], "color": colour, "linestyle": line, "markersize": 4, "linewidth": 1.2}
    axes.plot(x, [unit * one.value for one in estimates], label=label or "_", **style)
    low, high = [unit * one.low for one in estimates], [unit * one.high for one in estimates]
    axes.fill_between(x, low, high, color=colour, alpha=0.1, linewidth=0)


def _label_ks(axes: Any, ks: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(ks, [str(k) for k in ks], fontsize=8)
    axes.set_xticks([], minor=True)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)


def _side_by_side(figures: Mapping[str, Figures], *, right_height: float | None = None) -> tuple[Any, Any]:
    """Two axes, high enough for all parts; the right one with a height of its own, in inches, if given."""
    from matplotlib.figure import Figure

    lines = len(_parts(figures)) * max(1.6, len(figures))
    height = max(3.2, 0.16 * lines + 1.0)
    figure = Figure(figsize=(11, height), layout="constrained")
    if right_height is None or height < 1.5 * right_height:
        return figure, figure.subplots(1, 2, width_ratios=[3, 2])
    grid = figure.add_gridspec(2, 2, width_ratios=[3, 2], height_ratios=[right_height, height - right_height])
    return figure, (figure.add_subplot(grid[:, 0]), figure.add_subplot(grid[0, 1]))


def _parts(figures: Mapping[str, Figures]) -> list[str]:
    return list(dict.fromkeys(part for own in figures.values() for part in own))


def _draw_parts(axes: Any, figures: Mapping[str, Figures], which: str, unit: float) -> None:
    """A figure by part, with intervals; the rewards of a part below each other."""
    parts, step = _parts(figures), 0.7 / max(1, len(figures))
    for i, (name, own) in enumerate(figures.items()):
        found = [(place, own[part][which]) for place, part in enumerate(parts) if which in own.get(part, {})]
        places = [place - 0.35 + step * (i + 0.5) for place, _ in found]
        estimates = [estimate for _, estimate in found]
        values = [unit * estimate.value for estimate in estimates]
        axes.errorbar(values, places, xerr=_spans(estimates, unit), label=_plain(name), **_style(i))
    axes.set_yticks(range(len(parts)), [_plain(_shorten(part)) for part in parts], fontsize=8)
    for part, label in zip(parts, axes.get_yticklabels(), strict=True):
        label.set_fontweight("bold" if "/" not in part else "normal")
    for border in range(1, len(parts)):
        axes.axhline(border - 0.5, color="0.9", linewidth=0.8, zorder=0)
    axes.set_ylim(max(1, len(parts)) - 0.5, -0.5)
    axes.tick_params(axis="x", labelsize=8)
    axes.grid(axis="x", alpha=0.3)


def _draw_legend(figure: Any, axes: Any) -> None:
    """Above the axes, so that it hides no interval."""
    handles, names = axes.get_legend_handles_labels()
    if names:
        # About 170 characters fit into a line.
        columns = max(1, min(len(names), 170 // (max(map(len, names)) + 8)))
        figure.legend(handles, names, loc="outside upper center", ncols=columns, fontsize=8, frameon=False)


def _style(i: int, size: int = 5) -> dict[str, Any]:
    """Of the i-th reward's points."""
    return {"fmt": MARKERS[i % 8], "color": COLOURS[i % 8], "capsize": 2, "markersize": size}


def _spans(estimates: Sequence[Estimate], unit: float) -> list[list[float]]:
    """How far intervals reach below and above their values."""
    below = [unit * max(0.0, estimate.value - estimate.low) for estimate in estimates]
    return [below, [unit * max(0.0, estimate.high - estimate.value) for estimate in estimates]]


def _draw_length(axes: Any, curves: Mapping[str, Sequence[Mapping[str, float]]]) -> None:
    for i, (name, bins) in enumerate(curves.items()):
        middle = [(one["from"] + one["to"]) / 2 for one in bins]
        values = [100 * one["accuracy"] for one in bins]
        axes.plot(middle, values, marker=MARKERS[i % 8], color=COLOURS[i % 8], markersize=4, linewidth=1, label=name)
        low, high = ([100 * one[side] for one in bins] for side in ("low", "high"))
        axes.fill_between(middle, low, high, color=COLOURS[i % 8], alpha=0.12, linewidth=0)
    widest = max((abs(one[side]) for bins in curves.values() for one in bins for side in ("from", "to")), default=0.0)
    if widest > 200:  # linear up to 100 characters, logarithmic beyond
        axes.set_xscale("symlog", linthresh=100)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:+,.0f}" if x else "0")
    axes.axvline(0, color="0.6", linewidth=1)
    axes.axhline(50, color="0.6", linewidth=1, linestyle=":")
    axes.set_ylim(-4, 104)
    axes.set_xlabel("how much longer the right response is, characters", fontsize=8)
    axes.set_ylabel("accuracy, per cent", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)


def _plain(name: str) -> str:
    """Without what matplotlib would read as a formula, or hide."""
    return name.replace("$", r"\$").lstrip("_") or "_"


def _shorten(part: str) -> str:
    _, _, inside = part.partition("/")
    return f"  {inside}" if inside else part


def _save(figure: Any, path: Path) -> None:
    temporary = path.with_name(f".{path.name}.aside")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing")  # names may be in any script
            figure.savefig(temporary, dpi=120, format="png")
        temporary.replace(path)
    except OSError as error:
        raise PlauditError(f"--out: {path} cannot be written: {error}") from None
    finally:
        temporary.unlink(missing_ok=True)
