"""`plaudit eval rewards`: how often do rewards prefer the right response?"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from plaudit.data.conversations import Source
from plaudit.evaluation.benchmarks import Benchmark, Item, read_items
from plaudit.evaluation.outcomes import ORDERS, RM_BENCH, Outcome, add_ties, figures, shown_groups, tie_key
from plaudit.evaluation.results import Cell, Evaluation, Figures, Table
from plaudit.evaluation.rewardbench import TIES, TIES_WEIGHTS, present_sections, section_means
from plaudit.evaluation.scored import EvaluatedReward, RewardScores, score_rows
from plaudit.files import text_digest
from plaudit.statistics.figures import Resampling, estimate_all, means_by_name, weighted_means
from plaudit.statistics.length import length_preference

TITLES: dict[Benchmark, str] = {
    "pairs": "pairs", "rewardbench": "RewardBench", "rewardbench2": "RewardBench 2", "rm_bench": "RM-Bench",
    "judgebench": "JudgeBench", "rmb": "RMB", "llmbar": "LLMBar",
}  # fmt: skip
ORDER_FIGURES = {
    "as_given": "accuracy as given",
    "swapped": "accuracy swapped",
    "both_right": "right in both",
    "consistency": "same winner in both",
    "position_bias": "same position wins in both",
    "first_position": "verdicts for the first position",
}
LENGTH_FIGURES = {
    "right_longer": "accuracy where the right one is longer",
    "right_shorter": "accuracy where it is shorter",
    "prefers_longer": "verdicts for the longer one",
    "ties": "ties",
}
MOST_DIFFERENCES = 10
"""More rewards than this make: only those against the first."""
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class RewardsJob:
    rewards: Sequence[EvaluatedReward]
    sources: Sequence[Source]
    out: Path
    resampling: Resampling
    max_items: int | None = None
    tokenizer: str | None = None


def evaluate_rewards(job: RewardsJob) -> Evaluation:
    items = read_items(job.sources, job.max_items)
    arrays: dict[str, Arrays] = {}
    details: dict[str, dict[str, Any]] = {}
    for reward in job.rewards:
        outcomes, scored = _outcomes(job, reward, items)
        arrays[reward.name] = _arrays(items, outcomes)
        details[reward.name] = reward.identity | {"items": len(items), "in both orders": reward.compares} | scored.report()
    parts = list(_parts(items))
    found = _estimate(items, parts, arrays, job.resampling)
    named = {name: found[name] for name in arrays}
    differences = {name: part for name, part in found.items() if name not in arrays}
    inputs = {"files": [str(source) for source in job.sources], "items": len(items)}
    curves = {name: _length_curve(items, array["accuracy"]) for name, array in arrays.items()}
    tables = _tables(parts, named, differences, details)
    return Evaluation("rewards", inputs, job.resampling, named, differences, details, {"length": curves}, tables)


# Scores --------------------------------------------------------------------------------------------------------------


def _outcomes(job: RewardsJob, reward: EvaluatedReward, items: Sequence[Item]) -> tuple[list[Outcome], RewardScores]:
    shown = [shown_groups(item, reward.compares) for item in items]
    rows = [row for item, groups in zip(items, shown, strict=True) for row in _rows(item, groups)]
    digest = text_digest(repr([(item.id, item.row, item.responses, item.right) for item in items]))
    scored = score_rows(reward, rows, job.out / "scores", {"items": digest}, tokenizer=job.tokenizer)
    values = iter(scored.values)
    outcomes = [Outcome(item, groups, [next(values) for _ in groups]) for item, groups in zip(items, shown, strict=True)]
    return outcomes, scored


def _rows(item: Item, groups: Sequence[tuple[int, ...]]) -> Iterator[tuple[dict[str, Any], str, str]]:
    for g, group in enumerate(groups):
        several = {"item": item.id, "order": ORDERS[g % 2]} if len(groups) > 1 else {}
        id = f"{item.id}#{g}" if several else item.id
        yield item.row | several | {"id": id, "responses": [item.responses[i] for i in group]}, id, item.where


# Figures -------------------------------------------------------------------------------------------------------------


def _arrays(items: Sequence[Item], outcomes: Sequence[Outcome]) -> Arrays:
    """Each figure of each item; NaN where an item has none."""
    by_item = [figures(outcome) for outcome in outcomes]
    names = dict.fromkeys(["accuracy", *(name for found in by_item for name in found)])
    arrays = {name: np.array([found.get(name, np.nan) for found in by_item]) for name in names}
    longer = np.array([_length_difference(item) for item in items])
    arrays["right_longer"] = np.where(longer > 0, arrays["accuracy"], np.nan)
    arrays["right_shorter"] = np.where(longer < 0, arrays["accuracy"], np.nan)
    if any(tie_key(item) for item in items):
        arrays |= {f"ties/{name}": np.full(len(items), np.nan) for name in TIES_WEIGHTS}
        add_ties(outcomes, arrays)
    return arrays


def _length_difference(item: Item) -> float:
    """Mean length of the right responses − that of the wrong ones, in characters."""
    lengths = np.array([len(response) for response in item.responses], float)
    return float(lengths[list(item.right)].mean() - lengths[list(item.wrong)].mean())


@dataclass(frozen=True)
class Part:
    """Items that have a line of their own: a benchmark, one of its sections, a subset."""

    name: str
    benchmark: Benchmark
    items: np.ndarray
    level: int
    label: str
    section: str = ""

    @property
    def whole(self) -> bool:
        return self.level == 0

    @property
    def adds_up(self) -> bool:
        """Its accuracy is not the mean over its items."""
        return self.benchmark == "rewardbench2" or (self.benchmark == "rewardbench" and self.level < 2)


def _parts(items: Sequence[Item]) -> Iterator[Part]:
    benchmarks = np.array([item.benchmark for item in items])
    subsets = np.array([item.subset for item in items])
    for benchmark, title in TITLES.items():
        own = benchmarks == benchmark
        if not own.any():
            continue
        yield Part(title, benchmark, own, 0, title)
        found = list(dict.fromkeys(subsets[own]))
        if benchmark == "rewardbench":
            for section in present_sections(found):
                yield Part(f"{title}/{section}", benchmark, own, 1, section, section)
        if len(found) > 1 or benchmark == "llmbar":
            for subset in found:
                yield Part(f"{title}/{subset or '(none)'}", benchmark, own & (subsets == subset), 2, subset or "(none)")


Key = tuple[str, str]
"""What was evaluated, or a difference between two; and the figure."""


def _estimate(
    items: Sequence[Item], parts: Sequence[Part], arrays: Mapping[str, Arrays], resampling: Resampling
) -> dict[str, Figures]:
    """All figures of all parts: of each reward, and of the difference between two on the items that both have values for."""
    common = {f"{a} - {b}": (_where_both(arrays[a], arrays[b]), _where_both(arrays[b], arrays[a])) for a, b in _compared(arrays)}
    results: dict[str, Figures] = {name: {} for name in [*arrays, *common]}
    for part in parts:
        values = {(name, figure): own[figure][part.items] for name, own in arrays.items() for figure in own}
        values |= {(name, "accuracy"): (a["accuracy"] - b["accuracy"])[part.items] for name, (a, b) in common.items()}
        counts = {key: int((~np.isnan(found)).sum()) for key, found in values.items()}
        values = {key: found for key, found in values.items() if counts[key]}
        statistic = partial(_statistic, part, items, values, arrays, common)
        for (name, figure), estimate in estimate_all(statistic, counts, _prompt_numbers(items), resampling).items():
            results[name].setdefault(part.name, {})[figure] = estimate
    return results


def _statistic(
    part: Part,
    items: Sequence[Item],
    values: Mapping[Key, np.ndarray],
    arrays: Mapping[str, Arrays],
    common: Mapping[str, tuple[Arrays, Arrays]],
    weights: np.ndarray,
) -> dict[Key, np.ndarray]:
    means = means_by_name(weights[:, part.items], values)
    if part.adds_up:
        for name, figure in values:
            if figure == "accuracy" and name in arrays:
                means[name, figure] = _added_up(part, items, weights, arrays[name])
            elif figure == "accuracy":
                first, second = (_added_up(part, items, weights, own) for own in common[name])
                means[name, figure] = first - second
    return means


def _added_up(part: Part, items: Sequence[Item], weights: np.ndarray, arrays: Arrays) -> np.ndarray:
    """The accuracy of a part by the rule of RewardBench, for each resample. `weights` and `arrays` are those of all items."""
    subsets = [item.subset for item in items]
    inside = [subset for subset, own in zip(subsets, part.items, strict=True) if own]
    if part.benchmark == "rewardbench":
        credits = np.where(part.items, arrays["accuracy"], np.nan)
        sections = [part.section] if part.section else present_sections(inside)
        return np.mean([section_means(weights, credits, subsets, section) for section in sections], axis=0)
    if part.whole:
        names, all_names = dict.fromkeys(inside), np.array(subsets)
        parts = [Part(name, part.benchmark, part.items & (all_names == name), 2, name) for name in names]
        return np.mean([_added_up(subset, items, weights, arrays) for subset in parts], axis=0)
    own = weights[:, part.items]
    if part.label == TIES:
        means = {name: np.nan_to_num(weighted_means(own, arrays[f"ties/{name}"][part.items])) for name in TIES_WEIGHTS}
        return np.sum([weight * means[name] for name, weight in TIES_WEIGHTS.items()], axis=0)
    return weighted_means(own, arrays["accuracy"][part.items])


def _where_both(own: Arrays, other: Arrays) -> Arrays:
    """What accuracies are computed from, on the items for which the other one has values too."""
    names = [name for name in own if name == "accuracy" or name.startswith("ties/")]
    return {name: np.where(np.isnan(other[name]), np.nan, own[name]) for name in names}


def _compared(arrays: Mapping[str, Arrays]) -> list[tuple[str, str]]:
    """Each with each; of many, each with the first."""
    names = list(arrays)
    pairs = list(combinations(names, 2))
    return pairs if len(pairs) <= MOST_DIFFERENCES else [(names[0], name) for name in names[1:]]


def _prompt_numbers(items: Sequence[Item]) -> np.ndarray:
    """The two items of a prompt in RewardBench 2's Ties are drawn together."""
    keys = [item.id if (key := tie_key(item)) is None else f"ties:{key[1]}" for item in items]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return np.array([numbers[key] for key in keys])


