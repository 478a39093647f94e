"""Logits → token, its log-probs, and the row's next state: what `torch_ops.draw_and_advance` computes.

`_read` reads a row's logits once and sums them per tile. `_settle` combines the tiles and draws a tile by its sum, then one of its
tokens (see the sampler's docstring). In place of argmax of z/τ + g it runs an exponential race: token v arrives after a time
E_v / exp(z_v/τ), E standard exponential, and the first one wins. That takes one logarithm per token instead of two.

Top-k, top-p and min-p keep every token above some logit. For these, `_read` lets all tokens race at once, or the top k. A round
(`_narrow`) sums what is above the winner, which says whether it is kept, and repeats the race among these tokens in case it is not:
then no token below the winner is kept either. The next round begins with its outcome. All programs of a row work on each round;
`_accept` continues alone, after as many rounds as nearly all rows need.
"""

# A launch takes arguments that the kernel does not declare.
# pyright: reportCallIssue=false, reportArgumentType=false

from typing import NamedTuple

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

SUMS = tl.constexpr(5)  # numbers that `_read` leaves for each tile
# In each round a winner is kept with a probability of at least top_p: at 0.9 one row in a thousand needs more than three rounds.
# Without top-p there are two races at most, since only what min-p keeps takes part in the second.
ROUNDS = 3
PROGRAMS = 1024  # of a round, if there are as many tiles: they fill the device


