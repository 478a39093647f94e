"""Logits → token, its log-probs, and the row's next state: what `torch_ops.draw_and_advance` computes.

`_read` reads a row's logits once and sums them per tile. `_settle` combines the tiles and draws a tile by its sum, then one of its
tokens (see the sampler's docstring). In place of argmax of z/τ + g it runs an exponential race: token v arrives after a time
E_v / exp(z_v/τ), E standard exponential, and the first one wins. That takes one logarithm per token instead of two.

Top-k, top-p and min-p keep every token above some logit. For these, `_read` lets all tokens race at once and `_accept` checks
whether the winner is kept. If not, no token below it is kept either, and the race is repeated among those above it.
"""

# A launch takes arguments that the kernel does not declare.
# pyright: reportCallIssue=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from plaudit.models.heads import next_power_of_2
from plaudit.models.kernels.compile_options import NO_FP_FUSION
from plaudit.models.kernels.vocabulary import WARPS, log_total, tile_odds
from plaudit.rollout.native import sampler
from plaudit.rollout.native.batch import AT_LIMIT, COLUMNS, ENDED, RUNNING, DeviceSampling
from plaudit.rollout.native.kernels.top_k import kth_greatest


def draw_and_advance(logits_BV: Tensor, rows_BC: Tensor, results_B4: Tensor, sampling: DeviceSampling) -> None:
    B, V = logits_BV.shape
    parameters, ends = sampling.parameters, sampling.end_tokens
    tile = sampler.TILE
    tiles = -(-V // tile)
    sums_BT4 = torch.empty(B, tiles, 4, dtype=torch.float32, device=logits_BV.device)
    tokens_BT = torch.empty(B, tiles, dtype=torch.int32, device=logits_BV.device)
    has_floor = 0 < sampling.top_k < V
    floor_B = kth_greatest(logits_BV, rows_BC, sampling.top_k) if has_floor else parameters
    at_once = has_floor or sampling.truncated
    _read[(B, tiles)](
        logits_BV, logits_BV.stride(0), rows_BC, parameters, floor_B, sums_BT4, tokens_BT, V, tiles,
        COLUMNS=COLUMNS, TILE=tile, TEMPERED=sampling.tempered, AT_ONCE=at_once, FLOOR=has_floor, num_warps=WARPS, **NO_FP_FUSION,
    )  # fmt: skip
    if sampling.truncated:
        _accept[(B,)](
            logits_BV, logits_BV.stride(0), rows_BC, parameters, floor_B, sums_BT4, tokens_BT, V, tiles,
            COLUMNS=COLUMNS, TILE=tile, MANY=next_power_of_2(tiles), FLOOR=has_floor, num_warps=8,
        )  # fmt: skip
    _settle[(B,)](
        logits_BV, logits_BV.stride(0), rows_BC, parameters, sums_BT4, tokens_BT, ends, results_B4, V, tiles,
        COLUMNS=COLUMNS, TILE=tile, MANY=next_power_of_2(tiles), ENDS=len(ends), MANY_ENDS=next_power_of_2(len(ends)),
        TEMPERED=sampling.tempered, GREEDY=sampling.greedy, AT_ONCE=at_once, RUNNING=RUNNING, ENDED=ENDED, AT_LIMIT=AT_LIMIT,
        num_warps=1 if at_once else 8, **NO_FP_FUSION,
    )  # fmt: skip


@triton.jit
def _mix(x):
    """noise._mix, in unsigned integers."""
    x ^= x >> 16
    x *= 0x21F0AAAD
    x ^= x >> 15
    x *= 0x735A2D97
    x ^= x >> 15
    return x


@triton.jit
def _position_key(key, written):
    """noise.position_keys."""
    x = key.to(tl.uint64) + (written + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


# The GPU's fast approximations, with errors of about 1e-6: a draw between two tokens that arrive this close together may go either
# way. They save a third of the race's instructions. The interpreter does not have them.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # pyright: ignore[reportAttributeAccessIssue]


@triton.jit
def _log2(x):
    return tl.log2(x) if INTERPRETED else libdevice.fast_log2f(x)


@triton.jit
def _divided(x, y):
    return x / y if INTERPRETED else libdevice.fast_dividef(x, y)


@triton.jit
def _exponential(key, token):
    """−log(1 − w) with the w of noise.gumbel."""
    low = (key & 0xFFFFFFFF).to(tl.uint32)
    high = (key >> 32).to(tl.uint32)
    x = _mix((token.to(tl.uint32) * 0x9E3779B1) ^ low)
    x = _mix(x + high)
    w = ((x & 0x7FFFFFFF).to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077393e-10
    w = tl.minimum(w, 0.99999994)
    near_0 = w * (1.0 + w * (0.5 + w * (0.33333334 + w * (0.25 + w * (0.2 + w * 0.16666667)))))
    return tl.where(w < 0.0625, near_0, -0.6931471805599453 * _log2(1.0 - w))


@triton.jit
def _first(speeds, token, V):
    """The token with the greatest speed, the first of equals; faster than an argmax. If speeds are NaN, none equals the maximum,
    and the result is the last token of the vocabulary."""
    return tl.min(tl.where(speeds == tl.max(speeds, 0), tl.minimum(token, V - 1), V - 1), 0)


@triton.jit
def _read(
    logits_ptr, logits_stride, rows_ptr, numbers_ptr, floor_ptr, sums_ptr, tokens_ptr, V, tiles,
    COLUMNS: tl.constexpr, TILE: tl.constexpr, TEMPERED: tl.constexpr, AT_ONCE: tl.constexpr, FLOOR: tl.constexpr,
):  # fmt: skip
    """For one tile of one row: the maximum logit, Σ exp of the logits and of the tempered ones; if all tokens race at once, also
    the winner and the logarithm of its speed."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    rows_ptr += row * COLUMNS
    if tl.load(rows_ptr + 1) < 0:
        return
    token = tile * TILE + tl.arange(0, TILE)
    z = tl.load(logits_ptr + row * logits_stride + token, mask=token < V, other=-float("inf"))
    greatest, odds = tile_odds(z, 1.0, False)  # pyright: ignore[reportGeneralTypeIssues]
    place = (row * tiles + tile) * 4
    tl.store(sums_ptr + place, greatest)
    tl.store(sums_ptr + place + 1, tl.sum(odds, 0))
    if TEMPERED:
        greatest, odds = tile_odds(z, tl.load(numbers_ptr), True)  # pyright: ignore[reportGeneralTypeIssues]
    tl.store(sums_ptr + place + 2, tl.sum(odds, 0))
    if AT_ONCE:
        if FLOOR:
            odds = tl.where(z >= tl.load(floor_ptr + row), odds, 0.0)
        speeds = _divided(odds, _exponential(_position_key(tl.load(rows_ptr + 2), tl.load(rows_ptr + 3)), token))
        # Logarithms are comparable across tiles, whose speeds are relative to different bases.
        tl.store(sums_ptr + place + 3, tl.log(tl.max(speeds, 0)) + greatest / tl.load(numbers_ptr))
        tl.store(tokens_ptr + row * tiles + tile, _first(speeds, token, V))


@triton.jit
def _accept(
    logits_ptr, logits_stride, rows_ptr, numbers_ptr, floor_ptr, sums_ptr, tokens_ptr, V, tiles,
    COLUMNS: tl.constexpr, TILE: tl.constexpr, MANY: tl.constexpr, FLOOR: tl.constexpr,
):  # fmt: skip
    """If top-p or min-p exclude the winner, replace it with a token that they keep."""
    row = tl.program_id(0).to(tl.int64)
    rows_ptr += row * COLUMNS
    if tl.load(rows_ptr + 1) < 0:
        return
    logits_ptr += row * logits_stride
    temperature = tl.load(numbers_ptr)
    top_p = tl.load(numbers_ptr + 1)
    log_min_p = tl.load(numbers_ptr + 2)
    tile = tl.arange(0, MANY)
    place = sums_ptr + (row * tiles + tile) * 4
    peaks = tl.load(place, mask=tile < tiles, other=-float("inf"))
    greatest = tl.max(peaks, 0)
    speed = tl.load(place + 3, mask=tile < tiles, other=-float("inf"))
    tile_won = tl.argmax(speed, 0)
    winner = tl.load(tokens_ptr + row * tiles + tile_won).to(tl.int32)
    z_winner = tl.load(logits_ptr + winner)
    # Most tiles have no token above the winner, and need not be read: `peak` is a tile's greatest logit.
    if FLOOR:
        least = tl.load(floor_ptr + row)
        total = 0.0
        for start in range(0, V, TILE):
            peak = tl.load(sums_ptr + (row * tiles + start // TILE) * 4)
            if peak >= least:
                token = start + tl.arange(0, TILE)
                z = tl.load(logits_ptr + token, mask=token < V, other=-float("inf"))
                total += tl.sum(tl.where(z >= least, tl.exp((z - greatest) / temperature), 0.0), 0)
    else:
        odds_of_tiles = tl.load(place + 2, mask=tile < tiles, other=0.0)
        total = tl.sum(odds_of_tiles * tl.exp((peaks - greatest) / temperature), 0)
    # Integer multiples of 2^-40, as in sampler.keep_likely.
    unit = 1099511627776.0 / total
    allowed = (top_p.to(tl.float64) * 1099511627776.0).to(tl.int64)
    key = _position_key(tl.load(rows_ptr + 2), tl.load(rows_ptr + 3))
    kept = False
    while not kept:
        above = tl.zeros([TILE], tl.int64)
        for start in range(0, V, TILE):
            peak = tl.load(sums_ptr + (row * tiles + start // TILE) * 4)
            if peak > z_winner:
                token = start + tl.arange(0, TILE)
                z = tl.load(logits_ptr + token, mask=token < V, other=-float("inf"))
                above += tl.where(z > z_winner, (tl.exp((z - greatest) / temperature) * unit).to(tl.int64), 0)
        likely = ((z_winner - greatest) / temperature >= log_min_p) & (tl.sum(above, 0) < allowed)
        kept = likely | ~(z_winner < greatest)  # also ends the loop on NaN
        if not kept:
            fastest = -1.0
            bound = z_winner
            for start in range(0, V, TILE):
                peak = tl.load(sums_ptr + (row * tiles + start // TILE) * 4)
                if peak > bound:
                    token = start + tl.arange(0, TILE)
                    z = tl.load(logits_ptr + token, mask=token < V, other=-float("inf"))
                    odds = tl.where(z > bound, tl.exp((z - greatest) / temperature), 0.0)
                    speeds = _divided(odds, _exponential(key, token))
                    fast = tl.max(speeds, 0)
                    if fast > fastest:
                        fastest = fast
                        winner = tl.minimum((start + tl.argmax(speeds, 0)).to(tl.int32), V - 1)
            z_winner = tl.load(logits_ptr + winner)
    tl.store(tokens_ptr + row * tiles + tile_won, winner)


@triton.jit
def _settle(
    logits_ptr, logits_stride, rows_ptr, numbers_ptr, sums_ptr, tokens_ptr, ends_ptr, results_ptr, V, tiles,
    COLUMNS: tl.constexpr, TILE: tl.constexpr, MANY: tl.constexpr, ENDS: tl.constexpr, MANY_ENDS: tl.constexpr,
    TEMPERED: tl.constexpr, GREEDY: tl.constexpr, AT_ONCE: tl.constexpr,
    RUNNING: tl.constexpr, ENDED: tl.constexpr, AT_LIMIT: tl.constexpr,
):  # fmt: skip
    """One row: sums of its tiles → token, log-probs and next state."""
    row = tl.program_id(0).to(tl.int64)
    rows_ptr += row * COLUMNS
    # The row's state is read before the warps' barriers and written after them.
    position = tl.load(rows_ptr + 1)
    key = tl.load(rows_ptr + 2)
    written = tl.load(rows_ptr + 3)
    limit = tl.load(rows_ptr + 4)
    if position < 0:
        tl.store(results_ptr + row * 4, 0)
        return
    logits_ptr += row * logits_stride
    temperature = tl.load(numbers_ptr)
    tile = tl.arange(0, MANY)
    place = sums_ptr + (row * tiles + tile) * 4
    greatest = tl.load(place, mask=tile < tiles, other=-float("inf"))
    total = tl.load(place + 1, mask=tile < tiles, other=0.0)
    tempered = tl.load(place + 2, mask=tile < tiles, other=0.0)
    if AT_ONCE:
        speed = tl.load(place + 3, mask=tile < tiles, other=-float("inf"))
        token = tl.load(tokens_ptr + row * tiles + tl.argmax(speed, 0)).to(tl.int64)
    else:
        noise_key = _position_key(key, written)
        speed = greatest
        if not GREEDY:
            speed = tl.log(tempered) + greatest / temperature - tl.log(_exponential(noise_key, -1 - tile))
        tile_won = tl.minimum(tl.argmax(speed, 0), tiles - 1)
        token_W = tile_won * TILE + tl.arange(0, TILE)
        speeds_W = tl.load(logits_ptr + token_W, mask=token_W < V, other=-float("inf"))
        if not GREEDY:
            base = tl.load(sums_ptr + (row * tiles + tile_won) * 4)
            speeds_W = _divided(tl.exp((speeds_W - base) / temperature), _exponential(noise_key, token_W))
        token = _first(speeds_W, token_W, V).to(tl.int64)
    all_greatest = tl.max(greatest, 0)
    above = tl.load(logits_ptr + token) - all_greatest
    untempered = above - log_total(total, greatest, all_greatest, 1.0, False)
    logprob = untempered
    if TEMPERED:
        logprob = above / temperature - log_total(tempered, greatest, all_greatest, temperature, True)
    written += 1
    end = tl.arange(0, MANY_ENDS)
    is_end = tl.max((tl.load(ends_ptr + end, mask=end < ENDS, other=-1) == token).to(tl.int32), 0) > 0
    status = tl.where(is_end, ENDED, tl.where(written >= limit, AT_LIMIT, RUNNING))
    tl.store(rows_ptr, token)
    tl.store(rows_ptr + 1, tl.where(status == RUNNING, position + 1, -1))
    tl.store(rows_ptr + 3, written)
    tl.store(results_ptr + row * 4, status)
    tl.store(results_ptr + row * 4 + 1, token.to(tl.int32))
    tl.store(results_ptr + row * 4 + 2, logprob.to(tl.int32, bitcast=True))
    tl.store(results_ptr + row * 4 + 3, untempered.to(tl.int32, bitcast=True))
