"""Groups of scored candidate translations, as rows that train generative reward models are made of them.

A group is a row with `src_text`, `src_lang`, `trg_lang` (codes or names), candidates, their scores (whole numbers, 0 to 10) and an
analysis. Lines at the analysis's end that announce a ranking or scores already are removed.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from plaudit.data.conversations import describe_type
from plaudit.data.rows import read_rows
from plaudit.errors import DataError, PlauditError, RecipeError
from plaudit.files import atomic_file
from plaudit.rewards.judges.candidates import LETTERS
from plaudit.rewards.judges.templates import JudgeTemplate, Unrenderable
from plaudit.rewards.rules.ranking_lines import read_ranking, read_scores
from plaudit.types import Message, Prompt

LOWEST, HIGHEST = 0, 10
LANGUAGES = {
    "ar": "Arabic", "bg": "Bulgarian", "bn": "Bengali", "ca": "Catalan", "cs": "Czech", "da": "Danish", "de": "German",
    "el": "Greek", "en": "English", "es": "Spanish", "et": "Estonian", "fa": "Persian", "fi": "Finnish", "fr": "French",
    "ga": "Irish", "he": "Hebrew", "hi": "Hindi", "hr": "Croatian", "hu": "Hungarian", "id": "Indonesian", "is": "Icelandic",
    "it": "Italian", "ja": "Japanese", "ko": "Korean", "lt": "Lithuanian", "lv": "Latvian", "nl": "Dutch", "no": "Norwegian",
    "pl": "Polish", "pt": "Portuguese", "ro": "Romanian", "ru": "Russian", "sk": "Slovak", "sl": "Slovenian",
    "sv": "Swedish", "th": "Thai", "tr": "Turkish", "uk": "Ukrainian", "vi": "Vietnamese", "zh": "Chinese",
}  # fmt: skip
TEXT = pa.string()
MESSAGES = pa.list_(pa.struct({"role": TEXT, "content": TEXT}))
SFT_SCHEMA = pa.schema({"messages": MESSAGES})


def rl_schema(about: dict[str, pa.DataType]) -> pa.Schema:
    """`about`: the fields of extra_info."""
    truth = pa.struct({"style": TEXT, "ground_truth": TEXT})
    return pa.schema(
        {"data_source": TEXT, "prompt": MESSAGES, "ability": TEXT, "reward_model": truth, "extra_info": pa.struct(about)}
    )


def rl_row(data_source: str, prompt: list[Message], ability: str, truth: str, about: dict[str, Any]) -> dict[str, Any]:
    checked = {"style": "rule", "ground_truth": truth}
    return {"data_source": data_source, "prompt": prompt, "ability": ability, "reward_model": checked, "extra_info": about}


_LINE = re.compile(r"((?:[^\W\d_]+ )?)([A-Z]):(.*)")
_QUOTED = re.compile(r'"[^"]*"|„[^“"]*[“"]|“[^”]*”')
_NAMED = re.compile(r"\b(?:Translation|Candidate) ([A-Z])\b|\b([B-HJ-Z])\b|(?<=[a-z,;(] )([AI])\b")
"""A candidate's letter in an analysis. A and I are words too, but not in the middle of a sentence; quoted text does not count."""
_ANNOUNCES = re.compile(r"\b(?:scores?|scoring|ranking|ranked)\b", re.I)


@dataclass(frozen=True)
class Columns:
    """Where a row has them."""

    candidates: str = "mt_texts"
    scores: str = "scores"
    analysis: str | None = "analysis"
    """None: whatever is there is not looked at."""


USUAL = Columns()


@dataclass(frozen=True)
class Candidates:
    """A group as it is read, or some of it in another order: `places[i]` is where the i-th stands in its row."""

    where: str
    text: str
    languages: tuple[str, str]
    candidates: tuple[str, ...]
    scores: tuple[int, ...]
    analysis: str
    places: tuple[int, ...]

    def shown(self, places: Sequence[int]) -> "Candidates":
        candidates, scores = tuple(self.candidates[i] for i in places), tuple(self.scores[i] for i in places)
        return replace(self, candidates=candidates, scores=scores, places=tuple(places))

    @property
    def by_letter(self) -> dict[str, int]:
        return dict(zip(LETTERS, self.scores, strict=False))

    @property
    def task(self) -> list[Message]:
        """What whoever translated was told."""
        source, target = (LANGUAGES.get(name.lower(), name) for name in self.languages)
        return [{"role": "user", "content": f"Translate from {source} into {target}:\n\n{self.text}"}]

    @property
    def characters(self) -> int:
        return len(self.text) + sum(map(len, self.candidates))


@dataclass
class Made:
    what: str = "groups"
    """That can be too long."""
    groups: int = 0
    rows: int = 0
    too_long: int = 0

    def __str__(self) -> str:
        left_out = f"; {self.too_long:,} {self.what} were too long" if self.too_long else ""
        return f"{self.rows:,} rows of {self.groups:,} groups{left_out}"


