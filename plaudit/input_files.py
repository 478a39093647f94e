"""Rows and functions that a call from Python brings along, as files in its run folder.

The digest of a file is part of its name: a call that is refused has overwritten nothing, and no import finds the file of a function
in place of a module (a reward may be called `statistics`).
"""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plaudit.errors import RunError
from plaudit.files import atomic_file


@dataclass(frozen=True)
class InputFile:
    """The content of a file that a recipe from Python refers to; it stands where the recipe has the file's path."""

    name: str
    digest: str
    """Of what it means."""
    content: bytes

    def write(self, folder: Path) -> None:
        """Write it, unless it is there already."""
        path = folder / self.name
        if os.path.isfile(path):
            return
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as temporary:
            temporary.write_bytes(self.content)


def function_file_name(label: str, digest: str) -> str:
    """The name of the file that a reward function is saved in."""
    return f"reward_{re.sub(r'[^A-Za-z0-9_]', '_', label)[:64]}_{digest}.py"


def is_function_file(path: object) -> bool:
    return isinstance(path, str) and re.fullmatch(r"reward_\w+_[0-9a-f]{32}\.py", Path(path).name) is not None


@contextmanager
def written(files: Sequence[InputFile], run: Path) -> Iterator[None]:
    """Write the files into the folder of a run. If the run is refused, those that are new are removed."""
    folder = run / "inputs"
    new_folders = [path for path in (folder, *folder.parents) if not os.path.exists(path)]
    new_files = [file.name for file in files if not os.path.exists(folder / file.name)]
    try:
        try:
            for file in files:
                file.write(folder)
        except (OSError, ValueError) as error:
            raise RunError(f"run.dir: {run} cannot be created or written to: {error}") from None
        yield
    except BaseException:
        recipe = run / "recipe.yaml"  # written once the run is accepted
        used = recipe.read_text("utf-8") if os.path.isfile(recipe) else ""
        for path in [folder / name for name in new_files if name not in used]:
            if os.path.isfile(path):
                path.unlink()
        for path in new_folders:
            if os.path.isdir(path):
                with suppress(OSError):  # not empty
                    path.rmdir()
        raise


def place_inputs(tree: Any, folder: Path) -> tuple[Any, list[InputFile]]:
    """A recipe with paths in `folder` in place of input files, and these files."""
    files: list[InputFile] = []

    def place(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: place(one) for name, one in value.items()}
        if isinstance(value, list):
            return [place(one) for one in value]
        if not isinstance(value, InputFile):
            return value
        files.append(value)
        return str(folder / value.name)

    return place(tree), files
