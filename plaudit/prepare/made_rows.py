"""Rows that are made: their schemas, columns put together, and files written a batch at a time."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from plaudit.errors import DataError, PlauditError
from plaudit.files import atomic_file
from plaudit.prepare.tables import Pieces, compute, join_text

BATCH_ROWS = 8192
"""Rows that are made and written together."""
MESSAGES = pa.list_(pa.struct({"role": pa.string(), "content": pa.string()}))
SFT_SCHEMA = pa.schema({"messages": MESSAGES})
REPEATED = ["data_source", "ability", "role", "style", "src_lang", "trg_lang", "src_language", "trg_language", "split"]
"""Columns with few different values: parquet stores these once. To look for repetitions in the others takes as long as all else."""


def rl_schema(extra_info: dict[str, pa.DataType]) -> pa.Schema:
    truth = pa.struct({"style": pa.string(), "ground_truth": pa.string()})
    extra = pa.struct(extra_info)
    return pa.schema(
        {"data_source": pa.string(), "prompt": MESSAGES, "ability": pa.string(), "reward_model": truth, "extra_info": extra}
    )


def messages(*turns: tuple[str, Pieces]) -> pa.Array:
    """A column of conversations, each with the same roles."""
    return conversations([role for role, _ in turns], interleave(*(content for _, content in turns)))


def conversations(roles: Sequence[str], contents: pa.Array) -> pa.Array:
    """`contents`: those of the first conversation, those of the second, …"""
    count = len(contents) // len(roles)
    role = pa.array(roles, pa.string()).take(pa.array(np.tile(np.arange(len(roles)), count)))
    turns = pa.StructArray.from_arrays([role, contents.cast(pa.string())], ["role", "content"])
    return pa.ListArray.from_arrays(pa.array(np.arange(count + 1) * len(roles), pa.int32()), turns)


def interleave(*texts: Pieces) -> pa.Array:
    """The first text of row 1, the second of row 1, …, the first of row 2, …

    Joined row by row, the texts are already in this order in memory: only offsets are needed, which follow from their lengths.
    """
    joined = join_text(*(piece for text in texts for piece in text))
    if len(texts) == 1:
        return joined
    lengths = np.stack([_lengths(text, len(joined)) for text in texts], 1)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return pa.LargeStringArray.from_buffers(len(offsets) - 1, pa.py_buffer(offsets), joined.buffers()[2])


def _lengths(text: Pieces, count: int) -> np.ndarray:
    """In bytes."""
    lengths = np.full(count, sum(len(piece.encode()) for piece in text if isinstance(piece, str)))
    for piece in text:
        if not isinstance(piece, str):
            lengths += np.asarray(compute.binary_length(piece))
    return lengths


def rl_rows(
    schema: pa.Schema,
    data_source: str | pa.Array,
    prompt: pa.Array,
    ability: str,
    truth: pa.Array | None,
    extra_info: Mapping[str, pa.Array],
) -> pa.Table:
    """Rows for RL. Without a truth, `reward_model` says that a model scores them."""
    count = len(prompt)
    style = pa.repeat("rule" if truth is not None else "model", count)
    reward_model = pa.StructArray.from_arrays(
        [style, pa.nulls(count, pa.string()) if truth is None else truth.cast(pa.string())], ["style", "ground_truth"]
    )
    fields = schema.field("extra_info").type
    extra = pa.StructArray.from_arrays([extra_info[field.name].cast(field.type) for field in fields], fields=list(fields))
    source = pa.repeat(data_source, count) if isinstance(data_source, str) else data_source.cast(pa.string())
    return pa.Table.from_arrays([source, prompt, pa.repeat(ability, count), reward_model, extra], schema=schema)


@dataclass
class RowSummary:
    """How many rows were made of what, and what was left out."""

    unit: str = "groups"
    """What rows are made of."""
    rows: int = 0
    read: int = 0
    """Units that rows were made of."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Number by cause, which completes `3 groups …`."""
    bad: Counter[str] = field(default_factory=Counter)
    """Rows that were skipped, by cause."""

    def leave_out(self, cause: str, count: int) -> None:
        if count:
            self.left_out[cause] += count

    def __str__(self) -> str:
        parts = [f"{self.rows:,} rows of {self.read:,} {self.unit}"]
        parts += [f"{count:,} {cause}" for cause, count in self.left_out.items()]
        if self.bad:
            causes = ", ".join(f"{count:,} {cause}" for cause, count in self.bad.items())
            parts.append(f"{self.bad.total():,} bad rows were left out ({causes})")
        return "; ".join(parts)


def write_rows(out: Path, batches: Iterable[pa.Table], schema: pa.Schema, summary: RowSummary) -> RowSummary:
    """Write rows as parquet or JSONL, by the file's name, a batch at a time."""
    write = _write_jsonl if out.suffix == ".jsonl" else _write_parquet
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(out) as temporary:
            summary.rows = write(temporary, batches, schema)
            if not summary.rows:
                raise DataError(f"no rows could be made ({summary})")
    except OSError as error:
        raise PlauditError(f"--out: {out} cannot be written: {error}") from None
    return summary


def _write_parquet(file: Path, batches: Iterable[pa.Table], schema: pa.Schema) -> int:
    if empty := [path for column in schema for path in _empty_structs(column)]:
        raise DataError(
            f"column {empty[0]!r} has objects without any field, which parquet cannot store: remove it, or write .jsonl"
        )
    count, written = 0, Future[None]()
    written.set_result(None)
    with (
        parquet.ParquetWriter(file, schema, use_dictionary=cast(bool, _repeated_columns(schema))) as writer,
        ThreadPoolExecutor(1) as writing,
    ):
        for batch in batches:  # the next one is made while this one is written
            written.result()
            written = writing.submit(writer.write_table, batch)
            count += len(batch)
        written.result()
    return count


def _empty_structs(field: pa.Field) -> Iterator[str]:
    """Paths of objects that have no fields."""
    children = [field.type.field(i) for i in range(field.type.num_fields)]
    if pa.types.is_struct(field.type) and not children:
        yield field.name
    for child in children:
        yield from (f"{field.name}.{path}" for path in _empty_structs(child))


def _repeated_columns(schema: pa.Schema) -> list[str]:
    """Paths of the columns in REPEATED, as parquet names them."""

    def paths(name: str, type: pa.DataType) -> list[str]:
        if pa.types.is_list(type):
            return paths(f"{name}.list.element", type.value_type)
        return [path for f in type for path in paths(f"{name}.{f.name}", f.type)] if pa.types.is_struct(type) else [name]

    return [path for f in schema for path in paths(f.name, f.type) if path.rpartition(".")[2] in REPEATED]


def _write_jsonl(file: Path, batches: Iterable[pa.Table], schema: pa.Schema) -> int:
    count = 0
    with file.open("w", encoding="utf-8") as lines:
        for batch in batches:
            lines.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in batch.to_pylist())
            count += len(batch)
    return count
