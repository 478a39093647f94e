"""The run folder: what was asked, what happened, and everything needed to go on.

    recipe.yaml       the resolved recipe, each value with where it came from
    run.json          versions, git state, the recipe, data, model and template it belongs to, trackers' ids
    metrics.jsonl     one line per step; names under `time/` are the machine's, all others are exact and repeat
    curves.png        the same, drawn
    reference.safetensors    DPO: the reference's log-probs of every pair
    samples/          RL: every sample with its scores, a parquet file per step; validation's too
    failures/         RL: what a reward failed on, when that stopped the run
    checkpoints/      train/checkpoint.py;  best → the one with the best validation
    model/            the trained model, once the run is done; critic/ beside it, if one has learnt with it

A run started again goes on from its newest checkpoint; metrics and samples behind that checkpoint are dropped and made again.
"""

import fcntl
import fnmatch
import json
import math
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal, Protocol, Self

from plaudit import __version__
from plaudit.config import LoadedRecipe, flatten, settings_of, to_yaml
from plaudit.data.templates import ChatTemplate
from plaudit.errors import DataError, Interrupted, RunError, TrainingStopped, redact
from plaudit.files import atomic_folder, fingerprint, remove_leftovers, text_digest, weights_fingerprint, write_atomic
from plaudit.recipe import ScoreRecipe, TrainingRecipe
from plaudit.report.curves import draw_curves
from plaudit.report.progress import print_line
from plaudit.report.samples import write_samples
from plaudit.trackers import Trackers
from plaudit.train.checkpoint import (
    checkpoint_folders,
    clear_write_errors,
    find_checkpoint,
    point_to,
    prune_checkpoints,
    save_checkpoint,
)
from plaudit.train.trainer import Trainer
from plaudit.types import ScoredGroup

WRITTEN = (
    "recipe.yaml", "run.json", "metrics.jsonl", "curves.png", "samples", "failures", "scores.sqlite", "reference.safetensors",
    "checkpoints", "best", "model", "critic",
)  # fmt: skip
DRAW_EVERY_S = 60.0  # at checkpoints; drawing takes as long as many small steps


class Companion(Protocol):
    """Something with a small state of its own that has to be there again when a run goes on."""

    def state(self) -> dict[str, Any]: ...
    def load_state(self, state: dict[str, Any], /) -> None: ...
    def saved(self) -> None:
        """The state is safe in a checkpoint."""


