"""Whole GRPO steps on one GPU: full training and LoRA, seconds by phase, memory, and mismatch between sampler and trainer.

    python bench/gpu_step.py                                     # 0.5B and 1.5B, full and LoRA
    python bench/gpu_step.py --cases "7B LoRA" --steps 5
    python bench/gpu_step.py --device cpu --tiny                 # smoke test; its numbers mean nothing

Random weights of Qwen2.5 shapes in bf16, 64 prompts of 256 tokens × 8 samples × 512 new tokens, random rewards, one update a step.
Every case runs in a process of its own: the median of --steps steps after two to warm up, lowest and highest. "peft" computes the
adapters with peft's own modules, as layers that cannot be merged do.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

SIZES = ("0.5B", "1.5B", "7B")
CASES = [f"{size} {kind}" for size in SIZES for kind in ("full", "LoRA", "LoRA by peft")]
DEFAULT = [case for case in CASES if not case.startswith("7B")]
CHECKPOINTED = {"7B LoRA", "7B LoRA by peft", "7B full"}


def run_case(case: str, device: str, tiny: bool, steps: int) -> dict[str, Any]:
    import torch
    from native_rollout import build, forget_peak, grid_prompts, memory, requests_of, scored, synchronize
    from rollout_work import FULL, TINY

    from plaudit.models.checkpointing import checkpoint_layers
    from plaudit.models.fused import merge_adapters
    from plaudit.models.lora import attach_lora
    from plaudit.models.merged import has_merged
    from plaudit.models.trainable import TrainableModel
    from plaudit.recipe import LoraSettings, RLRecipe
    from plaudit.rl.learner import Learner
    from plaudit.rollout.engine import Sampling
    from plaudit.rollout.native.engine import NativeEngine
    from plaudit.world import World

    size, _, kind = case.partition(" ")
    work = TINY if tiny else FULL
    prompts, n, prompt_tokens, new_tokens = (4, 2, 16, 16) if tiny else (64, 8, 256, 512)
    model = build(size, work, device, training=True)
    lora = None if kind == "full" else LoraSettings(rank=16)
    peft = attach_lora(model, lora, 0) if lora is not None else None
    if kind == "LoRA":
        merge_adapters(model)
        assert tiny or has_merged(model)
    recipe = RLRecipe.model_validate(
        {
            "model": {"path": size, "gradient_checkpointing": case in CHECKPOINTED, "lora": lora and lora.model_dump()},
            "data": {"train": "none"},
            "rollout": {"n": n, "max_new_tokens": new_tokens},
            "rewards": [{"kind": "exact"}],
            "optim": {"lr": 1e-6 if lora is None else 1e-4},
            "train": {"prompts_per_step": prompts, "tokens_per_micro_batch": work.tokens_per_micro_batch},
            "run": {"dir": "none"},
        }
    )
    checkpoint_layers(model, recipe.model)
    policy, world = TrainableModel(model, None, lora, peft), World.alone(model.device)  # pyright: ignore
    learner = Learner(policy, recipe, total_steps=2 + steps, world=world)
    engine = NativeEngine(model, None, max_sequences=work.max_sequences)
    rows = []
    import time

    forget_peak()
    for step in range(2 + steps):
        requests = requests_of(grid_prompts(model.config.vocab_size, prompts, prompt_tokens, seed=step), n)
        synchronize()
        began = time.perf_counter()
        samples = list(engine.generate(requests, Sampling(new_tokens, seed=0, step=step)))
        synchronize()
        sampled = time.perf_counter()
        metrics = learner.learn(scored(requests, samples, seed=step), step=step + 1)
        synchronize()
        trained = time.perf_counter()
        engine.sync(step + 1, learner.weights())
        found = {"sample_s": sampled - began, "update_s": trained - sampled, "step_s": trained - began}
        rows.append(found | {name: metrics[name] for name in ("mismatch", "grad_norm")})
        print(f"{case}: {rows[-1]}", file=sys.stderr, flush=True)
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    return {"case": case, "device": name, "torch": torch.__version__, "rows": rows[2:], "memory": memory()}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--cases", nargs="+", choices=CASES, default=DEFAULT)
    options.add_argument("--steps", type=int, default=5)
    options.add_argument("--device", default="cuda")
    options.add_argument("--tiny", action="store_true")
    options.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.one:
        print(json.dumps(run_case(given.cases[0], given.device, given.tiny, given.steps)))
        return
    print("| | s a step | sampling | update | peak GB | mismatch |\n| --- | --- | --- | --- | --- | --- |", flush=True)
    for case in given.cases:
        command = [sys.executable, __file__, "--one", "--cases", case, "--steps", str(given.steps), "--device", given.device]
        ended = subprocess.run([*command, *(["--tiny"] if given.tiny else [])], stdout=subprocess.PIPE, text=True)
        if ended.returncode:
            print(f"| {case} | failed with {ended.returncode} | | | | |", flush=True)
            continue
        found = json.loads(ended.stdout.splitlines()[-1])
        columns = [[row[name] for row in found["rows"]] for name in ("step_s", "sample_s", "update_s")]
        times = " | ".join(f"{statistics.median(one):.2f} ({min(one):.2f}–{max(one):.2f})" for one in columns)
        mismatch = statistics.median(row["mismatch"] for row in found["rows"])
        print(f"| {case} | {times} | {found['memory']['peak']:.1f} | {mismatch:.1e} |", flush=True)


if __name__ == "__main__":
    main()
