"""Rows scored by a reward that is evaluated: one resumable file per reward, with each judge's prompt and answer."""

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from plaudit.audit.certificate import digest_rewards
from plaudit.errors import PlauditError, RunError
from plaudit.evaluation.compared import difference_name
from plaudit.files import write_atomic
from plaudit.inputs import load_rewards
from plaudit.json_files import UnreadableJson, read_object
from plaudit.loops.score import LocatedRow, RowsToScore, ScoreJob, results_of, score
from plaudit.recipe import RewardSettings
from plaudit.recipe.rewards import nested_rewards
from plaudit.reward_models.model_registry import UsageTotals
from plaudit.rewards.combine import labels_needed
from plaudit.rewards.judges.group_judge import GroupJudge
from plaudit.rewards.judges.pairwise_judge import PairwiseJudge
from plaudit.rewards.reward import Reward

LONGEST_NAME = 200
"""In bytes: a file's name has at most 255."""


@dataclass(frozen=True)
class EvaluatedReward:
    """The rewards of a recipe, which are evaluated together, by a name."""

    name: str
    recipe: Path
    rewards: tuple[RewardSettings, ...]

    @property
    def compares(self) -> bool:
        """Whether a response's value depends on the others, and so perhaps on their order."""
        needed = [reward for reward in self.rewards if reward.label in labels_needed(self.rewards)]
        inside = [one for reward in needed for _, one in nested_rewards(reward, reward.label)]
        return any(isinstance(one, Reward) and not one.scores_alone for one in inside)

    @property
    def identity(self) -> dict[str, Any]:
        return {"recipe": str(self.recipe), "rewards": digest_rewards(self.rewards)}


def load_evaluated(recipes: Sequence[str]) -> list[EvaluatedReward]:
    """The rewards of recipes, each named by its file, or as in NAME=R.yaml."""
    named = name_paths(recipes, lambda path: path.stem, "--rewards")
    return [EvaluatedReward(name, path, load_rewards(path)) for name, path in named.items()]


def name_paths(given: Sequence[str], short: Callable[[Path], str], option: str) -> dict[str, Path]:
    """What is evaluated side by side, each with a name of its own: that of NAME=PATH, else a short one."""
    split = [_split_name(one) for one in given]
    shorts = [name or short(path) for name, path in split]
    names = [
        name or (brief if shorts.count(brief) == 1 else f"{path.parent.name}/{brief}")
        for (name, path), brief in zip(split, shorts, strict=True)
    ]
    files = [file_name(name) for name in names]
    twice = next((name for name, file in zip(names, files, strict=True) if files.count(file) > 1), None)
    if twice is not None:
        before = f"{option} " if option.startswith("--") else ""
        raise PlauditError(f"{option}: two of them are called {twice!r}; name them: {before}first={split[0][1]} …")
    _require_usable(names, option)
    return {name: path for name, (_, path) in zip(names, split, strict=True)}


def _require_usable(names: Sequence[str], option: str) -> None:
    """Names of what is evaluated are those of files, and eval.json has differences and runs by names made from them."""
    differences = {difference_name(a, b) for a in names for b in names}
    for name in names:
        if len(name.encode()) > LONGEST_NAME:
            raise PlauditError(f"{option}: the name {name[:40]}… has {len(name):,} characters; choose a shorter one")
        run = re.fullmatch(r"(.+)-run\d+", name)
        if name in differences or (run and run[1] in names):
            raise PlauditError(f"{option}: {name!r} is also what a part of the result is called; choose another name")
        if name in (".", ".."):
            raise PlauditError(f"{option}: {name!r} is a folder; choose another name, as in NAME=PATH")


def file_name(name: str) -> str:
    """Of what belongs to a reward or a model."""
    return name.replace("/", "-")


def _split_name(given: str) -> tuple[str | None, Path]:
    name, equals, path = given.partition("=")
    exists = os.path.exists(given)  # False, rather than an error, if it is too long for a path
    return (name, Path(path)) if equals and not exists else (None, Path(given))


def change_rewards(reward: RewardSettings, changes: Callable[[RewardSettings], dict[str, Any]]) -> RewardSettings:
    """The reward with changed settings, and so the rewards inside it."""
    fields = {name: getattr(reward, name) for name in type(reward).model_fields}
    inner = {name: change_rewards(one, changes) for name, one in fields.items() if isinstance(one, RewardSettings)}
    return reward.model_copy(update=inner | changes(reward))


def in_given_order(reward: RewardSettings) -> RewardSettings:
    """The same reward, but a judge that compares shows the responses once, in the order of the samples."""

    def once(one: RewardSettings) -> dict[str, Any]:
        match one:
            case PairwiseJudge():
                return {"order": "given", "both_orders": False}
            case GroupJudge():
                return {"order": "given"}
        return {}

    return change_rewards(reward, once)


