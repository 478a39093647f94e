"""Sums over the vocabulary: what the sampler, the trainer's log-probs and their kernels share."""

from typing import NamedTuple

from torch import Tensor

TILE = 4096
"""Tokens of the vocabulary that a GPU sums at a time. Changing it changes which tokens are drawn from larger vocabularies."""


class Summed(NamedTuple):
    """Of each row of logits z, at temperature τ."""

    logprobs_N: Tensor
    """Of the row's token."""
    entropy_N: Tensor
    greatest_N: Tensor
    total_N: Tensor
    """log Σ exp((z − greatest) / τ)."""
