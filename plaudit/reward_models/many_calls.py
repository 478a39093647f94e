"""Many calls to one model, each result passed on as soon as it is there: for commands that write rows, not for rewards.

A call that failed is left for the next start of the command. If one call after the other fails, the rest is not tried: the model is
gone, or refuses what it is sent.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from plaudit.recipe.limits import ModelLimits
from plaudit.recipe.reward_models import RewardModel
from plaudit.reward_models.backend import SERVER_DIED, UNAUTHORISED, Backend
from plaudit.reward_models.model_registry import UsageTotals, build_backend, usage_totals
from plaudit.types import Failure

Item = TypeVar("Item")
FAILURES_IN_A_ROW = 10
"""After this many, no further call is made."""


@dataclass
class CallReport:
    """What the calls amounted to."""

    totals: UsageTotals = field(default_factory=dict)
    failures: Counter[str] = field(default_factory=Counter)
    """Items that failed, by cause."""
    messages: dict[str, str] = field(default_factory=dict)
    """The first message of each cause."""
    stopped: Failure | None = None
    """Why the rest was not tried."""

    def add(self, failure: Failure) -> None:
        self.failures[failure.cause] += 1
        self.messages.setdefault(failure.cause, " ".join(failure.message.split()))

    @property
    def causes(self) -> str:
        """'3 timeout: no answer within 120 s …': for a message."""
        return "; ".join(f"{count:,} {cause}: {self.messages[cause]}" for cause, count in self.failures.most_common())


def call_each(
    model: RewardModel,
    limits: ModelLimits,
    items: Sequence[Item],
    call: Callable[[Backend, Item], Awaitable[Failure | None]],
    *,
    at_once: int | None = None,
) -> CallReport:
    """Call `call` for each item, for `at_once` of them at the same time; default: as many as the limits allow calls. It keeps what
    it gets; a Failure says that the item is not done. Raises a RecipeError with the remedy if the model cannot be opened."""
    return asyncio.run(_call_each(model, limits, items, call, at_once or limits.max_concurrent_calls))


async def _call_each(
    model: RewardModel,
    limits: ModelLimits,
    items: Sequence[Item],
    call: Callable[[Backend, Item], Awaitable[Failure | None]],
    at_once: int,
) -> CallReport:
    report, in_a_row, left = CallReport(), 0, iter(items)
    backend = build_backend(model, limits, scalar=False)

    async def work() -> None:
        nonlocal in_a_row
        for item in left:
            failure = await call(backend, item)
            if failure is None:
                in_a_row = 0
                continue
            report.add(failure)
            in_a_row += 1
            if in_a_row >= FAILURES_IN_A_ROW or failure.cause in (UNAUTHORISED, SERVER_DIED):
                report.stopped = report.stopped or failure
            if report.stopped is not None:
                return

    try:
        await backend.open()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(len(items), at_once)):
                tasks.create_task(work())
    finally:
        await backend.close()
    report.totals = usage_totals(backend.usage, model)
    return report
