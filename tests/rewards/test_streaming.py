"""Groups scored as a stream: in order, a limited number at a time, and nothing that was scored is lost."""

import asyncio
import time

import numpy as np
import pytest

from plaudit.errors import DataError, StopRequested
from plaudit.recipe import ScoreRecipe
from plaudit.rewards.reward import LiveRule
from plaudit.rewards.runner import RewardRunner
from plaudit.rewards.streaming import stream
from plaudit.types import Group, Prompt, Sample

EMPTY = np.zeros(0, dtype=np.float32)


def group(i: int) -> Group:
    prompt = Prompt(f"p{i}", [{"role": "user", "content": "?"}], ground_truth=str(i % 3))
    return Group(prompt, EMPTY, (Sample(prompt.id, 0, EMPTY, str(i), "finished", EMPTY, EMPTY, 0),))


class Slow(LiveRule):
    """Later groups are scored sooner; counts how many are being scored."""

    def __init__(self, settings):
        super().__init__(settings)
        self.now = self.most = 0
        self.pause_s = 0.02

    async def score(self, groups):
        self.now += 1
        self.most = max(self.most, self.now)
        i = int(groups[0].samples[0].text)
        try:
            await asyncio.sleep(self.pause_s if i % 4 == 0 else 0.0)
        finally:
            self.now -= 1
        return await super().score(groups)


@pytest.fixture
def slow():
    reward = Slow(ScoreRecipe.model_validate({"rewards": [{"kind": "exact"}]}).rewards[0])
    with RewardRunner([reward], tolerant=True) as runner:
        yield reward, runner


def test_results_are_in_order_and_few_groups_are_scored_at_once(slow):
    reward, runner = slow
    read = []

    def groups():
        for i in range(40):
            read.append(i)
            yield group(i)

    ahead = []
    for done, scored in enumerate(stream(runner, groups(), 8, lambda *_: None)):
        assert scored.group.prompt.id == f"p{done}"
        assert scored.scores[0].value == float(done < 3)  # the ground truth is one digit, i mod 3
        ahead.append(len(read) - done)
    assert len(ahead) == 40
    assert max(ahead) <= 8
    assert 2 <= reward.most <= 8


def test_an_error_in_the_rows_comes_after_the_results_before_it(slow):
    _, runner = slow

    def groups():
        yield from map(group, range(5))
        raise DataError("rows.jsonl, row 6: broken")

    results = stream(runner, groups(), 8, lambda *_: None)
    assert [next(results).group.prompt.id for _ in range(5)] == [f"p{i}" for i in range(5)]
    with pytest.raises(DataError, match="row 6"):
        next(results)


def test_what_is_no_longer_wanted_is_cancelled(slow):
    reward, runner = slow
    reward.pause_s = 60.0

    def stop(begun: int, scored: int) -> None:
        raise StopRequested

    with pytest.raises(StopRequested):
        next(stream(runner, map(group, range(100)), 16, stop))
    while reward.now:  # for a minute, if they were not cancelled
        time.sleep(0.01)
    assert reward.most >= 1


def test_models_that_share_the_device_score_many_groups_together(monkeypatch):
    rewards = ScoreRecipe.model_validate({"rewards": [{"kind": "exact"}]}).rewards
    with RewardRunner(rewards, tolerant=True) as runner:
        together = []
        collect = runner.collect
        monkeypatch.setattr(RewardRunner, "in_passes", property(lambda _: True))
        monkeypatch.setattr(runner, "collect", lambda chunk, **more: together.append(len(chunk)) or collect(chunk, **more))
        assert [scored.group.prompt.id for scored in stream(runner, map(group, range(10)), 4, lambda *_: None)] == [
            f"p{i}" for i in range(10)
        ]
    assert together == [4, 4, 2]
