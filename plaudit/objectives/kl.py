"""How far the policy π is from the reference, estimated per token from the sampled token alone. N tokens."""

from typing import Literal, assert_never

import torch
from torch import Tensor

KLEstimator = Literal["k1", "abs", "k2", "k3"]

# k3 grows like exp(d): without bounds one token far off would outweigh the batch.
MAX_LOG_RATIO = 20.0
MAX_K3 = 10.0
# The adaptive coefficient reacts to at most this relative error per step.
MAX_KL_ERROR = 0.2


def kl(policy_logprobs_N: Tensor, ref_logprobs_N: Tensor, kind: KLEstimator) -> Tensor:
    """Estimates of KL(π ‖ ref) (Schulman, "Approximating KL Divergence"), with d = log ref − log π at a token drawn from π.

        k1  = −d                    unbiased, of high variance, negative at many tokens
        abs = |d|                   biased upwards: E|d| ≥ KL
        k2  = d² / 2                biased, little where π is near ref; low variance, never negative
        k3  = exp(d) − d − 1        unbiased, low variance, never negative; d clamped to ±20, then k3 to ±10, which biases it down

    As a loss, a term is differentiated with the tokens held fixed, so its expected gradient is not the gradient of its expectation:

        k1     0: no pull towards ref at all. Use k1 in the reward, not as a loss
        abs    that of Σ|π − ref|, of constant size however near ref is: it jumps at d = 0
        k2     that of KL(π ‖ ref), the right one
        k3     that of KL(ref ‖ π), near the right one only where π is near ref; 0 where a clamp holds (d > 2.6 or d < −11)

    On tokens of an older policy, all of this holds only as far as that policy still equals π.
    """
    d = ref_logprobs_N - policy_logprobs_N
    match kind:
        case "k1":
            return -d
        case "abs":
            return d.abs()
        case "k2":
            return d.square() / 2
        case "k3":
            d = d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
            # exp(d) − 1 in one: near d = 0, where most tokens are, fp32 would lose d²/2 next to 1.
            return (torch.expm1(d) - d).clamp(-MAX_K3, MAX_K3)
    assert_never(kind)


def adapted(coefficient: float, kl: float, *, target: float, samples: int, horizon: int) -> float:
    """The next β of a KL penalty with a target (Ziegler et al. 2019), after a step of n samples.

    e  = clip(KL / target − 1, ±0.2)
    β' = β · (1 + e · min(1, n / horizon))          n / horizon is capped, or β could become negative
    """
    e = min(max(kl / target - 1, -MAX_KL_ERROR), MAX_KL_ERROR)
    return coefficient * (1 + e * min(1.0, samples / horizon))
