"""The engine's operations as Triton kernels, for a GPU. `torch_ops.py` has the torch version of each."""

from plaudit.models.kernels.layers import add_norm, rotate, swiglu
from plaudit.rollout.native.kernels.attention import attend, rotate_and_attend
from plaudit.rollout.native.kernels.draw import draw_and_advance
from plaudit.rollout.native.kernels.layers import rotate_and_write, write

__all__ = [
    "add_norm",
    "attend",
    "draw_and_advance",
    "rotate",
    "rotate_and_attend",
    "rotate_and_write",
    "swiglu",
    "write",
]
