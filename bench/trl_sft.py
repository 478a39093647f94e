"""TRL's half of parity_trl.py: trains on a job's rows with TRL's SFTTrainer and writes what it logs at each step.

Run by the side environment's Python: python bench/trl_sft.py JOB.json LOG.json
"""

import json
import math
import sys
from importlib.metadata import version
from pathlib import Path

from datasets import Dataset
from torch.optim.lr_scheduler import LambdaLR
from trl import SFTConfig, SFTTrainer


class WarmedUpFromOne(SFTTrainer):
    """TRL's trainer but for the warm-up, which is (k + 1) / w: with TRL's own k / w the first step would not move."""

    def create_scheduler(self, num_training_steps, optimizer=None):
        warmup, low = self.args.warmup_steps, self.args.lr_scheduler_kwargs["min_lr_rate"]

        def share(k: int) -> float:
            if k < warmup:
                return (k + 1) / warmup
            return low + (1 - low) * (1 + math.cos(math.pi * (k - warmup) / (num_training_steps - warmup))) / 2

        self.lr_scheduler = LambdaLR(optimizer or self.optimizer, share)
        return self.lr_scheduler


def train(job: dict, folder: Path) -> list[dict[str, float]]:
    """Loss, gradient norm and learning rate of each step. The job's rows are one epoch, already in order."""
    optim = job["optim"]
    config = SFTConfig(
        output_dir=str(folder),
        num_train_epochs=1,
        train_sampling_strategy="sequential",
        max_length=None,
        per_device_train_batch_size=job["rows_per_micro_batch"],
        gradient_accumulation_steps=job["rows_per_step"] // job["rows_per_micro_batch"],
        learning_rate=optim["lr"],
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": optim["min_lr_ratio"]},
        warmup_steps=optim["warmup_steps"],
        adam_beta1=optim["betas"][0],
        adam_beta2=optim["betas"][1],
        adam_epsilon=optim["eps"],
        weight_decay=optim["weight_decay"],
        max_grad_norm=optim["max_grad_norm"],
        bf16=False,
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer_class = WarmedUpFromOne if optim["warmup_steps"] else SFTTrainer
    trainer = trainer_class(job["model"], config, train_dataset=Dataset.from_list(job["rows"]))
    trainer.train()
    trainer.save_model(job["trained_model"])
    return [entry for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    job_file, log_file = map(Path, sys.argv[1:])
    steps = train(json.loads(job_file.read_text()), log_file.parent)
    versions = {name: version(name) for name in ("trl", "transformers", "torch")}
    log_file.write_text(json.dumps({"versions": versions, "steps": steps}))
