"""Advantages: how much better a sample, or each of its tokens, is than expected.

Shapes: G samples of one prompt; S samples of a step, of at most T tokens, padded on the right; N tokens of a step, or any other
numbers; P prompts. Samples whose reward failed are dropped before: they are in no group here.

Estimators (named in `registry.py`) come first, the formulas they are made of below.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from plaudit.objectives.aggregate import spread
from plaudit.objectives.normalise import EPS, standardise

WHITEN_EPS = 1e-8  # added to the variance under the root, as in verl's masked_whiten


@dataclass(frozen=True)
class StepRewards:
    """The rewards of a step, token by token: S samples of P prompts, the samples of a prompt next to each other, none dropped."""

    rewards: Sequence[Tensor]
    """Of each sample's tokens."""
    sizes_P: Tensor
    """Samples per prompt."""
    greedy_P: Tensor | None = None
    """Reward of each prompt's greedy sample; NaN if that was dropped."""
    values: Sequence[Tensor] | None = None
    """The critic's, of each sample's tokens."""

    @cached_property
    def lengths_S(self) -> Tensor:
        return torch.tensor([len(reward) for reward in self.rewards])

    @cached_property
    def totals_S(self) -> Tensor:
        return torch.stack([reward.sum() for reward in self.rewards])

    @cached_property
    def mask_ST(self) -> Tensor:
        return torch.arange(int(self.lengths_S.max())) < self.lengths_S[:, None]

    @property
    def rewards_ST(self) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(list(self.rewards), batch_first=True)

    @property
    def values_ST(self) -> Tensor:
        assert self.values is not None, "an estimator that needs a critic gets its values"
        return torch.nn.utils.rnn.pad_sequence(list(self.values), batch_first=True)

    @property
    def compared_S(self) -> Tensor:
        """Whether a sample has others in its group. One alone is compared with nothing: A = 0, and whitening leaves it out."""
        return spread(self.sizes_P, self.sizes_P) > 1

    def by_group(self, advantages: Callable[[Tensor], Tensor]) -> Tensor:
        """A_S of a function of one group's rewards."""
        return torch.cat([advantages(r) for r in self.totals_S.split(self.sizes_P.tolist())])


# Estimators ----------------------------------------------------------------------------------------------------------


def grpo(rewards_G: Tensor, *, divide_by_std: bool, eps: float = EPS) -> Tensor:
    """A_i = r_i − mean(r); / (std(r) + eps) if `divide_by_std` (Shao et al. 2024; Dr.GRPO: not). std has divisor n − 1.

    Differs from verl on purpose: a group of one carries no signal, so A = 0 (verl: the raw reward).
    """
    if len(rewards_G) < 2:
        return torch.zeros_like(rewards_G)
    # The lowest reward is subtracted first (A stays the same), so that equal rewards give exactly 0. The mean of seven 0.1s in
    # fp32 is not 0.1, and dividing by a std near 0 would make an advantage of that rounding.
    r = rewards_G - rewards_G.min()
    return standardise(r, r.mean(), r.std(correction=1), eps) if divide_by_std else r - r.mean()


def rloo(rewards_G: Tensor) -> Tensor:
    """A_i = r_i − mean of the other samples' r = (r_i − mean(r)) · n / (n − 1)          (Ahmadian et al. 2024)

    Differs from verl on purpose, as GRPO does: in a group of one, A = 0 (verl: the raw reward).
    """
    n = len(rewards_G)
    return grpo(rewards_G, divide_by_std=False) * (n / max(n - 1, 1))


def opo(rewards_G: Tensor, *, lengths_G: Tensor) -> Tensor:
    """A_i = r_i − Σ_j n_j r_j / Σ_j n_j, n the samples' lengths in tokens        (OPO, Hao et al. 2025)

    The baseline of least gradient variance, where a sample's gradient has a squared norm in proportion to its length. Never
    divided by the std. As in GRPO, in a group of one A = 0.
    """
    if len(rewards_G) < 2:
        return torch.zeros_like(rewards_G)
    r, n = rewards_G - rewards_G.min(), lengths_G.to(rewards_G.dtype)  # equal rewards give exactly 0
    return r - (n * r).sum() / n.sum()


