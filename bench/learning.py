"""Validation reward against training time: plaudit next to TRL, the same model, rows, rewards and hyper-parameters.

    plaudit prepare smollm2 --out models/smollm2
    python bench/learning.py --model models/smollm2               # SmolLM2-135M on arithmetic, three seeds each
    python bench/learning.py                                      # the demo's model, made here, on sorting letters
    python bench/learning.py --device cpu                         # the same on a CPU, where TRL samples with transformers' generate
    python bench/learning.py --draw runs/learning/learning.jsonl  # table and picture again
    python bench/learning.py --device cpu --tiny --out /tmp/l     # smoke test; its numbers mean nothing

GRPO: the loss averaged over all tokens of a step, one update a step, advantages divided by the group's standard deviation, no KL,
constant learning rate, AdamW without weight decay, gradients scaled to a norm of 1. On a GPU plaudit has bf16 weights with fp32
masters, TRL fp32 weights with bf16 autocast, its default; on a CPU both have fp32 weights. TRL also corrects for vLLM's log-probs,
its default. Each system orders the prompts by its own seed. Validation: the same rows, four samples each at temperature 1, and the
same rewards (TRL calls plaudit's).

    plaudit         the command, as it is
    trl             TRL with vLLM in its process; on a CPU only a smoke test, since vLLM keeps its first weights there
    trl-generate    TRL with transformers' generate

Time is that of training steps, sampling and handing over weights included, validation and start-up excluded; the table has these,
too. TRL's runs end after --steps, or with the first step that ends after --seconds; plaudit's always make --steps steps, and their
validations after --seconds are left out. OUT/learning.jsonl gets TRL's validations as they come, and plaudit's when a run has ended
or failed. The table has the seconds of training until each of --goals was first reached, on the line between the validations before
and after, and the usual seconds of a step: the median over all pairs of consecutive validations. The picture: means over the seeds,
and the range between the lowest and the highest, up to the time when the first of them ended. Seeds that failed are in no mean.
"""

import argparse
import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from gpu_rollout import follow
from gpu_step import REPOSITORY, SHORTEST_S, SHORTEST_WITH_VLLM_S, check_trl_path, environment_of
from step_work import append

sys.path.insert(0, str(REPOSITORY))  # plaudit may be a checkout that nobody installed
SYSTEMS = {"plaudit": "plaudit", "trl": "TRL with vLLM", "trl-generate": "TRL with generate"}
COLOURS = {"plaudit": "tab:blue", "trl": "tab:orange", "trl-generate": "tab:red"}
DEFAULT_SYSTEMS = {"cuda": ("plaudit", "trl"), "cpu": ("plaudit", "trl-generate")}
TASKS: dict[str, dict[str, Any]] = {
    "arithmetic": {
        "rewards": [{"kind": "function", "path": str(REPOSITORY / "recipes/smollm2/reward.py")}],
        "prompts": 32, "n": 16, "new_tokens": 24, "lr": 1e-5, "val_prompts": 250,
    },
    "sorting": {"rewards": [{"kind": "exact"}], "prompts": 32, "n": 8, "new_tokens": 16, "lr": 3e-4, "val_prompts": 200},
}  # fmt: skip


# Model and rows -------------------------------------------------------------------------------------------------------


def prepare(args: argparse.Namespace) -> dict[str, Any]:
    """The task with its files: rows, rewards, and the model that every run starts from."""
    name, out = "arithmetic" if args.model else "sorting", args.out
    task = {**TASKS[name], "name": name, "val_n": 4, "steps": args.steps, "every": args.validate_every, "seconds": args.seconds}
    if args.tiny:
        task |= {"prompts": 4, "n": 4, "val_prompts": 8, "val_n": 2}
    if args.model:
        from plaudit.prepare.arithmetic import make_arithmetic

        if not (out / "data").exists():
            make_arithmetic(out / "data", train=4000, val=task["val_prompts"])
        task |= {"model": str(args.model), "train": str(out / "data/train.parquet"), "val": str(out / "data/val.parquet")}
    else:
        task |= {"model": str(cold_start(args)), "train": str(out / "data/rl.jsonl"), "val": str(out / "data/val.jsonl")}
    (out / "rewards.yaml").write_text(yaml.safe_dump({"rewards": task["rewards"]}))
    return task


