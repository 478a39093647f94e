"""Whole training steps on one GPU, next to TRL with vLLM: seconds by phase, memory, tokens/s and model FLOPs.

    python bench/gpu_step.py                                            # GRPO, SFT and DPO steps of 0.5B and 1.5B, full training
    python bench/gpu_step.py --sections grpo --sizes 0.5B,1.5B,7B --lora --no-full
    python bench/gpu_step.py --sections long --sizes 1.5B --systems plaudit --set train.tokens_per_micro_batch=32768
    python bench/gpu_step.py --sections grpo --sizes 0.5B --systems plaudit --profile     # and where the time goes, by kernel
    python bench/gpu_step.py --table runs/gpu_step/steps.jsonl          # the table again, without a GPU
    python bench/gpu_step.py --device cpu --tiny --out /tmp/steps       # smoke test; its numbers mean nothing

Random weights of Qwen2.5 shapes in bf16, one update a step, the same tokens for every system (counted by each, and compared).

    grpo        64 prompts of 256 tokens × 8 samples × 512 new tokens, all of full length; random rewards, no KL
    long        32 prompts of 1,600 tokens × 8 given responses of 512 tokens: the update alone
    sft         32 rows of 2,048 tokens each: no padding anywhere
    sft-mixed   64 rows of 64 to 2,048 tokens (log-uniform): plaudit packs; TRL pads rows sorted by length, or lays them end to end
    dpo         32 pairs, prompts of 256 tokens and answers of 512; the reference's log-probs are computed before the first step

    plaudit          as its commands train: fp32 master weights and moments, run.deterministic; 7B full: `optim.placement:
                     offload`. --set changes the recipe (and makes a row of its own).
    trl              TRL's trainers with bf16 weights and moments (--trl-dtype float32: its default, slower), fused AdamW, Liger's
                     kernels, vLLM in the trainer's process on as much memory as it needs; the rows per pass, and whether to
                     checkpoint, by a search. --trl-set changes the trainer's arguments. These options make rows of their own.
    trl-uncorrected  GRPO without TRL's correction for vLLM's log-probs: one forward pass less
    trl-sleep        GRPO with vLLM asleep while training

A step of TRL's GRPO is without the time it takes to tokenise its prompts, to decode its responses and to make given ones: plaudit
gets tokens here. That time has a column of its own, "text", and is in no other, nor in tokens/s.

Each run of plaudit is a process; TRL's runs that sample the same model share one, so that vLLM starts once, and so do those that
do not sample. Each process has a time limit (--timeout), and nothing starts after --within seconds. Each step is appended to
OUT/steps.jsonl when it ends, so that an interrupted run loses nothing; output is in one file of OUT/logs. After a failure the runs
that are left get a new process, and one that ran out of memory tries again with half of the rows per pass (TRL) or checkpointing
(plaudit). The exit code is 1 if any run was not measured.
"""

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu_rollout import VLLM_ENVIRONMENT, follow
from rollout_cpu import VLLM_EAGER
from rollout_work import FULL, SHAPES, TINY, config_of
from step_work import PEAK_FLOPS, SECTIONS, TINY_SECTIONS, append, as_setting, lengths_of, update_flops

REPOSITORY = Path(__file__).resolve().parent.parent
SYSTEMS = ("plaudit", "trl", "trl-uncorrected", "trl-sleep")
SAMPLING_ONLY = ("trl-uncorrected", "trl-sleep")
OUT_OF_MEMORY, SMALLEST_BATCH = "out of memory", 4
SHORTEST_S, SHORTEST_WITH_VLLM_S = 60, 150  # that a process is started for
PHASES = {"step_s": "s a step", "text_s": "text, not in it", "sample_s": "sampling", "score_s": "scoring",
          "logprobs_s": "old log-probs", "update_s": "update", "optimiser_s": "of it optimiser",
          "sync_s": "new weights"}  # fmt: skip


# Processes ------------------------------------------------------------------------------------------------------------