def without_substitutes(reward: RewardSettings) -> RewardSettings:
    """The same reward without the values that training uses where it fails: they would hide its failures."""
    return change_rewards(reward, lambda _: {"on_failure": "drop"})


@dataclass(frozen=True)
class RewardScores:
    values: list[list[float | None]]
    """The reward of each response of each row."""
    failed: int
    """Rows on which a reward failed, except by a cause that is a result."""
    malformed: int
    """Responses."""
    failures: Counter[str]
    """Responses without a value, by cause."""
    messages: Mapping[str, str]
    """The first message of each cause."""
    usage: Mapping[str, UsageTotals] = field(default_factory=dict)
    per_s: float = 0.0
    """Responses scored per second; 0 if all scores were there."""
    causes: list[list[str | None]] = field(default_factory=list)
    """Why a response has no value."""
    parts: list[list[Mapping[str, float]]] = field(default_factory=list)
    """What each reward, and each of its parts, gave a response."""
    is_malformed: list[list[bool]] = field(default_factory=list)
    views: list[list[Mapping[str, str | None]]] = field(default_factory=list)
    """What each reward saw of a response."""

    def report(self) -> dict[str, Any]:
        return {
            "failed": self.failed,
            "failures": dict(self.failures),
            "messages": dict(self.messages),
            "malformed": self.malformed,
            "usage": {name: dict(totals) for name, totals in self.usage.items()},
            "responses_per_s": round(self.per_s, 1),
        }


def score_rows(
    reward: EvaluatedReward,
    rows: Sequence[LocatedRow],
    folder: Path,
    identity: Mapping[str, Any],
    *,
    tokenizer: str | None = None,
    given_order: bool = True,
    final_causes: frozenset[str] = frozenset(),
    label: str = "",
) -> RewardScores:
    """Score what the reward's file lacks, and again what failed.

    `given_order`: judges that compare show responses in the order of the row, once, and not as in training. `final_causes`:
    failures that are results, which are not scored again. `label`: of the progress bar, if not the reward's name.
    """
    out = folder / f"{file_name(reward.name)}.jsonl"
    _require_same_data(out, identity)
    settings = [without_substitutes(one) for one in reward.rewards]
    if given_order:
        settings = [in_given_order(one) for one in settings]
    to_score = RowsToScore(lambda: iter(rows), len(rows), identity)
    job = ScoreJob(
        settings, to_score, out, tokenizer, details=True, final_causes=final_causes, files_may_change=False,
        report_usage=partial(_add_usage, out, _read_usage(out)), verb="eval", label=label or reward.name,
    )  # fmt: skip
    summary = score(job)
    with out.open(encoding="utf-8", newline="\n") as file:
        scored = [json.loads(line) for line in file]
    results = [results_of(row) for row in scored]
    return RewardScores(
        values=[[result["reward"] for result in row] for row in results],
        causes=[[None if result["reward"] is not None else result["failure"]["cause"] for result in row] for row in results],
        parts=[[result["parts"] for result in row] for row in results],
        is_malformed=[[result["malformed"] for result in row] for row in results],
        views=[[_views(one) for one in _listed(row["by_reward"])] for row in scored],
        failed=summary.rows_without_value,
        malformed=summary.malformed,
        failures=summary.failures,
        messages=summary.messages,
        usage=_read_usage(out),
        per_s=summary.per_s,
    )


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _views(by_reward: Mapping[str, Mapping[str, Any]]) -> dict[str, str | None]:
    return {name: one["view"] for name, one in by_reward.items()}


def _require_same_data(out: Path, identity: Mapping[str, Any]) -> None:
    """A folder has one evaluation: that of other data, by other rewards, would be lost when eval.json is written."""
    for file in sorted(out.parent.glob("*.inputs.json")):
        with suppress(UnreadableJson):
            before = read_object(file)
            if file.name != f"{out.name}.inputs.json" and any(before.get(name) != identity[name] for name in identity):
                raise RunError(f"--out: {out.parent} has scores of other data ({file.name}); choose another --out")


def _read_usage(out: Path) -> dict[str, UsageTotals]:
    """Usage of all commands that have scored this file, which is kept next to it."""
    usage = dict[str, Any]()
    if out.exists():
        with suppress(UnreadableJson):
            usage = read_object(_usage_file(out))
    return usage


def _add_usage(out: Path, before: Mapping[str, UsageTotals], now: Mapping[str, UsageTotals]) -> None:
    if total := sum_usage(before, now):
        write_atomic(_usage_file(out), json.dumps(total))


def _usage_file(out: Path) -> Path:
    return out.with_name(f"{out.name}.usage.json")


def sum_usage(*usages: Mapping[str, UsageTotals]) -> dict[str, UsageTotals]:
    """By model, of several runs together."""
    total: dict[str, UsageTotals] = {}
    for usage in usages:
        for model, amounts in usage.items():
            own = total.setdefault(model, {})
            for name, amount in amounts.items():
                own[name] = own.get(name, 0.0) + amount
    return total
