"""Groups of scored candidate translations: the source of rows that train generative reward models.

A group is a row with `src_text`, `src_lang`, `trg_lang` (codes or names), candidates, their scores (integers, 0 to 10) and an
analysis. Lines at the end of the analysis that already state a ranking or scores are removed.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from plaudit.data.conversations import describe_type
from plaudit.errors import DataError
from plaudit.languages import language_name, unknown_language
from plaudit.prepare.columnar_templates import ColumnarTemplate
from plaudit.prepare.tables import TEXT, Lists, Table, compute, join_text
from plaudit.rewards.judges.candidates import LETTERS
from plaudit.rewards.rules.ranking_lines import read_ranking, read_scores

LOWEST, HIGHEST = 0, 10
_LINE = re.compile(r"((?:[^\W\d_]+ )?)([A-Z]):(.*)")
_QUOTED = re.compile(r'"[^"]*"|„[^“"]*[“"]|“[^”]*”')
_MENTION = re.compile(r"\b(?:Translation|Candidate) ([A-Z])\b|\b([B-HJ-Z])\b|(?<=[a-z,;(] )([AI])\b")
"""A candidate's letter in an analysis. A and I are also words, but not in mid-sentence; quoted text does not count."""
_VERDICT_WORDS = re.compile(r"\b(?:scores?|scoring|ranking|ranked)\b", re.I)

# For complete columns (RE2's syntax). Each finds everything that the expressions above find, and a little more, so only the texts
# that it finds have to be looked at one by one.
_LINES = r"^(?:\pL+ )?[A-Z]:"
_QUOTES = _QUOTED.pattern
_MENTIONS = r"\b(?:Translation|Candidate) [A-Z]\b|\b[B-HJ-Z]\b|[a-z,;(] [AI]\b"
_VERDICTS = r"(?:(?i:score|scoring|rank)[^\n]*|(?:^|\n)[\s*#_`]*[A-Z]\s*(?:[>=:][^\n]*)?[\s*#_`]*)\z"


@dataclass(frozen=True)
class Columns:
    """Names of a row's columns."""

    candidates: str = "mt_texts"
    scores: str = "scores"
    analysis: str | None = "analysis"
    """None: not read."""


USUAL = Columns()


@dataclass(frozen=True)
class ScoredGroups:
    """Groups as columns: one entry per group, or, of candidates and scores, one per candidate."""

    table: Table
    columns: Columns
    text: pa.Array
    languages: tuple[pa.Array, pa.Array]
    """As the file has them."""
    language_names: tuple[pa.Array, pa.Array]
    candidates: Lists
    scores: np.ndarray
    analysis: pa.Array

    def make_task(self) -> pa.Array:
        """The translation task, as text."""
        return translation_task(*self.language_names, self.text)

    @property
    def candidate_lengths(self) -> np.ndarray:
        """In characters."""
        return np.asarray(compute.utf8_length(self.candidates.items), np.int64)

    @property
    def text_lengths(self) -> np.ndarray:
        return np.asarray(compute.utf8_length(self.text), np.int64)

    def judge_template(self, file: Path, constants: Mapping[str, Any], own: Sequence[str]) -> ColumnarTemplate:
        """A judge's prompt about candidates. It finds a row's columns, and the languages' names, in `extra_info`."""
        source, target = self.language_names
        added = {"src_text": self.text, "src_language": source, "trg_language": target}
        return ColumnarTemplate(file, self.table, self.make_task, constants, added, own)

    def extra_info(self, rows: np.ndarray) -> dict[str, pa.Array]:
        """What an RL row says about its group."""
        (source, target), (source_name, target_name) = self.languages, self.language_names
        columns = {
            "src_text": self.text, "src_lang": source, "trg_lang": target, "src_language": source_name, "trg_language": target_name,
        }  # fmt: skip
        indices = pa.array(rows)
        return {name: column.take(indices) for name, column in columns.items()}


EXTRA_INFO = {name: pa.string() for name in ("src_text", "src_lang", "trg_lang", "src_language", "trg_language")}


def translation_task(source: pa.Array, target: pa.Array, text: pa.Array) -> pa.Array:
    """What a policy is asked for, in the words that judges are trained with."""
    return join_text("Translate from ", source, " into ", target, ":\n\n", text)


TRANSLATION = ("src_text", "src_lang", "trg_lang")
"""Columns of a text to translate."""


def translation_fields(row: Mapping[str, Any], where: str) -> dict[str, str]:
    """Of one row: what `extra_info` says about its text, with the task as `question`."""
    for column in TRANSLATION:
        if not isinstance(row.get(column), str) or not row[column].strip():
            raise DataError(f"{where}: column {column!r} should be text, not {describe_type(row.get(column))}")
    text, codes = row["src_text"].strip(), {column: row[column].strip() for column in ("src_lang", "trg_lang")}
    source, target = (_language(code, column, where) for column, code in codes.items())
    question = f"Translate from {source} into {target}:\n\n{text}"
    return {"src_text": text, **codes, "src_language": source, "trg_language": target, "question": question}


def _language(written: str, column: str, where: str) -> str:
    name = language_name(written)
    if name is None:
        raise DataError(f"{where}: {unknown_language(column, written)}")
    return name


