"""Memory saved and time cost of each memory-saving setting on a GPU, with a check that losses do not change.

    python bench/gpu_memory.py [--sizes 0.5B 7B] [--steps 4] [--tokens 16384]
    python bench/gpu_memory.py --device cpu --sizes tiny --steps 2 --tokens 512         # smoke test: seconds on a CPU

Random weights of Qwen2.5 shapes, bf16 with fp32 master weights, 64 rows per step of 64…4096 tokens. First, training: each table row
is a fresh model that makes the same steps on the same data. Every loss must be bitwise equal to the first setting that fits;
within one per cent for Liger, which rounds differently. Then, offloading during sampling: a critic with trained weights and a
reference, each loaded and offloaded three times.
"""

import argparse
import gc
import importlib.util
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch
from gpu_sft import SHAPES, rows
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from plaudit.data.pack import micro_batches
from plaudit.models import attention
from plaudit.models.checkpointing import checkpoint_layers
from plaudit.models.fused import prepare_layers
from plaudit.models.logprobs import target_logprobs
from plaudit.models.trainable import TrainableModel
from plaudit.models.weights import OffloadableWeights, OffloadedModule
from plaudit.objectives.supervised import nll
from plaudit.recipe import OptimSettings, SFTRecipe
from plaudit.train.auto import resolve_checkpointing
from plaudit.train.memory_plan import plan_policy
from plaudit.train.trainer import Trainer, compute_repeatably
from plaudit.world import World

VOCABULARY = {"tiny": 4096}
LIGER_TOLERANCE = 0.01


def config_of(size: str) -> Any:
    hidden, layers, heads, kv_heads, mlp = SHAPES[size]
    return AutoConfig.for_model(
        "qwen2", vocab_size=VOCABULARY.get(size, 151936), hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, intermediate_size=mlp, max_position_embeddings=32768, tie_word_embeddings=size != "7B",
    )  # fmt: skip


def build(size: str, device: torch.device, *, liger: bool = False) -> PreTrainedModel:
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config_of(size), dtype=torch.bfloat16, attn_implementation=attention.NAME)
    prepare_layers(model, liger=liger)
    return model.train()


def recipe_of(folder: Path, device: torch.device, tokens: int, *, checkpointing: Any, offload: bool, liger: bool) -> SFTRecipe:
    return SFTRecipe.model_validate(
        {
            "model": {"path": str(folder), "dtype": "bfloat16", "gradient_checkpointing": checkpointing, "liger": liger},
            "data": {"train": "rows.jsonl", "max_tokens": min(4096, tokens)},
            "train": {"tokens_per_micro_batch": tokens},
            "optim": {"lr": 1e-5, "placement": "offload" if offload else "resident"},
            "run": {"dir": "runs/none", "device": device.type},
        }
    )


def settings_to_try() -> dict[str, dict[str, Any]]:
    """Each setting as overrides of the defaults."""
    tried: dict[str, dict[str, Any]] = {
        "nothing": {},
        "optim.placement: offload": {"offload": True},
        "gradient_checkpointing: auto": {"checkpointing": "auto"},
        "gradient_checkpointing: true": {"checkpointing": True},
        "optim.placement: offload, gradient_checkpointing: auto": {"offload": True, "checkpointing": "auto"},
        "optim.placement: offload, gradient_checkpointing: true": {"offload": True, "checkpointing": True},
    }
    if importlib.util.find_spec("liger_kernel") is not None and torch.cuda.is_available():
        tried["liger"] = {"liger": True}
        tried["liger, optim.placement: offload, gradient_checkpointing: auto"] = {
            "liger": True,
            "offload": True,
            "checkpointing": "auto",
        }
    return tried


def train(size: str, recipe: SFTRecipe, device: torch.device, steps: int) -> tuple[list[float], float]:
    """The losses, and the median seconds per step after the first."""
    model = build(size, device, liger=recipe.model.liger)
    checkpoint_layers(model, recipe.model)
    policy = TrainableModel(model, template=None)  # pyright: ignore (nothing is saved here)
    trainer = Trainer(
        policy, OptimSettings(lr=1e-5, placement=recipe.optim.placement), seed=0, max_skipped_steps=0, world=World.alone(device)
    )
    losses, seconds = [], []
    for step in range(steps + 1):
        tokens = recipe.train.tokens_per_micro_batch
        examples = rows(64 if size != "tiny" else 4, seed=step, vocabulary=model.config.vocab_size, longest=min(4096, tokens))
        targets = sum(example.num_targets for example in examples)
        wait(device)
        began = time.perf_counter()
        batches = micro_batches(examples, tokens, device)
        metrics = trainer.update(batches, lambda b, n=targets: (nll(target_logprobs(model, b).logprobs_N, n), {}), 1e-5)
        wait(device)
        seconds.append(time.perf_counter() - began)
        losses.append(metrics["loss"])
    return losses, median(seconds[1:])


