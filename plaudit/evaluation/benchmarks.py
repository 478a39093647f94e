"""Preference benchmarks → items: a prompt with several responses, of which it is known which are right.

A file's columns say which benchmark it is:

    LLMBar          input, output_1, output_2, label
    JudgeBench      question, response_A, response_B, label ("A>B", "B>A")
    RMB             conversation_input, chosen and reject, or bon_best and loser_list
    RewardBench 2   chosen and rejected as lists of texts, num_correct
    RM-Bench        chosen and rejected as lists of three texts (concise, detailed, in markdown)
    RewardBench     pairs whose subsets are RewardBench's
    pairs           one's own: chosen and rejected (texts or messages), usually with prompt

Rewards see a row without its responses and without what says which of them is right: the prompt, the ground truth, and other
columns in extra_info.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from plaudit.data.columns import CONVERSATIONS, PAIR, RESPONSES, parse_object, plain
from plaudit.data.conversations import Source
from plaudit.data.rollouts import parse_response, split_responses
from plaudit.errors import DataError
from plaudit.evaluation.rewardbench import SECTIONS, TIES
from plaudit.evaluation.row_files import Row, RowFile, hide_in_extra_info, open_files

Benchmark = Literal["pairs", "rewardbench", "rewardbench2", "rm_bench", "judgebench", "rmb", "llmbar"]

TELLING = {
    "chosen", "rejected", "reject", "label", "labels", "winner", "loser", "preference", "preferred", "better", "best", "worse",
    "worst", "margin", "correct", "incorrect", "judges",
}  # fmt: skip
"""Words in the names of columns that tell which response is right: `score_chosen`, `num_correct`."""
HINT = (
    "Preference rows have `chosen` and `rejected` (texts or messages) and `prompt`; the columns of LLMBar, JudgeBench, RMB, "
    "RM-Bench and RewardBench are known too (docs/evaluation.md)"
)


@dataclass(frozen=True)
class Item:
    """A prompt and its responses, in the order of the file."""

    id: str
    """Unique among all files."""
    own_id: str
    """As its file has it; else its number."""
    where: str
    """Its location, for error messages."""
    benchmark: Benchmark
    subset: str
    row: Row
    """What rewards see of it."""
    responses: tuple[str, ...]
    right: tuple[int, ...]
    """Which responses are right; all of them are better than all others."""

    @property
    def wrong(self) -> tuple[int, ...]:
        return tuple(i for i in range(len(self.responses)) if i not in self.right)

    @property
    def is_pair(self) -> bool:
        return len(self.responses) == 2


def read_items(sources: Sequence[Source], max_items: int | None = None) -> list[Item]:
    """The items of all files, in order."""
    return [item for file in open_files(sources, max_items) for item in _read(file)]


def _read(file: RowFile) -> Iterator[Item]:
    if not len(file.rows):
        raise DataError(f"{file.source}: has no rows")
    benchmark = detect(file.rows, file.source)
    parse, own_ids = _PARSERS[benchmark], set[str]()
    for one in file.located():
        where, own = one.where, one.own_id
        try:
            responses, right, seen, subset = parse(one.row, where)
        except KeyError as missing:
            raise DataError(f"{where}: {missing} is missing, and the first row is one of {benchmark}. {HINT}") from None
        if not right or len(responses) == len(right):
            raise DataError(f"{where}: has {len(responses)} responses, {len(right)} of them right; it takes one of each kind")
        if own in own_ids and benchmark == "rewardbench2" and subset == TIES:
            raise DataError(f"{where}: a row above has the id {own!r} too; in {TIES} an id says which two rows belong together")
        own_ids.add(own)
        subset = subset or _file_subset(benchmark, file.name)
        yield Item(one.id, own, where, benchmark, subset, _visible(seen), tuple(responses), right)


def _file_subset(benchmark: Benchmark, file: str) -> str:
    """LLMBar's sets are files."""
    return file if benchmark == "llmbar" else ""


def detect(rows: Iterable[Row], where: str) -> Benchmark:
    """Which benchmark a file is, by the columns of its first row, and for RewardBench by all subsets."""
    first = {column: plain(value) for column, value in next(iter(rows)).items() if value is not None}
    if {"input", "output_1", "output_2", "label"} <= first.keys():
        return "llmbar"
    if {"question", "response_A", "response_B", "label"} <= first.keys():
        return "judgebench"
    if "conversation_input" in first and ({"chosen", "reject"} <= first.keys() or {"bon_best", "loser_list"} <= first.keys()):
        return "rmb"
    if not set(PAIR) <= first.keys():
        raise DataError(f"{where}: has no pairs (found: {', '.join(first) or 'nothing'}). {HINT}")
    lists = [isinstance(first[side], list) and all(isinstance(one, str) for one in first[side]) for side in PAIR]
    if all(lists):
        return "rewardbench2" if "num_correct" in first else "rm_bench"
    if any(lists):
        raise DataError(f"{where}: of `chosen` and `rejected` one is a list of texts and the other is not. {HINT}")
    # One's own pairs may have some of these subsets too: others would be in no section, and so not in the total.
    known = {subset for subsets in SECTIONS.values() for subset in subsets}
    return "rewardbench" if all(str(row.get("subset")) in known for row in rows) else "pairs"