def cold_start(args: argparse.Namespace) -> Path:
    """The demo's model, wider so that vLLM has a kernel for its heads (of 64), after SFT on careless demonstrations."""
    from plaudit.prepare.sorting import make_sorting
    from plaudit.prepare.tiny_model import make_tiny_model

    out, model = args.out, args.out / "sft/model"
    if not (out / "data/val.jsonl").exists():
        make_sorting(out / "data", demonstrations=2000, prompts=4000, val=200, letters=(3, 6), careless=0.5, seed=0)
    if not (out / "base").exists():
        make_tiny_model([out / "data/sft.jsonl"], out / "base", hidden_size=256, vocabulary=300)
    if not model.exists():
        settings = [f"model.path={out / 'base'}", f"data.train={out / 'data/sft.jsonl'}", f"run.dir={out / 'sft'}"]
        settings += [f"run.device={args.device}", "model.dtype=float32", *(["run.max_steps=5"] if args.tiny else [])]
        command = [sys.executable, "-m", "plaudit", "sft", str(REPOSITORY / "recipes/demo/sft.yaml"), *settings]
        environment = environment_of(args, "plaudit")
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            sys.exit(f"the cold start failed:\n{done.stdout[-2000:]}")
    return model


def follow_within(
    args: argparse.Namespace, system: str, command: list[str], log: str, timeout_s: float, look: Callable[[], bool]
) -> str | None:  # fmt: skip
    """As `follow`, as long as there is time for this system."""
    left = args.system_ends - time.monotonic()
    if left < (SHORTEST_WITH_VLLM_S if system == "trl" else SHORTEST_S):
        return "no time is left"
    return follow(command, environment_of(args, system), args.out / "logs" / log, min(timeout_s, left), look)


# The two systems ------------------------------------------------------------------------------------------------------


def learn_with_plaudit(args: argparse.Namespace, task: dict[str, Any], seed: int) -> None:
    """One run of the command; its metrics have the time of every step."""
    began, run = time.time(), args.out / f"plaudit_{seed}_{time.strftime('%H%M%S')}"
    recipe = {
        "stage": "rl",
        "seed": seed,
        "model": {"path": task["model"], "dtype": "float32" if args.device == "cpu" else "bfloat16"},
        "data": {"train": task["train"], "val": task["val"]},
        "rollout": {"n": task["n"], "max_new_tokens": task["new_tokens"]},
        "validation": {"n": task["val_n"], "temperature": 1.0, "max_prompts": task["val_prompts"]},
        "rewards": task["rewards"],
        "train": {"prompts_per_step": task["prompts"]},
        "optim": {"lr": task["lr"]},
        "run": {
            "dir": str(run), "epochs": 100, "max_steps": task["steps"], "validate_every": task["every"], "device": args.device,
            "save_every_minutes": None, "keep_best": False,
        },
    }  # fmt: skip
    file = args.out / f"plaudit_{seed}.yaml"
    file.write_text(yaml.safe_dump(recipe))
    command = [sys.executable, "-m", "plaudit", "rl", str(file)]
    failure = follow_within(args, "plaudit", command, f"plaudit_{seed}.log", args.timeout, lambda: False)
    trained = 0.0
    for row in metrics_of(run):
        if row["step"] > 0:
            trained += row["time/step_s"] - row.get("time/validate_s", 0.0)
        if "val/reward" in row and trained <= task["seconds"]:
            found = {"step": int(row["step"]), "seconds": trained, "reward": row["val/reward"]}
            append(args.results, {"system": "plaudit", "seed": seed, "began": began, **found})
    found = {"error": failure} if failure else {"whole_s": time.time() - began, "trained_s": trained}
    append(args.results, {"system": "plaudit", "seed": seed, "began": began, **found})
    if failure:
        print(f"  FAILED: {failure}", flush=True)


def metrics_of(run: Path) -> Iterator[dict[str, Any]]:
    """The rows that a run has written by now; of one that failed, the last may be cut off."""
    file = run / "metrics.jsonl"
    for text in file.read_text().splitlines() if file.exists() else []:
        with suppress(json.JSONDecodeError):
            yield json.loads(text)


def learn_with_trl(args: argparse.Namespace, task: dict[str, Any], system: str) -> None:
    """All seeds in one process, so that vLLM starts once; it has as much time as they would have one by one."""
    job = {**task, "system": system, "seeds": args.seeds, "results": str(args.results), "device": args.device, "began": time.time()}
    job |= {"rewards_file": str(args.out / "rewards.yaml"), "out": str(args.out / system)}
    file = args.out / f"{system}.json"
    file.write_text(json.dumps(job))
    command = [str(args.trl_python), str(Path(__file__).with_name("learning_trl.py")), str(file)]
    last = f'"system": "{system}", "seed": {args.seeds - 1}, "began": {json.dumps(job["began"])}, "whole_s"'
    timeout_s = args.timeout * args.seeds
    failure = follow_within(args, system, command, f"{system}.log", timeout_s, lambda: last in args.results.read_text()[-2000:])
    if failure:
        of_job = [line for line in lines_of(args.results) if line["began"] == job["began"]]
        ended = {line["seed"] for line in of_job if "whole_s" in line or "error" in line}
        for seed in range(args.seeds):
            if seed not in ended:
                append(args.results, {"system": system, "seed": seed, "began": job["began"], "error": failure})
        print(f"  FAILED: {failure}", flush=True)


