"""Saving: what is to be saved is copied to host memory, then written by a thread while training continues.

    training thread     … step 40 │ wait for the last save, copy │ step 41, step 42, …
    saving thread                                               │ write, checksum, sync, rename │ link best, prune, clear caches

At most one checkpoint is being written. Everything that may only happen once it is on disk happens in the saving thread after it,
or waits for it. A failure is raised in the training thread: after the step, at the next save or at the end, whichever comes first.
Several processes agree while they write, in a process group of their own (`World.in_background`).
"""

import os
import platform
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from plaudit.checkpoint import Saveable, clear_write_errors, point_to, prune_checkpoints, render_state, write_checkpoint
from plaudit.host import available_memory
from plaudit.recipe import RunSettings
from plaudit.report.progress import print_line
from plaudit.world import World

COPY_SHARE = 0.9
"""Of the host memory that is available: what the copies may take."""
CHECK_SIGNALS_EVERY_S = 0.5
"""While it waits: a signal that arrives just before, or in another thread, does not interrupt a lock."""


class Saver:
    """Saves checkpoints of the run in `folder`. All processes of the world make the same calls."""

    def __init__(self, folder: Path, settings: RunSettings, world: World):
        self._folder, self._settings, self._world = folder, settings, world
        self._checkpoints = folder / "checkpoints"
        self._copies: bool | None = None
        """Whether what is saved is copied first; None: not decided yet."""
        self._written: threading.Event | None = None
        """Set once the last checkpoint is on disk, or has failed. Not the thread's own state: when Ctrl-C leaves its `join`, Python
        takes a thread that is still running for ended."""
        self._step = 0
        self._error: BaseException | None = None
        self._times: dict[str, float] = {}

    def save(
        self,
        owner: Saveable,
        step: int,
        notes: dict[str, Any],
        *,
        best_step: int | None,
        begin_saving: Iterable[Callable[[], Callable[[], None] | None]] = (),
    ) -> None:
        """Begin to save a checkpoint, or save it if there is no memory for a copy. `begin_saving` is called now, after the last
        save has ended; what it returns, in the saving thread, once this one is on disk."""
        began = time.monotonic()
        self.wait()
        waited_s = time.monotonic() - began
        once_saved = [begin() for begin in begin_saving]
        self._world.heartbeat.begin_phase(f"saving step {step}")
        size = owner.state_bytes()
        if self._copies is None:
            self._copies = self._settings.save_in_background and self._has_memory(size)
        with clear_write_errors(self._checkpoints / f"step_{step:06d}", self._checkpoints):
            snapshot = owner.snapshot(copy=self._copies)
        state = render_state(step, snapshot, **notes)

        def write() -> None:
            world = self._world.in_background
            write_checkpoint(
                self._checkpoints, step, snapshot, state, size, world, first=self._sync_metrics, then=lambda: self._tidy(best_step)
            )
            for callback in once_saved:
                if callback is not None:
                    callback()

        self._start(step, write)
        if not self._copies:
            self.wait()
        self._world.heartbeat.end_phase()
        self._times = {"time/save_s": time.monotonic() - began, "time/save_wait_s": waited_s}

    def _start(self, step: int, write: Callable[[], None]) -> None:
        assert self._written is None
        self._step = step
        self._written = written = threading.Event()

        def run() -> None:
            try:
                write()
            except BaseException as error:  # whatever it is, the training thread has to know
                self._error = error
            finally:
                written.set()

        # A daemon: when the process has to end at once, a half-written folder is left behind, which is no checkpoint.
        try:
            threading.Thread(target=run, name="saving", daemon=True).start()
        except RuntimeError:  # no more threads: nothing is being written, so that nothing would end a wait
            self._written = None
            raise

    @property
    def writing(self) -> int | None:
        """The step whose checkpoint is being written, if there is one."""
        return self._step if self._written is not None and not self._written.is_set() else None

    @property
    def has_failed(self) -> bool:
        return self._error is not None

    def wait(self) -> None:
        """Until nothing is being written. Raises what went wrong, once."""
        if self._written is None:
            return
        self._world.heartbeat.begin_phase("waiting for a checkpoint to be written")
        while not self._written.wait(CHECK_SIGNALS_EVERY_S):
            pass
        self._world.heartbeat.end_phase()
        error, self._written, self._error = self._error, None, None
        if error is not None:
            raise error

    def take_times(self) -> dict[str, float]:
        """What the last save has cost the training thread, and how much of that it waited for the one before; once."""
        times, self._times = self._times, {}
        return times

    def _has_memory(self, size: int) -> bool:
        """For copies of what all processes of a host save. Decided once, since the memory is kept."""
        needs = self._world.gather((platform.node(), size, available_memory()), "memory for a checkpoint's copy")
        for host in dict.fromkeys(host for host, _, _ in needs):
            here = [(size, available) for at, size, available in needs if at == host]
            needed, available = sum(size for size, _ in here), min(available for _, available in here)
            if needed > COPY_SHARE * available:
                print_line(
                    f"run.save_in_background: the copy of a checkpoint takes {needed / 1e9:.1f} GB of host memory and "
                    f"{available / 1e9:.1f} GB are available, so training waits while checkpoints are written",
                    "yellow",
                )
                return False
        return True

    # In the saving thread

    def _sync_metrics(self) -> None:
        """A checkpoint must not outlive the metrics before it."""
        file = self._folder / "metrics.jsonl"
        if self._world.leads and file.exists():
            with clear_write_errors(file, self._checkpoints), file.open("a") as opened:
                os.fsync(opened.fileno())

    def _tidy(self, best_step: int | None) -> None:
        """Once a checkpoint is in place."""
        self.link_best(best_step)
        prune_checkpoints(self._checkpoints, keep_last=self._settings.keep_last, keep_step=best_step)

    def link_best(self, step: int | None) -> None:
        best = self._checkpoints / f"step_{step or 0:06d}"
        if best.exists():
            point_to(self._folder / "best", best)
        else:
            (self._folder / "best").unlink(missing_ok=True)
