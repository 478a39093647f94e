"""What a step's samples show of over-optimisation, one number each: the diagnostics page draws them by step.

With r the reward and l the length of sample i of group g:

    length correlation   Pearson's r of (l_gi − mean l_g) and (r_gi − mean r_g): within groups, so that hard prompts, which need
                         longer answers, do not look like a preference for length
    distinct-2           different pairs of words / all pairs of words, over the responses of a step
    duplicates           samples whose response an earlier sample of the same group has too
    copied               runs of three words of the responses that their prompts have too
    repeated             words of the prompt that a response has too, mean over responses
"""

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from plaudit.statistics.group_spread import group_spread
from plaudit.viewing.step_summary import groups_of, lengths_of, mean, numbers, summarise

WORD = re.compile(r"\w+|[^\w\s]")
MAX_CHARACTERS = 4000
"""Of a response, for the statistics of words."""
MIN_SAMPLES = 4
"""Of a correlation."""


def is_needed(name: str) -> bool:
    named = ("prompt_id", "index", "prompt", "response", "reward", "tokens", "status", "malformed", "failure")
    return name in named or name.startswith(("part/", "failure/"))


def step_statistics(table: pa.Table, judges: Sequence[str], rules: Sequence[str]) -> dict[str, float]:
    """`judges`, `rules`: components that a judge or a rule gave, to compare where both did."""
    if not table.num_rows:
        return {}
    rewards, lengths = numbers(table, "reward"), lengths_of(table)
    responses = [text or "" for text in table.column("response").to_pylist()]
    starts, groups = groups_of(table)
    parts = {name.removeprefix("part/"): numbers(table, name) for name in table.column_names if name.startswith("part/")}
    result = {
        **summarise(table),
        "length correlation": within_groups(lengths, rewards, groups),
        "duplicates": _duplicates(responses, groups),
        **_word_statistics(table, responses, starts),
    }
    for name, values in parts.items():
        result[f"part/{name}"] = mean(values)
        result[f"length correlation/{name}"] = within_groups(lengths, values, groups)
        result[f"with total/{name}"] = within_groups(values, rewards, groups)
        if (found := group_spread(values, groups)) is not None:
            result |= {f"group_std/{name}": found.spread, f"signal/{name}": found.signal}
    for judge in judges:
        for rule in rules:
            if judge in parts and rule in parts:
                result[f"agreement/{judge} and {rule}"] = correlation(parts[judge], parts[rule])
    return {name: value for name, value in result.items() if value is not None and np.isfinite(value)}


def correlation(a: np.ndarray, b: np.ndarray) -> float | None:
    """Pearson's, over samples that have both; None if either is constant."""
    both = np.isfinite(a) & np.isfinite(b)
    a, b = a[both], b[both]
    if len(a) < MIN_SAMPLES:
        return None
    a, b = a - a.mean(), b - b.mean()
    scale = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / scale if scale > 1e-12 else None


def within_groups(a: np.ndarray, b: np.ndarray, groups: np.ndarray) -> float | None:
    """The correlation of deviations from the group's means."""
    both = np.isfinite(a) & np.isfinite(b)
    if both.sum() < MIN_SAMPLES:
        return None
    a, b, groups = a[both], b[both], groups[both]
    counts = np.maximum(np.bincount(groups), 1)
    return correlation(a - (np.bincount(groups, a) / counts)[groups], b - (np.bincount(groups, b) / counts)[groups])


def _duplicates(responses: Sequence[str], groups: np.ndarray) -> float:
    return 1 - len(set(zip(groups.tolist(), responses, strict=True))) / len(responses)


def _word_statistics(table: pa.Table, responses: Sequence[str], starts: Sequence[int]) -> dict[str, float | None]:
    pairs: set[tuple[str, str]] = set()
    all_pairs = copied = in_runs = 0
    repeated: list[float] = []
    prompts = table.column("prompt").take(pa.array(starts, pa.int64())).to_pylist()
    for start, end, prompt in zip(starts, [*starts[1:], len(responses)], prompts, strict=True):
        words = WORD.findall(_prompt_text(prompt)[:MAX_CHARACTERS].lower())
        asked = set(words)
        of_prompt = set(zip(words, words[1:], words[2:], strict=False))
        for response in responses[start:end]:
            words = WORD.findall(response[:MAX_CHARACTERS].lower())
            twos, threes = list(pairwise(words)), list(zip(words, words[1:], words[2:], strict=False))
            pairs.update(twos)
            repeated += [len(asked & set(words)) / len(asked)] if asked else []
            all_pairs += len(twos)
            in_runs += len(threes)
            copied += sum(three in of_prompt for three in threes)
    return {
        "distinct-2": len(pairs) / all_pairs if all_pairs else None,
        "copied from the prompt": copied / in_runs if in_runs else None,
        "words of the prompt": sum(repeated) / len(repeated) if repeated else None,
    }


def _prompt_text(messages: Sequence[Mapping[str, Any]] | None) -> str:
    return "\n".join(message["content"] or "" for message in messages or ())
