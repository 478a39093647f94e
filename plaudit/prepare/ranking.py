"""Groups of scored candidate translations → rows that train a generative ranking reward model (GRRM): SFT, then RL.

A group is a row with `src_text`, `src_lang`, `trg_lang` (codes or names), candidates, their scores (whole numbers, 0 to 10) and an
analysis. The prompt is the one that `kind: group_judge` fills in for these candidates, with the same template, so that the trained
model is asked later what it was asked here. The answer ends as the `ranking` rule and `group_judge` read it:

    ranking_score   analysis, Ranking:, B > A = D > C, Scores:, B: 9, A: 7, D: 7, C: 2      descending, ties in letter order
    ranking         analysis, B > A = D > C
    score           analysis, Scores:, A: 7, B: 9, C: 2, D: 7                               in letter order; SFT alone

Lines at the analysis's end that announce a ranking or scores already are removed.

Differs from GRRM's code: prompts are of our own writing; SFT rows, too, may show parts of groups and further orders, where the
analysis has a line for each candidate (`Translation A: …`), which then goes with its candidate.
"""

import json
import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
from pyarrow import parquet

from plaudit.data.conversations import kind_of
from plaudit.data.rows import read_rows
from plaudit.errors import DataError, PlauditError
from plaudit.files import file_written_aside
from plaudit.rewards.candidates import LETTERS
from plaudit.rewards.ranking_lines import rank, read_ranking, read_scores, write_ranking
from plaudit.rewards.templates import OURS, JudgeTemplate
from plaudit.types import Message, Prompt

Format = Literal["ranking_score", "ranking", "score"]
LOWEST, HIGHEST = 0, 10
VARIABLES = ("candidates", "answer", "lowest", "highest")
"""What `group_judge` gives its template besides what every template has."""
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
RL_SCHEMA = pa.schema(
    {
        "data_source": TEXT,
        "prompt": MESSAGES,
        "ability": TEXT,
        "reward_model": pa.struct({"style": TEXT, "ground_truth": TEXT}),
        "extra_info": pa.struct(
            {
                "src_text": TEXT, "src_lang": TEXT, "trg_lang": TEXT, "analysis": TEXT, "candidates": pa.list_(TEXT),
                "shuffle_indices": pa.list_(pa.int64()),
            }
        ),
    }
)  # fmt: skip
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
    analysis: str = "analysis"


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
    def characters(self) -> int:
        return len(self.text) + sum(map(len, self.candidates))


@dataclass
class Made:
    groups: int = 0
    rows: int = 0
    too_long: int = 0

    def __str__(self) -> str:
        left_out = f"; {self.too_long:,} groups were too long" if self.too_long else ""
        return f"{self.rows:,} rows of {self.groups - self.too_long:,} groups{left_out}"


def make_ranking_sft(
    files: Sequence[Path], out: Path, *, format: Format = "ranking_score", subgroup_augment: int = 0, shuffle_augment: int = 0,
    add_example: bool = False, max_characters: int | None = None, template: Path | None = None, columns: Columns = USUAL,
    seed: int = 0,
) -> Made:  # fmt: skip
    """Write conversations: the question about a group, and the analysis, ranking and scores it should be answered with."""
    ask, chance, made, rows = _Question(template, format, add_example), random.Random(seed), Made(), []
    for group in _groups(files, columns, max_characters, made, analysed=True):
        if not group.analysis:
            raise DataError(f"{group.where}: column {columns.analysis!r} is empty: an answer begins with the analysis")
        for shown in _shown(group, subgroup_augment, shuffle_augment, chance):
            analysis = group.analysis if shown.places == group.places else _reordered(group, shown.places, columns.analysis)
            rows.append({"messages": [*ask(shown), {"role": "assistant", "content": _answer(analysis, shown.by_letter, format)}]})
    chance.shuffle(rows)
    return _write(out, rows, SFT_SCHEMA, made)


