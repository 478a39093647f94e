"""What a run folder records, and how far the run is, for a process that has not opened it; and its restarts. Imports no torch."""

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from plaudit.errors import RunError
from plaudit.files import write_atomic
from plaudit.json_files import UnreadableJson, parse_object, read_object


def read_description(file: Path) -> dict[str, Any]:
    """A run.json, checked to be one of ours."""
    try:
        description = read_object(file)
    except UnreadableJson as error:
        raise RunError(f"{file}: cannot be read as the record of a plaudit run ({error}); choose another run.dir") from None
    if all(isinstance(description.get(part), dict) for part in ("recipe", "inputs", "trackers")):
        return description
    raise RunError(f"{file}: cannot be read as the record of a plaudit run; choose another run.dir")


def checkpoint_folders(root: Path) -> list[Path]:
    """In step order. A copy that a user keeps as step_000040_good is not one of ours."""
    found = [path for path in root.glob("step_*") if path.is_dir() and re.fullmatch(r"step_\d{6,}", path.name)]
    return sorted(found, key=_step_of)


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


class RunProgress:
    def __init__(self, folder: Path, settings: dict[str, Any]):
        """`settings`: the recipe's, by dotted name, as run.json has them."""
        self._folder, self._settings = folder, json.loads(json.dumps(settings))

    def steps_done(self) -> int:
        """Steps whose metrics were written."""
        file = self._folder / "metrics.jsonl"
        for line in reversed(file.read_bytes().split(b"\n")[:-1] if file.exists() else []):
            try:
                return int(parse_object(line)["step"])
            except (UnreadableJson, LookupError, TypeError, ValueError):  # those that resume report it
                continue
        return 0

    def newest_checkpoint(self) -> int | None:
        """The step of the newest checkpoint. It is verified by those that resume from it."""
        folders = checkpoint_folders(self._folder / "checkpoints")
        return _step_of(folders[-1]) if folders else None

    def record_restart(self, after_step: int, failure: str) -> None:
        """Add a restart to run.json, unless the run has failed before it had taken over its folder. Call it while no process has
        the folder open."""
        file = self._folder / "run.json"
        try:
            description = read_object(file)
        except (UnreadableJson, OSError):
            return
        if description.get("recipe") == self._settings:
            restart = {"time": datetime.now(UTC).isoformat(timespec="seconds"), "after_step": after_step, "failure": failure}
            write_atomic(file, json.dumps(description | {"restarts": [*description.get("restarts", ()), restart]}, indent=1))
