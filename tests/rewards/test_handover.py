"""Work handed to an event loop: results in order, the first failure at once, nothing left after cancelling."""

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from plaudit.rewards.handover import Handover


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def nothing() -> None:
    pass


def test_results_have_the_order_of_the_pieces(loop: asyncio.AbstractEventLoop) -> None:
    async def work(piece: int) -> int:
        await asyncio.sleep(0.01 * (5 - piece % 5))
        return 10 * piece

    handover = Handover(loop, work)
    for piece in range(50):
        handover.add(piece)
        if piece % 7 == 0:
            time.sleep(0.001)  # the loop has looked, and must be woken again
    handover.wait(0.01, nothing)
    assert handover.results() == [10 * piece for piece in range(50)]


def test_no_pieces_is_no_wait(loop: asyncio.AbstractEventLoop) -> None:
    async def work(_: object) -> None:
        raise AssertionError

    handover = Handover(loop, work)
    handover.wait(60.0, nothing)
    assert handover.results() == []


def test_pieces_that_are_done_before_the_wait(loop: asyncio.AbstractEventLoop) -> None:
    async def work(piece: int) -> int:
        return piece

    handover = Handover(loop, work)
    handover.add(1)
    time.sleep(0.05)
    handover.wait(60.0, nothing)
    assert handover.results() == [1]


def test_a_failure_ends_the_wait_though_others_never_end(loop: asyncio.AbstractEventLoop) -> None:
    cancelled = threading.Event()

    async def work(piece: str) -> None:
        if piece == "bad":
            raise ValueError("bad piece")
        try:
            await asyncio.sleep(3600.0)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    handover = Handover(loop, work)
    for piece in ("good", "bad", "good"):
        handover.add(piece)
    handover.wait(0.01, nothing)
    with pytest.raises(ValueError, match="bad piece"):
        handover.results()
    handover.cancel()
    assert cancelled.wait(10.0)


def test_report_can_end_the_wait(loop: asyncio.AbstractEventLoop) -> None:
    async def work(_: int) -> None:
        await asyncio.sleep(3600.0)

    def stop() -> None:
        raise KeyboardInterrupt

    handover = Handover(loop, work)
    handover.add(1)
    with pytest.raises(KeyboardInterrupt):
        handover.wait(0.01, stop)
    handover.cancel()


def test_what_is_added_after_cancelling_never_starts(loop: asyncio.AbstractEventLoop) -> None:
    started: list[int] = []

    async def work(piece: int) -> None:
        started.append(piece)

    handover = Handover(loop, work)
    handover.add(1)
    handover.cancel()
    handover.add(2)
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0.02), loop).result()
    assert 2 not in started
