"""From a recipe and the lengths of its rows to a trainer.

In three steps, so that a loop may use the model before its optimiser takes most of the memory (DPO's reference): what the processes
divide, micro-batches and checkpointed layers; the model on its device; the trainer.
"""

from typing import TypeVar

from plaudit.models.logprobs import KEEPS_LOGITS
from plaudit.models.memory import Sharding
from plaudit.models.sharded import shard_model
from plaudit.models.trainable import TrainableModel
from plaudit.recipe import RewardModelRecipe, TrainingRecipe
from plaudit.train.auto import agreed_micro_batch, agreed_sharding, resolve_auto
from plaudit.train.memory_plan import Lengths, Trained
from plaudit.train.processes import Processes
from plaudit.train.trainer import Trainer
from plaudit.world import World

Model = TypeVar("Model", bound=TrainableModel)


def plan_training(
    recipe: Trained, lengths: Lengths, world: World, recorded_micro_batch: int | None = None
) -> tuple[Trained, Sharding, int]:
    """The recipe with `auto` resolved, what the world's processes divide, and tokens per micro-batch. The same in all of them.
    `recorded_micro_batch`: what a run that is resumed was last trained with."""
    sharding = agreed_sharding(recipe, lengths, world)
    micro_batch = recipe.train.tokens_per_micro_batch
    if micro_batch == "auto":
        micro_batch = agreed_micro_batch(recipe, lengths, world, sharding, recorded_micro_batch)
    resolved = resolve_auto(recipe, lengths, processes=Processes(world.size, sharding), micro_batch=micro_batch)
    return resolved, sharding, micro_batch


def divide(trained: Model, sharding: Sharding, world: World) -> Model:
    """The model that was just loaded, with its weights divided among the processes if they are to be."""
    if sharding == "full":
        shard_model(trained.model, world)
    return trained


def build_trainer(recipe: TrainingRecipe, trained: TrainableModel, sharding: Sharding, world: World) -> Trainer:
    """`recipe`: as returned by `plan_training`."""
    if not isinstance(recipe, RewardModelRecipe):  # whose model has no logits
        assert isinstance(recipe.train.keep_logits, bool), "train.keep_logits has not been resolved"
        setattr(trained.model, KEEPS_LOGITS, recipe.train.keep_logits)
    return Trainer(
        trained, recipe.optim, seed=recipe.seed, max_skipped_steps=recipe.train.max_skipped_steps, world=world, sharding=sharding
    )
