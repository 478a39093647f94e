"""Gradients of causal attention within packed sequences. Every number is summed in a fixed order, so the same inputs give the same
bits: the same whole batch, since keys' gradients may be summed in parts, and their number depends on how many keys there are.

With scores s = scale · q·k, o = Σ p v and the logsum of the forward pass, for a query i and each key j that it sees:

    p_ij = e^(s_ij − logsum_i)                 delta_i = Σ_d o_id · do_id
    dp_ij = do_i · v_j                         ds_ij = p_ij · (dp_ij − delta_i)
    dq_i = scale · Σ_j ds_ij k_j               dk_j = scale · Σ_i ds_ij q_i               dv_j = Σ_i p_ij do_i

Two kernels compute s and p again, each for the sums it keeps in registers:

- `_grad_query`: a tile of queries of a head goes through the keys that it sees. It also writes delta, and the logsum in base 2.
- `_grad_key`: a tile of keys of a key head goes through the queries that see it, of all heads that share the keys; so there is no
  sum over heads afterwards. It computes sᵀ and dpᵀ, because pᵀ and dsᵀ then are operands of the next products as they are in
  registers. If that is too few programs for a GPU, the heads are split among programs, whose sums are added in order.

Only tiles that the diagonal crosses are masked. Queries beyond a sequence's end need no mask: they have logsum ∞ and so p = 0.

On Hopper GPUs the copy engine (TMA) loads tiles, from descriptors of the tensors. This saves the registers and the instructions for
addresses and masks: the loads of logsum and delta alone, which every warp needs for all of its columns, took as many as 4 products.
"""

# A launch takes arguments that the kernel does not declare.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from plaudit.models.heads import next_power_of_2

LOG2_E = tl.constexpr(1.4426950408889634)
PADDING = 128  # numbers after those of each sequence's queries, which its last tile reads
ALIGNED = tl.constexpr(4)  # numbers: descriptors copy from multiples of 16 bytes


class Tiling(NamedTuple):
    """How many rows a program keeps, how many it streams past them at a time, and how it runs."""

    kept: int
    streamed: int
    warps: int
    stages: int
    value_last: bool = False
    """Of a tile of keys: the gradient of the values is summed last."""

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": self.warps, "num_stages": self.stages}


# By width of a head; for 64 and 128 the fastest on an H200 of those that `bench/gpu_attention.py --tiles` tries.
QUERY_TILINGS = {64: Tiling(64, 64, 4, 2), 128: Tiling(64, 64, 4, 2), 256: Tiling(64, 32, 8, 2)}
KEY_TILINGS = {64: Tiling(64, 64, 4, 3, value_last=True), 128: Tiling(64, 64, 4, 2), 256: Tiling(64, 32, 8, 2)}
FEWEST_PROGRAMS = 240  # of `_grad_key`, which differ in length: about two for each multiprocessor of a large GPU


