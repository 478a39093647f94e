"""Learning curves of every RL algorithm on one small verifiable task, over several seeds.

    python bench/algorithms.py --out runs/algorithms               # all × three seeds, two at a time: half an hour on two cores
    python bench/algorithms.py --out runs/algorithms --only GRPO,PPO --seeds 0,1 --jobs 1
    python bench/algorithms.py --out runs/algorithms --report --plot docs/algorithms.png

The task is the demo's (recipes/demo): a small Llama learns to sort letters by SFT on noisy demonstrations, then by RL. All
algorithms start from a seed's SFT model and differ only in the settings below, which are untuned except for the learning rate
where the table gives one: they show that an algorithm works, not which is best. The metric is the share of right answers among
four samples to each of 200 held-out prompts, at temperature 1.

Finished runs are kept, interrupted ones resumed. Each run is a separate process on one core.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
RECIPE = REPOSITORY / "recipes/demo/rl.yaml"
STEPS, VALIDATE_EVERY = 120, 20
ALGORITHMS: dict[str, list[str]] = {
    "GRPO": ["algorithm={kind: grpo}"],
    "Dr.GRPO": ["algorithm={kind: grpo, divide_by_std: false, aggregation: seq-mean-token-sum-norm}"],
    "DAPO": [
        "algorithm={kind: grpo, clip_ratio: [0.2, 0.28], aggregation: token-mean, dynamic_sampling: {max_rounds: 3}}",
        "train.prompts_per_update=16", "run.epochs=4",
    ],
    "GSPO": [
        "algorithm={kind: grpo, loss: gspo, clip_ratio: [0.0003, 0.0004], aggregation: seq-mean-token-mean}",
        "train.prompts_per_update=16",
    ],
    "CISPO": [
        "algorithm={kind: grpo, loss: cispo, clip_ratio: [0.999, 0.28], aggregation: token-mean}",
        "train.prompts_per_update=16",
    ],
    "RLOO": ["algorithm={kind: rloo, loss: policy_gradient}"],
    "REINFORCE++": ["algorithm={kind: reinforce++, kl_reward: {coefficient: 0.001}}"],
    "REINFORCE++ with baseline": ["algorithm={kind: reinforce++-baseline, kl_coefficient: 0.001, kl_estimator: k2}"],
    "ReMax": ["algorithm={kind: remax, loss: policy_gradient}"],
    "GDPO": ["algorithm={kind: gdpo}", "rewards=[{kind: exact, normalise: group}]"],
    "PPO": ["algorithm={kind: ppo}", "critic={pretrain_steps: 5, optim: {lr: 1e-3}}"],
}  # fmt: skip


def run(command: list[str], log: Path) -> bool:
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]),
    }
    with log.open("a") as output:
        print("$", shlex.join(command), file=output, flush=True)
        return subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=environment, check=False).returncode == 0


def plaudit(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "plaudit", *map(str, arguments)]


def start(out: Path, seed: int) -> Path:
    """The data and SFT model shared by all algorithms of a seed."""
    folder = out / f"start-{seed}"
    if not (folder / "sft" / "model").exists():
        data, base = folder / "data", folder / "base"
        made = run(plaudit("prepare", "sorting", "--out", data, "--seed", str(seed)), folder / "log") and run(
            plaudit("prepare", "tiny-model", data / "sft.jsonl", "--out", base, "--hidden-size", "96", "--vocabulary", "300"),
            folder / "log",
        )
        settings = [f"seed={seed}", f"model.path={base}", f"data.train={data / 'sft.jsonl'}", f"run.dir={folder / 'sft'}"]
        if not made or not run(plaudit("sft", REPOSITORY / "recipes/demo/sft.yaml", *settings), folder / "log"):
            sys.exit(f"preparing seed {seed} failed: see {folder / 'log'}")
    return folder


def train(out: Path, name: str, seed: int) -> str:
    folder, begin = out / f"{name.replace(' ', '-')}-{seed}", out / f"start-{seed}"
    if finished(folder):
        return f"{name}, seed {seed}: already done"
    settings = [
        f"seed={seed}", f"model.path={begin / 'sft' / 'model'}", f"data.train={begin / 'data' / 'rl.jsonl'}",
        f"data.val={begin / 'data' / 'val.jsonl'}", f"run.dir={folder}", f"run.max_steps={STEPS}",
        f"run.validate_every={VALIDATE_EVERY}", "run.save_every=1000000", *ALGORITHMS[name],
    ]  # fmt: skip
    began = time.monotonic()
    log = out / "logs" / f"{folder.name}.log"
    ok = run(plaudit("rl", RECIPE, *settings), log)
    return f"{name}, seed {seed}: {'done' if ok else f'FAILED, see {log}'} ({time.monotonic() - began:.0f} s)"


def validated(folder: Path) -> dict[int, float]:
    file = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {int(row["step"]): row["val/reward"] for row in rows if "val/reward" in row}


def finished(folder: Path) -> bool:
    return STEPS in validated(folder)


def report(out: Path, names: list[str], seeds: list[int], plot: Path | None) -> None:
    curves = {name: [validated(out / f"{name.replace(' ', '-')}-{seed}") for seed in seeds] for name in names}
    print("| | after SFT | after RL | seeds | best during training |")
    print("| --- | --- | --- | --- | --- |")
    for name, some in curves.items():
        complete = [curve for curve in some if STEPS in curve]
        if not complete:
            continue
        before, after, best = (
            [curve[0] for curve in complete],
            [curve[STEPS] for curve in complete],
            [max(curve.values()) for curve in complete],
        )
        print(f"| {name} | {spread(before)} | {spread(after)} | {len(complete)} | {spread(best)} |")
    if plot is not None:
        draw(curves, plot)


def spread(values: list[float]) -> str:
    return f"{statistics.fmean(values):.3f}" + (f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else "")


def draw(curves: dict[str, list[dict[int, float]]], plot: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5.2), layout="constrained")
    grid = figure.subplots(2, -(-len(curves) // 2), sharex=True, sharey=True).flatten()
    for axes, (name, some) in zip(grid, curves.items(), strict=False):
        for curve in some:
            axes.plot(list(curve), list(curve.values()), color="tab:blue", alpha=0.35, linewidth=1)
        steps = sorted(set.intersection(*map(set, some))) if some else []
        axes.plot(steps, [statistics.fmean(curve[step] for curve in some) for step in steps], color="tab:blue", linewidth=2)
        axes.set_title(name, fontsize=10)
        axes.grid(alpha=0.3)
    figure.supxlabel("step")
    figure.supylabel("share of right answers")
    figure.savefig(plot, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", help="comma-separated names")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--report", action="store_true", help="only print the table of existing runs")
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    names, seeds = args.only.split(",") if args.only else list(ALGORITHMS), [int(seed) for seed in args.seeds.split(",")]
    if unknown := set(names) - set(ALGORITHMS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; choose from {', '.join(ALGORITHMS)}")
    if not args.report:
        args.out.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(args.jobs) as pool:
            list(pool.map(lambda seed: start(args.out, seed), seeds))
            for line in pool.map(lambda job: train(args.out, *job), [(name, seed) for seed in seeds for name in names]):
                print(line, flush=True)
    report(args.out, names, seeds, args.plot)


if __name__ == "__main__":
    main()
