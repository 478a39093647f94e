"""Writes keys and values to the cache."""

# A launch takes more arguments than the kernel has.
# pyright: reportCallIssue=false, reportArgumentType=false

import triton
import triton.language as tl
from torch import Tensor

from plaudit.models.heads import Heads, Rotation, next_power_of_2
from plaudit.models.kernels.layers import rotate
from plaudit.rollout.native.cache import KVCache


def rotate_and_write(
    qkv_TE: Tensor, heads: Heads, rotation: Rotation, cache: KVCache, layer: int, rows_T: Tensor, positions_T: Tensor
) -> None:
    rotate(qkv_TE, heads, rotation, positions_T)
    qkv_THD = qkv_TE.view(len(qkv_TE), -1, heads.size)
    write(qkv_THD[:, heads.query : heads.query + heads.kv], qkv_THD[:, heads.query + heads.kv :], cache, layer, rows_T, positions_T)


def write(key_TKD: Tensor, value_TKD: Tensor, cache: KVCache, layer: int, rows_T: Tensor, positions_T: Tensor) -> None:
    T, kv_heads, size = key_TKD.shape
    _write[(T, 2)](
        key_TKD, key_TKD.stride(0), key_TKD.stride(1), value_TKD, value_TKD.stride(0), value_TKD.stride(1),
        cache.anchor, cache.base, cache.block_tables, cache.block_tables.stride(0),
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
