"""Preference benchmarks → items: a prompt with several responses, of which it is known which are right.

A file's columns say which benchmark it is:

    LLMBar          input, output_1, output_2, label
    JudgeBench      question, response_A, response_B, label ("A>B", "B>A")
    RMB             conversation_input, chosen and reject, or bon_best and loser_list
    RewardBench 2   chosen and rejected as lists of texts, num_correct
    RM-Bench        chosen and rejected as lists of three texts (concise, detailed, in markdown)
    RewardBench     pairs whose subsets are RewardBench's
    pairs           one's own: chosen and rejected (texts or messages), usually with prompt

Rewards see a row without its responses and labels: what remains is the prompt, the ground truth, and other columns in extra_info.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from plaudit.data.columns import PAIR, parse_object, plain
from plaudit.data.conversations import Source, without_nulls
from plaudit.data.rollouts import parse_response, split_responses
from plaudit.data.row_ids import name_sources
from plaudit.errors import DataError
from plaudit.evaluation.rewardbench import SECTIONS, TIES

Benchmark = Literal["pairs", "rewardbench", "rewardbench2", "rm_bench", "judgebench", "rmb", "llmbar"]
Row = dict[str, Any]

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
    items = [item for source, name in zip(sources, name_sources(sources), strict=True) for item in _read(source, name, max_items)]
    ids = [item.id for item in items]
    if len(set(ids)) < len(ids):
        twice = next(item for i, item in enumerate(items) if item.id in ids[:i])
        raise DataError(f"{twice.where}: its id {twice.id!r} is that of an earlier row")
    return items


def _read(source: Source, name: str, max_items: int | None) -> Iterator[Item]:
    rows = source.rows()
    if not len(rows):
        raise DataError(f"{source}: has no rows")
    benchmark = detect(rows, str(source))
    parse = _PARSERS[benchmark]
    file = name.rpartition(".")[0] or name
    for number, (where, row) in enumerate(islice(rows.located(), max_items), 1):
        row = {column: plain(value) for column, value in (without_nulls(row) if rows.nulls_mean_absent else row).items()}
        own = str(row["id"] if row.get("id") is not None else number)
        id = f"{file}:{own}"
        try:
            responses, right, seen, subset = parse(row, where)
        except (KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{where}: is not a row of {benchmark}, as the others of its file are ({error!r}). {HINT}") from None
        if len(responses) < 2:
            raise DataError(f"{where}: has {len(responses)} response(s); comparing takes two")
        yield Item(id, own, where, benchmark, subset or _file_subset(benchmark, file), seen | {"id": id}, tuple(responses), right)


def _file_subset(benchmark: Benchmark, file: str) -> str:
    """LLMBar's sets are files."""
    return file if benchmark == "llmbar" else ""


def detect(rows: Iterable[Row], where: str) -> Benchmark:
    """Which benchmark a file is, by the columns of its first row."""
    first = {column: plain(value) for column, value in next(iter(rows)).items() if value is not None}
    if {"input", "output_1", "output_2", "label"} <= first.keys():
        return "llmbar"
    if {"response_A", "response_B", "label"} <= first.keys():
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
    return "rewardbench" if first.get("subset") in {subset for subsets in SECTIONS.values() for subset in subsets} else "pairs"


# One function per benchmark: responses, which of them are right, what rewards see, and the subset ------------------------

Parsed = tuple[Sequence[str], tuple[int, ...], Row, str]


def _parse_pair(row: Row, where: str) -> Parsed:
    row, responses = split_responses({name: value for name, value in row.items() if name not in ("response", "responses")}, where)
    return responses, (0,), _without(row, *PAIR, "subset", "margin"), str(row.get("subset") or "")


def _parse_rewardbench2(row: Row, where: str) -> Parsed:
    chosen, rejected = row["chosen"], row["rejected"]
    if int(row["num_correct"]) != len(chosen):
        raise DataError(f"{where}: num_correct is {row['num_correct']}, and `chosen` has {len(chosen)} texts")
    kind, _, number = str(row.get("id", "")).partition(":")
    if row.get("subset") == TIES and (kind not in ("ref", "tied") or not number.isdigit()):
        raise DataError(f"{where}: of the subset {TIES} the id should be ref:N or tied:N, not {row.get('id')!r}")
    seen = _without(row, *PAIR, "num_correct", "num_rejected", "total_completions", "subset", "models")
    return [*chosen, *rejected], tuple(range(len(chosen))), seen, str(row.get("subset") or "")


def _parse_rm_bench(row: Row, where: str) -> Parsed:
    chosen, rejected = row["chosen"], row["rejected"]
    if len(chosen) != 3 or len(rejected) != 3:
        raise DataError(
            f"{where}: RM-Bench has three texts each (concise, detailed, markdown), not {len(chosen)} and {len(rejected)}"
        )
    return (
        [*chosen, *rejected],
        (0, 1, 2),
        _without(row, *PAIR, "domain", "subset"),
        str(row.get("subset") or row.get("domain") or ""),
    )


def _parse_judgebench(row: Row, where: str) -> Parsed:
    labels = {"A>B": 0, "B>A": 1}
    label = str(row["label"]).replace(" ", "")
    if label not in labels:
        raise DataError(f"{where}: label should be A>B or B>A, not {row['label']!r:.80}")
    seen = _without(row, "response_A", "response_B", "label", "source", "response_model", "judges")
    texts = [parse_response(row[name], where) for name in ("response_A", "response_B")]
    return texts, (labels[label],), seen, str(row.get("source") or "")


def _parse_rmb(row: Row, where: str) -> Parsed:
    pair = "chosen" in row
    best, others = (row["chosen"], [row["reject"]]) if pair else (row["bon_best"], row["loser_list"])
    seen = _without(row, "chosen", "reject", "bon_best", "loser_list", "category_path", "conversation_input")
    seen["prompt"] = parse_object(row["conversation_input"])
    texts = [one["answer"] if isinstance(one, Mapping) else one for one in (best, *others)]
    return texts, (0,), seen, str(row.get("category_path") or "")


def _parse_llmbar(row: Row, where: str) -> Parsed:
    label = str(row["label"])
    if label not in ("1", "2"):
        raise DataError(f"{where}: label should be 1 or 2, the number of the better output, not {row['label']!r:.80}")
    seen = {"prompt": row["input"], **_without(row, "input", "output_1", "output_2", "label", "subset")}
    return [row["output_1"], row["output_2"]], (int(label) - 1,), seen, str(row.get("subset") or "")


def _without(row: Row, *names: str) -> Row:
    """What rewards see. (Not the right answers: a row's label would tell.)"""
    return {name: value for name, value in row.items() if name not in (*names, "id", "responses", "response")}


_PARSERS = {
    "pairs": _parse_pair,
    "rewardbench": _parse_pair,
    "rewardbench2": _parse_rewardbench2,
    "rm_bench": _parse_rm_bench,
    "judgebench": _parse_judgebench,
    "rmb": _parse_rmb,
    "llmbar": _parse_llmbar,
}
