"""Calls for many items: what stops them, and what becomes of items that the server rejects."""

import asyncio
from collections.abc import Callable, Sequence

import pytest

from plaudit.recipe.limits import ModelLimits
from plaudit.recipe.reward_models import RewardModel
from plaudit.reward_models.backend import CONTEXT, REJECTED, UNAUTHORISED
from plaudit.reward_models.many_calls import FAILURES_IN_A_ROW, REJECTIONS_IN_A_ROW, CallReport, call_each
from plaudit.types import Failure
from support.fault_server import FaultServer

SERVED = "served"


class Calls:
    """Calls whose outcome is given by their number."""

    def __init__(
        self, outcome: Callable[[int], str], at_once: int = 1, answered: bool = False, n: int = 400, slow: Sequence[int] = ()
    ):
        """`slow`: calls that are answered after the last one was begun."""
        released = asyncio.Event()
        self.made: list[int] = []
        self.settled: list[int] = []

        async def call(backend: object, item: int) -> Failure | None:
            self.made.append(item)
            await (released.wait() if item in slow else asyncio.sleep(0))
            if item == n - 1:
                released.set()
            return None if (cause := outcome(item)) == SERVED else Failure(cause, "See the server's log.")

        with FaultServer() as server:
            model = RewardModel(placement="server", url=server.url)
            self.report: CallReport = call_each(
                model, ModelLimits(), range(n), call, lambda item, _: self.settled.append(item), answered=answered, at_once=at_once
            )


@pytest.mark.parametrize("cause", [REJECTED, CONTEXT])
@pytest.mark.parametrize("at_once", [1, 4])
def test_rejected_items_are_settled_when_a_later_call_is_answered(cause, at_once):
    calls = Calls(lambda item: cause if item < 30 else SERVED, at_once)
    assert calls.made == list(range(400))
    assert calls.settled == list(range(30))
    assert not calls.report.failures


def test_an_answer_to_an_earlier_call_settles_nothing():
    """Calls 0 and 1 are under way together: that 0 is answered does not show that 1 is at fault."""
    calls = Calls(lambda item: SERVED if item == 0 else REJECTED, at_once=2, n=5)
    assert calls.settled == []
    assert calls.report.failures == {REJECTED: 4}


def test_rejections_while_answers_are_awaited_do_not_stop_the_calls():
    calls = Calls(lambda item: SERVED if item in (0, 399) else REJECTED, at_once=2, slow=[0])
    assert len(calls.made) == 400
    assert calls.report.stopped is None
    assert calls.settled == list(range(1, 399))


def test_a_server_that_rejects_every_call_is_left_alone():
    calls = Calls(lambda item: SERVED if item < 3 else REJECTED)
    assert len(calls.made) == 3 + REJECTIONS_IN_A_ROW
    assert calls.report.stopped is not None
    assert calls.settled == []


def test_long_items_are_settled_by_earlier_answers_however_many_they_are():
    calls = Calls(lambda item: CONTEXT, answered=True)
    assert calls.settled == list(range(400))
    assert (calls.report.stopped, dict(calls.report.failures)) == (None, {})
    calls = Calls(lambda item: CONTEXT)
    assert calls.settled == []
    assert calls.report.failures == {CONTEXT: REJECTIONS_IN_A_ROW}


def test_no_call_is_made_after_the_one_that_stops_them():
    assert len(Calls(lambda item: "timeout").made) == FAILURES_IN_A_ROW
    # An answer that arrives later does not make its worker go on.
    calls = Calls(lambda item: UNAUTHORISED if item == 0 else SERVED, at_once=4)
    assert calls.made == [0, 1, 2, 3]


def test_causes_end_without_a_period():
    assert Calls(lambda item: "timeout", n=2).report.causes == "2 timeout: See the server's log"
