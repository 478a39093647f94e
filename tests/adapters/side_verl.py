"""verl's side of test_adapters.py, run with .venv-verl's Python: python tests/adapters/side_verl.py JOB.json OUT.json

Scores the job's samples as verl 0.9.1's trainer does: with its reward loop manager and ray workers, on a DataProto with token ids.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import ray
from transformers import AutoTokenizer
from verl.experimental.reward_loop import RewardLoopManager
from verl.experimental.reward_loop.reward_loop import RewardLoopWorker

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from rewards_verl import batch_of, config_of

PLAUDIT_MANAGER = {"source": "importlib", "name": "RewardManager", "module": {"path": "pkg://plaudit.adapters.verl_manager"}}


def make_config(job: dict[str, Any], function: str, rewards: str, manager: dict[str, Any] | str = "naive") -> Any:
    reward_function = {"path": "pkg://plaudit.adapters.verl", "name": function, "reward_kwargs": {"rewards": job[rewards]}}
    return config_of(job["model"], manager=manager, function=reward_function)


def main(job: dict[str, Any]) -> dict[str, Any]:
    batch = batch_of(job["samples"], AutoTokenizer.from_pretrained(job["model"]))
    out: dict[str, Any] = {}

    # End to end with ray actors, as verl's trainers call it.
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    scored = RewardLoopManager(make_config(job, "compute_score_async", "rewards")).compute_rm_score(batch)
    out["rm_scores"] = scored.batch["rm_scores"].tolist()
    out["extra"] = {name: scored.non_tensor_batch[name].tolist() for name in scored.meta_info["reward_extra_keys"]}
    ray.shutdown()

    # The same worker in this process: the synchronous function, plaudit's manager, and failing rewards.
    async def score(config: Any) -> list[float]:
        return [result["reward_score"] for result in await RewardLoopWorker(config).compute_score_batch(batch)]

    for name, config in {
        "sync": make_config(job, "compute_score", "rewards"),
        "manager": make_config(job, "compute_score", "lengths", PLAUDIT_MANAGER),
        "failing": make_config(job, "compute_score_async", "failing"),
        "stated": make_config(job, "compute_score_async", "stated"),
    }.items():
        try:
            out[name] = asyncio.run(score(config))
        except Exception as error:
            out[name] = f"{type(error).__name__}: {error}"
    return out


if __name__ == "__main__":
    job_file, out_file = map(Path, sys.argv[1:])
    out_file.write_text(json.dumps(main(json.loads(job_file.read_text()))))
