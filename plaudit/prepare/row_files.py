"""The file of rows that a `plaudit prepare` verb writes: .jsonl or .parquet, as its name says, complete or not at all."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from plaudit.errors import PlauditError
from plaudit.files import atomic_file

SUFFIXES = (".jsonl", ".parquet")


def require_row_file(out: Path, *, new: bool = True) -> None:
    """Raise a PlauditError unless rows can be written there. `new`: and nothing is there yet."""
    if out.suffix not in SUFFIXES:
        raise PlauditError(f"--out: {out} should end with {' or '.join(SUFFIXES)}")
    if new and out.exists():
        raise PlauditError(f"--out: {out} exists; choose another name, or remove it first")


def write_row_file(out: Path, rows: Sequence[dict[str, Any]]) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(out) as temporary:
            if out.suffix == ".parquet":
                pyarrow.parquet.write_table(pa.Table.from_pylist(list(rows)), temporary)
            else:
                with temporary.open("w", encoding="utf-8", errors="backslashreplace") as file:
                    file.writelines(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
    except OSError as error:
        raise PlauditError(f"--out: {out} cannot be written: {error}") from None
