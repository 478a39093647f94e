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
        rollout = ", lower rollout.max_sequences (the cache while sampling)" if isinstance(loaded.recipe, RLRecipe) else ""
        raise OutOfMemory(
            f"out of GPU memory ({str(error).split('. ')[0]}). Lower train.tokens_per_micro_batch (now "
            f"{_micro_batch(loaded.recipe)}), set model.gradient_checkpointing=true or optim.placement=offload{rollout}, or "
            "train a LoRA with model.lora.rank=16. `plaudit doctor` estimates the memory needed; see docs/memory.md."
        ) from None


def _micro_batch(recipe: TrainingRecipe) -> str:
    """In tokens; of `auto`, what the run has recorded."""
    from plaudit.run_identity import recorded_micro_batch
    from plaudit.run_progress import read_description

    tokens = recipe.train.tokens_per_micro_batch
    if tokens == "auto":
        with suppress(RunError):
            tokens = recorded_micro_batch(read_description(Path(recipe.run.dir) / "run.json")) or "auto"
    return tokens if isinstance(tokens, str) else f"{tokens:,}"
