"""Attention head sizes, rotary tables and the block size of GPU attention."""

from typing import NamedTuple

from torch import Tensor


class Heads(NamedTuple):
    query: int
    kv: int
    size: int


class Rotation(NamedTuple):
    """Rotary tables [position, head size] for queries and keys, with the norms applied before them where a model has any."""

    cos: Tensor
    sin: Tensor
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    eps: float = 0.0


BLOCK_NUMBERS, BLOCK_TOKENS = 4096, (16, 64)  # elements of a key-value head per block; fewest and most tokens


def block_tokens(head_size: int) -> int:
    """Keys per block of GPU attention: as many as a program reads most efficiently."""
    fewest, most = BLOCK_TOKENS
    return min(max(BLOCK_NUMBERS // next_power_of_2(head_size), fewest), most)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
