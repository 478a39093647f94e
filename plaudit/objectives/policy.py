"""Policy losses per token. All response tokens of a batch lie end to end: N tokens; `aggregate` makes one number of them."""

from typing import NamedTuple

import torch
from torch import Tensor

# Beyond e^±20 a ratio says no more than "far off", and exp would overflow.
MAX_LOG_RATIO = 20.0


class TokenLoss(NamedTuple):
    loss_N: Tensor
    clipped_N: Tensor
    """True where the clip bound set the loss: the clipped loss exceeds the plain one."""
    dual_clipped_N: Tensor
    """True where the dual clip set the loss."""


def clipped(
    policy_logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> TokenLoss:
    """PPO's clipped loss (Schulman et al. 2017) with a higher upper bound (DAPO's clip-higher) and the dual clip (Ye et al. 2020).

        ratio = exp(clamp(log π − log π_old, ±20))
        l1    = −A · ratio
        l2    = −A · clamp(ratio, 1 − clip_low, 1 + clip_high)
        loss  = max(l1, l2)                                       clipped where l2 > l1
        loss  = min(loss, −A · dual_clip) where A < 0             dual-clipped where this lowers it

    A bound that sets the loss stops the token's gradient. For A < 0 nothing else bounds the loss as the ratio grows,
    hence the dual clip (None: without).
    """
    assert dual_clip is None or dual_clip > 1, "the dual clip is a ratio above 1"
    A = advantages_N
    ratio = (policy_logprobs_N - old_logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    l1 = -A * ratio
    l2 = -A * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(l1, l2)
    clipped_N = l2 > l1
    if dual_clip is None:
        return TokenLoss(loss, clipped_N, torch.zeros_like(clipped_N))
    bound = -A * dual_clip
    dual_clipped_N = (A < 0) & (loss > bound)
    return TokenLoss(torch.where(dual_clipped_N, bound, loss), clipped_N, dual_clipped_N)
