"""Saved rollouts, and what was saved with them: labels, token counts, the reward at the time.

Rows are read as everywhere (columns.py, rollouts.py). What writes them:
    plaudit   a run's samples (prompt, response, reward, tokens, version), `plaudit sample` (prompt, responses), labelled rows
    verl      trainer.rollout_data_dir and validation_data_dir: input, output, gts, score, step; N.jsonl for step N
    TRL       log_completions: step, prompt, completion, a column per reward function, advantage; completions_N.parquet

A prompt saved as text, chat-template markers included, becomes one user message. Rows with the same prompt, ground truth and step
form a group. A column with a verdict (verl's acc) can serve as the label; of a preference pair, `chosen` is right and `rejected`
wrong.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plaudit.data.columns import (
    CONVERSATIONS,
    GROUND_TRUTHS,
    IDS,
    LABEL,
    PAIR,
    PROMPTS,
    RESPONSES,
    REWARDS,
    STEPS,
    find_column,
    first_value,
    has_pair,
    has_prompt,
    has_several_responses,
    plain,
    with_columns_as_extra_info,
)
from plaudit.data.conversations import parse_prompt
from plaudit.data.rollouts import split_responses
from plaudit.data.rows import SUFFIXES, Rows, read_rows
from plaudit.errors import DataError, did_you_mean
from plaudit.types import Prompt

HINT = (
    "Rollouts have `prompt` and `response` or `responses` (plaudit), `input` and `output` (verl), or `prompt` and `completion` "
    "(TRL)."
)


@dataclass(frozen=True)
class Rollout:
    """A saved group: the prompt, and for each response its text, label, token count and saved reward."""

    prompt: Prompt
    responses: tuple[str, ...]
    labels: tuple[float | None, ...]
    tokens: tuple[int | None, ...]
    rewards: tuple[float | None, ...]
    """Each response's reward when it was saved."""

    def __len__(self) -> int:
        return len(self.responses)


# Files ---------------------------------------------------------------------------------------------------------------


def read_rollouts(paths: Sequence[Path], *, label: str | None = None, data_source: str = "") -> list[Rollout]:
    """The groups of all files, in order. `label` must exist if given; by default, `label` is used where present."""
    rows: list[dict[str, Any]] = []
    found: set[str] = set()
    for file in list_files(paths):
        read = read_rows(file)
        found |= set(read.columns)
        rows += read_dump(read, label or LABEL)
    if label is not None and label not in found:
        names, near = ", ".join(map(str, paths)), did_you_mean(label, found)
        raise DataError(f"--label: {names}: no column {label!r} (found: {', '.join(sorted(found))}).{near}")
    return group_rows(row if row["data_source"] else row | {"data_source": data_source} for row in rows)


def list_files(paths: Iterable[Path]) -> list[Path]:
    """Files as given, and the files in folders (a run's `samples/`, dumps by step) in numerical order."""
    files = []
    for path in paths:
        if not path.is_dir() or (path / "state.json").exists():
            files.append(path)
            continue
        folder = path / "samples" if (path / "samples").is_dir() else path
        inside = sorted((file for file in folder.iterdir() if file.suffix in SUFFIXES and _is_rows(file)), key=_by_number)
        if not inside:
            raise DataError(f"{folder}: contains no {', '.join(SUFFIXES)} files")
        files += inside
    return files


def _is_rows(file: Path) -> bool:
    return file.is_file() and not file.name.endswith((".inputs.json", "audit.json"))


def _by_number(file: Path) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]+)", file.name)]


# Rows ----------------------------------------------------------------------------------------------------------------


