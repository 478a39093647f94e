"""Accuracy of a generative ranking reward model untrained, after SFT and after RL with the `ranking` rule, over several seeds.

    python bench/ranking.py --out runs/ranking --plot docs/ranking.png                    # a small model from scratch, on a CPU
    python bench/ranking.py --out runs/ranking-smollm2 --model models/smollm2 --device cuda --jobs 3 --plot docs/ranking_smollm2.png
    python bench/ranking.py --out runs/ranking --report                                   # only the table of existing runs
    python bench/ranking.py --constants                                                   # rewards of constant answers

The rows are groups of expert-scored translations (mt_ranking_ende_*.parquet, in --data). Metrics are computed on the groups of the
test file only, in their original order, over four answers at temperature 0.4 and top-p 0.7 (as GRRM is evaluated):

    share        mean over groups of the share of pairs with the true relation (>, =, <): the rule's own ranking part
    differing    the same over pairs whose true scores differ; a predicted tie counts half. Chance is 0.5
    readable     share of answers in the right format; others count 0 in both
    commonest    share of the readable answers with the most frequent ranking: 1 is a judge that always answers the same

Baselines that ignore the input: the best constant ranking, chosen on the training groups; all tied; a random order.
Without --model, recipes/grrm/mini_*.yaml are used unchanged, with one model per seed; with it, the settings below override them.
Finished runs are kept, interrupted ones resumed.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from itertools import combinations, permutations, product
from pathlib import Path
from typing import Any

from pyarrow.parquet import read_table

from plaudit.rewards.judges.candidates import LETTERS
from plaudit.rewards.rules.pointwise_score import REWARD
from plaudit.rewards.rules.ranking_lines import (
    SCORE_PART,
    Tiers,
    letters_of,
    pairwise_share,
    rank,
    read_ranked,
    read_ranking,
    relation,
    write_ranking,
)

REPOSITORY = Path(__file__).resolve().parent.parent
RECIPES = REPOSITORY / "recipes/grrm"
MINI_ROWS = ["--max-characters", "800", "--template", str(RECIPES / "mini.jinja")]
"""Short texts and a short prompt, for a model trained from scratch."""
ONE_ROW = 400
"""Characters of a text and one candidate, if each candidate is a row (docs/generative_reward_models.md, single answers)."""
PRETRAINED_SFT = [
    "model.dtype=bfloat16", "data.max_tokens=2048", "train={rows_per_step: 32, tokens_per_micro_batch: 32768}",
    "optim={lr: 1e-4, schedule: cosine, warmup_ratio: 0.1}", "run.epochs=1", "run.max_steps=8",
]  # fmt: skip
"""A cold start with about as many rows as groups, so that most answers are readable."""
PRETRAINED_RL = [
    "model.dtype=bfloat16", "data.max_prompt_tokens=1536", "rollout={n: 8, max_new_tokens: 384}",
    "train={prompts_per_step: 32, tokens_per_micro_batch: 16384}", "optim={lr: 1e-5, warmup_steps: 5}", "run.max_steps=40",
]  # fmt: skip
AUGMENT = ["--shuffle-augment", "23"]
"""All permutations of four. No subsets of groups: a small model takes long to learn that there may be fewer letters."""
ANSWERS = ["-n", "4", "--temperature", "0.4", "--top-p", "0.7"]
"""Same as `validation` in mini_rl.yaml."""


# Runs ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bench:
    out: Path
    data: Path
    model: Path | None
    device: str
    sft: list[str]
    rl: list[str]
    failed: threading.Event = field(default_factory=threading.Event)
    """A seed's run failed: the others stop before their next run."""

    def run(self, *arguments: str | Path, log: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])}
        command = [sys.executable, "-m", "plaudit", *map(str, arguments)]
        log.parent.mkdir(parents=True, exist_ok=True)
        if self.failed.is_set():
            sys.exit(f"stopped before plaudit {arguments[0]}: another seed has failed")
        with log.open("a") as output:
            print("$", shlex.join(command), file=output, flush=True)
            if subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=environment, check=False).returncode:
                self.failed.set()
                print(f"plaudit {arguments[0]} failed: see {log}", file=sys.stderr, flush=True)
                sys.exit(1)

    def rows(self) -> None:
        """The same for all seeds: orders are drawn once."""
        train, test = (self.data / f"mt_ranking_ende_{part}.parquet" for part in ("train", "test"))
        for name, verb, groups, more in (
            ("sft", "ranking-sft", train, AUGMENT), ("rl", "ranking-rl", train, AUGMENT), ("val", "ranking-rl", test, []),
            ("train", "ranking-rl", train, []),
        ):  # fmt: skip
            file = self.out / "data" / f"{name}.parquet"
            if not file.exists():
                short = MINI_ROWS if self.model is None else []
                self.run("prepare", verb, groups, "--out", file, "--format", "ranking", *short, *more, log=self.out / "log")

    def seed(self, seed: int) -> str:
        folder, data, began = self.out / f"seed-{seed}", self.out / "data", time.monotonic()
        log, base, here = folder / "log", self.model or folder / "base", [f"seed={seed}", f"run.device={self.device}"]
        if not (base / "config.json").exists():
            size = ("--hidden-size", "96", "--layers", "2", "--vocabulary", "1000")
            self.run("prepare", "tiny-model", data / "sft.parquet", "--out", base, *size, "--seed", str(seed), log=log)
        self.sample(base, folder / "untrained.jsonl", seed, *ANSWERS)
        if not (folder / "sft/model").exists():
            rows = [f"model.path={base}", f"data.train={data / 'sft.parquet'}", f"run.dir={folder / 'sft'}"]
            self.run("sft", RECIPES / "mini_sft.yaml", *rows, *self.sft, *here, log=log)
        if not (folder / "rl/model").exists():
            rows = [f"data.{part}={data / file}.parquet" for part, file in (("train", "rl"), ("val", "val"))]
            rows += [f"model.path={folder / 'sft/model'}", f"run.dir={folder / 'rl'}"]
            self.run("rl", RECIPES / "mini_rl.yaml", *rows, *self.rl, *here, log=log)
        for stage in ("sft", "rl"):
            self.sample(folder / stage / "model", folder / f"{stage}_warm.jsonl", seed, "-n", "4", "--temperature", "1")
        return f"seed {seed}: done ({time.monotonic() - began:.0f} s)"

    def sample(self, model: Path, out: Path, seed: int, *how: str) -> None:
        """Sample answers about the held-out groups. (Existing answers are not sampled again.)"""
        longest = ("--max-new-tokens", "384" if self.model else "160", "--max-prompt-tokens", "1536")
        rest = (*how, *longest, "--seed", str(seed), "--device", self.device)
        self.run("sample", model, self.out / "data/val.parquet", "--out", out, *rest, log=out.parent / "log")


