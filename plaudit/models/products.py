"""Matrix products that come out the same, to the bit, for a token alone and among thousands.

A GPU's product of half-precision numbers is added up in fp32, along the inner dimension, in one order whatever the tile: unless the
library splits that dimension to give all multiprocessors work, which it does for few rows and a long inner dimension. So an MLP's
second product is split here, into two parts however many rows there are, and the two sums are added up (the library was never seen
to split the parts of such a batched product further); and other products are never made of fewer rows than those for which it
splits them. All that was found on an H200, for the products of Qwen2.5's 0.5B, 1.5B and 7B and 1 to 8,192 rows. Whether it holds
for others, `mismatch` in a run's metrics tells: some 1e-7, or some 1e-3.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

ALIGNED = 8  # numbers that fast products read at once
FEWEST_ROWS, LONGEST_SURE = 64, 2048  # of a product that is not split, and the inner dimension that never is
PARTS = 2


def uses_split_k(x_TI: Tensor, weight_DI: Tensor, bias_D: Tensor | None) -> bool:
    """Whether the inner dimension is split. (Sampling and training must ask the same.)"""
    columns, inner = weight_DI.shape
    return _in_one_order(x_TI) and bias_D is None and inner > 2 * columns and inner % (PARTS * ALIGNED) == 0


def split_k_product(x_TI: Tensor, weight_DI: Tensor) -> Tensor:
    """x Wᵀ over parts of the inner dimension, in fp32: [parts, T, D]."""
    x_PTI = x_TI.unflatten(1, (PARTS, -1)).transpose(0, 1)
    weight_PID = weight_DI.unflatten(1, (PARTS, -1)).permute(1, 2, 0)
    if not _in_one_order(x_TI):
        return torch.bmm(x_PTI.float(), weight_PID.float())
    return torch.bmm(x_PTI, weight_PID, out_dtype=torch.float32)


def product(x_TI: Tensor, weight_DI: Tensor, bias_D: Tensor | None) -> Tensor:
    """x Wᵀ + b."""
    T, inner = x_TI.shape
    if T >= FEWEST_ROWS or inner <= LONGEST_SURE or not _in_one_order(x_TI):
        return linear(x_TI, weight_DI, bias_D)
    return linear(pad(x_TI, (0, 0, 0, FEWEST_ROWS - T)), weight_DI, bias_D)[:T]


def _in_one_order(x: Tensor) -> bool:
    """On a GPU, in half precision: elsewhere there are many, and there is nothing to be gained."""
    return x.is_cuda and x.element_size() == 2


def fused_weight_and_bias(modules: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Of all of them, together."""
    weight = fuse_parameters([module.weight for module in modules])
    return weight, None if modules[0].bias is None else fuse_parameters([module.bias for module in modules])


def fuse_parameters(parameters: Sequence[Tensor]) -> Tensor:
    """Weights of linear layers over the same input, or their biases, as one tensor. If they do not lie side by side, they are made
    to: each parameter becomes a view of it, which it stays for training, saving and everything else."""
    whole = fused_view(parameters)
    if whole is None:
        with torch.inference_mode(False):  # training keeps using this tensor
            whole = torch.cat([parameter.detach() for parameter in parameters])
        for parameter, view in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):
            parameter.data = view
    return whole


def fused_view(parameters: Sequence[Tensor]) -> Tensor | None:
    """All of them as one tensor, if they lie so."""
    first, rows = parameters[0].detach(), sum(len(p) for p in parameters)
    at = first.data_ptr()
    for parameter in parameters:
        same = parameter.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or parameter.data_ptr() != at or not parameter.is_contiguous():
            return None
        at += parameter.numel() * parameter.element_size()
    return first.as_strided((rows, *first.shape[1:]), first.stride())
