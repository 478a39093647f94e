"""Reward models with GPUs of their own: a process alongside those that train has each of them. Here ranks are threads, and the
worker is the test's own process; tests/cluster/test_ray.py has real ones."""

import asyncio
import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from plaudit.cluster.ranks import WorkerInfo
from plaudit.cluster.reward_worker import WorkerSeat
from plaudit.errors import PlauditError, RecipeError
from plaudit.recipe import RLRecipe
from plaudit.recipe.reward_models import RewardModel
from plaudit.reward_models.peers import LOOPBACK
from plaudit.reward_models.worker import plan_workers, serve_model
from plaudit.types import TOKEN_BYTES, RewardWorkers
from support.peers import model, rewards_of, score
from support.recipes import rl_recipe

JUDGING = {"kind": "judge", "sampling": {"max_new_tokens": 4}, "limits": {"unreadable_retries": 0}}
TOKEN = b"t" * TOKEN_BYTES


def score_beside_a_worker(rewards: list[dict[str, Any]]) -> tuple[Any, list[str]]:
    """Scores and counts by two ranks, and what the worker has reported."""
    recipe: Any = SimpleNamespace(rewards=rewards_of(*rewards), run=SimpleNamespace(device="cpu", deterministic=True))
    results: list[Any] = []
    doing: list[str] = []

    async def ranks(address: tuple[str, int]) -> None:
        try:
            results.append(await asyncio.to_thread(score, 2, rewards, workers=RewardWorkers(TOKEN, (address,))))
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    running: list[asyncio.Task[None]] = []

    def listening(host: str, port: int) -> None:
        running.append(asyncio.get_running_loop().create_task(ranks((host, port))))

    serve_model(WorkerSeat(WorkerInfo(2, 2, LOOPBACK, LOOPBACK), TOKEN, listening, doing.append), recipe)
    return results[0], doing


def test_scores_and_counts_are_those_of_one_process(folders, loads):
    def rewards(**placed: int) -> list[dict[str, Any]]:
        scalar = {"kind": "scalar_model", "model": model(folders["kind"], **placed)}
        return [{**JUDGING, "model": model(folders["grader"])}, scalar]

    alone = score(1, rewards())
    loads.clear()
    together, doing = score_beside_a_worker(rewards(gpus=1))
    assert together == alone
    assert sorted(loads) == ["grader", "kind"]
    assert doing[0] == "loading"


def test_a_model_that_cannot_be_opened_stops_the_worker(tmp_path):
    seat = WorkerSeat(WorkerInfo(2, 2, LOOPBACK, LOOPBACK), TOKEN, lambda *_: None, lambda _: None)
    rewards = rewards_of({"kind": "scalar_model", "model": model(tmp_path / "none", gpus=1)})
    recipe: Any = SimpleNamespace(rewards=rewards, run=SimpleNamespace(device="cpu", deterministic=True))
    with pytest.raises(PlauditError, match="no such folder"):
        serve_model(seat, recipe)


def test_workers_are_planned_from_the_recipe(tiny_model, prompts_file, tmp_path):
    tree = rl_recipe(tiny_model, prompts_file, tmp_path / "run", {}, cluster={"nodes": 2})
    tree["rewards"] = [
        {"kind": "scalar_model", "model": {"path": "a", "gpus": 1}},
        {**JUDGING, "model": {"path": "b"}},
        {**JUDGING, "name": "large", "model": {"path": "c", "placement": "launch", "gpus": 2}},
    ]
    assert [(plan.model, plan.gpus) for plan in plan_workers(RLRecipe.model_validate(tree))] == [("a", 1), ("c", 2)]
    tree["cluster"] = {"nodes": 1}
    with pytest.raises(ValidationError, match=r"a has model\.gpus, which Ray finds on several machines"):
        RLRecipe.model_validate(tree)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"placement": "offload"}, "gpus are the model's own"),
        ({"placement": "launch", "sleep": True}, "gpus are the model's own"),
        ({"placement": "server", "url": "http://127.0.0.1:1"}, "gpus are the model's own"),
        ({"rank": 0}, "Give one of them"),
        ({"gpus": 2}, "a resident model uses one"),
    ],
)
def test_settings_that_exclude_each_other(settings, message):
    with pytest.raises(ValidationError, match=message):
        RewardModel.model_validate({"path": "a", "gpus": 1, **settings})


def test_only_our_own_launcher_starts_workers(folders):
    rewards = [{"kind": "scalar_model", "model": model(folders["kind"], gpus=1)}]
    with pytest.raises(RecipeError, match="torchrun and srun start none"):
        score(2, rewards)
    with pytest.raises(RecipeError, match=r"model\.gpus is for runs on several machines"):
        score(1, rewards)
