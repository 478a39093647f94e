"""Rows with candidates and reference scores → groups to rank.

    translations    src_text, src_lang, trg_lang, candidates (mt_texts) and scores, as judges are trained on
    other groups    prompt with responses or completions, and scores or labels

Both may have `systems`, a name per candidate. Rewards see the prompt, the reference translation (trg_text) as ground truth, and
other columns in extra_info, but neither scores nor systems nor the raters' analysis.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from plaudit.data.columns import GROUND_TRUTHS, PAIR, RESPONSES, first_value, has_prompt, listed, parse_object, plain
from plaudit.data.conversations import Source
from plaudit.data.rollouts import split_responses
from plaudit.errors import DataError, did_you_mean
from plaudit.evaluation.row_files import EvaluatedRow, Row, RowFile, hide_in_extra_info, open_files
from plaudit.prepare.scored_groups import TRANSLATION, translation_fields

CANDIDATES = ("mt_texts", "responses", "completions")
SCORES = ("scores", "labels", "label")
SYSTEMS = ("systems",)
HIDDEN = {*CANDIDATES, *SCORES, *SYSTEMS, *RESPONSES, *PAIR, "analysis", "id"}
"""What rewards do not see."""
HINT = (
    "Groups to rank have `src_text`, `src_lang`, `trg_lang` and `mt_texts`, or `prompt` and `responses`; and `scores`, a number "
    "per candidate. Other names: --candidates, --scores, --systems"
)


@dataclass(frozen=True)
class GroupColumns:
    """Names of columns; None: one of the usual names."""

    candidates: str | None = None
    scores: str | None = None
    systems: str | None = None

    def of_file(self, file: RowFile) -> "GroupColumns":
        """The names that a file has; of systems None if it has none."""
        candidates = _find("--candidates", self.candidates, CANDIDATES, file)
        scores = _find("--scores", self.scores, SCORES, file)
        named = self.systems is not None or set(SYSTEMS) & set(file.rows.columns)
        return GroupColumns(candidates, scores, _find("--systems", self.systems, SYSTEMS, file) if named else None)


def _find(option: str, given: str | None, usual: Sequence[str], file: RowFile) -> str:
    columns = file.rows.columns
    found = next((name for name in ((given,) if given else usual) if name in columns), None)
    if found is None:
        missing = f"no column {given!r}" if given else f"none of {listed(usual)}"
        near = did_you_mean(given, columns) if given else ""
        raise DataError(f"{option}: {file.source}: has {missing} (found: {', '.join(columns)}).{near} {HINT}")
    return found


@dataclass(frozen=True)
class RankedGroup:
    """A prompt, candidates, and how good each of them is."""

    id: str
    where: str
    """Its location, for error messages."""
    file: str
    row: Row
    """What rewards see of it, with the candidates as `responses`."""
    scores: np.ndarray
    systems: tuple[str, ...] | None
    """The system that made each candidate."""
    languages: str
    """Of a translation: en-de."""

    @property
    def data_source(self) -> str:
        return str(self.row.get("data_source") or "")


def read_groups(sources: Sequence[Source], columns: GroupColumns, max_items: int | None = None) -> list[RankedGroup]:
    """The groups of all files, in order."""
    return [group for file in open_files(sources, max_items) for group in _read(file, columns.of_file(file))]


def _read(file: RowFile, columns: GroupColumns) -> Iterator[RankedGroup]:
    translation = set(TRANSLATION) <= set(file.rows.columns) and not has_prompt(file.rows.columns)
    if not translation and not has_prompt(file.rows.columns):
        file.rows.require("prompt", hint=HINT)
    assert columns.candidates is not None
    assert columns.scores is not None
    for one in file.located():
        given = {**one.row, "responses": one.row.get(columns.candidates)}
        _, texts = split_responses({"prompt": "", "responses": given["responses"]}, one.where)
        if len(texts) < 2:
            raise DataError(f"{one.where}: `{columns.candidates}` has {len(texts)} candidate; ranking takes two")
        scores = np.array([_score(x, columns.scores, one) for x in _listed(one, columns.scores, len(texts))])
        systems = None
        if columns.systems is not None:
            systems = tuple(str(name) for name in _listed(one, columns.systems, len(texts)))
            if len(set(systems)) < len(systems):
                raise DataError(f"{one.where}: `{columns.systems}` names a system twice: {', '.join(systems)}")
        own = {columns.candidates, columns.scores, columns.systems}
        row = {name: value for name, value in one.row.items() if name not in HIDDEN | own} | {"responses": texts}
        row = hide_in_extra_info(row, (own | {*SCORES, *SYSTEMS, "analysis"}).__contains__)
        languages = ""
        if translation:
            fields = translation_fields(row, one.where)
            row, languages = _translation(row, fields), f"{fields['src_lang']}-{fields['trg_lang']}"
        yield RankedGroup(one.id, one.where, file.name, row, scores, systems, languages)


def _translation(row: Row, fields: dict[str, str]) -> Row:
    """As rows that train a translation policy, with the reference as ground truth."""
    row = {name: value for name, value in row.items() if name not in fields}
    if row.get("trg_text") is not None and first_value(row, ("reward_model", *GROUND_TRUTHS)) is None:
        row["ground_truth"] = row["trg_text"]
    return row | {"prompt": fields["question"], "extra_info": {**(parse_object(row.get("extra_info")) or {}), **fields}}


def _listed(one: EvaluatedRow, column: str, count: int) -> list[Any]:
    """An entry per candidate."""
    values = plain(one.row.get(column))
    if not isinstance(values, list):
        raise DataError(f"{one.where}: `{column}` should be a list with an entry per candidate, not {values!r:.80}")
    if len(values) != count:
        raise DataError(f"{one.where}: `{column}` has {len(values)} entries for {count} candidates")
    return values


def _score(value: Any, column: str, one: EvaluatedRow) -> float:
    if not isinstance(value, bool | int | float) or not math.isfinite(value):
        raise DataError(f"{one.where}: `{column}` should be finite numbers, and one is {value!r:.80}")
    return float(value)