# Table and picture ----------------------------------------------------------------------------------------------------


def lines_of(results: Path) -> list[dict]:
    return [json.loads(line) for line in results.read_text().splitlines()]


def read(results: Path) -> dict[str, dict[int, list[dict]]]:
    """Lines of the last run of each system and seed."""
    runs: dict[str, dict[int, list[dict]]] = {}
    for line in lines_of(results):
        seeds = runs.setdefault(line["system"], {})
        if line["seed"] not in seeds or line["began"] > seeds[line["seed"]][0]["began"]:
            seeds[line["seed"]] = []
        seeds[line["seed"]].append(line)
    return runs


def validations(lines: list[dict]) -> list[dict]:
    return [line for line in lines if "reward" in line]


def reward_at(lines: list[dict], seconds: float) -> float:
    """The validation reward at a time, on the straight line between the validations before and after."""
    curve = validations(lines)
    for earlier, later in pairwise(curve):
        if earlier["seconds"] <= seconds <= later["seconds"]:
            share = (seconds - earlier["seconds"]) / max(later["seconds"] - earlier["seconds"], 1e-9)
            return earlier["reward"] + share * (later["reward"] - earlier["reward"])
    return curve[-1]["reward"]


def seconds_until(lines: list[dict], goal: float) -> float | None:
    """When the validation reward first was `goal`, on the straight line between the validations before and after."""
    curve = validations(lines)
    if curve and curve[0]["reward"] >= goal:
        return curve[0]["seconds"]
    for earlier, later in pairwise(curve):
        if earlier["reward"] < goal <= later["reward"]:
            share = (goal - earlier["reward"]) / (later["reward"] - earlier["reward"])
            return earlier["seconds"] + share * (later["seconds"] - earlier["seconds"])
    return None


def usual_seconds(lines: list[dict]) -> float | None:
    """Of a step: the median over consecutive validations."""
    pairs = [(earlier, later) for earlier, later in pairwise(validations(lines)) if later["step"] > earlier["step"]]
    each = [(later["seconds"] - earlier["seconds"]) / (later["step"] - earlier["step"]) for earlier, later in pairs]
    return statistics.median(each) if each else None


def ended(lines: list[dict]) -> bool:
    return any("whole_s" in line for line in lines) and not any("error" in line for line in lines)


def of_seeds(count: int, of: int) -> str:
    return f"{count} seeds" if count == of else f"{count} of {of} seeds"


COLUMNS = ["system", "seed", "before", "after", "steps", "training, s", "s a step", "usual s a step"]
LAST_COLUMN = "start-up, validation, saving, s"


