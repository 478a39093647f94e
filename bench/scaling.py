"""Step time and memory on N GPUs, and the longest sequences that fit: computed from what was measured on one H200.

    python bench/scaling.py                      # step time and memory: 0.5B, 7B, 32B on 1, 8 and 64 GPUs
    python bench/scaling.py --longest            # the longest sequences on 8 GPUs by sharding: 7B, 14B, 32B
    python bench/scaling.py --models 7B --gpus 1 2 4 8 --prompts 512 --efficiency 0.7

**No run on two GPUs has been made.** A step of GRPO with a KL reference: Q prompts × n samples of q + r tokens, P parameters, N
GPUs with S = Q · n / N sequences and T = S · (q + r) tokens each:

    sampling        α · ceil(S / 1024) + β · S        through two measured points; larger models: α and β · P / P(7B)
                    / (1 − idle share)                as simulated by bench/balance.py: prompts dealt by expected length
    log-probs       T / (3 · rate)                    the reference's forward pass: a third of an update's work
    update          T / rate                          rate: measured tokens/s, or F / (6 P), F being the FLOP/s measured at 1.5B;
                                                      · 3 / (3 + c) with a share c of the layers checkpointed
    AdamW           30 P' / HBM bandwidth             reads and writes of masters, moments, gradients, weights; P' = P / N sharded
    reduce-scatter  4 P · (N − 1) / N / bandwidth     optimiser: once per update, during the last micro-batch's backward pass
                                                      (two thirds of its time); what is longer than that is exposed
    all-gather      2 P · (N − 1) / N / bandwidth     optimiser: once per update, exposed
                                                      full: 2 P before every forward and backward pass and 4 P reduced after it, in
                                                      every micro-batch, during its computation; and 2 P per step for the engine
    bandwidth       efficiency · 450 GB/s in a node (NVLink 4, per direction); between nodes efficiency · min(450, 8 · 50) GB/s
                    (8 × 400 Gb/s InfiniBand per node, a ring on each)

Not included: scoring, which runs while other groups are sampled; host time; latencies of collectives; the bus, if state is
offloaded. Memory is that of `plaudit doctor`: train/memory_plan.py.
"""

import argparse
import math
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from balance import draw_step, sampling_idle, training_idle

from plaudit.models.memory import PHASES, gigabytes, plan_memory
from plaudit.models.shapes import QWEN, write_shape
from plaudit.recipe import RLRecipe, SFTRecipe, TrainingRecipe
from plaudit.train.auto import fits, resolve_checkpointing, resolve_sharding
from plaudit.train.limits import longest_sequence
from plaudit.train.memory_plan import plan_devices
from plaudit.train.processes import Processes

NVLINK, INFINIBAND, HBM = 450e9, 8 * 50e9, 4.8e12
GPUS_OF_A_NODE, MAX_SEQUENCES, MICRO_BATCH = 8, 1024, 16384
PROMPT, RESPONSE = 256, 512
"""Tokens; as in the measurements."""

# Measured on one H200 (bench/README.md): tokens/s of sampling with this many sequences, 256 + 512 tokens each.
SAMPLED = {"0.5B": {256: 131_803, 1024: 187_770}, "1.5B": {256: 66_671, 1024: 80_421}, "7B": {256: 22_079, 512: 23_301}}
# Tokens/s of training without checkpointing: 0.5B since layers were fused (0.55 s a step instead of 0.69), 1.5B before that.
TRAINED = {"0.5B": 74_626 * 0.69 / 0.55, "1.5B": 37_539.0}
FLOPS = 348e12
"""Of 1.5B's training."""
OVERHEAD = {"0.5B": 340.0}
"""Fixed cost of a decode step, in sequences (bench/balance.py)."""


def sampling_curve(model: str, parameters: dict[str, int]) -> tuple[float, float]:
    """α, β: seconds of a call with S sequences are α + β S."""
    if model not in SAMPLED:
        scale = parameters[model] / parameters["7B"]
        return tuple(scale * part for part in sampling_curve("7B", parameters))  # pyright: ignore
    (few, slow), (many, fast) = SAMPLED[model].items()
    seconds = few * RESPONSE / slow, many * RESPONSE / fast
    slope = (seconds[1] - seconds[0]) / (many - few)
    return seconds[0] - slope * few, slope


