"""The run folder: what was requested, what happened, and everything needed to resume.

    recipe.yaml       the resolved recipe, each value with where it came from
    inputs/           rows and functions that a call from Python brought along
    run.json          versions, git state, threads, processes, tokens per micro-batch, the recipe, data, model and template,
                      trackers' ids, restarts
    metrics.jsonl     one line per step; names under `time/` depend on the machine, all others are exact and repeat
    ranks.jsonl       with several processes, one line per step and process: where its time went, its memory
    curves.png        the metrics, drawn
    reference.safetensors    DPO: the reference's log-probs of every pair
    samples/          RL: every sample with its scores, a parquet file per step; validation's too
    failures/         RL: the samples a reward failed on, when that stopped the run
    checkpoints/      checkpoint.py;  best → the one with the best validation
    model/            the trained model, once the run is done; critic/ next to it, if one was trained

A run started again resumes from its newest checkpoint; metrics and samples after that checkpoint are dropped and made again.
A run decides when state is saved and makes it atomic; tensors are written and read by their owner (`checkpoint.Saveable`).
"""

import json
import math
import os
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal, Protocol, Self

from plaudit import __version__
from plaudit.checkpoint import Checkpoint, Saveable, clear_write_errors, find_checkpoint, newest_intact
from plaudit.config import LoadedRecipe
from plaudit.data.conversations import Source
from plaudit.data.templates import ChatTemplate
from plaudit.errors import Interrupted, PlauditError, RunError, StopRequested, TrainingStopped
from plaudit.explain import to_yaml
from plaudit.files import atomic_folder, remove_leftovers, try_lock, write_atomic
from plaudit.metrics_files import MetricsFiles
from plaudit.output_folder import other_entries, require_run_folder
from plaudit.recipe import ScoreRecipe, TrainingRecipe
from plaudit.recipe_file import COMMAND_LINE
from plaudit.redaction import redact
from plaudit.report import curves
from plaudit.report.progress import print_line
from plaudit.report.samples import Trained, samples_to_follow
from plaudit.run_identity import Computing, advice, compare, describe_auto, describe_run, recorded_micro_batch
from plaudit.run_progress import checkpoint_folders, read_description
from plaudit.sample_files import SampleFiles
from plaudit.saving import Saver
from plaudit.threads import threads_on_cpu
from plaudit.trackers import Trackers
from plaudit.types import ScoredGroup
from plaudit.world import World

WRITTEN = (
    "recipe.yaml", "run.json", "metrics.jsonl", "ranks.jsonl", "curves.png", "samples", "failures", "scores.sqlite",
    "reference.safetensors", "checkpoints", "best", "model", "critic",
)  # fmt: skip
DRAW_EVERY_S = 60.0  # at checkpoints; drawing takes as long as many small steps


class Stateful(Protocol):
    """Has a small state of its own that a resumed run needs: it goes into state.json."""

    def state(self) -> dict[str, Any]: ...
    def load_state(self, state: dict[str, Any], /) -> None: ...
    def saving(self) -> Callable[[], None] | None:
        """Its state is being saved; returns what to do, in any thread, once that is safe in a checkpoint."""


