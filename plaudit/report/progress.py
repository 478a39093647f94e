"""Progress on stderr: a live bar on a terminal, occasional lines when redirected to a file, nothing when quiet."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.text import Text

from plaudit.redaction import redact
from plaudit.report.activity import Activity
from plaudit.report.fitting import Part, duration, fit
from plaudit.wrapping import wrap

console = Console(stderr=True, highlight=False)
LINE_EVERY_S = 10.0


def set_quiet(quiet: bool) -> None:
    """Whether progress, notes and warnings stay off the terminal. Errors and results are printed elsewhere."""
    console.quiet = quiet


@dataclass
class _Follower:
    """A process of several that does not lead: the leading one has the terminal, and prints what all of them would."""

    prefix: str
    quiet: bool
    """Whether the user wants no warnings."""


_FOLLOWING: list[_Follower] = []


def follow(prefix: str) -> None:
    """From now on this process prints nothing but its own warnings, with the prefix."""
    _FOLLOWING[:] = [_Follower(prefix, console.quiet)]
    console.quiet = True


def print_own_warning(text: str) -> None:
    """A warning of this process alone. One that every process of a run would print is a line of the leading one: `print_line`."""
    if not _FOLLOWING:
        print_line(text, "yellow")
    elif not _FOLLOWING[0].quiet:
        Console(stderr=True, highlight=False).print(Text(redact(_FOLLOWING[0].prefix + text), "yellow"), soft_wrap=True)


def print_line(text: str, style: str = "") -> None:
    """Print a line to stderr, with secrets redacted."""
    text = redact(text)
    console.print(Text(wrap(text, console.width) if console.is_terminal else text, style), soft_wrap=True)


def restore_terminal() -> None:
    """After a process that may have drawn a progress bar was killed: clear the bar's line, show the cursor."""
    if console.is_terminal:
        console.file.write("\r\x1b[2K")
        console.show_cursor()


def show_progress(items: Iterable[Any], label: str) -> Iterator[Any]:
    """Yield the items, with a running count on a terminal."""
    if not _is_live():
        yield from items
        return
    with Progress(SpinnerColumn(), TextColumn("{task.description} {task.completed:,}"), console=console, transient=True) as bar:
        task = bar.add_task(label, total=None)
        for item in items:
            yield item
            bar.advance(task)


def _is_live() -> bool:
    return console.is_terminal and not console.quiet


class StepProgress:
    """Training steps with key metrics, tokens per second and time left; and below, what is going on within a step."""

    def __init__(
        self,
        label: str,
        total: int,
        done: int,
        *,
        validate_every: int | None = None,
        activity: Activity | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`validate_every`: how often a validation adds its time to that of the steps, besides the last one."""
        self.label, self.total, self.first = label, total, done
        self.time_left = TimeLeft(total, done, validate_every, clock)
        self._clock, self._last_line = clock, clock()
        bar = BarColumn(bar_width=10 if console.width < 100 else 20)
        self.bar = _BarWithActivity(
            activity, TextColumn(label), bar, MofNCompleteColumn(), TextColumn("{task.fields[numbers]}", markup=False),
            console=console, disable=not _is_live(),
        )  # fmt: skip
        # Between the columns there is one space each.
        self._room = console.width - sum(map(len, (label, f"{total}/{total}"))) - (bar.bar_width or 0) - 3
        self.task = self.bar.add_task(label, total=total, completed=done, numbers="")
        if activity is not None:
            activity.print_line = None if console.is_terminal else print_line
            activity.width = console.width

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.bar.stop()

    def update(self, step: int, metrics: dict[str, float]) -> None:
        self.time_left.update(step, metrics.get("time/validate_s", 0.0))
        left, numbers = self.time_left.seconds(), _numbers(metrics)
        parts = numbers + ([Part(f"{duration(left)} left", 1)] if left is not None else [])
        self.bar.update(self.task, completed=step, numbers=fit(parts, self._room))
        count = Part(f"{self.label} {step}/{self.total}", 0)
        if "val/loss" in metrics or "val/reward" in metrics:  # the bar's numbers vanish with the next step; keep these as a line
            print_line(fit([count, *numbers], console.width))
            return
        now = self._clock()
        if not console.is_terminal and (now - self._last_line > LINE_EVERY_S or step in (self.first + 1, self.total)):
            self._last_line = now
            print_line(fit([count, *parts], console.width))


class TimeLeft:
    """Estimates the time left from the steps so far. A validation is not part of a step, and the first step, which is slow (memory
    is allocated, kernels are compiled), counts only while there is no other."""

    def __init__(self, total: int, done: int, validate_every: int | None, clock: Callable[[], float]):
        self._total, self._done, self._every, self._clock = total, done, validate_every, clock
        self._updated_at = clock()
        self._first: float | None = None
        self._steps, self._seconds = 0, 0.0
        self._validation = 0.0

    def update(self, done: int, validation_s: float) -> None:
        """These many steps are done; `validation_s` of the time since the last update was a validation."""
        steps, now = done - self._done, self._clock()
        seconds = max(0.0, now - self._updated_at - validation_s)
        self._done, self._updated_at = done, now
        self._validation = validation_s or self._validation
        if steps and self._first is None:
            self._first = seconds / steps
        elif steps:
            self._steps, self._seconds = self._steps + steps, self._seconds + seconds

    def seconds(self) -> float | None:
        """None before the first step."""
        per_step = self._seconds / self._steps if self._steps else self._first
        if per_step is None:
            return None
        return per_step * (self._total - self._done) + self._validation * self._validations_left()

    def _validations_left(self) -> int:
        every = self._every or self._total
        due = self._total // every - self._done // every
        return due + (self._total % every != 0 and self._done < self._total)


class _BarWithActivity(Progress):
    """The bar, and a line for what is going on."""

    def __init__(self, activity: Activity | None, *columns: Any, **settings: Any):
        self._activity = activity
        super().__init__(*columns, **settings)

    def get_renderables(self) -> Iterator[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        if self._activity is not None and (line := self._activity.line(console.width)):
            yield Text(line, style="dim", no_wrap=True, overflow="ellipsis")


def _numbers(metrics: dict[str, float]) -> list[Part]:
    rl = "reward" in metrics or "val/reward" in metrics
    importance = {"reward": 0, "val/reward": 0, "length": 4, "entropy": 5}
    names = importance if rl else {"loss": 0, "val/loss": 0, "accuracy": 2, "val/accuracy": 1}
    parts = [Part(f"{name} {_short(metrics[name])}", names[name]) for name in names if name in metrics]
    if metrics.get("dropped"):
        parts.append(Part(f"dropped {metrics['dropped']:,.0f}", 2))
    if "time/tokens_per_s" in metrics:
        parts.append(Part(f"{metrics['time/tokens_per_s']:,.0f} tok/s", 3))
    return parts


def _short(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 10 else f"{value:.1f}" if abs(value) < 1000 else f"{value:,.0f}"