def idle_shares(prompts: int, samples: int, size: int, overhead: float) -> tuple[float, float]:
    """Of sampling and training, for log-normal responses with the mean of the step."""
    if size == 1:
        return 0.0, 0.0
    random = np.random.default_rng(0)
    pool = np.clip(random.lognormal(math.log(RESPONSE) - 0.5, 1.0, 50_000), 1, 8 * RESPONSE)
    shares = []
    for _ in range(5):
        now, before = draw_step(pool, prompts, samples, 0.3, random)
        training = training_idle([int(length) for length in now.reshape(-1)], MICRO_BATCH, size)["evenly"]
        shares.append((sampling_idle(now, before, size, overhead)["expected length"], training))
    return tuple(np.mean(shares, axis=0))  # pyright: ignore


@dataclass(frozen=True)
class Setting:
    model: str
    gpus: int
    prompts: int
    samples: int
    efficiency: float

    def bandwidth(self) -> float:
        return self.efficiency * (NVLINK if self.gpus <= GPUS_OF_A_NODE else min(NVLINK, INFINIBAND))


def step_time(setting: Setting, sharding: str, checkpointed: float, parameters: dict[str, int]) -> dict[str, float]:
    count, size = parameters[setting.model], setting.gpus
    sequences = setting.prompts * setting.samples / size
    tokens = sequences * (PROMPT + RESPONSE)
    fixed, each = sampling_curve(setting.model, parameters)
    idle_sampling, idle_training = idle_shares(setting.prompts, setting.samples, size, OVERHEAD.get(setting.model, 44.0))
    sampling = fixed * math.ceil(sequences / MAX_SEQUENCES) + each * sequences
    plain_rate = TRAINED.get(setting.model, FLOPS / (6 * count))
    rate, forward_rate = plain_rate * 3 / (3 + checkpointed), 3 * plain_rate
    micro_batches = math.ceil(tokens / MICRO_BATCH)
    a_pass, a_forward = tokens / rate / micro_batches, tokens / forward_rate / micro_batches
    moved = (size - 1) / size / setting.bandwidth()
    own = count / (1 if sharding == "none" else size)
    if sharding == "full":
        exposed = micro_batches * max(0.0, 8 * count * moved - a_pass)
        exposed += micro_batches * max(0.0, 2 * count * moved - a_forward)
        reduced, gathered = exposed, 2 * count * moved  # the engine's copy
    elif sharding == "optimiser":
        reduced, gathered = max(0.0, 4 * count * moved - 2 / 3 * a_pass), 2 * count * moved
    else:
        reduced, gathered = max(0.0, 2 * 4 * count * moved - 2 / 3 * a_pass), 0.0
    return {
        "sampling": sampling,
        "waiting for the longest samples": sampling * (1 / (1 - idle_sampling) - 1),
        "log-probs of the reference": tokens / forward_rate,
        "update: passes": tokens / rate,
        "update: AdamW": 30 * own / HBM,
        "exposed: gradients (full: and weights)": reduced,
        "exposed: updated weights": gathered,
        "waiting for the last micro-batch": (tokens / rate) * (1 / (1 - idle_training) - 1),
    }


# Memory ---------------------------------------------------------------------------------------------------------------


def rl_recipe(folder: Path, setting: Setting, **sections: Any) -> RLRecipe:
    tree = {
        "stage": "rl",
        "model": {"path": str(folder), "gradient_checkpointing": "auto", **sections.pop("model", {})},
        "data": {"train": "-", "max_prompt_tokens": PROMPT},
        "rollout": {"n": setting.samples, "max_new_tokens": RESPONSE},
        "train": {"prompts_per_step": setting.prompts, "tokens_per_micro_batch": MICRO_BATCH},
        "algorithm": {"kind": "grpo", "kl_coefficient": 0.001},
        "rewards": [{"kind": "exact"}],
        "run": {"dir": "-"},
        "cluster": {"gpus": setting.gpus},
        **sections,
    }
    return RLRecipe.model_validate(tree)


