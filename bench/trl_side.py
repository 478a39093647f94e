"""TRL's side of parity_trl.py: trains each job's rows with TRL's own trainer; logs each step and, for GRPO, the gradients.

Run with the side environment's Python: python bench/trl_side.py JOBS.json LOG.json
"""

import gc
import json
import math
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from datasets import Dataset
from safetensors.torch import save_file
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer


class PlauditWarmupSFTTrainer(SFTTrainer):
    """TRL's trainer with a warm-up of (k + 1) / w: with TRL's own k / w the first step would have a learning rate of 0."""

    def create_scheduler(self, num_training_steps, optimizer=None):
        warmup, low = self.args.warmup_steps, self.args.lr_scheduler_kwargs["min_lr_rate"]

        def share(k: int) -> float:
            if k < warmup:
                return (k + 1) / warmup
            return low + (1 - low) * (1 + math.cos(math.pi * (k - warmup) / (num_training_steps - warmup))) / 2

        self.lr_scheduler = LambdaLR(optimizer or self.optimizer, share)
        return self.lr_scheduler


class TokenisedDPOTrainer(DPOTrainer):
    """TRL's trainer without tokenising: the job's rows are already tokens, in order."""

    def _prepare_dataset(self, dataset, *arguments, **settings):
        return dataset


class OlderSamplesGRPOTrainer(GRPOTrainer):
    """TRL's trainer with samples from another policy: ratios are taken against the sampler's log-probs."""

    def _generate_and_score_completions(self, inputs):
        prepared = super()._generate_and_score_completions(inputs)
        return {**prepared, "old_per_token_logps": prepared["sampling_per_token_logps"]}


class KeepGradients(TrainerCallback):
    """Keeps the gradients of the full step, just before the optimiser uses them."""

    def __init__(self):
        self.gradients: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(self, args, state, control, *, model, **_):
        self.gradients = {name: p.grad.clone() for name, p in model.named_parameters()}


def settings_of(job: dict, folder: Path) -> dict:
    """Arguments of all trainers: the job's rows are one epoch, already in order."""
    return {
        "output_dir": str(folder / "trl"),
        "num_train_epochs": 1,
        "per_device_train_batch_size": job["rows_per_micro_batch"],
        "gradient_accumulation_steps": job["rows_per_step"] // job["rows_per_micro_batch"],
        "bf16": False,
        "gradient_checkpointing": False,  # of models this small it only takes time
        "use_cpu": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        **job["settings"],
    }


def train(job: dict, folder: Path) -> list[dict[str, float]]:
    """SFT, DPO or a reward model: loss, gradient norm and learning rate of each step."""
    optim = job["optim"]
    settings = {
        **settings_of(job, folder),
        "train_sampling_strategy": "sequential",
        "max_length": None,
        "learning_rate": optim["lr"],
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr_rate": optim["min_lr_ratio"]},
        "warmup_steps": optim["warmup_steps"],
        "adam_beta1": optim["betas"][0],
        "adam_beta2": optim["betas"][1],
        "adam_epsilon": optim["eps"],
        "weight_decay": optim["weight_decay"],
        "max_grad_norm": optim["max_grad_norm"],
    }
    rows = Dataset.from_list(job["rows"])
    if job["stage"] == "sft":
        trainer_class = PlauditWarmupSFTTrainer if optim["warmup_steps"] else SFTTrainer
        trainer = trainer_class(job["model"], SFTConfig(**settings), train_dataset=rows)
    elif job["stage"] == "dpo":
        trainer = TokenisedDPOTrainer(job["model"], args=DPOConfig(**settings), train_dataset=rows)
    else:
        model = AutoModelForSequenceClassification.from_pretrained(job["model"], dtype=torch.float32)
        trainer = RewardTrainer(model, RewardConfig(**settings), train_dataset=rows)
    trainer.train()
    trainer.save_model(job["trained_model"])
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def first_gradients(job: dict, folder: Path) -> list[dict[str, float]]:
    """GRPO: the loss of the first step. Advantages, the reference's log-probs and the loss are TRL's; only the samples are
    given. Writes the gradients."""
    samples = job["rows"]
    tokens = [sample["completion_ids"] for sample in samples]

    def sampled_already(prompts: list[str], _) -> dict[str, list]:
        assert prompts == [sample["prompt"] for sample in samples], "all samples of the step, in their order"
        return {"prompt_ids": [sample["prompt_ids"] for sample in samples], "completion_ids": tokens,
                "logprobs": [sample["logprobs"] for sample in samples]}  # fmt: skip

    def scored_already(*, completion_ids: list[list[int]], **_) -> list[float]:
        assert completion_ids == tokens
        return [sample["reward"] for sample in samples]

    n = job["samples_per_prompt"]
    settings = {**settings_of(job, folder), "num_generations": n, "shuffle_dataset": False, "max_grad_norm": 0.0}
    prompts = Dataset.from_list([{"prompt": sample["prompt"]} for sample in samples[::n]])
    kept = KeepGradients()
    trainer = (OlderSamplesGRPOTrainer if job["older"] else GRPOTrainer)(
        job["model"], scored_already, GRPOConfig(**settings), prompts, callbacks=[kept], rollout_func=sampled_already
    )
    if trainer.ref_model is not None:  # TRL's is the policy itself, with a KL of 0
        trainer.ref_model.load_state_dict(AutoModelForCausalLM.from_pretrained(job["reference"]).state_dict())
    trainer.train()
    save_file(kept.gradients, job["gradients"])
    return [trainer.state.log_history[0]]


if __name__ == "__main__":
    jobs_file, log_file = map(Path, sys.argv[1:])
    gc.freeze()  # accelerate searches all that is in memory for garbage after each training
    steps = [
        (first_gradients if job["stage"] == "grpo" else train)(job, log_file.parent) for job in json.loads(jobs_file.read_text())
    ]
    versions = {name: version(name) for name in ("trl", "transformers", "torch")}
    log_file.write_text(json.dumps({"versions": versions, "steps": steps}))
