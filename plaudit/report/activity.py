"""What is going on within a step: prompts sampled and scored, tokens per second, judge calls, time left."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from plaudit.report.fitting import Part, duration, fit
from plaudit.types import Sample

FIRST_LINE_AFTER_S = 10.0
LONGEST_SILENCE_S = 60.0


def _go_on() -> None:
    pass


@dataclass
class Phase:
    """Prompts being sampled and scored, such as those of a validation, or rows. Its methods are called as that proceeds."""

    label: str
    prompts: int
    samples: int
    """0 if nothing is sampled."""
    scores: bool
    beat: Callable[[], None]
    """Called with every change, and at least several times per second."""
    clock: Callable[[], float]
    sampled: int = 0
    """Prompts of which all samples are complete."""
    scored: int = 0
    """Of the prompts; of rows, those that are done."""
    unit: str = "scored"
    """What is counted if nothing is sampled."""
    judge_calls: int = 0
    samples_done: int = 0
    tokens_done: int = 0
    """Tokens of complete samples: all that is known of an engine that does not report its steps."""
    tokens_reported: int = 0
    began: float = field(init=False)
    scoring_began: float | None = None

    def __post_init__(self) -> None:
        self.began = self.clock()

    def engine_step(self, new_tokens: int) -> None:
        self.tokens_reported += new_tokens
        self.beat()

    def sample_done(self, sample: Sample) -> None:
        self.samples_done, self.tokens_done = self.samples_done + 1, self.tokens_done + len(sample)
        self.beat()

    def update(self, sampled: int, scored: int, judge_calls: int) -> None:
        self.sampled, self.scored, self.judge_calls = sampled, scored, judge_calls
        if self.scoring_began is None:
            self.scoring_began = self.clock()
        self.beat()

    def parts(self) -> list[Part]:
        elapsed = self.clock() - self.began
        if not self.samples:
            parts = [Part(f"{self.label}: {self.scored:,}/{self.prompts:,} {self.unit}", 0)]
        else:
            parts = [Part(f"{self.label}: {self.sampled:,}/{self.prompts:,} prompts sampled", 0)]
            parts += [Part(f"{self.scored:,} scored", 0)] if self.scores else []
        tokens = max(self.tokens_done, self.tokens_reported)
        if tokens and elapsed and self.sampled < self.prompts:
            parts.append(Part(f"{tokens / elapsed:,.0f} tok/s", 2))
        if self.judge_calls:
            parts.append(Part(f"{self.judge_calls:,} judge calls", 2))
        if (left := self.seconds_left()) is not None:
            parts.append(Part(f"{duration(left)} left", 1))
        return parts

    def seconds_left(self) -> float | None:
        """Sampling and scoring overlap, so the slower one decides. None while nothing is done."""
        now, left = self.clock(), []
        if 0 < self.samples_done < self.samples:
            left.append((now - self.began) * (self.samples - self.samples_done) / self.samples_done)
        if self.scored and self.scoring_began is not None:
            left.append((now - self.scoring_began) * (self.prompts - self.scored) / self.scored)
        return max(left, default=None)


class Activity:
    """The current phase, if any: as a line of a live display, or printed now and then."""

    def __init__(self, check: Callable[[], None] = _go_on, clock: Callable[[], float] = time.monotonic):
        """`check` is called many times per second; what it raises ends the phase, as when the run is asked to stop."""
        self._check, self._clock = check, clock
        self._phase: Phase | None = None
        self._pause, self._next_line = FIRST_LINE_AFTER_S, 0.0
        self.print_line: Callable[[str], None] | None = None
        """Where there is no live display: prints a line."""
        self.width = 80

    @contextmanager
    def phase(self, label: str, *, prompts: int, samples: int = 0, scores: bool = True) -> Iterator[Phase]:
        """`prompts` of which `samples` are sampled, if any, and scored."""
        self._phase = Phase(label, prompts, samples, scores, self._beat, self._clock)
        self._pause, self._next_line = FIRST_LINE_AFTER_S, self._clock() + FIRST_LINE_AFTER_S
        self._check()
        try:
            yield self._phase
        finally:
            self._phase = None

    def batches(self, batches: Sequence[list[int]], *, label: str, unit: str) -> Iterator[list[int]]:
        """Yield batches of rows (their indices), as a phase in which the rows are counted."""
        with self.phase(label, prompts=sum(map(len, batches))) as phase:
            phase.unit = unit
            phase.update(sampled=0, scored=0, judge_calls=0)
            for batch in batches:
                yield batch
                phase.update(sampled=0, scored=phase.scored + len(batch), judge_calls=0)

    def line(self, width: int) -> str:
        return fit(self._phase.parts(), width) if self._phase is not None else ""

    def _beat(self) -> None:
        self._check()
        now = self._clock()
        if self.print_line is not None and now >= self._next_line:
            self.print_line(self.line(self.width))
            self._pause = min(2 * self._pause, LONGEST_SILENCE_S)
            self._next_line = now + self._pause
