"""The engine's operations on a CPU, compiled from `cpu_kernels.c`; in torch where that has no compiled version."""

import platform
from collections.abc import Sequence
from ctypes import byref
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import linear

from plaudit.models.heads import Heads, Rotation
from plaudit.models.logprobs import logits_of
from plaudit.rollout.native import torch_ops
from plaudit.rollout.native.cache import KVCache
from plaudit.rollout.native.cpu_library import Attention, library_for
from plaudit.rollout.native.torch_ops import attend, draw_and_advance, rotate, rotate_and_write, write

__all__ = [
    "add_norm", "attend", "draw_and_advance", "product", "rotate", "rotate_and_attend", "rotate_and_write", "swiglu", "write",
]  # fmt: skip

# For more rows a product is bound by arithmetic, and libraries are faster.
FEW_ROWS = {torch.float32: 16, torch.bfloat16: 64}
CONVERTED_AT_ONCE = 1 << 23  # weights: bounds the memory for their fp32 copies


def add_norm(x_TD: Tensor, delta_TD: Tensor | None, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    library = library_for(weight_D.dtype)
    deltas = () if delta_TD is None else (delta_TD,)
    if library is None or x_TD.dtype != torch.float32 or not _plain(weight_D.dtype, weight_D, *deltas) or not x_TD.is_contiguous():
        return torch_ops.add_norm(x_TD, delta_TD, weight_D, eps)
    out_TD, sum_TD = torch.empty_like(x_TD, dtype=weight_D.dtype), torch.empty_like(x_TD)
    delta = None if delta_TD is None else delta_TD.data_ptr()
    arguments = (x_TD.data_ptr(), delta, weight_D.data_ptr(), out_TD.data_ptr(), sum_TD.data_ptr())
    library.add_norm(*arguments, *x_TD.shape, eps, torch.get_num_threads())
    return out_TD, sum_TD


def swiglu(gate_up_TI: Tensor) -> Tensor:
    library = library_for(gate_up_TI.dtype)
    if library is None or not gate_up_TI.is_contiguous():
        return torch_ops.swiglu(gate_up_TI)
    T, both = gate_up_TI.shape
    out_TI = gate_up_TI.new_empty(T, both // 2)
    library.swiglu(gate_up_TI.data_ptr(), out_TI.data_ptr(), T, both // 2, torch.get_num_threads())
    return out_TI


def rotate_and_attend(
    qkv_BE: Tensor, heads: Heads, rotation: Rotation, cache: KVCache, layer: int, positions_B: Tensor,
    *, scale: float, window: int | None, longest: int,
) -> Tensor:  # fmt: skip
    library = library_for(qkv_BE.dtype)
    tables = [table for table in rotation[:4] if table is not None]
    if library is None or not cache.blocks_match_rows or not _plain(qkv_BE.dtype, qkv_BE, *tables):
        options = {"scale": scale, "window": window, "longest": longest}
        return torch_ops.rotate_and_attend(qkv_BE, heads, rotation, cache, layer, positions_B, **options)
    assert cache.memory is not None
    out_BE = qkv_BE.new_empty(len(qkv_BE), heads.query * heads.size)
    addresses = (None if table is None else table.data_ptr() for table in rotation[:4])
    attention = Attention(*heads, *addresses, rotation.eps, scale, window or 0)
    memory = cache.memory.data_ptr() + layer * cache.strides[1] * qkv_BE.element_size()
    library.rotate_and_attend(
        qkv_BE.data_ptr(), out_BE.data_ptr(), memory, cache.strides[0], cache.block_tokens,
        cache.block_tables.data_ptr(), cache.block_tables.stride(0),
        positions_B.data_ptr(), positions_B.stride(0), byref(attention), len(qkv_BE), torch.get_num_threads(),
    )  # fmt: skip
    return out_BE


def product(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """x Wᵀ + b. Few rows take our kernel, which reads the weights as they are; libraries reorder them first."""
    out_TO = _few_rows_product(x_TI, weight_OI, bias_O, x_TI.dtype)
    if out_TO is not None:
        return out_TO
    emulated = x_TI.dtype == torch.bfloat16 and len(x_TI) > FEW_ROWS[torch.bfloat16] and not multiplies_bf16()
    return _product_in_fp32(x_TI, weight_OI, bias_O) if emulated else linear(x_TI, weight_OI, bias_O)


def logits(hidden_BD: Tensor, weight_VD: Tensor) -> Tensor:
    """In fp32, from our kernel not rounded."""
    logits_BV = _few_rows_product(hidden_BD, weight_VD, None, torch.float32)
    return logits_of(hidden_BD, weight_VD) if logits_BV is None else logits_BV


def _few_rows_product(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, out_dtype: torch.dtype) -> Tensor | None:
    dtype, rows, inner = x_TI.dtype, *x_TI.shape
    library = library_for(dtype) if rows <= FEW_ROWS.get(dtype, 0) and computes_products(dtype) else None
    biases = () if bias_O is None else (bias_O,)
    if library is None or inner % library.lanes() or not _plain(dtype, x_TI, weight_OI, *biases):
        return None
    out_TO, wide_TI = x_TI.new_empty(rows, len(weight_OI), dtype=out_dtype), torch.empty(rows, inner)
    out = (out_TO.data_ptr(), None) if out_dtype == dtype else (None, out_TO.data_ptr())
    bias = None if bias_O is None else bias_O.data_ptr()
    arguments = (x_TI.data_ptr(), weight_OI.data_ptr(), bias, *out, wide_TI.data_ptr())
    library.product(*arguments, rows, inner, len(weight_OI), torch.get_num_threads())
    return out_TO


def _product_in_fp32(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """The bf16 product for many rows: three times as fast as oneDNN's emulation of the missing instructions."""
    x, out_TO = x_TI.float(), x_TI.new_empty(len(x_TI), len(weight_OI))
    columns = max(1, CONVERTED_AT_ONCE // weight_OI.shape[1])
    for start in range(0, len(weight_OI), columns):
        some = slice(start, start + columns)
        out_TO[:, some] = linear(x, weight_OI[some].float(), None if bias_O is None else bias_O[some].float())
    return out_TO


def computes_products(dtype: torch.dtype) -> bool:
    """Whether our kernel is used for few rows: not for bf16 where oneDNN has instructions for it."""
    return library_for(dtype) is not None and not (dtype == torch.bfloat16 and multiplies_bf16())


def rows_are_independent(dtype: torch.dtype, weights_OI: Sequence[Tensor], norms: Sequence[Tensor]) -> bool:
    """Whether all operations of a step of few rows are ours, on rows that do not depend on each other."""
    library = library_for(dtype)
    if library is None or not computes_products(dtype):
        return False
    return _plain(dtype, *weights_OI, *norms) and all(weight_OI.shape[1] % library.lanes() == 0 for weight_OI in weights_OI)


@cache
def multiplies_bf16() -> bool:
    """Whether the processor has instructions for bf16 products. Not known of others than x86, so taken for granted there."""
    return platform.machine() not in ("x86_64", "AMD64") or torch.cpu._is_avx512_bf16_supported()


def _plain(dtype: torch.dtype, *tensors: Tensor) -> bool:
    return all(tensor.dtype == dtype and tensor.is_contiguous() for tensor in tensors)
