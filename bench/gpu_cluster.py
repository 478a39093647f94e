"""What a process group costs, and that it changes no number: GRPO on one GPU, alone and by processes that torchrun starts.

    python bench/gpu_cluster.py                          # 0.5B; about five minutes on an H200
    python bench/gpu_cluster.py --device cpu --size 135M --prompts 8 --tokens 24       # gloo only

Random weights of Qwen2.5's shape; responses never end before their limit, so every step has the same work. Rows:

    alone                  no process group
    NCCL, 1 process        a process group of one: every collective is made. The same bits, at a cost of at most 2 %
    gloo, 2 processes      both on this GPU (NCCL refuses that): data pass through host memory, so time says nothing; samples must
                           be the same, and sampler and trainer as close (`mismatch`) as on one

Two real GPUs have never been tried.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from memory_plan import REWARD, make_model
from safetensors import safe_open

THREADS = {"OMP_NUM_THREADS": "8"}
"""torchrun sets 1 if nothing is set, and the host's part of a step would take longer."""
ROWS = {
    "alone": (0, "none"),
    "1 process, none": (1, "none"),
    "1 process, optimiser": (1, "optimiser"),
    "2 processes, none": (2, "none"),
    "2 processes, optimiser": (2, "optimiser"),
    "2 processes, full": (2, "full"),
    "alone, again": (0, "auto"),
}
"""Processes that torchrun starts (0: none), and the sharding."""


def train(folder: Path, recipe: Path, processes: int, sharding: str) -> Path:
    run = folder / f"run_{processes}_{sharding}"
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)] if processes else []
    command = [sys.executable, *launcher, "-m", "plaudit", "rl", str(recipe), f"run.dir={run}", f"cluster.sharding={sharding}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=THREADS | os.environ)
    if done.returncode:
        sys.exit(f"{' '.join(command)}:\n{done.stdout[-4000:]}")
    return run


def metrics(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def same_samples(run: Path, reference: Path) -> float:
    """Share of responses that are the same."""
    columns = [
        [pq.read_table(file)["response"] for file in sorted((one / "samples").glob("*.parquet"))] for one in (run, reference)
    ]
    ours, theirs = ([text for column in one for text in column.to_pylist()] for one in columns)
    return statistics.fmean(a == b for a, b in zip(ours, theirs, strict=True))


def same_weights(run: Path, reference: Path) -> bool:
    with safe_open(run / "model/model.safetensors", "pt") as ours, safe_open(reference / "model/model.safetensors", "pt") as theirs:
        return all(ours.get_tensor(name).equal(theirs.get_tensor(name)) for name in theirs.keys())  # noqa: SIM118


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--size", default="0.5B")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), help=f"Some of: {', '.join(ROWS)}")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="gpu-cluster-"))
    rows = [
        {"prompt": f"{i} {'word ' * 60}", "response": "word"}  # (the tokenizer is made of conversations)
        for i in range(given.prompts * given.steps)
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    recipe: dict[str, Any] = {
        "stage": "rl",
        "model": {"path": str(make_model(given.size, folder, given.device))},
        "data": {"train": str(folder / "data.jsonl")},
        "rollout": {"n": 8, "max_new_tokens": given.tokens},
        "rewards": [{"kind": "function", "path": str(folder / "reward.py")}],
        "train": {"prompts_per_step": given.prompts, "prompts_per_update": given.prompts // 2},
        "optim": {"lr": 1e-6, "schedule": "constant"},
        "run": {"dir": "runs/x", "max_steps": given.steps, "device": given.device},
    }
    file = folder / "recipe.yaml"
    file.write_text(json.dumps(recipe))
    work = f"{given.prompts} prompts × 8 × {given.tokens} tokens, 2 updates a step, {given.steps} steps"
    print(f"{given.size}, {work}; median of all but the first")
    print(
        "| | s a step | sampling | update | ratio | same responses | same weights | mismatch |\n" + "| --- " * 8 + "|", flush=True
    )
    reference: Path | None = None
    for name in given.rows:
        run = train(folder, file, *ROWS[name])
        reference = reference or run
        lines = metrics(run)
        step, sample, update = (
            statistics.median(line[key] for line in lines[1:]) for key in ("time/step_s", "time/sample_s", "time/update_s")
        )
        alone = statistics.median(line["time/step_s"] for line in metrics(reference)[1:])
        mismatch = max(line["mismatch"] for line in lines)
        print(
            f"| {name} | {step:.2f} | {sample:.2f} | {update:.2f} | {step / alone:.3f} | {same_samples(run, reference):.1%} | "
            f"{'yes' if same_weights(run, reference) else 'no'} | {mismatch:.1e} |",
            flush=True,
        )
        if run != reference:
            shutil.rmtree(run)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
