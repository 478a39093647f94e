"""Gradient checkpointing: layers that keep only what they were given, and compute the rest again in the backward pass.

The first layers are the ones to take: the backward pass comes to them last, when those behind them have given their activations
back. So what one of them takes while it is computed again stands where the others' was.
"""

from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from plaudit.errors import RecipeError
from plaudit.recipe import ModelSettings


def checkpoint_layers(model: PreTrainedModel, recipe: ModelSettings) -> None:
    """As many as the recipe says. `auto` is for whoever trains to decide before (train/memory_plan.py), and means none here."""
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
