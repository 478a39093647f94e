"""The k-th greatest logit of each row, exactly what `torch.topk` finds if no logit is NaN.

A row is divided into blocks of 64 logits. The k blocks with the greatest maxima contain at least k logits that reach the least of
these maxima, and every logit above it, so the k-th greatest is among them. `_peaks` reads a row once for the maxima, `_choose`
takes k blocks, and `_kth` reads only these. Both search bit by bit for the greatest bound that k of their numbers reach.
"""

# A launch takes arguments that the kernel does not declare.
# pyright: reportCallIssue=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from plaudit.models.heads import next_power_of_2

BLOCK = 64
BLOCKS_AT_ONCE = 64
MOST = 128
"""The greatest k: with twice as many logits, `_kth` would need more registers than there are."""


def kth_greatest(logits_BV: Tensor, rows_BC: Tensor, k: int) -> Tensor:
    """[B], in fp32; k < V. Rows without a sequence are left out."""
    B, V = logits_BV.shape
    if k > MOST:
        return logits_BV.topk(k).values[:, -1].contiguous()
    blocks = -(-V // BLOCK)
    peaks_BN = torch.empty(B, blocks, dtype=torch.float32, device=logits_BV.device)
    chosen_Bk = torch.empty(B, k, dtype=torch.int32, device=logits_BV.device)
    kth_B = torch.empty(B, dtype=torch.float32, device=logits_BV.device)
    _peaks[(B, -(-blocks // BLOCKS_AT_ONCE))](
        logits_BV, logits_BV.stride(0), rows_BC, peaks_BN, V, blocks,
        COLUMNS=rows_BC.shape[1], BLOCK=BLOCK, AT_ONCE=BLOCKS_AT_ONCE, num_warps=8,
    )  # fmt: skip
    _choose[(B,)](
        rows_BC, peaks_BN, chosen_Bk, blocks, k,
        COLUMNS=rows_BC.shape[1], MANY=next_power_of_2(blocks), num_warps=8,
    )  # fmt: skip
    _kth[(B,)](
        logits_BV, logits_BV.stride(0), rows_BC, chosen_Bk, kth_B, V, k, min(k, blocks),
        COLUMNS=rows_BC.shape[1], BLOCK=BLOCK, MANY=next_power_of_2(k), num_warps=8,
    )  # fmt: skip
    return kth_B


@triton.jit
def _ordered(x):
    """Unsigned integers in the order of the floats x; those of numbers are greater than 0."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _as_float(ordered):
    return tl.where(ordered >= 0x80000000, ordered ^ 0x80000000, ordered ^ 0xFFFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def _reached(numbers, k):
    """The greatest bound that at least k of the unsigned integers reach; 0 if there are fewer than k."""
    bound = tl.zeros((), tl.uint32)
    bit = tl.full((), 0x80000000, tl.uint32)
    for _ in range(32):
        bound = tl.where(tl.sum((numbers >= bound + bit).to(tl.int32), 0) >= k, bound + bit, bound)
        bit >>= 1
    return bound


@triton.jit
def _peaks(
    logits_ptr, logits_stride, rows_ptr, peaks_ptr, V, blocks,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if tl.load(rows_ptr + row * COLUMNS + 1) < 0:
        return
    block = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    token = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    z = tl.load(logits_ptr + row * logits_stride + token, mask=token < V, other=-float("inf"))
    tl.store(peaks_ptr + row * blocks + block, tl.max(z, 1), mask=block < blocks)


@triton.jit
def _choose(rows_ptr, peaks_ptr, chosen_ptr, blocks, k, COLUMNS: tl.constexpr, MANY: tl.constexpr):
    """k blocks with the greatest maxima, in no particular order; all, if there are fewer."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(rows_ptr + row * COLUMNS + 1) < 0:
        return
    block = tl.arange(0, MANY)
    peaks = _ordered(tl.load(peaks_ptr + row * blocks + block, mask=block < blocks, other=0.0))
    peaks = tl.where(block < blocks, peaks, 0)
    bound = _reached(peaks, k)
    above = (peaks > bound).to(tl.int32)
    equal = (peaks == bound).to(tl.int32)
    place = tl.where(above == 1, tl.cumsum(above, 0), tl.sum(above, 0) + tl.cumsum(equal, 0)) - 1
    chosen = (above + equal == 1) & (place < k) & (block < blocks)
    tl.store(chosen_ptr + row * k + place, block, mask=chosen)


@triton.jit
def _kth(
    logits_ptr, logits_stride, rows_ptr, chosen_ptr, kth_ptr, V, k, number,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if tl.load(rows_ptr + row * COLUMNS + 1) < 0:
        return
    i = tl.arange(0, MANY)
    chosen = tl.load(chosen_ptr + row * k + i, mask=i < number, other=0)
    token = chosen[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    is_token = (i < number)[:, None] & (token < V)
    z = _ordered(tl.load(logits_ptr + row * logits_stride + token, mask=is_token, other=0.0))
    kth = _reached(tl.reshape(tl.where(is_token, z, 0), [MANY * BLOCK]), k)
    tl.store(kth_ptr + row, _as_float(kth))
