"""The run folder: what was asked, what happened, and everything needed to go on.

    recipe.yaml       the resolved recipe, each value with where it came from
    run.json          versions, git state, the recipe and data it belongs to, trackers' ids
    metrics.jsonl     one line per step; names under `time/` are the machine's, all others are exact and repeat
    curves.png        the same, drawn
    checkpoints/      train/checkpoint.py;  best → the one with the lowest validation loss
    model/            the trained model, once the run is done

A run started again goes on from its newest checkpoint; metrics behind that checkpoint are dropped and made again.
"""

import fcntl
import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from plaudit import __version__
from plaudit.config import LoadedRecipe, flatten, to_yaml
from plaudit.errors import Interrupted, RunError, redact
from plaudit.files import fingerprint, folder_written_aside, remove_leftovers, write_atomic
from plaudit.report.curves import draw_curves
from plaudit.report.progress import say
from plaudit.trackers import Trackers
from plaudit.train.checkpoint import Checkpoint, find_checkpoint, point_to, prune_checkpoints, save_checkpoint
from plaudit.train.trainer import Trainer

DRAW_EVERY_S = 60.0  # at checkpoints; drawing takes as long as many small steps


class Run:
    """A run folder, held for this process alone. Use it as a context manager."""

    def __init__(self, loaded: LoadedRecipe, data_files: list[Path]):
        self.recipe = loaded.recipe
        self.folder = Path(self.recipe.run.dir)
        self.checkpoints = self.folder / "checkpoints"
        self.metrics_file = self.folder / "metrics.jsonl"
        self.interrupted = False
        self.best: dict[str, float] | None = None
        self._loaded, self._data_files = loaded, data_files
        self._trackers: Trackers | None = None
        self._saved_step: int | None = None
        self._step_began = self._drawn_at = time.monotonic()

    def __enter__(self) -> Self:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"run.dir: {self.folder} cannot be made: {error}") from None
        self._lock = (self.folder / ".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RunError(
                f"{self.folder}: another process is training in this folder; wait for it, or choose another run.dir"
            ) from None
        remove_leftovers(self.folder)
        self.about = self._same_run_or_refuse()
        write_atomic(self.folder / "recipe.yaml", f"# plaudit {__version__}\n{to_yaml(self._loaded)}")
        write_atomic(self.folder / "run.json", json.dumps(self.about, indent=1))
        self._handlers = {s: signal.signal(s, self._on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self.draw()
        if self._trackers is not None:
            self._trackers.close()
        self._lock.close()

    # Going on

    def _same_run_or_refuse(self) -> dict[str, Any]:
        """What run.json should say; an error if the folder holds a run of another recipe or other data."""
        recipe = flatten(self.recipe)
        data = {str(path): fingerprint(path) for path in self._data_files}
        about = {"recipe": recipe, "data": data, "versions": _versions(), "git": _git_state(), "trackers": {}}
        file = self.folder / "run.json"
        if not file.exists():
            if any(self.checkpoints.glob("step_*")) or self.metrics_file.exists():
                raise RunError(f"{self.folder}: holds checkpoints or metrics but no run.json; choose another run.dir")
            return about
        before = json.loads(file.read_text())
        changed = [
            f"  {name}: {before['recipe'].get(name, 'not set')} there, {recipe.get(name, 'not set')} now"
            for name in sorted(before["recipe"].keys() | recipe.keys())
            if before["recipe"].get(name) != recipe.get(name) and name not in self.recipe.RESUME_MAY_CHANGE
        ]
        changed += [f"  {path}: its content has changed" for path in data if before["data"].get(path, data[path]) != data[path]]
        if changed:
            raise RunError(
                f"{self.folder} belongs to a run of another recipe:\n" + "\n".join(changed)
                + "\nChoose another run.dir, or undo the difference to go on with that run."
            )  # fmt: skip
        return {**about, "trackers": before["trackers"]}

    def resume(self, trainer: Trainer) -> None:
        """Bring the trainer, the best score and the metrics to the newest whole checkpoint, if there is one."""
        checkpoint, warnings = find_checkpoint(self.checkpoints)
        for warning in warnings:
            say(warning, "yellow")
        step = -1
        if checkpoint is not None:
            checkpoint.load_into(trainer)
            self.best, self._saved_step = checkpoint.state["best"], checkpoint.step
            step = checkpoint.step
            say(f"going on from {checkpoint.folder}")
        kept = [row for row in self.metrics() if row["step"] <= step]
        write_atomic(self.metrics_file, "".join(json.dumps(row) + "\n" for row in kept))
        self._trackers = Trackers(self.recipe.run.trackers, self.folder, self.recipe, self.about["trackers"], trainer.step)
        write_atomic(self.folder / "run.json", json.dumps(self.about, indent=1))
        self._step_began = time.monotonic()

    # Recording

    def metrics(self) -> list[dict[str, float]]:
        """All lines so far; a last line cut short by a kill is not one."""
        if not self.metrics_file.exists():
            return []
        lines = self.metrics_file.read_text(encoding="utf-8").split("\n")[:-1]
        return [json.loads(line) for line in lines]

    def log(self, step: int, metrics: dict[str, float]) -> dict[str, float]:
        """Write a step's metrics; returns them with the time since the last."""
        now = time.monotonic()
        row = {"step": step, **metrics, "time/step_s": now - self._step_began}
        self._step_began = now
        if "tokens" in metrics:
            row["time/tokens_per_s"] = metrics["tokens"] / metrics["time/update_s"]
        row = {name: round(value, 4) if name.startswith("time/") else value for name, value in row.items()}
        with self.metrics_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        if self._trackers is not None:
            self._trackers.log(step, row)
        return row

    def note_validation(self, step: int, loss: float) -> bool:
        """Remember the lowest validation loss; says whether this is it."""
        if self.best is not None and loss >= self.best["val/loss"]:
            return False
        self.best = {"step": step, "val/loss": loss}
        return True

    def due(self, every: int | None, step: int, total: int) -> bool:
        return step == total or (every is not None and step % every == 0)

    # Saving

    def save(self, trainer: Trainer) -> None:
        """A checkpoint of this step, unless there is one already; older ones go."""
        if self._saved_step == trainer.step:
            return
        checkpoint = save_checkpoint(self.checkpoints, trainer, best=self.best)
        self._saved_step = trainer.step
        best_step = int(self.best["step"]) if self.best and self.recipe.run.keep_best else None
        self._link_best(checkpoint, best_step)
        prune_checkpoints(self.checkpoints, keep_last=self.recipe.run.keep_last, keep_step=best_step)
        if time.monotonic() - self._drawn_at > DRAW_EVERY_S:
            self.draw()

    def _link_best(self, checkpoint: Checkpoint, best_step: int | None) -> None:
        if best_step == checkpoint.step:
            point_to(self.folder / "best", checkpoint.folder)

    def draw(self) -> None:
        draw_curves(self.metrics(), self.folder / "curves.png")
        self._drawn_at = time.monotonic()

    def finish(self, trainer: Trainer) -> Path:
        """The trained model, where the next stage looks for it."""
        with folder_written_aside(self.folder / "model") as folder:
            trainer.policy.save(folder)
        return self.folder / "model"

    # Stopping

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.interrupted:
            raise KeyboardInterrupt
        self.interrupted = True
        say("stopping after this step (once more to stop at once, without saving)", "yellow")

    def stop_if_interrupted(self, trainer: Trainer) -> None:
        if self.interrupted:
            self.save(trainer)
            command = " ".join(["plaudit", *sys.argv[1:]])
            raise Interrupted(f"stopped after step {trainer.step} of {trainer.total_steps}, saved. Go on with: {redact(command)}")


def _versions() -> dict[str, str]:
    import importlib.metadata as metadata

    names = ("torch", "transformers", "peft", "safetensors", "numpy", "pyarrow")
    return {"plaudit": __version__, "python": platform.python_version(), **{name: metadata.version(name) for name in names}}


def _git_state() -> dict[str, Any] | None:
    """Commit of the working directory and which files differ from it: names only, never content."""
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5)
        changed = subprocess.run(["git", "status", "--porcelain", "-uno"], capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if commit.returncode or not os.access(".", os.R_OK):
        return None
    return {"commit": commit.stdout.strip(), "changed": [line[3:] for line in changed.stdout.splitlines()]}
