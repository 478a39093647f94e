"""Explained variance of PPO's critic on a task with predictable returns: a separate model against a head on the policy's layers.

    python bench/critic.py --out runs/critic                       # two critics × three seeds, two at a time
    python bench/critic.py --out runs/critic --report              # only the table of existing runs

The task is the demo's (bench/algorithms.py), with two kinds of prompts. Demonstrations have 3 to 6 letters, a fifth of them with
mistakes, so that the policy sorts these right most of the time. Half of the RL prompts have 3 to 5 letters, the others 9 to 11:
answers longer than any demonstration are almost never right. So a response's reward can be predicted from its prompt and from the
mistakes made so far; the rest is chance. All runs of a seed start from the same SFT model. Explained variance is measured on a
step's tokens before the critic trains on them.
"""

import argparse
import json
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from algorithms import RECIPE, REPOSITORY, plaudit, run, spread

STEPS, VALIDATE_EVERY = 100, 20
CRITICS = {
    "own": "critic={pretrain_steps: 5, optim: {lr: 1e-3}}",
    "shared": "critic={shared: true, loss_coefficient: 2, pretrain_steps: 5, optim: {lr: 1e-2}}",
}


def start(out: Path, seed: int) -> Path:
    """The data and SFT model shared by both critics of a seed."""
    folder = out / f"start-{seed}"
    if (folder / "sft" / "model").exists():
        return folder
    short, easy, hard, base = (folder / name for name in ("short", "easy", "hard", "base"))
    commands = [
        plaudit("prepare", "sorting", "--out", short, "--letters", "3", "6", "--careless", "0.2", "--seed", str(seed)),
        # Only the prompts of these are used.
        plaudit("prepare", "sorting", "--out", easy, "--letters", "3", "5", "--demonstrations", "1", "--seed", str(1000 + seed)),
        plaudit("prepare", "sorting", "--out", hard, "--letters", "9", "11", "--demonstrations", "1", "--seed", str(2000 + seed)),
        plaudit("prepare", "tiny-model", short / "sft.jsonl", "--out", base, "--hidden-size", "96", "--vocabulary", "300"),
        plaudit(
            "sft", REPOSITORY / "recipes/demo/sft.yaml", f"seed={seed}", f"model.path={base}", f"data.train={short / 'sft.jsonl'}",
            f"run.dir={folder / 'sft'}",
        ),
    ]  # fmt: skip
    if not all(run(command, folder / "log") for command in commands):
        sys.exit(f"preparing seed {seed} failed: see {folder / 'log'}")
    return folder


def train(out: Path, name: str, seed: int) -> str:
    folder, begin = out / f"{name}-{seed}", out / f"start-{seed}"
    if STEPS in dict(curve(folder, "val/reward")):
        return f"{name}, seed {seed}: already done"
    settings = [
        f"seed={seed}", f"model.path={begin / 'sft/model'}",
        f"data.train=[{begin / 'easy/rl.jsonl'}, {begin / 'hard/rl.jsonl'}]",
        f"data.val=[{begin / 'easy/val.jsonl'}, {begin / 'hard/val.jsonl'}]", f"run.dir={folder}", f"run.max_steps={STEPS}",
        f"run.validate_every={VALIDATE_EVERY}", "run.save_every=1000000", "rollout={n: 8, max_new_tokens: 24}",
        "algorithm={kind: ppo}", CRITICS[name],
    ]  # fmt: skip
    began = time.monotonic()
    log = out / "logs" / f"{folder.name}.log"
    ok = run(plaudit("rl", RECIPE, *settings), log)
    return f"{name}, seed {seed}: {'done' if ok else f'FAILED, see {log}'} ({time.monotonic() - began:.0f} s)"


def curve(folder: Path, metric: str) -> list[tuple[int, float]]:
    file = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [(int(row["step"]), row[metric]) for row in rows if row.get(metric) is not None]


def report(out: Path, seeds: list[int]) -> None:
    """Explained variance, averaged over twenty steps and then over seeds; validation reward before and after."""
    starts = range(0, STEPS, 20)
    print(f"| critic | {' | '.join(f'{begin + 1}–{begin + 20}' for begin in starts)} | reward after SFT | after RL | seeds |")
    print("| --- " * (len(starts) + 4) + "|")
    for name in CRITICS:
        folders = [out / f"{name}-{seed}" for seed in seeds]
        folders = [folder for folder in folders if STEPS in dict(curve(folder, "val/reward"))]
        if not folders:
            continue
        explained, validated = (
            [curve(folder, metric) for folder in folders] for metric in ("critic/explained_variance", "val/reward")
        )
        means = [[statistics.fmean(v for step, v in one if begin < step <= begin + 20) for one in explained] for begin in starts]
        before, after = ([dict(one)[step] for one in validated] for step in (0, STEPS))
        print(f"| {name} | {' | '.join(map(spread, means))} | {spread(before)} | {spread(after)} | {len(folders)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", choices=CRITICS, help="one of the critics")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--report", action="store_true", help="only print the table of existing runs")
    args = parser.parse_args()
    seeds, names = [int(seed) for seed in args.seeds.split(",")], [args.only] if args.only else list(CRITICS)
    if not args.report:
        args.out.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(args.jobs) as pool:
            list(pool.map(lambda seed: start(args.out, seed), seeds))
            for line in pool.map(lambda job: train(args.out, *job), [(name, seed) for name in names for seed in seeds]):
                print(line, flush=True)
    report(args.out, seeds)


if __name__ == "__main__":
    main()
