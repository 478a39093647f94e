"""Triton kernels that training and sampling share: what both compute in the same order comes out the same to the bit."""

from plaudit.models.kernels.attention import attend
from plaudit.models.kernels.layers import (
    add_norm,
    join_parts,
    norm_backward,
    norm_heads,
    rotate,
    swiglu,
    swiglu_backward,
)

__all__ = ["add_norm", "attend", "join_parts", "norm_backward", "norm_heads", "rotate", "swiglu", "swiglu_backward"]
