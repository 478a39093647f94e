"""`plaudit eval ranking`: how well do rewards rank the candidates of scored groups?

Judges of groups, of pairs and of single responses, reward models and rules all give every candidate a score, so they are compared
on the same groups. Of each group, the mean over its runs of:

    accuracy      share of pairs whose relation (>, =, <) equals that of the reference scores; a tie against a non-tie is wrong
    acc_eq        the same where predicted scores that differ by at most ε are ties; ε is the best one for the part of the data that
                  is shown. Intervals hold ε at its value for all items, so they say nothing about the choice of ε
    tau_b         Kendall's, of the groups where it is defined: neither side gives all candidates the same score
    ties          share of pairs that the reward gives the same score
    soft_pairwise_accuracy    of systems, where candidates have them: 1 − mean |p_human − p_metric| over pairs of systems

A group with an answer of the judge that cannot be parsed, after all retries, counts 0 in accuracy and acc_eq, and is counted. It is
a result, so it is not scored again. A group on which a reward failed for another reason (a timeout, a dead server) is left out and
reported. Judges that compare see the candidates in their own, shuffled order, as in training.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from plaudit.data.conversations import Source
from plaudit.evaluation.compared import (
    ALL,
    Arrays,
    Part,
    difference_table,
    estimate_parts,
    prompt_numbers,
    split_parts,
)
from plaudit.evaluation.groups import GroupColumns, RankedGroup, read_groups
from plaudit.evaluation.results import Cell, Evaluation, Figures, Table, show_cell
from plaudit.evaluation.row_files import prompt_key
from plaudit.evaluation.scored import EvaluatedReward, RewardScores, change_rewards, score_rows, sum_usage
from plaudit.evaluation.systems import SYSTEM_RESAMPLES, SystemScores, by_system
from plaudit.files import text_digest
from plaudit.recipe import RewardSettings
from plaudit.recipe.reward_models import JudgeSampling
from plaudit.recipe.rewards import nested_rewards
from plaudit.statistics.figures import Resampling
from plaudit.statistics.ranking import acc_eq, best_epsilon, kendall_tau_b

UNREADABLE = "unparsable"
"""The failure that counts 0."""
SOFT = "soft_pairwise_accuracy"
FIGURES = {
    "accuracy": "pairwise accuracy",
    "acc_eq": "acc_eq",
    "tau_b": "Kendall's τ_b",
    SOFT: "soft pairwise accuracy",
}


@dataclass(frozen=True)
class RankingJob:
    rewards: Sequence[EvaluatedReward]
    sources: Sequence[Source]
    out: Path
    resampling: Resampling
    columns: GroupColumns
    runs: int = 1
    max_items: int | None = None
    tokenizer: str | None = None


def evaluate_ranking(job: RankingJob) -> Evaluation:
    groups = read_groups(job.sources, job.columns, job.max_items)
    digest = text_digest(repr([group.row for group in groups]))
    predictions: dict[str, Predictions] = {}
    details: dict[str, dict[str, Any]] = {}
    for reward in job.rewards:
        runs = _score_runs(job, reward, groups, digest)
        own = predictions[reward.name] = Predictions.of(runs, groups)
        counts = {"failed": int(own.failed_RG.any(axis=0).sum()), "unreadable": int(own.unreadable_RG.sum())}
        details[reward.name] = reward.identity | {"items": len(groups), "runs": len(runs)} | _report(runs) | counts
    parts = split_parts(
        {
            "language pair": [group.languages for group in groups],
            "data source": [group.data_source for group in groups],
            "file": [group.file for group in groups],
        }
    )
    epsilons = {name: {part.name: own.best_epsilon(part) for part in parts} for name, own in predictions.items()}
    prompts = prompt_numbers([prompt_key(group.row, group.id) for group in groups])
    found, differences = estimate_parts(
        parts,
        lambda part: {name: own.arrays(part, epsilons[name][part.name]) for name, own in predictions.items()},
        prompts,
        job.resampling,
    )
    _add_systems(parts, groups, predictions, prompts, job.resampling, found, differences)
    for name, own in epsilons.items():
        details[name]["epsilon"] = own
    inputs = {
        "files": [str(source) for source in job.sources],
        "groups": len(groups),
        "candidates": sum(len(group.scores) for group in groups),
        "runs": job.runs,
        "resamples of soft pairwise accuracy": SYSTEM_RESAMPLES,
    }
    tables = _tables(parts, job, found, differences, details)
    return Evaluation("ranking", inputs, job.resampling, found, differences, details, tables=tables)


# Scores --------------------------------------------------------------------------------------------------------------


def samples(reward: EvaluatedReward) -> bool:
    """Whether its model samples, so that another seed may give other scores."""
    inside = [inner for one in reward.rewards for _, inner in nested_rewards(one, one.label)]
    return any(_sampling(inner) is not None for inner in inside)


def _sampling(reward: RewardSettings) -> JudgeSampling | None:
    sampling = getattr(reward, "sampling", None)
    return sampling if isinstance(sampling, JudgeSampling) and sampling.temperature > 0 else None


def with_seed_of(reward: EvaluatedReward, run: int) -> EvaluatedReward:
    """The reward in a run, counted from 0: each has the next seed."""

    def seed(one: RewardSettings) -> dict[str, Any]:
        sampling = _sampling(one)
        return {} if sampling is None else {"sampling": sampling.model_copy(update={"seed": sampling.seed + run})}

    rewards = tuple(change_rewards(one, seed) for one in reward.rewards)
    return replace(reward, name=f"{reward.name}-run{run + 1}", rewards=rewards) if run else reward


def _score_runs(job: RankingJob, reward: EvaluatedReward, groups: Sequence[RankedGroup], digest: str) -> list[RewardScores]:
    rows = [(group.row, group.id, group.where) for group in groups]
    return [
        score_rows(
            with_seed_of(reward, run), rows, job.out / "scores", {"evaluation": "ranking", "items": digest},
            tokenizer=job.tokenizer, given_order=False, final_causes=frozenset({UNREADABLE}),
        )
        for run in range(job.runs if samples(reward) else 1)
    ]  # fmt: skip


def _report(runs: Sequence[RewardScores]) -> dict[str, Any]:
    """Of all runs together."""
    return {
        "failures": dict(sum((run.failures for run in runs), Counter[str]())),
        "messages": {cause: message for run in reversed(runs) for cause, message in run.messages.items()},
        "malformed": sum(run.malformed for run in runs),
        "usage": sum_usage(*(run.usage for run in runs)),
        "responses_per_s": round(fmean(run.per_s for run in runs), 1),
    }


# Figures -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Predictions:
    """A reward's scores of all candidates. R runs, G groups."""

    truth_G: Sequence[np.ndarray]
    scores_RG: Sequence[Sequence[np.ndarray]]
    """Per run and group, those of its candidates; NaN where one has none."""
    unreadable_RG: np.ndarray
    """Groups with an answer that cannot be parsed, and no other failure."""
    failed_RG: np.ndarray
    """Groups with another failure."""

    @classmethod
    def of(cls, runs: Sequence[RewardScores], groups: Sequence[RankedGroup]) -> "Predictions":
        causes_RG = [[set(causes) - {None} for causes in run.causes] for run in runs]
        return cls(
            [group.scores for group in groups],
            [[np.array(values, dtype=np.float64) for values in run.values] for run in runs],
            np.array([[causes == {UNREADABLE} for causes in run] for run in causes_RG]),
            np.array([[bool(causes - {UNREADABLE}) for causes in run] for run in causes_RG]),
        )

    def best_epsilon(self, part: Part) -> float:
        """The ε of its readable groups in all runs together; those that count 0 would not change it."""
        predicted, truth = [], []
        for run, scores_G in enumerate(self.scores_RG):
            readable = [g for g in part.items if not (self.unreadable_RG[run, g] or self.failed_RG[run, g])]
            predicted += [scores_G[g] for g in readable]
            truth += [self.truth_G[g] for g in readable]
        return best_epsilon(predicted, truth)

    def arrays(self, part: Part, epsilon: float) -> Arrays:
        """The figures of a part's groups."""
        truth = [self.truth_G[g] for g in part.items]
        by_run: dict[str, list[np.ndarray]] = {"accuracy": [], "acc_eq": [], "tau_b": [], "ties": []}
        for run, scores_G in enumerate(self.scores_RG):
            predicted = [scores_G[g] for g in part.items]
            unreadable, failed = self.unreadable_RG[run, part.items], self.failed_RG[run, part.items]
            nothing = unreadable | failed
            for figure, tolerance in (("accuracy", 0.0), ("acc_eq", epsilon)):
                agreement = np.where(unreadable, 0.0, acc_eq(predicted, truth, tolerance))
                by_run[figure].append(np.where(failed, np.nan, agreement))
            tau_b = np.array([kendall_tau_b(p, t) for p, t in zip(predicted, truth, strict=True)])
            by_run["tau_b"].append(np.where(nothing, np.nan, tau_b))
            ties = acc_eq(predicted, [np.zeros(len(t)) for t in truth], 0.0)
            by_run["ties"].append(np.where(nothing, np.nan, ties))
        return {figure: _mean_of_runs(np.array(arrays)) for figure, arrays in by_run.items()}


