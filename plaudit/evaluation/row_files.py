"""Files of an evaluation: rows as plain values, with ids that are unique among all files."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from plaudit.data.columns import CONVERSATIONS, PROMPTS, parse_object, plain
from plaudit.data.conversations import Source, without_nulls
from plaudit.data.row_ids import name_sources
from plaudit.data.rows import Rows
from plaudit.errors import DataError

Row = dict[str, Any]


@dataclass(frozen=True)
class EvaluatedRow:
    id: str
    """Unique among all files."""
    own_id: str
    """As its file has it; else its number."""
    where: str
    """Its location, for error messages."""
    row: Row
    """Its values; nulls are left out."""


@dataclass(frozen=True)
class RowFile:
    source: str
    """As it was given."""
    name: str
    """What its ids begin with: the name of the file, without suffix."""
    rows: Rows
    max_rows: int | None

    def located(self) -> Iterator[EvaluatedRow]:
        used = set[str]()
        for number, (where, row) in enumerate(islice(self.rows.located(), self.max_rows), 1):
            row = without_nulls(row) if self.rows.nulls_mean_absent else row
            row = {column: plain(value) for column, value in row.items() if value is not None}
            own = str(row.get("id", number))
            # The id of a row may be that of its prompt, which other rows share.
            id = f"{self.name}:{own}" if own not in used else f"{self.name}:{own} (row {number})"
            used.add(own)
            yield EvaluatedRow(id, own, where, row)


def open_files(sources: Sequence[Source], max_rows: int | None) -> Iterator[RowFile]:
    """The files in order, with the first `max_rows` rows of each."""
    names = name_sources(sources)
    twice = next((source for source, name in zip(sources, names, strict=True) if names.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"{twice}: is given twice; its rows would count twice")
    for source, name in zip(sources, names, strict=True):
        yield RowFile(str(source), name.rpartition(".")[0] or name, source.rows(), max_rows)


def prompt_key(row: Row, id: str) -> str:
    """What identifies a row's prompt: `prompt` if it has one, since messages may include the answer; without either, its id."""
    columns = ("prompt",) if row.get("prompt") else (*PROMPTS, *CONVERSATIONS)
    found = {name: row[name] for name in columns if row.get(name)}
    return json.dumps(found or id, default=str)


def hide_in_extra_info(row: Row, tells: Callable[[str], bool]) -> Row:
    """The row without what its extra_info, an object or one as JSON text, has under names that tell what is to be found out."""
    extra = parse_object(row.get("extra_info"))
    if not isinstance(extra, Mapping):
        return row
    return row | {"extra_info": {name: value for name, value in extra.items() if not tells(name)}}
