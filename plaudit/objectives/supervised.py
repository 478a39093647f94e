"""Supervised losses."""

from torch import Tensor


def nll(logprobs_N: Tensor, num_targets: int) -> Tensor:
    """L = −(1/N) Σ log p(token): the mean over the N target tokens of the whole batch, of which these may be a part."""
    return -logprobs_N.sum() / num_targets
