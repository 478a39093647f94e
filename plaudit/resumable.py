"""JSONL output that is written row by row and resumed when the command runs again.

Next to it, `NAME.inputs.json` records the settings and inputs that its rows depend on. Output made with others is not resumed.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO, cast

from plaudit.errors import RunError
from plaudit.files import try_lock, write_atomic
from plaudit.json_files import UnreadableJson, parse_object, read_object
from plaudit.report.progress import print_line


class ResumableJsonl:
    """A JSONL file open for appending, locked for this process."""

    def __init__(self, path: Path, file: TextIO, done: list[str]):
        self.path, self.file = path, file
        self.done = done
        """Ids of the rows it already has, in order."""

    def write(self, row: dict[str, Any]) -> None:
        """Append a row. A line cut short by a kill is removed on resume."""
        self.file.write(_line(row))
        self.file.flush()

    def rows(self) -> Iterator[dict[str, Any]]:
        """The rows it has."""
        with self.path.open(encoding="utf-8", newline="\n") as file:
            yield from map(json.loads, file)

    def replace(self, rows: Mapping[int, dict[str, Any]]) -> None:
        """Replace rows, by their number. Atomic: after a kill it has all of the new ones or none."""
        aside = self.path.with_name(f".{self.path.name}.aside")
        new = _open(aside, "w")
        try:
            try_lock(new)  # before it takes the name, so that no other process can lock it first
            with self.path.open(encoding="utf-8", newline="\n") as old:
                new.writelines(_line(rows[number]) if number in rows else line for number, line in enumerate(old))
            new.flush()
            os.fsync(new.fileno())
            aside.replace(self.path)
        except BaseException:
            new.close()
            aside.unlink(missing_ok=True)
            raise
        self.file.close()
        self.file = new

    def sync(self) -> None:
        os.fsync(self.file.fileno())


@contextmanager
def open_resumable(
    out: Path, inputs: dict[str, Any], verb: str, *, may_change: dict[str, Any] | None = None
) -> Iterator[ResumableJsonl]:
    """Open the output for appending, locked for this process.

    `inputs`: settings and inputs that must be the same to resume. `may_change`: inputs that may change in between, with a warning.
    `verb`: the plaudit command, for messages.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        file = _open(out, "a")
    except OSError as error:
        raise RunError(f"--out: {out} cannot be written: {error}") from None
    rows = ResumableJsonl(out, file, [])
    try:
        _lock(file, out)  # before reading: a line that another process is writing would look cut short
        inputs, may_change = json.loads(json.dumps([inputs, may_change or {}], default=str))
        rows.done = _done(out, inputs, may_change or {}, verb)
        try:
            yield rows
        finally:
            if not os.fstat(rows.file.fileno()).st_size:  # stopped before the first row: it was opened only for its lock
                for leftover in (out, _inputs_file(out)):
                    leftover.unlink(missing_ok=True)
    finally:
        rows.file.close()


def _inputs_file(out: Path) -> Path:
    return out.with_name(f"{out.name}.inputs.json")


def _open(path: Path, mode: str) -> TextIO:
    return cast(TextIO, path.open(mode, encoding="utf-8", errors="backslashreplace"))


def _lock(file: TextIO, out: Path) -> None:
    try:
        if not try_lock(file):
            print_line(f"--out: the file system of {out} has no locks; make sure that no other process writes to it", "yellow")
        ours = os.path.samestat(os.fstat(file.fileno()), out.stat())
    except (BlockingIOError, FileNotFoundError):
        ours = False
    if not ours:  # or another process replaced the file since it was opened
        raise RunError(f"--out: another process is writing to {out}; wait for it, or choose another file")


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False, default=str) + "\n"


def _done(out: Path, inputs: dict[str, Any], may_change: dict[str, Any], verb: str) -> list[str]:
    """Ids of the rows the output already has; a last line that was cut short is removed."""
    inputs_file = _inputs_file(out)
    try:
        if not out.stat().st_size:
            write_atomic(inputs_file, json.dumps(inputs | may_change, indent=1))
            return []
        before = _require_same(out, inputs_file, inputs, verb)
        done = _read_ids(out, verb)
        for name in may_change:
            if before.get(name) != may_change[name]:
                print_line(
                    f"{name} changed since the first rows of {out} were written; those that have a value keep it. "
                    "To score all of them again choose another --out",
                    "yellow",
                )
        return done
    except OSError as error:
        raise RunError(f"--out: {out} cannot be written: {error}") from None


def _require_same(out: Path, inputs_file: Path, inputs: dict[str, Any], verb: str) -> dict[str, Any]:
    if not inputs_file.exists():
        raise RunError(f"--out: {out} exists and was not written by plaudit {verb}; choose another file")
    try:
        before = read_object(inputs_file)
    except UnreadableJson as error:
        raise RunError(f"--out: {inputs_file} is damaged ({error}), so {out} cannot be resumed; choose another file") from None
    differ = [name for name in inputs if before.get(name) != inputs[name]]
    if differ:
        lines = [line for name in differ for line in _differences(name, before.get(name), inputs[name])]
        first = f"--out: {out} was made with other settings; choose another file, or use the same ones:"
        raise RunError("\n".join([first, *lines]))
    return before


def _differences(name: str, before: Any, now: Any) -> list[str]:
    """One line per setting that differs, at any depth."""
    if isinstance(before, dict) and isinstance(now, dict):
        names = dict.fromkeys([*before, *now])
        return [line for key in names for line in _differences(f"{name}.{key}", before.get(key), now.get(key))]
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now) and any(isinstance(x, dict) for x in now):
        return [line for i, pair in enumerate(zip(before, now, strict=True)) for line in _differences(f"{name}.{i}", *pair)]
    return [] if before == now else [f"  {name}: {json.dumps(before)} there, {json.dumps(now)} now"]


def _read_ids(out: Path, verb: str) -> list[str]:
    complete, newline, partial = out.read_bytes().rpartition(b"\n")
    if partial:
        with out.open("r+b") as file:
            file.truncate(len(complete) + len(newline))
    try:
        return [str(parse_object(line)["id"]) for line in complete.split(b"\n") if line]
    except (UnreadableJson, LookupError):
        raise RunError(f"--out: {out} has lines that plaudit {verb} did not write; choose another file") from None
