"""Reward models of several processes: each is loaded by one of them, and scores are those of one process. The processes are threads
here, each with its own runner and event loop; their models are real but tiny, and the connections between them real sockets."""

import asyncio
import pickle
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from plaudit.errors import RecipeError, StopRequested
from plaudit.models.weights import RESIDENT_MODELS, OffloadableWeights
from plaudit.recipe import ScoreRecipe
from plaudit.recipe.limits import ModelLimits
from plaudit.recipe.reward_models import RewardModel
from plaudit.reward_models import peer_channel
from plaudit.reward_models.backend import Backend, GenerationRequest, SamplingParams
from plaudit.reward_models.peer_channel import LENGTH, RANK, PeerClient, PeerLost, PeerServer
from plaudit.reward_models.peers import LOOPBACK, ModelPeers, deal_models, divide_limits, models_of
from plaudit.rewards.cache import reward_digest
from plaudit.rewards.runner import Rewarded, RewardRunner
from plaudit.types import Group
from plaudit.world import World
from support.fault_server import FaultServer
from support.judges import Scripted
from support.models import make_classifier, make_grader
from support.rewards import group

T = TypeVar("T")
GROUPS = [group(f"{i} apples", f"It is {i + 2}.", "no", id=f"p{i}", truth=str(i)) for i in range(5)]
JUDGING = {"kind": "judge", "sampling": {"max_new_tokens": 4}, "limits": {"unreadable_retries": 0}}
TOKEN = b"t" * peer_channel.TOKEN_BYTES


class Threads:
    """What the threads of one world exchange."""

    def __init__(self, size: int):
        self.barrier = threading.Barrier(size, timeout=60)
        self.values: dict[int, Any] = {}


class ThreadWorld(World):
    """A process of a world whose processes are threads."""

    exchange: Threads

    @classmethod
    def of(cls, size: int) -> "list[ThreadWorld]":
        exchange = Threads(size)
        worlds = [cls(rank, size, torch.device("cpu")) for rank in range(size)]
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


def in_threads(size: int, work: Callable[[ThreadWorld], T]) -> list[T]:
    with ThreadPoolExecutor(size) as pool:
        return [future.result() for future in [pool.submit(work, world) for world in ThreadWorld.of(size)]]


def rewards_of(*rewards: dict[str, Any]) -> Any:
    return ScoreRecipe.model_validate({"rewards": rewards}).rewards


def score(
    size: int, rewards: Sequence[dict[str, Any]], *, groups: Sequence[Group] = GROUPS, repeatable: bool = True
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

    results = in_threads(size, work)
    by_id = {one.group.prompt.id: one.scores for scored, _ in results for one in scored}
    counts: Counter[str] = Counter()
    for _, counted in results:
        counts.update({name: round(count) for name, count in counted.items()})
    return {one.prompt.id: by_id[one.prompt.id] for one in groups}, counts


@pytest.fixture(scope="module")
def folders(tiny_models, tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("reward_models")
    return {
        "kind": make_classifier(tiny_models["llama"], root / "kind"),
        "short": make_classifier(tiny_models["qwen3"], root / "short"),
        "grader": make_grader(tiny_models["llama"], root / "grader", seed=0),
    }


@pytest.fixture
def loads(monkeypatch) -> list[str]:
    """The models whose weights were loaded onto the device, in order."""
    loaded, load = [], OffloadableWeights.load
    assert RESIDENT_MODELS.models() == []

    def load_and_record(self):
        if not self.on_device:
            loaded.append(Path(self._name).name)
        load(self)

    monkeypatch.setattr(OffloadableWeights, "load", load_and_record)
    return loaded


def model(folder: Path, placement: str = "resident", **settings) -> dict[str, Any]:
    return {"path": str(folder), "placement": placement, "device": "cpu", **settings}


# Scores --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3])
def test_scores_are_those_of_one_process_and_each_model_is_loaded_once(folders, loads, size):
    rewards = [
        {"kind": "scalar_model", "name": "kind", "model": model(folders["kind"])},
        {"kind": "scalar_model", "name": "short", "model": model(folders["short"], "offload")},
        {**JUDGING, "model": model(folders["grader"], "offload")},
        {**JUDGING, "name": "raw", "raw": True, "model": model(folders["grader"]), "gate": {"reward": "judge", "above": -1}},
    ]
    alone, counted_alone = score(1, rewards)
    loaded_alone = Counter(loads)
    loads.clear()
    together, counted = score(size, rewards)
    assert together == alone
    assert counted == counted_alone
    assert counted["judge/calls"] == 4 * 15
    assert Counter(loads) == loaded_alone
    assert RESIDENT_MODELS.models() == []
