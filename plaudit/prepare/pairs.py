"""Scored responses → preference pairs: each prompt's best response is chosen, its worst rejected; or all pairs of different scores.

Reads

    rows with `responses` and `reward`       the output of `plaudit score`
    rows with `response`, one per sample     an RL run's `samples/train_000012.parquet`; those of a prompt and step are compared
    groups of translations with scores       `src_text`, `src_lang`, `trg_lang`, candidates and scores, as judges are trained on

Malformed, truncated, empty, overlong and unscored responses are excluded: a malformed one was scored without being read, so that
`rejected` would teach nothing but its form. Among equal scores, the first wins.
"""

import json
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from plaudit.data.columns import RESPONSES, find_column, has_prompt
from plaudit.data.conversations import describe_type, parse_prompt_messages, parse_tools
from plaudit.data.rollouts import parse_token_counts, split_answers, split_responses
from plaudit.data.rows import Rows, read_rows
from plaudit.errors import DataError
from plaudit.files import write_atomic
from plaudit.prepare.scored_groups import TRANSLATION, Columns, translation_fields
from plaudit.prepare.token_counts import TokenCounter
from plaudit.types import Message

HINT = "Score them first: plaudit score R.yaml answers.jsonl --out scored.jsonl"

SAMPLE_COLUMNS = {"responses": "response", "reward": "reward", "status": "status", "tokens": "tokens", "malformed": "malformed"}
"""Columns of a prompt's responses together → columns of one sample of a run."""

Pair = dict[str, Any]
Scored = tuple[float, str]
"""A response's score, and its text."""


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
    excluded: Counter[str] = field(default_factory=Counter)
    """Responses that may not be in a pair, by reason."""

    def __str__(self) -> str:
        parts = [
            f"{self.pairs - self.validation:,} pairs to train on, {self.validation:,} to validate on, of {self.rows:,} prompts"
        ]
        if self.too_few:
            parts.append(f"{self.too_few:,} had too few responses")
        if self.alike:
            parts.append(f"{self.alike:,} had no clearly better response")
        if self.excluded:
            causes = ", ".join(f"{count:,} {reason}" for reason, count in self.excluded.most_common())
            parts.append(f"responses left out: {causes}")
        return "; ".join(parts)


@dataclass(frozen=True)
class PairRules:
    """Which responses may be in a pair, and which pairs are made."""

    min_responses: int = 2
    min_margin: float = 0.0
    max_response_tokens: int | None = None
    max_tokens: int | None = None
    """Of prompt and response together, as `counter` counts them."""
    counter: TokenCounter | None = None
    all_pairs: bool = False
    """Every two responses of a prompt whose scores differ, not only the best and the worst."""

    def is_too_long(self, conversation: list[Message], where: str) -> bool:
        if self.max_tokens is None or self.counter is None:
            return False
        return self.counter.conversation(conversation, where) > self.max_tokens


def make_pairs(
    files: Sequence[Path],
    out: Path,
    *,
    rules: PairRules = PairRules(),  # noqa: B008 (frozen)
    columns: Columns = Columns(),  # noqa: B008
    val_share: float = 0.03,
    seed: int = 0,
) -> PairSummary:
    """Write train.jsonl and val.jsonl: `prompt`, `chosen`, `rejected`, and `margin`, the difference of their scores. `columns`: of
    groups of translations."""
    summary, pairs = PairSummary(), []
    for file in files:
        for where, row in _prompts(read_rows(file), columns):
            summary.rows += 1
            prompt = parse_prompt_messages(row, where)
            scored = _usable(row, prompt, where, rules, summary.excluded)
            if len(scored) < rules.min_responses:
                summary.too_few += 1
                continue
            chosen = _choose(scored, rules)
            summary.alike += not chosen
            extra = {"tools": tools} if (tools := parse_tools(row.get("tools"), where)) else {}
            for (better, good), (worse, bad) in chosen:
                pairs.append(
                    {"prompt": row.get("prompt") or prompt, **extra, "chosen": good, "rejected": bad, "margin": better - worse}
                )
    if not pairs:
        raise DataError(f"{', '.join(map(str, files))}: no pairs could be made ({summary})")
    train, val = _split(pairs, val_share, random.Random(seed))
    summary.pairs, summary.validation = len(pairs), len(val)
    out.mkdir(parents=True, exist_ok=True)
    for name, split in (("val", val), ("train", train)):
        if split:
            write_atomic(out / f"{name}.jsonl", "".join(json.dumps(pair, ensure_ascii=False) + "\n" for pair in split))
    return summary


