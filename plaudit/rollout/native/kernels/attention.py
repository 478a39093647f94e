"""Attention of one new token per sequence to its past in the cache, after its own key and value have been put there.

A program reads a stretch of one sequence's keys and values for one key-value head, once for all query heads that share it, block by
block through the sequence's table. Long sequences are split among programs; their parts meet in a second kernel:

    out = Σ_s out_s · exp(m_s − m) / Σ_s l_s · exp(m_s − m),     m = max m_s
"""

# A launch takes more arguments than the kernel has.
# pyright: reportCallIssue=false, reportArgumentType=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from plaudit.rollout.native.cache import CacheView, Heads, Rotation, next_power_of_2

LOG2_E = 1.4426950408889634
FEWEST_QUERY_ROWS = 16  # that tensor cores take
WARPS, STAGES = 2, 3
MOST_PARTS = 32
PROGRAMS, FEWEST_TOKENS, MOST_TOKENS = 512, 128, 1024  # wanted at least; of a part


class Split(NamedTuple):
    """How sequences are shared out."""

    parts: int
    tokens: int
    """Of a part."""


def split_for(sequences: int, kv_heads: int, longest: int) -> Split:
    """Enough programs to fill the device, and none that goes on long after the others; not so many that a part is tiny."""
    wanted = next_power_of_2(-(-PROGRAMS // (sequences * kv_heads)))
    longest = next_power_of_2(longest)
    parts = max(min(max(min(wanted, longest // FEWEST_TOKENS), longest // MOST_TOKENS), MOST_PARTS), 1)
    return Split(parts, longest // parts)


def attend(
    query_BHD: Tensor, cache: CacheView, layer: int, positions_B: Tensor, *, scale: float, window: int | None, longest: int
) -> Tensor:
    return _launch(query_BHD, cache, layer, positions_B, scale, window, longest)


def rotate_and_attend(
    qkv_BE: Tensor, heads: Heads, rotation: Rotation, cache: CacheView, layer: int, positions_B: Tensor,
    *, scale: float, window: int | None, longest: int,
) -> Tensor:  # fmt: skip
    query_BHD = qkv_BE.view(len(qkv_BE), -1, heads.size)[:, : heads.query]
    return _launch(query_BHD, cache, layer, positions_B, scale, window, longest, rotation)


def _launch(
    query_BHD: Tensor, cache: CacheView, layer: int, positions_B: Tensor,
    scale: float, window: int | None, longest: int, rotation: Rotation | None = None,
) -> Tensor:  # fmt: skip
    B, heads, size = query_BHD.shape
    split = split_for(B, cache.kv_heads, longest)
    group = heads // cache.kv_heads
    out_BE = torch.empty(B, heads * size, dtype=query_BHD.dtype, device=query_BHD.device)
    if split.parts == 1:
        parts = sums = out_BE
    else:
        parts = torch.empty(B, heads, split.parts, size, dtype=torch.float32, device=query_BHD.device)
        sums = torch.empty(B, heads, split.parts, 2, dtype=torch.float32, device=query_BHD.device)
    turn = rotation or Rotation(query_BHD, query_BHD)  # tables that nobody reads
    norm = turn.query_norm is not None
    _attend[(B, cache.kv_heads, split.parts)](
        query_BHD, query_BHD.stride(0), query_BHD.stride(1), turn.cos, turn.sin,
        turn.query_norm if norm else turn.cos, turn.key_norm if norm else turn.cos, turn.eps,
        cache.anchor, cache.base, cache.tables, cache.tables.stride(0),
        cache.strides[0], layer * cache.strides[1], cache.strides[2],
        positions_B, positions_B.stride(0), out_BE, parts, sums, scale * LOG2_E, window or 0, split.parts, split.tokens,
        HEADS=heads, KV=cache.kv_heads, GROUP=group, ROWS=max(FEWEST_QUERY_ROWS, next_power_of_2(group)),
        D=size, WIDTH=next_power_of_2(size), BLOCK=cache.block_tokens,
        ROTATE=rotation is not None, NORM=norm, SPLIT=split.parts > 1, WINDOW=window is not None,
        num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    if split.parts > 1:
        _combine[(B, heads)](
            parts, sums, positions_B, positions_B.stride(0), out_BE, split.parts, split.tokens,
            HEADS=heads, D=size, WIDTH=next_power_of_2(size), MANY=split.parts, num_warps=2,
        )  # fmt: skip
    return out_BE


@triton.jit
def _rotated(
    place, at, inside, position, cos_ptr, sin_ptr, norm_ptr, eps, D: tl.constexpr, NORM: tl.constexpr, dtype: tl.constexpr
):  # fmt: skip
    """Heads [rows, size] that begin at `place`, turned by their position: x cos ± x' sin, x' the other half of the head."""
    other = (at + D // 2) % D
    x = tl.load(place + at, mask=inside, other=0.0).to(tl.float32)
    x_other = tl.load(place + other, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        scale = 1.0 / tl.sqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        weight = tl.load(norm_ptr + at, mask=at < D, other=0.0).to(tl.float32)
        weight_other = tl.load(norm_ptr + other, mask=at < D, other=0.0).to(tl.float32)
        x = ((x * scale).to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)
        x_other = ((x_other * scale).to(dtype).to(tl.float32) * weight_other).to(dtype).to(tl.float32)
    cos = tl.load(cos_ptr + position * D + at, mask=at < D, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + position * D + at, mask=at < D, other=0.0).to(tl.float32)
    sin = tl.where(at < D // 2, -sin, sin)
    return ((x * cos).to(dtype).to(tl.float32) + (x_other * sin).to(dtype).to(tl.float32)).to(dtype)


@triton.jit
def _attend(
    query_ptr, query_stride, query_head_stride, cos_ptr, sin_ptr, query_norm_ptr, key_norm_ptr, eps,
    anchor_ptr, base_ptr, tables_ptr, tables_stride, block_stride, layer_offset, value_offset,
    positions_ptr, positions_stride, out_ptr, parts_ptr, sums_ptr, scale, window, parts, part_tokens,
    HEADS: tl.constexpr, KV: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, ROTATE: tl.constexpr, NORM: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    length = tl.load(positions_ptr + sequence * positions_stride).to(tl.int32) + 1
    begin = part * part_tokens
    end = tl.minimum(length, begin + part_tokens)
    if begin >= end:
        return
    first = begin
    if WINDOW:
        seen_from = length - window
        first = tl.maximum(begin, (seen_from // BLOCK) * BLOCK)
    dtype = query_ptr.dtype.element_ty
    row = tl.arange(0, ROWS)
    at = tl.arange(0, WIDTH)
    token = tl.arange(0, BLOCK)
    head = kv_head * GROUP + row
    inside = (row[:, None] < GROUP) & (at[None, :] < D)
    query_place = query_ptr + sequence * query_stride + head[:, None] * query_head_stride
    # The hint makes wide loads possible.
    keys_ptr = anchor_ptr + tl.multiple_of(tl.load(base_ptr), 16) + layer_offset + kv_head * (BLOCK * D)
    table_ptr = tables_ptr + sequence * tables_stride
    if ROTATE:
        position = (length - 1).to(tl.int64)
        query = _rotated(query_place, at[None, :], inside, position, cos_ptr, sin_ptr, query_norm_ptr, eps, D, NORM, dtype)
        if end == length:
            # Keys and values stand behind the queries. The new ones go to the cache, and are read there like all others.
            new_place = query_ptr + sequence * query_stride + (HEADS + kv_head) * query_head_stride
            one = tl.arange(0, 1)[:, None] * query_head_stride
            valid_size = at[None, :] < D
            new_key = _rotated(
                new_place + one, at[None, :], valid_size, position, cos_ptr, sin_ptr, key_norm_ptr, eps, D, NORM, dtype
            )
            new_value = tl.load(new_place + one + KV * query_head_stride + at[None, :], mask=valid_size, other=0.0)
            new_block = tl.load(table_ptr + position // BLOCK).to(tl.int64)
            slot = keys_ptr + new_block * block_stride + (position % BLOCK) * D + at[None, :]
            tl.store(slot, new_key, mask=valid_size)
            tl.store(slot + value_offset, new_value, mask=valid_size)
            tl.debug_barrier()
    else:
        query = tl.load(query_place + at[None, :], mask=inside, other=0.0)
    best = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in tl.range(first, end, BLOCK):
        block = tl.load(table_ptr + start // BLOCK).to(tl.int64)
        place = keys_ptr + block * block_stride
        valid = start + token < end
        if WINDOW:
            valid = valid & (start + token >= seen_from)
        # Keys behind the end may be anything, but count for nothing; values must be numbers, for 0 · NaN is NaN.
        key = tl.load(place + token[None, :] * D + at[:, None], mask=at[:, None] < D, other=0.0)
        score = tl.dot(query, key, input_precision="ieee") * scale
        score = tl.where(valid[None, :], score, -float("inf"))
        new_best = tl.maximum(best, tl.max(score, 1))
        # A block may hold nothing that the window shows.
        safe = tl.where(new_best == -float("inf"), 0.0, new_best)
        weight = tl.exp2(score - safe[:, None])
        fade = tl.exp2(best - safe)
        total = total * fade + tl.sum(weight, 1)
        value_place = place + value_offset + token[:, None] * D + at[None, :]
        value = tl.load(value_place, mask=valid[:, None] & (at[None, :] < D), other=0.0)
        out = out * fade[:, None] + tl.dot(weight.to(dtype), value, input_precision="ieee")
        best = new_best
    if not SPLIT:
        out = out / total[:, None]
        tl.store(out_ptr + (sequence * HEADS + head[:, None]) * D + at[None, :], out.to(dtype), mask=inside)
    else:
        tl.store(parts_ptr + ((sequence * HEADS + head[:, None]) * parts + part) * D + at[None, :], out, mask=inside)
        sums_place = sums_ptr + ((sequence * HEADS + head) * parts + part) * 2
        tl.store(sums_place, best, mask=row < GROUP)
        tl.store(sums_place + 1, total, mask=row < GROUP)


@triton.jit
def _combine(
    parts_ptr, sums_ptr, positions_ptr, positions_stride, out_ptr, parts, part_tokens,
    HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    length = tl.load(positions_ptr + sequence * positions_stride).to(tl.int32) + 1
    if length <= 0:
        return
    part = tl.arange(0, MANY)
    at = tl.arange(0, WIDTH)
    written = part < tl.cdiv(length, part_tokens)
    place = (sequence * HEADS + head) * parts + part
    best = tl.load(sums_ptr + place * 2, mask=written, other=-float("inf"))
    total = tl.load(sums_ptr + place * 2 + 1, mask=written, other=0.0)
    share = tl.exp2(best - tl.max(best, 0))
    inside = written[:, None] & (at[None, :] < D)
    outs = tl.load(parts_ptr + place[:, None] * D + at[None, :], mask=inside, other=0.0)
    out = tl.sum(outs * share[:, None], 0) / tl.sum(total * share, 0)
    tl.store(out_ptr + (sequence * HEADS + head) * D + at, out.to(out_ptr.dtype.element_ty), mask=at < D)
