"""A run folder, to read: metrics and samples as tables, the trained model. Works while the run is still going, and after it."""

import math
import os
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from plaudit.errors import RunError, nearest_path
from plaudit.files import try_lock
from plaudit.json_files import UnreadableJson, parse_object
from plaudit.run_progress import read_description

SHOWN = ("step", "loss", "reward", "val/loss", "val/reward")


class RunFolder:
    """What a run has written so far."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        if not os.path.isfile(self.folder / "run.json"):
            exists = os.path.exists(self.folder)
            missing = "is not a run folder: it has no run.json" if exists else "does not exist"
            raise RunError(f"{self.folder} {missing}.{'' if exists else nearest_path(self.folder)}")

    def __repr__(self) -> str:
        rows = read_metrics(self.folder / "metrics.jsonl")
        last = [f"{name} {row[name]:.4g}" for row in rows[-1:] for name in SHOWN if name in row]
        state = "finished" if (self.folder / "model").exists() else "not finished"
        return f"<run {self.folder}: {', '.join([*last, state])}>"

    @property
    def metrics(self) -> pa.Table:
        """A row per step, a column per metric; null where a step has no such metric (validation)."""
        rows = read_metrics(self.folder / "metrics.jsonl")
        names = dict.fromkeys(name for row in rows for name in row)
        return pa.table({name: [row.get(name) for row in rows] for name in names})

    def samples(self, step: int | None = None, split: Literal["train", "val"] = "train") -> pa.Table:
        """A row per sampled response, with its rewards (RL): of one step, or of all with a column `step`."""
        files = {int(file.stem.rpartition("_")[2]): file for file in sorted((self.folder / "samples").glob(f"{split}_*.parquet"))}
        if step is None and files:
            tables = [
                pq.read_table(file).add_column(0, "step", pa.array([s] * _rows(file), pa.int64())) for s, file in files.items()
            ]
            return pa.concat_tables(tables, promote_options="default")
        if step not in files:
            steps = f"it has {split} samples of steps {_ranges(list(files))}" if files else f"it has no {split} samples"
            raise RunError(f"{self.folder}: {f'no {split} samples of step {step}; ' if step is not None else ''}{steps}")
        return pq.read_table(files[step])

    @property
    def model(self) -> Path:
        """The folder of the trained model, once the run has finished."""
        folder = self.folder / "model"
        if not folder.exists():
            raise RunError(
                f"{self.folder}: the run has not finished, so there is no model yet. Resume it with: "
                f"plaudit {self.recipe['stage']} {self.folder / 'recipe.yaml'}"
            )
        return folder

    @property
    def best(self) -> Path | None:
        """The folder of the model with the best validation result, if one was kept."""
        folder = self.folder / "best" / "model"
        return folder if folder.exists() else None

    @property
    def recipe(self) -> dict[str, Any]:
        """Every setting by its dotted name, as it was resolved."""
        return read_description(self.folder / "run.json")["recipe"]


def read_metrics(file: Path) -> list[dict[str, float]]:
    """All lines so far; a last line cut short by a kill does not count. Null in the file is a number that is not finite."""
    if not file.exists():
        return []
    rows = []
    for number, line in enumerate(file.read_bytes().split(b"\n")[:-1], 1):
        try:
            row = parse_object(line)
        except UnreadableJson as error:
            raise RunError(f"{file}:{number}: the line is damaged ({error}); fix or delete it") from None
        if not isinstance(row.get("step"), int) or not all(_is_metric(value) for value in row.values()):
            raise RunError(f"{file}:{number}: the line is damaged (it should be a step and its numbers); fix or delete it")
        rows.append({name: math.nan if value is None else value for name, value in row.items()})
    return rows


def _is_metric(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def refuse_while_training(folder: Path) -> None:
    """Raise an error while another process trains in a folder: its inputs must stay as they are."""
    if not os.path.exists(folder / ".lock"):
        return
    with (folder / ".lock").open("a") as lock:
        try:
            try_lock(lock)
        except BlockingIOError:
            raise RunError(
                f"{folder}: another process is training in this folder; wait for it, or choose another run.dir"
            ) from None


def _rows(file: Path) -> int:
    return pq.read_metadata(file).num_rows


def _ranges(steps: list[int]) -> str:
    return ", ".join(map(str, steps)) if len(steps) < 8 else f"{steps[0]}, {steps[1]}, … {steps[-1]}"
