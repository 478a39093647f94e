"""Groups scored without steps: results come in order, as soon as they are known, while others are being scored."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from itertools import islice

from plaudit.errors import PlauditError
from plaudit.rewards.runner import REPORT_EVERY_S, RewardRunner
from plaudit.rewards.step_counts import StepCounts
from plaudit.types import Group, ScoredGroup

Report = Callable[[int, int], None]
TOGETHER = 16
"""Groups that are handed to the event loop at a time: waking it costs more than a rule does."""


def stream(runner: RewardRunner, groups: Iterable[Group], at_once: int, report: Report) -> Generator[ScoredGroup, None, None]:
    """Each group with its scores combined, while at most `at_once` groups are being scored. Nothing is normalised. `report` is
    called several times per second with the numbers of groups begun and scored. An error in `groups` is raised after the results of
    those before it.

    Models that share the device score `at_once` groups, then the next ones: moving weights takes seconds.
    """
    if runner.in_passes:
        waiting = iter(groups)
        while chunk := list(islice(waiting, at_once)):
            yield from runner.collect(chunk, training=False, report=report)
        return
    step = StepCounts(runner.rewards, None, runner.tolerant)
    scoring: deque[Future[list[ScoredGroup]]] = deque()
    begun, reported = 0, time.monotonic()

    def report_sometimes() -> None:
        nonlocal reported
        if time.monotonic() - reported >= REPORT_EVERY_S:
            reported = time.monotonic()
            report(begun, step.scored)

    def first() -> list[ScoredGroup]:
        while not scoring[0].done():
            report_sometimes()
            try:
                scoring[0].exception(timeout=REPORT_EVERY_S)
            except TimeoutError:
                continue
        return scoring.popleft().result()

    together = min(TOGETHER, at_once)
    waiting, error = _take(groups, together), None
    try:
        for some in waiting:
            if isinstance(some, PlauditError):
                error = some
                break
            begun += len(some)
            step.samples += sum(len(group.samples) for group in some)
            scoring.append(runner.run(_score(runner, some, step)))
            while scoring and (len(scoring) * together >= at_once or scoring[0].done()):
                yield from first()
            report_sometimes()
        while scoring:
            yield from first()
        if error is not None:
            raise error
    finally:
        for future in scoring:
            future.cancel()


def _take(groups: Iterable[Group], count: int) -> Iterator[list[Group] | PlauditError]:
    """Groups, several at a time; an error in reading them comes after those before it."""
    some: list[Group] = []
    error = None
    try:
        for group in groups:
            some.append(group)
            if len(some) == count:
                yield some
                some = []
    except PlauditError as mistake:
        error = mistake
    if some:
        yield some
    if error is not None:
        yield error


async def _score(runner: RewardRunner, groups: Sequence[Group], step: StepCounts) -> list[ScoredGroup]:
    return list(await asyncio.gather(*(runner.score(group, step) for group in groups)))
