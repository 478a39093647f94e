"""Which column of a row means what: the only place that knows the names in use, for every verb.

A name earlier in a tuple wins over a later one. docs/rows.md is the same list with examples.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

PROMPTS = ("prompt", "instruction", "question", "problem", "input")
"""What the policy is given: messages, or text for one user message. `instruction` may come with alpaca's `input`."""
CONVERSATIONS = ("messages", "conversations")
"""Prompt and answer in one: what precedes the last answer is the prompt."""
RESPONSES = ("responses", "completions", "response", "completion", "output")
"""What was answered: the plural ones are lists, one entry per sample."""
PAIR = ("chosen", "rejected")
"""Two responses, the better one first."""
GROUND_TRUTHS = ("ground_truth", "gts", "answer", "solution", "reference")
"""The reference answer, unless `reward_model` has it."""
TARGETS = ("response", "completion", "output", "answer", "solution")
"""What SFT trains on."""
IDS = ("prompt_id", "id")
REWARDS = ("reward", "score")
"""A response's reward when it was saved."""
STEPS = ("step", "global_step", "version")
"""The training step that sampled a response."""
LABEL = "label"
"""Whether a response is right."""

STANDARD = {*PROMPTS, *CONVERSATIONS, *RESPONSES, *PAIR, "tools", "data_source", "reward_model", "extra_info", "rm_prompt"}
"""Columns with a meaning of their own; rewards find all others in extra_info."""
RESULTS = {
    "tokens", "reward", "unnormalised", "parts", "malformed", "failure", "details", "status", "version", "mean_logprob",
    "advantage",
}  # fmt: skip
"""What plaudit writes next to a response: rewards do not see it."""


def listed(names: Sequence[str]) -> str:
    """`a`, `b` or `c`: names of columns in a message."""
    *first, last = (f"`{name}`" for name in names)
    return f"{', '.join(first)} or {last}" if first else last


def find_column(row: Mapping[str, Any] | Sequence[str], names: Sequence[str]) -> str | None:
    """The first of these columns with a value; without any, the first that exists. (Tables fill missing values with nulls.)"""
    existing = [name for name in names if name in row]
    if isinstance(row, Mapping):
        return next((name for name in existing if row[name] is not None), None) or next(iter(existing), None)
    return next(iter(existing), None)


def first_value(row: Mapping[str, Any], names: Sequence[str]) -> Any:
    """The value of the first of these columns that has one."""
    return next((row[name] for name in names if row.get(name) is not None), None)


def with_columns_as_extra_info(row: dict[str, Any]) -> dict[str, Any]:
    """Rewards see columns that nothing else reads (TRL's rows have any) as fields of extra_info, an object or one as JSON text.
    Anything else in extra_info stays as it is: `parse_prompt` reports it."""
    extra = parse_object(row.get("extra_info")) or {}
    own = STANDARD | RESULTS
    columns = {name: value for name, value in row.items() if name not in own and "/" not in str(name) and value is not None}
    return {**row, "extra_info": {**columns, **extra}} if columns and isinstance(extra, Mapping) else row


def has_prompt(columns: Sequence[str]) -> bool:
    """Whether rows with these columns have a prompt."""
    return find_column(columns, (*PROMPTS, *CONVERSATIONS)) is not None


def has_pair(row: Mapping[str, Any]) -> bool:
    """Whether a row's responses are its `chosen` and its `rejected`."""
    return first_value(row, RESPONSES) is None and all(row.get(name) is not None for name in PAIR)


def has_several_responses(row: Mapping[str, Any]) -> bool:
    """Whether a row's scores are lists: one entry per response."""
    if has_pair(row):
        return True
    column = find_column(row, RESPONSES)
    if column is None:
        return False
    value = plain(row[column])
    return column.endswith("s") or (isinstance(value, list | tuple) and bool(value) and not isinstance(value[0], Mapping))


def plain(value: Any) -> Any:
    """Convert NumPy values, as in rows from pandas, to plain Python."""
    return value.tolist() if hasattr(value, "tolist") else value


def parse_object(value: Any, key: str | None = None) -> Any:
    """Decode an object that a table stored as JSON text (if it has this key); other values are returned unchanged."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        with suppress(ValueError, RecursionError):
            found = json.loads(value)
            return found if key is None or key in found else value
    return value
