"""Which GPUs a process's server uses, and which servers a process samples with."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from plaudit.errors import RecipeError

if TYPE_CHECKING:
    from plaudit.recipe.rollout import EngineServerSettings
    from plaudit.world import World


def server_gpus(settings: "EngineServerSettings", world: "World", inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment by which this process's server finds its GPUs: those of `rollout.server.gpus`, or the process's own. With
    several of the latter, it takes the first of those that we see."""
    visible = [gpu for gpu in inherited.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    if settings.gpus:
        numbers = own_gpus(settings, world)
    elif settings.tensor_parallel > 1 and world.size > 1:
        raise RecipeError(
            f"rollout.server.tensor_parallel is {settings.tensor_parallel}, and each process has one GPU: set rollout.server.gpus "
            "to GPUs that are the servers' alone"
        )
    elif world.device.type == "cuda" and settings.tensor_parallel == 1:
        numbers = [world.device.index or 0]
    else:
        return {}
    if visible and max(numbers) >= len(visible):
        raise RecipeError(f"rollout.server.gpus: there is no GPU {max(numbers)}: CUDA_VISIBLE_DEVICES has {len(visible)} GPUs")
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible[number] if visible else str(number) for number in numbers)}


def own_gpus(settings: "EngineServerSettings", world: "World") -> list[int]:
    """Each machine has the same GPUs for its servers."""
    servers, processes = len(settings.gpus) // settings.tensor_parallel, world.local_size or world.size
    if servers != processes:
        raise RecipeError(
            f"rollout.server.gpus are enough for {servers} servers on each machine, and {processes} processes need one each: name "
            f"{settings.tensor_parallel} for each process of a machine"
        )
    first = world.rank % processes * settings.tensor_parallel
    numbers = list(settings.gpus[first : first + settings.tensor_parallel])
    if world.device.type == "cuda" and (world.device.index or 0) in numbers:
        raise RecipeError(f"rollout.server.gpus: GPU {world.device.index or 0} is the trainer's; name others")
    return numbers


def share_urls(urls: Sequence[str], world: "World") -> list[str]:
    """The servers that this process samples with: its own, or one that it shares with others."""
    if len(urls) % world.size and world.size % len(urls):
        raise RecipeError(
            f"rollout.server.url names {len(urls)} servers for {world.size} processes: one number should be a multiple of the other"
        )
    return list(urls[world.rank :: world.size]) or [urls[world.rank % len(urls)]]
