"""A run's metrics.jsonl, read as it grows, and thinned to what a chart can show."""

import math
import os
import threading
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from plaudit.json_files import UnreadableJson, parse_object

POINTS = 400
"""Of a curve: about one per pixel of a chart."""
MAX_DAMAGED = 5
"""Lines that are named; of further ones, how many there are."""


@dataclass
class Series:
    """A metric's values, by step."""

    steps: array = field(default_factory=lambda: array("q"))
    values: array = field(default_factory=lambda: array("d"))

    def append(self, step: int, value: float) -> None:
        self.steps.append(step)
        self.values.append(value)


class MetricsLog:
    """All lines so far. A damaged line is reported and skipped: to look at the others is what this is for."""

    def __init__(self, file: Path):
        self._file, self._lock = file, threading.Lock()
        self._reset()

    def _reset(self) -> None:
        self.series: dict[str, Series] = {}
        self.seconds = Series()
        """Time since the first start of the run, without the time between its starts."""
        self.last_step = 0
        self.damaged: list[int] = []
        """Numbers of the first damaged lines."""
        self.damaged_lines = 0
        """How many there are."""
        self._offset = self._lines = self._inode = 0
        self._start = b""

    def refresh(self) -> None:
        """Read what was added. A run that resumes writes the file anew, without the steps that it makes again."""
        with self._lock:
            self._read_more()

    def _read_more(self) -> None:
        if self.leads_out:
            self._reset()
            return
        try:
            with self._file.open("rb") as opened:
                state, start = os.fstat(opened.fileno()), opened.read(64)
                if state.st_size < self._offset or state.st_ino != self._inode or not start.startswith(self._start):
                    self._reset()
                    self._inode = state.st_ino
                self._start = start
                if state.st_size == self._offset:
                    return
                opened.seek(self._offset)
                text = opened.read()
        except OSError:
            self._reset()
            return
        complete = text[: text.rfind(b"\n") + 1]
        self._offset += len(complete)
        for line in complete.split(b"\n")[:-1]:
            self._lines += 1
            self._add(line)

    def _add(self, line: bytes) -> None:
        try:
            row = parse_object(line)
        except UnreadableJson:
            row = {}
        step = row.pop("step", None)
        if not isinstance(step, int):
            self.damaged_lines += 1
            if len(self.damaged) < MAX_DAMAGED:
                self.damaged.append(self._lines)
            return
        all_series = self.series
        for name, value in row.items():
            if value.__class__ is not float:  # a fast path: long runs have millions of values
                if value is not None and not isinstance(value, int | float):
                    continue
                value = math.nan if value is None else float(value)
            series = all_series.get(name)
            if series is None:
                series = all_series[name] = Series()
            series.steps.append(step)
            series.values.append(value)
        spent = row.get("time/step_s")
        self.seconds.append(step, (self.seconds.values[-1] if len(self.seconds.values) else 0.0) + (spent or 0.0))
        self.last_step = step

    def last(self, name: str) -> float | None:
        """The newest value of a metric, which may be older than the last step; None if it is not finite."""
        series = self.series.get(name)
        return series.values[-1] if series is not None and math.isfinite(series.values[-1]) else None

    @property
    def leads_out(self) -> bool:
        return leads_out(self._file, self._file.parent)

    @property
    def version(self) -> str:
        """Changes with the content."""
        return f"{self._inode}:{self._offset}"


def leads_out(file: Path, folder: Path) -> bool:
    """Whether it is a link from inside a folder to elsewhere: a run that someone has sent must not show other files of this
    machine."""
    return not file.resolve().is_relative_to(folder.resolve())


def thin(series: Series, points: int = POINTS) -> dict[str, list[Any]]:
    """At most `points` of a series: the least and the greatest value of equal stretches, so that no peak is lost."""
    n = len(series.steps)
    if n <= points:
        return as_points(series.steps, series.values)
    kept: set[int] = {0, n - 1}
    values = np.frombuffer(series.values, dtype=np.float64)
    lows, highs = np.where(np.isfinite(values), values, np.inf), np.where(np.isfinite(values), values, -np.inf)
    for bucket in range(points // 2):
        start, end = bucket * n * 2 // points, (bucket + 1) * n * 2 // points
        kept |= {start + int(lows[start:end].argmin()), start + int(highs[start:end].argmax())}
    del values, lows, highs  # an array that is looked into cannot grow
    chosen = sorted(kept)
    return as_points([series.steps[i] for i in chosen], [series.values[i] for i in chosen])


def as_points(steps: Sequence[int], values: Sequence[float | None]) -> dict[str, list[Any]]:
    return {"x": list(steps), "y": [None if y is None or not math.isfinite(y) else float(f"{y:.6g}") for y in values]}
