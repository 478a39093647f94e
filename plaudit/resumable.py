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
from plaudit.report.progress import print_line


@dataclass(frozen=True)
class ResumableJsonl:
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
def open_resumable(
    out: Path, about: dict[str, Any], verb: str, *, may_change: dict[str, Any] | None = None
) -> Iterator[ResumableJsonl]:
    """The output, open to be added to, for this process alone. `verb`: the command that makes it. `may_change`: what it depends on
    too, but may be mended on the way, with a line that says so."""
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
        about, may_change = json.loads(json.dumps([about, may_change or {}], default=str))
        yield ResumableJsonl(file, _done(out, about, may_change or {}, verb))


def _done(out: Path, about: dict[str, Any], may_change: dict[str, Any], verb: str) -> list[str]:
    """Ids that the output has already; a last line that was cut short is taken off it."""
    about_file = out.with_name(f"{out.name}.about.json")
    try:
        if not out.stat().st_size:
            write_atomic(about_file, json.dumps(about | may_change, indent=1))
            return []
        before = _same_or_refuse(out, about_file, about, verb)
        for name in may_change:
            if before.get(name) != may_change[name]:
                print_line(f"{name} changed since the first lines of {out} were made", "yellow")
                write_atomic(about_file, json.dumps(about | may_change, indent=1))
        return _finished_lines(out, verb)
    except OSError as error:
        raise RunError(f"--out: {out} cannot be written: {error}") from None


def _same_or_refuse(out: Path, about_file: Path, about: dict[str, Any], verb: str) -> dict[str, Any]:
    if not about_file.exists():
        raise RunError(f"--out: {out} exists, and was not written by plaudit {verb}; choose another file")
    try:
        before = json.loads(about_file.read_text(encoding="utf-8"))
        assert isinstance(before, dict)
    except (ValueError, AssertionError):
        raise RunError(f"--out: {about_file} is damaged, so nobody knows how {out} was made; choose another file") from None
    differ = [name for name in about if before.get(name) != about[name]]
    if differ:
        lines = [line for name in differ for line in _differences(name, before.get(name), about[name])]
        raise RunError(
            "\n".join(
                [f"--out: {out} was {verb.removesuffix('e')}ed differently; choose another file, or {verb} as before:", *lines]
            )
        )
    return before


def _differences(name: str, before: Any, now: Any) -> list[str]:
    """One line for each setting that differs, however deep it stands."""
    if isinstance(before, dict) and isinstance(now, dict):
        names = dict.fromkeys([*before, *now])
        return [line for key in names for line in _differences(f"{name}.{key}", before.get(key), now.get(key))]
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now) and any(isinstance(x, dict) for x in now):
        return [line for i, pair in enumerate(zip(before, now, strict=True)) for line in _differences(f"{name}.{i}", *pair)]
    return [] if before == now else [f"  {name}: {json.dumps(before)} there, {json.dumps(now)} now"]


def _finished_lines(out: Path, verb: str) -> list[str]:
    whole, cut, rest = out.read_bytes().rpartition(b"\n")
    if rest:
        with out.open("r+b") as file:
            file.truncate(len(whole) + len(cut))
    try:
        return [json.loads(line)["id"] for line in whole.split(b"\n") if line]
    except (ValueError, LookupError, TypeError):
        raise RunError(f"--out: {out} has lines that plaudit {verb} did not write; choose another file") from None