def make_ranking_rl(
    files: Sequence[Path], out: Path, *, format: Literal["ranking_score", "ranking"] = "ranking_score", subgroup_augment: int = 0,
    shuffle_augment: int = 0, add_example: bool = False, max_characters: int | None = None, template: Path | None = None,
    columns: Columns = USUAL, data_source: str = "mt_ranking", seed: int = 0,
) -> Made:  # fmt: skip
    """Write prompts with the truth, for the `ranking` rule: the scores as JSON, or the ranking."""
    ask, chance, made, rows = _Question(template, format, add_example), random.Random(seed), Made(), []
    for group in _groups(files, columns, max_characters, made, analysed=False):
        for shown in _shown(group, subgroup_augment, shuffle_augment, chance):
            truth = json.dumps(shown.by_letter) if format == "ranking_score" else write_ranking(rank(shown.by_letter))
            source, target = shown.languages
            about = {
                "src_text": shown.text, "src_lang": source, "trg_lang": target, "analysis": shown.analysis,
                "candidates": list(shown.candidates), "shuffle_indices": list(shown.places),
            }  # fmt: skip
            rows.append(
                {
                    "data_source": data_source, "prompt": ask(shown), "ability": "ranking",
                    "reward_model": {"style": "rule", "ground_truth": truth}, "extra_info": about,
                }
            )  # fmt: skip
    return _write(out, rows, RL_SCHEMA, made)


# Groups --------------------------------------------------------------------------------------------------------------


def _groups(
    files: Sequence[Path], columns: Columns, max_characters: int | None, made: Made, *, analysed: bool
) -> Iterator[Candidates]:  # fmt: skip
    for file in files:
        rows = read_rows(file)
        rows.require("src_text", "src_lang", "trg_lang", columns.candidates, columns.scores)
        if analysed:
            rows.require(columns.analysis)
        for number, row in enumerate(rows):
            group = _group(row, columns, f"{rows.source}: row {number}")
            made.groups += 1
            if max_characters is not None and group.characters > max_characters:
                made.too_long += 1
            else:
                yield group


def _group(row: dict[str, Any], columns: Columns, where: str) -> Candidates:
    text, source, target = (_text(row[name], f"{where}: column {name!r}") for name in ("src_text", "src_lang", "trg_lang"))
    candidates, given, analysis = (row.get(name) for name in (columns.candidates, columns.scores, columns.analysis))
    if not isinstance(candidates, list) or not 2 <= len(candidates) <= len(LETTERS):
        found = len(candidates) if isinstance(candidates, list) else kind_of(candidates)
        raise DataError(f"{where}: column {columns.candidates!r} should have 2 to {len(LETTERS)} candidates, not {found}")
    candidates = tuple(_text(one, f"{where}: column {columns.candidates!r}, candidate {i}") for i, one in enumerate(candidates))
    if not isinstance(given, list) or len(given) != len(candidates):
        found = len(given) if isinstance(given, list) else kind_of(given)
        raise DataError(
            f"{where}: column {columns.scores!r} should have a score for each of the {len(candidates)} candidates, not {found}"
        )
    scores: list[Any] = [int(score) if isinstance(score, float) and score.is_integer() else score for score in given]
    for score in scores:
        if isinstance(score, bool) or not isinstance(score, int) or not LOWEST <= score <= HIGHEST:
            raise DataError(f"{where}: column {columns.scores!r}: {score!r} should be a whole number from {LOWEST} to {HIGHEST}")
    if not isinstance(analysis, str | None):
        raise DataError(f"{where}: column {columns.analysis!r} should be text, not {kind_of(analysis)}")
    places = tuple(range(len(candidates)))
    return Candidates(where, text, (source, target), candidates, tuple(scores), _unannounced(analysis or ""), places)


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{where} should be text, not {kind_of(value)}")
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


# Orders --------------------------------------------------------------------------------------------------------------


def _shown(group: Candidates, subgroups: int, further_orders: int, chance: random.Random) -> Iterator[Candidates]:
    """The group and parts of it, each in its own order and in further ones."""
    for some in [group.places, *_subsets(len(group.places), subgroups, chance)]:
        yield from (group.shown(order) for order in _orders(some, further_orders, chance))


