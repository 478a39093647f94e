"""Groups of scored candidate translations: the source of rows that train generative reward models.

A group is a row with `src_text`, `src_lang`, `trg_lang` (codes or names), candidates, their scores (integers, 0 to 10) and an
analysis. Lines at the end of the analysis that already state a ranking or scores are removed.
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


def rl_schema(extra_info: dict[str, pa.DataType]) -> pa.Schema:
    truth = pa.struct({"style": TEXT, "ground_truth": TEXT})
    return pa.schema(
        {"data_source": TEXT, "prompt": MESSAGES, "ability": TEXT, "reward_model": truth, "extra_info": pa.struct(extra_info)}
    )


def rl_row(data_source: str, prompt: list[Message], ability: str, truth: str, extra: dict[str, Any]) -> dict[str, Any]:
    reward_model = {"style": "rule", "ground_truth": truth}
    return {
        "data_source": data_source,
        "prompt": prompt,
        "ability": ability,
        "reward_model": reward_model,
        "extra_info": extra,
    }


_LINE = re.compile(r"((?:[^\W\d_]+ )?)([A-Z]):(.*)")
_QUOTED = re.compile(r'"[^"]*"|„[^“"]*[“"]|“[^”]*”')
_MENTION = re.compile(r"\b(?:Translation|Candidate) ([A-Z])\b|\b([B-HJ-Z])\b|(?<=[a-z,;(] )([AI])\b")
"""A candidate's letter in an analysis. A and I are also words, but not in mid-sentence; quoted text does not count."""
_VERDICT_WORDS = re.compile(r"\b(?:scores?|scoring|ranking|ranked)\b", re.I)


@dataclass(frozen=True)
class Columns:
    """Names of a row's columns."""

    candidates: str = "mt_texts"
    scores: str = "scores"
    analysis: str | None = "analysis"
    """None: not read."""


USUAL = Columns()


@dataclass(frozen=True)
class Candidates:
    """A group as read, or a reordered subgroup: `places[i]` is the i-th candidate's index in its row."""

    where: str
    text: str
    languages: tuple[str, str]
    candidates: tuple[str, ...]
    scores: tuple[int, ...]
    analysis: str
    places: tuple[int, ...]

    def select(self, places: Sequence[int]) -> "Candidates":
        candidates, scores = tuple(self.candidates[i] for i in places), tuple(self.scores[i] for i in places)
        return replace(self, candidates=candidates, scores=scores, places=tuple(places))

    @property
    def by_letter(self) -> dict[str, int]:
        return dict(zip(LETTERS, self.scores, strict=False))

    @property
    def task(self) -> list[Message]:
        """The translation task, as a prompt."""
        source, target = (LANGUAGES.get(name.lower(), name) for name in self.languages)
        return [{"role": "user", "content": f"Translate from {source} into {target}:\n\n{self.text}"}]

    @property
    def characters(self) -> int:
        return len(self.text) + sum(map(len, self.candidates))


@dataclass
class RowSummary:
    unit: str = "groups"
    """What the length limit applies to."""
    groups: int = 0
    rows: int = 0
    too_long: int = 0

    def __str__(self) -> str:
        left_out = f"; {self.too_long:,} {self.unit} were too long" if self.too_long else ""
        return f"{self.rows:,} rows of {self.groups:,} groups{left_out}"


def read_groups(files: Sequence[Path], columns: Columns, *, fewest: int, analysed: bool) -> Iterator[Candidates]:
    for file in files:
        rows = read_rows(file)
        rows.require("src_text", "src_lang", "trg_lang", columns.candidates, columns.scores)
        if analysed:
            assert columns.analysis is not None
            rows.require(columns.analysis)
        for where, row in rows.located():
            yield _group(row, columns, fewest, where)


