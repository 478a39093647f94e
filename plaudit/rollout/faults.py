"""Faults of a user's engine stop the run as a failing reward does: with one line, and completed steps saved."""

import inspect
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from plaudit.errors import PlauditError, TrainingStopped


@contextmanager
def engine_faults(kind: type) -> Iterator[None]:
    """Around calls of an engine of this class. Exceptions in plaudit's own engines pass unchanged."""
    try:
        yield
    except TrainingStopped:
        raise
    except Exception as error:
        if kind.__module__.startswith("plaudit."):
            raise
        text = str(error) if isinstance(error, PlauditError) else f"{type(error).__name__}: {error}{_where(error, kind)}"
        raise TrainingStopped(f"rollout.engine {kind.__name__}: {text}. Fix it and run the same command to resume.") from error


def _where(error: Exception, kind: type) -> str:
    """The innermost line in the engine's own file."""
    file = inspect.getfile(kind)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f" ({file}:{lines[-1]})" if lines else ""
