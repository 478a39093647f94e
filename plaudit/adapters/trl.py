"""plaudit's rewards in TRL 1.16: an entry of `reward_funcs`.

    from plaudit.adapters.trl import reward_function
    trainer = GRPOTrainer(model, reward_funcs=reward_function("rewards.yaml"), train_dataset=rows, …)

The data set's columns become the row that rewards see: `data_source`, the ground truth (docs/rows.md lists its names),
`extra_info`; all others go into extra_info. Prompts and completions may be text or messages. TRL repeats a prompt for
each of its samples, so equal adjacent prompts form a group. (The per-device batch should be a multiple of num_generations;
otherwise rewards that compare the samples of a group see only some of them.)

A failed reward has no value: TRL gets None, excludes the sample from its group's mean and standard deviation, and gives it no
advantage. This holds only while it is the sole reward function, because TRL counts None as 0 when summing several: combine rewards
in the recipe.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from statistics import fmean
from typing import Any

from plaudit.adapters.shared_scorer import shared_scorer
from plaudit.data.columns import GROUND_TRUTHS
from plaudit.data.conversations import parse_ground_truth

KNOWN_COLUMNS = ("data_source", "reward_model", "extra_info", *GROUND_TRUTHS)
Logger = Callable[[str, float], None]


def reward_function(rewards: str | os.PathLike[str], name: str = "plaudit") -> "RewardFunction":
    """A recipe's rewards (a `rewards:` list, or an RL recipe) as one reward function, called `name` in TRL's metrics."""
    return RewardFunction(os.path.abspath(rewards), name)


class RewardFunction:
    """Holds only settings, so that TRL can send it to another process, where the rewards start."""

    def __init__(self, rewards: str, name: str):
        self.rewards = rewards
        self.__name__ = name

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]] | None = None,
        log_metric: Logger | None = None,
        **columns: Any,
    ) -> list[float | None]:
        lengths = [None] * len(prompts) if completion_ids is None else [len(ids) for ids in completion_ids]
        columns = {name: values for name, values in columns.items() if isinstance(values, list) and len(values) == len(prompts)}
        rows = [_row(prompt, {name: values[i] for name, values in columns.items()}) for i, prompt in enumerate(prompts)]
        responses = [(completion_text(completion), length) for completion, length in zip(completions, lengths, strict=True)]
        results = _ungroup(shared_scorer(self.rewards).submit(_group(rows, responses)).result())
        if log_metric is not None:
            _log(results, self.__name__, log_metric)
        return [result["reward"] for result in results]


def completion_text(completion: Any) -> str:
    """A completion's text; of messages, which may include tool results, the last assistant message."""
    if isinstance(completion, str):
        return completion
    contents = [message["content"] for message in completion if message.get("role", "assistant") == "assistant"]
    content = (contents or [""])[-1] or ""
    return content if isinstance(content, str) else "".join(part.get("text") or "" for part in content)


def _row(prompt: Any, columns: Mapping[str, Any]) -> dict[str, Any]:
    """A row without its response."""
    extra = {name: value for name, value in columns.items() if name not in KNOWN_COLUMNS}
    return {
        "prompt": prompt,
        "data_source": columns.get("data_source") or "",
        "ground_truth": parse_ground_truth(columns, "the data set"),
        "extra_info": {**extra, **(columns.get("extra_info") or {})},
    }


def _group(rows: Sequence[dict[str, Any]], responses: Sequence[tuple[str, int | None]]) -> list[dict[str, Any]]:
    """Merge equal adjacent rows into one row with several responses and their token counts."""
    groups = []
    for row, members in groupby(zip(rows, responses, strict=True), key=lambda pair: pair[0]):
        texts, lengths = zip(*(response for _, response in members), strict=True)
        groups.append({**row, "responses": list(texts), "tokens": list(lengths)})
    return groups


def _ungroup(results: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Split grouped results into one per response."""
    return [
        {name: values[i] for name, values in result.items() if isinstance(values, list)}
        for result in results
        for i in range(len(result["reward"]))
    ]


def _log(results: Sequence[Mapping[str, Any]], name: str, log_metric: Logger) -> None:
    """Log the mean of each part over the samples that have it, and the shares of malformed and failed samples."""
    for part in dict.fromkeys(part for result in results for part in result["parts"]):
        log_metric(f"{name}/{part}", fmean(result["parts"][part] for result in results if part in result["parts"]))
    log_metric(f"{name}/malformed", fmean(result["malformed"] for result in results))
    log_metric(f"{name}/failed", fmean(result["reward"] is None for result in results))
