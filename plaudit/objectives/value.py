"""A critic's loss per token, and its explained variance. All response tokens of a batch lie end to end: N tokens."""

from typing import NamedTuple

import torch
from torch import Tensor


class ValueLoss(NamedTuple):
    loss_N: Tensor
    clipped_N: Tensor
    """True where the bound set the loss."""


def clipped_value(values_N: Tensor, old_values_N: Tensor, returns_N: Tensor, *, clip: float | None) -> ValueLoss:
    """Half the squared error, with a bound on how far a value moves in one step (Schulman et al. 2017's code; verl, TRL).

        l1   = (V − R)²
        l2   = (clamp(V, V_old ± clip) − R)²
        loss = ½ · max(l1, l2)                    clipped where l2 > l1

    Where the bound sets the loss, the token's gradient is 0: its value is already nearer to R than the bound allows.
    """
    l1 = (values_N - returns_N).square()
    if clip is None:
        return ValueLoss(l1 / 2, torch.zeros_like(l1, dtype=torch.bool))
    l2 = (values_N.clamp(old_values_N - clip, old_values_N + clip) - returns_N).square()
    return ValueLoss(torch.maximum(l1, l2) / 2, l2 > l1)


def explained_variance(values_N: Tensor, returns_N: Tensor) -> float:
    """1 − Var(R − V) / Var(R): 1 is perfect, 0 as good as a constant, below 0 worse. NaN if all R are equal."""
    spread = returns_N.var(correction=0)
    return (1 - (returns_N - values_N).var(correction=0) / spread).item() if spread > 0 else float("nan")
