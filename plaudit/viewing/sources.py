"""What can be viewed: a run folder, or dumps of rollouts. Both have samples by step, as Arrow tables."""

import hashlib
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from plaudit.errors import DataError, PlauditError, RunError, nearest_path
from plaudit.redaction import redact_all
from plaudit.report.samples import COLUMNS
from plaudit.run_progress import read_description
from plaudit.viewing.metrics_log import MetricsLog, leads_out
from plaudit.viewing.run_state import run_state

FILE = re.compile(r"(train|val)_(\d{6,})\.parquet")
Steps = dict[str, list[int]]
"""Steps that have samples, by split: train, val."""


class NotThere(PlauditError):
    """A run, step or sample that is not, or no longer, there."""


class Source(ABC):
    """A run, whoever wrote it."""

    kind: str
    path: Path
    metrics: MetricsLog | None = None

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Its state, recipe and rewards, as they are now."""

    @abstractmethod
    def steps(self) -> Steps: ...

    @abstractmethod
    def read(self, split: str, step: int, columns: Callable[[str], bool] | None = None, rows: range | None = None) -> pa.Table:
        """A step's samples: all, or some columns and rows of them."""

    @abstractmethod
    def version(self, split: str, step: int) -> Any:
        """Changes if the samples of a step are written anew."""

    def file(self, split: str, step: int) -> Path:
        """The file with a step's samples."""
        raise NotImplementedError


class RunSource(Source):
    kind = "run"

    def __init__(self, path: Path):
        self.path = path
        self.metrics = MetricsLog(path / "metrics.jsonl")
        self._read_description()  # to refuse a folder that is none

    def _read_description(self) -> dict[str, Any]:
        file = self.path / "run.json"
        if leads_out(file, self.path):
            raise RunError(f"{file} is a link that leads out of the run's folder; it is not read")
        return read_description(file)

    def describe(self) -> dict[str, Any]:
        assert self.metrics is not None
        try:
            description = self._read_description()
        except RunError:
            detail = f"{self.path} has no readable run.json any more: it was moved or deleted."
            return {"state": "gone", "detail": detail, "recipe": {}, "rewards": [], "problems": [], "version": "gone"}
        self.metrics.refresh()
        recipe = redact_all(description["recipe"])
        return {
            **run_state(self.path, description, self.metrics),
            "recipe": recipe,
            "stage": recipe.get("stage"),
            "rewards": _rewards(recipe),
            "problems": _problems(self.metrics),
            "version": self.metrics.version,
        }

    def steps(self) -> Steps:
        found: Steps = {"train": [], "val": []}
        try:
            names = os.listdir(self.path / "samples")
        except OSError:  # SFT has none; a run being deleted has none any more
            return found
        for name in names:
            if ours := FILE.fullmatch(name):
                found[ours[1]].append(int(ours[2]))
        return {split: sorted(steps) for split, steps in found.items()}

    def file(self, split: str, step: int) -> Path:
        return self.path / "samples" / f"{split}_{step:06d}.parquet"

    def version(self, split: str, step: int) -> Any:
        try:
            state = os.stat(self.file(split, step))
        except OSError:
            return None
        return state.st_mtime_ns, state.st_size, state.st_ino

    def read(self, split: str, step: int, columns: Callable[[str], bool] | None = None, rows: range | None = None) -> pa.Table:
        file = self.file(split, step)
        if self.version(split, step) is None:
            raise NotThere(f"{file}: there are no {split} samples of step {step}")
        if leads_out(file, self.path):
            raise NotThere(f"{file} is a link that leads out of the run's folder; it is not read")
        try:
            with pq.ParquetFile(file) as opened:
                names = [name for name in opened.schema_arrow.names if columns is None or columns(name)]
                if rows is None:
                    return opened.read(names)
                return _read_rows(opened, names, rows)
        except (pa.ArrowException, OSError) as error:
            reason = " ".join(str(error).split())[:200].rstrip(".")
            raise NotThere(f"{file} cannot be read: {reason}. Other steps are not affected.") from None


