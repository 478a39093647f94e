"""From token losses to the loss of an update, as one weight per sequence.

    L = Σ_t w_s(t) · loss_t          t: the update's N tokens; s(t): the one of its S sequences that token t belongs to

The weights are made once for the whole update. Shares of L then add up to it, in value and gradient, however its tokens are
split into micro-batches or over devices; a mean taken per micro-batch would not.
"""

from typing import Literal, assert_never

import torch
from torch import Tensor

Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def sequence_weights(lengths_S: Tensor, mode: Aggregation, *, horizon: int) -> Tensor:
    """The weight w_s of every token of sequence s, in float64, given how many loss tokens each sequence of the update has.

        token-mean                 1 / N                    every token counts the same (DAPO)
        token-sum                  1
        seq-mean-token-sum         1 / S
        seq-mean-token-mean        1 / (S · length_s)       every sequence counts the same (GRPO)
        seq-mean-token-sum-norm    1 / (S · horizon)        a constant instead of the length (Dr.GRPO)

    `horizon` is the longest response allowed (verl: the width it pads to). A sequence of length 0, say a dropped sample, is none:
    its weight is 0 and S does not count it.
    """
    assert horizon > 0, "the horizon is a number of tokens"
    present_S = (lengths_S > 0).to(torch.float64)
    # At least 1: an update of which nothing is left has the loss 0, not 0 / 0.
    N, S = lengths_S.sum().clamp(min=1), present_S.sum().clamp(min=1)
    match mode:
        case "token-mean":
            return present_S / N
        case "token-sum":
            return present_S
        case "seq-mean-token-sum":
            return present_S / S
        case "seq-mean-token-mean":
            return present_S / (S * lengths_S.clamp(min=1))
        case "seq-mean-token-sum-norm":
            return present_S / (S * horizon)
    assert_never(mode)


def sum_by_sequence(values_N: Tensor, lengths_S: Tensor) -> Tensor:
    """Σ_t x_t of each sequence; their tokens lie end to end."""
    sequence_N = spread(torch.arange(len(lengths_S), device=lengths_S.device), lengths_S, len(values_N))
    return torch.zeros(len(lengths_S), dtype=values_N.dtype, device=values_N.device).index_add(0, sequence_N, values_N)


def spread(values_S: Tensor, lengths_S: Tensor, num_tokens: int | None = None) -> Tensor:
    """Each sequence's number, at every token of it."""
    return values_S.repeat_interleave(lengths_S, output_size=num_tokens)
