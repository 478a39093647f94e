"""Logits → tokens and their log-probs.

    token = argmax_v (z_v / temperature + g_v),   g standard Gumbel noise of the token's key

draws from softmax(z / temperature) exactly (the Gumbel-max trick); top-k, top-p and min-p exclude tokens from the argmax. Noise for
a full vocabulary takes longer than everything else here. So if no token is excluded, the draw has two stages, which need noise for
a few thousand tokens only:

    tile  = argmax_T (log Σ_{v ∈ T} exp(z_v / temperature) + g_T),   T tiles of 4,096 tokens
    token = argmax_{v ∈ tile} (z_v / temperature + g_v)

and draws from the same distribution. The reported log-prob is that of the full softmax, as the trainer will compute it.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from plaudit.models.vocabulary import TILE
from plaudit.rollout.engine import Sampling
from plaudit.rollout.native.cpu_library import library_for
from plaudit.rollout.native.noise import gumbel


class Drawn(NamedTuple):
    tokens_B: Tensor
    logprobs_B: Tensor
    untempered_B: Tensor


def draw(logits_BV: Tensor, keys_B: Tensor, sampling: Sampling) -> Drawn:
    """One token for each row of fp32 logits."""
    tempered = sampling.temperature not in (0.0, 1.0)
    scaled_BV = logits_BV / sampling.temperature if tempered else logits_BV
    sums_BT = tile_sums(scaled_BV)
    total_B = sums_BT.logsumexp(-1)
    if sampling.temperature == 0.0:
        tokens_B = logits_BV.argmax(-1)
    elif is_truncated(sampling, logits_BV.shape[1]) or sums_BT.shape[1] == 1:
        candidates_BV = keep_likely(scaled_BV, sampling.top_k, sampling.top_p, sampling.min_p)
        tokens_B = gumbel(keys_B, logits_BV.shape[1]).add_(candidates_BV).argmax(-1)
    else:
        tokens_B = _draw_in_tiles(scaled_BV, sums_BT, keys_B)
    logprobs_B = _at(scaled_BV, tokens_B) - total_B
    return Drawn(tokens_B, logprobs_B, _at(logits_BV, tokens_B) - tile_sums(logits_BV).logsumexp(-1) if tempered else logprobs_B)


def is_truncated(sampling: Sampling, vocabulary: int) -> bool:
    """Whether top-k, top-p or min-p exclude tokens."""
    return (sampling.top_k is not None and sampling.top_k < vocabulary) or sampling.top_p < 1.0 or sampling.min_p > 0.0


def tile_sums(logits_BV: Tensor) -> Tensor:
    """log Σ exp of every tile, [B, tiles]; the last may be smaller."""
    B, V = logits_BV.shape
    plain = logits_BV.dtype == torch.float32 and logits_BV.device.type == "cpu" and logits_BV.is_contiguous()
    if plain and (library := library_for(torch.float32)) is not None:
        sums_BT = logits_BV.new_empty(B, -(-V // TILE))
        library.tile_sums(logits_BV.data_ptr(), sums_BT.data_ptr(), B, V, TILE, torch.get_num_threads())
        return sums_BT
    whole = V // TILE * TILE
    sums = [logits_BV[:, :whole].unflatten(1, (-1, TILE)).logsumexp(-1)] if whole else []
    if whole < V:
        sums.append(logits_BV[:, whole:].logsumexp(-1, keepdim=True))
    return torch.cat(sums, 1)


def tile_noise(keys_B: Tensor, tiles: int) -> Tensor:
    return gumbel(keys_B, -1 - torch.arange(tiles, device=keys_B.device))


def _draw_in_tiles(scaled_BV: Tensor, sums_BT: Tensor, keys_B: Tensor) -> Tensor:
    """First a tile, then a token in it. A vocabulary of a single tile needs only the second stage."""
    last = scaled_BV.shape[1] - 1
    tile_B = (sums_BT + tile_noise(keys_B, sums_BT.shape[1])).argmax(-1)
    token_BW = tile_B[:, None] * TILE + torch.arange(TILE, device=keys_B.device)
    scores_BW = scaled_BV.gather(1, token_BW.clamp(max=last)) + gumbel(keys_B, token_BW)
    return _at(token_BW, scores_BW.masked_fill_(token_BW > last, -math.inf).argmax(-1))


def draw_scores(logits_BV: Tensor, keys_B: Tensor, sampling: Sampling) -> Tensor:
    """Scores [B, V] whose argmax is the token that `draw` returns; for checks of how close a draw was."""
    if sampling.temperature == 0.0:
        return logits_BV
    scaled_BV, V = logits_BV / sampling.temperature, logits_BV.shape[1]
    scores_BV = keep_likely(scaled_BV, sampling.top_k, sampling.top_p, sampling.min_p) + gumbel(keys_B, V)
    if is_truncated(sampling, V) or V <= TILE:
        return scores_BV
    tiles_BT = tile_sums(scaled_BV)
    tiles_BT = tiles_BT + tile_noise(keys_B, tiles_BT.shape[1])
    within = [scores_BT - scores_BT.max(-1, keepdim=True).values for scores_BT in scores_BV.split(TILE, 1)]
    return torch.cat([scores_BT + tiles_BT[:, i, None] for i, scores_BT in enumerate(within)], 1)


def keep_likely(logits_BV: Tensor, top_k: int | None, top_p: float, min_p: float) -> Tensor:
    """−inf for tokens outside the top k, then outside the top p of what is left, then below min_p times the likeliest.

    Ties with the last token kept are kept too, so the result does not depend on the sort order.
    """
    if top_k is not None and top_k < logits_BV.shape[1]:
        kth_B1 = logits_BV.topk(top_k).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < kth_B1, -math.inf)
    if top_p < 1.0:
        ordered_BV = logits_BV.sort(descending=True).values
        # In integer multiples of 2^-40: a float cumsum has no fixed order on a GPU, and torch refuses it in deterministic mode.
        mass_BV = (ordered_BV.softmax(-1).double() * 2**40).long()
        kept_BV = mass_BV.cumsum(-1) - mass_BV < int(top_p * 2**40)  # the token that crosses top_p is kept
        kept_BV[:, 0] = True
        last_B1 = ordered_BV.gather(1, kept_BV.sum(-1, keepdim=True) - 1)
        logits_BV = logits_BV.masked_fill(logits_BV < last_B1, -math.inf)
    if min_p > 0.0:
        floor_B1 = logits_BV.max(-1, keepdim=True).values + math.log(min_p)
        logits_BV = logits_BV.masked_fill(logits_BV < floor_B1, -math.inf)
    return logits_BV


def _at(values_BV: Tensor, tokens_B: Tensor) -> Tensor:
    return values_BV.gather(1, tokens_B[:, None])[:, 0]