def _problems(metrics: MetricsLog) -> list[str]:
    if metrics.leads_out:
        return ["metrics.jsonl is a link that leads out of the run's folder; it is not read"]
    if not metrics.damaged:
        return []
    more = metrics.damaged_lines - len(metrics.damaged)
    lines = ", ".join(map(str, metrics.damaged)) + (f" and {more:,} more" if more else "")
    return [f"metrics.jsonl, line{'s'[: metrics.damaged_lines != 1]} {lines}: damaged, skipped"]


def _read_rows(opened: pq.ParquetFile, names: Sequence[str], rows: range) -> pa.Table:
    """Only the row groups that have these rows."""
    groups, first, start = [], None, 0
    for number in range(opened.num_row_groups):
        end = start + opened.metadata.row_group(number).num_rows
        if start < rows.stop and rows.start < end:
            groups.append(number)
            first = start if first is None else first
        start = end
    if first is None:
        return opened.schema_arrow.empty_table().select(list(names))
    return opened.read_row_groups(groups, list(names)).slice(rows.start - first, len(rows))


def _rewards(recipe: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each reward's label, and how it enters the total."""
    rewards: list[dict[str, Any]] = []
    while (kind := recipe.get(f"rewards.{len(rewards)}.kind")) is not None:
        start = f"rewards.{len(rewards)}."
        names = ("weight", "combine", "scale", "bounds", "normalise", "malformed", "on_failure")
        reward = {name: recipe.get(start + name) for name in names}
        rewards.append({"label": recipe.get(start + "name") or kind, "kind": kind, **reward})
    return rewards


# Dumps ---------------------------------------------------------------------------------------------------------------


class DumpSource(Source):
    """Files of verl, TRL or plaudit's own commands: one per step, or one with a column `step`."""

    kind = "dump"

    def __init__(self, path: Path):
        from plaudit.audit.dumps import list_files

        self.path = path
        files = list_files([path])
        numbered = {int(found[-1]): file for file in files if (found := re.findall(r"\d+", file.stem))}
        self._files: dict[int, Path] = numbered if len(numbered) == len(files) and len(files) > 1 else {}
        self._tables: dict[int, pa.Table] = {}
        if not self._files:
            for file in files:
                for step, table in tables_of_dump(file).items():
                    before = [self._tables[step]] if step in self._tables else []
                    self._tables[step] = pa.concat_tables([*before, table], promote_options="default")
        self._read = lru_cache(maxsize=8)(self._read_file)

    def describe(self) -> dict[str, Any]:
        steps = self.steps()["train"]
        return {
            "state": "dump",
            "detail": f"Rollouts of {len(steps)} step{'s'[: len(steps) != 1]}, as another program saved them.",
            "step": steps[-1] if steps else None,
            "recipe": {},
            "rewards": [],
            "problems": [],
            "version": str(len(steps)),
        }

    def steps(self) -> Steps:
        return {"train": sorted(self._files or self._tables), "val": []}

    def version(self, split: str, step: int) -> Any:
        try:
            return self._files[step].stat().st_mtime_ns if step in self._files else 0
        except OSError:
            return None

    def file(self, split: str, step: int) -> Path:
        return self._files.get(step, self.path)

    def _read_file(self, file: Path, version: Any) -> pa.Table:
        return pa.concat_tables(tables_of_dump(file).values(), promote_options="default")

    def read(self, split: str, step: int, columns: Callable[[str], bool] | None = None, rows: range | None = None) -> pa.Table:
        if step not in (self._files or self._tables):
            raise NotThere(f"{self.path}: there are no {split} samples of step {step}")
        try:
            table = self._tables[step] if self._tables else self._read(self._files[step], self.version(split, step))
        except (DataError, OSError) as error:
            raise NotThere(str(error)) from None
        if columns is not None:
            table = table.select([name for name in table.column_names if columns(name)])
        return table if rows is None else table.slice(rows.start, len(rows))


def tables_of_dump(file: Path) -> dict[int, pa.Table]:
    """The samples of a file by step (0 without one), in the columns of a run's; groups are the rows with the same prompt."""
    from plaudit.audit.dumps import read_dump
    from plaudit.data.columns import IDS, first_value
    from plaudit.data.rows import read_rows

    read = read_rows(file)
    groups: dict[str, list[dict[str, Any]]] = {}
    for row, given in zip(read_dump(read), read, strict=True):
        asked = json.dumps([row["prompt"], row["ground_truth"]], sort_keys=True, default=str)
        # Without an id, one that is the same in every step.
        id = row["id"] if first_value(given, IDS) is not None else hashlib.sha256(asked.encode()).hexdigest()[:12]
        groups.setdefault(f"{row['step']} {asked}", []).extend(_samples_of_dump(row | {"id": id}, given))
    steps: dict[int, list[dict[str, Any]]] = {}
    for group in groups.values():
        for index, sample in enumerate(group):
            steps.setdefault(sample.pop("step"), []).append({**sample, "prompt_id": group[0]["prompt_id"], "index": index})
    return {step: as_table(rows) for step, rows in sorted(steps.items())}


def _samples_of_dump(row: Mapping[str, Any], given: Mapping[str, Any]) -> list[dict[str, Any]]:
    truth = row["ground_truth"]

    def saved(name: str, i: int) -> Any:
        """A value of this response, in a row of one or of several."""
        value = given.get(name)
        return (value[i] if i < len(value) else None) if isinstance(value, list) else value

    def numbers(i: int) -> dict[str, float]:
        parts = found if isinstance(found := saved("parts", i), dict) else given
        return {name: float(x) for name, x in parts.items() if isinstance(x, float | bool) and name not in NOT_PARTS}

    return [
        {
            "step": row["step"] if isinstance(row["step"], int) else 0,
            "prompt_id": row["id"],
            "data_source": row["data_source"],
            "prompt": [{"role": m["role"], "content": _as_text(m["content"])} for m in row["prompt"]],
            "response": response,
            "reward": row["rewards"][i],
            "reward_model": {"ground_truth": None if truth is None else _as_text(truth)},
            "tokens": row["tokens"][i],
            "advantage": found if isinstance(found := saved("advantage", i), float) else None,
            "status": found if isinstance(found := saved("status", i), str) else None,
            "malformed": found if isinstance(found := saved("malformed", i), bool) else None,
            "failure": _failure_text(saved("failure", i)),
            **{f"part/{name}": value for name, value in numbers(i).items()},
        }
        for i, response in enumerate(row["responses"])
    ]


def _failure_text(failure: Any) -> str | None:
    """As plaudit score writes it: an object with cause, message and the reward's name."""
    if isinstance(failure, dict) and failure.get("cause"):
        return ": ".join(str(failure[name]) for name in ("cause", "reward", "message") if failure.get(name))
    return failure if isinstance(failure, str) and failure else None


NOT_PARTS = ("reward", "score", "rewards", "scores", "advantage", "step", "tokens", "malformed", "label")


def as_table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    per_reward = sorted({name for row in rows for name in row} - COLUMNS.keys())
    kinds = {"part/": pa.float64(), "advantage": pa.float64()}
    types = {name: next((kind for start, kind in kinds.items() if name.startswith(start)), pa.string()) for name in per_reward}
    return pa.Table.from_pylist(list(rows), pa.schema(COLUMNS | types))


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def open_source(path: Path) -> Source:
    """A run folder or dumps, whatever is at a path."""
    if not path.exists():
        raise RunError(f"{path} does not exist.{nearest_path(path)}")
    if path.is_dir() and (path / "run.json").is_file():
        return RunSource(path)
    inside = [entry.parent for entry in sorted(path.glob("*/run.json"))] if path.is_dir() else []
    if inside:
        raise RunError(f"{path} is not a run folder, but has some inside: plaudit view {' '.join(map(str, inside[:8]))}")
    try:
        return DumpSource(path)
    except DataError as error:
        raise RunError(
            f"{path} is not a run folder (it has no run.json), and not a dump of rollouts of verl or TRL either: {error}"
        ) from None
