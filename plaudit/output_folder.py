"""The folder that a command writes into: new, empty, or the command's own from an earlier start.

Hidden files and logs do not count as content: a shell or a scheduler may have opened a log there before the command started.
"""

import os
from collections.abc import Iterable
from pathlib import Path

from plaudit.errors import PlauditError, RunError

LOGS = (".log", ".out", ".err")
SHOWN = 3
DEMO_FILES = ("data", "base", "sft", "rl", "demo.png")
"""What `plaudit demo` writes."""


def require_run_folder(folder: Path) -> None:
    """Refuse a folder with files that no run wrote: run.dir=. would train among one's own."""
    if os.path.lexists(folder / "run.json"):
        return
    try:
        # A call from Python writes its inputs first, several processes their logs.
        others = other_entries(folder, ["inputs", "logs"])
    except OSError as error:
        raise RunError(f"run.dir: {folder} cannot be read: {error}") from None
    if others:
        raise RunError(
            f"run.dir: {folder} is neither empty nor a run folder (it has {_in_short(others)}); name a new folder, "
            f"for example run.dir={folder / 'run'}"
        )


def require_empty(out: Path, own: Iterable[str] = ()) -> None:
    """Create the folder of an option `--out`, and refuse one with content besides `own`: it might be a model that took days to
    train."""
    if out.is_file():
        raise PlauditError(f"--out: {out} is a file; name a new folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
        others = other_entries(out, own)
    except OSError as error:
        raise PlauditError(f"--out: {out} cannot be created: {error}") from None
    if others:
        raise PlauditError(f"--out: {out} is not empty (it has {_in_short(others)}); name a new folder, or empty it first")


def other_entries(folder: Path, own: Iterable[str]) -> list[str]:
    """What a folder contains besides `own`, in order."""
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    ignored = {*own, "lost+found"}
    return [name for name in names if name not in ignored and not name.startswith(".") and not name.endswith(LOGS)]


def _in_short(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
