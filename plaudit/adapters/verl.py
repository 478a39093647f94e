"""plaudit's rewards inside verl 0.9: its custom reward function.

    python -m verl.trainer.main_ppo … \\
        reward.custom_reward_function.path=pkg://plaudit.adapters.verl \\
        reward.custom_reward_function.name=compute_score_async \\
        +reward.custom_reward_function.reward_kwargs.rewards=/absolute/rewards.yaml

`compute_score_async` is for verl's reward loop with its usual manager (naive), which awaits many samples at once. `compute_score`
does the same and blocks: for managers that take plain functions only (remote). Each of verl's `reward.num_workers` processes has
rewards of its own, so 1 or 2 are enough: they start processes themselves where they need any.

The function gets a response's text, its `data_source`, `ground_truth` and `extra_info`; the prompt only if extra_info has it
(`prompt`, `question` or `problem`). `RewardManager` in `verl_manager.py` hands over prompt and token ids too.

A reward that fails has no value, and verl can neither drop a sample nor train on NaN. So the sample's failure is raised, and verl
stops with its cause, unless the recipe states a value (`on_failure: -1.0`). Nothing becomes 0 by itself.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from plaudit.adapters.scorer import Result, SharedScorer, refuse_groups, shared_scorer, value_of


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None, *, rewards: str, **_: Any
) -> dict[str, float]:
    """`score`, each reward's value by its name (NaN where it has none), and `malformed`."""
    scorer = _scorer(rewards)
    [result] = scorer.submit([_row(data_source, solution_str, ground_truth, extra_info)]).result()
    return as_verl_wants(result, scorer)


async def compute_score_async(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None, *, rewards: str, **_: Any
) -> dict[str, float]:
    """The same, for verl's event loop."""
    scorer = await asyncio.to_thread(_scorer, rewards)
    [result] = await asyncio.wrap_future(scorer.submit([_row(data_source, solution_str, ground_truth, extra_info)]))
    return as_verl_wants(result, scorer)


def as_verl_wants(result: Result, scorer: SharedScorer) -> dict[str, float]:
    """Always the same keys: verl reads those of a batch's first sample from all of them."""
    score = value_of(result, "verl")
    parts = {reward.label: result["parts"].get(reward.label, float("nan")) for reward in scorer.scorer.rewards}
    return {"score": score, **parts, "malformed": float(result["malformed"])}


def plain(value: Any) -> Any:
    """verl's rows hold numpy arrays and numbers where their file had lists and numbers."""
    match value:
        case np.ndarray() | np.generic():
            return plain(value.tolist())
        case Mapping():
            return {key: plain(item) for key, item in value.items()}
        case list() | tuple():
            return [plain(item) for item in value]
        case _:
            return value


def _scorer(rewards: str) -> SharedScorer:
    scorer = shared_scorer(rewards)
    refuse_groups(scorer.scorer, "verl")
    return scorer


def _row(data_source: str, text: str, ground_truth: Any, extra_info: Mapping[str, Any] | None) -> dict[str, Any]:
    extra = plain(extra_info or {})
    asked: str | Sequence = next((extra[name] for name in ("prompt", "question", "problem") if extra.get(name)), "")
    return {
        "prompt": asked,
        "response": text,
        "data_source": str(data_source),
        "ground_truth": plain(ground_truth),
        "extra_info": extra,
    }
