"""Decode attention: one new token per sequence attends to its past in the cache, after its own key and value are written there.

A program reads one sequence's keys and values for one key-value head, once for all query heads that share it, block by block
through the block table. Long sequences are split among programs at stretch boundaries, and a second kernel combines the results.
The blocks that samples of a prompt share are read first, for a tile of samples at once (prefixes.py), by a kernel of their own: it
leaves the state after each stretch, from which a sample's program continues with its own blocks.
Blocks and stretches are always added up in training's order (models/kernels/attention.py), so the bits are the same.
"""

# A launch takes arguments that the kernel does not declare.
# pyright: reportCallIssue=false, reportArgumentType=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from plaudit.models.heads import Heads, Rotation, next_power_of_2
from plaudit.models.kernels.attention import LOG2_E, STRETCH, attend_block, merge_stretch
from plaudit.models.kernels.compile_options import NO_FP_FUSION
from plaudit.models.kernels.layers import norm_heads
from plaudit.rollout.native.cache import KVCache
from plaudit.rollout.native.prefixes import TILE_QUERIES, SharedPrefixes

FEWEST_QUERY_ROWS = 16  # of a tensor core tile
BYTES_PER_WARP = 4096  # of queries: one warp holds 16 heads of size up to 128 in bf16, so that no warp waits for another
STAGES = 3
PREFIX_WARPS, PREFIX_STAGES, PREFIX_PROGRAMS = 4, 5, 256  # the fastest of those tried (bench/README.md)
MOST_PARTS = 32
PROGRAMS, MOST_TOKENS = 512, 1024  # at least as many programs; at most as many tokens per part


class Split(NamedTuple):
    """How sequences are split among programs."""

    parts: int
    tokens: int
    """Per part."""


