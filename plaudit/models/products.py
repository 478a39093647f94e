"""Matrix products that are bit-identical for a token alone and among thousands.

A GPU accumulates half-precision products in fp32, along the inner dimension and in one order whatever the tile, unless the library
splits that dimension (split-K) to occupy all multiprocessors, as it does for few rows and a long inner dimension. So the MLP's
second product is always split here, into two parts for any number of rows, and the two sums are added (the library was never seen
to split the parts of such a batched product further). Other products are padded to enough rows that the library does not split
them. All this was measured on an H200, for the products of Qwen2.5 0.5B, 1.5B and 7B with 1 to 8,192 rows.
For other models, `mismatch` in a run's metrics shows whether it holds: 0 if so, about 1e-3 if not.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

ALIGNED = 8  # elements that fast kernels read at once
FEWEST_ROWS, LONGEST_SURE = 64, 2048  # rows from which a product is not split; inner dimension up to which it never is
PARTS = 2


def uses_split_k(x_TI: Tensor, weight_DI: Tensor, bias_D: Tensor | None) -> bool:
    """Whether the inner dimension is split. Sampling and training must use the same rule."""
    columns, inner = weight_DI.shape
    return _in_one_order(x_TI) and bias_D is None and inner > 2 * columns and inner % (PARTS * ALIGNED) == 0


def split_k_product(x_TI: Tensor, weight_DI: Tensor) -> Tensor:
    """x Wᵀ for each part of the inner dimension, in fp32: [parts, T, D]."""
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


def summed_product(x_TI: Tensor, weight_DI: Tensor, bias_D: Tensor | None) -> Tensor:
    """The same of a layer whose input no other layer has: split-K wherever the sampler uses it, its parts added up."""
    if not uses_split_k(x_TI, weight_DI, bias_D):
        return product(x_TI, weight_DI, bias_D)
    from plaudit.models.kernels import sum_splits

    return sum_splits(split_k_product(x_TI, weight_DI), x_TI.dtype)


def _in_one_order(x: Tensor) -> bool:
    """Half precision on a GPU; elsewhere the order of summation varies, and padding or splitting would gain nothing."""
    return x.is_cuda and x.element_size() == 2


def fused_weight_and_bias(modules: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """The modules' weights as one tensor, and likewise their biases."""
    weight = fuse_parameters([module.weight for module in modules])
    return weight, None if modules[0].bias is None else fuse_parameters([module.bias for module in modules])


def fuse_parameters(parameters: Sequence[Tensor]) -> Tensor:
    """Weights (or biases) of linear layers that share an input, as one tensor. If they are not adjacent in memory, they are moved:
    each parameter becomes a view of the fused tensor, and remains one for training, saving and everything else."""
    whole = fused_view(parameters)
    if whole is None:
        with torch.inference_mode(False):  # training keeps using this tensor
            whole = torch.cat([parameter.detach() for parameter in parameters])
        for parameter, view in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):
            parameter.data = view
    return whole


def fused_view(parameters: Sequence[Tensor]) -> Tensor | None:
    """All parameters as one tensor, if they are adjacent in memory."""
    first = parameters[0]
    end, rows = first.data_ptr(), 0
    for parameter in parameters:
        if parameter.data_ptr() != end or not parameter.is_contiguous():
            return None
        end += parameter.nbytes
        rows += parameter.shape[0]
    storage = first.untyped_storage()
    # All of it is in the first one's memory: another's could begin where that ends.
    if storage.data_ptr() + storage.nbytes() < end:
        return None
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride())
