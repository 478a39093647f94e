"""What stands between a layer's matrix products: residual and norm, rotation and the cache, the gate of the MLP.

Each rounds where the modules of transformers round, so that a half-precision sampler stays as near to its trainer as it can.
"""

# A launch takes more arguments than the kernel has.
# pyright: reportCallIssue=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from plaudit.rollout.native.cache import CacheView, Heads, Rotation, next_power_of_2

TILE = 128  # of a product's output, for one multiprocessor


def parts_of_product(rows: int, columns: int) -> int:
    """Into how many parts the inner dimension is best split, to give all multiprocessors work (measured on an H200)."""
    tiles = -(-rows // TILE) * -(-columns // TILE)
    return 1 if tiles > 64 else 2 if tiles > 24 else 4


def add_norm(x_TD: Tensor, delta: Tensor | None, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`delta` [T, D], or [parts, T, D] in fp32."""
    normed_TD = torch.empty_like(x_TD, dtype=weight_D.dtype)
    summed_TD = x_TD if delta is None else torch.empty_like(x_TD)
    T, D = x_TD.shape
    block = next_power_of_2(D)
    parts = 0 if delta is None else 1 if delta.dim() == 2 else len(delta)
    _add_norm[(T,)](
        x_TD, x_TD if delta is None else delta, weight_D, normed_TD, summed_TD, eps, T * D,
        D=D, BLOCK=block, PARTS=parts, num_warps=4 if block <= 2048 else 16,
    )  # fmt: skip
    return normed_TD, summed_TD


@triton.jit
def _add_norm(
    x_ptr, delta_ptr, weight_ptr, normed_ptr, summed_ptr, eps, part_stride,
    D: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    dtype = x_ptr.dtype.element_ty
    weight_dtype = weight_ptr.dtype.element_ty
    at = tl.arange(0, BLOCK)
    inside = at < D
    row = tl.program_id(0).to(tl.int64) * D
    x = tl.load(x_ptr + row + at, mask=inside, other=0.0).to(tl.float32)
    if PARTS > 0:
        delta = tl.load(delta_ptr + row + at, mask=inside, other=0.0).to(tl.float32)
        for part in tl.static_range(1, PARTS):  # pyright: ignore[reportGeneralTypeIssues]
            delta += tl.load(delta_ptr + part * part_stride + row + at, mask=inside, other=0.0)
        x = (x + delta.to(weight_dtype).to(tl.float32)).to(dtype)
        tl.store(summed_ptr + row + at, x, mask=inside)
        x = x.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / D + eps)
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed_ptr + row + at, ((x * scale).to(dtype).to(tl.float32) * weight).to(weight_dtype), mask=inside)


def swiglu(gate_up_TI: Tensor) -> Tensor:
    T, width = gate_up_TI.shape
    half = width // 2
    out_TI = torch.empty(T, half, dtype=gate_up_TI.dtype, device=gate_up_TI.device)
    block = 1024
    _swiglu[(T, -(-half // block))](gate_up_TI, out_TI, HALF=half, BLOCK=block, num_warps=4)
    return out_TI


@triton.jit
def _swiglu(gate_up_ptr, out_ptr, HALF: tl.constexpr, BLOCK: tl.constexpr):
    dtype = out_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < HALF
    gate = tl.load(gate_up_ptr + row * 2 * HALF + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * HALF + HALF + at, mask=inside, other=0.0).to(tl.float32)
    gated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * HALF + at, (gated * up).to(dtype), mask=inside)


HEADS_AT_ONCE = 4


def rotate_and_write(
    qkv_TE: Tensor, heads: Heads, rotation: Rotation, cache: CacheView, layer: int, rows_T: Tensor, positions_T: Tensor
) -> None:
    _launch_rotation(qkv_TE, heads, rotation, positions_T, cache, layer, rows_T)


def rotate(qkv_TE: Tensor, heads: Heads, rotation: Rotation, positions_T: Tensor) -> None:
    _launch_rotation(qkv_TE, heads, rotation, positions_T)


def _launch_rotation(
    qkv_TE: Tensor, heads: Heads, rotation: Rotation, positions_T: Tensor,
    cache: CacheView | None = None, layer: int = 0, rows_T: Tensor | None = None,
) -> None:  # fmt: skip
    total = heads.query + (heads.kv if cache is None else 2 * heads.kv)
    norm = rotation.query_norm
    # Without a cache: anything in its place, nobody looks at it.
    places = (
        (qkv_TE, positions_T, positions_T, 0, 0, 0, 0, positions_T)
        if cache is None
        else (
            cache.anchor, cache.base, cache.tables, cache.tables.stride(0),
            cache.strides[0], layer * cache.strides[1], cache.strides[2], rows_T,
        )
    )  # fmt: skip
    _rotate_and_write[(len(qkv_TE), -(-total // HEADS_AT_ONCE))](
        qkv_TE, qkv_TE.stride(0), rotation.cos, rotation.sin,
        rotation.cos if norm is None else norm, rotation.cos if norm is None else rotation.key_norm, rotation.eps,
        *places, positions_T, positions_T.stride(0),
        QUERY=heads.query, KV=heads.kv, D=heads.size, HALF=next_power_of_2(heads.size // 2),
        BLOCK=1 if cache is None else cache.block_tokens, AT_ONCE=HEADS_AT_ONCE, NORM=norm is not None, WRITE=cache is not None,
        num_warps=2,
    )  # fmt: skip


@triton.jit
def _rotate_and_write(
    qkv_ptr, qkv_stride, cos_ptr, sin_ptr, query_norm_ptr, key_norm_ptr, eps,
    anchor_ptr, base_ptr, tables_ptr, tables_stride, block_stride, layer_offset, value_offset,
    rows_ptr, positions_ptr, positions_stride,
    QUERY: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr, NORM: tl.constexpr, WRITE: tl.constexpr,
):  # fmt: skip
    """Each program: some heads of one token. A head's halves a, b → a cos − b sin, b cos + a sin, in place."""
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + token * positions_stride).to(tl.int64)
    if position < 0:
        return
    dtype = qkv_ptr.dtype.element_ty
    head = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)[:, None]
    at = tl.arange(0, HALF)[None, :]
    inside = (head < QUERY + 2 * KV) & (at < D // 2)
    place = qkv_ptr + token * qkv_stride + head * D + at
    a = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(place + D // 2, mask=inside, other=0.0).to(tl.float32)
    turned = head < QUERY + KV
    if NORM:
        scale = 1.0 / tl.sqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + eps)[:, None]
        is_query = head < QUERY
        low = tl.load(query_norm_ptr + at, mask=inside & is_query, other=0.0)
        low += tl.load(key_norm_ptr + at, mask=inside & (~is_query), other=0.0)
        high = tl.load(query_norm_ptr + D // 2 + at, mask=inside & is_query, other=0.0)
        high += tl.load(key_norm_ptr + D // 2 + at, mask=inside & (~is_query), other=0.0)
        a = tl.where(turned, ((a * scale).to(dtype).to(tl.float32) * low.to(tl.float32)).to(dtype).to(tl.float32), a)
        b = tl.where(turned, ((b * scale).to(dtype).to(tl.float32) * high.to(tl.float32)).to(dtype).to(tl.float32), b)
    angle = position * D + at
    cos_a = tl.load(cos_ptr + angle, mask=at < D // 2, other=0.0).to(tl.float32)
    cos_b = tl.load(cos_ptr + angle + D // 2, mask=at < D // 2, other=0.0).to(tl.float32)
    sin_a = tl.load(sin_ptr + angle, mask=at < D // 2, other=0.0).to(tl.float32)
    sin_b = tl.load(sin_ptr + angle + D // 2, mask=at < D // 2, other=0.0).to(tl.float32)
    turned_a = (a * cos_a).to(dtype).to(tl.float32) + (-b * sin_a).to(dtype).to(tl.float32)
    turned_b = (b * cos_b).to(dtype).to(tl.float32) + (a * sin_b).to(dtype).to(tl.float32)
    a = tl.where(turned, turned_a, a).to(dtype)
    b = tl.where(turned, turned_b, b).to(dtype)
    tl.store(place, a, mask=inside & turned)
    tl.store(place + D // 2, b, mask=inside & turned)
    if not WRITE:
        return
    # Keys and values to the cache: [block, layer, key or value, head, position, size].
    row = tl.load(rows_ptr + token).to(tl.int64)
    block = tl.load(tables_ptr + row * tables_stride + position // BLOCK).to(tl.int64)
    cache_ptr = anchor_ptr + tl.multiple_of(tl.load(base_ptr), 16)
    kv_head = tl.where(turned, head - QUERY, head - QUERY - KV)
    slot = cache_ptr + block * block_stride + layer_offset + tl.where(turned, 0, value_offset)
    slot += (kv_head * BLOCK + position % BLOCK) * D + at
    kept = inside & (head >= QUERY)
    tl.store(slot, a, mask=kept)
    tl.store(slot + D // 2, b, mask=kept)


def write(key_TKD: Tensor, value_TKD: Tensor, cache: CacheView, layer: int, rows_T: Tensor, positions_T: Tensor) -> None:
    T, kv_heads, size = key_TKD.shape
    _write[(T, 2)](
        key_TKD, key_TKD.stride(0), key_TKD.stride(1), value_TKD, value_TKD.stride(0), value_TKD.stride(1),
        cache.anchor, cache.base, cache.tables, cache.tables.stride(0),
        cache.strides[0], layer * cache.strides[1], cache.strides[2],
        rows_T, positions_T, positions_T.stride(0),
        KV=kv_heads, HEADS=next_power_of_2(kv_heads), D=size, WIDTH=next_power_of_2(size),
        BLOCK=cache.block_tokens, num_warps=2,
    )  # fmt: skip


@triton.jit
def _write(
    key_ptr, key_stride, key_head_stride, value_ptr, value_stride, value_head_stride,
    anchor_ptr, base_ptr, tables_ptr, tables_stride, block_stride, layer_offset, value_offset,
    rows_ptr, positions_ptr, positions_stride,
    KV: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + token * positions_stride).to(tl.int64)
    if position < 0:
        return
    head = tl.arange(0, HEADS)[:, None]
    at = tl.arange(0, WIDTH)[None, :]
    inside = (head < KV) & (at < D)
    row = tl.load(rows_ptr + token).to(tl.int64)
    block = tl.load(tables_ptr + row * tables_stride + position // BLOCK).to(tl.int64)
    slot = anchor_ptr + tl.multiple_of(tl.load(base_ptr), 16) + block * block_stride + layer_offset
    slot += (head * BLOCK + position % BLOCK) * D + at
    if tl.program_id(1) == 0:
        tl.store(slot, tl.load(key_ptr + token * key_stride + head * key_head_stride + at, mask=inside), mask=inside)
    else:
        value = tl.load(value_ptr + token * value_stride + head * value_head_stride + at, mask=inside)
        tl.store(slot + value_offset, value, mask=inside)
