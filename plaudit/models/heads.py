"""What attention is made of, and in what pieces it is computed on a GPU."""

from typing import NamedTuple

from torch import Tensor


class Heads(NamedTuple):
    query: int
    kv: int
    size: int


class Rotation(NamedTuple):
    """What turns queries and keys by their position: tables [position, head size], and norms before that where a model has them."""

    cos: Tensor
    sin: Tensor
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    eps: float = 0.0


BLOCK_NUMBERS, BLOCK_TOKENS = 4096, (16, 64)  # of a key-value head; at least and at most


def block_tokens(head_size: int) -> int:
    """Keys that a GPU's attention meets at once: as many as a program best reads."""
    fewest, most = BLOCK_TOKENS
    return min(max(BLOCK_NUMBERS // next_power_of_2(head_size), fewest), most)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