def split_for(sequences: int, kv_heads: int, longest: int) -> Split:
    """Enough programs to fill the device and to balance their run times, but no tiny parts."""
    wanted = next_power_of_2(-(-PROGRAMS // (sequences * kv_heads)))
    longest = next_power_of_2(longest)
    parts = max(min(max(min(wanted, longest // STRETCH), longest // MOST_TOKENS), MOST_PARTS), 1)
    return Split(parts, longest // parts)


def warps_for(rows: int, width: int, size: int) -> int:
    """`size`: bytes per element."""
    return max(1, rows * width * size // BYTES_PER_WARP)


def attend(
    query_BHD: Tensor, cache: KVCache, layer: int, positions_B: Tensor,
    *, scale: float, window: int | None, longest: int, prefixes: SharedPrefixes | None = None,
) -> Tensor:  # fmt: skip
    return _launch(query_BHD, cache, layer, positions_B, scale, window, longest, prefixes)


def rotate_and_attend(
    qkv_BE: Tensor, heads: Heads, rotation: Rotation, cache: KVCache, layer: int, positions_B: Tensor,
    *, scale: float, window: int | None, longest: int, prefixes: SharedPrefixes | None = None,
) -> Tensor:  # fmt: skip
    norm_heads(qkv_BE, heads, rotation.query_norm, rotation.key_norm, rotation.eps)
    query_BHD = qkv_BE.view(len(qkv_BE), -1, heads.size)[:, : heads.query]
    return _launch(query_BHD, cache, layer, positions_B, scale, window, longest, prefixes, rotation)


def _launch(
    query_BHD: Tensor, cache: KVCache, layer: int, positions_B: Tensor,
    scale: float, window: int | None, longest: int, prefixes: SharedPrefixes | None, rotation: Rotation | None = None,
) -> Tensor:  # fmt: skip
    B, heads, size = query_BHD.shape
    split = split_for(B, cache.kv_heads, longest)
    group, width = heads // cache.kv_heads, next_power_of_2(size)
    rows = max(FEWEST_QUERY_ROWS, next_power_of_2(group))
    window = window if window is not None and window < longest else None  # a longer one hides nothing
    if prefixes is not None and (window is not None or not prefixes.tile_count):
        prefixes = None  # a window may begin inside a prefix
    out_BE = torch.empty(B, heads * size, dtype=query_BHD.dtype, device=query_BHD.device)
    stretches = -(-split.parts * split.tokens // STRETCH)
    if split.parts > 1 or prefixes is not None:
        parts = torch.empty(B, heads, stretches, size, dtype=torch.float32, device=query_BHD.device)
        sums = torch.empty(B, heads, stretches, 2, dtype=torch.float32, device=query_BHD.device)
    else:
        parts = sums = out_BE
    turn = rotation or Rotation(query_BHD, query_BHD)  # placeholders that the kernel does not read
    constants = {"HEADS": heads, "D": size, "WIDTH": width, "STRETCH": STRETCH}
    shape = constants | {"GROUP": group, "BLOCK": cache.block_tokens, "ROTATE": rotation is not None}
    inputs = (
        query_BHD, query_BHD.stride(0), query_BHD.stride(1), turn.cos, turn.sin,
        cache.anchor, cache.base, cache.block_tables, cache.block_tables.stride(0),
        cache.strides[0], layer * cache.strides[1], cache.strides[2], positions_B, positions_B.stride(0),
    )  # fmt: skip
    if prefixes is not None:
        prefix_parts = min(stretches, -(-PREFIX_PROGRAMS // (prefixes.tile_count * cache.kv_heads)))
        _attend_prefix[(prefixes.tile_count, cache.kv_heads, prefix_parts)](
            *inputs, prefixes.tiles_TS, parts, sums, scale * LOG2_E, stretches,
            SAMPLES=prefixes.samples_per_tile, ROWS=TILE_QUERIES, **shape,
            num_warps=PREFIX_WARPS, num_stages=PREFIX_STAGES, **NO_FP_FUSION,
        )  # fmt: skip
    shared_B = positions_B if prefixes is None else prefixes.tokens_R
    _attend[(B, cache.kv_heads, split.parts)](
        *inputs, shared_B, out_BE, parts, sums, scale * LOG2_E, window or 0, stretches, split.tokens,
        KV=cache.kv_heads, ROWS=rows, SPLIT=split.parts > 1, SHARED=prefixes is not None, WINDOW=window is not None, **shape,
        num_warps=warps_for(rows, width, query_BHD.element_size()), num_stages=STAGES, **NO_FP_FUSION,
    )  # fmt: skip
    if split.parts > 1:
        _combine[(B, heads)](
            parts, sums, positions_B, positions_B.stride(0), out_BE, window or 0, stretches,
            WINDOW=window is not None, **constants, num_warps=1, **NO_FP_FUSION,
        )  # fmt: skip
    return out_BE


@triton.jit
def _rotated(place, at, inside, position, cos_ptr, sin_ptr, D: tl.constexpr, dtype: tl.constexpr):
    """Heads [rows, size] starting at `place`, rotated by their position: x cos ± x' sin, x' the other half of the head."""
    x = tl.load(place + at, mask=inside, other=0.0).to(tl.float32)
    x_other = tl.load(place + (at + D // 2) % D, mask=inside, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + position * D + at, mask=at < D, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + position * D + at, mask=at < D, other=0.0).to(tl.float32)
    sin = tl.where(at < D // 2, -sin, sin)
    return ((x * cos).to(dtype).to(tl.float32) + (x_other * sin).to(dtype).to(tl.float32)).to(dtype)


@triton.jit
def _store_stretch(parts_ptr, sums_ptr, place, inside, used, at, best, total, out, D: tl.constexpr):
    tl.store(parts_ptr + place[:, None] * D + at[None, :], out, mask=inside)
    tl.store(sums_ptr + place * 2, best, mask=used)
    tl.store(sums_ptr + place * 2 + 1, total, mask=used)


@triton.jit
def _load_stretch(parts_ptr, sums_ptr, place, inside, used, at, D: tl.constexpr):
    """What `_store_stretch` stored; the state before any key where nothing is used."""
    best = tl.load(sums_ptr + place * 2, mask=used, other=-float("inf"))
    total = tl.load(sums_ptr + place * 2 + 1, mask=used, other=0.0)
    out = tl.load(parts_ptr + place[:, None] * D + at[None, :], mask=inside, other=0.0)
    return best, total, out


@triton.jit
def _attend_prefix(
    query_ptr, query_stride, query_head_stride, cos_ptr, sin_ptr,
    anchor_ptr, base_ptr, tables_ptr, tables_stride, block_stride, layer_offset, value_offset,
    positions_ptr, positions_stride, tiles_ptr, parts_ptr, sums_ptr, scale, stretches,
    HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    SAMPLES: tl.constexpr, BLOCK: tl.constexpr, STRETCH: tl.constexpr, ROTATE: tl.constexpr,
):  # fmt: skip
    """Each program: the queries of one tile's samples for one key-value head, and some stretches of their prefix."""
    tile_ptr = tiles_ptr + tl.program_id(0) * (1 + SAMPLES)
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    shared = tl.load(tile_ptr)
    if part * STRETCH >= shared:
        return
    row = tl.arange(0, ROWS)
    at = tl.arange(0, WIDTH)
    token = tl.arange(0, BLOCK)
    sequence = tl.load(tile_ptr + 1 + row // GROUP, mask=row // GROUP < SAMPLES, other=-1).to(tl.int64)
    position = tl.load(positions_ptr + sequence * positions_stride, mask=sequence >= 0, other=-1).to(tl.int64)
    used = position >= 0
    inside = used[:, None] & (at[None, :] < D)
    head = kv_head * GROUP + row % GROUP
    query_place = query_ptr + sequence[:, None] * query_stride + head[:, None] * query_head_stride
    if ROTATE:
        turned_at = tl.maximum(position, 0)[:, None]
        query = _rotated(query_place, at[None, :], inside, turned_at, cos_ptr, sin_ptr, D, query_ptr.dtype.element_ty)
    else:
        query = tl.load(query_place + at[None, :], mask=inside, other=0.0)
    keys_ptr = anchor_ptr + tl.multiple_of(tl.load(base_ptr), 16) + layer_offset + kv_head * (BLOCK * D)
    table_ptr = tables_ptr + tl.load(tile_ptr + 1).to(tl.int64) * tables_stride  # all samples' tables begin alike
    for stretch in tl.range(part, tl.cdiv(shared, STRETCH), tl.num_programs(2)):  # pyright: ignore[reportGeneralTypeIssues]
        best = tl.full([ROWS], -float("inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        out = tl.zeros([ROWS, WIDTH], tl.float32)
        for start in tl.range(stretch * STRETCH, tl.minimum(shared, stretch * STRETCH + STRETCH), BLOCK):
            block_place = keys_ptr + tl.load(table_ptr + start // BLOCK).to(tl.int64) * block_stride
            key = tl.load(block_place + token[None, :] * D + at[:, None], mask=at[:, None] < D, other=0.0)
            value_place = block_place + value_offset + token[:, None] * D + at[None, :]
            value = tl.load(value_place, mask=at[None, :] < D, other=0.0)
            valid = token[None, :] < BLOCK  # shared blocks are full
            best, total, out = attend_block(query, key, value, valid, scale, best, total, out)
        place = (sequence * HEADS + head) * stretches + stretch
        _store_stretch(parts_ptr, sums_ptr, place, inside, used, at, best, total, out, D)


@triton.jit
def _attend(
    query_ptr, query_stride, query_head_stride, cos_ptr, sin_ptr,
    anchor_ptr, base_ptr, tables_ptr, tables_stride, block_stride, layer_offset, value_offset,
    positions_ptr, positions_stride, shared_ptr, out_ptr, parts_ptr, sums_ptr, scale, window, stretches, part_tokens,
    HEADS: tl.constexpr, KV: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, STRETCH: tl.constexpr, ROTATE: tl.constexpr, SPLIT: tl.constexpr, SHARED: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    tl.static_assert(STRETCH % BLOCK == 0)
    sequence = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    length = tl.load(positions_ptr + sequence * positions_stride).to(tl.int32) + 1
    begin = part * part_tokens
    end = tl.minimum(length, begin + part_tokens)
    if begin >= end:
        return
    first = begin
    if SHARED:
        shared = tl.load(shared_ptr + sequence)
        if end <= shared:
            return  # all of this part is in the prefix
        first = tl.maximum(begin, shared)
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
        query = _rotated(query_place, at[None, :], inside, position, cos_ptr, sin_ptr, D, dtype)
        if end == length:
            # Keys and values follow the queries. The new ones are written to the cache and read from there like all others.
            new_place = query_ptr + sequence * query_stride + (HEADS + kv_head) * query_head_stride
            one = tl.arange(0, 1)[:, None] * query_head_stride
            valid_size = at[None, :] < D
            new_key = _rotated(new_place + one, at[None, :], valid_size, position, cos_ptr, sin_ptr, D, dtype)
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
    all_best, all_total, all_out = best, total, out
    place = (sequence * HEADS + head) * stretches  # where the first stretch is stored
    if SHARED:
        if not SPLIT:
            for stretch in tl.range(0, shared // STRETCH):
                of_prefix = _load_stretch(parts_ptr, sums_ptr, place + stretch, inside, row < GROUP, at, D)
                all_best, all_total, all_out = merge_stretch(all_best, all_total, all_out, of_prefix[0], of_prefix[1], of_prefix[2])
        # The prefix may end inside a stretch, whose state is continued.
        begun = (first == shared) & (shared % STRETCH > 0)
        best, total, out = _load_stretch(
            parts_ptr, sums_ptr, place + shared // STRETCH, inside & begun, (row < GROUP) & begun, at, D
        )
    for start in tl.range(first, end, BLOCK):
        if (start > first) & (start % STRETCH == 0):
            if SPLIT:
                before = place + start // STRETCH - 1
                _store_stretch(parts_ptr, sums_ptr, before, inside, row < GROUP, at, best, total, out, D)
            else:
                all_best, all_total, all_out = merge_stretch(all_best, all_total, all_out, best, total, out)
            best = tl.full([ROWS], -float("inf"), tl.float32)  # resets the sums: total and out are scaled by 0
        block = tl.load(table_ptr + start // BLOCK).to(tl.int64)
        block_place = keys_ptr + block * block_stride
        valid = start + token < end
        if WINDOW:
            valid = valid & (start + token >= seen_from)
        # Keys past the end may be arbitrary, since they are masked; values must be finite, since 0 · NaN is NaN.
        key = tl.load(block_place + token[None, :] * D + at[:, None], mask=at[:, None] < D, other=0.0)
        value_place = block_place + value_offset + token[:, None] * D + at[None, :]
        value = tl.load(value_place, mask=valid[:, None] & (at[None, :] < D), other=0.0)
        best, total, out = attend_block(query, key, value, valid[None, :], scale, best, total, out)
    if SPLIT:
        if first < end:
            _store_stretch(parts_ptr, sums_ptr, place + (end - 1) // STRETCH, inside, row < GROUP, at, best, total, out, D)
    else:
        best, total, out = merge_stretch(all_best, all_total, all_out, best, total, out)
        out_place = out_ptr + (sequence * HEADS + head[:, None]) * D + at[None, :]
        tl.store(out_place, (out / total[:, None]).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _combine(
    parts_ptr, sums_ptr, positions_ptr, positions_stride, out_ptr, window, stretches,
    HEADS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, STRETCH: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    length = tl.load(positions_ptr + sequence * positions_stride).to(tl.int32) + 1
    if length <= 0:
        return
    first = 0
    if WINDOW:
        first = tl.maximum(length - window, 0) // STRETCH
    one = tl.arange(0, 1)
    at = tl.arange(0, WIDTH)[None, :]
    all_best = tl.full([1], -float("inf"), tl.float32)
    all_total = tl.zeros([1], tl.float32)
    all_out = tl.zeros([1, WIDTH], tl.float32)
    for stretch in tl.range(first, tl.cdiv(length, STRETCH)):
        place = (sequence * HEADS + head) * stretches + stretch + one
        best = tl.load(sums_ptr + place * 2)
        total = tl.load(sums_ptr + place * 2 + 1)
        out = tl.load(parts_ptr + place[:, None] * D + at, mask=at < D, other=0.0)
        all_best, all_total, all_out = merge_stretch(all_best, all_total, all_out, best, total, out)
    place = out_ptr + (sequence * HEADS + head) * D + at
    tl.store(place, (all_out / all_total[:, None]).to(out_ptr.dtype.element_ty), mask=at < D)
