"""Thoughts and responses (`plaudit prepare thoughts`) → conversations for SFT.

The assistant's turn is `<think>\\n{thought}\\n</think>\\n\\n{response}`, or the response alone. Of rows with equal ids the first is
used. A row whose thought or response contains a tag is left out: a model trained on it would open or close its thoughts anywhere.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plaudit.data.conversations import Source, check_text, describe_type, parse_prompt_messages, without_nulls
from plaudit.data.row_ids import name_sources
from plaudit.errors import DataError
from plaudit.prepare.row_files import write_row_file
from plaudit.prepare.thoughts import has_tags
from plaudit.response_files import join_thought
from plaudit.types import Message

HINT = "Such rows are made by: plaudit prepare thoughts prompts.jsonl --out thoughts.jsonl --url …"


@dataclass
class ThoughtsSFTSummary:
    rows: int = 0
    written: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    """Rows, by reason."""

    def __str__(self) -> str:
        left_out = [f"{count:,} left out: {reason}" for reason, count in self.left_out.most_common()]
        return "; ".join([f"{self.written:,} conversations of {self.rows:,} rows", *left_out])


def make_thoughts_sft(sources: Sequence[Source], out: Path, *, thoughts: bool = True) -> ThoughtsSFTSummary:
    """Write `id`, `source` and `messages`, in the order of the rows."""
    summary, seen, written = ThoughtsSFTSummary(), set[str](), []
    for source, name in zip(sources, name_sources(sources), strict=True):
        rows = source.rows()
        rows.require(*(["thought"] if thoughts else []), "response", hint=HINT)
        for number, (where, row) in enumerate(rows.located(), 1):
            summary.rows += 1
            id = str(f"{name}:{number}" if row.get("id") is None else row["id"])
            prompt = parse_prompt_messages(without_nulls(row) if rows.nulls_mean_absent else row, where)
            answer = compose_answer(_text(row, "thought", where) if thoughts else None, _text(row, "response", where))
            if id in seen:
                summary.left_out["the id of an earlier row"] += 1
            elif answer is None:
                summary.left_out["no response, or no thought" if thoughts else "no response"] += 1
            elif has_tags(*(row[name] for name in ("thought", "response") if isinstance(row.get(name), str))):
                summary.left_out["tags of thoughts inside"] += 1
            else:
                messages: list[Message] = [*prompt, {"role": "assistant", "content": answer}]
                check_text([messages], where)
                written.append({"id": id, "source": str(row.get("source") or source.name()), "messages": messages})
                seen.add(id)
    if not written:
        raise DataError(f"{', '.join(map(str, sources))}: no conversations could be made ({summary})")
    summary.written = len(written)
    write_row_file(out, written)
    return summary


def compose_answer(thought: str | None, response: str) -> str | None:
    """The assistant's turn; None if a part of it is missing. `thought`: None for a turn without."""
    if not response.strip() or (thought is not None and not thought.strip()):
        return None
    return response.strip() if thought is None else join_thought(thought, response.strip())


def _text(row: Mapping[str, Any], column: str, where: str) -> str:
    value = row.get(column)
    if value is not None and not isinstance(value, str):
        raise DataError(f"{where}: column {column!r} should be text, not {describe_type(value)}. {HINT}")
    return value or ""
