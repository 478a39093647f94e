"""Many calls to one model, each result passed on as soon as it is there: for commands that write rows, not for rewards.

A call that failed is left for the next start of the command. If one call after the other fails, the rest is not tried: the model is
gone.

A server that rejects a call may object to this item, or to every call (a wrong name, an empty account). It objects to the item if
it answers a call that began later; such items are settled: the caller records them, and does not call for them again.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from plaudit.recipe.limits import ModelLimits
from plaudit.recipe.reward_models import RewardModel
from plaudit.reward_models.backend import CONTEXT, REJECTED, SERVER_DIED, UNAUTHORISED, Backend
from plaudit.reward_models.model_registry import UsageTotals, build_backend, usage_totals
from plaudit.types import Failure

Item = TypeVar("Item")
FAILURES_IN_A_ROW = 10
"""After this many, no further call is made."""
REJECTIONS_IN_A_ROW = 100
"""The same for calls that the server rejects: it works, so more of them are needed to tell that it rejects all."""


@dataclass
class CallReport:
    """What the calls amounted to."""

    totals: UsageTotals = field(default_factory=dict)
    failures: Counter[str] = field(default_factory=Counter)
    """Items that failed and are not settled, by cause."""
    messages: dict[str, str] = field(default_factory=dict)
    """The first message of each cause."""
    stopped: Failure | None = None
    """Why the rest was not tried."""

    def add(self, failure: Failure) -> None:
        self.failures[failure.cause] += 1
        self.messages.setdefault(failure.cause, " ".join(failure.message.split()).rstrip("."))

    @property
    def causes(self) -> str:
        """'3 timeout: no answer within 120 s …': for a message."""
        return "; ".join(f"{count:,} {cause}: {self.messages[cause]}" for cause, count in self.failures.most_common())


def call_each(
    model: RewardModel,
    limits: ModelLimits,
    items: Sequence[Item],
    call: Callable[[Backend, Item], Awaitable[Failure | None]],
    settle: Callable[[Item, Failure], None],
    *,
    answered: bool = False,
    at_once: int | None = None,
) -> CallReport:
    """Call `call` for each item, for `at_once` of them at the same time; default: as many as the limits allow calls. It keeps what
    it gets; a Failure says that the item is not done. `settle` gets the items that the server rejects although it answers others;
    `answered`: it has, in an earlier start. Raises a RecipeError with the remedy if the model cannot be opened."""
    rejections = Rejections(settle, answered)
    return asyncio.run(_call_each(model, limits, items, call, rejections, at_once or limits.max_concurrent_calls))


class Rejections(Generic[Item]):
    """Items that the server rejected, until it is known whether it rejects every call."""

    def __init__(self, settle: Callable[[Item, Failure], None], answered: bool):
        self._settle, self._answered = settle, answered
        self._open: deque[tuple[Item, Failure]] = deque()
        self._settled = 0
        self._under_way: Counter[int] = Counter()
        """Calls, by the number of rejections before they began."""

    def begin(self) -> int:
        """A call begins: how many rejections precede it."""
        before = self._settled + len(self._open)
        self._under_way[before] += 1
        return before

    def end(self, before: int) -> None:
        """The call that began after `before` rejections is over."""
        self._under_way[before] -= 1
        if not self._under_way[before]:
            del self._under_way[before]

    @property
    def too_many(self) -> bool:
        # Only those that precede all calls under way: rejections take no time, and answers may take minutes.
        return min(self._under_way, default=self._settled + len(self._open)) - self._settled >= REJECTIONS_IN_A_ROW

    def add(self, item: Item, failure: Failure) -> None:
        if failure.cause == CONTEXT and self._answered:  # it rejects long prompts for their length alone
            self._settle(item, failure)
        else:
            self._open.append((item, failure))

    def answer(self, before: int) -> None:
        """The call that began after `before` rejections was answered."""
        self._answered = True
        while self._settled < before:
            self._settle(*self._open.popleft())
            self._settled += 1

    def close(self) -> list[Failure]:
        """Settle what is too long; the failures of the others."""
        if not self._answered:
            return [failure for _, failure in self._open]
        for item, failure in self._open:
            if failure.cause == CONTEXT:
                self._settle(item, failure)
        return [failure for _, failure in self._open if failure.cause != CONTEXT]


async def _call_each(
    model: RewardModel,
    limits: ModelLimits,
    items: Sequence[Item],
    call: Callable[[Backend, Item], Awaitable[Failure | None]],
    rejections: Rejections[Item],
    at_once: int,
) -> CallReport:
    report, in_a_row, left = CallReport(), 0, iter(items)
    backend = build_backend(model, limits, scalar=False)

    async def work() -> None:
        nonlocal in_a_row
        for item in left:
            if report.stopped is not None:
                return
            before = rejections.begin()
            failure = await call(backend, item)
            rejections.end(before)
            if failure is None:
                in_a_row = 0
                rejections.answer(before)
                continue
            if failure.cause in (REJECTED, CONTEXT):
                rejections.add(item, failure)
            else:
                report.add(failure)
                in_a_row += 1
            if in_a_row >= FAILURES_IN_A_ROW or rejections.too_many or failure.cause in (UNAUTHORISED, SERVER_DIED):
                report.stopped = report.stopped or failure

    try:
        await backend.open()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(len(items), at_once)):
                tasks.create_task(work())
    finally:
        await backend.close()
    for failure in rejections.close():
        report.add(failure)
    report.totals = usage_totals(backend.usage, model)
    return report