def training(size: str, folder: Path, device: torch.device, steps: int, tokens: int) -> bool:
    print(f"\n## Training, {size}, {tokens:,} tokens per micro-batch")
    print("| settings | layers checkpointed | peak GB | planned GB | s per step | losses |\n| --- | --- | --- | --- | --- | --- |")
    first: list[float] | None = None
    ok = True
    for name, settings in settings_to_try().items():
        recipe = recipe_of(folder, device, tokens, **{"checkpointing": False, "offload": False, "liger": False} | settings)
        recipe = resolve_checkpointing(recipe, report=lambda line: None)
        plan, wanted = plan_policy(recipe), recipe.model.gradient_checkpointing
        shown = f"| {name} | {plan.layers if wanted is True else int(wanted)} of {plan.layers} |"  # pyright: ignore (settled)
        with measured(device) as peak:
            try:
                losses, seconds = train(size, recipe, device, steps)
            except torch.OutOfMemoryError:
                print(f"{shown} out of memory | {plan.total / 1e9:.1f} | | |", flush=True)
                continue
            peak_gb = peak()
        if first is None:
            first, verdict = losses, f"{losses[-1]:.6f}"
        elif recipe.model.liger:
            apart = max(abs(a / b - 1) for a, b in zip(losses, first, strict=True))
            verdict, ok = f"differ by {apart:.1e}", ok and apart < LIGER_TOLERANCE
        else:
            verdict, ok = ("the same bits" if losses == first else f"NOT THE SAME: {losses} and {first}"), ok and losses == first
        print(f"{shown} {peak_gb} | {plan.total / 1e9:.1f} | {seconds:.3f} | {verdict} |", flush=True)
    return ok


def measure_offloading(size: str, device: torch.device) -> bool:
    """Offload a critic, whose weights change while on the device, and a reference, whose weights do not."""
    print(f"\n## Offloaded while the policy is sampled, {size}")
    print("| model | GB on device | GB offloaded | s to load | s to offload | weights |\n| --- | --- | --- | --- | --- | --- |")
    ok = True
    with measured(device):
        critic = build(size, device)
        resident_gb = allocated(device)
        offloaded = OffloadedModule(critic, device)
        kept = critic.get_input_embeddings().weight.detach().clone()  # pyright: ignore
        offloaded_gb, load_s, offload_s = allocated(device), [], []
        for _ in range(3):
            began = time.perf_counter()
            with offloaded.on_device():
                load_s.append(time.perf_counter() - began)
                with torch.no_grad():
                    critic.get_input_embeddings().weight.add_(1.0)  # pyright: ignore
                began = time.perf_counter()
            offload_s.append(time.perf_counter() - began)
        for _ in range(3):
            kept += 1.0
        same = torch.equal(critic.get_input_embeddings().weight, kept)  # pyright: ignore
        ok = ok and same
        report("critic", resident_gb, offloaded_gb, load_s, offload_s, same)
        del critic, offloaded
    with measured(device):
        weights = OffloadableWeights("reference", lambda: build(size, device).eval().requires_grad_(False), device, offload=True)
        weights.load()
        kept, resident_gb = weights.model.get_input_embeddings().weight.cpu(), allocated(device)  # pyright: ignore
        weights.unload()
        offloaded_gb, load_s, offload_s = allocated(device), [], []
        for _ in range(3):
            began = time.perf_counter()
            weights.load()
            load_s.append(time.perf_counter() - began)
            same = torch.equal(weights.model.get_input_embeddings().weight.cpu(), kept)  # pyright: ignore
            ok = ok and same
            began = time.perf_counter()
            weights.unload()
            offload_s.append(time.perf_counter() - began)
        report("reference", resident_gb, offloaded_gb, load_s, offload_s, same)
        weights.drop()
    return ok


def report(name: str, resident_gb: str, offloaded_gb: str, load_s: list[float], offload_s: list[float], same: bool) -> None:
    bits = "the same bits" if same else "NOT THE SAME"
    print(f"| {name} | {resident_gb} | {offloaded_gb} | {median(load_s):.3f} | {median(offload_s):.3f} | {bits} |", flush=True)


@contextmanager
def measured(device: torch.device) -> Iterator[Callable[[], str]]:
    """Measure from an empty device to an empty device; yields the peak so far."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    yield lambda: f"{torch.cuda.max_memory_allocated() / 1e9:.1f}" if device.type == "cuda" else "–"
    gc.collect()


def allocated(device: torch.device) -> str:
    return f"{torch.cuda.memory_allocated() / 1e9:.2f}" if device.type == "cuda" else "–"


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["0.5B", "7B"], choices=list(SHAPES))
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.exit(1, "this needs a CUDA GPU, and torch sees none (--device cpu --sizes tiny is a smoke test)\n")
    device = torch.device(arguments.device)
    compute_repeatably(device)
    print(f"{torch.cuda.get_device_name() if device.type == 'cuda' else 'CPU'}, torch {torch.__version__}")
    ok = True
    with tempfile.TemporaryDirectory() as folder:
        for size in arguments.sizes:
            config_of(size).save_pretrained(Path(folder, size))
            ok &= training(size, Path(folder, size), device, arguments.steps, arguments.tokens)
            ok &= measure_offloading(size, device)
    if not ok:
        parser.exit(1, "results differ that should be equal\n")


if __name__ == "__main__":
    main()
