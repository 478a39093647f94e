"""Checkpoint folders: everything an interrupted run needs to resume as if nothing had happened.

    checkpoints/step_000040/
      model/                  the model in Hugging Face format: load it, serve it, start the next stage from it
      trainer/*.safetensors   fp32 weights and AdamW's moments, by parameter name (`lm_head.weight@0:4096`: some of its elements,
                              where processes divide them), a few gigabytes per file
      critic/, critic_trainer/                  the same for a critic (or for its head, if it shares the policy's layers)
      next_step/              RL with rollout.lag: the next step, collected already, or the weights to collect it with
      state.json              steps and updates done, updates skipped, best validation so far
      manifest.json           every file with its size and checksum (manifest.py), verified when a run resumes

Data order, schedule and randomness are functions of the seed and the step, so the step is all that has to be saved of them.
A folder is written aside and renamed, so a killed process leaves the previous checkpoint intact. Nothing is pickled. Tensors are
written and read by their owner (`Saveable`); this module only handles files.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from plaudit.errors import PlauditError, RunError
from plaudit.files import atomic_folder, is_disk_error, remove_leftovers, syncing
from plaudit.json_files import UnreadableJson, read_object
from plaudit.manifest import FileEntry, describe_files, find_damage, write_manifest
from plaudit.run_progress import checkpoint_folders
from plaudit.world import World

T = TypeVar("T")
DAMAGED = ".damaged"
"""Ends the name of a checkpoint that a run could not resume from."""


class Saveable(Protocol):
    """The owner of a run's tensors: the trainer of SFT, DPO and reward models, the learner of RL."""

    def state_bytes(self) -> int:
        """Size of this process's part of a checkpoint, roughly."""
        ...

    def snapshot(self, *, copy: bool) -> "Snapshot":
        """Models and optimiser states as they are now. `copy`: in host memory, so that training can continue before it is
        written; the one before must have been written by then. All processes take part."""
        ...

    def load_state(self, folder: Path, state: dict[str, Any]) -> None:
        """Restore what a snapshot wrote, and its state."""
        ...

    def models(self) -> Mapping[str, Callable[[Path | None], None]]:
        """The trained models, by the name of their folder: functions that save one into a folder. All processes call them, one of
        them with a folder: its weights may have to be gathered."""
        ...


@dataclass(frozen=True)
class Snapshot:
    """What this process has to save."""

    state: dict[str, Any]
    """Goes into state.json."""
    write: Callable[[Path], list[Path]]
    """Writes this process's files into a checkpoint's folder, in any thread; returns them."""


@dataclass(frozen=True)
class Checkpoint:
    folder: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        return self.state["step"]


def render_state(step: int, snapshot: Snapshot, **notes: Any) -> str:
    """The content of state.json, with `notes`. It is fixed when the snapshot is taken: training changes what it was made from."""
    return json.dumps({"step": step, **notes, **snapshot.state}, indent=1)


def write_checkpoint(
    root: Path,
    step: int,
    snapshot: Snapshot,
    state: str,
    size: int,
    world: World,
    *,
    first: Callable[[], None] = lambda: None,
    then: Callable[[], None] = lambda: None,
) -> None:
    """Write the checkpoint of the state after `step`. `state`: as rendered; `size`: about what this process writes.

    Each process of the world writes, checksums and syncs its files; the leading one writes everything else, the manifest last. It
    does `first` what a checkpoint must not outlive, and `then` what may only happen once it is in place. An error of one process is
    raised in all."""
    final = root / f"step_{step:06d}"

    def make_folder() -> Path:
        first()
        root.mkdir(parents=True, exist_ok=True)
        _require_space(final, needed)
        return stack.enter_context(atomic_folder(final))

    def write_files() -> dict[str, FileEntry]:
        return _describe_synced(folder, [file.relative_to(folder).as_posix() for file in snapshot.write(folder)])

    def complete() -> None:
        for rank, theirs in enumerate(entries):
            _require_visible(folder, theirs, rank)
        (folder / "state.json").write_text(state)
        files = {name: entry for theirs in entries for name, entry in theirs.items()}
        write_manifest(folder, files | _describe_synced(folder, ["state.json"]))
        stack.close()  # puts it in place
        then()

    with ExitStack() as stack:
        needed = sum(world.gather(size, "the size of a checkpoint"))
        folder = _lead(world, make_folder, final, "the folder of a checkpoint")
        entries = _exchange(world, write_files, final, "the files of a checkpoint")
        _lead(world, complete, final, "a checkpoint")


