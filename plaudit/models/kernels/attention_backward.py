"""Gradients of causal attention within packed sequences: every number is summed by one program in one order, so the same inputs give
the same bits.

With scores s = scale · q·k, o = Σ p v and the logsum of the forward pass, for a query i and each key j that it sees:

    p_ij = e^(s_ij − logsum_i)                 delta_i = Σ_d o_id · do_id
    dp_ij = do_i · v_j                         ds_ij = p_ij · (dp_ij − delta_i)
    dq_i = scale · Σ_j ds_ij k_j               dk_j = scale · Σ_i ds_ij q_i               dv_j = Σ_i p_ij do_i

Two kernels compute s and p again, each for the sums it keeps in registers:

- `_grad_query`: a tile of queries of a head goes through the keys that it sees. It also writes delta, and the logsum in base 2.
- `_grad_key`: a tile of keys of a key head goes through the queries that see it, of all heads that share the keys; so there is no sum
  over heads afterwards. It computes sᵀ and dpᵀ, because pᵀ and dsᵀ then are operands of the next products as they are in registers.
  If that is too few programs for a GPU, the heads are split among programs, whose sums are added in order.

Only tiles that the diagonal crosses are masked. Queries beyond a sequence's end need no mask: they have logsum ∞ and so p = 0.
"""

# A launch takes arguments that the kernel does not declare.
# pyright: reportCallIssue=false, reportArgumentType=false

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from plaudit.models.heads import next_power_of_2
from plaudit.models.kernels.attention import LOG2_E


class Tile(NamedTuple):
    """Work of a program: `kept` queries (or keys) whose sums are in registers, and `passing` keys (or queries) at a time."""

    kept: int
    passing: int
    warps: int
    stages: int


# By width of a head. Hopper GPUs have room for more stages than the smaller GPUs, whose programs may have 99 KB of shared memory.
QUERY_TILES = {64: Tile(128, 64, 8, 3), 128: Tile(128, 64, 8, 2), 256: Tile(64, 32, 8, 2)}
KEY_TILES = {64: Tile(128, 64, 8, 3), 128: Tile(128, 64, 8, 2), 256: Tile(64, 32, 8, 2)}
SMALL_QUERY_TILES = {64: Tile(64, 64, 4, 3), 128: Tile(64, 32, 4, 2), 256: Tile(32, 16, 4, 2)}
SMALL_KEY_TILES = {64: Tile(64, 32, 4, 3), 128: Tile(64, 32, 4, 2), 256: Tile(32, 16, 4, 2)}
LARGE_SHARED_MEMORY = 200_000  # bytes
FEWEST_PROGRAMS = 240  # of `_grad_key`, which differ in length: about two for each multiprocessor of a large GPU


