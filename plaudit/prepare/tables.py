"""Rows of files as Arrow columns: read and checked a column at a time.

A row that cannot be used is an error that names it, or, with `skip_bad`, is left out, reported and counted. Checks look at complete
columns, so a table with a million rows takes about as long as its files take to be read; a single row is only looked at to describe
what is wrong with it.
"""

import json
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from plaudit.data.columns import find_column, listed
from plaudit.data.conversations import describe_type
from plaudit.data.rows import Rows, read_rows
from plaudit.errors import DataError
from plaudit.languages import language_name, unknown_language

compute: Any = pyarrow.compute
"""Its functions are made when it is imported: type checkers know none of them."""
TEXT = pa.large_string()
"""While rows are made: an array of `string` holds 2 GB at most."""
_SURROGATE = re.compile("[\ud800-\udfff]")
_TRUE, _FALSE = ("true", "1", "1.0"), ("false", "0", "0.0")
MOST_REPORTED = 20
"""Bad rows that are named when they are skipped; all of them are counted."""


@dataclass
class Lists:
    """A column of lists: list i is items[offsets[i]:offsets[i + 1]]."""

    offsets: np.ndarray
    items: pa.Array

    @property
    def sizes(self) -> np.ndarray:
        return np.diff(self.offsets)


class Table:
    """The rows of several files. Columns are read when they are needed."""

    def __init__(self, files: Sequence[Path], *, skip_bad: bool = False, report: Callable[[str], None] = print):
        self._files: list[Rows] = [read_rows(file) for file in files]
        self._starts = np.cumsum([0, *map(len, self._files)])
        self._skip_bad, self._report = skip_bad, report
        self.usable = np.ones(len(self), bool)
        """Rows that no check has rejected."""
        self.bad = Counter[str]()
        """How many rows were rejected, by cause."""

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def source(self) -> str:
        return ", ".join(rows.source for rows in self._files)

    @cached_property
    def names(self) -> list[str]:
        """Columns that any file has."""
        return list(dict.fromkeys(name for rows in self._files for name in rows.columns))

    def require(self, *names: str, hint: str = "") -> None:
        for rows in self._files:
            rows.require(*names, hint=hint)

    def find(self, name: str | None, usual: Sequence[str], option: str) -> str:
        """The column with this name or, if none is given, the first of the usual ones."""
        column = name or find_column(self.names, usual)
        if column is None:
            found = ", ".join(self.names)
            raise DataError(f"{self.source}: there is no column {listed(usual)} (found: {found}); name the right one with {option}")
        self.require(column, hint=f"{option} names another one.")
        return column

    # Single rows -----------------------------------------------------------------------------------------------------

    def row(self, i: int) -> dict[str, Any]:
        file = bisect_right(self._starts, i) - 1
        return self._files[file][i - int(self._starts[file])]

    def where(self, i: int) -> str:
        """For messages: file and row, counted from 1."""
        file = bisect_right(self._starts, i) - 1
        return f"{self._files[file].source}: row {i - int(self._starts[file]) + 1}"

    def reject(self, bad: np.ndarray | pa.Array, cause: str, describe: Callable[[int], str]) -> None:
        """Rows that cannot be used. `cause`: for the count; `describe`: what is wrong with row i."""
        found = np.flatnonzero(np.asarray(bad) & self.usable)
        if not len(found):
            return
        if not self._skip_bad:
            others = f" ({len(found) - 1:,} more rows have this problem; --skip-bad-rows leaves them out)" if len(found) > 1 else ""
            raise DataError(f"{self.where(int(found[0]))}: {describe(int(found[0]))}{others}")
        for i in found[: max(0, MOST_REPORTED - self.bad.total())].tolist():
            self._report(f"left out: {self.where(i)}: {describe(i)}")
        self.usable[found] = False
        self.bad[cause] += len(found)

    # Columns ---------------------------------------------------------------------------------------------------------

    def text(self, name: str) -> pa.Array:
        """Text without white space around it. A row without any is bad."""
        column = compute.utf8_trim_whitespace(self._column(name, TEXT))
        self.reject(
            _is_empty(column),
            f"without {name}",
            lambda i: f"column {name!r} should be text, not {describe_text(self.row(i).get(name))}",
        )
        return column.fill_null("")

    def value(self, name: str) -> pa.Array:
        """Text; numbers and objects as text. A row without any is bad."""
        chunks = [rows.column(name) for rows in self._files]
        if all(map(_is_text, chunks)):
            return self.text(name)
        values = [_clean_value(value) for chunk in chunks for value in (chunk if isinstance(chunk, list) else chunk.to_pylist())]
        column = compute.utf8_trim_whitespace(pa.array(values, TEXT))

        def describe(i: int) -> str:
            return f"column {name!r} should be text, a number or an object, not {describe_text(self.row(i).get(name))}"

        self.reject(_is_empty(column), f"without {name}", describe)
        return column.fill_null("")

    def optional_text(self, name: str | None) -> pa.Array:
        """The same; a row without text has an empty one. (Anything else in its place is bad.)"""
        if name is None or name not in self.names:
            return pa.nulls(len(self), TEXT).fill_null("")
        column = self._column(name, TEXT)
        if not all(_is_text(rows.column(name)) for rows in self._files):
            wrong = np.zeros(len(self), bool)
            for i in np.flatnonzero(np.asarray(column.is_null())).tolist():
                wrong[i] = self.row(i).get(name) is not None

            def describe(i: int) -> str:
                return f"column {name!r} should be text, not {describe_type(self.row(i).get(name))}"

            self.reject(wrong, f"with {name} that is not text", describe)
        return compute.utf8_trim_whitespace(column.fill_null(""))

    def languages(self, name: str) -> tuple[pa.Array, pa.Array]:
        """Languages as they are written in the file, and their names."""
        written = self.text(name)
        encoded = written.dictionary_encode()
        names = [language_name(one) for one in encoded.dictionary.to_pylist()]
        named = pa.array(names, TEXT).take(encoded.indices)
        self.reject(named.is_null(), "with an unknown language", lambda i: unknown_language(name, written[i].as_py()))
        return written, named.fill_null("")

    def text_lists(self, name: str, fewest: int, most: int) -> Lists:
        """Lists of texts without white space around them."""
        column = self._column(name, pa.large_list(TEXT))
        sizes = np.asarray(compute.list_value_length(column).fill_null(-1))

        def describe(i: int) -> str:
            value = self.row(i).get(name)
            found = len(value) if isinstance(value, list) else describe_type(value)
            return f"column {name!r} should have {fewest} to {most} candidates, not {found}"

        self.reject((sizes < fewest) | (sizes > most), f"without {fewest} to {most} {name}", describe)
        lists = _lists(column)
        items = compute.utf8_trim_whitespace(lists.items)
        empty = np.asarray(_is_empty(items))

        def describe_item(i: int) -> str:
            j = int(np.flatnonzero(empty[lists.offsets[i] : lists.offsets[i + 1]])[0])
            return f"column {name!r}, candidate {j} should be text, not {describe_text(self.row(i)[name][j])}"

        self.reject(any_in_lists(empty, lists.offsets), f"with an empty entry in {name}", describe_item)
        return Lists(lists.offsets, items.fill_null(""))

    def score_lists(self, name: str, sizes: np.ndarray, lowest: int, highest: int) -> np.ndarray:
        """Whole numbers, a list of `sizes[i]` in row i; all of them in one array. Values of bad rows are 0."""
        column = self._column(name, pa.large_list(pa.float64()))
        found = np.asarray(compute.list_value_length(column).fill_null(-1))

        def describe(i: int) -> str:
            value = self.row(i).get(name)
            number = len(value) if isinstance(value, list) else describe_type(value)
            return f"column {name!r} should have a score for each of the {sizes[i]} candidates, not {number}"

        self.reject(found != sizes, f"without a score in {name} for each candidate", describe)
        lists = _lists(column)
        numbers = np.nan_to_num(lists.items.to_numpy(zero_copy_only=False).astype(float), nan=-1.0, posinf=-1.0, neginf=-1.0)
        bad = (numbers != np.floor(numbers)) | (numbers < lowest) | (numbers > highest)

        def describe_item(i: int) -> str:
            j = int(np.flatnonzero(bad[lists.offsets[i] : lists.offsets[i + 1]])[0])
            return f"column {name!r}: {self.row(i)[name][j]!r} should be an integer from {lowest} to {highest}"

        self.reject(any_in_lists(bad, lists.offsets), f"with a score that is no integer from {lowest} to {highest}", describe_item)
        if len(numbers) == sizes.sum() and (found == sizes).all():
            return numbers.astype(np.int64)
        scores = np.zeros(int(sizes.sum()), np.int64)  # a bad row's scores are not as many as its candidates
        starts = np.cumsum([0, *sizes])
        for i in np.flatnonzero(self.usable).tolist():
            scores[starts[i] : starts[i + 1]] = numbers[lists.offsets[i] : lists.offsets[i + 1]]
        return scores

    def numbers(self, name: str, lowest: float, highest: float) -> np.ndarray:
        column = self._column(name, pa.float64())
        numbers = np.nan_to_num(column.to_numpy(zero_copy_only=False), nan=np.inf)
        self.reject(
            ~((numbers >= lowest) & (numbers <= highest)),
            f"without a number from {lowest:g} to {highest:g} in {name}",
            lambda i: f"column {name!r}: {self.row(i).get(name)!r:.80} should be a number from {lowest:g} to {highest:g}",
        )
        return numbers

    def flags(self, name: str) -> np.ndarray:
        """True or false, also as 1 or 0, and as text."""
        written = compute.utf8_lower(compute.utf8_trim_whitespace(self.printed(name)))
        true, false = (np.asarray(compute.is_in(written, pa.array(words, TEXT))) for words in (_TRUE, _FALSE))
        self.reject(
            ~(true | false),
            f"without true or false in {name}",
            lambda i: f"column {name!r}: {self.row(i).get(name)!r:.80} should be true or false",
        )
        return true

    def printed(self, name: str, finalize: Callable[[Any], Any] = lambda value: value) -> pa.Array:
        """What a template writes for a column's values; null where there is none, or one with unpaired surrogates."""
        chunks = [rows.column(name) for rows in self._files]
        if all(_is_text(chunk) for chunk in chunks):
            return self._column(name, TEXT)
        values = [value for chunk in chunks for value in (chunk if isinstance(chunk, list) else chunk.to_pylist())]
        return pa.array([None if value is None else _clean(str(finalize(value)), TEXT) for value in values], TEXT)

    def is_filled_text(self, name: str) -> bool:
        """Whether every row has text in this column."""
        chunks = [rows.column(name) for rows in self._files]
        return all(map(_is_text, chunks)) and not compute.any(is_blank(self._column(name, TEXT))).as_py()

    def other_columns(self, known: Iterable[str]) -> dict[str, pa.ChunkedArray]:
        """Columns with none of these names, as they are."""
        found: dict[str, pa.ChunkedArray] = {}
        for name in self.names:
            if name not in known:
                try:
                    columns = [rows.column(name) for rows in self._files]
                    tables = [pa.table({name: pa.array(one) if isinstance(one, list) else one}) for one in columns]
                    found[name] = pa.concat_tables(tables, promote_options="permissive")[name]
                except (pa.ArrowException, UnicodeEncodeError):
                    raise DataError(
                        f"{self.source}: column {name!r} has values of several types: make them one type, or remove it"
                    ) from None
        return found

    def _column(self, name: str, wanted: pa.DataType) -> pa.Array:
        """A column as this type. Values of other types are null; the checks describe them."""
        chunks = [chunk for rows in self._files for chunk in _as_type(rows.column(name), wanted).chunks]
        return chunks[0] if len(chunks) == 1 else pa.concat_arrays(chunks)


