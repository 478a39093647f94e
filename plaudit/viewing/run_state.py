"""Whether a run is training, finished or stopped, as its folder shows."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plaudit.viewing.metrics_log import MetricsLog

RECENT_S = 120.0
"""A run whose lock cannot be seen counts as training if it has written something in this time."""


def run_state(folder: Path, description: Mapping[str, Any], metrics: MetricsLog) -> dict[str, Any]:
    """`state`: training, finished or stopped; why; and how far it is."""
    step = metrics.last_step
    total = description["recipe"].get("run.max_steps")
    epoch, epochs = metrics.last("epoch"), description["recipe"].get("run.epochs")
    progress = step / total if total else epoch / epochs if epoch and epochs else None
    state, detail = _state(folder, description, step)
    return {
        "state": state,
        "detail": detail,
        "step": step,
        "total_steps": total,
        "progress": None if progress is None else min(1.0, progress),
        "seconds": metrics.seconds.values[-1] if len(metrics.seconds.values) else None,
        "last": {name: value for name in ("reward", "val/reward", "loss", "val/loss") if (value := metrics.last(name)) is not None},
    }


def _state(folder: Path, description: Mapping[str, Any], step: int) -> tuple[str, str]:
    if _is_locked(folder / ".lock"):
        return "training", ""
    if (folder / "model").exists():
        return "finished", f"All steps are done; the model is in {folder / 'model'}."
    if why := (description.get("stopped") or {}).get("reason"):
        return "stopped", str(why)
    if _is_recent(folder):  # on another machine that shares the folder: its lock is not seen here, what it writes is
        return "training", ""
    stage = description["recipe"].get("stage")
    resume = f"To resume it, repeat the command that started it, or: plaudit {stage} {folder / 'recipe.yaml'}"
    return "stopped", f"It ended after step {step} and has left no reason, as a process that is killed. {resume}"


def _is_locked(file: Path) -> bool:
    """Whether a process of this machine holds the lock. Only looked at, never taken, or a run that starts at this moment would find
    its folder in use."""
    try:
        inode = os.stat(file).st_ino
        with open("/proc/locks", encoding="ascii", errors="replace") as locks:
            return any("FLOCK" in line and f":{inode} " in line for line in locks)
    except OSError:
        return False


def _is_recent(folder: Path) -> bool:
    try:
        return time.time() - os.stat(folder / "metrics.jsonl").st_mtime < RECENT_S
    except OSError:
        return False
