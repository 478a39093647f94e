"""Rows with existing responses → groups for rewards to score.

A row has `prompt` (messages or text), `response` or `responses`, and optional fields for rewards: `data_source`,
`reward_model.ground_truth` (or `ground_truth`), `extra_info`, `tokens` (the length of each response).
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
    """A row's responses as a group."""
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
    """A row's responses and their token counts, None where the row has none."""
    if ("response" in row) == ("responses" in row):
        found = ", ".join(map(str, row)) or "nothing"
        raise DataError(f"{where}: a row to score has `response` (text) or `responses` (a list of texts); this one has {found}")
    responses = _plain(row["responses"]) if "responses" in row else [row["response"]]
    if not isinstance(responses, Sequence) or isinstance(responses, str) or not responses:
        raise DataError(f"{where}: `responses` should be a list of texts, not {responses!r:.80}")
    counts: Any = _plain(row.get("tokens"))
    counts = list(counts) if isinstance(counts, list | tuple) else [counts] * (1 if counts is not None else len(responses))
    counts = [int(count) if isinstance(count, float) and count.is_integer() else count for count in counts]
    if len(counts) != len(responses) or not all(isinstance(count, int | None) for count in counts):
        raise DataError(f"{where}: `tokens` should be the number of tokens of each response, not {row['tokens']!r:.80}")
    return [_text(response, where) for response in responses], counts


def token_counter(tokenizer: str | None) -> Callable[[str], int] | None:
    """Return a function that counts a response's tokens, including the end token that its text does not show."""
    if tokenizer is None:
        return None
    from plaudit.data.templates import load_tokenizer

    encode = load_tokenizer(tokenizer)
    return lambda text: len(encode(text, add_special_tokens=False)["input_ids"]) + 1  # pyright: ignore


def with_token_counts(group: Group, count: Callable[[str], int] | None) -> Group:
    """Count the tokens of responses that came without a count; unchanged if `count` is None."""
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
    """Convert NumPy values, as in rows from pandas, to plain Python."""
    return value.tolist() if hasattr(value, "tolist") else value


def _text(response: Any, where: str) -> str:
    """A response as text; for a list of messages, the last one's content."""
    if isinstance(response, Sequence) and not isinstance(response, str) and response and isinstance(response[-1], Mapping):
        response = response[-1].get("content")
    if not isinstance(response, str):
        raise DataError(f"{where}: a response should be text, not {response!r:.80}")
    return response