# One function per benchmark: responses, which of them are right, what rewards may see, and the subset ------------------------

Parsed = tuple[Sequence[str], tuple[int, ...], Row, str]


def _parse_pair(row: Row, where: str) -> Parsed:
    row, responses = split_responses(_without(row, *RESPONSES) | {side: row[side] for side in PAIR}, where)
    return responses, (0,), _without(row, *CONVERSATIONS, "subset"), str(row.get("subset") or "")


def _parse_rewardbench2(row: Row, where: str) -> Parsed:
    chosen, rejected = (_texts(row[side], side, where) for side in PAIR)
    if row["num_correct"] not in (len(chosen), str(len(chosen))):
        raise DataError(f"{where}: num_correct is {row['num_correct']}, and `chosen` has {len(chosen)} texts")
    kind, _, number = str(row.get("id", "")).partition(":")
    if row.get("subset") == TIES and (kind not in ("ref", "tied") or not number.isdigit()):
        raise DataError(f"{where}: of the subset {TIES} the id should be ref:N or tied:N, not {row.get('id')!r}")
    seen = _without(row, "num_rejected", "total_completions", "subset", "models")
    return [*chosen, *rejected], tuple(range(len(chosen))), seen, str(row.get("subset") or "")


def _parse_rm_bench(row: Row, where: str) -> Parsed:
    chosen, rejected = (_texts(row[side], side, where) for side in PAIR)
    if len(chosen) != 3 or len(rejected) != 3:
        raise DataError(
            f"{where}: RM-Bench has three texts each (concise, detailed, markdown), not {len(chosen)} and {len(rejected)}"
        )
    subset = str(row.get("subset") or row.get("domain") or "")
    return [*chosen, *rejected], (0, 1, 2), _without(row, "domain", "subset"), subset


def _parse_judgebench(row: Row, where: str) -> Parsed:
    labels = {"A>B": 0, "B>A": 1}
    label = str(row["label"]).replace(" ", "")
    if label not in labels:
        raise DataError(f"{where}: label should be A>B or B>A, not {row['label']!r:.80}")
    seen = {"prompt": row["question"], **_without(row, "question", "response_A", "response_B", "source", "response_model")}
    texts = [parse_response(row[name], where) for name in ("response_A", "response_B")]
    return texts, (labels[label],), seen, str(row.get("source") or "")


def _parse_rmb(row: Row, where: str) -> Parsed:
    best, others = (row["bon_best"], row["loser_list"]) if "bon_best" in row else (row["chosen"], [row["reject"]])
    if not isinstance(others, list):
        raise DataError(f"{where}: `loser_list` should be a list of answers, not {others!r:.80}")
    seen = {"prompt": parse_object(row["conversation_input"]), **_without(row, "loser_list", "category_path", "conversation_input")}
    texts = [parse_response(one, where) for one in (best, *others)]
    return texts, (0,), seen, str(row.get("category_path") or "")


def _parse_llmbar(row: Row, where: str) -> Parsed:
    label = str(row["label"])
    if label not in ("1", "2"):
        raise DataError(f"{where}: label should be 1 or 2, the number of the better output, not {row['label']!r:.80}")
    seen = {"prompt": row["input"], **_without(row, "input", "output_1", "output_2", "subset")}
    texts = [parse_response(row[name], where) for name in ("output_1", "output_2")]
    return texts, (int(label) - 1,), seen, str(row.get("subset") or "")


def _texts(value: Any, column: str, where: str) -> list[str]:
    if not isinstance(value, list):
        raise DataError(f"{where}: `{column}` should be a list of texts, as in the first row, not {value!r:.80}")
    return [parse_response(text, where) for text in value]


def _without(row: Row, *names: str) -> Row:
    return {name: value for name, value in row.items() if name not in names}


def _visible(row: Row) -> Row:
    """What rewards see: nothing that tells which response is right. (An id may, as `ref:1` of RewardBench 2.)"""
    seen = {name: value for name, value in _without(row, "id", *RESPONSES).items() if not _tells(name)}
    return hide_in_extra_info(seen, _tells)


def _tells(column: str) -> bool:
    return not TELLING.isdisjoint(re.split(r"[^a-z]+", str(column).lower()))


_PARSERS = {
    "pairs": _parse_pair,
    "rewardbench": _parse_pair,
    "rewardbench2": _parse_rewardbench2,
    "rm_bench": _parse_rm_bench,
    "judgebench": _parse_judgebench,
    "rmb": _parse_rmb,
    "llmbar": _parse_llmbar,
}
