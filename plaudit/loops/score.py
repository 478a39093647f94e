"""`plaudit score`: a recipe's rewards for existing responses, as JSONL, one line per row, in order.

Run again, it resumes after the last line. Slow or paid scores are cached (`OUT.scores.sqlite`) until everything is done, so that
rows in progress at a kill are not scored twice. Values are raw: nothing is normalised.
"""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from plaudit.data.columns import has_several_responses
from plaudit.data.conversations import Source
from plaudit.data.rollouts import parse_group, token_counter, with_token_counts
from plaudit.errors import TrainingStopped
from plaudit.files import fingerprint
from plaudit.recipe import RewardSettings
from plaudit.report.progress import StepProgress, print_line
from plaudit.resumable import open_resumable
from plaudit.reward_models.model_registry import UsageTotals, describe_usage
from plaudit.rewards.cache import HARMLESS, settings_without
from plaudit.rewards.client import GIVEN_UP
from plaudit.rewards.combine import NO_REWARD
from plaudit.rewards.runner import RewardRunner
from plaudit.scoring import result_of
from plaudit.types import ScoredGroup

ROWS_AT_ONCE = 256


@dataclass(frozen=True)
class ScoreJob:
    rewards: Sequence[RewardSettings]
    sources: Sequence[Source]
    out: Path
    tokenizer: str | None = None
    """A model whose tokenizer counts the tokens of responses without a token count."""
    max_rows: int | None = None


@dataclass
class Summary:
    rows: int = 0
    samples: int = 0
    values: list[float] = field(default_factory=list)
    malformed: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    messages: dict[str, str] = field(default_factory=dict)
    """The first message of each cause."""
    seconds: float = 0.0
    models: dict[str, UsageTotals] = field(default_factory=dict)
    """Usage by reward model."""

    def add(self, scored: ScoredGroup) -> None:
        self.rows, self.samples = self.rows + 1, self.samples + len(scored.scores)
        self.values += [score.value for score in scored.scores if score.value is not None]
        self.malformed += sum(score.malformed for score in scored.scores)
        for score in scored.scores:
            if score.failure is not None:
                self.failures[score.failure.cause] += 1
                self.messages.setdefault(score.failure.cause, " ".join(score.failure.message.split())[:200])

    def __str__(self) -> str:
        parts = [f"{self.rows:,} row{'s' * (self.rows != 1)}, {self.samples:,} response{'s' * (self.samples != 1)}"]
        if self.values:
            parts.append(f"mean reward {sum(self.values) / len(self.values):.4g}")
        if self.malformed:
            parts.append(f"{self.malformed:,} malformed")
        if self.failures:
            causes = ", ".join(f"{count:,} {cause}: {self.messages[cause]}" for cause, count in self.failures.most_common())
            parts.append(f"{self.failures.total():,} without a value ({causes})")
        if self.seconds:
            parts.append(f"{self.samples / self.seconds:,.0f} responses/s")
        parts += [f"{name}: {describe_usage(amounts)}" for name, amounts in self.models.items()]
        return "; ".join(parts)


def score(job: ScoreJob) -> Summary:
    """Score the rows that the output lacks; return a summary of the rows scored now."""
    inputs = {
        "rewards": [{"name": reward.label, **settings_without(reward, HARMLESS)} for reward in job.rewards],
        "rows": {str(source): source.fingerprint() for source in job.sources},
        "tokenizer": job.tokenizer,
    }
    files = {str(file): fingerprint(file) for reward in job.rewards for file in reward.files}
    count_tokens = token_counter(job.tokenizer)
    total = sum(len(source.rows()) for source in job.sources)
    total = min(total, job.max_rows or total)
    summary, kept = Summary(), job.out.with_name(f"{job.out.name}.scores.sqlite")
    with (
        open_resumable(job.out, inputs, "score", may_change=files) as file,
        RewardRunner(job.rewards, cache=kept, tolerant=True) as runner,
    ):
        if file.done:
            rest = "; resuming with the rest" if len(file.done) < total else ""
            print_line(f"{job.out}: has {len(file.done):,} of {total:,} rows{rest}")
        began = time.perf_counter()
        with StepProgress("score", total, len(file.done)) as progress:
            rows = islice(_rows(job.sources), len(file.done), total)
            while chunk := list(islice(rows, ROWS_AT_ONCE)):
                groups = [with_token_counts(parse_group(row, row["id"], where), count_tokens) for row, where in chunk]
                results = runner.collect(groups, training=False)
                _stop_if_given_up(results, job.out)  # before writing lines: once fixed, these rows are scored again
                for (row, _), scored in zip(chunk, results, strict=True):
                    file.write(row | result_of(scored, many=has_several_responses(row)))
                    summary.add(scored)
                summary.seconds = time.perf_counter() - began
                progress.update(len(file.done) + summary.rows, {"time/responses_per_s": summary.samples / summary.seconds})
        file.sync()
        summary.models = runner.amounts()
    for leftover in (kept, *(kept.with_name(f"{kept.name}-{end}") for end in ("wal", "shm"))):
        leftover.unlink(missing_ok=True)  # every row is written
    if summary.failures[NO_REWARD]:
        print_line(f"no reward's `when` matches {summary.failures[NO_REWARD]:,} responses", "yellow")
    return summary


def _rows(sources: Iterable[Source]) -> Iterator[tuple[dict[str, Any], str]]:
    """Each row with an id, and its location for error messages."""
    for source in sources:
        for number, (where, row) in enumerate(source.rows().located(), 1):
            yield {"id": f"{source.path}:{number}", **row}, where


def _stop_if_given_up(results: Sequence[ScoredGroup], out: Path) -> None:
    """Stop if a reward was given up on; scores from before that are in the cache."""
    for scored in results:
        for label, scores in scored.by_reward.items():
            failure = next((score.failure for score in scores if score.failure and score.failure.cause == GIVEN_UP), None)
            if failure is not None:
                raise TrainingStopped(
                    f"reward '{label}' {failure.message}. Fix it, then run the same command to resume; {out} keeps its rows."
                )