def read_groups(files: Sequence[Path], columns: Columns, *, fewest: int, analysed: bool) -> Iterator[Candidates]:
    for file in files:
        rows = read_rows(file)
        rows.require("src_text", "src_lang", "trg_lang", columns.candidates, columns.scores)
        if analysed:
            assert columns.analysis is not None
            rows.require(columns.analysis)
        for number, row in enumerate(rows):
            yield _group(row, columns, fewest, f"{rows.source}: row {number}")


def _group(row: dict[str, Any], columns: Columns, fewest: int, where: str) -> Candidates:
    text, source, target = (_text(row[name], f"{where}: column {name!r}") for name in ("src_text", "src_lang", "trg_lang"))
    candidates, given = (row.get(name) for name in (columns.candidates, columns.scores))
    analysis = None if columns.analysis is None else row.get(columns.analysis)
    if not isinstance(candidates, list) or not fewest <= len(candidates) <= len(LETTERS):
        found = len(candidates) if isinstance(candidates, list) else describe_type(candidates)
        raise DataError(f"{where}: column {columns.candidates!r} should have {fewest} to {len(LETTERS)} candidates, not {found}")
    candidates = tuple(_text(one, f"{where}: column {columns.candidates!r}, candidate {i}") for i, one in enumerate(candidates))
    if not isinstance(given, list) or len(given) != len(candidates):
        found = len(given) if isinstance(given, list) else describe_type(given)
        raise DataError(
            f"{where}: column {columns.scores!r} should have a score for each of the {len(candidates)} candidates, not {found}"
        )
    scores: list[Any] = [int(score) if isinstance(score, float) and score.is_integer() else score for score in given]
    for score in scores:
        if isinstance(score, bool) or not isinstance(score, int) or not LOWEST <= score <= HIGHEST:
            raise DataError(f"{where}: column {columns.scores!r}: {score!r} should be a whole number from {LOWEST} to {HIGHEST}")
    if not isinstance(analysis, str | None):
        raise DataError(f"{where}: column {columns.analysis!r} should be text, not {describe_type(analysis)}")
    places = tuple(range(len(candidates)))
    return Candidates(where, text, (source, target), candidates, tuple(scores), _unannounced(analysis or ""), places)


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{where} should be text, not {describe_type(value)}")
    return value.strip()


def _unannounced(analysis: str) -> str:
    """Without the lines at its end that announce, or are, a ranking or scores."""
    lines = analysis.strip().split("\n")
    while lines and (not lines[-1].strip() or _announces(lines[-1])):
        lines.pop()
    return "\n".join(lines)


def _announces(line: str) -> bool:
    line = line.strip().strip("*#_` ")
    heading, _, behind = line.partition(":")
    behind = behind.strip("*_` ")
    if read_ranking(line) or read_scores(line):
        return True
    return bool(_ANNOUNCES.search(heading)) and (line.endswith(":") or bool(read_ranking(behind) or read_scores(behind)))


def fill_in(template: JudgeTemplate, group: Candidates, variables: dict[str, Any]) -> list[Message]:
    """A judge's question about candidates."""
    try:
        return [{"role": "user", "content": template.render(Prompt(group.where, group.task), variables)}]
    except Unrenderable as error:
        raise RecipeError(f"prepare: template: {error}. These rows have nothing but a task.") from None


def lines_of(group: Candidates, column: str | None, why: str) -> list[tuple[str, str]]:
    """The analysis taken apart: for each candidate what stands before its letter, and behind it."""
    lines = [_LINE.fullmatch(line.strip()) for line in group.analysis.split("\n") if line.strip()]
    letters = LETTERS[: len(group.candidates)]
    if len(letters) == 1 and not any(lines):
        return [("", group.analysis)]  # it can be about nobody else
    found = [line for line in lines if line is not None and not _names(line[3], letters)]
    if len(found) < len(lines) or "".join(line[2] for line in found) != letters:
        raise DataError(
            f"{group.where}: column {column!r} cannot be taken apart, as {why}: it should "
            "have a line for each candidate and nothing else (Translation A: …), and none that names another"
        )
    return [(line[1], line[3]) for line in found]


def _names(text: str, letters: str) -> bool:
    """Whether it speaks of a candidate."""
    return any(letter in letters for found in _NAMED.findall(_QUOTED.sub("", text)) for letter in found if letter)


def write_rows(out: Path, rows: list[dict[str, Any]], schema: pa.Schema, made: Made) -> Made:
    if not rows:
        raise DataError(f"no rows can be made: all {made.too_long:,} {made.what} are longer than --max-characters")
    made.rows = len(rows)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(out) as aside:
            parquet.write_table(pa.Table.from_pylist(rows, schema), aside)
    except OSError as error:
        raise PlauditError(f"--out: {out} cannot be written: {error}") from None
    return made