def gdpo(step: StepRewards) -> Tensor:
    """A_S = whiten(r − mean(r) of the group), over the step's samples (GDPO): each reward was normalised by its group before."""
    return whiten(step.by_group(partial(grpo, divide_by_std=False)), step.compared_S)


def reinforce_pp(step: StepRewards, *, discount: float) -> Tensor:
    """A_N = whiten(R_t), over the step's tokens (REINFORCE++, Hu 2025)."""
    returns_N = returns_to_go(step.rewards_ST, step.mask_ST, gamma=discount)[step.mask_ST]
    return whiten(returns_N, torch.ones_like(returns_N, dtype=torch.bool))


def reinforce_pp_baseline(step: StepRewards) -> Tensor:
    """A_N = whiten(r − mean(r) of the group), over the step's tokens."""
    centred_S = step.by_group(partial(grpo, divide_by_std=False))
    return whiten(spread(centred_S, step.lengths_S), spread(step.compared_S, step.lengths_S))


def remax(step: StepRewards) -> Tensor:
    """A_t = R_t − r(greedy sample) (ReMax, Li et al. 2024). A group whose greedy sample was dropped carries no signal: A = 0."""
    assert step.greedy_P is not None
    assert len(step.greedy_P) == len(step.sizes_P), "one greedy sample per prompt"
    returns_N = returns_to_go(step.rewards_ST, step.mask_ST, gamma=1.0)[step.mask_ST]
    greedy_N = spread(spread(step.greedy_P, step.sizes_P), step.lengths_S)
    return torch.where(greedy_N.isnan(), 0.0, returns_N - greedy_N)


def ppo(step: StepRewards, *, discount: float, gae_lambda: float) -> tuple[Tensor, Tensor]:
    """A_N = whiten(GAE), over the step's tokens, and the returns the critic is trained on (Schulman et al. 2017)."""
    A_ST, returns_ST = gae(step.rewards_ST, step.values_ST, step.mask_ST, gamma=discount, lam=gae_lambda)
    A_N = A_ST[step.mask_ST]
    return whiten(A_N, torch.ones_like(A_N, dtype=torch.bool)), returns_ST[step.mask_ST]


# Formulas ------------------------------------------------------------------------------------------------------------


def whiten(values_N: Tensor, counted_N: Tensor) -> Tensor:
    """(x − mean(x)) / sqrt(var(x) + 1e-8) over the numbers that count, 0 elsewhere. var is the unbiased one (divisor n − 1).

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
    """Generalised advantage estimation (Schulman et al. 2016): advantages, and the returns a critic is trained on.

        δ_t = r_t + γ · V_{t+1} − V_t             V after the last token is 0
        A_t = δ_t + γ · λ · A_{t+1}
        R_t = A_t + V_t

    Tokens where the mask is false do not exist: t + 1 is the next token where it is true. Both results are 0 there.
    Differs from verl: A is not whitened; that is `whiten(A[mask], …)`, over whatever it should be compared with.
    """
    advantages_ST = torch.zeros_like(rewards_ST)
    next_V = next_A = torch.zeros_like(rewards_ST[:, 0])
    for t in reversed(range(rewards_ST.shape[1])):
        present, V = mask_ST[:, t], values_ST[:, t]
        delta = rewards_ST[:, t] + gamma * next_V - V
        A = delta + gamma * lam * next_A
        advantages_ST[:, t] = torch.where(present, A, 0.0)
        next_A, next_V = torch.where(present, A, next_A), torch.where(present, V, next_V)
    return advantages_ST, torch.where(mask_ST, advantages_ST + values_ST, 0.0)


def returns_to_go(rewards_ST: Tensor, mask_ST: Tensor, *, gamma: float) -> Tensor:
    """R_t = r_t + γ · R_{t+1}: the reward from a token on. It is GAE with all values 0 and λ = 1."""
    return gae(rewards_ST, torch.zeros_like(rewards_ST), mask_ST, gamma=gamma, lam=1.0)[0]