def sft_recipe(folder: Path, gpus: int, **sections: Any) -> SFTRecipe:
    tree = {
        "stage": "sft",
        "model": {"path": str(folder), "gradient_checkpointing": True, **sections.pop("model", {})},
        "data": {"train": "-"},
        "run": {"dir": "-"},
        "cluster": {"gpus": gpus},
        **sections,
    }
    return SFTRecipe.model_validate(tree)


DOES_NOT_FIT = ": does not fit"


def plan(recipe: TrainingRecipe, gpus: int, memory: float) -> tuple[str, TrainingRecipe, float, str]:
    """Sharding, the resolved recipe, bytes per GPU, and what was needed to fit."""
    processes = Processes(gpus, memory=memory, kind="cuda")
    needed = ""
    for settings in ("", "offload"):
        if settings:
            recipe = recipe.model_copy(update={"optim": recipe.optim.model_copy(update={"placement": "offload"})})
            needed = ", optim.placement: offload"
        sharding = resolve_sharding(recipe, None, processes)
        if fits(recipe, None, replace(processes, sharding=sharding)):
            break
    else:
        needed = DOES_NOT_FIT
    here = replace(processes, sharding=sharding)
    resolved = resolve_checkpointing(recipe, None, lambda line: None, here)
    budget = plan_devices(resolved, None, here)["cuda"]
    return sharding, resolved, max(budget.at(phase, fixed_only=True) for phase in PHASES), needed


def count_all(folder: Path) -> dict[str, int]:
    import torch

    from plaudit.recipe import ModelSettings

    models = {name: ModelSettings(path=str(folder / name)) for name in QWEN}
    return {name: plan_memory(model, torch.device("cuda"), micro_batch=0).parameters for name, model in models.items()}


# Tables ---------------------------------------------------------------------------------------------------------------