class Run:
    """A run folder, held for this process alone. Use it as a context manager."""

    def __init__(
        self,
        loaded: LoadedRecipe,
        files: list[Path],
        template: ChatTemplate | None = None,
        inputs: dict[str, str] | None = None,
        *,
        scorers: Sequence[Path] = (),
        best: str = "val/loss",
        higher_is_better: bool = False,
    ):
        """The result depends on the recipe, on the content of `files`, on the model and its `template`, and on `inputs`: digests by
        a name that a person understands. `scorers` are files that may be mended on the way, with a line that says so. `best` is the
        metric that tells which checkpoint is best."""
        assert not isinstance(loaded.recipe, ScoreRecipe), "scoring is no training run"
        self.recipe = loaded.recipe
        self.folder = Path(self.recipe.run.dir)
        self.checkpoints = self.folder / "checkpoints"
        self.metrics_file = self.folder / "metrics.jsonl"
        self.interrupted = False
        self.best: dict[str, float] | None = None
        self.unvalidated: dict[str, float] | None = None
        """Metrics of the last step done, where its validation could not be made before the run stopped."""
        self.companions: dict[str, Companion] = {}
        """What besides the trainer goes into a checkpoint, by name. To be told before `resume`."""
        self._loaded, self._files, self._scorers = loaded, [*files, *scorers], {str(path) for path in scorers}
        self._inputs = {**_model_digests(self.recipe, template), **(inputs or {})}
        self._best_metric, self._sign = best, 1.0 if higher_is_better else -1.0
        self._handlers: dict[signal.Signals, Any] = {}
        self._trackers: Trackers | None = None
        self._warned = False
        self._saved_step: int | None = None
        self._step_began = self._drawn_at = self._saved_at = time.monotonic()

    def __enter__(self) -> Self:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._refuse_foreign_files()
            self._lock = (self.folder / ".lock").open("a")
            os.register_at_fork(after_in_child=self._lock.close)  # or a worker that outlives us would keep the folder
        except OSError as error:
            raise RunError(f"run.dir: {self.folder} cannot be made or written to: {error}") from None
        try:
            self._hold()
        except BaseException:
            self._lock.close()
            raise
        return self

    def _hold(self) -> None:
        """Take the folder for this process. Up to the last check nothing in it changes."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RunError(
                f"{self.folder}: another process is training in this folder; wait for it, or choose another run.dir"
            ) from None
        self.about = self._same_run_or_refuse()
        with clear_write_errors(self.folder, self.checkpoints):
            remove_leftovers(self.folder, WRITTEN)
            self._write_about()  # first: it makes the folder, and all that follows, ours
            write_atomic(self.folder / "recipe.yaml", f"# plaudit {__version__}\n{to_yaml(self._loaded)}")

    def _write_about(self) -> None:
        write_atomic(self.folder / "run.json", json.dumps(self.about, indent=1))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self.draw()
        if self._trackers is not None:
            self._trackers.close()
        self._lock.close()

    # Going on

    def _refuse_foreign_files(self) -> None:
        """What a run writes must not replace files that no run wrote: run.dir=. beside one's own recipe.yaml or model/."""
        theirs = [name for name in WRITTEN if os.path.lexists(self.folder / name)]
        if theirs and "run.json" not in theirs:
            raise RunError(
                f"{self.folder}: holds {', '.join(theirs)} but no run.json, so no run wrote them; choose another run.dir"
            )

    def _same_run_or_refuse(self) -> dict[str, Any]:
        """What run.json should say; an error if the folder holds a run of another recipe or other data."""
        recipe = flatten(self.recipe)
        inputs = {str(path): _fingerprint(path) for path in self._files} | self._inputs
        about = {"recipe": recipe, "inputs": inputs, "versions": _versions(), "git": _git_state(), "trackers": {}}
        file = self.folder / "run.json"
        if not file.exists():
            return about
        before = _read_about(file)
        then = {**_defaults_since(before["recipe"], self.recipe), **before["recipe"]}
        differ = [name for name in sorted(then.keys() | recipe.keys()) if then.get(name) != recipe.get(name)]
        described = {name: f"  {name}: {_shown(name, then)} there, {_shown(name, recipe)} now" for name in differ}
        rounding = [described[name] for name in differ if _matches(name, self.recipe.RESUME_CHANGES_ROUNDING)]
        if rounding and self._has_results():
            note = "  so its result is not that of an uninterrupted run to the last bit"
            print_line("\n".join([f"{self.folder} goes on with", *rounding, note]), "yellow")
        allowed = self.recipe.RESUME_MAY_CHANGE + self.recipe.RESUME_CHANGES_ROUNDING
        changed = [described[name] for name in differ if not _matches(name, allowed)]
        changed += [
            f"  {path}: {'its content has changed' if path in before['inputs'].keys() & inputs.keys() else 'not part of both runs'}"
            for path in sorted(before["inputs"].keys() | inputs.keys())
            if before["inputs"].get(path) != inputs.get(path) and path not in self._scorers
        ]
        mended = [path for path in sorted(self._scorers & before["inputs"].keys()) if before["inputs"][path] != inputs[path]]
        if mended and not changed and self._has_results():
            print_line(
                f"{self.folder} goes on with another {', '.join(mended)} than it began with: what it scored before stays", "yellow"
            )
        if not changed:
            return {**about, "trackers": before["trackers"]}
        if not self._has_results():  # it stopped before it began; the change may well be what mends it
            return about
        raise RunError(
            f"{self.folder} belongs to a run of another recipe:\n" + "\n".join(changed)
            + "\nChoose another run.dir, or undo the difference to go on with that run."
        )  # fmt: skip

    def _has_results(self) -> bool:
        return bool(checkpoint_folders(self.checkpoints) or (self.folder / "model").exists() or self.metrics())

    def resume(self, trainer: Trainer) -> int:
        """Bring the trainer, the best score and the metrics to the newest whole checkpoint; returns the steps done (0: none)."""
        with clear_write_errors(self.folder, self.checkpoints):
            checkpoint, warnings = find_checkpoint(self.checkpoints)
        if warnings and checkpoint is None:
            raise RunError("\n".join([*warnings, "No checkpoint is left to go on from. To begin again, delete them."]))
        for warning in warnings:
            print_line(f"{warning}; going back to the one before", "yellow")
        step = -1
        if checkpoint is not None:
            checkpoint.load_into(trainer)
            for name, companion in self.companions.items():
                companion.load_state(checkpoint.state.get(name, {}))
            self.best, self._saved_step = checkpoint.state["best"], checkpoint.step
            step, self.unvalidated = checkpoint.step, checkpoint.state.get("unvalidated")
            print_line(f"going on from {checkpoint.folder}")
        kept = [row for row in self.metrics() if row["step"] < step + (self.unvalidated is None)]
        with clear_write_errors(self.folder, self.checkpoints):
            self._link_best()  # the process before this one may have been killed between checkpoint and link
            write_atomic(self.metrics_file, "".join(map(_line, kept)))
            self._drop_samples_behind(step)
        done = max(step, 0)
        self._trackers = Trackers(self.recipe.run.trackers, self.folder, self.recipe, self.about["trackers"], done)
        with clear_write_errors(self.folder, self.checkpoints):
            self._write_about()
        self._step_began = self._saved_at = time.monotonic()
        # Only now: before there is something to save, Ctrl-C should simply stop.
        self._handlers = {s: signal.signal(s, self._on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
        return done

    # Recording

    def metrics(self) -> list[dict[str, float]]:
        """All lines so far; a last line cut short by a kill is not one."""
        if not self.metrics_file.exists():
            return []
        rows = []
        for number, line in enumerate(self.metrics_file.read_bytes().split(b"\n")[:-1], 1):
            try:
                rows.append({name: math.nan if value is None else value for name, value in json.loads(line).items()})
            except ValueError:
                raise RunError(f"{self.metrics_file}:{number}: not JSON, the file is damaged; mend or delete that line") from None
        return rows

    def log(self, step: int, metrics: dict[str, float]) -> dict[str, float]:
        """Write a step's metrics; returns them with the time since the last."""
        now = time.monotonic()
        row = {"step": step, **metrics, "time/step_s": now - self._step_began}
        self._step_began = now
        row = {name: round(value, 4) if name.startswith("time/") else value for name, value in row.items()}
        with clear_write_errors(self.metrics_file, self.checkpoints), self.metrics_file.open("a", encoding="utf-8") as file:
            file.write(_line(row))
        if self._trackers is not None:
            self._trackers.log(step, row)
        return row

    def note_validation(self, step: int, metrics: dict[str, float]) -> bool:
        """Remember the best validation; says whether this is it."""
        value, name = metrics[self._best_metric], self._best_metric
        if not math.isfinite(value) or (self.best is not None and self._sign * value <= self._sign * self.best[name]):
            return False
        self.best = {"step": step, name: value}
        return True

    def write_samples(self, part: Literal["train", "val"], step: int, groups: Sequence[ScoredGroup]) -> None:
        """A parquet file of a step's samples: `samples/train_000012.parquet`."""
        file = self.folder / "samples" / f"{part}_{step:06d}.parquet"
        with clear_write_errors(file, self.checkpoints):
            file.parent.mkdir(exist_ok=True)
            write_samples(file, groups)

    def _drop_samples_behind(self, step: int) -> None:
        folder = self.folder / "samples"
        remove_leftovers(folder, ["train_*.parquet", "val_*.parquet"])
        for file in folder.glob("*.parquet"):
            ours = re.fullmatch(r"(?:train|val)_(\d{6,})", file.stem)
            if ours and int(ours[1]) > step:
                file.unlink()

    def say_once(self, text: str) -> None:
        """A warning that would come with every step: the first is enough."""
        if not self._warned:
            self._warned = True
            print_line(text, "yellow")

    def due(self, every: int | None, step: int, total: int) -> bool:
        return step == total or (every is not None and step % every == 0)

    # Saving

    def due_to_save(self, step: int, total: int) -> bool:
        minutes = self.recipe.run.save_every_minutes
        overdue = minutes is not None and time.monotonic() - self._saved_at > 60 * minutes
        return overdue or self.due(self.recipe.run.save_every, step, total)

    def save(self, step: int, trainer: Trainer, unvalidated: dict[str, float] | None = None, *, under_way: bool = False) -> None:
        """A checkpoint of this step, unless there is one already; older ones go. `under_way`: the next step has begun."""
        if self._saved_step == step:
            return
        if self.metrics_file.exists():
            with clear_write_errors(self.metrics_file, self.checkpoints), self.metrics_file.open("a") as file:
                os.fsync(file.fileno())  # a checkpoint must not outlive the metrics before it
        notes: dict[str, Any] = {} if unvalidated is None else {"unvalidated": unvalidated}
        notes |= {name: state for name, companion in self.companions.items() if (state := companion.state())}
        save_checkpoint(self.checkpoints, step, trainer, best=self.best, **notes)
        self._saved_step, self._saved_at = step, time.monotonic()
        with clear_write_errors(self.checkpoints, self.checkpoints):
            self._link_best()
            prune_checkpoints(self.checkpoints, keep_last=self.recipe.run.keep_last, keep_step=self._best_step())
        for companion in () if under_way else self.companions.values():
            companion.saved()
        if time.monotonic() - self._drawn_at > DRAW_EVERY_S:
            self.draw()

    def _best_step(self) -> int | None:
        return int(self.best["step"]) if self.best and self.recipe.run.keep_best else None

    def _link_best(self) -> None:
        best = self.checkpoints / f"step_{self._best_step() or 0:06d}"
        if best.exists():
            point_to(self.folder / "best", best)
        else:
            (self.folder / "best").unlink(missing_ok=True)

    def draw(self) -> None:
        try:
            draw_curves(self.metrics(), self.folder / "curves.png")
        except Exception as error:  # a picture is no reason to lose a training run, nor to hide why it stopped
            print_line(f"{self.folder / 'curves.png'} could not be drawn: {error}", "yellow")
        self._drawn_at = time.monotonic()

    def finish(self, trainer: Trainer) -> Path:
        """The trained model, where the next stage looks for it; and what has learnt beside it."""
        for name, one in {**trainer.beside, "model": trainer}.items():
            with clear_write_errors(self.folder / name, self.checkpoints), atomic_folder(self.folder / name) as folder:
                one.policy.save(folder)
        return self.folder / "model"

    # Stopping

    @contextmanager
    def nothing_lost(self, what: str, done: int, trainer: Trainer, unvalidated: dict[str, float] | None = None) -> Iterator[None]:
        """Around what may have to stop before it changes anything (a reward fails): the steps done before it are saved."""
        try:
            yield
        except TrainingStopped as error:
            if done:
                self.save(done, trainer, unvalidated, under_way=True)
            raise TrainingStopped(f"{what}: {error}{self._keep_failed(what, error.failed)}") from None

    def _keep_failed(self, what: str, failed: Sequence[Mapping[str, Any]]) -> str:
        if not failed:
            return ""
        file = self.folder / "failures" / f"{what.replace(' ', '_')}.jsonl"
        with clear_write_errors(file, self.checkpoints):
            file.parent.mkdir(exist_ok=True)
            rows = (json.dumps(row, ensure_ascii=False, default=str) for row in failed)
            write_atomic(file, redact("".join(f"{row}\n" for row in rows)))
        return f" What it failed on: {file}"

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.interrupted:
            raise KeyboardInterrupt
        self.interrupted = True
        print_line("stopping after this step (once more to stop at once, without saving)", "yellow")

    def stop_if_interrupted(self, step: int, total: int, trainer: Trainer) -> None:
        if self.interrupted:
            self.save(step, trainer)
            command = shlex.join(["plaudit", *sys.argv[1:]])
            raise Interrupted(f"stopped after step {step} of {total}, saved. Go on with: {redact(command)}")


def _read_about(file: Path) -> dict[str, Any]:
    """A run.json, if it is one of ours."""
    try:
        about = json.loads(file.read_bytes())
        if all(isinstance(about[part], dict) for part in ("recipe", "inputs", "trackers")):
            return about
    except (OSError, ValueError, LookupError, TypeError):
        pass
    raise RunError(f"{file}: cannot be read as the record of a plaudit run; choose another run.dir")


def _defaults_since(before: dict[str, Any], recipe: TrainingRecipe) -> dict[str, Any]:
    """Settings that are newer than the run had their defaults in it; those of a section it did not have (LoRA) had none."""
    places = settings_of(recipe.model_dump(), type(recipe))
    known = {".".join(map(str, place)): info for place, info in places.items() if not info.is_required()}
    return {
        name: json.loads(json.dumps(known[name].default))
        for name in flatten(recipe).keys() & known.keys()
        if name.rpartition(".")[0] not in before
    }


def _model_digests(recipe: TrainingRecipe, template: ChatTemplate | None) -> dict[str, str]:
    if template is None:
        return {}
    return {
        "the model": weights_fingerprint(Path(recipe.model.path)),
        "the tokenizer": text_digest(template.tokenizer.backend_tokenizer.to_str()),  # pyright: ignore
        "the chat template": text_digest(template.text),
    }


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    parts = name.split(".")
    return any(
        len(parts) == pattern.count(".") + 1 and all(map(fnmatch.fnmatchcase, parts, pattern.split("."))) for pattern in patterns
    )


def _shown(name: str, recipe: dict[str, Any]) -> str:
    return json.dumps(recipe[name], ensure_ascii=False) if name in recipe else "not set"


def _fingerprint(path: Path) -> str:
    try:
        return fingerprint(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from None


def _line(row: dict[str, float]) -> str:
    """Of metrics.jsonl. JSON has no NaN and no infinity, so a number that is not finite is null."""
    return json.dumps({name: value if math.isfinite(value) else None for name, value in row.items()}) + "\n"


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
