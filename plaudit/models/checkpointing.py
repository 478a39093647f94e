"""Gradient checkpointing: layers that keep only their inputs and recompute the rest in the backward pass.

The first layers are checkpointed, because the backward pass reaches them last: a recomputed layer reuses the memory that later
layers have freed.
"""

from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from plaudit.errors import RecipeError
from plaudit.recipe import ModelSettings


def checkpoint_layers(model: PreTrainedModel, recipe: ModelSettings) -> None:
    """Checkpoint as many layers as the recipe says. `auto` is resolved earlier (train/auto.py) and means none here."""
    wanted = recipe.gradient_checkpointing
    if wanted is False or wanted == "auto":
        return
    model.gradient_checkpointing_enable({"use_reentrant": False})
    if recipe.lora is not None:
        model.enable_input_require_grads()
    if wanted is True:
        return
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if wanted > len(layers):
        raise RecipeError(f"gradient_checkpointing is {wanted}, and {recipe.path} has {len(layers)} layers: true stands for all")
    for layer in layers[wanted:]:
        layer.gradient_checkpointing = False
