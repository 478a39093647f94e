"""Training, whatever the recipe's stage: in this process, in processes started here, or as one of those that a launcher started."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from plaudit.cluster.launch import rank_group
from plaudit.cluster.nodes import require_lasting_folder
from plaudit.cluster.ranks import launched_ranks, process_count
from plaudit.cluster.restarts import run_ranks
from plaudit.config import LoadedRecipe, flatten
from plaudit.data.conversations import Source
from plaudit.errors import OutOfMemory, RunError
from plaudit.expandable_segments import use_expandable_segments
from plaudit.heavy_imports import heavy_imports
from plaudit.recipe import RLRecipe, ScoreRecipe, TrainingRecipe
from plaudit.recipe.rollout import SERVED_ENGINES
from plaudit.run_progress import RunProgress

if TYPE_CHECKING:
    from plaudit.cluster.reward_worker import WorkerPlan
    from plaudit.world import World


def train(loaded: LoadedRecipe, sources: dict[str, list[Source]]) -> Path:
    """Train the recipe's model, or resume its run; returns the trained model's folder."""
    recipe = loaded.recipe
    assert not isinstance(recipe, ScoreRecipe)
    require_lasting_folder(recipe)
    if not (isinstance(recipe, RLRecipe) and recipe.rollout.engine in SERVED_ENGINES):  # which read the policy's memory
        use_expandable_segments()
    if (ranks := launched_ranks(recipe)) is not None:
        with heavy_imports():
            from plaudit.cluster.join import join

        with join(ranks, recipe) as world:
            return train_in(world, loaded, sources)
    if (count := _processes(recipe)) > 1 or recipe.cluster.nodes > 1:
        job = partial(train_in, loaded=loaded, sources=sources)
        start = partial(rank_group, job, count, recipe, _reward_workers(recipe))
        progress = RunProgress(Path(recipe.run.dir), flatten(recipe))
        return Path(run_ranks(start, recipe.cluster.restarts, progress) or "")

    with heavy_imports():
        from plaudit.models.devices import resolve_device
        from plaudit.world import World

    return train_in(World.alone(resolve_device(recipe.run.device)), loaded, sources)


def train_in(world: "World", loaded: LoadedRecipe, sources: dict[str, list[Source]]) -> Path:
    """The same, as a process of this world."""
    with heavy_imports():
        from plaudit.loops import dpo, reward_model, rl, sft

    loops = {"sft": sft, "dpo": dpo, "reward-model": reward_model, "rl": rl}
    with _memory_advice(loaded):
        return loops[loaded.recipe.stage].train(loaded, sources, world)


def _processes(recipe: TrainingRecipe) -> int:
    """How many to start here. Only then torch is imported, to count GPUs. Other machines count their own."""
    if recipe.cluster.gpus == 1 or recipe.cluster.nodes > 1:
        return 1
    if recipe.run.device == "cpu":
        return process_count(recipe, 0)

    import torch

    return process_count(recipe, torch.cuda.device_count())


def _reward_workers(recipe: TrainingRecipe) -> "list[WorkerPlan]":
    if recipe.cluster.nodes == 1:  # no need to import the reward models here
        return []

    from plaudit.reward_models.worker import plan_workers

    return plan_workers(recipe)


@contextmanager
def _memory_advice(loaded: LoadedRecipe) -> Iterator[None]:
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        assert not isinstance(loaded.recipe, ScoreRecipe)
        raise OutOfMemory(
            f"out of GPU memory ({str(error).split('. ')[0]}). {_less_memory(loaded.recipe)}. `plaudit doctor` estimates the "
            "memory needed; see docs/memory.md."
        ) from None


def _less_memory(recipe: TrainingRecipe) -> str:
    """What to change, given what the run has recorded of `auto`."""
    from plaudit.run_identity import with_recorded
    from plaudit.run_progress import read_description
    from plaudit.train.memory_savers import advise, memory_savers

    with suppress(RunError):
        recipe = with_recorded(recipe, read_description(Path(recipe.run.dir) / "run.json"))
    tokens, setting = recipe.train.tokens_per_micro_batch, "train.tokens_per_micro_batch"
    now = f"{setting} (now {tokens if isinstance(tokens, str) else f'{tokens:,}'})"
    savers = [saver.replace(setting, now) for saver in memory_savers(recipe)]
    if isinstance(recipe, RLRecipe):
        savers.insert(-1, "lower rollout.max_sequences (the cache while sampling)")
    return advise(savers)