def attend_backward(
    grad_THD: Tensor, query_THD: Tensor, key_UKD: Tensor, value_UKD: Tensor, out_THD: Tensor, logsum_HT: Tensor,
    starts_q: Tensor, starts_k: Tensor, longest_q: int, longest_k: int, scale: float,
    grad_query_THD: Tensor | None = None, grad_key_UKD: Tensor | None = None, grad_value_UKD: Tensor | None = None,
    query_tile: Tile | None = None, key_tile: Tile | None = None, split: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of `attend`, whose results `out_THD` and `logsum_HT` are. They are written to `grad_query_THD` and so on, if given:
    views with any strides but the last, which is 1."""
    T, heads, size = query_THD.shape
    U, kv, _ = key_UKD.shape
    width, group, sequences = next_power_of_2(size), heads // kv, len(starts_q) - 1
    dtype, device = query_THD.dtype, query_THD.device
    grad_THD, out_THD = grad_THD.contiguous(), out_THD.contiguous()
    grad_query_THD = torch.empty(T, heads, size, dtype=dtype, device=device) if grad_query_THD is None else grad_query_THD
    grad_key_UKD = torch.empty(U, kv, size, dtype=dtype, device=device) if grad_key_UKD is None else grad_key_UKD
    grad_value_UKD = torch.empty(U, kv, size, dtype=dtype, device=device) if grad_value_UKD is None else grad_value_UKD
    views = query_THD, key_UKD, value_UKD, grad_query_THD, grad_key_UKD, grad_value_UKD
    assert all(x.stride(2) == 1 for x in views)
    query, key, value, *grads = ((x, x.stride(0), x.stride(1)) for x in views)
    logsum_and_delta_2HT = torch.empty(2, heads, T, dtype=torch.float32, device=device)
    shape = {"HEADS": heads, "GROUP": group, "D": size, "WIDTH": width}

    query_tile = query_tile or _tile_of(width, longest_q, dtype, device, of_keys=False)
    tiles = -(-longest_q // query_tile.kept)
    _grad_query[(heads, sequences, tiles)](
        grad_THD, out_THD, *query, *key, *value, starts_q, starts_k, logsum_HT, logsum_and_delta_2HT, *grads[0], T, scale, tiles,
        **shape, ROWS=query_tile.kept, BLOCK=query_tile.passing, num_warps=query_tile.warps, num_stages=query_tile.stages,
    )  # fmt: skip

    key_tile = key_tile or _tile_of(width, longest_k, dtype, device, of_keys=True)
    split = split or split_for(U, kv, group, key_tile.kept)
    summed = grads[1:]
    if split > 1:  # the sums of each part, to be added
        parts_2PUKD = torch.empty(2, split, U, kv, size, dtype=torch.float32, device=device)
        summed = [(part_PUKD, kv * size, size) for part_PUKD in parts_2PUKD]
    _grad_key[(kv * split, sequences, -(-longest_k // key_tile.kept))](
        grad_THD, *query, *key, *value, starts_q, starts_k, logsum_and_delta_2HT, *summed[0], *summed[1], T, U * kv * size, scale,
        **shape, SPLIT=split, BLOCK=key_tile.kept, ROWS=key_tile.passing, num_warps=key_tile.warps, num_stages=key_tile.stages,
    )  # fmt: skip
    if split > 1:
        _add_parts[(U, kv, 2)](
            parts_2PUKD, *grads[1], *grads[2], U * kv * size, KV=kv, SPLIT=split, D=size, WIDTH=width, num_warps=1
        )
    return grad_query_THD, grad_key_UKD, grad_value_UKD


def split_for(keys: int, kv: int, group: int, tile: int) -> int:
    """Among how many programs the heads of a group are split: as few as possible."""
    programs = -(-keys // tile) * kv
    return next(n for n in range(1, group + 1) if group % n == 0 and (n == group or programs * n >= FEWEST_PROGRAMS))


def _tile_of(width: int, longest: int, dtype: torch.dtype, device: torch.device, *, of_keys: bool) -> Tile:
    if _has_large_shared_memory(device):
        tiles = KEY_TILES if of_keys else QUERY_TILES
    else:
        tiles = SMALL_KEY_TILES if of_keys else SMALL_QUERY_TILES
    kept, passing, warps, stages = tiles[min(max(width, 64), 256)]
    if dtype.itemsize > 2:
        kept, passing, stages = max(16, kept // 2), max(16, passing // 2), 2
    return Tile(min(kept, max(16, next_power_of_2(longest))), passing, warps, stages)


@cache
def _has_large_shared_memory(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin >= LARGE_SHARED_MEMORY


@triton.jit
def _grad_query(
    grad_ptr, out_ptr, query_ptr, query_stride, query_head_stride, key_ptr, key_stride, key_head_stride,
    value_ptr, value_stride, value_head_stride, starts_q_ptr, starts_k_ptr, logsum_ptr, rows_ptr,
    grad_query_ptr, grad_query_stride, grad_query_head_stride, T, scale, tiles,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program: a tile of queries of one head of one sequence."""
    head = tl.program_id(0).to(tl.int64)
    sequence = tl.program_id(1)
    first = (tiles - 1 - tl.program_id(2)) * ROWS  # the longest work first
    begin_q = tl.load(starts_q_ptr + sequence).to(tl.int64)
    begin_k = tl.load(starts_k_ptr + sequence).to(tl.int64)
    queries = (tl.load(starts_q_ptr + sequence + 1) - begin_q).to(tl.int32)
    keys = (tl.load(starts_k_ptr + sequence + 1) - begin_k).to(tl.int32)
    if first >= queries:
        return
    row = first + tl.arange(0, ROWS)
    at = tl.arange(0, WIDTH)
    token = tl.arange(0, BLOCK)
    there = row < queries
    inside = there[:, None] & (at[None, :] < D)
    query_ptr += (begin_q + first) * query_stride + head * query_head_stride
    out_place = ((begin_q + first) * HEADS + head) * D + tl.arange(0, ROWS)[:, None] * (HEADS * D) + at[None, :]
    query = tl.load(query_ptr + tl.arange(0, ROWS)[:, None] * query_stride + at[None, :], mask=inside, other=0.0)
    grad = tl.load(grad_ptr + out_place, mask=inside, other=0.0)
    out = tl.load(out_ptr + out_place, mask=inside, other=0.0)
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    row_place = head * T + begin_q + row
    logsum = tl.load(logsum_ptr + row_place, mask=there, other=float("inf")) * 1.4426950408889634
    tl.store(rows_ptr + row_place, logsum, mask=there)
    tl.store(rows_ptr + HEADS * T.to(tl.int64) + row_place, delta, mask=there)

    key_ptr += begin_k * key_stride + (head // GROUP) * key_head_stride
    value_ptr += begin_k * value_stride + (head // GROUP) * value_head_stride
    position = keys - queries + row
    seen_by_all = (keys - queries + first + 1) // BLOCK * BLOCK
    seen = tl.minimum(keys, keys - queries + first + ROWS)
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    total = _through_keys(
        total, query, grad, logsum, delta, key_ptr, key_stride, value_ptr, value_stride, 0, seen_by_all, keys, position, scale,
        D, WIDTH, BLOCK, False,
    )  # fmt: skip
    total = _through_keys(
        total, query, grad, logsum, delta, key_ptr, key_stride, value_ptr, value_stride, seen_by_all, seen, keys, position, scale,
        D, WIDTH, BLOCK, True,
    )  # fmt: skip
    grad_query_ptr += (begin_q + first) * grad_query_stride + head * grad_query_head_stride
    place = grad_query_ptr + tl.arange(0, ROWS)[:, None] * grad_query_stride + at[None, :]
    tl.store(place, (total * scale).to(grad_query_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _through_keys(
    total, query, grad, logsum, delta, key_ptr, key_stride, value_ptr, value_stride, begin, end, keys, position, scale,
    D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, WIDTH)[None, :]
    token = tl.arange(0, BLOCK)
    for start in tl.range(begin, end, BLOCK):
        inside = at < D
        if MASKED:
            inside &= (start + token < keys)[:, None]
        key = tl.load(key_ptr + start.to(tl.int64) * key_stride + (token[:, None] * key_stride + at), mask=inside, other=0.0)
        value_place = value_ptr + start.to(tl.int64) * value_stride + (token[:, None] * value_stride + at)
        value = tl.load(value_place, mask=inside, other=0.0)
        score = tl.dot(query, tl.trans(key), input_precision="ieee")
        grad_p = tl.dot(grad, tl.trans(value), input_precision="ieee")
        p = tl.exp2(score * (scale * 1.4426950408889634) - logsum[:, None])
        if MASKED:
            p = tl.where((start + token)[None, :] <= position[:, None], p, 0.0)
        grad_score = p * (grad_p - delta[:, None])
        total = tl.dot(grad_score.to(key.dtype), key, total, input_precision="ieee")
    return total


@triton.jit
def _grad_key(
    grad_ptr, query_ptr, query_stride, query_head_stride, key_ptr, key_stride, key_head_stride,
    value_ptr, value_stride, value_head_stride, starts_q_ptr, starts_k_ptr, rows_ptr,
    grad_key_ptr, grad_key_stride, grad_key_head_stride, grad_value_ptr, grad_value_stride, grad_value_head_stride,
    T, part_stride, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program: a tile of keys of one sequence, and the heads that share them, or a part of those."""
    EACH: tl.constexpr = GROUP // SPLIT
    kv_head = tl.program_id(0).to(tl.int64) // SPLIT
    part = tl.program_id(0).to(tl.int64) % SPLIT
    sequence = tl.program_id(1)
    start = tl.program_id(2) * BLOCK  # the longest work first
    begin_q = tl.load(starts_q_ptr + sequence).to(tl.int64)
    begin_k = tl.load(starts_k_ptr + sequence).to(tl.int64)
    queries = (tl.load(starts_q_ptr + sequence + 1) - begin_q).to(tl.int32)
    keys = (tl.load(starts_k_ptr + sequence + 1) - begin_k).to(tl.int32)
    if start >= keys:
        return
    at = tl.arange(0, WIDTH)[None, :]
    token = tl.arange(0, BLOCK)
    inside = (start + token < keys)[:, None] & (at < D)
    key_ptr += (begin_k + start) * key_stride + kv_head * key_head_stride
    value_ptr += (begin_k + start) * value_stride + kv_head * value_head_stride
    key = tl.load(key_ptr + token[:, None] * key_stride + at, mask=inside, other=0.0)
    value = tl.load(value_ptr + token[:, None] * value_stride + at, mask=inside, other=0.0)

    head = kv_head * GROUP + part * EACH
    query_ptr += begin_q * query_stride + head * query_head_stride
    grad_ptr += (begin_q * HEADS + head) * D
    rows_ptr += head * T + begin_q
    first = tl.maximum(0, start - (keys - queries))
    sees_all = tl.minimum(queries, tl.maximum(first, start + BLOCK - 1 - (keys - queries)))
    partly = tl.cdiv(tl.maximum(sees_all - first, 0), ROWS)
    rest = first + partly * ROWS
    fully = tl.cdiv(tl.maximum(queries - rest, 0), ROWS)
    total_key = tl.zeros([BLOCK, WIDTH], tl.float32)
    total_value = tl.zeros([BLOCK, WIDTH], tl.float32)
    seen_from = start + token - (keys - queries)
    total_key, total_value = _through_queries(
        total_key, total_value, key, value, query_ptr, query_stride, query_head_stride, grad_ptr, rows_ptr, T, first, partly,
        queries, seen_from, scale, HEADS, EACH, D, WIDTH, ROWS, True,
    )  # fmt: skip
    total_key, total_value = _through_queries(
        total_key, total_value, key, value, query_ptr, query_stride, query_head_stride, grad_ptr, rows_ptr, T, rest, fully,
        queries, seen_from, scale, HEADS, EACH, D, WIDTH, ROWS, False,
    )  # fmt: skip
    grad_key_ptr += part * part_stride + (begin_k + start) * grad_key_stride + kv_head * grad_key_head_stride
    grad_value_ptr += part * part_stride + (begin_k + start) * grad_value_stride + kv_head * grad_value_head_stride
    key_place = grad_key_ptr + token[:, None] * grad_key_stride + at
    tl.store(key_place, (total_key * scale).to(grad_key_ptr.dtype.element_ty), mask=inside)
    value_place = grad_value_ptr + token[:, None] * grad_value_stride + at
    tl.store(value_place, total_value.to(grad_value_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _through_queries(
    total_key, total_value, key, value, query_ptr, query_stride, query_head_stride, grad_ptr, rows_ptr, T, first, tiles,
    queries, seen_from, scale,
    HEADS: tl.constexpr, EACH: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One loop over tiles and heads, so that the loads of the next head begin during the work on this one."""
    at = tl.arange(0, WIDTH)[None, :]
    local = tl.arange(0, ROWS)
    for i in tl.range(0, tiles * EACH):
        start = first + i // EACH * ROWS
        head = i % EACH
        there = start + local < queries
        inside = there[:, None] & (at < D)
        query_place = query_ptr + start.to(tl.int64) * query_stride + head * query_head_stride
        query = tl.load(query_place + (local[:, None] * query_stride + at), mask=inside, other=0.0)
        grad_place = grad_ptr + (start.to(tl.int64) * HEADS + head) * D
        grad = tl.load(grad_place + (local[:, None] * (HEADS * D) + at), mask=inside, other=0.0)
        row_place = rows_ptr + head.to(tl.int64) * T + start
        logsum = tl.load(row_place + local, mask=there, other=float("inf"))
        delta = tl.load(row_place + HEADS * T.to(tl.int64) + local, mask=there, other=0.0)
        score = tl.dot(key, tl.trans(query), input_precision="ieee")
        grad_p = tl.dot(value, tl.trans(grad), input_precision="ieee")
        p = tl.exp2(score * (scale * 1.4426950408889634) - logsum[None, :])
        if MASKED:
            p = tl.where(seen_from[:, None] <= (start + local)[None, :], p, 0.0)
        total_value = tl.dot(p.to(grad.dtype), grad, total_value, input_precision="ieee")
        grad_score = p * (grad_p - delta[None, :])
        total_key = tl.dot(grad_score.to(query.dtype), query, total_key, input_precision="ieee")
    return total_key, total_value


@triton.jit
def _add_parts(
    parts_ptr, grad_key_ptr, grad_key_stride, grad_key_head_stride, grad_value_ptr, grad_value_stride, grad_value_head_stride,
    part_stride, KV: tl.constexpr, SPLIT: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    at = tl.arange(0, WIDTH)
    of_value = tl.program_id(2).to(tl.int64)
    parts_ptr += of_value * SPLIT * part_stride + (token * KV + head) * D
    total = tl.zeros([WIDTH], tl.float32)
    for part in tl.static_range(SPLIT):
        total += tl.load(parts_ptr + part * part_stride + at, mask=at < D, other=0.0)
    if of_value == 0:
        place = grad_key_ptr + token * grad_key_stride + head * grad_key_head_stride + at
        tl.store(place, total.to(grad_key_ptr.dtype.element_ty), mask=at < D)
    else:
        place = grad_value_ptr + token * grad_value_stride + head * grad_value_head_stride + at
        tl.store(place, total.to(grad_value_ptr.dtype.element_ty), mask=at < D)
