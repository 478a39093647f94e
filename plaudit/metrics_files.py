"""The metrics of a run, as files.

metrics.jsonl   a line per step, of the whole run
ranks.jsonl     with several processes, a line per step and process: its machine, seconds by phase, peak memory
"""

import json
import math
import socket
from pathlib import Path
from typing import Any

import psutil
import torch

from plaudit.files import write_atomic
from plaudit.run_folder import read_metrics
from plaudit.world import World

OWN = "rank/"
"""In front of metrics that every process has for itself. They replace the run's of the same name (`time/`) in its lines."""


class MetricsFiles:
    def __init__(self, folder: Path, world: World):
        self.of_run, self.of_ranks = folder / "metrics.jsonl", folder / "ranks.jsonl"
        self._world = world

    def read(self) -> list[dict[str, float]]:
        return read_metrics(self.of_run)

    def keep_before(self, step: int) -> None:
        """Drop the lines of this step and later ones, which are made again. Called by the leading process."""
        write_atomic(self.of_run, "".join(_line(row) for row in self.read() if row["step"] < step))
        if self.of_ranks.exists():
            kept = [line for line in self.of_ranks.read_text(encoding="utf-8").splitlines() if _step(line) < step]
            write_atomic(self.of_ranks, "".join(f"{line}\n" for line in kept))

    def append(self, row: dict[str, float]) -> dict[str, float]:
        """Called by all processes; returns the run's metrics of the step."""
        row = {name: round(value, 4) if name.startswith(("time/", OWN)) else value for name, value in row.items()}
        of_run = {name: value for name, value in row.items() if not name.startswith(OWN)}
        if self._world.size > 1:
            rows = self._world.gather(self._own_row(row), "the metrics of all processes")
            self._write(self.of_ranks, "".join(_line(one) for one in rows))
        self._write(self.of_run, _line(of_run))
        return of_run

    def _own_row(self, row: dict[str, float]) -> dict[str, Any]:
        times = {name.removeprefix("time/"): value for name, value in row.items() if name.startswith("time/")}
        own = {name.removeprefix(OWN): value for name, value in row.items() if name.startswith(OWN)}
        who = {"step": row["step"], "rank": self._world.rank, "machine": socket.gethostname()}
        return {**who, **times, **own, "memory_gb": round(_peak_bytes(self._world.device) / 1e9, 3)}

    def _write(self, file: Path, lines: str) -> None:
        if self._world.leads:
            with file.open("a", encoding="utf-8") as opened:
                opened.write(lines)


def _peak_bytes(device: torch.device) -> int:
    """Since the start: of this process's GPU memory, or else what it has of the machine's now."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else psutil.Process().memory_info().rss


def _line(row: dict[str, Any]) -> str:
    """JSON has no NaN or infinity, so a number that is not finite is null."""
    finite = {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()}
    return json.dumps(finite) + "\n"


def _step(line: str) -> float:
    """Of a line that may be incomplete."""
    try:
        return json.loads(line)["step"]
    except (ValueError, TypeError, KeyError):
        return math.inf
