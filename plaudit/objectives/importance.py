"""Importance weights for tokens sampled by another policy than π_old. N tokens, in S sequences laid end to end.

A sampler with other kernels, perhaps of another precision, draws tokens from a policy near π_old; one that runs ahead of training
(rollout.lag), from the policy one step before. Each term of the loss is weighted by the ratio of its token's (or sequence's)
probability under π_old to that under the sampler. Clipping stays relative to π_old, the policy before the step's first update
(decoupled PPO, Hilton et al. 2022):

    L = Σ_t w_t · min(π_old / π_sampler, high)_t · loss(π, π_old, A)_t
"""

from typing import Literal, NamedTuple, assert_never

import torch
from torch import Tensor

from plaudit.objectives.aggregate import spread, sum_by_sequence

Level = Literal["token", "sequence"]
Mode = Literal["truncate", "mask"]

MAX_LOG_RATIO = 20.0


class ImportanceWeights(NamedTuple):
    weights_N: Tensor
    bounded_N: Tensor
    """True where a bound set the weight."""


def importance_weights(
    old_logprobs_N: Tensor,
    sampler_logprobs_N: Tensor,
    lengths_S: Tensor,
    *,
    level: Level,
    mode: Mode,
    high: float,
    low: float = 0.0,
) -> ImportanceWeights:
    """Weights of the tokens' losses, without gradient.

        d = log π_old − log sampler             at a token; at level sequence, its sum over the sequence's tokens
        w = exp(clamp(d, ±20))
        truncate: min(w, high)                  biased a little, of bounded variance (Yao et al. 2025, TIS)
        mask:     w if low ≤ w ≤ high, else 0   ignores what is too far off (IcePop; Liu et al. 2025, MIS)

    Masked tokens stay in the loss's denominators (verl removes them from its mask, and so from the denominators).
    """
    d = old_logprobs_N.detach() - sampler_logprobs_N
    if level == "sequence":
        d = spread(sum_by_sequence(d, lengths_S), lengths_S, len(d))
    w = d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    match mode:
        case "truncate":
            return ImportanceWeights(w.clamp(max=high), w > high)
        case "mask":
            outside_N = (w < low) | (w > high)
            return ImportanceWeights(torch.where(outside_N, 0.0, w), outside_N)
    assert_never(mode)
