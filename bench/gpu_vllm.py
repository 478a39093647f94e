"""vLLM as the engine of a GRPO recipe beside plaudit's own, on one GPU; and what it costs to give it new weights.

    python bench/gpu_vllm.py --program .venv-vllm/bin/python          # 0.5B, 1.5B; weights of 1.5B and 7B: ten minutes on an H200

Random weights of Qwen2.5's shapes in bf16; responses never end before their limit, so every step has the same work. Both engines
share the GPU with the trainer: the native one samples its weights, vLLM sleeps while it computes.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from memory_plan import REWARD, make_model


def recipe_of(model: Path, folder: Path, given: argparse.Namespace) -> Path:
    recipe: dict[str, Any] = {
        "stage": "rl",
        "model": {"path": str(model), "gradient_checkpointing": "auto"},
        "data": {"train": str(folder / "data.jsonl")},
        "rollout": {"n": 8, "max_new_tokens": given.tokens},
        "rewards": [{"kind": "function", "path": str(folder / "reward.py")}],
        "train": {"prompts_per_step": given.prompts},
        "optim": {"lr": 1e-6, "schedule": "constant"},
        "run": {"dir": "runs/x", "max_steps": given.steps, "device": "cuda", "save_every": 1000},
    }
    file = folder / "recipe.yaml"
    file.write_text(json.dumps(recipe))
    return file


def train(name: str, size: str, recipe: Path, settings: list[str]) -> None:
    run = recipe.parent / f"run_{name}_{size}"
    command = [sys.executable, "-m", "plaudit", "rl", str(recipe), f"run.dir={run}", *settings]
    began = time.monotonic()
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        log = run / "engine_0.log"
        print(done.stdout[-3000:], log.read_text()[-2000:] if log.exists() else "", flush=True)
        return
    whole = time.monotonic() - began
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    middle = {key: statistics.median(line[key] for line in lines[1:]) for key in lines[-1] if isinstance(lines[-1][key], float)}
    step, sampling, update = (middle[f"time/{part}_s"] for part in ("step", "sample", "update"))
    cells = [
        f"{size}, {name}", *(f"{seconds:.2f}" for seconds in (step, sampling, update, step - sampling - update)),
        f"{middle['time/tokens_per_s']:,.0f}", f"{middle['mismatch']:.1e}", f"{middle.get('importance_bounded', 0.0):.1e}",
        f"{whole - sum(line['time/step_s'] for line in lines):.0f}",
    ]  # fmt: skip
    print(f"| {' | '.join(cells)} |", flush=True)
    shutil.rmtree(run)


def push(size: str, model: Path, given: argparse.Namespace) -> None:
    """New weights in seconds, and what sleeping gives back."""
    import torch

    from plaudit.data.templates import load_model_template
    from plaudit.models.trainable import load_policy
    from plaudit.recipe import ModelSettings, RolloutSettings
    from plaudit.rollout.engine import EngineSetup, Weights
    from plaudit.rollout.served.engine import VllmEngine
    from plaudit.world import World

    settings, device = ModelSettings(path=str(model)), torch.device("cuda")
    template = load_model_template(settings)
    policy = load_policy(settings, template, device).model
    size_gb = sum(tensor.nbytes for _, tensor in Weights(policy)) / 1e9
    for way in given.ways:
        server: Any = {"program": given.program, "weights": way, "arguments": ["--enforce-eager"]}
        rollout = RolloutSettings(engine="vllm", server=server)
        engine = VllmEngine(EngineSetup(rollout, policy, template.tokenizer, World.alone(device)))
        try:
            engine.sync(0, Weights(policy))
            seconds = []
            for version in range(1, 2 if way == "files" else 6):
                torch.cuda.synchronize()
                began = time.perf_counter()
                engine.sync(version, Weights(policy))
                seconds.append(time.perf_counter() - began)
            awake = torch.cuda.mem_get_info()[0]
            began = time.perf_counter()
            engine.rest()
            slept = time.perf_counter() - began
            asleep = torch.cuda.mem_get_info()[0]
            began = time.perf_counter()
            engine.sync(9, Weights(policy))
            woken = time.perf_counter() - began
            middle = statistics.median(seconds)
            cells = [
                f"{size}, {way}", f"{size_gb:.2f}", f"{middle:.2f} ({min(seconds):.2f}–{max(seconds):.2f})",
                f"{size_gb / middle:.1f}",
                f"{(asleep - awake) / 1e9:.1f}", f"{slept:.2f}", f"{woken:.2f}",
            ]  # fmt: skip
            print(f"| {' | '.join(cells)} |", flush=True)
        finally:
            engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", help="The Python that has vLLM; default: this one.")
    parser.add_argument("--sizes", nargs="*", default=["0.5B", "1.5B"])
    parser.add_argument("--engines", nargs="+", default=["native", "vLLM"])
    parser.add_argument("--push", nargs="*", default=["1.5B", "7B"])
    parser.add_argument("--ways", nargs="+", default=["auto", "stream", "files"], help="rollout.server.weights")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=5)
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="gpu-vllm-"))
    rows = [{"prompt": f"{i} {'word ' * 60}", "response": "word"} for i in range(given.prompts * given.steps)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    program = [f"rollout.server.program={given.program}"] if given.program else []
    if given.sizes:
        print(f"{given.prompts} prompts × 8 × {given.tokens} tokens, {given.steps} steps; median of all but the first")
        head = ["", "s a step", "sampling", "update", "rest", "sampled tokens/s", "mismatch", "weights bounded", "start, s"]
        print("| " + " | ".join(head) + " |\n" + "| --- " * len(head) + "|", flush=True)
    for size in given.sizes:
        recipe = recipe_of(make_model(size, folder, "cuda"), folder, given)
        for engine in given.engines:
            train(engine, size, recipe, [] if engine == "native" else ["rollout.engine=vllm", *program])
    if given.push:
        head = ["weights to vLLM", "GB", "s", "GB/s", "GB returned by sleep", "sleep, s", "wake and new weights, s"]
        print("\n| " + " | ".join(head) + " |\n" + "| --- " * len(head) + "|", flush=True)
    for size in given.push:
        folder_of = folder / size
        push(size, folder_of if folder_of.exists() else make_model(size, folder, "cuda"), given)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
