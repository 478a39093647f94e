"""Triton kernels that training and sampling share: the same order of operations gives the same bits."""

from plaudit.models.kernels.attention import attend
from plaudit.models.kernels.layers import (
    add_norm,
    norm_backward,
    norm_heads,
    rotate,
    sum_splits,
    swiglu,
    swiglu_backward,
)

__all__ = ["add_norm", "attend", "norm_backward", "norm_heads", "rotate", "sum_splits", "swiglu", "swiglu_backward"]