def any_in_lists(flags: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Which lists have a flagged entry."""
    counts = np.concatenate([[0], np.cumsum(flags)])
    return counts[offsets[1:]] > counts[offsets[:-1]]


def _lists(column: pa.Array) -> Lists:
    sizes = np.asarray(compute.list_value_length(column).fill_null(0))
    return Lists(np.concatenate([[0], np.cumsum(sizes)]), compute.list_flatten(column))


def is_blank(texts: pa.Array) -> pa.Array:
    return _is_empty(compute.utf8_trim_whitespace(texts))


def _is_empty(texts: pa.Array) -> pa.Array:
    return compute.equal(compute.binary_length(texts), 0).fill_null(True)


def _is_text(column: "pa.ChunkedArray | list[Any]") -> bool:
    if isinstance(column, list):
        return all(isinstance(value, str | None) for value in column)
    return pa.types.is_string(column.type) or pa.types.is_large_string(column.type)


def describe_text(value: Any) -> str:
    if isinstance(value, str):
        return "text with unpaired surrogates" if value.strip() else "an empty str"
    return describe_type(value)


def _as_type(column: "pa.ChunkedArray | list[Any]", wanted: pa.DataType) -> pa.ChunkedArray:
    if not isinstance(column, list):
        if _castable(column.type, wanted):
            return column.cast(wanted, safe=False)
        column = column.to_pylist()
    try:
        if _is_regular(column, wanted):
            return pa.chunked_array([pa.array(column, wanted)])
    except (pa.ArrowException, UnicodeEncodeError, OverflowError):
        pass
    return pa.chunked_array([pa.array([_clean(value, wanted) for value in column], wanted)])


def _castable(found: pa.DataType, wanted: pa.DataType) -> bool:
    if pa.types.is_large_list(wanted):
        is_list = pa.types.is_list(found) or pa.types.is_large_list(found) or pa.types.is_fixed_size_list(found)
        return is_list and _castable(found.value_type, wanted.value_type)
    if pa.types.is_large_string(wanted):
        return pa.types.is_string(found) or pa.types.is_large_string(found)
    return pa.types.is_integer(found) or pa.types.is_floating(found)


def _is_regular(column: list[Any], wanted: pa.DataType) -> bool:
    """Whether Arrow reads these values as they are meant: it takes booleans for numbers, and text for a list of characters."""
    if not pa.types.is_large_list(wanted):
        return pa.types.is_large_string(wanted) or bool not in set(map(type, column))
    if not set(map(type, column)) <= {list, NoneType}:
        return False
    return pa.types.is_large_string(wanted.value_type) or not any(bool in map(type, value) for value in column if value)


def _clean(value: Any, wanted: pa.DataType) -> Any:
    """The value, or null if it is not of this type."""
    if pa.types.is_large_list(wanted):
        return [_clean(one, wanted.value_type) for one in value] if isinstance(value, list) else None
    if pa.types.is_large_string(wanted):
        return value if isinstance(value, str) and not _SURROGATE.search(value) else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300 else None


def _clean_value(value: Any) -> str | None:
    if isinstance(value, str | dict):
        return _clean(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), TEXT)
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) and value == value else None


# Text ----------------------------------------------------------------------------------------------------------------


Pieces = Sequence["str | pa.Array"]
"""Texts that are not joined yet: columns, and constants that are the same in all rows. Texts are long, so they are joined once."""


def join_text(*pieces: "str | pa.Array") -> pa.Array:
    """Concatenates columns and constants, row by row."""
    return compute.binary_join_element_wise(*(pa.scalar(one, TEXT) if isinstance(one, str) else one for one in (*pieces, "")))
