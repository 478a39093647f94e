"""Policy losses per token. All response tokens of a batch lie end to end: N tokens; `aggregate` makes one number of them."""

from typing import NamedTuple

import torch
from torch import Tensor

from plaudit.objectives.aggregate import spread, sum_by_sequence

# Beyond e^±20 a ratio only means "far off", and exp would overflow.
MAX_LOG_RATIO = 20.0


class TokenLoss(NamedTuple):
    loss_N: Tensor
    clipped_N: Tensor
    """True where the clip bound sets the loss: the clipped loss exceeds the unclipped one."""
    dual_clipped_N: Tensor
    """True where the dual clip sets the loss."""
    ratio_N: Tensor
    """π / π_old as the loss uses it: of a token, or of its whole sequence."""


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
        return TokenLoss(loss, clipped_N, torch.zeros_like(clipped_N), ratio.detach())
    bound = -A * dual_clip
    dual_clipped_N = (A < 0) & (loss > bound)
    return TokenLoss(torch.where(dual_clipped_N, bound, loss), clipped_N, dual_clipped_N, ratio.detach())


def gspo(
    policy_logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    lengths_S: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """The clipped loss with one ratio for a whole sequence (Zheng et al. 2025), in its token form; S sequences lie end to end.

        log s   = clamp(1/length · Σ_t (log π_t − log π_old,t), ±20)       the sequence's ratio, per token: its geometric mean
        ratio_t = sg(s) · π_t / sg(π_t)                                    s in value, s · ∂ log π_t in gradient; sg: no gradient
        loss_t  = max(−A · ratio, −A · clamp(ratio, 1 − clip_low, 1 + clip_high))

    With one advantage for all tokens of a sequence and the aggregation seq-mean-token-mean, this is the paper's GSPO. For
    sequences of one token it is the clipped loss without the dual clip. verl bounds log s by 10 and only from above.
    """
    A = advantages_N
    log_ratio_N = (policy_logprobs_N - old_logprobs_N).detach()
    log_s = (sum_by_sequence(log_ratio_N, lengths_S) / lengths_S.clamp(min=1)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    # exp(log π − sg(log π)) is 1 with the gradient of log π.
    ratio = spread(log_s.exp(), lengths_S, len(A)) * (policy_logprobs_N - policy_logprobs_N.detach()).exp()
    l1 = -A * ratio
    l2 = -A * ratio.clamp(1 - clip_low, 1 + clip_high)
    clipped_N = l2 > l1
    return TokenLoss(torch.maximum(l1, l2), clipped_N, torch.zeros_like(clipped_N), ratio.detach())


def cispo(
    policy_logprobs_N: Tensor, old_logprobs_N: Tensor, advantages_N: Tensor, *, clip_low: float, clip_high: float
) -> TokenLoss:
    """Policy gradient with a clipped importance weight (MiniMax 2025): the bound limits a token's weight, never stops its gradient.

    ratio = exp(clamp(log π − log π_old, ±20))
    loss  = −sg(clamp(ratio, 1 − clip_low, 1 + clip_high)) · A · log π          clipped where the clamp changes the ratio
    """
    ratio = (policy_logprobs_N - old_logprobs_N).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    clipped_N = weight != ratio
    return TokenLoss(-weight * advantages_N * policy_logprobs_N, clipped_N, torch.zeros_like(clipped_N), ratio)


def policy_gradient(policy_logprobs_N: Tensor, old_logprobs_N: Tensor, advantages_N: Tensor) -> TokenLoss:
    """REINFORCE (Williams 1992): loss = −A · log π, right for tokens drawn from π itself. The ratio is measured only."""
    ratio = (policy_logprobs_N - old_logprobs_N).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    never_N = torch.zeros_like(ratio, dtype=torch.bool)
    return TokenLoss(-advantages_N * policy_logprobs_N, never_N, never_N, ratio)


def positive_sft(policy_logprobs_N: Tensor, advantages_N: Tensor) -> Tensor:
    """−max(A, 0) · log π: imitation of the policy's own better samples, in proportion to how much better they were."""
    return -advantages_N.clamp(min=0) * policy_logprobs_N
