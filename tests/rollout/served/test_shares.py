"""A server is alive as long as it computes tokens, whether or not a sample is complete."""

import asyncio
import queue
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from plaudit.rollout.engine import Request
from plaudit.rollout.served import shares
from plaudit.rollout.served.dialect import ServerLost
from plaudit.rollout.served.shares import Job, SampleAnswer, Share


class Clock:
    def __init__(self):
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class Server:
    """Runs what was submitted once the test says so."""

    reports_progress = True

    def __init__(self):
        self.computed: float | None = 0.0
        self.answer: Any = ([1], [-0.5])
        self.submitted: list[tuple[Any, Future[Any]]] = []

    def submit(self, work: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.submitted.append((work, future))
        return future

    def run(self) -> None:
        waiting, self.submitted = self.submitted, []
        for work, future in waiting:
            future.set_result(asyncio.run(work))

    async def tokens_computed(self) -> float | None:
        return self.computed

    async def sample(self, body: Any, version: int) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(shares, "time", clock)
    return clock


@pytest.fixture
def answers() -> "queue.SimpleQueue[SampleAnswer]":
    return queue.SimpleQueue()


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def share(clock, server, answers) -> Share:
    jobs = [Job(Request("p", np.array([1])), index, 8, {}) for index in range(2)]
    return Share(server, jobs, 3, answers)  # pyright: ignore[reportArgumentType]


def wait(share: Share, clock: Clock, server: Server, seconds: int) -> float:
    """What it returns after this many seconds, queried once per second."""
    silent = 0.0
    for _ in range(seconds):
        clock.now += 1.0
        silent = share.silent_for()
        server.run()
    return silent


def test_a_server_that_computes_tokens_is_not_silent(share, clock, server):
    for computed in range(1, 20):
        server.computed = float(computed)
        assert wait(share, clock, server, 10) < 15


def test_a_server_that_computes_none_is_silent(share, clock, server):
    wait(share, clock, server, 10)
    assert wait(share, clock, server, 100) > 95


def test_a_server_that_does_not_answer_is_silent(share, clock, server):
    server.computed = None
    assert wait(share, clock, server, 100) == 100


def test_without_reports_samples_decide(share, clock, server, answers):
    server.reports_progress = False
    share.ask()
    assert wait(share, clock, server, 100) == 100
    share.arrived(answers.get().job)
    assert wait(share, clock, server, 5) == 5


def test_nothing_left_is_not_silence(share, clock, server):
    share.left.clear()
    assert wait(share, clock, server, 1000) == 0


def test_answers_of_a_server_that_was_lost_since_do_not_count(share, server, answers):
    server.answer = ServerLost("gone")
    share.ask()
    server.run()
    first, second = answers.get(), answers.get()
    assert (first.is_current, second.is_current) == (True, True)
    server.answer = ([1], [-0.5])
    share.ask()
    assert not second.is_current
    server.run()
    assert answers.get().is_current
