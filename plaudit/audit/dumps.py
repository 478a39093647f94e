"""Saved rollouts, whoever wrote them, as rows in plaudit's columns: `prompt` (messages), `responses`, `data_source`,
`reward_model.ground_truth`, `extra_info`, and where the file has them `labels`, `tokens` and the `rewards` given then.

Told by their columns:
    plaudit   a run's samples (prompt, response, reward, tokens, version), `plaudit sample` (prompt, responses), labelled rows
    verl      trainer.rollout_data_dir and validation_data_dir: input, output, gts, score, step; N.jsonl for step N
    TRL       log_completions: step, prompt, completion, a column per reward function, advantage; completions_N.parquet

A prompt that was saved as text, chat-template markers and all, is one user message. Rows with the same prompt, truth and step are a
group. Whatever has a verdict of its own (verl's acc) can be the label.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plaudit.data.conversations import parse_prompt
from plaudit.data.rows import SUFFIXES, Rows, read_rows
from plaudit.errors import DataError, did_you_mean
from plaudit.types import Prompt

PROMPTS = ("prompt", "input", "question", "messages")
RESPONSES = ("responses", "response", "completion", "output")
TRUTHS = ("ground_truth", "gts", "answer", "solution", "reference")
REWARDS = ("reward", "score")
STEPS = ("step", "global_step", "version")
DEFAULT_LABEL = "label"
HINT = (
    "Rollouts have `prompt` and `response` or `responses` (plaudit), `input` and `output` (verl), `prompt` and `completion` (TRL)."
)


@dataclass(frozen=True)
class Rollout:
    """A group as it was saved: what was asked, and for each response what is known of it."""

    prompt: Prompt
    responses: tuple[str, ...]
    labels: tuple[float | None, ...]
    tokens: tuple[int | None, ...]
    rewards: tuple[float | None, ...]
    """What each was given when it was saved."""

    def __len__(self) -> int:
        return len(self.responses)


# Files ---------------------------------------------------------------------------------------------------------------


def read_rollouts(paths: Sequence[Path], *, label: str | None = None, data_source: str = "") -> list[Rollout]:
    """The groups of all files, in their order. `label` must be a column if it is named; else it is taken where there is one."""
    rows: list[dict[str, Any]] = []
    found: set[str] = set()
    for file in list_files(paths):
        read = read_rows(file)
        found |= set(read.columns)
        rows += read_dump(read, label or DEFAULT_LABEL)
    if label is not None and label not in found:
        names, near = ", ".join(map(str, paths)), did_you_mean(label, found)
        raise DataError(f"--label: {names}: no column {label!r} (found: {', '.join(sorted(found))}).{near}")
    return group_rows(row if row["data_source"] else row | {"data_source": data_source} for row in rows)


def list_files(paths: Iterable[Path]) -> list[Path]:
    """The files themselves, and those in folders: a run's `samples/`, a folder of dumps by step, in the order of their numbers."""
    files = []
    for path in paths:
        if not path.is_dir() or (path / "state.json").exists():
            files.append(path)
            continue
        folder = path / "samples" if (path / "samples").is_dir() else path
        inside = sorted((file for file in folder.iterdir() if file.suffix in SUFFIXES and _is_rows(file)), key=_by_number)
        if not inside:
            raise DataError(f"{folder}: has no {', '.join(SUFFIXES)} files in it")
        files += inside
    return files


def _is_rows(file: Path) -> bool:
    return file.is_file() and not file.name.endswith((".about.json", "audit.json"))


def _by_number(file: Path) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]+)", file.name)]


# Rows ----------------------------------------------------------------------------------------------------------------


def read_dump(rows: Rows, label: str = DEFAULT_LABEL) -> Iterator[dict[str, Any]]:
    """Each row of a file in plaudit's own columns."""
    columns = set(rows.columns)
    asked = next((name for name in PROMPTS if name in columns), None)
    # `input` with `output` and nothing else is alpaca's instruction data too, but then there is an `instruction`.
    answered = next((name for name in RESPONSES if name in columns), None)
    for name, choice in ((asked, PROMPTS), (answered, RESPONSES)):
        if name is None:
            rows.require(choice[0 if choice is PROMPTS else 1], hint=HINT)
    assert asked is not None
    assert answered is not None
    for number, row in enumerate(rows):
        where = f"{rows.source}: row {number}"
        many = isinstance(row.get(answered), list) and answered != "completion"
        responses = row[answered] if many else [row.get(answered)]
        if not responses:
            raise DataError(f"{where}: has no responses")
        labels = row.get(label, row.get(f"{label}s"))
        known = {
            "prompt": row.get(asked),
            "reward_model": {"ground_truth": _truth(row)},
            "extra_info": _fields(row.get("extra_info")),
        }
        id = str(row.get("prompt_id") or row.get("id") or f"{rows.source}:{number}")
        prompt = parse_prompt({**known, "data_source": row.get("data_source"), "tools": row.get("tools")}, id, where)
        yield {
            "id": id,
            "prompt": prompt.messages,
            "tools": prompt.tools,
            "responses": [_response(response, where) for response in responses],
            "data_source": prompt.data_source,
            "reward_model": known["reward_model"],
            "extra_info": known["extra_info"],
            "labels": _column(labels, len(responses), _label, f"{where}: {label}"),
            "tokens": _column(row.get("tokens"), len(responses), _whole, where),
            "rewards": _column(_saved_reward(row), len(responses), _number, where),
            "step": next((row[name] for name in STEPS if row.get(name) is not None), None),
        }


def group_rows(rows: Iterable[Mapping[str, Any]]) -> list[Rollout]:
    """Rows of the same prompt, truth, extra_info and step are one group; groups come in the order of their first rows."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        same = [row[name] for name in ("step", "prompt", "tools", "data_source", "reward_model", "extra_info")]
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


def _response(value: Any, where: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(m, dict) for m in value):  # TRL's conversational completions
        return "\n".join(str(m.get("content") or "") for m in value if m.get("role", "assistant") == "assistant")
    raise DataError(f"{where}: its response should be text, not {'nothing' if value is None else type(value).__name__}")


def _truth(row: Mapping[str, Any]) -> Any:
    model = row.get("reward_model")
    if isinstance(model, dict) and model.get("ground_truth") is not None:
        return model["ground_truth"]
    return next((row[name] for name in TRUTHS if row.get(name) is not None), None)


def _fields(value: Any) -> Any:
    """Fields that a table made text of, as fields again."""
    if isinstance(value, str):
        with suppress(ValueError):
            return json.loads(value) if value.strip() else {}
    return value or {}


def _saved_reward(row: Mapping[str, Any]) -> Any:
    given = next((row[name] for name in REWARDS if row.get(name) is not None), None)
    if given is None and "advantage" in row and "completion" in row:
        # TRL has a column per reward function and not their sum; with one function it is the reward.
        known = {*STEPS, *PROMPTS, *RESPONSES, *TRUTHS, DEFAULT_LABEL, "advantage", "tokens"}
        others = [row[name] for name in row if name not in known and isinstance(row[name], float)]
        return others[0] if len(others) == 1 else None
    return given


def _column(value: Any, length: int, convert: Any, where: str) -> list[Any]:
    """One entry per response; a single value is every response's."""
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


def _whole(value: Any, where: str) -> int | None:
    number = _number(value, where)
    return None if number is None else int(number)