def _mean_of_runs(values_RG: np.ndarray) -> np.ndarray:
    """Of the runs that have a value; NaN if none has."""
    known_RG = ~np.isnan(values_RG)
    counts_G = known_RG.sum(axis=0)
    sums_G = np.where(known_RG, values_RG, 0.0).sum(axis=0)
    return np.divide(sums_G, counts_G, out=np.full(len(sums_G), np.nan), where=counts_G > 0)


# Systems -------------------------------------------------------------------------------------------------------------


def _add_systems(
    parts: Sequence[Part],
    groups: Sequence[RankedGroup],
    predictions: Mapping[str, Predictions],
    prompts: np.ndarray,
    resampling: Resampling,
    figures: dict[str, Figures],
    differences: dict[str, Figures],
) -> None:
    """Soft pairwise accuracy, of the groups whose candidates have systems, added to the figures."""
    for part in parts:
        named = [(int(g), systems) for g in part.items if (systems := groups[g].systems) is not None]
        if len({system for _, systems in named for system in systems}) < 2:
            continue
        systems = [own for _, own in named]
        scores = SystemScores(
            by_system(systems, [groups[g].scores for g, _ in named]),
            {
                name: [by_system(systems, [scores_G[g] for g, _ in named]) for scores_G in own.scores_RG]
                for name, own in predictions.items()
            },
        )
        numbers = np.unique(prompts[[g for g, _ in named]], return_inverse=True)[1]
        for name, estimate in scores.estimate(numbers, resampling).items():
            results = figures if name in predictions else differences
            results.setdefault(name, {}).setdefault(part.name, {})[SOFT] = estimate


