"""`curves.png`: a run's metrics by step, one panel each."""

import math
from pathlib import Path


def _hidden(name: str) -> bool:
    """Metrics without a panel: each panel takes a tenth of a second to draw."""
    bare = name.removeprefix("val/")
    return (
        bare in ("step", "tokens", "epoch", "updates", "skipped_steps", "sampled_tokens")
        or (bare.startswith("time/") and bare != "time/tokens_per_s")
        or (bare.startswith("judge/") and bare != "judge/cost")
        or (name.startswith("val/") and (bare.endswith("/reward") or "/parts/" in bare))  # by data source
        or ("/" in bare and "@" in bare)  # validation.metrics by data source
    )


def draw_curves(rows: list[dict[str, float]], path: Path) -> None:
    """Plot every metric that varies; a validation metric shares its training counterpart's panel."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(name for row in rows for name in row if not _hidden(name)))
    names.sort(key=lambda name: name not in ("reward", "val/reward", "loss", "val/loss"))
    names = [name for name in names if len({row[name] for row in rows if name in row}) > 1]
    panels = [name for name in names if not (name.startswith("val/") and name.removeprefix("val/") in names)]
    if not panels:
        return
    columns = min(3, len(panels))
    lines = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(4.5 * columns, 3.0 * lines))
    figure.subplots_adjust(left=0.25 / columns, right=0.98, top=1 - 0.1 / lines, bottom=0.15 / lines, wspace=0.3, hspace=0.4)
    for place, name in enumerate(panels, 1):
        axes = figure.add_subplot(lines, columns, place)
        for metric, marker in ((name, None), (f"val/{name}", "o")):
            points = [(row["step"], row[metric]) for row in rows if metric in row]
            if points:
                axes.plot(*zip(*points, strict=True), marker=marker, markersize=3, linewidth=1, label=metric)
        axes.set_title(name, fontsize=9)
        axes.set_xlabel("step", fontsize=8)
        axes.tick_params(labelsize=7)
        axes.grid(alpha=0.3)
        if len(axes.lines) > 1:
            axes.legend(fontsize=7)
    temporary = path.with_name(f".{path.name}.aside")
    try:
        figure.savefig(temporary, dpi=110, format="png")
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
