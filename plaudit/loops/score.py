"""`plaudit score`: a recipe's rewards for existing responses, as JSONL, one line per row, in order.

Run again, it scores the rows on which a reward failed once more, then resumes after the last line. Slow or paid scores are cached
(`OUT.scores.sqlite`) until the output is complete, so that nothing is scored twice after a kill. Values are raw: nothing is
normalised. They are written with 12 digits: 0.1 + 0.2 is 0.3, and not 0.30000000000000004.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from plaudit.data.columns import has_several_responses
from plaudit.data.conversations import Source
from plaudit.data.rollouts import parse_group, token_counter, with_token_counts
from plaudit.data.row_ids import name_sources
from plaudit.errors import TrainingStopped
from plaudit.recipe import RewardSettings
from plaudit.report.activity import Activity, Phase
from plaudit.report.progress import StepProgress, print_line
from plaudit.resumable import ResumableJsonl, open_resumable
from plaudit.reward_models.model_registry import UsageTotals, describe_usage
from plaudit.rewards.cache import HARMLESS, file_digests, settings_without
from plaudit.rewards.client import GIVEN_UP
from plaudit.rewards.combine import NO_REWARD
from plaudit.rewards.runner import RewardRunner
from plaudit.rewards.streaming import stream
from plaudit.scoring import result_of
from plaudit.types import Group, ScoredGroup

ROWS_AT_ONCE = 1024
"""Rows being scored at the same time. Enough for the batches of a model; a judge's limits are its own."""
DIGITS = 12
"""Of a reward in the output. A sum of several is exact to about 15."""
Row = dict[str, Any]


LocatedRow = tuple[Row, str, str]
"""A row, its id unless it has one, and its location for error messages."""


@dataclass(frozen=True)
class RowsToScore:
    """Rows that can be read again, in the same order."""

    read: Callable[[], Iterator[LocatedRow]]
    total: int
    identity: Mapping[str, Any]
    """What the rows depend on: output made from others is not resumed."""


def rows_of_files(sources: Sequence[Source], *, max_rows: int | None = None, data_source: str = "") -> RowsToScore:
    """The rows of data files. `data_source`: of rows without one."""

    def read() -> Iterator[LocatedRow]:
        for source, name in zip(sources, name_sources(sources), strict=True):
            for number, (where, row) in enumerate(source.rows().located(), 1):
                own = {"data_source": data_source} if data_source and not row.get("data_source") else {}
                yield row | own, f"{name}:{number}", where

    total = sum(len(source.rows()) for source in sources)
    files = {str(source): source.fingerprint() for source in sources}
    return RowsToScore(read, min(total, max_rows or total), {"rows": files, "data_source": data_source})


@dataclass(frozen=True)
class ScoreJob:
    rewards: Sequence[RewardSettings]
    rows: RowsToScore
    out: Path
    tokenizer: str | None = None
    """A model whose tokenizer counts the tokens of responses without a token count."""
    details: bool = False
    """Also write what each reward saw and returned, with judges' prompts and answers."""
    allow_failures: bool = False
    """Rows without a value are accepted."""
    final_causes: frozenset[str] = frozenset()
    """Failures by these causes are results: their rows are not scored again."""
    files_may_change: bool = True
    """Whether scores from before a file or model of a reward changed are kept, with a warning; else they are not resumed."""
    report_usage: Callable[[Mapping[str, UsageTotals]], None] = lambda _: None
    """Called with the usage of reward models once, also if scoring is interrupted: those calls cost too."""
    verb: str = "score"
    """The plaudit command, for messages."""
    label: str = "score"
    """Of the progress bar."""


# What was scored -----------------------------------------------------------------------------------------------------


@dataclass
class Means:
    """Means of the reward and of its components, over the responses that have them."""

    responses: int = 0
    _sums: Counter[str] = field(default_factory=Counter)
    _counts: Counter[str] = field(default_factory=Counter)

    def add(self, reward: float | None, parts: Mapping[str, float]) -> None:
        self.responses += 1
        for name, value in [("reward", reward), *((f"parts/{part}", x) for part, x in parts.items())]:
            if value is not None:
                self._sums[name] += value  # pyright: ignore[reportArgumentType]
                self._counts[name] += 1

    def __getitem__(self, name: str) -> float | None:
        return self._sums[name] / self._counts[name] if self._counts[name] else None

    @property
    def parts(self) -> list[str]:
        return [name.removeprefix("parts/") for name in self._counts if name != "reward"]


