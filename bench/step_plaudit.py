"""plaudit's side of gpu_step.py, run in a separate process: steps of one section, size and kind, as a recipe's loop makes them."""

import json
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from native_rollout import build, requests_of, scored
from rollout_work import config_of
from step_work import (
    LORA_ALPHA,
    LORA_RANK,
    LR,
    Report,
    Steps,
    memory_gb,
    now,
    pairs_of,
    prompts_of,
    reset_memory,
    responses_of,
    run_jobs,
    sft_rows,
    steps_of,
)

import plaudit
from plaudit.config import check_section
from plaudit.data.pack import micro_batches, pair_micro_batches
from plaudit.models.checkpointing import checkpoint_layers
from plaudit.models.fused import merge_adapters, quantise_base
from plaudit.models.logprobs import target_logprobs
from plaudit.models.lora import attach_lora
from plaudit.models.merged import has_merged
from plaudit.models.trainable import TrainableModel
from plaudit.objectives.supervised import nll
from plaudit.preference.losses import answer_logprobs, dpo_loss, measure
from plaudit.recipe import DPORecipe, LoraSettings, RLRecipe, SFTRecipe
from plaudit.recipe.training import micro_batch_tokens
from plaudit.rl.learner import Learner
from plaudit.rollout.engine import Request, Sampling
from plaudit.rollout.native.engine import NativeEngine
from plaudit.train.auto import resolve_auto
from plaudit.train.build import build_trainer
from plaudit.train.memory_plan import plan_devices
from plaudit.train.trainer import Trainer, compute_repeatably
from plaudit.types import Example, Pair, Sample
from plaudit.world import World

RECIPES = {"rl": RLRecipe, "sft": SFTRecipe, "dpo": DPORecipe}
Step = Callable[[int], dict[str, float]]


def recipe_of(job: dict, steps: Steps, work: Any, folder: Path) -> tuple[Any, str]:
    """The section's recipe with the job's overrides, `auto` resolved as the commands do; and the memory planned for training.
    `folder` gets what planning reads of a model."""
    (folder / "config.json").write_text(json.dumps(config_of(job["size"], work)))
    (folder / "model.safetensors").touch()  # planning asks only whether there is one
    lora = {"rank": LORA_RANK, "alpha": LORA_ALPHA} if job["kind"] == "lora" else None
    # 7B with all weights: AdamW's moments and master weights (91 GB) leave no room for the rest.
    large = job["size"] == "7B" and lora is None
    settings: dict[str, Any] = {
        "model": {"path": str(folder), "gradient_checkpointing": True if job["checkpoint"] else "auto", "lora": lora},
        "data": {"train": "none"},
        "train": {"tokens_per_micro_batch": max(work.tokens_per_micro_batch, steps.longest) if job["tiny"] else "auto"},
        "optim": {"lr": LR[job["kind"]], "schedule": "constant", "placement": "offload" if large else "resident"},
        "run": {"dir": "none", "device": job["device"]},
    }
    if steps.stage == "rl":
        settings |= {"rollout": {"n": steps.n, "max_new_tokens": steps.new_tokens}, "rewards": [{"kind": "exact"}]}
        settings["train"]["prompts_per_step"] = steps.rows
    recipe = check_section(RECIPES[steps.stage], settings, "gpu_step.py", job["set"])
    lengths = [steps.prompt_tokens if steps.stage == "rl" else steps.longest * (1 + (steps.stage == "dpo"))] * steps.rows
    resolved = resolve_auto(recipe, lengths)
    budget = plan_devices(resolved, lengths)[job["device"]]
    at_training, at_peak = budget.at("training", fixed_only=True) / 1e9, budget.at(budget.peak) / 1e9
    return resolved, f"{at_training:.1f} GB, at the peak ({budget.peak}) {at_peak:.1f} GB"


def policy_of(job: dict, recipe: Any, work: Any) -> TrainableModel:
    model = build(job["size"], work, job["device"], training=True)
    lora: LoraSettings | None = recipe.model.lora
    quantise_base(model, lora, torch.device(job["device"]))
    peft = attach_lora(model, lora, 0) if lora is not None else None
    if lora is not None:
        merge_adapters(model)
        assert job["tiny"] or has_merged(model)
    checkpoint_layers(model, recipe.model)
    return TrainableModel(model, None, lora, peft)  # pyright: ignore (nothing is saved here)


