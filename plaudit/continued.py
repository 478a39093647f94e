"""A file of JSON lines that is written as results come, and gone on with when the command is started again.

Beside it lies `NAME.about.json`: what the lines depend on. An output that was made differently is not continued.
"""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from plaudit.errors import RunError
from plaudit.files import write_atomic


@dataclass(frozen=True)
class ContinuedFile:
    file: TextIO
    done: list[str]
    """The ids of the lines it has already, in order."""

    def write(self, row: dict[str, Any]) -> None:
        """One line, whole or not at all when the process is killed (what is cut short is taken off by the next one)."""
        self.file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
        self.file.flush()

    def sync(self) -> None:
        os.fsync(self.file.fileno())


@contextmanager
def continued(out: Path, about: dict[str, Any], verb: str) -> Iterator[ContinuedFile]:
    """The output, open to be added to, for this process alone. `verb`: the command that makes it."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        file = out.open("a", encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise RunError(f"--out: {out} cannot be written: {error}") from None
    with file:
        try:  # before it is looked at: a line that another process is writing must not be taken for a cut one
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RunError(f"--out: another process is writing to {out}; wait for it, or choose another file") from None
        yield ContinuedFile(file, _done(out, json.loads(json.dumps(about, default=str)), verb))


def _done(out: Path, about: dict[str, Any], verb: str) -> list[str]:
    """Ids that the output has already; a last line that was cut short is taken off it."""
    about_file = out.with_name(f"{out.name}.about.json")
    try:
        if not out.stat().st_size:
            write_atomic(about_file, json.dumps(about, indent=1))
            return []
        _same_or_refuse(out, about_file, about, verb)
        return _finished_lines(out, verb)
    except OSError as error:
        raise RunError(f"--out: {out} cannot be written: {error}") from None


def _same_or_refuse(out: Path, about_file: Path, about: dict[str, Any], verb: str) -> None:
    if not about_file.exists():
        raise RunError(f"--out: {out} exists, and was not written by plaudit {verb}; choose another file")
    before = json.loads(about_file.read_text(encoding="utf-8"))
    differ = [name for name in about if before.get(name) != about[name]]
    if differ:
        lines = [f"  {name}: {json.dumps(before.get(name))} there, {json.dumps(about[name])} now" for name in differ]
        raise RunError(
            "\n".join(
                [f"--out: {out} was {verb.removesuffix('e')}ed differently; choose another file, or {verb} as before:", *lines]
            )
        )


def _finished_lines(out: Path, verb: str) -> list[str]:
    whole, cut, rest = out.read_bytes().rpartition(b"\n")
    if rest:
        with out.open("r+b") as file:
            file.truncate(len(whole) + len(cut))
    try:
        return [json.loads(line)["id"] for line in whole.split(b"\n") if line]
    except (ValueError, LookupError, TypeError):
        raise RunError(f"--out: {out} has lines that plaudit {verb} did not write; choose another file") from None