def read_dump(rows: Rows, label: str = LABEL) -> Iterator[dict[str, Any]]:
    """Each row of a file in plaudit's columns."""
    pairs = set(PAIR) <= set(rows.columns)
    if not has_prompt(rows.columns) and not pairs:
        rows.require("prompt", hint=HINT)
    if not find_column(rows.columns, (*RESPONSES, *CONVERSATIONS)) and not pairs:
        rows.require("response", hint=HINT)
    for number, (where, row) in enumerate(rows.located(), 1):
        several, given = has_several_responses(row), row
        row, responses = split_responses(row, where)
        shown = row
        if several:  # rows with one response each form a group if they are equal, which other columns would prevent
            own = {label, f"{label}s", *IDS, *STEPS, *REWARDS}
            shown = with_columns_as_extra_info({name: value for name, value in row.items() if name not in own})
        prompt = parse_prompt(shown, str(first_value(row, IDS) or f"{Path(rows.source).name}:{number}"), where)
        yield {
            "id": prompt.id,
            "prompt": prompt.messages,
            "tools": prompt.tools,
            "responses": responses,
            "data_source": prompt.data_source,
            "ground_truth": prompt.ground_truth,
            "extra_info": prompt.extra_info,
            "labels": read_labels(given, label, len(responses), where),
            "tokens": _column(row.get("tokens"), len(responses), _integer, where),
            "rewards": _column(_saved_reward(row), len(responses), _number, where),
            "step": first_value(row, STEPS),
        }


def group_rows(rows: Iterable[Mapping[str, Any]]) -> list[Rollout]:
    """Group rows by prompt, ground truth, extra_info and step; groups are in the order of their first rows."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        same = [row[name] for name in ("step", "prompt", "tools", "data_source", "ground_truth", "extra_info")]
        key = json.dumps(same, sort_keys=True, default=str)
        groups.setdefault(key, []).append(row)
    return [_rollout(members) for members in groups.values()]


def _rollout(rows: Sequence[Mapping[str, Any]]) -> Rollout:
    first = rows[0]
    id = first["id"] if first["step"] is None else f"{first['id']}@{first['step']}"
    prompt = parse_prompt(first, id, first["id"])
    columns = (tuple(x for row in rows for x in row[name]) for name in ("responses", "labels", "tokens", "rewards"))
    return Rollout(prompt, *columns)


# Values --------------------------------------------------------------------------------------------------------------


def _saved_reward(row: Mapping[str, Any]) -> Any:
    saved = first_value(row, REWARDS)
    if saved is None and "advantage" in row and "completion" in row:
        # TRL has a column per reward function but not their sum; with a single function, it is the reward.
        standard = {*STEPS, *PROMPTS, *RESPONSES, *GROUND_TRUTHS, LABEL, "advantage", "tokens"}
        rewards = [row[name] for name in row if name not in standard and isinstance(row[name], float)]
        return rewards[0] if len(rewards) == 1 else None
    return saved


def _column(value: Any, length: int, convert: Any, where: str) -> list[Any]:
    """One entry per response; a single value applies to every response."""
    values = value if isinstance(value, list) else [value] * length
    if len(values) != length:
        raise DataError(f"{where}: has {len(values)} entries for {length} responses")
    return [None if entry is None else convert(entry, where) for entry in values]


WORDS = {"true": 1.0, "yes": 1.0, "right": 1.0, "correct": 1.0, "false": 0.0, "no": 0.0, "wrong": 0.0, "incorrect": 0.0}


def _label(value: Any, where: str) -> float:
    if isinstance(value, str) and value.strip().casefold() in WORDS:
        return WORDS[value.strip().casefold()]
    number = _number(value, where)
    if number is None:
        raise DataError(f"{where} should be true, false or a number, not {value!r:.80}")
    return number


def _number(value: Any, _: str) -> float | None:
    with suppress(TypeError, ValueError):
        number = float(value)
        return number if abs(number) < float("inf") else None
    return None


def read_labels(row: Mapping[str, Any], label: str, responses: int, where: str) -> list[float | None]:
    """The label of each response, from the column of this name or its plural. Of a pair, the chosen one is right."""
    labels = plain(row.get(label, row.get(f"{label}s")))
    if labels is None and has_pair(row):
        labels = [1.0, 0.0]
    return _column(labels, responses, _label, f"{where}: {label}")


def _integer(value: Any, where: str) -> int | None:
    number = _number(value, where)
    return None if number is None else int(number)
