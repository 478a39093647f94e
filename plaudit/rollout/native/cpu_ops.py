"""The engine's operations on a CPU, compiled from `cpu_kernels.c`; in torch where that has no compiled version."""

import platform
from collections.abc import Callable, Sequence
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
MANY_ROWS = 64  # the same with packed weights; also what our kernel is given at most
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
    if _can_multiply(x_TI, weight_OI, bias_O):
        return _few_rows_product(x_TI, weight_OI, bias_O, len(weight_OI), x_TI.dtype)
    emulated = x_TI.dtype == torch.bfloat16 and len(x_TI) > FEW_ROWS[torch.bfloat16] and not multiplies_bf16()
    return _product_in_fp32(x_TI, weight_OI, bias_O) if emulated else linear(x_TI, weight_OI, bias_O)


def logits(hidden_BD: Tensor, weight_VD: Tensor) -> Tensor:
    """In fp32, from our kernel not rounded."""
    if _can_multiply(hidden_BD, weight_VD, None):
        return _few_rows_product(hidden_BD, weight_VD, None, len(weight_VD), torch.float32)
    return logits_of(hidden_BD, weight_VD)


def _can_multiply(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> bool:
    """Whether there are few rows, and the kernel knows such numbers and sizes."""
    dtype, (rows, inner) = x_TI.dtype, x_TI.shape
    if rows > FEW_ROWS.get(dtype, 0) or not computes_products(dtype) or inner % _width(dtype):
        return False
    return _plain(dtype, x_TI, weight_OI) if bias_O is None else _plain(dtype, x_TI, weight_OI, bias_O)


@cache
def _width(dtype: torch.dtype) -> int:
    """Of vectors, in numbers."""
    library = library_for(dtype)
    assert library is not None
    return library.lanes()


def pack(weight_OI: Tensor, bias_O: Tensor | None) -> Callable[[Tensor], Tensor]:
    """`product` with a copy of the weights, in the order in which our kernel reads it. More than MANY_ROWS rows take no copy."""
    packed, outer, dtype = _packed(weight_OI), len(weight_OI), weight_OI.dtype
    assert bias_O is None or _plain(dtype, bias_O)

    def multiply(x_TI: Tensor) -> Tensor:
        if len(x_TI) > MANY_ROWS or not _plain(dtype, x_TI):
            return product(x_TI, weight_OI, bias_O)
        return _few_rows_product(x_TI, packed, bias_O, outer, dtype, is_packed=True)

    return multiply


def pack_head(weight_VD: Tensor) -> Callable[[Tensor], Tensor]:
    """`logits`, likewise."""
    packed, vocabulary, dtype = _packed(weight_VD), len(weight_VD), weight_VD.dtype

    def multiply(hidden_BD: Tensor) -> Tensor:
        if len(hidden_BD) > MANY_ROWS or not _plain(dtype, hidden_BD):
            return logits(hidden_BD, weight_VD)
        return _few_rows_product(hidden_BD, packed, None, vocabulary, torch.float32, is_packed=True)

    return multiply


def _packed(weight_OI: Tensor) -> Tensor:
    library, (outer, inner), weight_OI = library_for(weight_OI.dtype), weight_OI.shape, weight_OI.contiguous()
    assert library is not None
    packed = weight_OI.new_empty(-(-outer // library.columns()) * library.columns(), inner)
    library.pack(weight_OI.data_ptr(), packed.data_ptr(), inner, outer, torch.get_num_threads())
    return packed


def _few_rows_product(
    x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, outer: int, out_dtype: torch.dtype, *, is_packed: bool = False
) -> Tensor:
    dtype, rows, inner = x_TI.dtype, *x_TI.shape
    library = library_for(dtype)
    assert library is not None
    whole_vectors = -(-rows // _width(dtype)) * _width(dtype)
    # Memory of tensors begins where vectors may.
    out_TO, wide_TI = x_TI.new_empty(rows, outer, dtype=out_dtype), x_TI.new_empty(whole_vectors, inner, dtype=torch.float32)
    out = (out_TO.data_ptr(), None) if out_dtype == dtype else (None, out_TO.data_ptr())
    bias = None if bias_O is None else bias_O.data_ptr()
    arguments = (x_TI.data_ptr(), weight_OI.data_ptr(), bias, *out, wide_TI.data_ptr())
    (library.packed_product if is_packed else library.product)(*arguments, rows, inner, outer, torch.get_num_threads())
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
    return _plain(dtype, *weights_OI, *norms) and all(weight_OI.shape[1] % _width(dtype) == 0 for weight_OI in weights_OI)


@cache
def multiplies_bf16() -> bool:
    """Whether the processor has instructions for bf16 products. Not known of others than x86, so taken for granted there."""
    return platform.machine() not in ("x86_64", "AMD64") or torch.cpu._is_avx512_bf16_supported()


def _plain(dtype: torch.dtype, *tensors: Tensor) -> bool:
    return all(tensor.dtype == dtype and tensor.is_contiguous() for tensor in tensors)