# Metrics -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Metrics:
    """Metrics of a set of answers."""

    share: float
    differing: float
    readable: float
    differing_of_readable: float
    commonest: float


def measure(answers: Iterable[tuple[Tiers | None, Tiers]]) -> Metrics:
    """Metrics of predicted rankings (None: unreadable), each paired with the true one."""
    answers = list(answers)
    share, differing = (statistics.fmean(column) for column in zip(*(agreement(*one) for one in answers), strict=True))
    read = [tiers for tiers, _ in answers if tiers is not None]
    if not read:
        return Metrics(share, differing, 0.0, float("nan"), float("nan"))
    readable, commonest = len(read) / len(answers), Counter(read).most_common(1)[0][1] / len(read)
    return Metrics(share, differing, readable, differing / readable, commonest)


def agreement(tiers: Tiers | None, truth: Tiers) -> tuple[float, float]:
    """Agreement over all pairs, and over those whose true scores differ."""
    if tiers is None:
        return 0.0, 0.0
    pairs = [(x, y) for x, y in permutations(sorted(letters_of(truth)), 2) if relation(truth, x, y) > 0]
    ordered = [(1 + relation(tiers, *pair)) / 2 for pair in pairs]
    return pairwise_share(tiers, truth), statistics.fmean(ordered) if ordered else 1.0


def answered(row: dict[str, Any], text: str) -> tuple[Tiers | None, Tiers]:
    """The predicted and the true ranking."""
    truth, answer = true_ranking(row), read_ranked(text)
    return (answer.tiers if answer is not None and letters_of(answer.tiers) == letters_of(truth) else None), truth


def true_ranking(row: dict[str, Any]) -> Tiers:
    truth = read_ranking(row["reward_model"]["ground_truth"])
    assert truth is not None
    return truth


def of_samples(file: Path) -> Metrics:
    """Metrics of a validation's samples."""
    return measure(answered(row, row["response"]) for row in read_table(file, columns=["response", "reward_model"]).to_pylist())


