"""`plaudit eval rewards`: how often do rewards prefer the right response?"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from plaudit.data.conversations import Source
from plaudit.evaluation.benchmarks import Benchmark, Item, read_items
from plaudit.evaluation.compared import DIFFERENCES_NOTE, Arrays, compared, difference_name, prompt_numbers
from plaudit.evaluation.outcomes import RM_BENCH, Outcome, add_ties, figures, shown_groups, tie_key
from plaudit.evaluation.results import Cell, Evaluation, Figures, Table
from plaudit.evaluation.rewardbench import TIES, TIES_WEIGHTS, mean_of_sections, mean_of_subsets, present_sections, ties_scores
from plaudit.evaluation.scored import EvaluatedReward, RewardScores, score_rows
from plaudit.files import text_digest
from plaudit.loops.score import LocatedRow
from plaudit.statistics.figures import Resampling, estimate_all, estimate_means, means_by_name, weighted_means
from plaudit.statistics.length import length_bins

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
        failed = sum(outcome.failed for outcome in outcomes)
        about = {"items": len(items), "in both orders": reward.compares}
        details[reward.name] = reward.identity | about | scored.report() | {"failed": failed}
    parts = list(_parts(items))
    found = _estimate(items, parts, arrays, job.resampling)
    named = {name: found[name] for name in arrays}
    differences = {name: part for name, part in found.items() if name not in arrays}
    inputs = {"files": [str(source) for source in job.sources], "items": len(items)}
    curves = _length_curves(items, arrays, job.resampling)
    tables = _tables(parts, named, differences, details)
    return Evaluation("rewards", inputs, job.resampling, named, differences, details, {"length": curves}, tables)


# Scores --------------------------------------------------------------------------------------------------------------


def _outcomes(job: RewardsJob, reward: EvaluatedReward, items: Sequence[Item]) -> tuple[list[Outcome], RewardScores]:
    shown = [shown_groups(item, reward.compares) for item in items]
    rows = [row for item, groups in zip(items, shown, strict=True) for row in _rows(item, groups)]
    digest = text_digest(repr([(item.id, item.row, item.responses, item.right) for item in items]))
    identity = {"evaluation": "rewards", "items": f"{len(items)} with digest {digest}"}
    scored = score_rows(reward, rows, job.out / "scores", identity, tokenizer=job.tokenizer)
    values = iter(scored.values)
    outcomes = [Outcome(item, groups, [next(values) for _ in groups]) for item, groups in zip(items, shown, strict=True)]
    return outcomes, scored


def _rows(item: Item, groups: Sequence[tuple[int, ...]]) -> Iterator[LocatedRow]:
    """One row per shown group. Rewards do not see its id, which says in which order: of pairs the right response is given first."""
    for g, group in enumerate(groups):
        row = item.row | {"responses": [item.responses[i] for i in group]}
        yield row, f"{item.id}#{g}" if len(groups) > 1 else item.id, item.where


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
class BenchmarkPart:
    """Items that have a line of their own: a benchmark, one of its sections, a subset."""

    name: str
    benchmark: Benchmark
    items: np.ndarray
    level: int
    label: str
    subsets: Mapping[str, np.ndarray]
    """Its items by subset: their places among all items."""

    @property
    def whole(self) -> bool:
        return self.level == 0

    @property
    def adds_up(self) -> bool:
        """Its accuracy is not the mean over its items."""
        return self.benchmark == "rewardbench2" or (self.benchmark == "rewardbench" and self.level < 2)


def _parts(items: Sequence[Item]) -> Iterator[BenchmarkPart]:
    benchmarks = np.array([item.benchmark for item in items])
    subsets = np.array([item.subset for item in items])
    for benchmark, title in TITLES.items():
        own = benchmarks == benchmark
        if not own.any():
            continue
        places = {str(subset): np.flatnonzero(own & (subsets == subset)) for subset in dict.fromkeys(subsets[own])}
        yield BenchmarkPart(title, benchmark, own, 0, title, places)
        for section, inside in present_sections(places).items() if benchmark == "rewardbench" else ():
            part = {subset: places[subset] for subset in inside}
            yield BenchmarkPart(f"{title}/{section}", benchmark, own & np.isin(subsets, inside), 1, section, part)
        for subset, where in places.items() if len(places) > 1 or benchmark == "llmbar" else ():
            name = subset or "(none)"
            yield BenchmarkPart(f"{title}/{name}", benchmark, own & (subsets == subset), 2, name, {subset: where})


Key = tuple[str, str, str]
"""The part, what was evaluated (or a difference between two), and the figure."""


def _estimate(
    items: Sequence[Item], parts: Sequence[BenchmarkPart], arrays: Mapping[str, Arrays], resampling: Resampling
) -> dict[str, Figures]:
    """All figures of all parts: of each reward, and of the difference between two on the items that both have values for."""
    common = {
        difference_name(a, b): (_where_both(arrays[a], arrays[b]), _where_both(arrays[b], arrays[a]))
        for a, b in compared(list(arrays))
    }
    figures = {(name, figure): values for name, own in arrays.items() for figure, values in own.items()}
    figures |= {(name, "accuracy"): a["accuracy"] - b["accuracy"] for name, (a, b) in common.items()}
    values: dict[str, dict[tuple[str, str], np.ndarray]] = {}
    for part in parts:
        inside = {key: found[part.items] for key, found in figures.items()}
        values[part.name] = {key: found for key, found in inside.items() if not np.isnan(found).all()}
    counts = {(part, *key): int((~np.isnan(found)).sum()) for part, own in values.items() for key, found in own.items()}

    def statistic(weights: np.ndarray) -> dict[Key, np.ndarray]:
        means: dict[Key, np.ndarray] = {}
        for part in parts:
            own = values[part.name]
            found = means_by_name(weights[:, part.items], own)
            for name, figure in own if part.adds_up else ():
                if figure == "accuracy":
                    sides = [_added_up(part, weights, side) for side in common.get(name) or [arrays[name]]]
                    found[name, figure] = sides[0] if len(sides) == 1 else sides[0] - sides[1]
            means |= {(part.name, *key): drawn for key, drawn in found.items()}
        return means

    results: dict[str, Figures] = {name: {} for name in [*arrays, *common]}
    for (part, name, figure), estimate in estimate_all(statistic, counts, _prompts(items), resampling).items():
        results[name].setdefault(part, {})[figure] = estimate
    return results


def _added_up(part: BenchmarkPart, weights: np.ndarray, arrays: Arrays) -> np.ndarray:
    """The accuracy of a part by the rule of RewardBench, for each resample. `weights` and `arrays` are those of all items."""
    means = {}
    for subset, where in part.subsets.items():
        if part.benchmark == "rewardbench2" and subset == TIES:
            means[subset] = ties_scores(weights[:, where], {name: arrays[f"ties/{name}"][where] for name in TIES_WEIGHTS})
        else:
            means[subset] = weighted_means(weights[:, where], arrays["accuracy"][where])
    return mean_of_sections(means) if part.benchmark == "rewardbench" else mean_of_subsets(means)


def _where_both(own: Arrays, other: Arrays) -> Arrays:
    """What accuracies are computed from, on the items for which the other one has values too."""
    names = [name for name in own if name == "accuracy" or name.startswith("ties/")]
    # A prompt has no margin if the right answers have equal scores, which is no failure.
    needed = {name: "ties/preferred" if name == "ties/margin" else name for name in names}
    return {name: np.where(np.isnan(other[needed[name]]), np.nan, own[name]) for name in names}


def _prompts(items: Sequence[Item]) -> np.ndarray:
    """Items with the same prompt are drawn together, and so are the two of a prompt in RewardBench 2's Ties."""
    keys = [
        f"ties:{key[1]}" if (key := tie_key(item)) else json.dumps(item.row.get("prompt") or item.id, default=str) for item in items
    ]
    return prompt_numbers(keys)


