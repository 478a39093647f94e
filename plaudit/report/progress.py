"""Progress on stderr: a live bar on a terminal, an occasional line when redirected to a file."""

import sys
import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from plaudit.errors import redact

console = Console(stderr=True, highlight=False)
LINE_EVERY_S = 10.0


def print_line(text: str, style: str = "") -> None:
    """Print a line to stderr, with secrets redacted."""
    console.print(redact(text), style=style or None, markup=False, soft_wrap=True)


def show_progress(items: Iterable[Any], label: str) -> Iterator[Any]:
    """Yield the items, with a running count on a terminal."""
    if not console.is_terminal:
        yield from items
        return
    with Progress(SpinnerColumn(), TextColumn("{task.description} {task.completed:,}"), console=console, transient=True) as bar:
        task = bar.add_task(label, total=None)
        for item in items:
            yield item
            bar.advance(task)


class StepProgress:
    """A progress bar over training steps, with key metrics, tokens per second and time left."""

    def __init__(self, label: str, total: int, done: int):
        self.label, self.total, self.first = label, total, done
        self.started = self.last_line = time.monotonic()
        self.bar = Progress(
            TextColumn(label), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(), TextColumn("left"), console=console, disable=not console.is_terminal,
        )  # fmt: skip
        self.task = self.bar.add_task(label, total=total, completed=done, numbers="")

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.bar.stop()

    def update(self, step: int, metrics: dict[str, float]) -> None:
        numbers = _numbers(metrics)
        self.bar.update(self.task, completed=step, numbers=numbers)
        if "val/loss" in metrics or "val/reward" in metrics:  # the bar's numbers vanish with the next step; keep these as a line
            print_line(f"{self.label} {step}/{self.total} {numbers}")
            return
        now = time.monotonic()
        if not console.is_terminal and (now - self.last_line > LINE_EVERY_S or step in (self.first + 1, self.total)):
            self.last_line = now
            left = (now - self.started) / (step - self.first) * (self.total - step)
            print(f"{self.label} {step}/{self.total} {numbers} {_duration(left)} left", file=sys.stderr, flush=True)


def _shown(metrics: dict[str, float]) -> list[str]:
    rl = "reward" in metrics or "val/reward" in metrics
    names = ("reward", "val/reward", "length", "entropy") if rl else ("loss", "val/loss", "accuracy", "val/accuracy")
    return [name for name in names if name in metrics]


def _numbers(metrics: dict[str, float]) -> str:
    parts = [f"{name} {metrics[name]:.4f}" for name in _shown(metrics)]
    if metrics.get("dropped"):
        parts.append(f"dropped {metrics['dropped']:,.0f}")
    if "time/tokens_per_s" in metrics:
        parts.append(f"{metrics['time/tokens_per_s']:,.0f} tok/s")
    return "  ".join(parts)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"