class TimedOptimiser:
    """Adds up the seconds of a trainer's optimiser steps."""

    def __init__(self, trainer: Trainer):
        self.seconds, self._step = 0.0, trainer.optimiser.step
        trainer.optimiser.step = self  # pyright: ignore

    def __call__(self, lr: float) -> None:
        began = now()
        self._step(lr)
        self.seconds += now() - began

    def taken(self) -> float:
        seconds, self.seconds = self.seconds, 0.0
        return seconds


class Profiler:
    """Seconds of each kernel by phase of a step, once it is switched on. On a CPU: of each operation, with those that it calls."""

    def __init__(self, device: str):
        self.on, self.found, self._device = False, {}, torch.device(device).type.upper()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if not self.on:
            yield
            return
        with torch.profiler.profile(activities=[getattr(torch.profiler.ProfilerActivity, self._device)]) as profile:
            began = now()
            yield
            seconds = now() - began
        kernels: dict[str, tuple[int, float]] = {}
        recorded: Any = profile.profiler
        for event in recorded.kineto_results.events():  # a minute less than key_averages() for a step of CUDA graphs
            if event.device_type().name == self._device:
                count, so_far = kernels.get(event.name(), (0, 0.0))
                kernels[event.name()] = count + 1, so_far + event.duration_ns() / 1e9
        self.found[name] = {"seconds": seconds, "kernels": sorted(kernels.items(), key=lambda row: -row[1][1])}


def rl_step(job: dict, steps: Steps, work: Any, recipe: RLRecipe, policy: TrainableModel, total: int, profiler: Profiler) -> Step:
    learner = Learner(policy, recipe, total_steps=total, world=World.alone(policy.device))
    optimiser, vocabulary = TimedOptimiser(learner.trainer), policy.model.config.vocab_size
    settings = {"max_sequences": work.max_sequences, "returns_memory": False}  # as in a run whose judges share no GPU
    engine = NativeEngine(policy.model, None, **settings) if steps.samples else None

    def given(requests: list[Request], number: int) -> list[Sample]:
        responses = responses_of(steps, vocabulary, number)
        logprobs = np.full(steps.new_tokens, -np.log(vocabulary), dtype=np.float32)
        return [
            Sample(request.prompt_id, i, np.array(tokens, dtype=np.int32), "", "truncated", logprobs, None, number)
            for request, of_prompt in zip(requests, responses, strict=True)
            for i, tokens in enumerate(of_prompt)
        ]

    def step(number: int) -> dict[str, float]:
        requests = requests_of(prompts_of(steps, vocabulary, number), steps.n)
        samples = [] if engine is not None else given(requests, number)
        began = now()
        if engine is not None:
            with profiler.phase("sampling"):
                samples = list(engine.generate(requests, Sampling(steps.new_tokens, seed=0, step=number)))
        sampled = now()
        groups = scored(requests, samples, seed=number)
        rewarded = now()
        with profiler.phase("update"):
            metrics = learner.learn(groups, step=number + 1)
        learned = now()
        if engine is not None:
            engine.sync(number + 1, learner.weights())
        ended = now()
        targets = sum(map(len, samples))
        return {
            "step_s": ended - began, "sample_s": sampled - began, "score_s": rewarded - sampled,
            "logprobs_s": metrics["time/logprobs_s"], "update_s": learned - rewarded - metrics["time/logprobs_s"],
            "optimiser_s": optimiser.taken(), "sync_s": ended - learned, "mismatch": metrics["mismatch"],
            "tokens": steps.n * sum(len(request.tokens) for request in requests) + targets, "targets": targets,
        }  # fmt: skip

    return step


def sft_step(job: dict, steps: Steps, work: Any, recipe: SFTRecipe, policy: TrainableModel, total: int, profiler: Profiler) -> Step:
    trainer = build_trainer(recipe, policy, "none", World.alone(policy.device))
    optimiser, model = TimedOptimiser(trainer), policy.model

    def step(number: int) -> dict[str, float]:
        rows = sft_rows(steps, model.config.vocab_size, number)
        examples = [Example(np.array(row, dtype=np.int32), np.arange(len(row)) > 0) for row in rows]
        targets = sum(example.num_targets for example in examples)
        began = now()
        batches = micro_batches(examples, micro_batch_tokens(recipe.train.tokens_per_micro_batch), policy.device)
        with profiler.phase("update"):
            trainer.update(batches, lambda b: (nll(target_logprobs(model, b).logprobs_N, targets), {}), recipe.optim.lr)
        seconds = now() - began
        return updated(seconds, optimiser, sum(map(len, examples)), targets)

    return step