def _choose(scored: list[Scored], rules: PairRules) -> list[tuple[Scored, Scored]]:
    """Pairs of a better and a worse response."""
    by_score = [(max(scored, key=lambda item: item[0]), min(scored, key=lambda item: item[0]))]
    if rules.all_pairs:
        by_score = [(one, other) if one[0] > other[0] else (other, one) for one, other in combinations(scored, 2)]
    return [(good, bad) for good, bad in by_score if good[0] - bad[0] > rules.min_margin and good[1] != bad[1]]


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


# Rows ----------------------------------------------------------------------------------------------------------------


def _prompts(rows: Rows, columns: Columns) -> Iterator[tuple[str, dict[str, Any]]]:
    """One row per prompt with all its responses, and its location for error messages."""
    if {"prompt_id", "response"} <= set(rows.columns):
        rows.require("prompt", "reward", hint=HINT)
        samples: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            samples.setdefault(row["prompt_id"], []).append(row)
        for name, group in samples.items():
            joined = {plural: [row.get(singular) for row in group] for plural, singular in SAMPLE_COLUMNS.items()}
            yield f"{rows.source}: prompt {name}", {"prompt": group[0]["prompt"], "tools": group[0].get("tools"), **joined}
    elif {*TRANSLATION, columns.candidates} <= set(rows.columns):
        rows.require(columns.scores)
        for where, row in rows.located():
            task = [{"role": "user", "content": translation_fields(row, where)["question"]}]
            _require_numbers(row[columns.scores], columns.scores, where)
            yield where, {"prompt": task, "responses": row[columns.candidates], "reward": row[columns.scores]}
    else:
        if not has_prompt(rows.columns):
            rows.require("prompt", hint=HINT)
        if not find_column(rows.columns, RESPONSES):
            rows.require("responses", hint=HINT)
        rows.require("reward", hint=HINT)
        yield from rows.located()


def _usable(row: dict[str, Any], prompt: list[Message], where: str, rules: PairRules, excluded: Counter[str]) -> list[Scored]:
    """Every response that may be in a pair, with its score."""
    row, texts = split_responses(row, where)
    counts, rewards = parse_token_counts(row.get("tokens"), len(texts), where), row["reward"]
    _require_numbers(rewards, "reward", where, f". {HINT}")
    if len(rewards) != len(texts):
        raise DataError(f"{where}: there should be a score for each of the {len(texts)} responses, not {len(rewards)}. {HINT}")
    status, malformed = _per_response(row, "status", texts, where), _per_response(row, "malformed", texts, where)
    answers, usable = split_answers(row, len(texts)), []
    for text, answer, reward, count, state, broken in zip(texts, answers, rewards, counts, status, malformed, strict=True):
        if reward is None or not math.isfinite(reward):
            excluded["without a score"] += 1
        elif state == "truncated":
            excluded["truncated"] += 1
        elif broken or (answer is not None and not answer.strip()):
            excluded["malformed"] += 1
        elif not text.strip():
            excluded["empty"] += 1
        elif rules.max_response_tokens is not None and count is not None and count > rules.max_response_tokens:
            excluded[f"longer than {rules.max_response_tokens:,} tokens"] += 1
        elif rules.is_too_long([*prompt, {"role": "assistant", "content": text}], where):
            excluded[f"longer than {rules.max_tokens:,} tokens with the prompt"] += 1
        else:
            usable.append((float(reward), text))
    return usable


def _require_numbers(scores: Any, column: str, where: str, hint: str = "") -> None:
    """A score may be missing, and is left out then."""
    if not isinstance(scores, list):
        raise DataError(f"{where}: column {column!r} should be a list of numbers, not {describe_type(scores)}{hint}")
    wrong = [score for score in scores if not isinstance(score, int | float | None)]
    if wrong:
        raise DataError(f"{where}: column {column!r}: {wrong[0]!r:.80} should be a number{hint}")


def _per_response(row: dict[str, Any], column: str, texts: list[str], where: str) -> list[Any]:
    """A column with an entry per response; nothing where it is missing."""
    values = row.get(column)
    if values is None:
        return [None] * len(texts)
    if not isinstance(values, list) or len(values) != len(texts):
        raise DataError(f"{where}: `{column}` should be a list with an entry for each of the {len(texts)} responses. {HINT}")
    return values
