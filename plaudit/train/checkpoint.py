"""Checkpoints: everything that an interrupted run needs to go on as if nothing had happened.

    checkpoints/step_000040/
      model/                  the model in Hugging Face format: load it, serve it, start the next stage from it
      trainer/*.safetensors   fp32 weights and AdamW's moments, by parameter name, a few gigabytes a file
      critic/, critic_trainer/                  the same of a critic that learns beside the policy (or of its head, on the policy's)
      state.json              steps and updates done, updates skipped, best validation so far
      manifest.json           every file and its size: a checkpoint that does not match was cut short

Data order, schedule and randomness are functions of the seed and the step, so the step is all of them there is to save.
A folder is written aside and renamed, so a killed process leaves the previous checkpoint as it was. Nothing is pickled.
"""

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from plaudit.errors import PlauditError, RunError
from plaudit.files import atomic_folder, is_disk_error, remove_leftovers
from plaudit.train.trainer import Trainer

FILE_BYTES = 4 << 30  # of trainer/: one file's tensors pass through main memory at a time


@dataclass(frozen=True)
class Checkpoint:
    folder: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        return self.state["step"]

    def load_into(self, trainer: Trainer) -> None:
        for one, state, _, folder in _trainers(trainer, self.state):
            one.load_state(state, map(load_file, sorted((self.folder / folder).glob("*.safetensors"))))


def _trainers(trainer: Trainer, state: dict[str, Any]) -> Iterator[tuple[Trainer, dict[str, Any], str, str]]:
    """It and those beside it: each with its part of the state, and its two folders."""
    yield trainer, state, "model", "trainer"
    for name, other in trainer.beside.items():
        yield other, state.setdefault(name, {}), name, f"{name}_trainer"


def save_checkpoint(root: Path, step: int, trainer: Trainer, **notes: Any) -> Checkpoint:
    """Write a checkpoint of the trainer as it stands after `step`; `notes` go into its state."""
    state: dict[str, Any] = {"step": step, **notes}
    final = root / f"step_{step:06d}"
    with clear_write_errors(final, root):
        root.mkdir(parents=True, exist_ok=True)
        tensors = [t for one, *_ in _trainers(trainer, {}) for t in (*one.state()[1].values(), *one.policy.model.parameters())]
        _require_space(final, tensors)
        with atomic_folder(final) as folder:
            for one, counts, model, name in _trainers(trainer, state):
                one.policy.save(folder / model)
                _save_trainer(one, counts, folder / name)
            (folder / "state.json").write_text(json.dumps(state, indent=1))
            files = {str(p.relative_to(folder)): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}
            (folder / "manifest.json").write_text(json.dumps(files, indent=1))
    return Checkpoint(final, state)


def _save_trainer(trainer: Trainer, counts: dict[str, Any], folder: Path) -> None:
    counted, tensors = trainer.state()
    counts |= counted
    folder.mkdir()
    for number, part in enumerate(_parts(tensors, FILE_BYTES)):
        save_file({name: t.contiguous() for name, t in part.items()}, folder / f"{number:05d}.safetensors")


def _parts(tensors: dict[str, Tensor], limit: int) -> Iterator[dict[str, Tensor]]:
    """The tensors in order, as many at a time as stay within the limit (or one larger than it)."""
    part: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        bytes_more = tensor.numel() * tensor.element_size()
        if part and size + bytes_more > limit:
            yield part
            part, size = {}, 0
        part[name] = tensor
        size += bytes_more
    yield part


def _require_space(final: Path, tensors: list[Tensor]) -> None:
    needed = sum(t.numel() * t.element_size() for t in tensors)
    free = shutil.disk_usage(final.parent).free
    if free < needed:
        raise RunError(
            f"{final}: not enough disk space: a checkpoint takes {needed / 1e9:.2f} GB and {free / 1e9:.2f} GB are free; "
            f"{what_is_safe(final.parent)}. Make room, then start again with the same command."
        )


@contextmanager
def clear_write_errors(path: Path, root: Path) -> Iterator[None]:
    """A disk that fails while `path` is written is told in one line, with the checkpoint in `root` that is safe."""
    try:
        yield
    except Exception as error:
        if isinstance(error, PlauditError) or not is_disk_error(error):
            raise
        raise RunError(
            f"{path}: could not be written ({error}); {what_is_safe(root)}. Mend that, then start again with the same command."
        ) from None


def what_is_safe(root: Path) -> str:
    intact = [path.name for path in checkpoint_folders(root) if _fault(path) is None]
    return f"{intact[-1]} is intact" if intact else "no checkpoint exists yet"


def find_checkpoint(root: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest whole checkpoint, and a line about each newer one that is not."""
    if not root.exists():
        return None, []
    remove_leftovers(root, ["step_*"])
    warnings = []
    for folder in reversed(checkpoint_folders(root)):
        fault = _fault(folder)
        if fault is None:
            return Checkpoint(folder, json.loads((folder / "state.json").read_text())), warnings
        warnings.append(f"{folder} is not whole ({fault})")
    return None, warnings


def prune_checkpoints(root: Path, *, keep_last: int, keep_step: int | None) -> None:
    """Delete checkpoints, but for the newest `keep_last` whole ones and the one of `keep_step`."""
    whole = [folder for folder in checkpoint_folders(root) if _fault(folder) is None]
    kept = {*whole[-keep_last:], root / f"step_{keep_step or 0:06d}"}
    for folder in checkpoint_folders(root):
        if folder not in kept:
            shutil.rmtree(folder)


def point_to(link: Path, target: Path) -> None:
    """A relative link beside the checkpoints, replaced in one go."""
    aside = link.with_name(f".{link.name}.aside")
    aside.unlink(missing_ok=True)
    aside.symlink_to(target.relative_to(link.parent))
    aside.rename(link)


def checkpoint_folders(root: Path) -> list[Path]:
    """In the order of their steps. A copy that someone put aside as step_000040_good is theirs, not one of ours."""
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
            with safe_open(path, framework="pt"):  # reads the header, and that it fits the file
                pass
    except (OSError, ValueError, SafetensorError) as error:
        return f"its content is damaged: {error}"
    return None
