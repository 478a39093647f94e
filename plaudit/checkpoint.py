"""Checkpoint folders: everything an interrupted run needs to resume as if nothing had happened.

    checkpoints/step_000040/
      model/                  the model in Hugging Face format: load it, serve it, start the next stage from it
      trainer/*.safetensors   fp32 weights and AdamW's moments, by parameter name, a few gigabytes per file
      critic/, critic_trainer/                  the same for a critic (or for its head, if it shares the policy's layers)
      state.json              steps and updates done, updates skipped, best validation so far
      manifest.json           every file and its size: a checkpoint that does not match was cut short

Data order, schedule and randomness are functions of the seed and the step, so the step is all that has to be saved of them.
A folder is written aside and renamed, so a killed process leaves the previous checkpoint intact. Nothing is pickled. Tensors are
written and read by their owner (`Saveable`); this module only handles files.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError, safe_open

from plaudit.errors import PlauditError, RunError
from plaudit.files import atomic_folder, is_disk_error, remove_leftovers


class Saveable(Protocol):
    """The owner of a run's tensors: the trainer of SFT, DPO and reward models, the learner of RL."""

    def state_bytes(self) -> int:
        """Size of a checkpoint, roughly."""
        ...

    def save_state(self, folder: Path) -> dict[str, Any]:
        """Write models and optimiser states into `folder`; returns what goes into state.json."""
        ...

    def load_state(self, folder: Path, state: dict[str, Any]) -> None:
        """Restore what `save_state` wrote and returned."""
        ...

    def models(self) -> Mapping[str, Callable[[Path], None]]:
        """The trained models, by the name of their folder: functions that save one into a folder."""
        ...


@dataclass(frozen=True)
class Checkpoint:
    folder: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        return self.state["step"]


def save_checkpoint(root: Path, step: int, owner: Saveable, **notes: Any) -> Checkpoint:
    """Write a checkpoint of the state after `step`; `notes` go into its state.json."""
    final = root / f"step_{step:06d}"
    with clear_write_errors(final, root):
        root.mkdir(parents=True, exist_ok=True)
        _require_space(final, owner.state_bytes())
        with atomic_folder(final) as folder:
            state: dict[str, Any] = {"step": step, **notes, **owner.save_state(folder)}
            (folder / "state.json").write_text(json.dumps(state, indent=1))
            files = {str(p.relative_to(folder)): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}
            (folder / "manifest.json").write_text(json.dumps(files, indent=1))
    return Checkpoint(final, state)


def _require_space(final: Path, needed: int) -> None:
    free = shutil.disk_usage(final.parent).free
    if free < needed:
        raise RunError(
            f"{final}: not enough disk space: a checkpoint takes {needed / 1e9:.2f} GB and {free / 1e9:.2f} GB are free; "
            f"{newest_intact(final.parent)}. Free some space, then run the same command to resume."
        )


@contextmanager
def clear_write_errors(path: Path, root: Path) -> Iterator[None]:
    """Turns a disk error while `path` is written into one clear line that names the newest intact checkpoint in `root`."""
    try:
        yield
    except Exception as error:
        if isinstance(error, PlauditError) or not is_disk_error(error):
            raise
        raise RunError(
            f"{path}: could not be written ({error}); {newest_intact(root)}. Fix the cause, then run the same command to resume."
        ) from None


def newest_intact(root: Path) -> str:
    intact = [path.name for path in checkpoint_folders(root) if _fault(path) is None]
    return f"{intact[-1]} is intact" if intact else "no checkpoint exists yet"


def find_checkpoint(root: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest intact checkpoint, and a warning for each newer one that is damaged."""
    if not root.exists():
        return None, []
    remove_leftovers(root, ["step_*"])
    warnings = []
    for folder in reversed(checkpoint_folders(root)):
        fault = _fault(folder)
        if fault is None:
            return Checkpoint(folder, json.loads((folder / "state.json").read_text())), warnings
        warnings.append(f"{folder} is incomplete ({fault})")
    return None, warnings


def prune_checkpoints(root: Path, *, keep_last: int, keep_step: int | None) -> None:
    """Delete all checkpoints except the newest `keep_last` intact ones and that of `keep_step`."""
    intact = [folder for folder in checkpoint_folders(root) if _fault(folder) is None]
    kept = {*intact[-keep_last:], root / f"step_{keep_step or 0:06d}"}
    for folder in checkpoint_folders(root):
        if folder not in kept:
            shutil.rmtree(folder)


def point_to(link: Path, target: Path) -> None:
    """A relative link next to the checkpoints, replaced atomically."""
    aside = link.with_name(f".{link.name}.aside")
    aside.unlink(missing_ok=True)
    aside.symlink_to(target.relative_to(link.parent))
    aside.rename(link)


def checkpoint_folders(root: Path) -> list[Path]:
    """In step order. A copy that a user keeps as step_000040_good is not one of ours."""
    found = [path for path in root.glob("step_*") if path.is_dir() and re.fullmatch(r"step_\d{6,}", path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))


def _fault(folder: Path) -> str | None:
    try:
        files = json.loads((folder / "manifest.json").read_text())
    except (OSError, ValueError):
        return "its manifest.json is missing or unreadable"
    for name, size in files.items():
        path = folder / name
        if not path.exists():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size:,} bytes instead of {size:,}"
    try:
        json.loads((folder / "state.json").read_bytes())
        for path in folder.rglob("*.safetensors"):
            with safe_open(path, framework="np"):  # reads the header and checks it against the file size
                pass
    except (OSError, ValueError, SafetensorError) as error:
        return f"its content is damaged: {error}"
    return None