@dataclass
class Summary:
    """Of all rows in the output, whenever they were scored."""

    final_causes: frozenset[str] = frozenset()
    rows: int = 0
    rows_without_value: int = 0
    """Except by the final causes."""
    means: Means = field(default_factory=Means)
    by_source: dict[str, Means] = field(default_factory=dict)
    malformed: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    """Responses without a value, by cause."""
    messages: dict[str, str] = field(default_factory=dict)
    """The first message of each cause."""
    per_s: float = 0.0
    """Responses scored per second by this command."""
    models: dict[str, UsageTotals] = field(default_factory=dict)
    """Usage by reward model."""

    def add(self, row: Row) -> None:
        source = self.by_source.setdefault(str(row.get("data_source") or ""), Means())
        self.rows += 1
        self.rows_without_value += any(
            result["reward"] is None and result["failure"]["cause"] not in self.final_causes for result in results_of(row)
        )
        for result in results_of(row):
            for means in (self.means, source):
                means.add(result["reward"], result["parts"])
            self.malformed += result["malformed"]
            if result["reward"] is None:
                failure = result["failure"]
                self.failures[failure["cause"]] += 1
                named = f"{failure['reward']}: " if failure["reward"] else ""
                self.messages.setdefault(failure["cause"], f"{named}{' '.join(failure['message'].split())[:200]}")

    def __str__(self) -> str:
        samples, mean = self.means.responses, self.means["reward"]
        parts = [f"{self.rows:,} row{'s' * (self.rows != 1)}, {samples:,} response{'s' * (samples != 1)}"]
        if mean is not None:
            parts.append(f"mean reward {mean:.4g}")
        if self.malformed:
            parts.append(f"{self.malformed:,} malformed")
        if self.failures:
            causes = ", ".join(f"{count:,} {cause}: {self.messages[cause]}" for cause, count in self.failures.most_common())
            parts.append(f"{self.failures.total():,} without a value ({causes})")
        if self.per_s:
            parts.append(f"{self.per_s:,.0f} responses/s")
        parts += [f"{name}: {describe_usage(amounts)}" for name, amounts in self.models.items()]
        return "; ".join(parts)

    def print_means(self, console: Console) -> None:
        """A table of the means: a line for each data source if there are several, and one for all."""
        components = self.means.parts
        if len(components) < 2 and len(self.by_source) < 2:
            return  # nothing that the mean reward does not show
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("data_source", overflow="fold")
        for column in ("responses", "reward", *components):
            table.add_column(column, justify="right", overflow="fold")
        sources = sorted(self.by_source.items()) if len(self.by_source) > 1 else []
        for name, means in [*sources, ("all", self.means)]:
            values = [means["reward"], *(means[f"parts/{part}"] for part in components)]
            table.add_row(name or "–", f"{means.responses:,}", *("–" if x is None else f"{x:.4g}" for x in values))
        console.print(table)


def results_of(row: Row) -> list[Row]:
    """A row's results, one per response: those of a row with `responses` are lists."""
    names = ("reward", "parts", "malformed", "failure")
    if not isinstance(row["reward"], list):
        return [{name: row[name] for name in names}]
    return [dict(zip(names, values, strict=True)) for values in zip(*(row[name] for name in names), strict=True)]


def _has_failure(row: Row, final_causes: frozenset[str]) -> bool:
    """Whether a reward failed on it for a cause that may pass."""
    failures = [result["failure"] for result in results_of(row)]
    return any(failure is not None and failure["cause"] not in final_causes for failure in failures)


# Scoring -------------------------------------------------------------------------------------------------------------


def score(job: ScoreJob) -> Summary:
    """Score the rows that the output lacks, and again those on which a reward failed."""
    inputs = {
        "rewards": [{"name": reward.label, **settings_without(reward, HARMLESS)} for reward in job.rewards],
        **job.rows.identity,
        "tokenizer": job.tokenizer,
        "details": job.details,
    }
    files = {file: digest for reward in job.rewards for file, digest in file_digests(reward).items()}
    may_change = files if job.files_may_change else {}
    if not job.files_may_change:
        inputs["files"] = files
    cache = job.out.with_name(f"{job.out.name}.scores.sqlite")
    with open_resumable(job.out, inputs, job.verb, may_change=may_change) as file:
        summary, failed = _read_scored(job, file)
        if failed or len(file.done) < job.rows.total:  # else no model is loaded and no server is called
            with RewardRunner(job.rewards, cache=cache, tolerant=True) as runner:
                try:
                    _score_missing(job, file, runner, summary, failed)
                finally:
                    summary.models = runner.amounts()
                    job.report_usage(summary.models)
    if job.allow_failures or not summary.rows_without_value:
        for leftover in (cache, *(cache.with_name(f"{cache.name}-{end}") for end in ("wal", "shm"))):
            leftover.unlink(missing_ok=True)
    if summary.failures[NO_REWARD]:
        count = summary.failures[NO_REWARD]
        print_line(f"no reward's `when` matches {count:,} responses; `when: otherwise` makes a reward for such rows", "yellow")
    return summary


