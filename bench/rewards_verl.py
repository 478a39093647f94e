"""verl's side of rewards.py: the same answers scored by verl 0.9.1's reward loop. Run in .venv-verl: rewards_verl.py JOB OUT

As in verl's training: `RewardLoopManager` with ray actors, on a DataProto with token ids, which its managers decode. Shared with
tests/adapters/side_verl.py.
"""

import json
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from omegaconf import OmegaConf
from rewards_mix import SYMBOLIC_ONLY, timed
from tensordict import TensorDict
from transformers import AutoTokenizer
from verl.experimental.reward_loop import RewardLoopManager
from verl.protocol import DataProto
from verl.utils.reward_score import math_verify


def batch_of(samples: list[dict[str, Any]], tokenizer: Any) -> DataProto:
    """Prompts padded on the left, responses on the right and with an end token, as verl's rollout leaves them."""

    def padded(texts: list[str], end: list[int], *, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
        ids = [[*tokens, *end] for tokens in tokenizer(texts, add_special_tokens=False)["input_ids"]]
        longest = max(map(len, ids))
        tokens, mask = (torch.zeros(len(ids), longest, dtype=torch.long) for _ in range(2))
        for row, tokens_of_row in enumerate(ids):
            place = slice(longest - len(tokens_of_row), None) if left else slice(0, len(tokens_of_row))
            tokens[row, place], mask[row, place] = torch.tensor(tokens_of_row), 1
        return tokens, mask

    prompts = [tokenizer.apply_chat_template(s["prompt"], add_generation_prompt=True, tokenize=False) for s in samples]
    prompt_ids, prompt_mask = padded(prompts, [], left=True)
    response_ids, response_mask = padded([s["response"] for s in samples], [tokenizer.eos_token_id], left=False)
    tensors = {"prompts": prompt_ids, "responses": response_ids, "attention_mask": torch.cat([prompt_mask, response_mask], 1)}
    columns = {
        "raw_prompt": [s["prompt"] for s in samples],
        "data_source": [s["data_source"] for s in samples],
        "reward_model": [{"style": "rule", "ground_truth": s["ground_truth"]} for s in samples],
        "extra_info": [dict(s.get("extra_info") or {}) for s in samples],
    }
    arrays = {name: np.empty(len(samples), dtype=object) for name in columns}
    for name, values in columns.items():
        arrays[name][:] = values
    return DataProto(batch=TensorDict(tensors, batch_size=len(samples)), non_tensor_batch=arrays)


def config_of(
    model: str, *, workers: int = 1, manager: dict[str, Any] | str = "naive", function: dict[str, Any] | None = None
) -> Any:
    """What verl's reward loop reads of a training config. `function`: the custom reward function, if not verl's own."""
    chosen = {"source": "register", "name": manager} if isinstance(manager, str) else manager
    return OmegaConf.create(
        {
            "actor_rollout_ref": {"model": {"path": model, "tokenizer_path": None}},
            "reward": {
                "num_workers": workers,
                "custom_reward_function": function or {"path": None, "name": "compute_score"},
                "reward_manager": chosen,
                "reward_model": {"enable": False},
            },
        }
    )


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """verl's math-verify scoring as a custom reward function, which is how verl's comments say to use it."""
    return math_verify.compute_score(solution_str, ground_truth)


class Loop:
    """verl's reward loop for one of its rewards, with its processes running."""

    def __init__(self, job: dict[str, Any], setting: dict[str, Any]):
        function = (
            {"path": str(Path(__file__).resolve()), "name": "compute_score"} if setting["function"] == "math_verify" else None
        )
        self._source = setting["function"] if function is None else "math"
        self._tokenizer = AutoTokenizer.from_pretrained(job["model"])
        self._loop = RewardLoopManager(
            config_of(job["model"], workers=setting["workers"], manager=setting["manager"], function=function)
        )
        self.score(self.batch(job["samples"][:32]))

    def batch(self, samples: Sequence[dict[str, Any]]) -> DataProto:
        return batch_of([{**sample, "data_source": self._source} for sample in samples], self._tokenizer)

    def score(self, batch: DataProto) -> list[float]:
        return self._loop.compute_rm_score(batch).batch["rm_scores"].sum(-1).tolist()

    def close(self) -> None:
        for worker in self._loop.reward_loop_workers:
            ray.kill(worker)


def best_of(job: dict[str, Any], settings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Find the fastest setting on a few answers, then score all of them with it."""
    tried = []
    for setting in settings:
        loop = Loop(job, setting)
        _, cost = timed(loop.score, loop.batch(job["samples"][: job["trial"]]))
        tried.append((cost["answers"] / cost["seconds"], setting))
        loop.close()
    setting = max(tried, key=lambda one: one[0])[1]
    loop = Loop(job, setting)
    scores, whole = timed(loop.score, loop.batch(job["samples"][: setting.get("answers")]))
    _, symbolic = timed(loop.score, loop.batch([sample for sample in job["samples"] if sample["symbolic"]][:SYMBOLIC_ONLY]))
    loop.close()
    trials = [{**one, "answers/s": round(rate, 1)} for rate, one in tried]
    return {**setting, "tried": trials, "scores": scores, "all": whole, "symbolic": symbolic}


def main(job: dict[str, Any]) -> dict[str, Any]:
    os.environ["RAY_AUTH_MODE"] = "disabled"
    ray.init(num_cpus=16, include_dashboard=False, log_to_driver=False, configure_logging=False)  # room for all actors
    results = {}
    for name, settings in job["settings"].items():
        results[name] = best_of(job, settings)
        print(f"  {name}: {results[name]['tried']}, all: {results[name]['all']}", file=sys.stderr, flush=True)
    ray.shutdown()
    return {"versions": {name: version(name) for name in ("verl", "math-verify", "sympy", "ray")}, "results": results}


if __name__ == "__main__":
    job_file, out_file = map(Path, sys.argv[1:])
    out_file.write_text(json.dumps(main(json.loads(job_file.read_text()))))
