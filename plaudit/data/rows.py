"""Reading rows: parquet, JSONL, JSON, and folders written by Hugging Face's `save_to_disk`.

`Rows` is a sequence of dicts. Small JSONL files and JSON are held as dicts; parquet as a more compact Arrow table whose rows become
dicts on access; large JSONL files and a `save_to_disk` folder stay on disk. Nothing here interprets columns.
"""

import codecs
import json
from array import array
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self, overload

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet

from plaudit.errors import DataError, nearest_path
from plaudit.shipped import find_shipped

SUFFIXES = (".parquet", ".jsonl", ".json")
LARGE_BYTES = 64 << 20
"""JSONL files from this size on stay on disk."""


class Rows(Sequence[dict[str, Any]]):
    """The rows of one file, in order, with its name for error messages."""

    def __init__(self, source: str, table: "pa.Table | list[dict[str, Any]] | _JsonLines"):
        self.source = source
        self._table = table
        if len(self) == 0:
            raise DataError(f"{source}: has no rows")

    def __len__(self) -> int:
        return len(self._table)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if isinstance(self._table, list):
            return self._table[index]
        i = range(len(self))[index]
        return self._table.row(i) if isinstance(self._table, _JsonLines) else self._table.slice(i, 1).to_pylist()[0]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if isinstance(self._table, list | _JsonLines):
            yield from self._table
        else:
            for batch in self._table.to_batches(max_chunksize=1024):
                yield from batch.to_pylist()

    def located(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Each row with its location for error messages: the file and the row's number, counted from 1."""
        for number, row in enumerate(self, 1):
            yield f"{self.source}: row {number}", row

    @property
    def nulls_mean_absent(self) -> bool:
        """Arrow pads structs with nulls for keys that other rows have; in JSON a null is explicit."""
        return not isinstance(self._table, list | _JsonLines)

    @cached_property
    def columns(self) -> list[str]:
        if isinstance(self._table, list):
            return list(dict.fromkeys(key for row in self._table for key in row))
        return self._table.column_names

    def column(self, name: str) -> "pa.ChunkedArray | list[Any]":
        """A column's values, of a table as Arrow has them; null for rows that lack it."""
        if isinstance(self._table, list):
            return [row.get(name) for row in self._table]
        if isinstance(self._table, _JsonLines):
            return self._table.values_by_column.get(name) or [None] * len(self)
        column = self._table[name] if name in self.columns else pa.chunked_array([pa.nulls(len(self))])
        return column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column

    def require(self, *columns: str, hint: str = "") -> None:
        """Raise a DataError naming the file, the missing column and the existing columns."""
        for column in columns:
            if column not in self.columns:
                found = ", ".join(self.columns)
                raise DataError(f"{self.source}: column {column!r} is missing (found: {found}).{hint and ' ' + hint}")


def read_rows(path: str | Path) -> Rows:
    """Read a file or `save_to_disk` folder."""
    path = find_shipped(Path(path))
    if not path.exists():
        raise DataError(f"{path} does not exist.{nearest_path(path)}")
    if path.is_dir():
        return Rows(str(path), _read_saved_dataset(path))
    readers = {".parquet": _read_parquet, ".jsonl": _read_jsonl, ".json": _read_json}
    if path.suffix not in readers:
        raise DataError(
            f"{path}: cannot read *{path.suffix or path.name} files; rows come as {', '.join(SUFFIXES)} or a save_to_disk folder"
        )
    if path.stat().st_size == 0:
        raise DataError(f"{path}: the file is empty")
    return Rows(str(path), readers[path.suffix](path))


def _read_parquet(path: Path) -> pa.Table:
    try:
        return pyarrow.parquet.ParquetFile(path, memory_map=True).read()  # read_table would import pyarrow.dataset, 0.3 s
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a complete parquet file: {error}") from None


def _read_jsonl(path: Path) -> "list[dict[str, Any]] | _JsonLines":
    rows = _JsonLines(path)
    return list(rows.scan()) if path.stat().st_size < LARGE_BYTES else rows.indexed()


class _JsonLines:
    """The rows of a large file, parsed on access: as dicts they would take several times its size."""

    def __init__(self, path: Path):
        self._path = path
        self._starts, self._numbers = array("Q"), array("Q")
        """Where the line of each row starts, and its number."""
        self.column_names: list[str] = []

    def scan(self) -> Iterator[dict[str, Any]]:
        """Each row, in order."""
        for number, _, line in self._lines():
            yield self._parse(line, number)

    def indexed(self) -> Self:
        """Check every line, and find the rows."""
        columns: dict[str, None] = {}
        for number, start, line in self._lines():
            columns |= dict.fromkeys(self._parse(line, number))
            self._starts.append(start)
            self._numbers.append(number)
        self.column_names = list(columns)
        return self

    def _lines(self) -> Iterator[tuple[int, int, bytes]]:
        with self._path.open("rb") as lines:
            start = 0
            for number, line in enumerate(lines, 1):
                if line.removeprefix(codecs.BOM_UTF8).strip():
                    yield number, start, line
                start += len(line)

    def _parse(self, line: bytes, number: int) -> dict[str, Any]:
        text = line.removeprefix(codecs.BOM_UTF8).strip()
        return _as_row(parse_json(text, self._path, number), f"{self._path}:{number}")

    @cached_property
    def values_by_column(self) -> dict[str, list[Any]]:
        """All columns at once: each row is parsed once."""
        columns: dict[str, list[Any]] = {name: [] for name in self.column_names}
        for row in self:
            for name, values in columns.items():
                values.append(row.get(name))
        return columns

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self.scan()

    def row(self, i: int) -> dict[str, Any]:
        with self._path.open("rb") as file:
            file.seek(self._starts[i])
            return self._parse(file.readline(), self._numbers[i])


def _read_json(path: Path) -> "list[dict[str, Any]] | _JsonLines":
    text = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    if text.lstrip().startswith(b"{") and b"\n{" in text.strip():
        return _read_jsonl(path)  # JSONL misnamed .json is common
    rows = parse_json(text, path)
    if not isinstance(rows, list):
        raise DataError(f"{path}: should be a list of rows, not {type(rows).__name__}")
    return [_as_row(row, f"{path}: row {number}") for number, row in enumerate(rows, 1)]


def parse_json(text: bytes, path: Path, first_line: int = 1) -> Any:
    """Parse JSON that starts at `first_line` of a file; a DataError names the line at fault."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        raise DataError(f"{path}:{line}: not valid JSON: {error.msg} at column {error.colno}") from None
    except UnicodeDecodeError as error:
        line = first_line + text[: error.start].count(b"\n")
        raise DataError(f"{path}:{line}: not UTF-8 text: {error.reason}") from None
    except RecursionError:
        raise DataError(f"{path}:{first_line}: the JSON that begins here is nested too deeply") from None
    except ValueError as error:  # an integer with thousands of digits
        raise DataError(f"{path}:{first_line}: the JSON that begins here cannot be read: {error}") from None


def _as_row(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise DataError(f"{where}: a row should be an object with columns, not {type(row).__name__}")
    return row


def _read_saved_dataset(folder: Path) -> pa.Table:
    """The Arrow stream files listed in `state.json`, memory-mapped."""
    if (folder / "dataset_dict.json").exists():
        splits = json.loads((folder / "dataset_dict.json").read_text())["splits"]
        raise DataError(f"{folder}: has several splits; name one: {', '.join(str(folder / name) for name in splits)}")
    if not (folder / "state.json").exists():
        raise DataError(f"{folder}: not a folder made by save_to_disk (it has no state.json); name the files in it instead")
    try:
        files = [entry["filename"] for entry in json.loads((folder / "state.json").read_bytes())["_data_files"]]
        tables = [pa.ipc.open_stream(pa.memory_map(str(folder / name))).read_all() for name in files]
        return pa.concat_tables(tables) if tables else pa.table({})
    except (pa.ArrowException, OSError, ValueError, LookupError, TypeError) as error:
        raise DataError(f"{folder}: not a complete save_to_disk folder: {error}") from None
