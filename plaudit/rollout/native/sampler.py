"""Logits → tokens and their log-probs.

    token = argmax_v (z_v / temperature + g_v),   g standard Gumbel noise of the token's key

which draws from softmax(z / temperature) exactly. Top-k, top-p and min-p take tokens out of the race; the log-prob that is
reported is of the whole softmax, as the trainer will compute it.
"""

import math
from typing import NamedTuple

from torch import Tensor

from plaudit.rollout.engine import Sampling
from plaudit.rollout.native.noise import gumbel


class Drawn(NamedTuple):
    tokens_B: Tensor
    logprobs_B: Tensor
    untempered_B: Tensor


def draw(logits_BV: Tensor, keys_B: Tensor, sampling: Sampling) -> Drawn:
    """One token for each row of fp32 logits."""
    untempered_total_B = logits_BV.logsumexp(-1)
    if sampling.temperature == 0.0:
        tokens_B = logits_BV.argmax(-1)
        logprobs_B = _at(logits_BV, tokens_B) - untempered_total_B
        return Drawn(tokens_B, logprobs_B, logprobs_B)
    tempered = sampling.temperature != 1.0
    scaled_BV = logits_BV / sampling.temperature if tempered else logits_BV
    total_B = scaled_BV.logsumexp(-1) if tempered else untempered_total_B
    candidates_BV = keep_likely(scaled_BV, sampling.top_k, sampling.top_p, sampling.min_p)
    tokens_B = gumbel(keys_B, logits_BV.shape[1]).add_(candidates_BV).argmax(-1)
    return Drawn(tokens_B, _at(scaled_BV, tokens_B) - total_B, _at(logits_BV, tokens_B) - untempered_total_B)


def keep_likely(logits_BV: Tensor, top_k: int | None, top_p: float, min_p: float) -> Tensor:
    """−inf for tokens outside the top k, then outside the top p of what is left, then below min_p times the likeliest.

    Tokens as likely as the last one kept are kept too, so the result does not depend on how ties are sorted.
    """
    if top_k is not None and top_k < logits_BV.shape[1]:
        kth_B1 = logits_BV.topk(top_k).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < kth_B1, -math.inf)
    if top_p < 1.0:
        ordered_BV = logits_BV.sort(descending=True).values
        # In whole numbers of 2^-40: sums of floats along a row are in no fixed order on a GPU, where torch then refuses them.
        mass_BV = (ordered_BV.softmax(-1).double() * 2**40).long()
        needed_BV = mass_BV.cumsum(-1) - mass_BV < int(top_p * 2**40)  # the one that crosses top_p is still needed
        needed_BV[:, 0] = True
        last_B1 = ordered_BV.gather(1, needed_BV.sum(-1, keepdim=True) - 1)
        logits_BV = logits_BV.masked_fill(logits_BV < last_B1, -math.inf)
    if min_p > 0.0:
        floor_B1 = logits_BV.max(-1, keepdim=True).values + math.log(min_p)
        logits_BV = logits_BV.masked_fill(logits_BV < floor_B1, -math.inf)
    return logits_BV


def _at(values_BV: Tensor, tokens_B: Tensor) -> Tensor:
    return values_BV.gather(1, tokens_B[:, None])[:, 0]