def _length_curve(items: Sequence[Item], accuracy: np.ndarray) -> list[dict[str, float]]:
    """Accuracy by how much longer the right response is."""
    bins = length_preference(np.array([_length_difference(item) for item in items]), accuracy)["bins"]
    return [
        {"from": one["low"], "to": one["high"], "accuracy": one["accuracy"].value, "low": one["accuracy"].low,
         "high": one["accuracy"].high, "items": one["accuracy"].n}
        for one in bins
    ]  # fmt: skip


# Tables --------------------------------------------------------------------------------------------------------------


def _tables(
    parts: Sequence[Part],
    found: Mapping[str, Figures],
    differences: Mapping[str, Figures],
    details: Mapping[str, Mapping[str, Any]],
) -> list[Table]:
    names = list(found)

    def row(part: Part, figure: str, label: str) -> tuple[str, list[Cell]]:
        return label, [found[name].get(part.name, {}).get(figure) for name in names]

    accuracy = [row(part, "accuracy", "  " * part.level + part.label) for part in parts]
    for part in parts:
        if part.benchmark == "rm_bench" and part.whole:
            accuracy += [row(part, figure, f"  {figure}") for figure in RM_BENCH]
    accuracy.append(("items without a value", [details[name]["failed"] for name in names]))
    tables = [Table("Accuracy", names, accuracy)]
    wholes = [part for part in parts if part.whole]
    if differences:
        rows = [(name, [own.get(part.name, {}).get("accuracy") for part in wholes]) for name, own in differences.items()]
        note = "Of the items that both have values for; an interval without 0 is a difference that chance does not explain."
        tables.append(Table("Differences in accuracy", [part.label for part in wholes], rows, note=note))
    judges = [name for name in names if any("consistency" in part for part in found[name].values())]
    if judges:
        rows = [
            (f"{ORDER_FIGURES[figure]}{_of(part, wholes)}", [found[name].get(part.name, {}).get(figure) for name in judges])
            for part in wholes
            for figure in ORDER_FIGURES
        ]
        tables.append(Table("Both orders, for rewards that compare", judges, rows))
    rows = [row(part, figure, f"{label}{_of(part, wholes)}") for part in wholes for figure, label in LENGTH_FIGURES.items()]
    tables.append(Table("Length and ties", names, rows))
    return tables


def _of(part: Part, parts: Sequence[Part]) -> str:
    return f" ({part.label})" if len(parts) > 1 else ""