def jobs(args: argparse.Namespace) -> list[dict[str, Any]]:
    kinds = ([] if args.no_full else ["full"]) + (["lora"] if args.lora else [])
    return [
        {"section": section, "size": size, "kind": kind, "system": system}
        for section in args.sections
        for size in args.sizes
        for kind in kinds
        for system in args.systems
        if system not in SAMPLING_ONLY or (SECTIONS[section].stage == "rl" and SECTIONS[section].samples)
    ]


def processes(args: argparse.Namespace) -> list[list[dict[str, Any]]]:
    """The jobs of each process."""
    shared: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for job in jobs(args):
        key: tuple[str, ...] = ("trl",)
        if job["system"] == "plaudit":
            key = tuple(job.values())
        elif starts_vllm(job):
            key = (job["section"], job["size"], "sleeps" if job["system"] == "trl-sleep" else "awake")
        shared.setdefault(key, []).append(job)
    return list(shared.values())


def starts_vllm(job: dict[str, Any]) -> bool:
    section = SECTIONS[job["section"]]
    return job["system"] != "plaudit" and section.stage == "rl" and section.samples


def environment_of(args: argparse.Namespace, system: str) -> dict[str, str]:
    environment = {**os.environ, **VLLM_ENVIRONMENT, **(VLLM_EAGER if args.device == "cpu" else {}), "PYTHONUNBUFFERED": "1"}
    paths = [str(REPOSITORY), environment.get("PYTHONPATH", "")]
    if system != "plaudit" and args.trl_path:
        paths.insert(0, str(args.trl_path))
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    environment.setdefault("VLLM_LOGGING_LEVEL", "INFO")  # TRL's default is ERROR
    if system != "trl-sleep":  # vLLM cannot sleep in expandable segments
        environment.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    return environment


def measure(args: argparse.Namespace, together: list[dict[str, Any]], ends: float) -> None:
    """Run the jobs of a process; those after a failure in another one, and what ran out of memory with smaller settings."""
    waiting = [{**job, "checkpoint": False, "max_batch": 1 << 30} for job in together]
    shortest_s = SHORTEST_WITH_VLLM_S if starts_vllm(together[0]) else SHORTEST_S
    while waiting:
        if (left := ends - time.monotonic()) < shortest_s:
            print(f"no time is left for {', '.join(map(name_of, waiting))}", flush=True)
            return
        waiting = [again for job in attempt(args, waiting, min(args.timeout, left)) if (again := smaller(args, job))]


