"""Errors that are the user's to mend: shown as one line, without a traceback.

Anything else that escapes is a bug of ours and keeps its traceback.
"""

import difflib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

_SECRETS = (
    r"(api|access|secret|private)[-_]?keys?|(api|auth|access|hf|secret|bearer)[-_]?tokens?|secrets?|passwords?|passwd|credentials?"
)
SECRET_NAME = re.compile(f"({_SECRETS})$", re.IGNORECASE)
"""Settings that would hold a secret. Not every token is one: stop_token is not."""
# In the environment any token or key is taken for one: redacting too much does no harm there.
SECRET_VARIABLE = re.compile(f"({_SECRETS}|tokens?|(^|_)keys?)$", re.IGNORECASE)
# What well-known services' keys look like, for the ones that never were in our environment. Names such as
# hf-internal-testing/tiny-random-llama must not look like one.
SECRET_SHAPE = re.compile(
    r"\b(?:sk|pk|xoxb)[-_](?=[A-Za-z_-]*[0-9])[A-Za-z0-9_-]{16,}|\b(?:hf|ghp|gho)_[A-Za-z0-9]{16,}"
    r"|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"
)


class PlauditError(ValueError):
    """What happened, where, and what to do: in that order, on one line where it can be."""

    def __init__(self, message: str):
        super().__init__(redact(message))  # messages end up in logs and bug reports


class RecipeError(PlauditError):
    """A recipe or an override that cannot be used."""


class DataError(PlauditError):
    """Rows that cannot be read or trained on."""


class RunError(PlauditError):
    """A run folder or checkpoint that cannot be used or written."""


class TrainingStopped(PlauditError):
    """Training that cannot go on (too many non-finite steps, a reward that fails)."""

    def __init__(self, message: str, failed: Sequence[Mapping[str, Any]] = ()):
        super().__init__(message)
        self.failed = failed
        """The samples that a reward failed on, for a person to look at."""


class Interrupted(PlauditError):
    """Ctrl-C or a polite kill: all is saved, and the message says how to go on."""


def nearest(name: str, candidates: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The candidate most like the name, if one is like it at all."""
    return next(iter(difflib.get_close_matches(name, list(candidates), n=1, cutoff=cutoff)), None)


def did_you_mean(name: str, candidates: Iterable[str], *, cutoff: float = 0.6) -> str:
    """' Did you mean X?' for the nearest candidate, or nothing."""
    near = nearest(name, candidates, cutoff=cutoff)
    return f" Did you mean {near}?" if near else ""


def nearest_path(path: Path) -> str:
    """' Did you mean …?' with the most similar name in the same folder."""
    parent = path.parent
    if not parent.is_dir():
        return f" There is no folder {parent} either." if str(parent) != "." else ""
    # The names alone: below a long folder all paths look alike.
    near = nearest(path.name, [child.name for child in parent.iterdir()])
    return f" Did you mean {parent / near}?" if near else ""


def redact(text: str) -> str:
    """The text without any secret: values of secret-named environment variables, and strings shaped like keys."""
    # Longest first: a secret that begins with another one must not leave its tail behind.
    for name, value in sorted(os.environ.items(), key=lambda item: -len(item[1])):
        if SECRET_VARIABLE.search(name) and len(value) >= 8:
            text = text.replace(value, f"${name}")
    return SECRET_SHAPE.sub("[secret]", text)