def _subsets(count: int, most: int, chance: random.Random) -> list[tuple[int, ...]]:
    """Different subsets of two to all but one."""
    found: dict[tuple[int, ...], None] = {}
    while len(found) < min(most, 2**count - count - 2):
        found[tuple(sorted(chance.sample(range(count), chance.randint(2, count - 1))))] = None
    return list(found)


def _orders(some: Sequence[int], further: int, chance: random.Random) -> list[tuple[int, ...]]:
    """Their own order, and further different ones."""
    found = {tuple(some): None}
    while len(found) < min(1 + further, math.factorial(len(some))):
        found[tuple(chance.sample(some, len(some)))] = None
    return list(found)


def _reordered(group: Candidates, order: Sequence[int], column: str) -> str:
    """The analysis of part of a group, in any order: each line goes with its candidate and gets its new letter."""
    lines = [_LINE.fullmatch(line.strip()) for line in group.analysis.split("\n") if line.strip()]
    letters = LETTERS[: len(group.candidates)]
    found = [line for line in lines if line is not None and not _names(line[3], letters)]
    if len(found) < len(lines) or "".join(line[2] for line in found) != letters:
        raise DataError(
            f"{group.where}: column {column!r} cannot be taken apart, as --subgroup-augment and --shuffle-augment ask: it should "
            "have a line for each candidate and nothing else (Translation A: …), and none that names another"
        )
    return "\n".join(f"{found[i][1]}{letter}:{found[i][3]}" for letter, i in zip(LETTERS, order, strict=False))


def _names(text: str, letters: str) -> bool:
    """Whether it speaks of a candidate."""
    return any(letter in letters for found in _NAMED.findall(_QUOTED.sub("", text)) for letter in found if letter)


# Questions and answers -----------------------------------------------------------------------------------------------


class _Question:
    """What the model is asked about a group: `group_judge`'s prompt."""

    def __init__(self, template: Path | None, format: Format, add_example: bool):
        self.template = JudgeTemplate(template or OURS / "group.jinja", VARIABLES, "--template")
        self.format: Format = format
        self.example = f"\nAn example of an answer:\n\n{_answer(*EXAMPLE, format)}\n" if add_example else ""

    def __call__(self, group: Candidates) -> list[Message]:
        source, target = (LANGUAGES.get(name.lower(), name) for name in group.languages)
        task = f"Translate from {source} into {target}:\n\n{group.text}"
        shown = [{"letter": letter, "text": text} for letter, text in zip(LETTERS, group.candidates, strict=False)]
        variables = {"candidates": shown, "answer": self.format, "lowest": LOWEST, "highest": HIGHEST}
        text = self.template.render(Prompt(group.where, [{"role": "user", "content": task}]), variables)
        return [{"role": "user", "content": text + self.example}]


EXAMPLE = ("A leaves a word out. B and C say the same, and both read well.", {"A": 4, "B": 9, "C": 9})


def _answer(analysis: str, scores: dict[str, int], format: Format) -> str:
    tiers = rank(scores)
    letters = sorted(scores) if format == "score" else [letter for tier in tiers for letter in sorted(tier)]
    ranking, line = write_ranking(tiers), ", ".join(f"{letter}: {scores[letter]}" for letter in letters)
    ends = {"ranking_score": f"Ranking:\n{ranking}\nScores:\n{line}", "ranking": ranking, "score": f"Scores:\n{line}"}
    return f"{analysis}\n\n{ends[format]}"


def _write(out: Path, rows: list[dict[str, Any]], schema: pa.Schema, made: Made) -> Made:
    if not rows:
        raise DataError(f"no rows can be made: all {made.groups:,} groups are longer than --max-characters")
    made.rows = len(rows)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with file_written_aside(out) as aside:
            parquet.write_table(pa.Table.from_pylist(rows, schema), aside)
    except OSError as error:
        raise PlauditError(f"--out: {out} cannot be written: {error}") from None
    return made