def smaller(args: argparse.Namespace, job: dict[str, Any]) -> dict[str, Any] | None:
    """The job as it is if it never began; if memory ran out, with smaller settings, as long as there are any."""
    lines = read(args.results)[job["run"]]
    if not any(line.get("error") == OUT_OF_MEMORY for line in lines):
        return job
    if job["system"] == "plaudit" and not job["checkpoint"]:
        return job | {"checkpoint": True}
    if job["system"] != "plaudit" and args.trl_batch is None and (batch := chosen_batch(lines) or 0) > SMALLEST_BATCH:
        return job | {"max_batch": batch // 2}
    return None


def name_of(job: dict[str, Any]) -> str:
    return "/".join(job[name] for name in ("section", "size", "kind", "system"))


def chosen_batch(lines: list[dict]) -> int | None:
    """Rows per pass of a run of TRL."""
    return next((line["rows"] for line in lines if line["line"] == "chosen"), None)


def overrides_of(job: dict[str, Any]) -> list[str]:
    """What tells the job from others of its section, size, kind and system."""
    if job["system"] == "plaudit":
        return job["set"]
    dtype = [] if job["trl_dtype"] == "bfloat16" else [f"trl-dtype={job['trl_dtype']}"]
    return [*job["trl_set"], *dtype, *([] if job["batch"] is None else [f"trl-batch={job['batch']}"])]


def attempt(args: argparse.Namespace, together: list[dict[str, Any]], timeout_s: float) -> list[dict[str, Any]]:
    """One process; returns the jobs that it did not get to, and those that ran out of memory."""
    system, began, started = together[0]["system"], time.time(), time.strftime("%Y-%m-%d %H:%M:%S")
    together = [
        {
            **job, "results": str(args.results), "began": began, "device": args.device, "tiny": args.tiny, "steps": args.steps,
            "warm_up": args.warm_up, "set": args.set, "trl_set": list(args.trl_set), "trl_dtype": args.trl_dtype,
            "batch": args.trl_batch, "flex": args.flex, "profile": args.profile,
        }
        for job in together
    ]  # fmt: skip
    for job in together:
        job["run"] = f"{'/'.join([name_of(job), *overrides_of(job)])} {started}"
        append(args.results, {**job, "line": "job"})
        print(f"{job['run']}{' with checkpointing' if job['checkpoint'] else ''}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "jobs.json"
        file.write_text(json.dumps(together))
        side = "plaudit" if system == "plaudit" else "trl"
        python = sys.executable if side == "plaudit" else str(args.trl_python)
        command = [python, str(Path(__file__).with_name(f"step_{side}.py")), str(file)]
        last = together[-1]["run"]
        failure = follow(command, environment_of(args, system), args.log, timeout_s, lambda: ended(args.results, last))
    left, cause = [], failure or "the process ended too early"
    none_began = not any(has(read(args.results)[job["run"]], "began") for job in together)
    for job in together:
        lines = read(args.results)[job["run"]]
        error = next((line["error"] for line in lines if "error" in line), None)
        if error is None and not has(lines, "end") and (none_began or has(lines, "began")):  # it ended the process
            append(args.results, {"run": job["run"], "line": "failed", "error": cause})
            error = cause
        if error is not None:
            print(f"  {name_of(job)}: FAILED: {error}", flush=True)
        elif has(lines, "end"):
            print(f"  {name_of(job)}: {line_of(lines)}", flush=True)
        if error == OUT_OF_MEMORY or (error is None and not has(lines, "end")):
            left.append(job)
    print(f"  {time.time() - began:.0f} s", flush=True)
    return left


def has(lines: list[dict], kind: str) -> bool:
    return any(line["line"] == kind for line in lines)


def ended(results: Path, run: str) -> bool:
    with results.open("rb") as file:
        file.seek(max(0, results.stat().st_size - 4096))
        last = file.read().decode(errors="replace").splitlines()[-1:]
    return bool(last) and f'"run": {json.dumps(run)}, "line": "end"' in last[0]


# Tables ---------------------------------------------------------------------------------------------------------------


def read(results: Path) -> dict[str, list[dict]]:
    """Lines by run, in order; a line that was cut off is left out."""
    runs: dict[str, list[dict]] = {}
    for text in results.read_text().splitlines():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        runs.setdefault(line["run"], []).append(line)
    return runs


def latest(runs: dict[str, list[dict]]) -> list[list[dict]]:
    """The last run of each case that has any step, else its last one."""
    cases: dict[str, list[dict]] = {}
    for run, lines in runs.items():
        case = run.rsplit(" ", 2)[0]
        if any(line["line"] == "step" for line in lines) or not any(line["line"] == "step" for line in cases.get(case, ())):
            cases[case] = lines
    return list(cases.values())


def measured(lines: list[dict]) -> list[dict]:
    return [line for line in lines if line["line"] == "step"]


def line_of(lines: list[dict]) -> str:
    steps = measured(lines)
    return f"{spread([step['step_s'] for step in steps])} s a step" if steps else "no step"


def spread(values: list[float]) -> str:
    digits = 2 if min(values) >= 0.1 else 3
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def table(results: Path) -> str:
    rows, notes, profiles, counted = [], [], [], {}
    for lines in latest(read(results)):
        job, steps = lines[0], measured(lines)
        case = [job["section"], job["size"], "LoRA" if job["kind"] == "lora" else "full"]
        name = [*case, " ".join([job["system"], *overrides_of(job)])]
        error = next((line["error"] for line in lines if "error" in line), None)
        settings = next((line for line in lines if line["line"] == "settings"), None)
        if settings is not None:
            notes.append(
                f"{' '.join(name)}: {settings['about']}; {shown(settings['settings'])}; {settings['start_s']:.0f} s to start"
            )
        if not steps:
            rows.append([*name, (error or "no step")[:150], *[""] * (len(HEADER) - 5)])
            continue
        peak = next((line["memory"] for line in lines if line["line"] == "end"), {})
        times = [[step[phase] for step in steps if phase in step] for phase in PHASES]
        cells = [spread(seconds) if any(seconds) else "" for seconds in times]
        gb = [f"{peak[name]:.1f}" if name in peak else "" for name in ("allocated", "reserved", "driver")]
        if peak.get("retries"):
            gb[1] += f", {peak['retries']} retries"
        rows.append([*name, *cells, *rates(job, steps), *gb, f"{len(steps)}{': ' + error[:150] if error else ''}"])
        if SECTIONS[job["section"]].samples and any("mismatch" in step for step in steps):
            tokens = sum(int(step["targets"]) for step in steps)
            mean = sum(step["mismatch"] * step["targets"] for step in steps) / tokens
            notes.append(f"{' '.join(name)}: mismatch {mean:.2e}, the mean of {tokens:,} tokens")
        for phase, found in next((line["phases"] for line in lines if line["line"] == "profile"), {}).items():
            profiles += kernels(" ".join(name), phase, found)
        counted.setdefault("/".join(case), {})[name[-1]] = steps
    lines = [f"| {' | '.join(row)} |" for row in [HEADER, ["---"] * len(HEADER), *rows]]
    return "\n".join([*lines, "", *map(same_work, counted, counted.values()), "", *notes, *profiles])


def kernels(name: str, phase: str, found: dict) -> list[str]:
    """The kernels of a profiled phase that take the longest."""
    total, least = sum(seconds for _, (_, seconds) in found["kernels"]), 0.005
    return [
        f"\n{name}, {phase}: {found['seconds']:.3f} s with the profiler, {total:.3f} s in kernels",
        *(
            f"{seconds:9.4f} s {100 * seconds / (total or 1.0):5.1f} % {count:7,} × {kernel[:150]}"
            for kernel, (count, seconds) in found["kernels"]
            if seconds >= least * total
        ),
    ]


HEADER = ["section", "size", "kind", "system", *PHASES.values(), "tokens/s", "TFLOP/s of the update", "of the peak",
          "GB allocated", "GB reserved", "GB in use at the end", "steps"]  # fmt: skip


def rates(job: dict, steps: list[dict]) -> list[str]:
    """Tokens per second of the whole step, and model FLOPs per second of the update."""
    work = (TINY_SECTIONS if job["tiny"] else SECTIONS)[job["section"]]
    config = config_of(job["size"], TINY if job["tiny"] else FULL)
    tokens = statistics.median(step["tokens"] / step["step_s"] for step in steps)
    flops = statistics.median(
        update_flops(config, *lengths_of(work, step["number"]), lora=job["kind"] == "lora") / step["update_s"] for step in steps
    )
    return [f"{tokens:,.0f}", f"{flops / 1e12:.0f}", f"{100 * flops / PEAK_FLOPS:.0f} %"]


def same_work(case: str, systems: dict[str, list[dict]]) -> str:
    """Whether all systems trained on the same number of tokens in every step that all have."""
    counts = [{step["number"]: (int(step["tokens"]), int(step["targets"])) for step in steps} for steps in systems.values()]
    shared = sorted(set.intersection(*map(set, counts)))
    if not shared:
        return f"{case}: no step that all systems have"
    same = all(count[number] == counts[0][number] for count in counts for number in shared)
    tokens, targets = counts[0][shared[0]]
    computed = {name: [step.get("padded", step["tokens"]) / step["tokens"] for step in steps] for name, steps in systems.items()}
    padded = ", ".join(f"{name} {statistics.fmean(ratios):.3f}" for name, ratios in computed.items())
    verdict = "the same tokens" if same else "NOT THE SAME TOKENS"
    return f"{case}: {verdict}: {tokens:,} in step {shared[0]}, {targets:,} of them in the loss; computed, with padding: {padded}"


def shown(settings: dict) -> str:
    return ", ".join(f"{name}: {value}" for name, value in settings.items() if name != "searched")


# Command line ---------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", type=names_of(SECTIONS), default=["grpo", "sft", "dpo"], help=", ".join(SECTIONS))
    parser.add_argument("--sizes", type=names_of(SHAPES), default=["0.5B", "1.5B"], help=", ".join(SHAPES))
    parser.add_argument("--systems", type=names_of(SYSTEMS), default=list(SYSTEMS[:3]), help=", ".join(SYSTEMS))
    parser.add_argument("--lora", action="store_true", help="also LoRA of rank 16 on all linear layers")
    parser.add_argument("--no-full", action="store_true", help="no full training")
    parser.add_argument("--steps", type=int, default=5, help="measured steps (default 5)")
    parser.add_argument("--warm-up", type=int, default=2, help="steps before these (default 2)")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.NAME=VALUE", help="override of plaudit's recipe")
    parser.add_argument("--trl-set", action="append", default=[], metavar="NAME=VALUE", help="argument of TRL's trainer")
    parser.add_argument("--trl-dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of TRL's weights")
    parser.add_argument("--trl-batch", type=int, metavar="ROWS", help="rows per pass of TRL, instead of a search")
    parser.add_argument("--profile", action="store_true", help="one more step of plaudit with a profiler: seconds of each kernel")
    parser.add_argument("--flex", action="store_true", help="sft-mixed: TRL also with flex_attention, which compiles")
    parser.add_argument("--trl-python", type=Path, default=Path(sys.executable), help="the Python that has TRL and vLLM")
    parser.add_argument("--trl-path", type=Path, help="…/site-packages: a folder of unpacked wheels for TRL's processes")
    parser.add_argument("--timeout", type=float, default=550.0, help="seconds for each process (default 550)")
    parser.add_argument("--within", type=float, default=float("inf"), metavar="SECONDS", help="for all processes together")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="a smoke test with tiny models")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_step"))
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the table of this file and end")
    args = parser.parse_args()
    if args.table is not None:
        print(table(args.table))
        return
    check_trl_path(parser, args.trl_path)
    for one in args.trl_set:
        try:
            as_setting(one)
        except ValueError as error:
            parser.error(f"--trl-set: {error}")
    args.results = args.out / "steps.jsonl"
    args.results.parent.mkdir(parents=True, exist_ok=True)
    args.log = args.out / "logs" / time.strftime("%Y%m%d-%H%M%S.log")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that child processes are ended too
    began, ends = time.time(), time.monotonic() + args.within
    if not (planned := processes(args)):
        parser.error("nothing to measure: --no-full needs --lora")
    for together in planned:
        measure(args, together, ends)
    print(table(args.results))
    runs = [lines for lines in read(args.results).values() if lines[0].get("began", 0.0) >= began and has(lines, "end")]
    measured_now = {name_of(lines[0]) for lines in runs}
    if missing := [name for together in planned for job in together if (name := name_of(job)) not in measured_now]:
        sys.exit(f"not measured: {', '.join(missing)}")


def check_trl_path(parser: argparse.ArgumentParser, path: Path | None) -> None:
    if path is not None and path.name != "site-packages":
        # datasets names its caches by pickling functions by reference, and those of modules that look like the user's by value.
        parser.error(f"--trl-path: rename {path} to …/site-packages: in a folder of another name, datasets cannot be made")
    if path is not None and not path.is_dir():
        parser.error(f"--trl-path: {path} is no folder")


def names_of(known: Any):
    def names(text: str) -> list[str]:
        found = text.split(",")
        for name in found:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        return found

    return names


if __name__ == "__main__":
    main()
