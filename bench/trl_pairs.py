"""TRL's half of parity_trl_pairs.py: trains on a job's pairs with TRL's DPOTrainer or RewardTrainer and writes what it logs.

Run by the side environment's Python: python bench/trl_pairs.py JOB.json LOG.json
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForSequenceClassification
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer


class TokenisedDPOTrainer(DPOTrainer):
    """TRL's trainer but for tokenising: the job's rows are tokens already, and in order."""

    def _prepare_dataset(self, dataset, *arguments, **settings):
        return dataset


def train(job: dict, folder: Path) -> list[dict[str, float]]:
    """Loss, gradient norm and learning rate of each step. The job's rows are one epoch, already in order."""
    optim = job["optim"]
    settings = {
        "output_dir": str(folder),
        "num_train_epochs": 1,
        "train_sampling_strategy": "sequential",
        "max_length": None,
        "per_device_train_batch_size": job["rows_per_micro_batch"],
        "gradient_accumulation_steps": job["rows_per_step"] // job["rows_per_micro_batch"],
        "learning_rate": optim["lr"],
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr_rate": optim["min_lr_ratio"]},
        "adam_beta1": optim["betas"][0],
        "adam_beta2": optim["betas"][1],
        "adam_epsilon": optim["eps"],
        "weight_decay": optim["weight_decay"],
        "max_grad_norm": optim["max_grad_norm"],
        "bf16": False,
        "use_cpu": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        **job["settings"],
    }
    rows = Dataset.from_list(job["rows"])
    if job["stage"] == "dpo":
        trainer = TokenisedDPOTrainer(job["model"], args=DPOConfig(**settings), train_dataset=rows)
    else:
        model = AutoModelForSequenceClassification.from_pretrained(job["model"], dtype=torch.float32)
        trainer = RewardTrainer(model, RewardConfig(**settings), train_dataset=rows)
    trainer.train()
    trainer.save_model(job["trained_model"])
    return [entry for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    job_file, log_file = map(Path, sys.argv[1:])
    steps = train(json.loads(job_file.read_text()), log_file.parent)
    versions = {name: version(name) for name in ("trl", "transformers", "torch")}
    log_file.write_text(json.dumps({"versions": versions, "steps": steps}))