def _describe_synced(folder: Path, names: list[str]) -> dict[str, FileEntry]:
    with syncing([folder / name for name in names]):  # the disk writes while we compute
        return describe_files(folder, names)


def _require_visible(folder: Path, entries: Mapping[str, FileEntry], rank: int) -> None:
    for name, entry in entries.items():
        if not (folder / name).exists() or (folder / name).stat().st_size != entry["bytes"]:
            raise RunError(
                f"{folder / name}: rank {rank} has written this file, but the leading process does not see it; run.dir must be on "
                "a file system that all machines share"
            )


def _exchange(world: World, work: Callable[[], T], path: Path, what: str) -> list[T]:
    """Every process's result; an error while it writes to `path` is raised in all."""
    result: T | RunError
    try:
        with clear_write_errors(path, path.parent):
            result = work()
    except Exception as error:  # whatever it is, the others must not wait for this process
        text = str(error) if isinstance(error, PlauditError) else f"{path}: {type(error).__name__}: {error}"
        result = RunError(f"rank {world.rank}: {text}" if world.rank else text)
    results = world.gather(result, what)
    for one in results:
        if isinstance(one, RunError):
            raise one
    return results  # pyright: ignore[reportReturnType]


def _lead(world: World, work: Callable[[], T], path: Path, what: str) -> T:
    """The same, of the leading process alone."""
    return _exchange(world, work if world.leads else lambda: None, path, what)[0]  # pyright: ignore[reportReturnType]


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
    intact = [path.name for path in checkpoint_folders(root) if find_damage(path, content=False) is None]
    return f"{intact[-1]} is intact" if intact else "no checkpoint exists yet"


def find_checkpoint(root: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest intact checkpoint, every byte of it verified, and a warning for each newer one that is damaged. Damaged ones are
    renamed, so that no later step counts them; without an intact one, all stay as they are."""
    if not root.exists():
        return None, []
    remove_leftovers(root, ["step_*"])
    damaged: dict[Path, str] = {}
    for folder in reversed(checkpoint_folders(root)):
        found = _read_verified(folder)
        if isinstance(found, Checkpoint):
            return found, [f"{_set_aside(folder)}: this checkpoint is damaged ({fault})" for folder, fault in damaged.items()]
        damaged[folder] = found
    return None, [f"{folder}: this checkpoint is damaged ({fault})" for folder, fault in damaged.items()]


def _read_verified(folder: Path) -> Checkpoint | str:
    """The checkpoint, or what is wrong with it."""
    if fault := find_damage(folder, content=True):
        return fault
    try:
        state = read_object(folder / "state.json")
    except UnreadableJson as error:
        return f"state.json: {error}"
    step = int(folder.name.removeprefix("step_"))
    return Checkpoint(folder, state) if state.get("step") == step else f"state.json: it is not that of step {step}"


def _set_aside(folder: Path) -> Path:
    aside = folder.with_name(folder.name + DAMAGED)
    shutil.rmtree(aside, ignore_errors=True)
    return folder.rename(aside)


def prune_checkpoints(root: Path, *, keep_last: int | Literal["all"], keep_step: int | None) -> None:
    """Delete all checkpoints except the newest `keep_last` intact ones (or all intact ones) and that of `keep_step`. Sizes are
    compared only: whatever this process has written or resumed from was verified."""
    intact = [folder for folder in checkpoint_folders(root) if find_damage(folder, content=False) is None]
    kept = {*(intact if keep_last == "all" else intact[-keep_last:]), root / f"step_{keep_step or 0:06d}"}
    for folder in [*checkpoint_folders(root), *root.glob(f"step_*{DAMAGED}")]:
        if folder not in kept:
            shutil.rmtree(folder)


def point_to(link: Path, target: Path) -> None:
    """A relative link next to the checkpoints, replaced atomically."""
    aside = link.with_name(f".{link.name}.aside")
    aside.unlink(missing_ok=True)
    aside.symlink_to(target.relative_to(link.parent))
    aside.rename(link)