def table(runs: dict[str, dict[int, list[dict]]], goals: list[float]) -> str:
    until = [f"{'' if number else 's of training '}until {goal:g}" for number, goal in enumerate(goals)]
    rows = [[*COLUMNS, *until, LAST_COLUMN], ["---"] * (len(COLUMNS) + len(goals) + 1)]
    for system, seeds in runs.items():
        rows += [[SYSTEMS[system], str(seed), *cells_of(lines, goals)] for seed, lines in sorted(seeds.items())]
        averaged = [lines for lines in seeds.values() if ended(lines) and validations(lines)]
        if len(averaged) > 1:
            rows.append([f"**{SYSTEMS[system]}**", *means_of(averaged, len(seeds), goals)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def cells_of(lines: list[dict], goals: list[float]) -> list[str]:
    """Of one seed."""
    curve, whole = validations(lines), next((line for line in lines if "whole_s" in line), None)
    error = next((line["error"][:100] for line in lines if "error" in line), None)
    if not curve:
        return [error or "nothing", *[""] * (len(COLUMNS) - 3 + len(goals) + 1)]
    first, last, usual = curve[0], curve[-1], usual_seconds(lines)
    times = [seconds_until(lines, goal) for goal in goals]
    return [
        f"{first['reward']:.3f}", f"{last['reward']:.3f}", str(last["step"]), f"{last['seconds']:.1f}",
        f"{last['seconds'] / last['step']:.2f}" if last["step"] else "", "" if usual is None else f"{usual:.2f}",
        *("" if seconds is None else f"{seconds:.1f}" for seconds in times),
        error or ("not ended" if whole is None else f"{whole['whole_s'] - whole['trained_s']:.0f}"),
    ]  # fmt: skip


def means_of(averaged: list[list[dict]], seeds: int, goals: list[float]) -> list[str]:
    """Of the seeds that ended: for rewards the mean and the standard deviation, for seconds the mean (lowest–highest)."""
    before, after = ([validations(lines)[at]["reward"] for lines in averaged] for at in (0, -1))
    ends = [validations(lines)[-1] for lines in averaged]
    usual = [seconds for lines in averaged if (seconds := usual_seconds(lines)) is not None]
    cells = [f"mean of {of_seeds(len(averaged), seeds)}", f"{statistics.fmean(before):.3f}"]
    cells += [f"{statistics.fmean(after):.3f} ± {statistics.stdev(after):.3f}", "", spread([end["seconds"] for end in ends], 1)]
    cells += [spread([end["seconds"] / end["step"] for end in ends if end["step"]], 2), spread(usual, 2)]
    for goal in goals:
        times = [seconds for lines in averaged if (seconds := seconds_until(lines, goal)) is not None]
        missed = "" if not times or len(times) == len(averaged) else f", {len(times)} of {len(averaged)}"
        cells.append(spread(times, 1) + missed)
    return [*cells, ""]


def spread(values: list[float], digits: int) -> str:
    if not values:
        return ""
    return f"{statistics.fmean(values):.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def draw(runs: dict[str, dict[int, list[dict]]], file: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("\nno picture: matplotlib is not installed")
        return
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    for system, seeds in runs.items():
        curves = [lines for lines in seeds.values() if ended(lines) and len(validations(lines)) > 1]
        if not curves:
            continue
        end = min(validations(lines)[-1]["seconds"] for lines in curves)
        times = sorted({line["seconds"] for lines in curves for line in validations(lines) if line["seconds"] <= end})
        values = [[reward_at(lines, seconds) for lines in curves] for seconds in times]
        label, colour = f"{SYSTEMS[system]}, mean of {of_seeds(len(curves), len(seeds))}", COLOURS[system]
        axes.fill_between(times, [min(v) for v in values], [max(v) for v in values], color=colour, alpha=0.25, linewidth=0)
        axes.plot(times, [statistics.fmean(v) for v in values], color=colour, marker="o", markersize=3, label=label)
    axes.set(xlabel="seconds of training, sampling included", ylabel="validation reward")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower right")
    figure.savefig(file, dpi=110)
    print(f"\n{file}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a chat model's folder: arithmetic instead of sorting")
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), help="default: plaudit and trl, on a CPU trl-generate")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--validate-every", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=60.0, help="of training that count (default 60)")
    parser.add_argument("--timeout", type=float, default=480.0, help="seconds for each run, start-up included (default 480)")
    parser.add_argument(
        "--within",
        type=float,
        default=float("inf"),
        metavar="SECONDS",
        help="for all runs together; systems that are still to run get equal shares of what is left",
    )
    parser.add_argument(
        "--trl-python",
        type=Path,
        default=Path(sys.executable),
        help="the Python that has TRL and plaudit, and for the system trl vLLM",
    )
    parser.add_argument("--trl-path", type=Path, help="…/site-packages: a folder of unpacked wheels for TRL's process")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="a smoke test: few prompts, hardly any cold start")
    parser.add_argument("--out", type=Path, default=Path("runs/learning"))
    parser.add_argument(
        "--goals", type=rewards_in, default=[0.6, 0.7, 0.75], metavar="0.6,0.7,0.75", help="rewards: seconds until each is reached"
    )
    parser.add_argument("--draw", type=Path, metavar="FILE", help="table and picture of these results, and end")
    args = parser.parse_args()
    check_trl_path(parser, args.trl_path)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that child processes are ended too
    ends = time.monotonic() + args.within
    if args.draw is None:
        args.out = args.out.resolve()
        args.out.mkdir(parents=True, exist_ok=True)
        args.results = args.out / "learning.jsonl"
        args.results.touch()
        task = prepare(args)
        print({name: value for name, value in task.items() if name not in ("rewards",)}, flush=True)
        systems = args.systems or DEFAULT_SYSTEMS[args.device]
        for number, system in enumerate(systems):
            began, now = time.time(), time.monotonic()
            args.system_ends = now + (ends - now) / (len(systems) - number)
            if system != "plaudit":
                learn_with_trl(args, task, system)
            else:
                for seed in range(args.seeds):
                    learn_with_plaudit(args, task, seed)
            print(f"{SYSTEMS[system]}: {time.time() - began:.0f} s for all seeds, start-up included", flush=True)
    runs = read(args.draw or args.results)
    print(table(runs, args.goals))
    draw(runs, (args.draw or args.results).with_suffix(".png"))
    if args.draw is None:
        wanted = [(system, seed) for system in systems for seed in range(args.seeds)]
        missing = [f"{system} {seed}" for system, seed in wanted if not ended(runs.get(system, {}).get(seed, []))]
        if missing:
            sys.exit(f"not measured, by seed: {', '.join(missing)}")


def rewards_in(text: str) -> list[float]:
    try:
        return [float(reward) for reward in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} should be rewards with commas between") from None


if __name__ == "__main__":
    main()
