"""Log-probs and entropies of tokens from logits, and gradients of the logits; in the sampler's order.

Logits are read in tiles. For a tile with the greatest logit g, and G the greatest of all tiles, at temperature τ:

    t = Σ exp((z − g) / τ)        log Σ_v exp((z_v − G) / τ) = log Σ_tiles t · exp((g − G) / τ)

The sampler (rollout/native/kernels/draw.py) sums with the functions here, so both sides get the same bits.
"""

# A launch takes arguments that the kernel does not declare.
# pyright: reportCallIssue=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from plaudit.models.heads import next_power_of_2
from plaudit.models.kernels.compile_options import NO_FP_FUSION
from plaudit.models.vocabulary import TILE, Summed

WARPS = 8  # of every kernel that sums a tile: their number determines the order


def token_logprobs(logits_NV: Tensor, tokens_N: Tensor, temperature: float) -> Summed:
    N, V = logits_NV.shape
    tiles = -(-V // TILE)
    sums_NT3 = torch.empty(N, tiles, 3, dtype=torch.float32, device=logits_NV.device)
    result = Summed(*torch.empty(4, N, dtype=torch.float32, device=logits_NV.device))
    _sum_tiles[(N, tiles)](
        logits_NV, logits_NV.stride(0), sums_NT3, temperature, V, tiles,
        TILE=TILE, TEMPERED=temperature != 1.0, num_warps=WARPS, **NO_FP_FUSION,
    )  # fmt: skip
    _settle[(N,)](
        logits_NV, logits_NV.stride(0), tokens_N, sums_NT3, *result, temperature, tiles,
        MANY=next_power_of_2(tiles), TEMPERED=temperature != 1.0, num_warps=1, **NO_FP_FUSION,
    )  # fmt: skip
    return result


def logit_gradients(
    logits_NV: Tensor, tokens_N: Tensor, summed: Summed, temperature: float, grad_logprobs_N: Tensor, grad_entropy_N: Tensor | None,
    grad_NV: Tensor,
) -> None:  # fmt: skip
    """Into `grad_NV`. With p = softmax(z / τ):      ∂z_v = (∂logprob · (1[v is the token] − p_v) − ∂H · p_v (log p_v + H)) / τ"""
    N, V = logits_NV.shape
    has_entropy = grad_entropy_N is not None
    grad_logprobs_N = grad_logprobs_N.contiguous()  # that of a sum is one number, expanded
    grad_entropy_N = grad_entropy_N.contiguous() if has_entropy else grad_logprobs_N
    _gradients[(N, -(-V // TILE))](
        logits_NV, logits_NV.stride(0), tokens_N, summed.greatest_N, summed.total_N, summed.entropy_N, grad_logprobs_N,
        grad_entropy_N, grad_NV, grad_NV.stride(0), temperature, V,
        TILE=TILE, ENTROPY=has_entropy, num_warps=WARPS,
    )  # fmt: skip


@triton.jit
def tile_odds(z, temperature, TEMPERED: tl.constexpr):
    """The greatest logit of a tile, and exp((z − greatest) / τ). All logits of a tile may be −inf."""
    greatest = tl.max(z, 0)
    base = tl.where(greatest == -float("inf"), 0.0, greatest)
    return greatest, tl.exp((z - base) / temperature) if TEMPERED else tl.exp(z - base)


@triton.jit
def log_total(totals, greatest, all_greatest, temperature, TEMPERED: tl.constexpr):
    """log Σ exp((z − all_greatest) / τ) from sums of tiles. Summed in integer multiples of 2^-40, which have no order: that of a
    float sum would depend on the number of warps. NaN remains NaN."""
    fade = tl.exp((greatest - all_greatest) / temperature) if TEMPERED else tl.exp(greatest - all_greatest)
    units = (totals * fade * 1099511627776.0).to(tl.int64)
    return tl.log(tl.sum(units, 0).to(tl.float32) * 9.094947017729282e-13) + 0.0 * tl.sum(totals, 0)


@triton.jit
def _sum_tiles(
    logits_ptr, logits_stride, sums_ptr, temperature, V, tiles, TILE: tl.constexpr, TEMPERED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    token = tile * TILE + tl.arange(0, TILE)
    z = tl.load(logits_ptr + row * logits_stride + token, mask=token < V, other=-float("inf"))
    greatest, odds = tile_odds(z, temperature, TEMPERED)  # pyright: ignore[reportGeneralTypeIssues]
    place = sums_ptr + (row * tiles + tile) * 3
    tl.store(place, greatest)
    tl.store(place + 1, tl.sum(odds, 0))
    tl.store(place + 2, tl.sum(tl.where(odds > 0.0, odds * (z - greatest) / temperature, 0.0), 0))


@triton.jit
def _settle(
    logits_ptr, logits_stride, tokens_ptr, sums_ptr, logprobs_ptr, entropy_ptr, greatest_ptr, total_ptr, temperature, tiles,
    MANY: tl.constexpr, TEMPERED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, MANY)
    place = sums_ptr + (row * tiles + tile) * 3
    greatest = tl.load(place, mask=tile < tiles, other=-float("inf"))
    totals = tl.load(place + 1, mask=tile < tiles, other=0.0)
    weighted = tl.load(place + 2, mask=tile < tiles, other=0.0)
    all_greatest = tl.max(greatest, 0)
    total = log_total(totals, greatest, all_greatest, temperature, TEMPERED)
    above = tl.load(logits_ptr + row * logits_stride + tl.load(tokens_ptr + row)) - all_greatest
    tl.store(logprobs_ptr + row, (above / temperature if TEMPERED else above) - total)
    # H = log Σ exp(s) − Σ p s,  s = (z − G) / τ
    below = (greatest - all_greatest) / temperature
    mean = tl.sum(tl.where(totals > 0.0, tl.exp(below - total) * (weighted + totals * below), 0.0), 0)
    tl.store(entropy_ptr + row, total - mean)
    tl.store(greatest_ptr + row, all_greatest)
    tl.store(total_ptr + row, total)


@triton.jit
def _gradients(
    logits_ptr, logits_stride, tokens_ptr, greatest_ptr, total_ptr, entropy_ptr, grad_logprobs_ptr, grad_entropy_ptr,
    grad_ptr, grad_stride, temperature, V, TILE: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    z = tl.load(logits_ptr + row * logits_stride + token, mask=token < V, other=-float("inf"))
    logprob = (z - tl.load(greatest_ptr + row)) / temperature - tl.load(total_ptr + row)
    p = tl.exp(logprob)
    from_logprob = tl.load(grad_logprobs_ptr + row)
    grad = -p * from_logprob
    if ENTROPY:
        surprise = tl.where(p > 0.0, p * (logprob + tl.load(entropy_ptr + row)), 0.0)
        grad -= surprise * tl.load(grad_entropy_ptr + row)
    grad = tl.where(token == tl.load(tokens_ptr + row), grad + from_logprob, grad) / temperature
    tl.store(grad_ptr + row * grad_stride + token, grad.to(grad_ptr.dtype.element_ty), mask=token < V)
