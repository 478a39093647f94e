"""Turns on the rewards' event loop: calls to models do not wait until rules have computed."""

import asyncio
import gc
import threading
import time
from typing import ClassVar, Literal

import pytest

from plaudit import turns as turns_module
from plaudit.rewards.reward import LONG_TEXT, LiveReward, Reward, Rule
from plaudit.rewards.rules import math as math_module
from plaudit.rewards.rules.regex import Regex
from plaudit.rewards.runner import RewardRunner
from plaudit.turns import turns
from plaudit.types import Score, ScoredGroup
from support.rewards import group, values

EVENTS: list[str] = []
ROUND_TRIPS = 5


class Slow(Rule):
    """A rule that takes at least a millisecond for each sample."""

    kind: Literal["slow"] = "slow"

    def value(self, prompt, sample):
        time.sleep(0.001)
        EVENTS.append("rule")
        return 1.0


class Called(Reward):
    """A reward that waits for the event loop several times, as a call over the network does."""

    kind: Literal["called"] = "called"
    cached: ClassVar[bool] = False

    def build(self):
        return LiveCalled(self)


class LiveCalled(LiveReward[Called]):
    async def score(self, groups):
        for _ in range(ROUND_TRIPS):
            await asyncio.sleep(0)
        EVENTS.append("called")
        return [[Score(1.0) for _ in group.samples] for group in groups]


@pytest.fixture(autouse=True)
def no_events():
    EVENTS.clear()


def test_calls_end_while_rules_compute():
    groups = [group(*"abcd", id=str(i)) for i in range(100)]
    with RewardRunner([Slow(), Called()]) as runner:

        async def score_all() -> list[ScoredGroup]:  # all are there before the first is scored, however slow this thread is
            return await asyncio.gather(*map(runner.score, groups))

        assert [values(one) for one in runner.run(score_all()).result()] == [[2.0] * 4] * 100
    # 400 ms of rules are 80 slices or more, and every call needs a few of them. Without turns, calls would end after all rules.
    # (The calls of the last groups may: they begin with their groups.)
    last_rule = len(EVENTS) - 1 - EVENTS[::-1].index("rule")
    assert EVENTS[:last_rule].count("called") > 50


def test_calls_end_while_one_large_group_is_scored():
    large, small = group(*["a"] * 600), group("b", id="small")
    with RewardRunner([Slow(when={"id": ("p",)}), Called(when={"id": ("small",)})]) as runner:

        async def score_both() -> ScoredGroup:  # started on the loop, so that the order does not depend on this thread
            large_score = asyncio.create_task(runner.score(large))
            await runner.score(small)
            assert not large_score.done()
            return await large_score

        assert values(runner.run(score_both()).result()) == [1.0] * 600
    assert EVENTS.index("called") < 300


def test_cancelled_groups_leave_the_queue():
    with RewardRunner([Slow()]) as runner:

        async def score_and_cancel() -> None:
            cancelled = [asyncio.create_task(runner.score(group(*"abcdefgh", id=str(i)))) for i in range(200)]
            while len(EVENTS) < 20:  # the others wait for their turns
                await asyncio.sleep(0)
            for task in cancelled:
                task.cancel()

        runner.run(score_and_cancel()).result()
        assert values(runner.run(runner.score(group(*"abcdefgh" * 10))).result()) == [1.0] * 80  # needs several turns
    assert len(EVENTS) < 1600


def test_turns_are_taken_in_order():
    order = []

    async def compute(i: int) -> None:
        for _ in range(2):
            await turns().take()
            time.sleep(turns_module.SLICE_S)  # nobody else has time in this iteration
            order.append(i)

    async def all_of_them() -> None:
        await asyncio.gather(*map(compute, range(80)))

    asyncio.run(all_of_them())
    assert order == [*range(80), *range(80)]


def test_few_are_resumed_for_nothing(monkeypatch):
    """Only as many as there is probably time for: 100 computations that take a slice each are resumed about twice, not 64 times."""
    for_nothing = 0
    begin_slice = turns_module.Turns._begin_slice

    def count(self: turns_module.Turns) -> None:
        nonlocal for_nothing
        for_nothing += len(self._returned)
        begin_slice(self)

    async def compute() -> None:
        await turns().take()
        time.sleep(turns_module.SLICE_S)

    async def all_of_them() -> None:
        await asyncio.gather(*(compute() for _ in range(100)))

    monkeypatch.setattr(turns_module.Turns, "_begin_slice", count)
    asyncio.run(all_of_them())
    assert for_nothing < 400


