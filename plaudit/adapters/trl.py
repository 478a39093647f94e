"""plaudit's rewards inside TRL 1.16: one of its `reward_funcs`.

    from plaudit.adapters.trl import reward_function
    trainer = GRPOTrainer(model, reward_funcs=reward_function("rewards.yaml"), train_dataset=rows, …)

The data set's columns become the row that rewards see: `data_source`, `reward_model` or one of `ground_truth`, `solution` and
`answer`, `extra_info`; all others are found in extra_info. Prompts and completions may be text or messages. TRL repeats a prompt
for each of its samples, one after the other: equal neighbours are a group. (So a device's batch should be a multiple of
num_generations, or rewards that compare the samples of a group see parts of it.)

A reward that fails has no value: TRL gets None, leaves the sample out of its group's mean and deviation and gives it no advantage.
That holds while this is the only reward function, since TRL adds several up with None as 0: combine rewards in the recipe.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from statistics import fmean
from typing import Any

from plaudit.adapters.scorer import shared_scorer

GROUND_TRUTHS = ("ground_truth", "solution", "answer")
"""Columns that may hold it, where there is no `reward_model`."""
OWN = ("data_source", "reward_model", "extra_info", *GROUND_TRUTHS)
Logger = Callable[[str, float], None]


def reward_function(rewards: str | os.PathLike[str], name: str = "plaudit") -> "RewardFunction":
    """The rewards of a recipe (a `rewards:` list, or an RL recipe) as one reward function; TRL's metrics call it by its name."""
    return RewardFunction(os.path.abspath(rewards), name)


class RewardFunction:
    """Holds nothing but settings: TRL may send it to another process, where the rewards then start."""

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
        asked = [_asked(prompt, {name: values[i] for name, values in columns.items()}) for i, prompt in enumerate(prompts)]
        answers = [(text_of(completion), length) for completion, length in zip(completions, lengths, strict=True)]
        results = _ungrouped(shared_scorer(self.rewards).submit(_grouped(asked, answers)).result())
        if log_metric is not None:
            _log(results, self.__name__, log_metric)
        return [result["reward"] for result in results]


def text_of(completion: Any) -> str:
    """What the policy wrote last: a completion is a text, or messages, of which tools may have written some."""
    if isinstance(completion, str):
        return completion
    written = [message["content"] for message in completion if message.get("role", "assistant") == "assistant"]
    content = (written or [""])[-1] or ""
    return content if isinstance(content, str) else "".join(part.get("text") or "" for part in content)


def _asked(prompt: Any, columns: Mapping[str, Any]) -> dict[str, Any]:
    """A row without its response."""
    truth = next((columns[name] for name in GROUND_TRUTHS if columns.get(name) is not None), None)
    others = {name: value for name, value in columns.items() if name not in OWN}
    return {
        "prompt": prompt,
        "data_source": columns.get("data_source") or "",
        "ground_truth": (columns.get("reward_model") or {}).get("ground_truth", truth),
        "extra_info": {**others, **(columns.get("extra_info") or {})},
    }


def _grouped(asked: Sequence[dict[str, Any]], answers: Sequence[tuple[str, int | None]]) -> list[dict[str, Any]]:
    """Equal neighbours as one row with several responses, and the number of tokens of each."""
    rows = []
    for row, members in groupby(zip(asked, answers, strict=True), key=lambda pair: pair[0]):
        texts, lengths = zip(*(answer for _, answer in members), strict=True)
        rows.append({**row, "responses": list(texts), "tokens": list(lengths)})
    return rows


def _ungrouped(results: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One result per response again."""
    return [
        {name: values[i] for name, values in result.items() if isinstance(values, list)}
        for result in results
        for i in range(len(result["reward"]))
    ]


def _log(results: Sequence[Mapping[str, Any]], name: str, log_metric: Logger) -> None:
    """The mean of each part over the samples that have it, and the shares of malformed and failed samples."""
    for part in dict.fromkeys(part for result in results for part in result["parts"]):
        log_metric(f"{name}/{part}", fmean(result["parts"][part] for result in results if part in result["parts"]))
    log_metric(f"{name}/malformed", fmean(result["malformed"] for result in results))
    log_metric(f"{name}/failed", fmean(result["reward"] is None for result in results))
