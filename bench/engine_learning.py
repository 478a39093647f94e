"""Whether a policy learns the same from samples of a vLLM server as from those of the native engine: the demo's RL, on a CPU.

    python bench/engine_learning.py --program .venv-vllm/bin/python        # under 25 minutes on two cores

Letters to sort, as in `plaudit demo`: a Llama of two layers (128 wide: vLLM on a CPU needs heads of 32) is cold-started once by
SFT on careless demonstrations; then GRPO with each engine and each seed, which orders the prompts and draws the samples. The
validation reward is the share of right answers to 200 held-out prompts, 4 samples each. Runs that exist in `--out` are read, not
repeated.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

from plaudit.prepare.sorting import make_sorting
from plaudit.prepare.tiny_model import make_tiny_model

VLLM_ON_A_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
ARGUMENTS = ["--enforce-eager", "--dtype float32", "--distributed-executor-backend uni"]
COLUMNS = ("engine", "seed", "before", "after", "mean of all validations", "mismatch", "s a step", "s of the whole run")


def plaudit(*words: str) -> float:
    """Seconds that the command took."""
    began = time.monotonic()
    environment = {**os.environ, **VLLM_ON_A_CPU, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "plaudit", *words], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        sys.exit(f"plaudit {' '.join(words)}:\n{done.stdout[-3000:]}")
    return time.monotonic() - began


def cold_start(out: Path) -> Path:
    """The model that every run starts from."""
    model = out / "sft/model"
    if not (out / "data/val.jsonl").exists():
        make_sorting(out / "data", demonstrations=2000, prompts=4000, val=200, letters=(3, 6), careless=0.5, seed=0)
    if not (out / "base").exists():
        make_tiny_model([out / "data/sft.jsonl"], out / "base", hidden_size=128, vocabulary=300)
    if not model.exists():
        data = [f"model.path={out / 'base'}", f"data.train={out / 'data/sft.jsonl'}"]
        plaudit("sft", "recipes/demo/sft.yaml", *data, f"run.dir={out / 'sft'}")
    return model


def learn(engine: str, seed: int, model: Path, given: argparse.Namespace) -> dict[str, float]:
    run = given.out / f"{engine}_{seed}"
    summary = run / "learning.json"
    if summary.exists():
        return json.loads(summary.read_text())
    shutil.rmtree(run, ignore_errors=True)
    data = [f"data.train={given.out / 'data/rl.jsonl'}", f"data.val={given.out / 'data/val.jsonl'}", f"model.path={model}"]
    words = [*data, f"seed={seed}", f"run.dir={run}", f"run.max_steps={given.steps}", f"run.validate_every={given.validate_every}"]
    words.append(f"rollout.engine={engine}")
    if engine != "native":
        words += [f"rollout.server.program={given.program}", f"rollout.server.arguments={json.dumps(ARGUMENTS)}"]
    seconds = plaudit("rl", "recipes/demo/rl.yaml", *words)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["val/reward"] for row in rows if "val/reward" in row]
    steps = [row for row in rows if "mismatch" in row]
    found = {
        "before": rewards[0],
        "after": rewards[-1],
        "mean": statistics.fmean(rewards),
        "mismatch": statistics.fmean(row["mismatch"] for row in steps),
        "step_s": statistics.median(row["time/step_s"] for row in steps),
        "seconds": seconds,
    }
    summary.write_text(json.dumps(found))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default=".venv-vllm/bin/python", help="the Python that has vLLM")
    parser.add_argument("--engines", nargs="+", default=["native", "vllm"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--validate-every", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path("runs/engine_learning"))
    given = parser.parse_args()

    model = cold_start(given.out)
    print(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}", flush=True)
    for engine in given.engines:
        runs = []
        for seed in range(given.seeds):
            found = learn(engine, seed, model, given)
            runs.append(found)
            print(row_of(engine, str(seed), found), flush=True)
        if len(runs) > 1:
            cells = [[one[name] for one in runs] for name in ("before", "after", "mean")]
            spread = [f"{statistics.fmean(values):.3f} ± {statistics.stdev(values):.3f}" for values in cells]
            print(f"| **{engine}** | mean ± standard deviation | {' | '.join(spread)} | | | |", flush=True)


def row_of(engine: str, seed: str, found: dict[str, float]) -> str:
    rewards = [f"{found[name]:.3f}" for name in ("before", "after", "mean")]
    cells = [engine, seed, *rewards, f"{found['mismatch']:.1e}", f"{found['step_s']:.2f}", f"{found['seconds']:.0f}"]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
