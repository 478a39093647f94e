"""Keys and values of what has been read and written, in blocks of some tokens; a sequence's table says which blocks are its own.

On a GPU blocks are small, so that sequences take what they use and the samples of a prompt share its blocks. On a CPU, whose
attention wants a sequence in one piece, a block is as long as the longest sequence, and row i lies in block i.
"""

import math
import warnings
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from plaudit.errors import PlauditError
from plaudit.models.heads import Heads, block_tokens

FREE_SHARE = 0.92  # of what is free, at most: activations need some
COPIED_AT_ONCE = 32  # blocks, which lie in memory a second time while they are copied


@dataclass(frozen=True)
class CacheShape:
    layers: int
    heads: Heads
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.layers * self.heads.kv * self.heads.size * self.dtype.itemsize

    @property
    def gpu_block_tokens(self) -> int:
        """As many as a program of attention meets at once, in training too."""
        return block_tokens(self.heads.size)


class CacheView:
    """[block, layer, key or value, kv head, position in block, head size], and the tables of the rows that read it.

    Kernels find the memory through `base`, a number on the device (how many elements behind `anchor` it begins): it may lie
    elsewhere in the next call, and what was captured in a graph still holds.
    """

    def __init__(self, shape: CacheShape, rows: int, blocks_per_row: int, *, block_tokens: int):
        self.shape, self.block_tokens, self.kv_heads = shape, block_tokens, shape.heads.kv
        part = shape.heads.kv * block_tokens * shape.heads.size
        self.strides = (shape.layers * 2 * part, 2 * part, part)
        self.anchor = torch.empty(256, dtype=shape.dtype, device=shape.device)
        self.base = torch.zeros(1, dtype=torch.int64, device=shape.device)
        self.tables = torch.zeros(rows, blocks_per_row, dtype=torch.int32, device=shape.device)
        self.memory: Tensor | None = None
        self.in_order = False
        """Row i lies in block i."""

    def serves(self, shape: CacheShape, block_tokens: int, tables: tuple[int, int]) -> bool:
        rows, blocks_per_row = self.tables.shape
        return (self.shape, self.block_tokens) == (shape, block_tokens) and rows >= tables[0] and blocks_per_row >= tables[1]

    def seen_by(self, tables: Tensor) -> "CacheView":
        """The same memory through other tables."""
        view = copy(self)
        view.tables, view.in_order = tables, False
        return view

    @property
    def block_bytes(self) -> int:
        return self.shape.bytes_per_token * self.block_tokens

    def take_memory(self, blocks: int, least: int = 1) -> int:
        """Memory for so many blocks, or for as many as others have left us, if that is enough for the least; returns how many."""
        heads, device = self.shape.heads, self.shape.device
        self.memory = None
        if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < blocks * self.block_bytes / FREE_SHARE:
            torch.cuda.empty_cache()  # what training keeps for later
            blocks = blocks_that_fit(blocks, least, self.block_bytes, torch.cuda.mem_get_info(device)[0])
        size = (blocks, self.shape.layers, 2, heads.kv, self.block_tokens, heads.size)
        on_cpu = device.type == "cpu"
        self.memory = _lazily_zero(size, self.shape.dtype) if on_cpu else torch.empty(size, dtype=self.shape.dtype, device=device)
        self.base.fill_((self.memory.data_ptr() - self.anchor.data_ptr()) // self.shape.dtype.itemsize)
        return blocks

    def release_memory(self) -> None:
        self.memory = None
        if self.shape.device.type == "cuda":
            # To the driver, as one piece: or training's small tensors settle in it and the next call needs another.
            torch.cuda.empty_cache()

    def copy_blocks(self, moves: Sequence[tuple[int, int]], tokens: int) -> None:
        """The first tokens of blocks to others. On a CPU all at once: there, one may go where another comes from."""
        assert self.memory is not None
        together = len(moves) if self.shape.device.type == "cpu" else COPIED_AT_ONCE
        for some in (moves[start : start + together] for start in range(0, len(moves), together)):
            sources, targets = to_device(np.array(some).T, self.shape.device)
            self.memory[targets, ..., :tokens, :] = self.memory[sources, ..., :tokens, :]

    def set_tables(self, rows: Sequence[int], tables: np.ndarray) -> None:
        device = self.shape.device
        self.tables.index_copy_(0, to_device(np.array(rows), device), to_device(tables, device, torch.int32))


def blocks_that_fit(wanted: int, least: int, block_bytes: int, free: int) -> int:
    there, gigabytes = int(FREE_SHARE * free) // block_bytes, block_bytes / 1e9
    if there < min(wanted, least):
        raise PlauditError(
            f"{free / 1e9:.1f} GB of GPU memory are free, and keys and values of one sequence take {least * gigabytes:.1f}: "
            "lower max_new_tokens or max_prompt_tokens, or make others take less"
        )
    if there < wanted:
        warnings.warn(
            f"others take so much GPU memory that {there * gigabytes:.1f} GB instead of {wanted * gigabytes:.1f} are for keys "
            "and values: sampling takes longer, and a repeated run may put other sequences side by side",
            stacklevel=2,
        )
    return min(wanted, there)


def to_device(numbers: Sequence[int] | np.ndarray, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Without waiting for what the device is doing."""
    tensor = torch.as_tensor(numbers, dtype=dtype)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def _lazily_zero(size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zero pages of the system, which take no memory before they are written: most rows never grow to their full length.

    (And not empty: a mask takes a position's weight to 0, but 0 · NaN is NaN, and memory may hold anything.)
    """
    return torch.from_numpy(np.zeros(math.prod(size) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(size)
