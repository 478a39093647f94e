"""Conversations that users had with an assistant (WildChat, ShareGPT) → prompts for RL and for `plaudit prepare thoughts`.

A prompt is the conversation up to its first user message; or, with `all_turns`, up to its last one. Empty messages are dropped.
Left out and counted: conversations without a user message, in other languages, too short, too long, or with the prompt of an
earlier one (upper and lower case and white space aside). What remains is shuffled, and a part of it reserved for validation.
"""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from plaudit.data.columns import CONVERSATIONS, PROMPTS, find_column, parse_object
from plaudit.data.conversations import PROMPT_HINT, Source, check_text, parse_conversation, parse_prompt_messages, without_nulls
from plaudit.data.row_ids import name_sources
from plaudit.data.rows import Rows
from plaudit.errors import DataError
from plaudit.files import text_digest
from plaudit.prepare.english import is_english
from plaudit.prepare.row_files import write_row_file
from plaudit.prepare.token_counts import TokenCounter
from plaudit.types import Message

WILDCHAT = "conversation"
"""WildChat's column of messages."""
VAL_SHARE = 0.03


@dataclass(frozen=True)
class PromptRules:
    """Which conversations become prompts."""

    all_turns: bool = False
    english: bool = False
    min_characters: int = 1
    max_characters: int | None = None
    max_tokens: int | None = None
    counter: TokenCounter | None = None
    """For max_tokens."""
    duplicates: bool = False
    """Keep prompts that an earlier row has too."""


@dataclass
class PromptSummary:
    rows: int = 0
    train: int = 0
    val: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    """Conversations, by reason."""

    def __str__(self) -> str:
        parts = [f"{self.train:,} prompts to train on, {self.val:,} to validate on, of {self.rows:,} rows"]
        return "; ".join([*parts, *(f"{count:,} left out: {reason}" for reason, count in self.left_out.most_common())])


def make_prompts(
    sources: Sequence[Source],
    out: Path,
    *,
    rules: PromptRules = PromptRules(),  # noqa: B008 (frozen)
    data_source: str | None = None,
    max_prompts: int | None = None,
    val: int | None = None,
    seed: int = 0,
    format: Literal["parquet", "jsonl"] = "parquet",
) -> PromptSummary:
    """Write train and val. `data_source`: of the rows; default: each file's name. `val`: how many prompts are for validation;
    default: 3 % of them."""
    summary, seen, kept = PromptSummary(), set[str](), []
    for source, name in zip(sources, name_sources(sources), strict=True):
        rows = source.rows()
        if not find_column(rows.columns, (WILDCHAT, *CONVERSATIONS, *PROMPTS)):
            rows.require("messages", hint=f"{PROMPT_HINT} WildChat's `{WILDCHAT}` is read too.")
        for number, (where, row) in enumerate(rows.located(), 1):
            summary.rows += 1
            messages = _prompt(row, rows, where, rules)
            reason = _why_left_out(messages, row, where, rules, seen)
            if reason is not None:
                summary.left_out[reason] += 1
                continue
            own = {"id": _id(row, f"{name}:{number}"), "source": str(row.get("source") or source.name())}
            kept.append((data_source or Path(source.name()).stem, messages, own))
    random.Random(seed).shuffle(kept)
    if max_prompts is not None and len(kept) > max_prompts:
        summary.left_out["by --max-prompts"] += len(kept) - max_prompts
        kept = kept[:max_prompts]
    if not kept:
        raise DataError(f"{', '.join(map(str, sources))}: no prompts could be made ({summary})")
    summary.val = round(VAL_SHARE * len(kept)) if val is None else val
    if summary.val >= len(kept):
        raise DataError(f"--val: {summary.val:,} of {len(kept):,} prompts leave none to train on; choose fewer ({summary})")
    summary.train = len(kept) - summary.val
    for split, part in (("val", kept[summary.train :]), ("train", kept[: summary.train])):
        if part:
            write_row_file(out / f"{split}.{format}", [_row(split, index, *prompt) for index, prompt in enumerate(part)])
    return summary


def _row(split: str, index: int, data_source: str, messages: list[Message], own: dict[str, str]) -> dict[str, Any]:
    return {
        "data_source": data_source,
        "prompt": messages,
        "ability": "chat",
        "reward_model": {"style": "model"},  # a model scores the responses: there is no ground truth
        "extra_info": {"split": split, "index": index, **own},
    }


def _id(row: Mapping[str, Any], otherwise: str) -> str:
    extra = parse_object(row.get("extra_info"))
    own = extra.get("id") if isinstance(extra, Mapping) else None
    return str(next((one for one in (row.get("id"), row.get("conversation_hash"), own) if one is not None), otherwise))


def _prompt(row: dict[str, Any], rows: Rows, where: str, rules: PromptRules) -> list[Message]:
    """The conversation up to the user message to be answered; empty if there is none."""
    row = without_nulls(row) if rows.nulls_mean_absent else row
    if row.get(WILDCHAT) is not None:
        row = {**row, "messages": row[WILDCHAT]}
    has_conversation = any(row.get(name) is not None for name in CONVERSATIONS)
    found = parse_conversation(row, where) if has_conversation else parse_prompt_messages(row, where)
    messages: list[Message] = [{"role": m["role"], "content": m["content"]} for m in found if m["content"].strip()]
    check_text([messages], where)
    asked = [i for i, message in enumerate(messages) if message["role"] == "user"]
    return messages[: asked[-1 if rules.all_turns else 0] + 1] if asked else []


def _why_left_out(messages: list[Message], row: Mapping[str, Any], where: str, rules: PromptRules, seen: set[str]) -> str | None:
    """The reason, if there is one; otherwise the prompt counts as seen."""
    if not messages:
        return "no user message"
    if rules.english and not _is_english(messages[-1]["content"], row.get("language")):
        return "not in English"
    characters = sum(len(message["content"].strip()) for message in messages)
    if characters < rules.min_characters:
        return f"shorter than {rules.min_characters:,} characters"
    if rules.max_characters is not None and characters > rules.max_characters:
        return f"longer than {rules.max_characters:,} characters"
    digest = text_digest(repr([(m["role"], " ".join(m["content"].split()).casefold()) for m in messages]))
    if digest in seen and not rules.duplicates:
        return "the prompt of an earlier row"
    if rules.max_tokens is not None and rules.counter is not None and rules.counter.prompt(messages, where) > rules.max_tokens:
        return f"longer than {rules.max_tokens:,} tokens"
    seen.add(digest)
    return None


def _is_english(text: str, language: Any) -> bool:
    """WildChat's rows name their language; others are looked at."""
    return language.strip().lower() in ("english", "en") if isinstance(language, str) and language.strip() else is_english(text)
