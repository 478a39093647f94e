"""Advantages: how much better each sample of a group is than the others. G samples of one prompt."""

import torch
from torch import Tensor


def grpo(rewards_G: Tensor, valid_G: Tensor, *, divide_by_std: bool, eps: float = 1e-6) -> Tensor:
    """A_i = r_i − mean(r) over the group's valid samples; / (std(r) + eps) if asked (Shao et al. 2024; Dr.GRPO: not).

    std is the unbiased one (divisor n − 1). An invalid sample gets A = 0; its reward may be NaN and counts nowhere.
    Differs from verl on purpose: a group with fewer than two valid samples carries no signal, so A = 0 (verl: the raw reward).
    """
    advantages_G = torch.zeros_like(rewards_G)
    if valid_G.sum() < 2:
        return advantages_G
    r = rewards_G[valid_G]
    # The least reward is taken off first (A stays the same), so that equal rewards give exactly 0. The mean of seven 0.1s in
    # fp32 is not 0.1, and dividing by a std near 0 would make an advantage of that rounding.
    r = r - r.min()
    A = r - r.mean()
    if divide_by_std:
        A = A / (r.std(correction=1) + eps)
    advantages_G[valid_G] = A
    return advantages_G