# Tables --------------------------------------------------------------------------------------------------------------


def _tables(
    parts: Sequence[Part],
    job: RankingJob,
    found: Mapping[str, Figures],
    differences: Mapping[str, Figures],
    details: Mapping[str, Mapping[str, Any]],
) -> list[Table]:
    names = list(details)

    def row(part: str, figure: str) -> list[Cell]:
        return [found.get(name, {}).get(part, {}).get(figure) for name in names]

    def numbers(key: str) -> list[Cell]:
        return [details[name][key] for name in names]

    shown = {figure: label for figure, label in FIGURES.items() if any(row(ALL, figure))}
    rows: list[tuple[str, Sequence[Cell]]] = []
    for figure, label in shown.items():
        cells = row(ALL, figure)
        rows.append((label, [show_cell(cell, percent=False) for cell in cells] if figure == "tau_b" else cells))
        if figure == "acc_eq":
            rows.append(("  with ε", [f"{details[name]['epsilon'][ALL]:.4g}" for name in names]))
    rows.append(("pairs that it ties", row(ALL, "ties")))
    rows.append(("unreadable answers, which count 0", numbers("unreadable")))
    rows.append(("groups without a value", numbers("failed")))
    rows.append(("runs", numbers("runs")))
    tables = [Table("Ranking", names, rows, note=" ".join(_notes(job, SOFT in shown)))]
    for by in dict.fromkeys(part.by for part in parts if part.by):
        inside = [(part.label, row(part.name, "accuracy")) for part in parts if part.by == by]
        tables.append(Table(f"Pairwise accuracy by {by}", names, inside))
    if differences:
        tables.append(difference_table("Differences", differences, shown, plain={"tau_b"}))
    return tables


def _notes(job: RankingJob, systems: bool) -> Iterator[str]:
    once = [reward.name for reward in job.rewards if not samples(reward)]
    if job.runs > 1 and once:
        yield f"Scored once, because nothing is sampled at a temperature above 0: {', '.join(once)}."
    if systems:
        yield f"Soft pairwise accuracy: intervals by {SYSTEM_RESAMPLES} resamples of the segments."
