"""Settings that would make training take less memory: what messages suggest."""

from collections.abc import Sequence
from contextlib import suppress

from plaudit.models.folder import read_config
from plaudit.models.parameter_counts import count_for_training
from plaudit.recipe import ModelSettings, RewardModelRecipe, TrainingRecipe
from plaudit.train.memory_plan import plan_policy

SMALLEST_MICRO_BATCH = 2_048
"""Tokens. In smaller ones, passes are too short to keep a GPU busy."""


def memory_savers(recipe: TrainingRecipe, *, longest: int = 0, on_gpu: bool = True) -> list[str]:
    """What is left to change in a recipe without `auto`: first what changes least, last what trains something
    else. Micro-batches are as large as the `longest` sequence in any case."""
    savers, tokens = [], recipe.train.tokens_per_micro_batch
    if not isinstance(recipe, RewardModelRecipe) and recipe.train.keep_logits is True:
        savers.append("set train.keep_logits=false")
    if tokens == "auto" or tokens > max(SMALLEST_MICRO_BATCH, longest):
        savers.append("lower train.tokens_per_micro_batch")
    if not _checkpoints_all_layers(recipe):
        savers.append("set model.gradient_checkpointing=true")
    if on_gpu and recipe.optim.placement == "resident":
        savers.append("set optim.placement=offload")
    return [*savers, smaller_weights(recipe)]


def smaller_weights(recipe: TrainingRecipe) -> str:
    """What would take less memory for weights and optimiser than this."""
    model = recipe.model
    if model.lora is None:
        return "use model.lora"
    if model.lora.base_bits != 4 and _can_be_quantised(recipe, model):
        return "set model.lora.base_bits=4"
    return "choose a smaller model"


def _can_be_quantised(recipe: TrainingRecipe, model: ModelSettings) -> bool:
    if model.liger or recipe.cluster.sharding == "full" or model.lora is None or model.lora.dropout:
        return False
    with suppress(Exception):
        config = read_config(model.path, trust_remote_code=model.trust_remote_code)
        return count_for_training(config, model, scalar=isinstance(recipe, RewardModelRecipe)).merged > 0
    return False


def advise(savers: Sequence[str]) -> str:
    """'Set a, lower b, or use c'."""
    text = ", ".join([*savers[:-1], f"or {savers[-1]}"]) if len(savers) > 1 else savers[0]
    return text[0].upper() + text[1:]


def _checkpoints_all_layers(recipe: TrainingRecipe) -> bool:
    checkpointed = recipe.model.gradient_checkpointing
    if isinstance(checkpointed, bool) or checkpointed == "auto":
        return checkpointed is True
    with suppress(Exception):  # a model that cannot be planned may still be trained
        return checkpointed >= plan_policy(recipe).layers
    return False