def of_lines(file: Path) -> Metrics:
    """Metrics of the output of `plaudit sample`."""
    with file.open(encoding="utf-8") as lines:  # (splitlines would break texts at U+2028, too)
        rows = [json.loads(line) for line in lines]
    return measure(answered(row, text) for row in rows for text in row["responses"])


def truths_of(file: Path) -> list[Tiers]:
    return [true_ranking(row) for row in read_table(file, columns=["reward_model"]).to_pylist()]


def constants(train: Sequence[Tiers], test: Sequence[Tiers]) -> dict[str, Metrics]:
    """Baselines that ignore the input. The random order is the mean over all orders without ties."""
    sizes = {len(letters_of(truth)) for truth in [*train, *test]}
    rankings = {
        size: list({rank(dict(zip(LETTERS, places, strict=False))): 0 for places in product(range(size), repeat=size)})
        for size in sizes
    }
    orders = {size: [one for one in rankings[size] if len(one) == size] for size in sizes}
    orders = {size: some * (max(map(len, orders.values())) // len(some)) for size, some in orders.items()}  # each group counts once
    best = {
        size: max(rankings[size], key=lambda one: sum(pairwise_share(one, t) for t in train if letters_of(t) == letters_of(one)))
        for size in sizes
    }
    print("the best constant answers on train:", "; ".join(map(write_ranking, best.values())))
    return {
        "best constant answer, chosen on train": measure((best[len(letters_of(truth))], truth) for truth in test),
        "all tied": measure(((letters_of(truth),), truth) for truth in test),
        "a random order without ties": measure((one, truth) for truth in test for one in orders[len(letters_of(truth))]),
    }


def print_constants(data: Path) -> None:
    """Rewards of three constant answers, over all permutations of the mini recipe's groups of four; and of all tens."""
    train, test = (read_table(data / f"mt_ranking_ende_{part}.parquet").to_pylist() for part in ("train", "test"))
    short = [row["scores"] for row in train if len(row["src_text"] + "".join(row["mt_texts"])) <= int(MINI_ROWS[1])]
    fours = [scores for scores in short if len(scores) == 4]
    print("| the same answer to every question | `format: ranking` | `ranking_score` |\n| --- | --- | --- |")
    for answer in ((10, 10, 10, 10), (10, 10, 10, 9), (10, 9, 8, 7)):
        tiers = rank(dict(zip(LETTERS, answer, strict=False)))
        shares, parts = [], []
        for truth in (order for scores in fours for order in permutations(scores)):
            shares.append(pairwise_share(tiers, rank(dict(zip(LETTERS, truth, strict=False)))))
            missed = [abs((truth[i] - truth[j]) - (answer[i] - answer[j])) for i, j in combinations(range(4), 2)]
            parts.append(statistics.fmean(SCORE_PART.get(off, 0.0) for off in missed))
        share = statistics.fmean(shares)
        print(f"| {write_ranking(tiers)}; {', '.join(map(str, answer))} | {share:.3f} | {share + statistics.fmean(parts):.3f} |")

    pairs = [(row["src_text"], *pair) for row in test for pair in zip(row["mt_texts"], row["scores"], strict=True)]
    shown = [score for text, candidate, score in pairs if len(text) + len(candidate) <= ONE_ROW]
    print(f"\n10 to each of {len(shown)} candidates of the test groups ({shown.count(10) / len(shown):.0%} are tens):")
    print(f"pointwise_score {statistics.fmean(REWARD.get(10 - score, 0.0) for score in shown):.3f}", end=", ")
    print(f"grade {statistics.fmean((1 - (10 - score) / 10) ** 2 for score in shown):.3f}")


# Report --------------------------------------------------------------------------------------------------------------


def curve(folder: Path) -> dict[int, Metrics]:
    """By step of RL; step 0 is the SFT model."""
    return {int(file.stem.removeprefix("val_")): of_samples(file) for file in sorted((folder / "rl/samples").glob("val_*.parquet"))}


def report(out: Path, seeds: Sequence[int], plot: Path | None) -> None:
    curves = [curve(out / f"seed-{seed}") for seed in seeds]
    ends = {seed: max(found, default=0) for seed, found in zip(seeds, curves, strict=True)}
    if len(set(ends.values())) > 1 or not min(ends.values()):
        ends_by_seed = ", ".join(f"seed {seed} at {end}" for seed, end in ends.items())
        sys.exit(f"{out}: not all seeds have reached the same RL step: {ends_by_seed} (select seeds with --seeds)")
    fixed = constants(truths_of(out / "data/train.parquet"), truths_of(out / "data/val.parquet"))
    stages = {
        "untrained": [of_lines(out / f"seed-{seed}/untrained.jsonl") for seed in seeds],
        "after SFT": [curve[0] for curve in curves],
        "after RL": [curve[max(curve)] for curve in curves],
    }
    for stage in ("sft", "rl"):
        files = [out / f"seed-{seed}/{stage}_warm.jsonl" for seed in seeds]
        if all(file.exists() for file in files):
            stages[f"after {stage.upper()}, at temperature 1"] = [of_lines(file) for file in files]
    print(f"\n{len(truths_of(out / 'data/val.parquet'))} held-out groups, seeds {', '.join(map(str, seeds))}\n")
    print("| | share | by seed | differing | by seed | readable | differing, of readable ones | commonest |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, one in fixed.items():
        print(f"| {name} | {one.share:.3f} | | {one.differing:.3f} | | 1 | {one.differing:.3f} | |")
    for name, some in stages.items():
        columns = [[getattr(one, column.name) for one in some] for column in fields(Metrics)]
        means = [spread(values) if all(one.readable for one in some) or i < 3 else "" for i, values in enumerate(columns)]
        share, differing = (" / ".join(f"{value:.3f}" for value in values) for values in columns[:2])
        print(f"| {name} | {means[0]} | {share} | {means[1]} | {differing} | {' | '.join(means[2:])} |")
    if plot is not None:
        draw(curves, fixed, plot)


def spread(values: list[float]) -> str:
    return f"{statistics.fmean(values):.3f}" + (f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else "")


def draw(curves: list[dict[int, Metrics]], fixed: dict[str, Metrics], plot: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.6), layout="constrained")
    panels = {
        "share": "pairs with the true relation", "differing": "pairs that differ, in the right order",
        "readable": "readable answers",
    }  # fmt: skip
    for axes, (what, title) in zip(figure.subplots(1, len(panels), sharex=True), panels.items(), strict=True):
        for one in curves:
            axes.plot(list(one), [getattr(value, what) for value in one.values()], color="tab:blue", alpha=0.35, linewidth=1)
        steps = sorted(set.intersection(*map(set, curves)))
        means = [statistics.fmean(getattr(one[step], what) for one in curves) for step in steps]
        axes.plot(steps, means, color="tab:blue", linewidth=2, label="the model")
        for (name, value), line in zip(fixed.items(), ("--", ":", "-."), strict=True):
            if what != "readable":
                axes.axhline(getattr(value, what), color="grey", linestyle=line, linewidth=1, label=name)
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize=8)
    figure.supxlabel("step of RL (0: after SFT)")
    figure.supylabel("on held-out groups")
    figure.savefig(plot, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("PLAUDIT_DATA", REPOSITORY.parent / "shared/data")))
    parser.add_argument(
        "--model", type=Path, help="a pretrained model's folder (plaudit prepare smollm2); default: a small new one"
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--jobs", type=int, default=1, choices=range(1, 17), metavar="N",
                        help="seeds to run in parallel; a GPU has room for several small models")  # fmt: skip
    parser.add_argument("--sft", nargs="*", default=[], metavar="A.B=C", help="further SFT overrides")
    parser.add_argument("--rl", nargs="*", default=[], metavar="A.B=C", help="further RL overrides")
    parser.add_argument("--report", action="store_true", help="only print the table of existing runs")
    parser.add_argument("--constants", action="store_true", help="print the rewards of constant answers, by format")
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    seeds = [int(seed) for seed in args.seeds.split(",")]
    if args.constants:
        print_constants(args.data)
        return
    if args.out is None:
        parser.error("--out is required: the folder for the runs")
    if not args.report:
        for part in ("train", "test"):
            if not (file := args.data / f"mt_ranking_ende_{part}.parquet").exists():
                parser.error(f"--data: {file} does not exist")
        sft, rl = (PRETRAINED_SFT, PRETRAINED_RL) if args.model else ([], [])
        bench = Bench(args.out.resolve(), args.data, args.model, args.device, [*sft, *args.sft], [*rl, *args.rl])
        bench.rows()
        with ThreadPoolExecutor(args.jobs) as pool:
            for line in pool.map(bench.seed, seeds):
                print(line, flush=True)
    report(args.out, seeds, args.plot)


if __name__ == "__main__":
    main()