def test_turns_go_with_their_loop():
    async def compute() -> None:
        await turns().take()
        await turns().in_thread(int)

    before = len(turns_module._TURNS)
    for _ in range(3):
        asyncio.run(compute())
    gc.collect()
    assert len(turns_module._TURNS) == before


def test_closed_turns_neither_wait_nor_cancel():
    """Another user of the loop may still compute in the thread, and more may be queued."""
    released = threading.Event()

    async def close_while_computing() -> list[bool | str]:
        closed = turns()
        works = [asyncio.create_task(closed.in_thread(work)) for work in (released.wait, lambda: "queued")]
        await asyncio.sleep(0)
        closed.close()  # would block for ever if it waited for the thread
        assert turns() is not closed
        released.set()
        return await asyncio.gather(*works)

    assert asyncio.run(close_while_computing()) == [True, "queued"]


def test_long_responses_are_scored_in_a_thread():
    class Where(Rule):
        kind: Literal["where"] = "where"

        def value(self, prompt, sample):
            EVENTS.append(threading.current_thread().name)
            return 1.0

    with RewardRunner([Where()]) as runner:
        runner.collect([group("short", "x" * (LONG_TEXT + 1))])
    assert EVENTS[0] == "rewards"
    assert EVENTS[1].startswith("computing")


@pytest.mark.parametrize("full", [False, True])
def test_slow_pattern_gives_the_same_scores_beside_quick_ones(full):
    reward = Regex(kind="regex", pattern=r"(a|aa)+b?", full=full, limits={"timeout_s": 100})  # pyright: ignore[reportArgumentType]
    texts = ["ab", "c" + "a" * 400 + "c", "a" * (LONG_TEXT + 1) + "b", ""]
    with RewardRunner([reward]) as runner:
        [scored] = runner.collect([group(*texts)])
    assert [score.value for score in scored.scores] == [float(bool(got)) for got in _found(reward, texts)]


def _found(reward: Regex, texts: list[str]) -> list[float]:
    scores = [reward.value(group("x").prompt, group(text).samples[0]) for text in texts]
    return [score.value or 0.0 for score in scores if isinstance(score, Score)]


def test_long_responses_are_scored_in_slices(monkeypatch):
    sizes: list[int] = []
    monkeypatch.setattr(Slow, "build", lambda self: live)
    live = LiveSlow(Slow(), sizes)
    with RewardRunner([Slow()]) as runner:
        [scored] = runner.collect([group(*["a" * LONG_TEXT] * 3, "b", "c" * 10 * LONG_TEXT, "d", "e")])
    assert values(scored) == [1.0] * 7
    assert sizes == [4, 1, 2]


class LiveSlow(LiveReward[Slow]):
    """Notes the sizes of what it is called for."""

    def __init__(self, settings: Slow, sizes: list[int]):
        super().__init__(settings)
        self._sizes = sizes

    async def score(self, groups):
        self._sizes += [len(group.samples) for group in groups]
        return [[Score(1.0) for _ in group.samples] for group in groups]


def test_calls_end_while_math_finds_answers(monkeypatch):
    """`math` finds most answers on the loop, and takes turns for it."""
    find_answer = math_module.find_answer

    def find_slowly(text: str) -> str | None:
        time.sleep(0.001)
        EVENTS.append("rule")
        return find_answer(text)

    monkeypatch.setattr(math_module, "find_answer", find_slowly)
    large, small = group(*["4"] * 60, truth="4"), group("b", id="small")
    rewards = [math_module.Math(kind="math", when={"id": ("p",)}), Called(when={"id": ("small",)})]
    with RewardRunner(rewards) as runner:

        async def score_both() -> ScoredGroup:
            large_score = asyncio.create_task(runner.score(large))
            await runner.score(small)
            return await large_score

        assert values(runner.run(score_both()).result()) == [1.0] * 60
    assert EVENTS.index("called") < 60