def _group(row: dict[str, Any], columns: Columns, fewest: int, where: str) -> Candidates:
    text, source, target = (_text(row[name], f"{where}: column {name!r}") for name in ("src_text", "src_lang", "trg_lang"))
    candidates, ratings = (row.get(name) for name in (columns.candidates, columns.scores))
    analysis = None if columns.analysis is None else row.get(columns.analysis)
    if not isinstance(candidates, list) or not fewest <= len(candidates) <= len(LETTERS):
        found = len(candidates) if isinstance(candidates, list) else describe_type(candidates)
        raise DataError(f"{where}: column {columns.candidates!r} should have {fewest} to {len(LETTERS)} candidates, not {found}")
    candidates = tuple(_text(one, f"{where}: column {columns.candidates!r}, candidate {i}") for i, one in enumerate(candidates))
    if not isinstance(ratings, list) or len(ratings) != len(candidates):
        found = len(ratings) if isinstance(ratings, list) else describe_type(ratings)
        raise DataError(
            f"{where}: column {columns.scores!r} should have a score for each of the {len(candidates)} candidates, not {found}"
        )
    scores: list[Any] = [int(score) if isinstance(score, float) and score.is_integer() else score for score in ratings]
    for score in scores:
        if isinstance(score, bool) or not isinstance(score, int) or not LOWEST <= score <= HIGHEST:
            raise DataError(f"{where}: column {columns.scores!r}: {score!r} should be an integer from {LOWEST} to {HIGHEST}")
    if not isinstance(analysis, str | None):
        raise DataError(f"{where}: column {columns.analysis!r} should be text, not {describe_type(analysis)}")
    places = tuple(range(len(candidates)))
    return Candidates(where, text, (source, target), candidates, tuple(scores), _strip_verdict(analysis or ""), places)


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{where} should be text, not {describe_type(value)}")
    return value.strip()


def _strip_verdict(analysis: str) -> str:
    """Remove lines at the end that announce or state a ranking or scores."""
    lines = analysis.strip().split("\n")
    while lines and (not lines[-1].strip() or _is_verdict(lines[-1])):
        lines.pop()
    return "\n".join(lines)


def _is_verdict(line: str) -> bool:
    line = line.strip().strip("*#_` ")
    heading, _, rest = line.partition(":")
    rest = rest.strip("*_` ")
    if read_ranking(line) or read_scores(line):
        return True
    return bool(_VERDICT_WORDS.search(heading)) and (line.endswith(":") or bool(read_ranking(rest) or read_scores(rest)))


def render_question(template: JudgeTemplate, group: Candidates, variables: dict[str, Any]) -> list[Message]:
    """A judge's prompt about candidates."""
    try:
        return [{"role": "user", "content": template.render(Prompt(group.where, group.task), variables)}]
    except Unrenderable as error:
        raise RecipeError(f"prepare: template: {error}. These rows provide nothing but a task.") from None


def split_analysis(group: Candidates, column: str | None, purpose: str) -> list[tuple[str, str]]:
    """Split the analysis by candidate: (text before its letter, text after it)."""
    lines = [_LINE.fullmatch(line.strip()) for line in group.analysis.split("\n") if line.strip()]
    letters = LETTERS[: len(group.candidates)]
    if len(letters) == 1 and not any(lines):
        return [("", group.analysis)]  # there is only one candidate it can be about
    found = [line for line in lines if line is not None and not _mentions(line[3], letters)]
    if len(found) < len(lines) or "".join(line[2] for line in found) != letters:
        raise DataError(
            f"{group.where}: column {column!r} cannot be split by candidate, as needed for {purpose}: it should "
            "have exactly one line per candidate (Translation A: …), none of them mentioning another candidate"
        )
    return [(line[1], line[3]) for line in found]


def _mentions(text: str, letters: str) -> bool:
    """Whether the text mentions a candidate."""
    return any(letter in letters for found in _MENTION.findall(_QUOTED.sub("", text)) for letter in found if letter)


def write_rows(out: Path, rows: list[dict[str, Any]], schema: pa.Schema, summary: RowSummary) -> RowSummary:
    if not rows:
        raise DataError(f"no rows could be made: all {summary.too_long:,} {summary.unit} are longer than --max-characters")
    summary.rows = len(rows)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(out) as temporary:
            parquet.write_table(pa.Table.from_pylist(rows, schema), temporary)
    except OSError as error:
        raise PlauditError(f"--out: {out} cannot be written: {error}") from None
    return summary
