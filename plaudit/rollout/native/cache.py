"""Keys and values of what has been read and written: one contiguous row per running sequence.

Rows 0 … B−1 are in use, always without a gap, so that a decode step reads them as one view. When a sequence leaves, the last row
moves into its place. A prompt's samples share its prefill: its keys and values are computed once and copied to each of their rows.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class CacheShape:
    layers: int
    kv_heads: int
    head_size: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_size * self.dtype.itemsize


class KVCache:
    """[layer, key or value, row, kv head, position, head size]"""

    def __init__(self, shape: CacheShape, rows: int, length: int):
        self.rows = rows
        size = (shape.layers, 2, rows, shape.kv_heads, length, shape.head_size)
        # Not empty: a mask takes a position's weight to 0, but 0 · NaN is NaN, and memory may hold anything.
        self.tensor = _zeros(size, shape)

    def fill(self, row: int, prefix: Tensor) -> None:
        """Begin a row with a prompt's keys and values [layer, 2, kv head, position, head size]."""
        self.tensor[:, :, row, :, : prefix.shape[3]] = prefix

    def move(self, source: int, target: int, length: int) -> None:
        self.tensor[:, :, target, :, :length] = self.tensor[:, :, source, :, :length]

    def write(self, layer: int, rows: Tensor, positions: Tensor, key: Tensor, value: Tensor) -> None:
        """One new token per row; key and value [row, kv head, head size]."""
        self.tensor[layer, 0].index_put_((rows[:, None], _heads(key), positions[:, None]), key)
        self.tensor[layer, 1].index_put_((rows[:, None], _heads(value), positions[:, None]), value)

    def read(self, layer: int, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first rows up to a position: [row, kv head, position, head size], views."""
        keys, values = self.tensor[layer, :, :rows, :, :length]
        return keys, values


def _zeros(size: tuple[int, ...], shape: CacheShape) -> Tensor:
    if shape.device.type != "cpu":
        return torch.zeros(size, dtype=shape.dtype, device=shape.device)
    # numpy asks the system for zero pages, which take no memory before they are written: most rows never grow to their full length.
    return torch.from_numpy(np.zeros(math.prod(size) * shape.dtype.itemsize, dtype=np.uint8)).view(shape.dtype).view(size)


def _heads(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1], device=x.device)[None]
