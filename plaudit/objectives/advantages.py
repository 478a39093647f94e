"""Advantages: how much better a sample, or each of its tokens, is than could be expected.

Shapes: G samples of one prompt; S sequences of at most T tokens, padded on the right; N numbers in any order. A sample that was
dropped is not valid: it gets A = 0, and its reward (which may be NaN) counts nowhere.
"""

import torch
from torch import Tensor

# Beside a variance under the root, as verl's masked_whiten has it.
WHITEN_EPS = 1e-8


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


def rloo(rewards_G: Tensor, valid_G: Tensor) -> Tensor:
    """A_i = r_i − mean of the other valid samples' r = (r_i − mean(r)) · n / (n − 1)          (Ahmadian et al. 2024)

    Differs from verl on purpose, as GRPO does: with fewer than two valid samples, A = 0 (verl: the raw reward).
    """
    n = int(valid_G.sum())
    return grpo(rewards_G, valid_G, divide_by_std=False) * (n / max(n - 1, 1))


def whiten(values_N: Tensor, counted_N: Tensor) -> Tensor:
    """(x − mean(x)) / sqrt(var(x) + 1e-8) over those that count, 0 for the others. var is the unbiased one (divisor n − 1).

    Fewer than two numbers have no spread, and become 0. verl divides its means by n + 1e-8; we do not.
    """
    whitened_N = torch.zeros_like(values_N)
    if counted_N.sum() < 2:
        return whitened_N
    x = values_N[counted_N]
    x = x - x.min()  # so that equal numbers become exactly 0
    whitened_N[counted_N] = (x - x.mean()) / (x.var(correction=1) + WHITEN_EPS).sqrt()
    return whitened_N


def gae(rewards_ST: Tensor, values_ST: Tensor, mask_ST: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016): advantages, and the returns that a critic learns.

        δ_t = r_t + γ · V_{t+1} − V_t             V behind the last token is 0
        A_t = δ_t + γ · λ · A_{t+1}
        R_t = A_t + V_t

    Tokens where the mask is false do not exist: t + 1 is the next token where it is true. Both results are 0 there.
    Differs from verl: A is not whitened; that is `whiten(A[mask], …)`, over whatever is to be compared.
    """
    advantages_ST = torch.zeros_like(rewards_ST)
    next_V = next_A = torch.zeros_like(rewards_ST[:, 0])
    for t in reversed(range(rewards_ST.shape[1])):
        there, V = mask_ST[:, t], values_ST[:, t]
        delta = rewards_ST[:, t] + gamma * next_V - V
        A = delta + gamma * lam * next_A
        advantages_ST[:, t] = torch.where(there, A, 0.0)
        next_A, next_V = torch.where(there, A, next_A), torch.where(there, V, next_V)
    return advantages_ST, torch.where(mask_ST, advantages_ST + values_ST, 0.0)


def returns_to_go(rewards_ST: Tensor, mask_ST: Tensor, *, gamma: float) -> Tensor:
    """R_t = r_t + γ · R_{t+1}: what is still paid from a token on. It is GAE where all values are 0 and λ = 1."""
    return gae(rewards_ST, torch.zeros_like(rewards_ST), mask_ST, gamma=gamma, lam=1.0)[0]
