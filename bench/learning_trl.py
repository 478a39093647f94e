"""TRL's side of learning.py: GRPO, one seed after another, validated as plaudit's runs are.

Run with a Python that has TRL and what plaudit needs, for the system `trl` vLLM, too:
python bench/learning_trl.py JOB.json
"""

import gc
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from rollout_work import end_with_parent
from step_work import append, leave, now
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl_engine import forget_ranks, start_vllm_once

from plaudit.adapters.trl import reward_function


def read_rows(file: str, limit: int | None = None) -> list[dict[str, Any]]:
    """Prompts with their ground truth, as columns that plaudit's rewards know."""
    if file.endswith(".parquet"):
        rows = Dataset.from_parquet(file).to_list()
    else:
        rows = [json.loads(line) for line in Path(file).read_text().splitlines()]
    return [
        {"prompt": row["prompt"], "data_source": row["data_source"], "ground_truth": row["reward_model"]["ground_truth"]}
        for row in rows[:limit]
    ]


class Validation(TrainerCallback):
    """Before the first step and every few: samples of all validation rows. Its time does not count as training."""

    def __init__(self, job: dict, seed: int, rows: list[dict[str, Any]], tokenizer: Any, rewards: Any):
        self.job, self.seed, self.rewards, self.trainer = job, seed, rewards, None
        self.rows = [row for row in rows for _ in range(job["val_n"])]
        self.prompts = tokenizer.apply_chat_template(
            [row["prompt"] for row in self.rows], add_generation_prompt=True, tokenize=True, return_dict=True
        )["input_ids"]
        self.tokenizer, self.trained, self.resumed = tokenizer, 0.0, 0.0

    def on_train_begin(self, args, state, control, **_):
        self.validate(0)
        self.resumed = now()

    def on_step_end(self, args, state, control, **_):
        self.trained += now() - self.resumed
        ends = state.global_step == self.job["steps"] or self.trained > self.job["seconds"]
        if ends or state.global_step % self.job["every"] == 0:
            self.validate(state.global_step)
        control.should_training_stop = ends
        self.resumed = now()

    def validate(self, step: int) -> None:
        tokens = self.sample()
        texts = self.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        columns = {name: [row[name] for row in self.rows] for name in ("data_source", "ground_truth")}
        scores = self.rewards([row["prompt"] for row in self.rows], texts, **columns)
        assert None not in scores, "a reward failed"
        found = {"step": step, "seconds": self.trained, "reward": sum(scores) / len(scores)}
        print(f"seed {self.seed}: {found}", flush=True)
        append(self.job["results"], {"system": self.job["system"], "seed": self.seed, "began": self.job["began"], **found})

    def sample(self) -> list[list[int]]:
        if not self.trainer.use_vllm:
            return self.trainer._generate_single_turn(self.prompts, None, {}, 1)[0]
        engine = self.trainer.vllm_generation
        engine.sync_weights()
        return engine.generate(self.prompts, None, num_generations=1)[1]


def learn(job: dict, seed: int, began: float) -> None:
    forget_ranks()
    on_cpu, with_vllm = job["device"] == "cpu", job["system"] == "trl"
    tokenizer = AutoTokenizer.from_pretrained(job["model"], padding_side="left")
    rewards = reward_function(job["rewards_file"])
    settings = GRPOConfig(
        output_dir=job["out"], max_steps=job["steps"], seed=seed, per_device_train_batch_size=job["prompts"] * job["n"],
        gradient_accumulation_steps=1, num_generations=job["n"], max_completion_length=job["new_tokens"], temperature=1.0,
        loss_type="dapo", scale_rewards="group", beta=0.0, num_iterations=1, learning_rate=job["lr"],
        lr_scheduler_type="constant", optim="adamw_torch_fused", weight_decay=0.0, max_grad_norm=1.0,
        adam_beta1=0.9, adam_beta2=0.999, adam_epsilon=1e-8, bf16=not on_cpu, gradient_checkpointing=False, use_cpu=on_cpu,
        use_vllm=with_vllm, vllm_mode="colocate", vllm_gpu_memory_utilization=0.3, vllm_max_model_length=512,
        model_init_kwargs={"dtype": "float32"}, save_strategy="no", report_to="none", disable_tqdm=True, logging_strategy="no",
        logging_nan_inf_filter=False,
    )  # fmt: skip
    validation = Validation(job, seed, read_rows(job["val"], job["val_prompts"]), tokenizer, rewards)
    trainer = GRPOTrainer(
        job["model"], rewards, settings, Dataset.from_list(read_rows(job["train"])), processing_class=tokenizer,
        callbacks=[validation],
    )  # fmt: skip
    validation.trainer = trainer
    if on_cpu and with_vllm:  # a smoke test: vLLM's build for CPUs repacks weights when it starts and takes no others
        trainer.vllm_generation.sync_weights = lambda: None
    trainer.train()
    found = {"whole_s": time.time() - began, "trained_s": validation.trained}
    append(job["results"], {"system": job["system"], "seed": seed, "began": job["began"], **found})


def main() -> None:
    end_with_parent()
    job = json.loads(Path(sys.argv[1]).read_text())
    if job["system"] == "trl":
        start_vllm_once(**({"enforce_eager": True} if job["device"] == "cpu" else {}))
    began = job["began"]
    for seed in range(job["seeds"]):
        try:
            learn(job, seed, began)
        except Exception as error:  # the other seeds are still run
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
            append(job["results"], {"system": job["system"], "seed": seed, "began": job["began"], **found})
            if isinstance(error, torch.OutOfMemoryError) or "CUDA" in str(error):  # nothing works in this process any more
                leave(3)
        gc.unfreeze()  # vLLM's start freezes what exists by then: the first trainer
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        began = time.time()
    leave(0)


if __name__ == "__main__":
    main()