def _read_scored(job: ScoreJob, file: ResumableJsonl) -> tuple[Summary, list[int]]:
    """A summary of the rows that need not be scored again, and the numbers of those on which a reward failed."""
    summary, failed, total = Summary(job.final_causes), list[int](), job.rows.total
    for number, row in enumerate(islice(file.rows(), total)):
        if _has_failure(row, job.final_causes):
            failed.append(number)
        else:
            summary.add(row)
    if file.done:
        again = f"; scoring {len(failed):,} of them again, on which a reward failed" if failed else ""
        rest = "; resuming with the rest" if len(file.done) < total else ""
        print_line(f"{job.out}: has {len(file.done):,} of {total:,} rows{again}{rest}")
    return summary, failed


def _score_missing(job: ScoreJob, file: ResumableJsonl, runner: RewardRunner, summary: Summary, failed: Sequence[int]) -> None:
    total, count_tokens = job.rows.total, token_counter(job.tokenizer)
    before, began = summary.means.responses, time.perf_counter()
    activity = Activity()
    with StepProgress(job.label, total, summary.rows, activity=activity) as progress:

        def scored(rows: Iterator[LocatedRow], count: int) -> Iterator[Row]:
            for row in _score_rows(job, rows, count, runner, count_tokens, activity):
                summary.add(row)
                summary.per_s = (summary.means.responses - before) / (time.perf_counter() - began)
                progress.update(summary.rows, {"time/responses_per_s": summary.per_s})
                yield row

        if failed:
            chosen = set(failed)
            rows = (row for number, row in enumerate(islice(job.rows.read(), total)) if number in chosen)
            again = scored(rows, len(failed))
            file.replace(dict(zip(failed, again, strict=True)))
        for row in scored(islice(job.rows.read(), len(file.done), total), total - len(file.done)):
            file.write(row)
    file.sync()


def _score_rows(
    job: ScoreJob,
    rows: Iterable[LocatedRow],
    count: int,
    runner: RewardRunner,
    count_tokens: Callable[[str], int] | None,
    activity: Activity,
) -> Iterator[Row]:
    """Rows with their results, in order."""
    waiting: deque[tuple[Row, str]] = deque()

    def groups() -> Iterator[Group]:
        for row, id, where in rows:
            waiting.append((row, id))
            yield with_token_counts(parse_group(row, id, where), count_tokens)

    with activity.phase("rows", prompts=count) as phase:
        for scored in stream(runner, groups(), ROWS_AT_ONCE, partial(_report, phase, runner)):
            _stop_if_given_up(scored, job.out)  # before its line is written: once fixed, this row is scored again
            row, id = waiting.popleft()
            result = result_of(scored, many=has_several_responses(row), details=job.details)
            yield {"id": id} | row | _with_digits(result)


def _with_digits(result: Row) -> Row:
    """The combined reward and its parts without binary noise. What each reward returned (`by_reward`) stays as it is."""
    return result | {name: _rounded(result[name]) for name in ("reward", "parts")}


def _rounded(value: Any) -> Any:
    match value:
        case list():
            return [_rounded(one) for one in value]
        case dict():
            return {name: _rounded(one) for name, one in value.items()}
        case float():
            return float(f"{value:.{DIGITS}g}")
    return value


def _report(phase: Phase, runner: RewardRunner, sampled: int, scored: int) -> None:
    phase.update(sampled, scored, runner.model_calls())


def _stop_if_given_up(scored: ScoredGroup, out: Path) -> None:
    """Stop if a reward was given up on; scores from before that are in the cache."""
    for label, scores in scored.by_reward.items():
        failure = next((score.failure for score in scores if score.failure and score.failure.cause == GIVEN_UP), None)
        if failure is not None:
            raise TrainingStopped(
                f"reward '{label}' {failure.message}. Fix it, then run the same command to resume; {out} keeps its rows."
            )
