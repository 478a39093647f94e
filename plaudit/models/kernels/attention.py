"""Causal attention within packed sequences, in the order in which the sampler computes it token by token.

A query attends to its keys block by block with a running maximum m, and blocks are grouped into stretches:

    block:    m' = max(m, max s),   l' = l · 2^(m − m') + Σ 2^(s − m'),   o' = o · 2^(m − m') + Σ 2^(s − m') v
    stretch:  starts with m = −∞, l = 0, o = 0; its result is then merged into that of the stretches before by the same formula

A query's result depends on `attend_block` and `merge_stretch` alone: not on how many queries a program has, nor on whether a
sequence's stretches are split among programs (tensor cores add up in one order, whatever the tile). So `_attend` here and the
sampler's (rollout/native/kernels/attention.py) give the same bits.
"""

# A launch takes arguments that the kernel does not declare.
# pyright: reportCallIssue=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from plaudit.models.heads import block_tokens, next_power_of_2
from plaudit.models.kernels.compile_options import NO_FP_FUSION

LOG2_E = 1.4426950408889634
STRETCH = 256  # tokens
FEWEST_COLUMNS = tl.constexpr(16)  # of a tl.dot
ROWS, WARPS, STAGES = 64, 4, 3  # per program; rows are queries


def attend(
    query_THD: Tensor, key_UKD: Tensor, value_UKD: Tensor, starts_q: Tensor, starts_k: Tensor, longest_q: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Also log Σ exp(scores), [head, T] in fp32. A sequence with more keys than queries has its queries at the end."""
    T, heads, size = query_THD.shape
    out_THD = torch.empty(T, heads, size, dtype=query_THD.dtype, device=query_THD.device)
    logsum_HT = torch.empty(heads, T, dtype=torch.float32, device=query_THD.device)
    rows = min(ROWS, max(16, next_power_of_2(longest_q)))
    tiles = -(-longest_q // rows)
    _attend[(tiles, len(starts_q) - 1, heads)](
        query_THD, query_THD.stride(0), query_THD.stride(1), key_UKD, key_UKD.stride(0), key_UKD.stride(1),
        value_UKD, value_UKD.stride(0), value_UKD.stride(1), starts_q, starts_k, out_THD, logsum_HT, T, scale * LOG2_E, tiles,
        HEADS=heads, GROUP=heads // key_UKD.shape[1], D=size, WIDTH=next_power_of_2(size),
        ROWS=rows, BLOCK=block_tokens(size), STRETCH=STRETCH, num_warps=WARPS, num_stages=STAGES, **NO_FP_FUSION,
    )  # fmt: skip
    return out_THD, logsum_HT


def sum_copies(grad_UKD: Tensor, copies_U: Tensor, starts_T1: Tensor) -> Tensor:
    """[T, K, D]: for each token the sum over its copies, in their order, in fp32."""
    grad_UE = grad_UKD.flatten(1).contiguous()
    T, width = len(starts_T1) - 1, grad_UE.shape[1]
    summed_TE = torch.empty(T, width, dtype=grad_UE.dtype, device=grad_UE.device)
    _sum_copies[(T,)](grad_UE, copies_U, starts_T1, summed_TE, WIDTH=width, BLOCK=next_power_of_2(width), num_warps=2)
    return summed_TE.view(T, *grad_UKD.shape[1:])


@triton.jit
def _sum_copies(grad_ptr, copies_ptr, starts_ptr, summed_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for copy in tl.range(tl.load(starts_ptr + token), tl.load(starts_ptr + token + 1)):
        place = tl.load(copies_ptr + copy).to(tl.int64) * WIDTH + at
        total += tl.load(grad_ptr + place, mask=at < WIDTH, other=0.0).to(tl.float32)
    tl.store(summed_ptr + token * WIDTH + at, total.to(summed_ptr.dtype.element_ty), mask=at < WIDTH)


@triton.jit
def attend_block(query, key, value, valid, scale, best, total, out):
    """Queries [rows, size], keys [size, tokens], values [tokens, size]; valid [rows or 1, tokens]."""
    score = tl.where(valid, tl.dot(query, key, input_precision="ieee") * scale, -float("inf"))
    new_best = tl.maximum(best, tl.max(score, 1))
    # All keys of a block may be masked for a row.
    safe = tl.where(new_best == -float("inf"), 0.0, new_best)
    weight = tl.exp2(score - safe[:, None])
    fade = tl.exp2(best - safe)
    weight = weight.to(value.dtype)
    # Tensor cores sum the weights, too: the order of a sum across threads would depend on their number.
    ones = tl.full([value.shape[0], FEWEST_COLUMNS], 1.0, value.dtype)
    total = tl.fma(total, fade, tl.max(tl.dot(weight, ones, input_precision="ieee"), 1))
    out = tl.dot(weight, value, out * fade[:, None], input_precision="ieee")
    return new_best, total, out


@triton.jit
def merge_stretch(all_best, all_total, all_out, best, total, out):
    """Merge a stretch into the result of those before it."""
    new_best = tl.maximum(all_best, best)
    safe = tl.where(new_best == -float("inf"), 0.0, new_best)
    before = tl.exp2(all_best - safe)
    now = tl.exp2(best - safe)
    all_total = tl.fma(all_total, before, total * now)
    all_out = tl.fma(all_out, tl.broadcast_to(before[:, None], all_out.shape), out * now[:, None])
    return new_best, all_total, all_out


@triton.jit
def _attend(
    query_ptr, query_stride, query_head_stride, key_ptr, key_stride, key_head_stride, value_ptr, value_stride, value_head_stride,
    starts_q_ptr, starts_k_ptr, out_ptr, logsum_ptr, T, scale, tiles,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STRETCH: tl.constexpr,
):  # fmt: skip
    """Each program: a tile of queries of one head of one sequence."""
    tl.static_assert(STRETCH % BLOCK == 0)
    first = (tiles - 1 - tl.program_id(0)) * ROWS  # the longest work first
    sequence = tl.program_id(1)
    head = tl.program_id(2)
    begin_q = tl.load(starts_q_ptr + sequence).to(tl.int64)
    begin_k = tl.load(starts_k_ptr + sequence).to(tl.int64)
    queries = (tl.load(starts_q_ptr + sequence + 1) - begin_q).to(tl.int32)
    keys = (tl.load(starts_k_ptr + sequence + 1) - begin_k).to(tl.int32)
    if first >= queries:
        return
    row = first + tl.arange(0, ROWS)
    at = tl.arange(0, WIDTH)
    token = tl.arange(0, BLOCK)
    position = keys - queries + row
    inside = (row[:, None] < queries) & (at[None, :] < D)
    query_place = query_ptr + (begin_q + row[:, None]) * query_stride + head * query_head_stride + at[None, :]
    query = tl.load(query_place, mask=inside, other=0.0)
    key_place = key_ptr + begin_k * key_stride + (head // GROUP) * key_head_stride + at[:, None]
    value_place = value_ptr + begin_k * value_stride + (head // GROUP) * value_head_stride + at[None, :]
    best = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, WIDTH], tl.float32)
    all_best, all_total, all_out = best, total, out
    for start in tl.range(0, tl.minimum(keys, keys - queries + first + ROWS), BLOCK):
        if (start > 0) & (start % STRETCH == 0):
            all_best, all_total, all_out = merge_stretch(all_best, all_total, all_out, best, total, out)
            best = tl.full([ROWS], -float("inf"), tl.float32)  # resets the sums: total and out are scaled by 0
        there = (start + token).to(tl.int64)
        key = tl.load(key_place + there[None, :] * key_stride, mask=(there[None, :] < keys) & (at[:, None] < D), other=0.0)
        value = tl.load(value_place + there[:, None] * value_stride, mask=(there[:, None] < keys) & (at[None, :] < D), other=0.0)
        valid = (start + token)[None, :] <= position[:, None]
        best, total, out = attend_block(query, key, value, valid, scale, best, total, out)
    best, total, out = merge_stretch(all_best, all_total, all_out, best, total, out)
    out_place = out_ptr + ((begin_q + row[:, None]) * HEADS + head) * D + at[None, :]
    tl.store(out_place, (out / total[:, None]).to(out_ptr.dtype.element_ty), mask=inside)
    logsum = (best + tl.log2(total)) * 0.6931471805599453
    tl.store(logsum_ptr + head.to(tl.int64) * T + begin_q + row, logsum, mask=row < queries)
