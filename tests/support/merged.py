"""LoRA with merged weights, without a GPU."""

from functools import partial
from typing import Any

from torch import Tensor

from plaudit.models.fused import linears_by_input
from plaudit.models.merged import use_merged


def compute_merged(model: Any) -> None:
    """In place of `merge_adapters`: every adapted module by the merged product that it is a part of, without the kernels around
    it. Engines then sample with the merged weights too."""
    assert use_merged(model, linears_by_input)
    for layer in model.get_decoder().layers:
        for module in (module for modules in linears_by_input(layer) for module in modules):
            module.forward = partial(_forward, module)


def _forward(module: Any, x: Tensor) -> Tensor:
    merged, rows = module.merged_rows
    return module.base_layer(x) if merged.disabled else merged(x.flatten(0, -2))[:, rows].view(*x.shape[:-1], -1)
