"""Groups scored without steps: results come in order, as soon as they are known, while others are being scored."""

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from itertools import islice

from plaudit.errors import PlauditError
from plaudit.rewards.runner import REPORT_EVERY_S, RewardRunner
from plaudit.rewards.step_counts import StepCounts
from plaudit.types import Group, ScoredGroup

Report = Callable[[int, int], None]


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
    scoring: deque[Future[ScoredGroup]] = deque()
    begun, reported = 0, time.monotonic()

    def report_sometimes() -> None:
        nonlocal reported
        if time.monotonic() - reported >= REPORT_EVERY_S:
            reported = time.monotonic()
            report(begun, step.scored)

    def first() -> ScoredGroup:
        while not scoring[0].done():
            report_sometimes()
            try:
                scoring[0].exception(timeout=REPORT_EVERY_S)
            except TimeoutError:
                continue
        return scoring.popleft().result()

    waiting, error = iter(groups), None
    try:
        while True:
            try:
                group = next(waiting)
            except StopIteration:
                break
            except PlauditError as mistake:
                error = mistake
                break
            begun += 1
            step.samples += len(group.samples)
            scoring.append(runner.run(runner.score(group, step)))
            while scoring and (len(scoring) >= at_once or scoring[0].done()):
                yield first()
            report_sometimes()
        while scoring:
            yield first()
        if error is not None:
            raise error
    finally:
        for future in scoring:
            future.cancel()