def dpo_step(job: dict, steps: Steps, work: Any, recipe: DPORecipe, policy: TrainableModel, total: int, profiler: Profiler) -> Step:
    model, world = policy.model, World.alone(policy.device)
    budget = micro_batch_tokens(recipe.train.tokens_per_micro_batch)

    def pair(row: dict[str, list[int]]) -> Pair:
        prompt = row["prompt_ids"]
        tokens = [np.array(prompt + row[name], dtype=np.int32) for name in ("chosen_ids", "rejected_ids")]
        chosen, rejected = (Example(of_side, np.arange(len(of_side)) >= len(prompt)) for of_side in tokens)
        return Pair(chosen, rejected)

    # As the command does: the reference's log-probs of all pairs once, before training.
    pairs = [pair(row) for number in range(total) for row in pairs_of(steps, model.config.vocab_size, number)]
    reference = [sums.tolist() for sums in measure(model, pairs, answer_logprobs, budget, world, share=recipe.train.share_prompts)]
    pairs = [replace(one, ref_chosen=c, ref_rejected=r) for one, c, r in zip(pairs, *reference, strict=True)]
    trainer = build_trainer(recipe, policy, "none", world)
    optimiser = TimedOptimiser(trainer)

    def step(number: int) -> dict[str, float]:
        taken = pairs[number * steps.rows : (number + 1) * steps.rows]
        began = now()
        batches = pair_micro_batches(taken, budget, policy.device, share=recipe.train.share_prompts)
        with profiler.phase("update"):
            trainer.update(batches, dpo_loss(model, taken, recipe.loss), recipe.optim.lr)
        seconds = now() - began
        targets = sum(one.chosen.num_targets + one.rejected.num_targets for one in taken)
        return updated(seconds, optimiser, sum(map(len, taken)), targets)

    return step


def updated(seconds: float, optimiser: TimedOptimiser, tokens: int, targets: int) -> dict[str, float]:
    return {"step_s": seconds, "update_s": seconds, "optimiser_s": optimiser.taken(), "tokens": tokens, "targets": targets}


STAGES = {"rl": rl_step, "sft": sft_step, "dpo": dpo_step}


def run(job: dict, report: Report) -> dict[str, float]:
    steps, work = steps_of(job)
    with tempfile.TemporaryDirectory() as folder:
        recipe, planned = recipe_of(job, steps, work, Path(folder))
    if recipe.run.deterministic:
        compute_repeatably(torch.device(job["device"]))
    total = job["warm_up"] + job["steps"]
    policy, profiler = policy_of(job, recipe, work), Profiler(job["device"])
    step = STAGES[steps.stage](job, steps, work, recipe, policy, total + job["profile"], profiler)
    model = recipe.model
    report.settings(
        {
            "tokens per micro-batch": recipe.train.tokens_per_micro_batch, "gradient checkpointing": model.gradient_checkpointing,
            "logits kept": recipe.train.keep_logits,
            "optimiser": f"AdamW, fp32 masters and moments, {recipe.optim.placement}", "deterministic": recipe.run.deterministic,
            "planned for training": planned,
            **({"LoRA": f"rank {model.lora.rank}, {model.lora.targets}"} if model.lora else {}),
            **({"overrides": " ".join(job["set"])} if job["set"] else {}),
        }
    )  # fmt: skip
    reset_memory()
    for number in range(total):
        report.step(number, step(number))
    memory = memory_gb()
    if job["profile"]:
        profiler.on = True
        try:  # what was measured counts, whatever becomes of this
            step(total)
            report.profile(profiler.found)
        except Exception:
            traceback.print_exc()
    return memory


def about(job: dict) -> str:
    device = torch.cuda.get_device_name() if job["device"] == "cuda" else "CPU"
    return f"{device}, plaudit {plaudit.__version__}, torch {torch.__version__}, transformers {transformers.__version__}"


if __name__ == "__main__":
    run_jobs(sys.argv[1], run, about)
