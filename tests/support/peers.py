"""Rewards scored by several processes, which are threads here, each with its own runner and event loop. Their models are real but
tiny, and the connections between them real sockets."""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch

from plaudit.recipe import ScoreRecipe
from plaudit.rewards.runner import Rewarded, RewardRunner
from plaudit.types import Group, RewardWorkers
from plaudit.world import World
from support.rewards import group

T = TypeVar("T")
GROUPS = [group(f"{i} apples", f"It is {i + 2}.", "no", id=f"p{i}", truth=str(i)) for i in range(5)]


class Threads:
    """What the threads of one world exchange."""

    def __init__(self, size: int):
        self.barrier = threading.Barrier(size, timeout=60)
        self.values: dict[int, Any] = {}


class ThreadWorld(World):
    """A process of a world whose processes are threads."""

    exchange: Threads

    @classmethod
    def of(cls, size: int, workers: RewardWorkers | None = None) -> "list[ThreadWorld]":
        exchange = Threads(size)
        worlds = [cls(rank, size, torch.device("cpu"), reward_workers=workers) for rank in range(size)]
        for world in worlds:
            object.__setattr__(world, "exchange", exchange)
        return worlds

    def gather(self, value: T, what: str) -> list[T]:
        self.exchange.barrier.wait()
        self.exchange.values[self.rank] = value
        self.exchange.barrier.wait()
        return [self.exchange.values[rank] for rank in range(self.size)]

    def agree(self, value: T, what: str) -> T:
        return self.gather(value, what)[0]


def in_threads(size: int, work: Callable[[ThreadWorld], T], workers: RewardWorkers | None = None) -> list[T]:
    with ThreadPoolExecutor(size) as pool:
        return [future.result() for future in [pool.submit(work, world) for world in ThreadWorld.of(size, workers)]]


def rewards_of(*rewards: dict[str, Any]) -> Any:
    return ScoreRecipe.model_validate({"rewards": rewards}).rewards


def score(
    size: int,
    rewards: Sequence[dict[str, Any]],
    *,
    groups: Sequence[Group] = GROUPS,
    repeatable: bool = True,
    workers: RewardWorkers | None = None,
) -> tuple[dict[str, Any], Counter[str]]:
    """Every reward's scores of all groups, scored by `size` processes; and the sum of what they have counted."""

    def work(world: ThreadWorld) -> tuple[list[Rewarded], dict[str, float]]:
        settings = rewards_of(*rewards)
        with RewardRunner(settings, repeatable=repeatable, world=world) as runner:
            scored = runner.score_all([one for _, one in world.shard(groups)], len(groups) * 3)
            world.gather(None, "scores")
            counts = runner.counts()
            world.gather(None, "the end")
            return scored, counts

    results = in_threads(size, work, workers)
    by_id = {one.group.prompt.id: one.scores for scored, _ in results for one in scored}
    counts: Counter[str] = Counter()
    for _, counted in results:
        counts.update({name: round(count) for name, count in counted.items()})
    return {one.prompt.id: by_id[one.prompt.id] for one in groups}, counts


def model(folder: Path, placement: str = "resident", **settings) -> dict[str, Any]:
    return {"path": str(folder), "placement": placement, "device": "cpu", **settings}
