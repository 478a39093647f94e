"""Rows from Python as a file that a run can read again: lists of dicts, Arrow tables, Hugging Face data sets, data frames."""

import hashlib
import io
import json
from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from plaudit.errors import DataError
from plaudit.input_files import InputFile


def rows_file(rows: Any, name: str, where: str) -> InputFile:
    """Rows as a file called `name` plus a digest: other rows are another file. `where`: the argument they were
    passed as, for messages."""
    table = _as_table(rows)
    if table is not None:
        buffer = io.BytesIO()
        pq.write_table(table.replace_schema_metadata(None), buffer)  # what made them is not part of the rows
        content, suffix = buffer.getvalue(), "parquet"
    else:
        content, suffix = _as_jsonl(rows, where), "jsonl"
    if not (content if table is None else len(table)):
        raise DataError(f"{where}: has no rows")
    digest = hashlib.blake2b(content, digest_size=6).hexdigest()
    return InputFile(f"{name}_{digest}.{suffix}", digest, content)


def _as_table(rows: Any) -> pa.Table | None:
    if isinstance(rows, pa.Table):
        return rows
    if hasattr(rows, "with_format") and hasattr(rows, "__len__"):  # a data set of Hugging Face
        return rows.with_format("arrow")[:]  # not .data: it ignores select and shuffle
    if type(rows).__module__.startswith("pandas.") and hasattr(rows, "columns"):
        return pa.Table.from_pandas(rows, preserve_index=False)
    return pa.table(rows) if hasattr(rows, "__arrow_c_stream__") else None  # polars, DuckDB, …


def _as_jsonl(rows: Any, where: str) -> bytes:
    if isinstance(rows, str | bytes | Mapping) or not isinstance(rows, Iterable):
        raise DataError(
            f"{where}: should be a list of rows (dicts), a pyarrow table, a Hugging Face data set, a data frame or a path, "
            f"not {type(rows).__name__}"
        )
    return b"".join(_as_line(row, f"{where}: row {number}") for number, row in enumerate(rows, 1))


def _as_line(row: Any, where: str) -> bytes:
    if not isinstance(row, Mapping):
        raise DataError(f"{where}: a row should be a dict with columns, not {type(row).__name__}")
    try:
        return json.dumps(dict(row), default=_as_json).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"{where}: cannot be saved as JSON: {error}") from None


def _as_json(value: Any) -> Any:
    if hasattr(value, "tolist"):  # NumPy
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a value of type {type(value).__name__}; use text, numbers, lists and dicts")