def print_steps(given: argparse.Namespace, folder: Path) -> None:
    parameters = count_all(folder)
    memory = given.gpu_memory * 1e9
    print(
        f"{given.prompts} prompts × {given.samples} samples of {PROMPT} + {RESPONSE} tokens a step, micro-batches of "
        f"{MICRO_BATCH:,}; GPUs of {given.gpu_memory:g} GB, {GPUS_OF_A_NODE} in a node, NVLink {NVLINK / 1e9:.0f} GB/s, InfiniBand "
        f"{INFINIBAND / 1e9:.0f} GB/s per node, of which {given.efficiency:.0%} are reached."
    )
    for model in given.models:
        sampled = "through two points measured on one H200" if model in SAMPLED else "computed: 7B's by parameters"
        flops = f"computed with {FLOPS / 1e12:.0f} TFLOP/s, measured at 1.5B"
        trained = f"{TRAINED[model]:,.0f} tokens/s, from steps measured on one H200" if model in TRAINED else flops
        columns = [(size, given.prompts) for size in given.gpus]
        if max(given.gpus) > GPUS_OF_A_NODE:
            columns.append((max(given.gpus), given.prompts * max(given.gpus) // GPUS_OF_A_NODE))
        titles, times, memories, tokens = [], [], [], []
        for size, prompts in columns:
            setting = Setting(model, size, prompts, given.samples, given.efficiency)
            sharding, resolved, needs, needed = plan(rl_recipe(folder / model, setting), size, memory)
            layers = int(resolved.model.gradient_checkpointing)
            seconds = step_time(setting, sharding, layers / QWEN[model].layers, parameters)
            times.append(seconds if needed != DOES_NOT_FIT else {})
            checkpointed = f", {layers} of {QWEN[model].layers} layers checkpointed" if layers else ""
            memories.append(f"{gigabytes(needs)} ({sharding}{checkpointed}{needed})")
            tokens.append(prompts * given.samples * (PROMPT + RESPONSE))
            more = f", {prompts // given.prompts} × the prompts" if prompts != given.prompts else ""
            titles.append(f"{size} GPU{'s' if size > 1 else ''}{more}")
        print(f"\n**{model}.** Sampling: {sampled}. Training: {trained}. All else is computed.\n")
        print("| seconds | " + " | ".join(titles) + " |\n| --- " + "| --- " * len(titles) + "|")
        for phase in next(filter(None, times), {}):
            print(f"| {phase} | " + " | ".join(f"{seconds[phase]:.2f}" if seconds else "–" for seconds in times) + " |")
        totals = [sum(seconds.values()) for seconds in times]
        print("| **step** | " + " | ".join(f"**{total:.1f}**" if total else "–" for total in totals) + " |")
        rates = [count / total if total else 0.0 for count, total in zip(tokens, totals, strict=True)]
        print("| tokens/s, all GPUs | " + " | ".join(f"{rate:,.0f}" if rate else "–" for rate in rates) + " |")
        each = [rate / size for rate, (size, _) in zip(rates, columns, strict=True)]
        first = next(filter(None, each), 1.0)
        print("| of linear scaling | " + " | ".join(f"{share / first:.0%}" if share else "–" for share in each) + " |")
        print("| GB per GPU at least, by the plan | " + " | ".join(memories) + " |")


def print_longest(given: argparse.Namespace, folder: Path) -> None:
    memory, gpus = given.gpu_memory * 1e9, 8
    print(
        f"Tokens of the longest sequence on {gpus} GPUs of {given.gpu_memory:g} GB, all layers checkpointed, bf16, with a "
        "micro-batch to itself; LoRA of rank 16 on all linear layers. RL: GRPO without a reference, prompts of "
        f"{PROMPT} tokens, one sequence at a time in the cache. 0: does not fit at all.\n"
    )
    print("| | none | optimiser | full | optimiser, offloaded | full, offloaded |\n" + "| --- " * 6 + "|")
    lora, offload = {"lora": {"rank": 16}}, {"placement": "offload"}
    for model in ("7B", "14B", "32B"):
        for kind, settings in (("full training", {}), ("LoRA", lora)):
            cells: dict[str, list[str]] = {"SFT": [], "RL": []}
            for sharding, optim in (("none", {}), ("optimiser", {}), ("full", {}), ("optimiser", offload), ("full", offload)):
                processes = Processes(gpus, sharding, memory, "cuda")  # pyright: ignore
                sft = sft_recipe(folder / model, gpus, model=settings, optim=optim)
                cells["SFT"].append(f"{rounded(longest_sequence(sft, None, processes)):,}")
                sections = {"model": {"gradient_checkpointing": True, **settings}, "algorithm": {"kind": "grpo"}, "optim": optim}
                rl = rl_recipe(folder / model, Setting(model, gpus, 64, 8, 1.0), **sections)
                cells["RL"].append(f"{rounded(longest_sequence(rl, [PROMPT], processes)):,}")
            stages = {"SFT and RL": cells["SFT"]} if cells["SFT"] == cells["RL"] else cells
            for stage, numbers in stages.items():
                print(f"| {model}, {kind}, {stage} | " + " | ".join(numbers) + " |", flush=True)


def rounded(tokens: int) -> int:
    """To two digits, downwards: the plan is no better."""
    unit = 10 ** max(0, len(str(tokens)) - 2)
    return tokens // unit * unit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["0.5B", "7B", "32B"], choices=QWEN)
    parser.add_argument("--gpus", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--gpu-memory", type=float, default=141.0, help="GB (10⁹ bytes) of a GPU")
    parser.add_argument("--efficiency", type=float, default=0.8, help="share of the bandwidth that collectives reach; assumed")
    parser.add_argument("--longest", action="store_true", help="the longest sequences that fit, instead of step times")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="scaling-") as folder:
        for name in QWEN:
            write_shape(name, Path(folder))
        (print_longest if given.longest else print_steps)(given, Path(folder))


if __name__ == "__main__":
    main()
