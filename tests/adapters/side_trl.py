"""TRL's side of test_adapters.py, run with .venv-trl's Python: python tests/adapters/side_trl.py JOB.json OUT.json

Two steps of TRL 1.16's GRPOTrainer on a tiny model, with plaudit's rewards as its only reward function.
"""

import json
import sys
from pathlib import Path

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from plaudit.adapters.trl import reward_function


def main(job: dict, folder: Path) -> dict:
    calls: list[dict] = []
    rewards = reward_function(job["rewards"])

    def recorded(prompts, completions, **columns):
        values = rewards(prompts, completions, **columns)
        calls.append({"prompts": prompts, "completions": completions, "rewards": values})
        return values

    recorded.__name__ = rewards.__name__
    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=12,
        max_steps=2,
        learning_rate=1e-3,
        logging_steps=1,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=5,
    )
    trainer = GRPOTrainer(job["model"], reward_funcs=recorded, args=config, train_dataset=Dataset.from_list(job["rows"]))
    trainer.train()
    return {"calls": calls, "log": [entry for entry in trainer.state.log_history if "reward" in entry]}


if __name__ == "__main__":
    job_file, out_file = map(Path, sys.argv[1:])
    out_file.write_text(json.dumps(main(json.loads(job_file.read_text()), out_file.parent)))
