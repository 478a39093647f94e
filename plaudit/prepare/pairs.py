"""Scored responses → preference pairs: each prompt's best response is chosen, its worst rejected.

Reads the output of `plaudit score` for rows with `responses`, and the samples of an RL run (`samples/train_000012.parquet`, one row
per sample; samples of the same prompt and step are compared). Truncated, empty, overlong and unscored responses are excluded;
among equal scores, the first wins.
"""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plaudit.data.columns import RESPONSES, find_column, has_prompt
from plaudit.data.conversations import describe_type, parse_prompt_messages, parse_tools
from plaudit.data.rollouts import parse_token_counts, split_responses
from plaudit.data.rows import Rows, read_rows
from plaudit.errors import DataError
from plaudit.files import write_atomic

HINT = "Score them first: plaudit score R.yaml answers.jsonl --out scored.jsonl"

SAMPLE_COLUMNS = {"responses": "response", "reward": "reward", "status": "status", "tokens": "tokens"}
"""Columns of a prompt's responses together → columns of one sample of a run."""


Pair = dict[str, Any]


@dataclass
class PairSummary:
    rows: int = 0
    pairs: int = 0
    validation: int = 0
    """Pairs reserved for validation."""
    too_few: int = 0
    """Prompts with too few responses."""
    alike: int = 0
    """Prompts whose best and worst scores are too close."""

    def __str__(self) -> str:
        parts = [
            f"{self.pairs - self.validation:,} pairs to train on, {self.validation:,} to validate on, of {self.rows:,} prompts"
        ]
        if self.too_few:
            parts.append(f"{self.too_few:,} had too few responses")
        if self.alike:
            parts.append(f"{self.alike:,} had no clearly better response")
        return "; ".join(parts)


def make_pairs(
    files: Sequence[Path],
    out: Path,
    *,
    min_responses: int = 2,
    min_margin: float = 0.0,
    max_response_tokens: int | None = None,
    val_share: float = 0.03,
    seed: int = 0,
) -> PairSummary:
    """Write train.jsonl and val.jsonl: `prompt`, `chosen`, `rejected`, and `margin`, the difference of their scores."""
    summary, pairs = PairSummary(), []
    for file in files:
        rows = read_rows(file)
        for where, row in _prompts(rows):
            summary.rows += 1
            scored = _usable(row, where, max_response_tokens)
            if len(scored) < min_responses:
                summary.too_few += 1
                continue
            (best, chosen), (worst, rejected) = max(scored, key=lambda item: item[0]), min(scored, key=lambda item: item[0])
            if best - worst <= min_margin or chosen == rejected:
                summary.alike += 1
                continue
            extra = {"tools": tools} if (tools := parse_tools(row.get("tools"), where)) else {}
            prompt = row.get("prompt") or parse_prompt_messages(row, where)
            pairs.append({"prompt": prompt, **extra, "chosen": chosen, "rejected": rejected, "margin": best - worst})
    if not pairs:
        raise DataError(f"{', '.join(map(str, files))}: no pairs could be made ({summary})")
    train, val = _split(pairs, val_share, random.Random(seed))
    summary.pairs, summary.validation = len(pairs), len(val)
    out.mkdir(parents=True, exist_ok=True)
    for name, split in (("val", val), ("train", train)):
        if split:
            write_atomic(out / f"{name}.jsonl", "".join(json.dumps(pair, ensure_ascii=False) + "\n" for pair in split))
    return summary


def _split(pairs: list[Pair], val_share: float, rng: random.Random) -> tuple[list[Pair], list[Pair]]:
    """Shuffle and split into train and val. All pairs of a prompt, which a run may sample many times, go to the same split."""
    by_prompt: dict[str, list[Pair]] = {}
    for pair in pairs:
        by_prompt.setdefault(json.dumps([pair["prompt"], pair.get("tools")]), []).append(pair)
    prompts = list(by_prompt.values())
    rng.shuffle(prompts)
    val: list[Pair] = []
    while len(prompts) > 1 and len(val) < round(val_share * len(pairs)):
        val += prompts.pop()
    train = [pair for group in prompts for pair in group]
    rng.shuffle(train)
    return train, val


def _prompts(rows: Rows) -> Iterator[tuple[str, dict[str, Any]]]:
    """One row per prompt with all its responses, and its location for error messages."""
    if {"prompt_id", "response"} <= set(rows.columns):
        rows.require("prompt", "reward", hint=HINT)
        samples: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            samples.setdefault(row["prompt_id"], []).append(row)
        for name, group in samples.items():
            columns = {plural: [row.get(singular) for row in group] for plural, singular in SAMPLE_COLUMNS.items()}
            yield f"{rows.source}: prompt {name}", {"prompt": group[0]["prompt"], "tools": group[0].get("tools"), **columns}
    else:
        if not has_prompt(rows.columns):
            rows.require("prompt", hint=HINT)
        if not find_column(rows.columns, RESPONSES):
            rows.require("responses", hint=HINT)
        rows.require("reward", hint=HINT)
        yield from rows.located()


def _usable(row: dict[str, Any], where: str, max_response_tokens: int | None) -> list[tuple[float, str]]:
    """(reward, response) of every response that may be in a pair."""
    row, texts = split_responses(row, where)
    counts = parse_token_counts(row.get("tokens"), len(texts), where)
    rewards, status = row["reward"], row.get("status") or ["finished"] * len(texts)
    if not isinstance(rewards, list) or len(rewards) != len(texts) or not all(isinstance(r, int | float | None) for r in rewards):
        raise DataError(
            f"{where}: `reward` should be a number for each of the {len(texts)} responses, not {describe_type(rewards)}. {HINT}"
        )
    return [
        (float(reward), text)
        for text, reward, count, state in zip(texts, rewards, counts, status, strict=True)
        if reward is not None
        and text.strip()
        and state != "truncated"
        and (max_response_tokens is None or count is None or count <= max_response_tokens)
    ]