def attend_backward(
    grad_THD: Tensor, query_THD: Tensor, key_UKD: Tensor, value_UKD: Tensor, out_THD: Tensor, logsum_HT: Tensor,
    starts_q: Tensor, starts_k: Tensor, longest_q: int, longest_k: int, scale: float,
    query_tiling: Tiling | None = None, key_tiling: Tiling | None = None, split: int | None = None, use_tma: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of `attend`, whose results `out_THD` and `logsum_HT` are. The last dimension of all tensors is contiguous."""
    T, heads, size = query_THD.shape
    U, kv, _ = key_UKD.shape
    width, group, sequences = next_power_of_2(size), heads // kv, len(starts_q) - 1
    dtype, device = query_THD.dtype, query_THD.device
    grad_THD, out_THD = grad_THD.contiguous(), out_THD.contiguous()
    read = query_THD, key_UKD, value_UKD
    assert all(x.stride(2) == 1 for x in read)
    strides = [stride for x in read for stride in x.stride()[:2]]
    padded = -(-(T + sequences * (PADDING + 2 * ALIGNED.value)) // ALIGNED.value) * ALIGNED.value
    rows_2HP = torch.empty(2 * heads * padded, dtype=torch.float32, device=device)
    if use_tma is None:
        use_tma = is_hopper(device) and all(_fits_tma(x) for x in (grad_THD, out_THD, *read))
    source = _descriptor if use_tma else _plain
    shape = {"HEADS": heads, "GROUP": group, "D": size, "WIDTH": width, "PADDING": PADDING, "TMA": use_tma}

    grad_query_THD = torch.empty(T, heads, size, dtype=dtype, device=device)
    tiling = query_tiling or _tiling_of(QUERY_TILINGS, width, longest_q, dtype)
    kept, streamed = tiling[:2]
    tiles = -(-longest_q // kept)
    _grad_query[(heads, sequences, tiles)](
        *(source(x, kept) for x in (grad_THD, out_THD, query_THD)), *(source(x, streamed) for x in (key_UKD, value_UKD)), *strides,
        starts_q, starts_k, logsum_HT, rows_2HP, grad_query_THD, T, padded, scale, tiles,
        **shape, ROWS=kept, BLOCK=streamed, **tiling.options,
    )  # fmt: skip

    tiling = key_tiling or _tiling_of(KEY_TILINGS, width, longest_k, dtype)
    kept, streamed = tiling[:2]
    assert streamed <= PADDING
    split = split or split_for(U, kv, group, kept)
    parts_2PUKD = torch.empty(2, split, U, kv, size, dtype=dtype if split == 1 else torch.float32, device=device)
    _grad_key[(kv * split, sequences, -(-longest_k // kept))](
        *(source(x, streamed) for x in (grad_THD, query_THD)), *(source(x, kept) for x in (key_UKD, value_UKD)), *strides,
        starts_q, starts_k, source(rows_2HP, streamed), *parts_2PUKD, U, padded, scale,
        **shape, SPLIT=split, VALUE_LAST=tiling.value_last, BLOCK=kept, ROWS=streamed, **tiling.options,
    )  # fmt: skip
    grad_key_UKD, grad_value_UKD = parts_2PUKD[:, 0] if split == 1 else parts_2PUKD.sum(1).to(dtype)
    return grad_query_THD, grad_key_UKD, grad_value_UKD


def split_for(keys: int, kv: int, group: int, tile: int) -> int:
    """Among how many programs the heads of a group are split: as few as possible."""
    programs = -(-keys // tile) * kv
    return next(n for n in range(1, group + 1) if group % n == 0 and (n == group or programs * n >= FEWEST_PROGRAMS))


def _tiling_of(tiles: dict[int, Tiling], width: int, longest: int, dtype: torch.dtype) -> Tiling:
    kept, streamed, warps, stages, value_last = tiles[min(max(width, 64), 256)]
    if dtype.itemsize > 2:
        kept, streamed, stages = kept // 2, streamed // 2, 2
    return Tiling(min(kept, max(16, next_power_of_2(longest))), streamed, warps, stages, value_last)


@cache
def is_hopper(device: torch.device) -> bool:
    """NVIDIA's Hopper GPUs: these kernels were measured on one of them (H200), and use their copy engine."""
    return torch.version.hip is None and device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def _fits_tma(x: Tensor) -> bool:
    tokens, heads, size = x.shape
    aligned = x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0
    return aligned and tokens > 0 and size == next_power_of_2(size) and (heads == 1 or x.stride(1) == size)


def _descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    if x.dim() == 1:
        return TensorDescriptor(x, list(x.shape), [1], [rows])
    tokens, heads, size = x.shape
    return TensorDescriptor(x, [tokens, heads * size], [x.stride(0), 1], [rows, size])


def _plain(x: Tensor, rows: int) -> Tensor:
    return x


@triton.jit
def _load_tile(
    source, row, head, end, stride, head_stride,
    ROWS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """[ROWS, WIDTH] of a head. From row `end` on zeros; with TMA the rows of the next sequence, which no sum counts: they are
    multiplied by p = 0, and so must be finite."""
    if TMA:
        tile = source.load([row.to(tl.int32), (head * D).to(tl.int32)])
    else:
        local = tl.arange(0, ROWS)
        at = tl.arange(0, WIDTH)[None, :]
        place = source + row.to(tl.int64) * stride + head.to(tl.int64) * head_stride
        inside = (local < end - row)[:, None] & (at < D)
        tile = tl.load(place + (local[:, None] * stride + at), mask=inside, other=0.0)
    return tile


@triton.jit
def _row_numbers(source, place, ROWS: tl.constexpr, TMA: tl.constexpr):
    return source.load([place.to(tl.int32)]) if TMA else tl.load(source + place + tl.arange(0, ROWS))


@triton.jit
def _padded_begin(begin_q, sequence, PADDING: tl.constexpr):
    return (begin_q + ALIGNED - 1) // ALIGNED * ALIGNED + sequence * (PADDING + ALIGNED)


@triton.jit(do_not_specialize=["T", "padded", "tiles"])  # they change from batch to batch
def _grad_query(
    grad, out, query, key, value, query_stride, query_head_stride, key_stride, key_head_stride, value_stride, value_head_stride,
    starts_q_ptr, starts_k_ptr, logsum_ptr, rows_ptr, grad_query_ptr, T, padded, scale, tiles,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, PADDING: tl.constexpr,
    TMA: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program: a tile of queries of one head of one sequence."""
    head = tl.program_id(0)
    sequence = tl.program_id(1)
    first = (tiles - 1 - tl.program_id(2)) * ROWS  # the longest work first
    begin_q = tl.load(starts_q_ptr + sequence).to(tl.int64)
    begin_k = tl.load(starts_k_ptr + sequence).to(tl.int64)
    queries = (tl.load(starts_q_ptr + sequence + 1) - begin_q).to(tl.int32)
    keys = (tl.load(starts_k_ptr + sequence + 1) - begin_k).to(tl.int32)
    if first >= queries:
        return
    local = tl.arange(0, ROWS)
    there = local < queries - first
    end_q = begin_q + queries
    query_tile = _load_tile(query, begin_q + first, head, end_q, query_stride, query_head_stride, ROWS, D, WIDTH, TMA)
    grad_tile = _load_tile(grad, begin_q + first, head, end_q, HEADS * D, D, ROWS, D, WIDTH, TMA)
    out_tile = _load_tile(out, begin_q + first, head, end_q, HEADS * D, D, ROWS, D, WIDTH, TMA)
    delta = tl.sum(out_tile.to(tl.float32) * grad_tile.to(tl.float32), 1)
    logsum = tl.load(logsum_ptr + head.to(tl.int64) * T + begin_q + first + local, mask=there, other=float("inf")) * LOG2_E
    rows_ptr += head.to(tl.int64) * padded + _padded_begin(begin_q, sequence, PADDING)
    delta_ptr = rows_ptr + HEADS * padded.to(tl.int64)
    tl.store(rows_ptr + first + local, logsum, mask=there)
    tl.store(delta_ptr + first + local, delta, mask=there)
    if first + ROWS >= queries:
        tl.store(rows_ptr + queries + tl.arange(0, PADDING), tl.full([PADDING], float("inf"), tl.float32))
        tl.store(delta_ptr + queries + tl.arange(0, PADDING), tl.zeros([PADDING], tl.float32))

    position = keys - queries + first + local
    seen_by_all = (keys - queries + first + 1) // BLOCK * BLOCK
    seen = tl.minimum(keys, keys - queries + first + ROWS)
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    total = _through_keys(
        total, query_tile, grad_tile, logsum, delta, key, key_stride, key_head_stride, value, value_stride, value_head_stride,
        begin_k, 0, seen_by_all, keys, head // GROUP, position, scale * LOG2_E, D, WIDTH, TMA, BLOCK, False,
    )  # fmt: skip
    total = _through_keys(
        total, query_tile, grad_tile, logsum, delta, key, key_stride, key_head_stride, value, value_stride, value_head_stride,
        begin_k, seen_by_all, seen, keys, head // GROUP, position, scale * LOG2_E, D, WIDTH, TMA, BLOCK, True,
    )  # fmt: skip
    at = tl.arange(0, WIDTH)[None, :]
    place = grad_query_ptr + ((begin_q + first) * HEADS + head) * D + (local[:, None] * (HEADS * D) + at)
    tl.store(place, (total * scale).to(grad_query_ptr.dtype.element_ty), mask=there[:, None] & (at < D))


@triton.jit
def _through_keys(
    total, query, grad, logsum, delta, key_source, key_stride, key_head_stride, value_source, value_stride, value_head_stride,
    begin_k, begin, end, keys, head, position, scale,
    D: tl.constexpr, WIDTH: tl.constexpr, TMA: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    for start in tl.range(begin, end, BLOCK):
        row, end_k = begin_k + start, begin_k + keys
        key = _load_tile(key_source, row, head, end_k, key_stride, key_head_stride, BLOCK, D, WIDTH, TMA)
        value = _load_tile(value_source, row, head, end_k, value_stride, value_head_stride, BLOCK, D, WIDTH, TMA)
        score = tl.dot(query, tl.trans(key), input_precision="ieee")
        grad_p = tl.dot(grad, tl.trans(value), input_precision="ieee")
        p = tl.exp2(score * scale - logsum[:, None])
        if MASKED:
            p = tl.where((start + tl.arange(0, BLOCK))[None, :] <= position[:, None], p, 0.0)
        grad_score = p * (grad_p - delta[:, None])
        total = tl.dot(grad_score.to(key.dtype), key, total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["U", "padded"])
def _grad_key(
    grad, query, key, value, query_stride, query_head_stride, key_stride, key_head_stride, value_stride, value_head_stride,
    starts_q_ptr, starts_k_ptr, rows, grad_key_ptr, grad_value_ptr, U, padded, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, PADDING: tl.constexpr,
    TMA: tl.constexpr, SPLIT: tl.constexpr, VALUE_LAST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program: a tile of keys of one sequence, and the heads that share them, or a part of those."""
    EACH: tl.constexpr = GROUP // SPLIT
    kv_head = tl.program_id(0) // SPLIT
    part = tl.program_id(0) % SPLIT
    sequence = tl.program_id(1)
    start = tl.program_id(2) * BLOCK  # the longest work first
    begin_q = tl.load(starts_q_ptr + sequence).to(tl.int64)
    begin_k = tl.load(starts_k_ptr + sequence).to(tl.int64)
    queries = (tl.load(starts_q_ptr + sequence + 1) - begin_q).to(tl.int32)
    keys = (tl.load(starts_k_ptr + sequence + 1) - begin_k).to(tl.int32)
    if start >= keys:
        return
    row, end_k = begin_k + start, begin_k + keys
    key_tile = _load_tile(key, row, kv_head, end_k, key_stride, key_head_stride, BLOCK, D, WIDTH, TMA)
    value_tile = _load_tile(value, row, kv_head, end_k, value_stride, value_head_stride, BLOCK, D, WIDTH, TMA)
    local = tl.arange(0, BLOCK)
    seen_from = start + local - (keys - queries)
    first = tl.maximum(0, start - (keys - queries)) // ALIGNED * ALIGNED
    sees_all = tl.minimum(queries, tl.maximum(first, start + BLOCK - 1 - (keys - queries)))
    partly = tl.cdiv(sees_all - first, ROWS)
    rest = first + partly * ROWS
    fully = tl.cdiv(tl.maximum(queries - rest, 0), ROWS)
    total_key = tl.zeros([BLOCK, WIDTH], tl.float32)
    total_value = tl.zeros([BLOCK, WIDTH], tl.float32)
    head = kv_head * GROUP + part * EACH
    begin_p = _padded_begin(begin_q, sequence, PADDING)
    total_key, total_value = _through_queries(
        total_key, total_value, key_tile, value_tile, query, query_stride, query_head_stride, grad, rows, padded, begin_q, begin_p,
        first, partly, queries, head, seen_from, scale * LOG2_E, HEADS, EACH, D, WIDTH, TMA, ROWS, VALUE_LAST, True,
    )  # fmt: skip
    total_key, total_value = _through_queries(
        total_key, total_value, key_tile, value_tile, query, query_stride, query_head_stride, grad, rows, padded, begin_q, begin_p,
        rest, fully, queries, head, seen_from, scale * LOG2_E, HEADS, EACH, D, WIDTH, TMA, ROWS, VALUE_LAST, False,
    )  # fmt: skip
    at = tl.arange(0, WIDTH)[None, :]
    inside = (local < keys - start)[:, None] & (at < D)
    place = ((part * U.to(tl.int64) + row) * (HEADS // GROUP) + kv_head) * D + (local[:, None] * (HEADS // GROUP * D) + at)
    tl.store(grad_key_ptr + place, (total_key * scale).to(grad_key_ptr.dtype.element_ty), mask=inside)
    tl.store(grad_value_ptr + place, total_value.to(grad_value_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _through_queries(
    total_key, total_value, key, value, query_source, query_stride, query_head_stride, grad_source, rows, padded, begin_q, begin_p,
    first, tiles, queries, first_head, seen_from, scale,
    HEADS: tl.constexpr, EACH: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, TMA: tl.constexpr,
    ROWS: tl.constexpr, VALUE_LAST: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One loop over tiles and heads, so that the loads of the next head begin during the work on this one."""
    for i in tl.range(0, tiles * EACH):
        start, head = first + i // EACH * ROWS, first_head + i % EACH
        row, end_q = begin_q + start, begin_q + queries
        query = _load_tile(query_source, row, head, end_q, query_stride, query_head_stride, ROWS, D, WIDTH, TMA)
        grad = _load_tile(grad_source, row, head, end_q, HEADS * D, D, ROWS, D, WIDTH, TMA)
        row_place = head.to(tl.int64) * padded + begin_p + start
        score = tl.dot(key, tl.trans(query), input_precision="ieee")
        logsum = _row_numbers(rows, row_place, ROWS, TMA)
        p = tl.exp2(score * scale - logsum[None, :])
        if MASKED:
            p = tl.where(seen_from[:, None] <= (start + tl.arange(0, ROWS))[None, :], p, 0.0)
        # The tensor cores' operands in registers (p and grad_score) may not be computed during other products: the compiler would
        # then wait for every instruction of a product. So there are two ways to order them.
        if not VALUE_LAST:
            total_value = tl.dot(p.to(grad.dtype), grad, total_value, input_precision="ieee")
        grad_p = tl.dot(value, tl.trans(grad), input_precision="ieee")
        delta = _row_numbers(rows, row_place + HEADS * padded.to(tl.int64), ROWS, TMA)
        grad_score = p * (grad_p - delta[None, :])
        if VALUE_LAST:
            total_value = tl.dot(p.to(grad.dtype), grad, total_value, input_precision="ieee")
        total_key = tl.dot(grad_score.to(query.dtype), query, total_key, input_precision="ieee")
    return total_key, total_value