def read_groups(table: Table, columns: Columns, *, fewest: int, analysed: bool) -> ScoredGroups:
    table.require("src_text", "src_lang", "trg_lang", columns.candidates, columns.scores)
    if analysed:
        assert columns.analysis is not None
        table.require(columns.analysis)
    text = table.text("src_text")
    (source, source_name), (target, target_name) = table.languages("src_lang"), table.languages("trg_lang")
    candidates = table.text_lists(columns.candidates, fewest, len(LETTERS))
    scores = table.score_lists(columns.scores, candidates.sizes, LOWEST, HIGHEST)
    analysis = _strip_verdicts(table.optional_text(columns.analysis))
    return ScoredGroups(table, columns, text, (source, target), (source_name, target_name), candidates, scores, analysis)


# Analyses ------------------------------------------------------------------------------------------------------------


def _strip_verdicts(analyses: pa.Array) -> pa.Array:
    possible = compute.match_substring_regex(analyses, _VERDICTS)
    if not compute.any(possible).as_py():
        return analyses
    stripped = [_strip_verdict(text) for text in analyses.filter(possible).to_pylist()]
    return compute.replace_with_mask(analyses, possible, pa.array(stripped, TEXT))


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


def split_analyses(groups: ScoredGroups, purpose: str) -> tuple[pa.Array, pa.Array]:
    """What precedes and what follows each candidate's letter in its line of the analysis. Rows that have no such lines are bad."""
    sizes, starts = groups.candidates.sizes, groups.candidates.offsets
    lines = compute.split_pattern(groups.analysis, "\n")
    owner, texts = np.asarray(compute.list_parent_indices(lines)), compute.utf8_trim_whitespace(compute.list_flatten(lines))
    filled = np.asarray(compute.greater(compute.binary_length(texts), 0))
    owner, texts = owner[filled], texts.filter(pa.array(filled))
    counts = np.bincount(owner, minlength=len(sizes))
    place = np.arange(len(owner)) - np.concatenate([[0], np.cumsum(counts)])[owner]
    is_line = compute.match_substring_regex(texts, _LINES)
    parts = compute.split_pattern(compute.if_else(is_line, texts, ":"), ":", max_splits=1)
    head, after = (compute.list_element(parts, i) for i in (0, 1))
    before, letter = compute.utf8_slice_codeunits(head, 0, -1), compute.utf8_slice_codeunits(head, -1)
    expected = pa.array(list(LETTERS), TEXT).take(pa.array(np.minimum(place, len(LETTERS) - 1)))
    mentions = _mention_others(after)
    clear = np.asarray(compute.and_not(compute.equal(letter, expected), mentions))
    good = (counts == sizes) & (np.bincount(owner, weights=~clear, minlength=len(sizes)) == 0)

    # The others one by one.
    single: list[tuple[str, str]] = []
    index = np.zeros(len(groups.scores), np.int64)
    index[np.repeat(good, sizes)] = np.flatnonzero(good[owner])
    wrong = np.zeros(len(sizes), bool)
    for i in np.flatnonzero(~good & groups.table.usable).tolist():
        split = _split_analysis(groups.analysis[i].as_py(), int(sizes[i]))
        if split is None:
            wrong[i] = True
        else:
            index[starts[i] : starts[i + 1]] = len(texts) + len(single) + np.arange(sizes[i])
            single += split
    groups.table.reject(
        wrong,
        "with an analysis that cannot be split",
        lambda _: (
            f"column {groups.columns.analysis!r} cannot be split by candidate, as needed for {purpose}: it should "
            "have exactly one line per candidate (Translation A: …), none of them mentioning another candidate"
        ),
    )
    indices = pa.array(index)
    columns = zip((before, after), zip(*single, strict=True) if single else ((), ()), strict=True)
    # The last text is for bad rows, where there may be no other.
    before, after = (pa.concat_arrays([column, pa.array([*some, ""], TEXT)]).take(indices) for column, some in columns)
    return before, after


def _mention_others(texts: pa.Array) -> pa.Array:
    """Whether the texts seem to mention a candidate outside of quotes."""
    found = compute.match_substring_regex(texts, f'["„“]|{_MENTIONS}')
    if not compute.any(found).as_py():
        return found
    unquoted = compute.replace_substring_regex(texts.filter(found), _QUOTES, "")
    return compute.replace_with_mask(found, found, compute.match_substring_regex(unquoted, _MENTIONS))


def _split_analysis(analysis: str, count: int) -> list[tuple[str, str]] | None:
    """(text before a candidate's letter, text after it) for each candidate."""
    lines = [_LINE.fullmatch(line.strip()) for line in analysis.split("\n") if line.strip()]
    letters = LETTERS[:count]
    if count == 1 and not any(lines):
        return [("", analysis)]  # there is only one candidate it can be about
    found = [line for line in lines if line is not None and not _mentions(line[3], letters)]
    if len(found) < len(lines) or "".join(line[2] for line in found) != letters:
        return None
    return [(line[1], line[3]) for line in found]


def _mentions(text: str, letters: str) -> bool:
    """Whether the text mentions a candidate."""
    return any(letter in letters for found in _MENTION.findall(_QUOTED.sub("", text)) for letter in found if letter)
