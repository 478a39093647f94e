"""Parameters of a model that is trained, for memory plans: all, trained ones, merged and quantised ones. Nothing is loaded."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PretrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from plaudit.errors import RecipeError
from plaudit.models.fused import can_train_fused, has_known_layers, linears_by_input
from plaudit.recipe import LoraSettings, ModelSettings


class ParameterCounts(NamedTuple):
    """Of a model as it is trained."""

    parameters: int
    trainable: int
    largest: int
    """Of one parameter."""
    layer: int
    """Of the largest layer."""
    trained_of_layer: float
    in_layers: int
    """Of all layers."""
    adapted_inputs: int
    """Width of all adapters' inputs."""
    can_be_fused: bool
    merged: int
    """Weights that have a merged copy if adapters are merged: those of adapted linear layers, and of others over the same input."""
    linears: int
    """Weights of all linear layers of the decoder's layers; 0 unless they can be quantised."""
    largest_product: int
    """Of these, those over the same input."""


_KNOWN: dict[tuple[str, str, LoraSettings | None, bool], ParameterCounts] = {}


def count_for_training(config: PretrainedConfig, recipe: ModelSettings, *, scalar: bool) -> ParameterCounts:
    """Kept: a search over settings plans the same model many times."""
    described = config.to_dict()
    described.pop("_name_or_path", None)
    key = recipe.path if recipe.trust_remote_code else "", repr(described), recipe.lora, scalar
    if key not in _KNOWN:
        if scalar:
            config.num_labels = 1
        auto = AutoModelForSequenceClassification if scalar else AutoModelForCausalLM
        with torch.device("meta"):
            model = auto.from_config(config, trust_remote_code=recipe.trust_remote_code)
        sizes = [p.numel() for p in model.parameters()]
        layers = [sum(p.numel() for p in m.parameters()) for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
        adapted = _adapted(model, recipe.lora) if recipe.lora else []
        adapts_others = recipe.lora is not None and _adapts_others(model, recipe.lora)
        rank = recipe.lora.rank if recipe.lora else 0
        trainable = rank * sum(m.in_features + m.out_features for m in adapted) if recipe.lora else sum(sizes)
        layer = max(layers, default=0)
        can_be_fused = can_train_fused(model.get_decoder())  # a classifier's decoder is fused like that of any other model
        products = _products(model.get_decoder()) if has_known_layers(model.get_decoder()) else []
        product_sizes = [sum(m.weight.numel() for m in modules) for modules in products]
        _KNOWN[key] = ParameterCounts(
            parameters=sum(sizes),
            trainable=trainable,
            largest=max(rank * max((max(m.in_features, m.out_features) for m in adapted), default=0), 1)
            if recipe.lora
            else max(sizes),
            layer=layer,
            trained_of_layer=trainable / max(len(layers), 1) if recipe.lora else layer,
            in_layers=sum(layers),
            adapted_inputs=sum(linear.in_features for linear in adapted),
            can_be_fused=can_be_fused,
            merged=0 if adapts_others else _count_merged(products, adapted),
            linears=sum(product_sizes),
            largest_product=max(product_sizes, default=0),
        )
    return _KNOWN[key]


def _products(decoder: Any) -> list[tuple[torch.nn.Linear, ...]]:
    return [modules for layer in decoder.layers for modules in linears_by_input(layer)]


def _count_merged(products: Sequence[Sequence[torch.nn.Linear]], adapted: Sequence[torch.nn.Linear]) -> int:
    found = {id(module) for module in adapted}
    return sum(m.weight.numel() for modules in products if any(id(m) in found for m in modules) for m in modules)


def _adapted(model: torch.nn.Module, lora: LoraSettings) -> list[torch.nn.Linear]:
    return [
        module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and not name.endswith(("lm_head", "score")) and _is_target(name, lora.targets)
    ]


def _adapts_others(model: torch.nn.Module, lora: LoraSettings) -> bool:
    """Whether a module that is not linear, as the embeddings, has an adapter: then all are computed by peft's modules."""
    others = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Embedding)]
    return lora.targets != "all-linear" and any(_is_target(name, lora.targets) for name in others)


def _is_target(name: str, targets: str | tuple[str, ...]) -> bool:
    """As in peft: a string is a pattern for the full name, a list contains suffixes of names."""
    if targets == "all-linear":
        return True
    if isinstance(targets, str):
        try:
            return re.fullmatch(targets, name) is not None
        except re.error as error:
            raise RecipeError(f"model.lora.targets: {targets!r} is not a pattern: {error}") from None
    return any(f".{name}".endswith(f".{target}") for target in targets)
