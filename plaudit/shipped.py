"""Files that ship with plaudit: recipes, the data and rewards that they name, and rollouts to try rewards on.

`recipes/…` names them in any folder, so that a command works the same in a clone and after `pip install`. A file of that name in
the current folder comes first: a copy to edit.
"""

import os
import shutil
from itertools import takewhile
from pathlib import Path

from plaudit.errors import PlauditError, did_you_mean

PACKAGE = Path(__file__).parent
# A wheel has both folders inside the package, a clone (or an editable install of one) next to it. DOCS: pages that messages name.
FOLDER, DOCS = (PACKAGE / name if (PACKAGE / name).is_dir() else PACKAGE.parent / name for name in ("recipes", "docs"))


def find_shipped(path: Path) -> Path:
    """The path itself if it exists, or is no shipped file's; else where that file was installed."""
    if path.is_absolute() or path.parts[:1] != ("recipes",) or ".." in path.parts or os.path.exists(path):
        return path
    installed = FOLDER.joinpath(*path.parts[1:])
    return installed if os.path.isfile(installed) else path  # not a folder: outputs may be folders, inputs are files


def is_shipped(path: Path) -> bool:
    return path.resolve().is_relative_to(FOLDER.resolve())


def shipped_recipes() -> dict[str, Path]:
    """Every shipped recipe by the name that commands accept."""
    return {f"recipes/{file.relative_to(FOLDER).as_posix()}": file for file in sorted(FOLDER.rglob("*.yaml"))}


def copy_shipped(name: str) -> list[Path]:
    """Copy a folder of recipes to `recipes/NAME` in the current folder; returns the copied files."""
    name = name.removeprefix("recipes/").strip("/")
    folders = sorted(folder.name for folder in FOLDER.iterdir() if folder.is_dir())
    if name not in folders:
        raise PlauditError(f"{name} is not a folder of recipes ({', '.join(folders)}).{did_you_mean(name, folders)}")
    copy = Path("recipes", name)
    if copy.exists():
        raise PlauditError(f"{copy} exists already; rename or remove it to get a fresh copy")
    try:
        shutil.copytree(FOLDER / name, copy, ignore=shutil.ignore_patterns("__pycache__"))
    except OSError as error:
        raise PlauditError(f"{copy} cannot be written: {error}") from None
    return sorted(copy.iterdir())


def first_comment(recipe: Path) -> str:
    """The first sentence of the comment at the top of a recipe."""
    return " ".join(opening_comment(recipe)).partition(". ")[0].rstrip(".:")


def opening_comment(recipe: Path) -> list[str]:
    """The lines of the comment at the top of a recipe."""
    lines = takewhile(lambda line: line.startswith("#"), recipe.read_text(encoding="utf-8").splitlines())
    return [line.lstrip("# ").strip() for line in lines]
