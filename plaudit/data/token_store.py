"""Tokenised rows in three flat arrays: in memory, or memory-mapped from files.

    tokens   int32    all sequences end to end
    targets  bool     which of these tokens are targets
    ends     int64    where each sequence ends

Pairs have two sequences each, the chosen one first, and a fourth array of margins.
"""

import os
import zlib
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np

from plaudit.types import Example, Pair

COLUMNS = {"tokens": np.dtype(np.int32), "targets": np.dtype(bool), "ends": np.dtype(np.int64), "margins": np.dtype(np.float64)}
BLOCK = 1 << 24
"""Bytes that are written, or checked, at a time."""


class TokenStore:
    """Sequences of tokens with their targets."""

    def __init__(self, columns: dict[str, np.ndarray]):
        self.tokens, self.targets, self.ends, self.margins = (columns[name] for name in COLUMNS)
        assert len(self.tokens) == len(self.targets) == (self.ends[-1] if len(self.ends) else 0)

    def example(self, i: int) -> Example:
        place = slice(int(self.ends[i - 1]) if i else 0, int(self.ends[i]))
        return Example(self.tokens[place], self.targets[place])

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.ends, prepend=0)


class StoredExamples(Sequence[Example]):
    """Examples that are made on access."""

    def __init__(self, store: TokenStore):
        self._store = store
        self.lengths: Sequence[int] = store.lengths.tolist()

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        return self._store.example(range(len(self))[index])


class StoredPairs(Sequence[Pair]):
    """Pairs that are made on access."""

    def __init__(self, store: TokenStore):
        self._store = store
        self.side_lengths = store.lengths.reshape(-1, 2)
        """Of the chosen and the rejected sequence."""
        self.lengths: Sequence[int] = self.side_lengths.sum(axis=1).tolist()

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, index: int) -> Pair: ...
    @overload
    def __getitem__(self, index: slice) -> list[Pair]: ...
    def __getitem__(self, index: int | slice) -> Pair | list[Pair]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        i = range(len(self))[index]
        return Pair(self._store.example(2 * i), self._store.example(2 * i + 1), float(self._store.margins[i]))


class TokenWriter:
    """Collects sequences: in files of a folder, or in memory if there is none, or from when its disk fails."""

    def __init__(self, folder: Path | None = None):
        self._columns = {name: _Column(folder and folder / name) for name in ("tokens", "targets")}
        self._folder, self._ends, self._margins = folder, array("q"), array("d")
        self.disk_error: OSError | None = None

    def add(self, example: Example) -> None:
        self._append("tokens", np.ascontiguousarray(example.tokens, dtype=np.int32).tobytes())
        self._append("targets", np.ascontiguousarray(example.loss_mask, dtype=bool).tobytes())
        self._ends.append((self._ends[-1] if self._ends else 0) + len(example))

    def add_pair(self, pair: Pair) -> None:
        self.add(pair.chosen)
        self.add(pair.rejected)
        self._margins.append(pair.margin)

    def __len__(self) -> int:
        return len(self._ends)

    def finish(self) -> dict[str, int] | None:
        """Complete the files; their checksums, or None if the rows are in memory."""
        try:
            if self._folder is not None and self.disk_error is None:
                for name, values in (("ends", self._ends), ("margins", self._margins)):
                    (self._folder / name).write_bytes(values.tobytes())
                for column in self._columns.values():
                    column.flush()
                return {name: checksum(self._folder / name) for name in COLUMNS}
        except OSError as error:
            self._use_memory(error)
        return None

    def in_memory(self) -> TokenStore:
        """The rows, if they are in memory."""
        content: dict[str, Any] = {name: column.take() for name, column in self._columns.items()}
        content |= {"ends": self._ends, "margins": self._margins}
        return TokenStore({name: np.frombuffer(content[name], dtype=dtype) for name, dtype in COLUMNS.items()})

    def close(self) -> None:
        for column in self._columns.values():
            column.close()

    def _append(self, name: str, content: bytes) -> None:
        try:
            self._columns[name].append(content)
        except OSError as error:
            self._use_memory(error)

    def _use_memory(self, error: OSError) -> None:
        self.disk_error = error
        for column in self._columns.values():
            column.move_to_memory()


class _Column:
    """Bytes that grow at their end: in a file, or in memory."""

    def __init__(self, path: Path | None):
        self._path, self._buffer, self._written = path, bytearray(), 0
        self._file = None if path is None else path.open("wb", buffering=0)

    def append(self, content: bytes) -> None:
        self._buffer += content
        if self._file is not None and len(self._buffer) >= BLOCK:
            self.flush()

    def flush(self) -> None:
        if self._file is None:
            return
        left = memoryview(self._buffer)
        try:
            while left:
                written = self._file.write(left)
                self._written += written
                left = left[written:]
        finally:
            rest = bytes(left)
            left.release()
            self._buffer = bytearray(rest)

    def move_to_memory(self) -> None:
        """Nothing is lost: what was written is read back."""
        if self._file is not None and self._path is not None:
            self.close()
            with self._path.open("rb") as file:
                self._buffer = bytearray(file.read(self._written)) + self._buffer

    def take(self) -> bytearray:
        assert self._file is None
        return self._buffer

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def checksum(path: Path) -> int:
    result = 0
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            result = zlib.crc32(block, result)
    return result


def map_store(folder: Path) -> TokenStore:
    """The files of a finished writer, memory-mapped."""

    def column(name: str, dtype: np.dtype) -> np.ndarray:
        if not os.path.getsize(folder / name):
            return np.zeros(0, dtype)
        # A plain array over the mapping: slices of np.memmap are slower to make.
        return np.asarray(np.memmap(folder / name, dtype=dtype, mode="r"))

    return TokenStore({name: column(name, dtype) for name, dtype in COLUMNS.items()})
