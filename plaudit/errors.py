"""Errors that the user can fix: shown as one line, without a traceback.

Any other exception is a bug in plaudit and keeps its traceback.
"""

import difflib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from plaudit.redaction import redact


class PlauditError(ValueError):
    """What happened, where, and what to do: in that order, on one line if possible."""

    exit_status = 2
    """Of a command that it ends."""
    blames_peer = False
    """Whether all it says is that another process of the run is gone or has failed."""
    restart_helps = False
    """Whether all processes of the run may be started again with nothing changed: it need not happen again."""

    def __init__(self, message: str):
        super().__init__(redact(message))  # messages end up in logs and bug reports


class RecipeError(PlauditError):
    """A recipe or an override that cannot be used."""


class DataError(PlauditError):
    """Rows that cannot be read or trained on."""


class RunError(PlauditError):
    """A run folder or checkpoint that cannot be used or written."""


class TrainingStopped(PlauditError):
    """Training that cannot continue (too many non-finite steps, a failing reward)."""

    def __init__(self, message: str, failed: Sequence[Mapping[str, Any]] = ()):
        super().__init__(message)
        self.failed = failed
        """The samples that a reward failed on, for inspection."""


class ServerGone(TrainingStopped):
    """A server that the run has started was lost, and starting it again has not helped."""

    restart_helps = True


class Interrupted(PlauditError):
    """Ctrl-C or SIGTERM: everything is saved, and the message explains how to resume."""

    exit_status = 130


class ProcessFailed(PlauditError):
    """One of the processes that train together died, hung, or has a bug."""

    exit_status = 1
    restart_helps = True


class OutOfMemory(PlauditError):
    """A GPU's memory was not enough."""

    restart_helps = True


class PeerLost(TrainingStopped):
    """Another process of the run has closed the connection, or is gone."""

    blames_peer = True
    restart_helps = True


class PeerFailed(ProcessFailed):
    """Another process of the run raised something that is neither a user's error nor a stop."""

    blames_peer = True


class StopRequested(BaseException):
    """Leaves sampling and scoring after Ctrl-C or SIGTERM. Not an Exception: an engine of a user's must not handle it."""


def nearest(name: str, candidates: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The most similar candidate, upper and lower case aside, if any is similar enough."""
    by_lower = {candidate.lower(): candidate for candidate in candidates}
    return next((by_lower[near] for near in difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=cutoff)), None)


def did_you_mean(name: str, candidates: Iterable[str], *, cutoff: float = 0.6) -> str:
    """' Did you mean X?' for the nearest candidate, or an empty string."""
    near = nearest(name, candidates, cutoff=cutoff)
    return f" Did you mean {near}?" if near else ""


SIMILAR_STEMS = 0.65
"""Of two file names without their endings: `sft` and `stf` are similar, `train` and `val` are not."""


def nearest_path(path: Path) -> str:
    """' Did you mean …?' with the most similar name in the same folder; else where a relative path was looked for."""
    parent = path.parent
    is_folder = os.path.isdir(parent)  # unlike Path.is_dir, False for text that is too long for a path
    # Compare names only: paths below a long folder name all look alike, and so do short names with the same ending.
    stem = path.stem.lower()
    similar = [
        child.name
        for child in (parent.iterdir() if is_folder else ())
        if difflib.SequenceMatcher(None, stem, child.stem.lower()).ratio() >= SIMILAR_STEMS
    ]
    near = nearest(path.name, similar)
    if near:
        return f" Did you mean {parent / near}?"
    missing = "" if is_folder else f" There is no folder {parent} either."
    return missing if path.is_absolute() else f"{missing} (Paths are relative to the current folder, {Path.cwd()}.)"


def install_extra(name: str) -> str:
    """`pip install 'fastapi>=0.128' 'uvicorn>=0.38'`: the packages of one of plaudit's extras. The extra's own name would only
    work where a package index has plaudit."""
    from importlib.metadata import requires

    packages = [re.match(r"[^\s;]+", line) for line in requires("plaudit") or () if re.search(rf"extra == ['\"]{name}['\"]", line)]
    return " ".join(["pip install", *(f"'{package[0]}'" for package in packages if package)])
