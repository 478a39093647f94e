"""Rows with responses that somebody has sampled → groups, as rewards take them.

A row has `prompt` (messages or text), `response` or `responses`, and what rewards may need: `data_source`,
`reward_model.ground_truth` (or `ground_truth`), `extra_info`, `tokens` (how many each response has).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from plaudit.data.conversations import parse_prompt
from plaudit.errors import DataError
from plaudit.types import Group, SavedSample

NOTHING = np.zeros(0, dtype=np.float32)


def parse_group(row: Mapping[str, Any], id: str, where: str) -> Group:
    """The row's responses as a group."""
    texts, counts = parse_responses(row, where)
    if "ground_truth" in row and not row.get("reward_model"):
        row = {**row, "reward_model": {"ground_truth": row["ground_truth"]}}
    row = {"prompt": ""} | {name: _plain(value) for name, value in row.items()}
    prompt = parse_prompt(row, str(row.get("id") or id), where)
    tokens = NOTHING.astype(np.int32)
    samples = [
        SavedSample(prompt.id, i, tokens, text, "finished", NOTHING, NOTHING, 0, count)
        for i, (text, count) in enumerate(zip(texts, counts, strict=True))
    ]
    return Group(prompt, tokens, tuple(samples))


def parse_responses(row: Mapping[str, Any], where: str) -> tuple[list[str], list[int | None]]:
    """Their texts, and how many tokens each has, where the row says so."""
    if ("response" in row) == ("responses" in row):
        found = ", ".join(map(str, row)) or "nothing"
        raise DataError(f"{where}: a row to score has `response` (text) or `responses` (a list of texts); this one has {found}")
    given = _plain(row["responses"]) if "responses" in row else [row["response"]]
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        raise DataError(f"{where}: `responses` should be a list of texts, not {given!r:.80}")
    counts: Any = _plain(row.get("tokens"))
    counts = list(counts) if isinstance(counts, list | tuple) else [counts] * (1 if counts is not None else len(given))
    counts = [int(count) if isinstance(count, float) and count.is_integer() else count for count in counts]
    if len(counts) != len(given) or not all(isinstance(count, int | None) for count in counts):
        raise DataError(f"{where}: `tokens` should be the number of tokens of each response, not {row['tokens']!r:.80}")
    return [_text(response, where) for response in given], counts


def token_counter(tokenizer: str | None) -> Callable[[str], int] | None:
    """How many tokens a response has; the end token, which its text does not show, is one of them."""
    if tokenizer is None:
        return None
    from plaudit.data.templates import load_tokenizer

    encode = load_tokenizer(tokenizer)
    return lambda text: len(encode(text, add_special_tokens=False)["input_ids"]) + 1  # pyright: ignore


def with_token_counts(group: Group, count: Callable[[str], int] | None) -> Group:
    """With the number of tokens of each response that comes without it, if somebody counts."""
    if count is None:
        return group
    samples = [
        replace(sample, token_count=count(sample.text))
        if isinstance(sample, SavedSample) and sample.token_count is None
        else sample
        for sample in group.samples
    ]
    return replace(group, samples=tuple(samples))


def _plain(value: Any) -> Any:
    """Lists and numbers for numpy's, which rows from pandas hold."""
    return value.tolist() if hasattr(value, "tolist") else value


def _text(response: Any, where: str) -> str:
    """A response as text; of messages, what the assistant says last."""
    if isinstance(response, Sequence) and not isinstance(response, str) and response and isinstance(response[-1], Mapping):
        response = response[-1].get("content")
    if not isinstance(response, str):
        raise DataError(f"{where}: a response should be text, not {response!r:.80}")
    return response
