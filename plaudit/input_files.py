"""Rows and functions that a call from Python brings along, as files in its run folder."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plaudit.files import atomic_file


@dataclass(frozen=True)
class InputFile:
    """The content of a file that a recipe from Python refers to; it stands where the recipe has the file's path."""

    name: str
    digest: str
    """Of what it means; in its name or in its content."""
    content: bytes

    def write(self, folder: Path) -> None:
        """Write it, unless a file with the same digest is there already."""
        path = folder / self.name
        if path.is_file() and (self.digest in self.name or self.digest.encode() in path.read_bytes()):
            return
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as temporary:
            temporary.write_bytes(self.content)


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
