"""plaudit's rewards in verl 0.9: a custom reward function.

    python -m verl.trainer.main_ppo … \\
        reward.custom_reward_function.path=pkg://plaudit.adapters.verl \\
        reward.custom_reward_function.name=compute_score_async \\
        +reward.custom_reward_function.reward_kwargs.rewards=/absolute/rewards.yaml

`compute_score_async` is for verl's reward loop with its default manager (naive), which awaits many samples at once. `compute_score`
is the blocking form, for managers that take only synchronous functions (remote). Each of verl's `reward.num_workers` processes has
its own rewards, so 1 or 2 are enough: rewards start worker processes themselves if they need any.

The function gets a response's text, its `data_source`, `ground_truth` and `extra_info`; the prompt only if extra_info has it
(`prompt`, `question` or `problem`). `RewardManager` in `verl_manager.py` passes the prompt and token ids too.

A failed reward has no value, and verl can neither drop a sample nor train on NaN. So the failure is raised and verl stops with its
cause, unless the recipe sets a value (`on_failure: -1.0`). A failure never becomes 0.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from plaudit.adapters.shared_scorer import Result, SharedScorer, refuse_groups, shared_scorer, value_of


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None, *, rewards: str, **_: Any
) -> dict[str, float]:
    """`score`, each reward's value by name (NaN if it has none), and `malformed`."""
    scorer = _scorer(rewards)
    [result] = scorer.submit([_row(data_source, solution_str, ground_truth, extra_info)]).result()
    return to_verl_result(result, scorer)


async def compute_score_async(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None, *, rewards: str, **_: Any
) -> dict[str, float]:
    """The same, for verl's event loop."""
    scorer = await asyncio.to_thread(_scorer, rewards)
    [result] = await asyncio.wrap_future(scorer.submit([_row(data_source, solution_str, ground_truth, extra_info)]))
    return to_verl_result(result, scorer)


def to_verl_result(result: Result, scorer: SharedScorer) -> dict[str, float]:
    """Always the same keys: verl expects those of a batch's first sample in all of its samples."""
    score = value_of(result, "verl")
    parts = {reward.label: result["parts"].get(reward.label, float("nan")) for reward in scorer.scorer.rewards}
    return {"score": score, **parts, "malformed": float(result["malformed"])}


def to_builtin(value: Any) -> Any:
    """Convert the numpy arrays and scalars in verl's rows back to Python lists and numbers."""
    match value:
        case np.ndarray() | np.generic():
            return to_builtin(value.tolist())
        case Mapping():
            return {key: to_builtin(item) for key, item in value.items()}
        case list() | tuple():
            return [to_builtin(item) for item in value]
        case _:
            return value


def _scorer(rewards: str) -> SharedScorer:
    scorer = shared_scorer(rewards)
    refuse_groups(scorer.scorer, "verl")
    return scorer


def _row(data_source: str, text: str, ground_truth: Any, extra_info: Mapping[str, Any] | None) -> dict[str, Any]:
    extra = to_builtin(extra_info or {})
    prompt: str | Sequence = next((extra[name] for name in ("prompt", "question", "problem") if extra.get(name)), "")
    return {
        "prompt": prompt,
        "response": text,
        "data_source": str(data_source),
        "ground_truth": to_builtin(ground_truth),
        "extra_info": extra,
    }