def _length_curves(
    items: Sequence[Item], arrays: Mapping[str, Arrays], resampling: Resampling
) -> dict[str, list[dict[str, float]]]:
    """Accuracy by how much longer the right response is."""
    longer = np.array([_length_difference(item) for item in items])
    bins = length_bins(longer)
    accuracies = {
        (name, int(b)): np.where(bins == b, own["accuracy"], np.nan) for name, own in arrays.items() for b in np.unique(bins)
    }
    known = {key: found for key, found in accuracies.items() if not np.isnan(found).all()}
    found = estimate_means(known, _prompts(items), resampling)
    curves: dict[str, list[dict[str, float]]] = {name: [] for name in arrays}
    for (name, b), accuracy in found.items():
        inside = longer[bins == b]
        own = {"accuracy": accuracy.value, "low": accuracy.low, "high": accuracy.high, "items": accuracy.n}
        curves[name].append({"from": float(inside.min()), "to": float(inside.max()), **own})
    return curves


# Tables --------------------------------------------------------------------------------------------------------------


def _tables(
    parts: Sequence[BenchmarkPart],
    found: Mapping[str, Figures],
    differences: Mapping[str, Figures],
    details: Mapping[str, Mapping[str, Any]],
) -> list[Table]:
    names = list(found)

    def row(part: BenchmarkPart, figure: str, label: str) -> tuple[str, list[Cell]]:
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
        tables.append(Table("Differences in accuracy", [part.label for part in wholes], rows, note=DIFFERENCES_NOTE))
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


def _of(part: BenchmarkPart, parts: Sequence[BenchmarkPart]) -> str:
    return f" ({part.label})" if len(parts) > 1 else ""
