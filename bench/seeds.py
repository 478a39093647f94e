"""Several seeds of one RL recipe: a table of validation rewards before and after training, and their curve with spread.

    for seed in 0 1 2; do plaudit rl recipes/smollm2/grpo.yaml seed=$seed run.dir=runs/smollm2-$seed; done
    python bench/seeds.py runs/smollm2-0 runs/smollm2-1 runs/smollm2-2 --out docs/smollm2.png --title "SmolLM2-135M on arithmetic"

Intervals of accuracies are 95 % Wilson intervals over prompts; the spread over seeds is the standard deviation.
"""

import argparse
import json
import math
import statistics
from pathlib import Path


def read(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def wilson(share: float, count: int, z: float = 1.96) -> tuple[float, float]:
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return centre - half, centre + half


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, help="where to draw the curve")
    parser.add_argument("--title", default="")
    parser.add_argument("--prompts", type=int, help="number of validation prompts: adds an interval to each share")
    options = parser.parse_args()

    seeds = [read(run) for run in options.runs]
    curves = [{row["step"]: row["val/reward"] for row in rows if "val/reward" in row} for rows in seeds]
    print("| run | before | after | gain | steps | minutes |")
    print("| --- | --- | --- | --- | --- | --- |")

    def shown(share: float) -> str:
        low, high = wilson(share, options.prompts) if options.prompts else (0.0, 0.0)
        return f"{share:.3f} ({low:.3f}–{high:.3f})" if options.prompts else f"{share:.3f}"

    ends = []
    for run, rows, curve in zip(options.runs, seeds, curves, strict=True):
        before, after = curve[min(curve)], curve[max(curve)]
        ends.append((before, after, after - before))
        minutes = sum(row["time/step_s"] for row in rows) / 60
        print(f"| {run.name} | {shown(before)} | {shown(after)} | {after - before:+.3f} | {max(curve)} | {minutes:.1f} |")
    if len(ends) > 1:
        mean = [f"{statistics.fmean(column):.3f} ± {statistics.stdev(column):.3f}" for column in zip(*ends, strict=True)]
        print(f"| mean ± standard deviation | {' | '.join(mean)} | | |")
    if options.out:
        draw(curves, seeds, options)
        print(f"\n{options.out}")


def draw(curves: list[dict[float, float]], seeds: list[list[dict[str, float]]], options: argparse.Namespace) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.4), layout="constrained")
    axes = figure.subplots()
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    values = [[curve[step] for curve in curves] for step in steps]
    for rows in seeds:
        sampled = [(row["step"], row["reward"]) for row in rows if "reward" in row]
        axes.plot(*zip(*sampled, strict=True), color="tab:gray", alpha=0.3, linewidth=0.8)
    axes.fill_between(steps, [min(v) for v in values], [max(v) for v in values], color="tab:blue", alpha=0.25, label="all seeds")
    axes.plot(steps, [statistics.fmean(v) for v in values], color="tab:blue", marker="o", markersize=4, label="validation, mean")
    axes.plot([], [], color="tab:gray", alpha=0.5, label="training, sampled")
    axes.set(title=options.title, xlabel="step", ylabel="reward")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower right")
    figure.savefig(options.out, dpi=110)


if __name__ == "__main__":
    main()
