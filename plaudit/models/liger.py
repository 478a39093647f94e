"""Liger's kernels for norms and MLPs, if the recipe enables them and they are installed.

They save less for the backward pass: a norm one number per token besides its input, an MLP no activation output. The formulas are
the same but round differently, so Liger is opt-in. Differs from Liger's own usage: only this model is patched. Liger installs its
classes in transformers for all later models, and reward models on a CPU could not run them. Its rotary embedding cannot be applied
any other way and is left out; so is its loss, since full logits are never materialised here anyway.
"""

import importlib
from typing import Any

import torch
from transformers import PreTrainedModel

from plaudit.errors import RecipeError
from plaudit.models.residual import is_supported_family


def require_liger(name: str, device: torch.device) -> Any:
    """Liger's function that patches a model with its kernels."""
    if device.type != "cuda":
        raise RecipeError(f"{name}: Liger's kernels run on a GPU, and the model is on the {device.type}; set liger to false")
    try:
        return importlib.import_module("liger_kernel.transformers")._apply_liger_kernel_to_instance
    except ImportError as error:
        raise RecipeError(f"liger is true, but it is not here ({error}). Install it: pip install liger-kernel") from None


def use_liger(model: PreTrainedModel, device: torch.device) -> None:
    """Patch the model with Liger's kernels; saved files are unchanged."""
    decoder: Any = model.get_decoder()
    name = str(model.name_or_path)
    if not is_supported_family(decoder):
        raise RecipeError(f"{name}: Liger's kernels are used for Llama, Mistral, Qwen2 and Qwen3 models; set liger to false")
    if decoder.config.hidden_act not in ("silu", "swish"):
        raise RecipeError(f"{name}: Liger's MLP computes SiLU, and this model has {decoder.config.hidden_act}; set liger to false")
    apply = require_liger(name, device)
    modeling = importlib.import_module(type(decoder).__module__)
    before = dict(vars(modeling))
    try:
        apply(model=decoder, rope=False, cross_entropy=False, fused_linear_cross_entropy=False, rms_norm=True, swiglu=True)
    finally:
        for key, value in before.items():
            setattr(modeling, key, value)
