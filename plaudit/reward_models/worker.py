"""A process alongside those that train, with one reward model for the calls of all of them (`model.gpus`)."""

import asyncio
import signal
from functools import partial

from plaudit.cluster.reward_worker import WorkerPlan, WorkerSeat
from plaudit.recipe import RLRecipe, TrainingRecipe
from plaudit.recipe.limits import ModelLimits
from plaudit.recipe.model_owners import deal_models, models_of, models_with_gpus
from plaudit.reward_models.backend import Backend
from plaudit.reward_models.divided import ModelPart
from plaudit.reward_models.model_registry import build_backend
from plaudit.reward_models.peers import ModelPeers

BEAT_S = 1.0


def plan_workers(recipe: TrainingRecipe) -> list[WorkerPlan]:
    """One for each model with GPUs of its own."""
    if not isinstance(recipe, RLRecipe):
        return []
    job = partial(serve_model, recipe=recipe)
    return [WorkerPlan(str(model.path), model.gpus or 0, job) for model, _ in models_with_gpus(models_of(recipe.rewards))]


def serve_model(seat: WorkerSeat, recipe: RLRecipe) -> None:
    asyncio.run(_serve(seat, recipe))


async def _serve(seat: WorkerSeat, recipe: RLRecipe) -> None:
    from plaudit.models.devices import resolve_device  # imports torch, which the launching process does without

    models, own = models_of(recipe.rewards), seat.info.rank
    owners = deal_models(models, seat.info.size)
    [key] = [key for key, owner in owners.items() if owner == own]
    model, scalar = key
    device = None if model.is_served else resolve_device(recipe.run.device)
    peers = ModelPeers(owners, rank=own, size=seat.info.size, token=seat.token, device=device)

    def build(limits: ModelLimits, part: ModelPart | None) -> Backend:
        return build_backend(model, limits, scalar=scalar, independent=recipe.run.deterministic, device=device, part=part)

    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    address = await peers.listen(seat.info.host)
    assert address is not None, "it has a model"
    seat.listening(*address)
    backend = peers.backend(key, models[key], build)
    beating = asyncio.create_task(_beat(seat, opened := asyncio.Event()))
    try:
        await backend.open()
        opened.set()
        await stopped.wait()
    finally:
        beating.cancel()
        peers.close()
        await backend.close()


async def _beat(seat: WorkerSeat, opened: asyncio.Event) -> None:
    while True:
        seat.beat("scoring" if opened.is_set() else "loading")
        await asyncio.sleep(BEAT_S)
