"""Triton kernels that training and sampling share: the same order of operations gives the same bits."""

from plaudit.models.kernels.attention import attend, sum_copies
from plaudit.models.kernels.attention_backward import attend_backward, is_hopper
from plaudit.models.kernels.layers import (
    add,
    add_norm,
    norm_backward,
    norm_heads,
    rotate,
    sum_splits,
    swiglu,
    swiglu_backward,
)
from plaudit.models.kernels.merging import dequantise, dequantise_merged, merge
from plaudit.models.kernels.vocabulary import logit_gradients, token_logprobs

__all__ = [
    "add", "add_norm", "attend", "attend_backward", "dequantise", "dequantise_merged", "is_hopper", "logit_gradients",
    "merge", "norm_backward", "norm_heads", "rotate", "sum_copies", "sum_splits", "swiglu", "swiglu_backward", "token_logprobs",
]  # fmt: skip