def draw_and_advance(logits_BV: Tensor, rows_BC: Tensor, results_B4: Tensor, sampling: DeviceSampling) -> None:
    B, V = logits_BV.shape
    parameters, ends = sampling.parameters, sampling.end_tokens
    tile = sampler.TILE
    tiles = -(-V // tile)
    sums_BT5 = torch.empty(B, tiles, SUMS.value, dtype=torch.float32, device=logits_BV.device)
    tokens_BT = torch.empty(B, tiles, dtype=torch.int32, device=logits_BV.device)
    has_floor = 0 < sampling.top_k < V
    floor_B = kth_greatest(logits_BV, rows_BC, sampling.top_k) if has_floor else parameters
    at_once = has_floor or sampling.truncated
    many = next_power_of_2(tiles)
    shape = {"COLUMNS": COLUMNS, "TILE": tile}
    logits = logits_BV, logits_BV.stride(0), rows_BC, parameters
    _read[(B, tiles)](
        *logits, floor_B, sums_BT5, tokens_BT, V, tiles,
        TEMPERED=sampling.tempered, AT_ONCE=at_once, FLOOR=has_floor, num_warps=WARPS, **shape, **NO_FP_FUSION,
    )  # fmt: skip
    if sampling.truncated:
        programs = min(next_power_of_2(-(-PROGRAMS // B)), many)
        narrowed = {"MANY": many, "PROGRAMS": programs, "FLOOR": has_floor, "num_warps": 8} | shape
        read, found = (sums_BT5, tokens_BT), None
        for _ in range(ROUNDS):
            before, found = found, _Found.empty(B, programs, logits_BV.device)
            placeholder = before or found  # the first round reads nothing of an earlier one
            _narrow[(B, programs)](*logits, *read, *placeholder, *found, V, tiles, FIRST=before is None, **narrowed)
        assert found is not None
        _accept[(B,)](*logits, *read, *found, V, tiles, **narrowed)
    _settle[(B,)](
        *logits, sums_BT5, tokens_BT, ends, results_B4, V, tiles,
        MANY=many, ENDS=len(ends), MANY_ENDS=next_power_of_2(len(ends)),
        TEMPERED=sampling.tempered, GREEDY=sampling.greedy, AT_ONCE=at_once, RUNNING=RUNNING, ENDED=ENDED, AT_LIMIT=AT_LIMIT,
        num_warps=1 if at_once else 8, **shape, **NO_FP_FUSION,
    )  # fmt: skip


class _Found(NamedTuple):
    """What the programs of a round find. Undefined in rows without a sequence; where the winner is kept, only it is defined."""

    winner_B: Tensor
    """The token that the round begins with; as −1 − token, if it is known to be kept, which ends the search."""
    above_BP: Tensor
    """The probability of tokens above the winner, in multiples of 2^-40."""
    speed_BP: Tensor
    fastest_BP: Tensor
    """The fastest token above the winner of those that min-p keeps, after its speed."""

    @staticmethod
    def empty(rows: int, programs: int, device: torch.device) -> "_Found":
        shapes = {torch.int32: (rows,), torch.int64: (rows, programs), torch.float32: (rows, programs)}
        winner_B, above_BP, speed_BP = (torch.empty(shape, dtype=dtype, device=device) for dtype, shape in shapes.items())
        return _Found(winner_B, above_BP, speed_BP, torch.empty_like(speed_BP, dtype=torch.int32))


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
    the winner and the logarithm of its speed, and Σ exp of the tempered logits at or above the floor, if there is one."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    rows_ptr += row * COLUMNS
    if tl.load(rows_ptr + 1) < 0:
        return
    token = tile * TILE + tl.arange(0, TILE)
    z = tl.load(logits_ptr + row * logits_stride + token, mask=token < V, other=-float("inf"))
    greatest, odds = tile_odds(z, 1.0, False)  # pyright: ignore[reportGeneralTypeIssues]
    place = (row * tiles + tile) * SUMS
    tl.store(sums_ptr + place, greatest)
    tl.store(sums_ptr + place + 1, tl.sum(odds, 0))
    if TEMPERED:
        greatest, odds = tile_odds(z, tl.load(numbers_ptr), True)  # pyright: ignore[reportGeneralTypeIssues]
    tl.store(sums_ptr + place + 2, tl.sum(odds, 0))
    if AT_ONCE:
        if FLOOR:
            odds = tl.where(z >= tl.load(floor_ptr + row), odds, 0.0)
            tl.store(sums_ptr + place + 4, tl.sum(odds, 0))
        speeds = _divided(odds, _exponential(_position_key(tl.load(rows_ptr + 2), tl.load(rows_ptr + 3)), token))
        # Logarithms are comparable across tiles, whose speeds are relative to different bases.
        tl.store(sums_ptr + place + 3, tl.log(tl.max(speeds, 0)) + greatest / tl.load(numbers_ptr))
        tl.store(tokens_ptr + row * tiles + tile, _first(speeds, token, V))


@triton.jit
def _limits(numbers_ptr):
    """Temperature, log min-p, whether top-p excludes tokens, and what may be above a token that it keeps, in multiples of 2^-40."""
    top_p = tl.load(numbers_ptr + 1)
    allowed = (top_p.to(tl.float64) * 1099511627776.0).to(tl.int64)
    return tl.load(numbers_ptr), tl.load(numbers_ptr + 2), top_p < 1.0, allowed


@triton.jit
def _totals(sums_ptr, tiles, temperature, MANY: tl.constexpr, FLOOR: tl.constexpr):
    """The greatest logit, and how many units of 2^-40 its probability is; sums of units are exact, as in sampler.keep_likely."""
    tile = tl.arange(0, MANY)
    peaks = tl.load(sums_ptr + tile * SUMS, mask=tile < tiles, other=-float("inf"))
    odds_of_tiles = tl.load(sums_ptr + tile * SUMS + (4 if FLOOR else 2), mask=tile < tiles, other=0.0)
    greatest = tl.max(peaks, 0)
    return greatest, 1099511627776.0 / tl.sum(odds_of_tiles * tl.exp((peaks - greatest) / temperature), 0)


@triton.jit
def _is_kept(z, above, greatest, temperature, log_min_p, has_top_p, allowed):
    """A token with logit z and `above` above it. The greatest is, whatever the settings, and any token if the greatest logit is
    infinite or NaN: then none is faster than others, and a search would not end."""
    likely = ((z - greatest) / temperature >= log_min_p) & ((above < allowed) | ~has_top_p)
    return likely | ~(z < greatest) | (greatest == float("inf"))


@triton.jit
def _after_round(
    logits_ptr, winner_ptr, above_ptr, speed_ptr, fastest_ptr, greatest, temperature, log_min_p, has_top_p, allowed,
    PROGRAMS: tl.constexpr,
):  # fmt: skip
    """The winner, and whether it is known to be kept, from what the programs of a round have found."""
    program = tl.arange(0, PROGRAMS)
    begun_with = tl.load(winner_ptr)
    above = tl.sum(tl.load(above_ptr + program), 0)
    fastest = tl.load(fastest_ptr + tl.argmax(tl.load(speed_ptr + program), 0))
    winner = tl.where(begun_with < 0, -1 - begun_with, begun_with)
    kept = (begun_with < 0) | _is_kept(tl.load(logits_ptr + winner), above, greatest, temperature, log_min_p, has_top_p, allowed)
    return tl.where(kept, winner, fastest), kept


@triton.jit
def _search(
    logits_ptr, sums_ptr, V, first_tile, last_tile, z_winner, greatest, unit, temperature, log_min_p, has_top_p, key,
    TILE: tl.constexpr,
):  # fmt: skip
    """In some tiles: the probability of tokens above the winner, and the fastest of them that min-p keeps, and its speed."""
    above = tl.full([], 0, tl.int64)
    speed = -1.0
    fastest = 0
    for tile in range(first_tile, last_tile):
        # Most tiles have no token above the winner, and need not be read: `peak` is a tile's greatest logit.
        peak = tl.load(sums_ptr + tile * SUMS)
        if (peak > z_winner) & (has_top_p | ((peak - greatest) / temperature >= log_min_p)):
            token = tile * TILE + tl.arange(0, TILE)
            z = tl.load(logits_ptr + token, mask=token < V, other=-float("inf"))
            odds = tl.where(z > z_winner, tl.exp((z - greatest) / temperature), 0.0)
            above += tl.sum((odds * unit).to(tl.int64), 0)
            odds = tl.where((z - greatest) / temperature >= log_min_p, odds, 0.0)
            speeds = _divided(odds, _exponential(key, token))
            fast = tl.max(speeds, 0)
            if fast > speed:
                speed = fast
                fastest = tl.minimum((tile * TILE + tl.argmax(speeds, 0)).to(tl.int32), V - 1)
    return above, fastest, speed


@triton.jit
def _narrow(
    logits_ptr, logits_stride, rows_ptr, numbers_ptr, sums_ptr, tokens_ptr,
    last_winner_ptr, last_above_ptr, last_speed_ptr, last_fastest_ptr, winner_ptr, above_ptr, speed_ptr, fastest_ptr, V, tiles,
    COLUMNS: tl.constexpr, TILE: tl.constexpr, MANY: tl.constexpr, PROGRAMS: tl.constexpr, FLOOR: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """One round, for some tiles of one row."""
    row = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1)
    rows_ptr += row * COLUMNS
    if tl.load(rows_ptr + 1) < 0:
        return
    logits_ptr += row * logits_stride
    sums_ptr += row * tiles * SUMS
    temperature, log_min_p, has_top_p, allowed = _limits(numbers_ptr)  # pyright: ignore[reportGeneralTypeIssues]
    greatest, unit = _totals(sums_ptr, tiles, temperature, MANY, FLOOR)
    at = row * PROGRAMS
    if FIRST:
        tile = tl.arange(0, MANY)
        speed = tl.load(sums_ptr + tile * SUMS + 3, mask=tile < tiles, other=-float("inf"))
        winner = tl.load(tokens_ptr + row * tiles + tl.argmax(speed, 0))
        kept = winner < 0  # false: it is not known yet
    else:
        winner, kept = _after_round(
            logits_ptr, last_winner_ptr + row, last_above_ptr + at, last_speed_ptr + at, last_fastest_ptr + at,
            greatest, temperature, log_min_p, has_top_p, allowed, PROGRAMS,
        )  # fmt: skip
    z_winner = tl.load(logits_ptr + winner)
    kept = kept | _is_kept(z_winner, allowed, greatest, temperature, log_min_p, has_top_p, allowed)  # whatever is above it
    tl.store(winner_ptr + row, tl.where(kept, -1 - winner, winner), mask=program == 0)
    if kept:
        return
    tiles_each = tl.cdiv(tiles, PROGRAMS)
    first_tile = program * tiles_each
    key = _position_key(tl.load(rows_ptr + 2), tl.load(rows_ptr + 3))
    above, fastest, speed = _search(
        logits_ptr, sums_ptr, V, first_tile, tl.minimum(first_tile + tiles_each, tiles), z_winner, greatest, unit,
        temperature, log_min_p, has_top_p, key, TILE,
    )  # fmt: skip
    tl.store(above_ptr + at + program, above)
    tl.store(speed_ptr + at + program, speed)
    tl.store(fastest_ptr + at + program, fastest)


@triton.jit
def _accept(
    logits_ptr, logits_stride, rows_ptr, numbers_ptr, sums_ptr, tokens_ptr, winner_ptr, above_ptr, speed_ptr, fastest_ptr, V, tiles,
    COLUMNS: tl.constexpr, TILE: tl.constexpr, MANY: tl.constexpr, PROGRAMS: tl.constexpr, FLOOR: tl.constexpr,
):  # fmt: skip
    """Put the result of the rounds in the place of the first winner; if it is not known to be kept, search on until one is."""
    row = tl.program_id(0).to(tl.int64)
    rows_ptr += row * COLUMNS
    if tl.load(rows_ptr + 1) < 0:
        return
    logits_ptr += row * logits_stride
    sums_ptr += row * tiles * SUMS
    temperature, log_min_p, has_top_p, allowed = _limits(numbers_ptr)  # pyright: ignore[reportGeneralTypeIssues]
    greatest, unit = _totals(sums_ptr, tiles, temperature, MANY, FLOOR)
    at = row * PROGRAMS
    winner, kept = _after_round(
        logits_ptr, winner_ptr + row, above_ptr + at, speed_ptr + at, fastest_ptr + at,
        greatest, temperature, log_min_p, has_top_p, allowed, PROGRAMS,
    )  # fmt: skip
    key = _position_key(tl.load(rows_ptr + 2), tl.load(rows_ptr + 3))
    while not kept:
        z_winner = tl.load(logits_ptr + winner)
        above, fastest, _ = _search(
            logits_ptr, sums_ptr, V, 0, tiles, z_winner, greatest, unit, temperature, log_min_p, has_top_p, key, TILE
        )
        kept = _is_kept(z_winner, above, greatest, temperature, log_min_p, has_top_p, allowed)
        winner = tl.where(kept, winner, fastest)
    tile = tl.arange(0, MANY)
    speed = tl.load(sums_ptr + tile * SUMS + 3, mask=tile < tiles, other=-float("inf"))
    tl.store(tokens_ptr + row * tiles + tl.argmax(speed, 0), winner)


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
    place = sums_ptr + (row * tiles + tile) * SUMS
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
            base = tl.load(sums_ptr + (row * tiles + tile_won) * SUMS)
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