class Run:
    """A run folder, locked by this process. Use it as a context manager."""

    def __init__(
        self,
        loaded: LoadedRecipe,
        files: Sequence[Path | Source],
        template: ChatTemplate | None = None,
        inputs: dict[str, str] | None = None,
        *,
        world: World,
        code: Sequence[Path] = (),
        best: str = "val/loss",
        higher_is_better: bool = False,
    ):
        """The result depends on the recipe, on the content of `files`, on the model and its `template`, and on `inputs`: digests by
        a name that a person understands. `code`: files of rewards and engines, which may be edited between starts, with a warning.
        `best` is the metric that decides which checkpoint is best. Of the processes of a `world`, all make the same calls; the
        leading one writes."""
        assert not isinstance(loaded.recipe, ScoreRecipe), "scoring is not a training run"
        self.recipe, self.world = loaded.recipe, world
        self.folder = Path(self.recipe.run.dir)
        self.saver = Saver(self.folder, self.recipe.run, world)
        self.checkpoints = self.folder / "checkpoints"
        self._metrics = MetricsFiles(self.folder, world)
        self.samples = SampleFiles(self.folder, self.recipe.run, template)
        self.interrupted = False
        self.sharding = "none"
        """What the processes divide among themselves, once that is decided."""
        self.micro_batch: int | None = None
        """Its tokens, likewise; until then what a run that is resumed has recorded, in the leading process."""
        self.resolved: TrainingRecipe = self.recipe
        """The recipe with what `auto` stands for, likewise."""
        self.best: dict[str, float] | None = None
        self.unvalidated: dict[str, float] | None = None
        """Metrics of the last step done, if the run stopped before its validation."""
        self._loaded, self._template = loaded, template
        self._files, self._code = [*files, *code], {str(path) for path in code}
        self._inputs = inputs or {}
        self._best_metric, self._sign = best, 1.0 if higher_is_better else -1.0
        self._owner: Saveable | None = None
        self._stateful: dict[str, Stateful] = {}
        self._handlers: dict[signal.Signals, Any] = {}
        self._trackers: Trackers | None = None
        self._warned: set[str] = set()
        self._saved: tuple[Any, ...] | None = None
        """Step, best and unvalidated metrics of the newest checkpoint, which may still be being written."""
        self._step_began = self._drawn_at = self._saved_at = time.monotonic()

    def __enter__(self) -> Self:
        if self.world.leads:
            self._open()
        self.world.wait("the run folder")
        return self

    def _open(self) -> None:
        self._new_folders = [path for path in (self.folder, *self.folder.parents) if not os.path.exists(path)]
        self._is_new, self._locked = not os.path.exists(self.folder / "run.json"), False
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            require_run_folder(self.folder)
            self._lock = (self.folder / ".lock").open("a")
            os.register_at_fork(after_in_child=self._lock.close)  # or a worker that outlives us would keep the folder locked
        except OSError as error:
            raise RunError(f"run.dir: {self.folder} cannot be created or written to: {error}") from None
        try:
            self._take_over()
        except BaseException as error:
            self._remove_unused(error)
            self._lock.close()
            raise

    def _take_over(self) -> None:
        """Lock the folder for this process. Nothing in it changes before the last check."""
        try:
            self._locked = try_lock(self._lock)
            if not self._locked:
                print_line(f"{self.folder}: its file system has no locks; make sure that no other process trains there", "yellow")
        except BlockingIOError:
            raise RunError(
                f"{self.folder}: another process is training in this folder; wait for it, or choose another run.dir"
            ) from None
        self.description = self._describe_or_refuse()
        with clear_write_errors(self.folder, self.checkpoints):
            remove_leftovers(self.folder, WRITTEN)
            self._write_description()  # first: it makes the folder, and all that follows, ours
            write_atomic(self.folder / "recipe.yaml", f"# plaudit {__version__}\n{to_yaml(self._loaded)}")

    def _write_description(self) -> None:
        write_atomic(self.folder / "run.json", json.dumps(self.description, indent=1))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._end_save(error)
        if not self.world.leads:
            return
        if kind is KeyboardInterrupt:  # the second Ctrl-C
            print_line(f"stopped at once; {newest_intact(self.checkpoints)}. {self._how_to_resume()}", "yellow")
        self.draw()
        if self._trackers is not None:
            self._trackers.close()
        self._record_end(error)
        self._remove_unused(error)
        self._lock.close()

    def _record_end(self, error: BaseException | None) -> None:
        """Why the run stopped, for those who look at it later. A run that is killed leaves no reason."""
        if error is not None and self._locked:
            time_ = datetime.now(UTC).isoformat(timespec="seconds")
            self.description["stopped"] = {"time": time_, "reason": redact(str(error) or type(error).__name__)}
            with suppress(OSError):  # a full disk may be the reason
                self._write_description()

    def _end_save(self, error: BaseException | None) -> None:
        """No thread writes into the folder once it is unlocked. What ended the run is more important than a failed save. Ctrl-C,
        which this object no longer handles, ends the wait."""
        if (step := self.saver.writing) is not None:
            print_line(f"waiting for the checkpoint of step {step} to be written (Ctrl-C to leave at once, without it)", "yellow")
        try:
            self.saver.wait()
        except Exception as failure:
            if error is None:
                raise
            self._saved = None  # it is not, after all
            print_line(str(failure) or type(failure).__name__, "red")

    def _remove_unused(self, error: BaseException | None) -> None:
        """A mistake in data or settings that ends a new run before it has done anything leaves no folder."""
        started = ("recipe.yaml", "run.json", ".lock")
        a_mistake = isinstance(error, PlauditError) and not isinstance(error, TrainingStopped | Interrupted)
        if not (self._is_new and self._locked and a_mistake) or other_entries(self.folder, [*started, "inputs", "logs"]):
            return
        shutil.rmtree(self.folder / "logs", ignore_errors=True)
        for name in started:
            (self.folder / name).unlink(missing_ok=True)
        for folder in self._new_folders:
            with suppress(OSError):  # not empty
                folder.rmdir()

    # Resuming

    def _describe_or_refuse(self) -> dict[str, Any]:
        """The content of run.json; an error if the folder belongs to a run with another recipe or other data."""
        description = describe_run(self.recipe, self._files, self._template, self._inputs)
        file = self.folder / "run.json"
        if not file.exists():
            return description
        before = read_description(file)
        differences = compare(before, description, self.recipe, self._code)
        if differences.rounding and self._has_results():
            note = "  so its result is not that of an uninterrupted run to the last bit"
            print_line("\n".join([f"{self.folder} resumes with changed settings:", *differences.rounding, note]), "yellow")
        if differences.code and not differences.forbidden and self._has_results():
            changed = ", ".join(differences.code)
            print_line(
                f"{self.folder} resumes although {changed} has changed: what was sampled and scored before stays as it is", "yellow"
            )
        if not differences.forbidden:
            if self._has_results():
                self.micro_batch = recorded_micro_batch(before)
            return {**before, **description, "trackers": before["trackers"], "stopped": None}
        if not self._has_results():  # it stopped before the first step; the change may well be the fix
            return description
        raise RunError(
            "\n".join(
                [f"{self.folder} belongs to a run with another recipe:", *differences.forbidden, *advice(differences, self.folder)]
            )
        )

    def _has_results(self) -> bool:
        return bool(checkpoint_folders(self.checkpoints) or (self.folder / "model").exists() or self.metrics())

    def resume(self, owner: Saveable, **stateful: Stateful | None) -> int:
        """Restore the owner of the tensors, everything `stateful`, the best score and the metrics from the newest intact
        checkpoint; returns the steps done (0: none). All of them go into the checkpoints that follow."""
        self._owner, self._stateful = owner, {name: each for name, each in stateful.items() if each is not None}
        checkpoint = self.world.agree(self._find_checkpoint() if self.world.leads else None, "the checkpoint to resume from")
        step = -1
        if checkpoint is not None:
            owner.load_state(checkpoint.folder, checkpoint.state)
            for name, each in self._stateful.items():
                each.load_state(checkpoint.state.get(name, {}))
            self.best, self.unvalidated = checkpoint.state.get("best"), checkpoint.state.get("unvalidated")
            step, self._saved = checkpoint.step, (checkpoint.step, self.best, self.unvalidated)
            print_line(f"resuming from {checkpoint.folder}")
        if self.world.leads:
            self._continue_records(step)
        self.world.heartbeat.end_phase()
        self._step_began = self._saved_at = time.monotonic()
        # Only now: before there is something to save, Ctrl-C should simply stop.
        if threading.current_thread() is threading.main_thread():  # Python allows no others to handle signals
            self._handlers = {s: signal.signal(s, self._on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
        return max(step, 0)

    def _find_checkpoint(self) -> Checkpoint | None:
        with clear_write_errors(self.folder, self.checkpoints):
            checkpoint, warnings = find_checkpoint(self.checkpoints)
        if warnings and checkpoint is None:
            raise RunError("\n".join([*warnings, "No checkpoint is left to resume from. To start over, delete them."]))
        for warning in warnings:
            print_line(f"{warning}; resuming from the one before it", "yellow")
        return checkpoint

    def _continue_records(self, step: int) -> None:
        """Metrics, samples and trackers, from this checkpoint on; -1: there is none."""
        self._record_computing(resumed=step >= 0)
        with clear_write_errors(self.folder, self.checkpoints):
            self.saver.link_best(self._best_step())  # the previous process may have been killed between checkpoint and link
            self._metrics.keep_before(step + (self.unvalidated is None))
            self.samples.drop_after(step)
        self._trackers = Trackers(self.recipe.run.trackers, self.folder, self.recipe, self.description["trackers"], max(step, 0))
        with clear_write_errors(self.folder, self.checkpoints):
            self._write_description()

    def _record_computing(self, *, resumed: bool) -> None:
        """By now the models are loaded and the number of threads is chosen."""
        before = Computing.recorded(self.description)
        now = Computing(threads_on_cpu(self.recipe.run.device), self.world.size, self.sharding)
        if resumed and before is not None and (change := now.changed(before)):
            print_line(f"{self.folder} resumes {change}", "yellow")
        self.description |= {**asdict(now), **describe_auto(self.recipe, self.resolved, self.micro_batch)}

    # Recording

    def metrics(self) -> list[dict[str, float]]:
        return self._metrics.read()

    def log(self, step: int, metrics: dict[str, float]) -> dict[str, float]:
        """Write a step's metrics; returns them with the time since the last."""
        now = time.monotonic()
        row = {"step": step, **metrics, **self.saver.take_times(), "time/step_s": now - self._step_began}
        self._step_began = now
        with clear_write_errors(self._metrics.of_run, self.checkpoints):
            row = self._metrics.append(row)
        if self._trackers is not None:
            self._trackers.log(step, row)
        return row

    def note_validation(self, step: int, metrics: dict[str, float]) -> bool:
        """Remember the best validation; returns whether this is it."""
        value, name = metrics[self._best_metric], self._best_metric
        if not math.isfinite(value) or (self.best is not None and self._sign * value <= self._sign * self.best[name]):
            return False
        self.best = {"step": step, name: value}
        return True

    def write_samples(
        self, part: Literal["train", "val"], step: int, groups: Sequence[ScoredGroup], trained: Trained | None = None
    ) -> None:
        """A parquet file of a step's samples: `samples/train_000012.parquet`. Trackers get some of a validation's."""
        if not self.world.leads:
            return
        with clear_write_errors(self.samples.file(part, step), self.checkpoints):
            self.samples.write(part, step, groups, trained)
        if part == "val" and self._trackers is not None:
            self._trackers.log_samples(step, samples_to_follow(groups))

    def warn_once(self, kind: str, text: str) -> None:
        """For a warning that would repeat with every step: the first of its kind is enough."""
        if kind not in self._warned:
            self._warned.add(kind)
            print_line(text, "yellow")

    def due(self, every: int | None, step: int, total: int) -> bool:
        return step == total or (every is not None and step % every == 0)

    # Saving

    def due_to_save(self, step: int, total: int) -> bool:
        minutes = self.recipe.run.save_every_minutes
        due = self.due(self.recipe.run.save_every, step, total)
        if due or minutes is None:
            return due
        return self.world.agree(time.monotonic() - self._saved_at > 60 * minutes, "whether to save")

    def save(self, step: int, unvalidated: dict[str, float] | None = None, *, mid_step: bool = False) -> None:
        """A checkpoint of this step, unless there is the same already (a repeated validation may have changed the best step);
        older ones are pruned. `mid_step`: the next step has begun."""
        assert self._owner is not None, "resume comes first"
        if self._saved == (step, self.best, unvalidated):
            return
        notes: dict[str, Any] = {"best": self.best} | ({} if unvalidated is None else {"unvalidated": unvalidated})
        notes |= {name: state for name, each in self._stateful.items() if (state := each.state())}
        begin_saving = [] if mid_step else [each.saving for each in self._stateful.values()]
        self.saver.save(self._owner, step, notes, best_step=self._best_step(), begin_saving=begin_saving)
        self._saved, self._saved_at = (step, self.best, unvalidated), time.monotonic()
        if self.world.leads and time.monotonic() - self._drawn_at > DRAW_EVERY_S:
            self.draw()

    def _best_step(self) -> int | None:
        return int(self.best["step"]) if self.best and self.recipe.run.keep_best else None

    def draw(self) -> None:
        try:
            curves.draw_curves(self.metrics(), self.folder / "curves.png")
        except Exception as error:  # a picture is no reason to lose a training run, nor to hide why it stopped
            print_line(f"{self.folder / 'curves.png'} could not be drawn: {error}", "yellow")
        self._drawn_at = time.monotonic()

    def finish(self) -> Path:
        """Save the trained models where the next stage looks for them; returns the main one's folder."""
        assert self._owner is not None, "resume comes first"
        self.saver.wait()
        self.world.heartbeat.begin_phase("saving the trained model")
        for name, save in self._owner.models().items():
            if not self.world.leads:
                save(None)
                continue
            with clear_write_errors(self.folder / name, self.checkpoints), atomic_folder(self.folder / name) as folder:
                save(folder)
        self.world.wait("the trained model")
        return self.folder / "model"

    # Stopping

    @contextmanager
    def save_before_stopping(self, what: str, done: int, unvalidated: dict[str, float] | None = None) -> Iterator[None]:
        """Around work that may stop the run before it changes any state (a reward fails, or `check_for_stop` raises): the completed
        steps are saved. What was cut short is done again when the run is resumed."""
        try:
            yield
        except (TrainingStopped, StopRequested) as error:
            if done:
                try:
                    self.save(done, unvalidated, mid_step=True)
                    self.saver.wait()
                except RunError:
                    if isinstance(error, TrainingStopped):  # what cannot be saved must not hide it
                        print_line(f"{what}: {error}", "red")
                    raise
            if isinstance(error, StopRequested):
                saved = f"step {done} is saved" if done else "there is no step to save yet"
                raise Interrupted(f"stopped during {what}; {saved}. {self._how_to_resume()}") from None
            raise type(error)(f"{what}: {error}{self._write_failures(what, error.failed)}") from None

    def _write_failures(self, what: str, failed: Sequence[Mapping[str, Any]]) -> str:
        if not failed or not self.world.leads:
            return ""
        file = self.folder / "failures" / f"{what.replace(' ', '_')}.jsonl"
        with clear_write_errors(file, self.checkpoints):
            file.parent.mkdir(exist_ok=True)
            rows = (json.dumps(row, ensure_ascii=False, default=str) for row in failed)
            write_atomic(file, redact("".join(f"{row}\n" for row in rows)))
        return f" The failed samples are in {file}"

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.interrupted:
            raise KeyboardInterrupt
        self.interrupted = True
        # In a thread: within a print that the signal interrupts, this would print that one's line again.
        line = "stopping as soon as the state can be saved (again to stop at once, without saving)"
        threading.Thread(target=print_line, args=(line, "yellow")).start()

    def check_for_stop(self) -> None:
        """Within `save_before_stopping`: leave work that need not be completed."""
        if self.interrupted:
            raise StopRequested

    def stop_if_interrupted(self, step: int, total: int) -> None:
        """Also if a checkpoint could not be written."""
        reasons = self.world.gather((self.interrupted, self.saver.has_failed), "whether to stop")
        if any(failed for _, failed in reasons):
            self.saver.wait()
        if any(interrupted for interrupted, _ in reasons):
            self.save(step)
            self.saver.wait()
            raise Interrupted(f"stopped after step {step} of {total}, saved. {self._how_to_resume()}")

    def _how_to_resume(self) -> str:
        if self._loaded.overridden_by == COMMAND_LINE:
            return f"Resume with: {redact(shlex.join(['plaudit', *sys.argv[1:]]))}"
        return f"Resume with the same call, or: plaudit {self.recipe.stage} {shlex.quote(str(self.folder / 'recipe.yaml'))}"
