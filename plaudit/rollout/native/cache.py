"""The paged KV cache: keys and values in blocks of tokens, found through a block table per row.

On a GPU blocks are small, so that sequences take only what they use and the samples of a prompt share its blocks. On a CPU, where
attention needs a sequence's keys contiguous, a block is as long as the longest sequence and row i uses block i.
"""

import math
import warnings
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from plaudit.data.pack import to_device
from plaudit.errors import PlauditError
from plaudit.expandable_segments import segments_expand
from plaudit.models.heads import Heads, block_tokens

FREE_SHARE = 0.92  # of free memory, at most: activations need some
FREE_BYTES = 2**31  # that the driver should have while sampling: kernels are loaded into memory that torch has not cached
COPIED_AT_ONCE = 32  # blocks: a copy needs temporary memory of the same size


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
        """The block size of the attention kernels, in training too."""
        return block_tokens(self.heads.size)


class KVCache:
    """Memory [block, layer, key or value, kv head, position in block, head size], and the block tables of the rows.

    Kernels find the memory through `base`, a number on the device: its offset from `anchor`, in elements. So captured graphs stay
    valid when the next call's memory has another address.
    """

    def __init__(self, shape: CacheShape, rows: int, blocks_per_row: int, *, block_tokens: int):
        self.shape, self.block_tokens, self.kv_heads = shape, block_tokens, shape.heads.kv
        part = shape.heads.kv * block_tokens * shape.heads.size
        self.strides = (shape.layers * 2 * part, 2 * part, part)
        self.anchor = torch.empty(256, dtype=shape.dtype, device=shape.device)
        self.base = torch.zeros(1, dtype=torch.int64, device=shape.device)
        self.block_tables = torch.zeros(rows, blocks_per_row, dtype=torch.int32, device=shape.device)
        self.memory: Tensor | None = None
        self.blocks_match_rows = False
        """Row i uses block i."""

    def fits(self, shape: CacheShape, block_tokens: int, tables: tuple[int, int]) -> bool:
        """Whether this cache can serve such a call; `tables`: rows and blocks per row."""
        rows, blocks_per_row = self.block_tables.shape
        return (self.shape, self.block_tokens) == (shape, block_tokens) and rows >= tables[0] and blocks_per_row >= tables[1]

    def with_block_tables(self, tables: Tensor) -> "KVCache":
        """The same memory seen through other block tables."""
        view = copy(self)
        view.block_tables, view.blocks_match_rows = tables, False
        return view

    @property
    def block_bytes(self) -> int:
        return self.shape.bytes_per_token * self.block_tokens

    def allocate(self, blocks: int, min_blocks: int = 1) -> int:
        """Allocate `blocks` blocks, or as many as fit, but at least `min_blocks`; returns their number."""
        self.memory = None
        if self.shape.device.type == "cuda":
            if unused_memory(self.shape.device) < blocks * self.block_bytes / FREE_SHARE:
                blocks = self._after_returning(blocks, min_blocks)
            try:
                self.memory = self._empty(blocks)
            except torch.OutOfMemoryError:  # what torch has cached is in pieces that are too small
                blocks = self._after_returning(blocks, min_blocks)
        self.memory = self._empty(blocks) if self.memory is None else self.memory
        if self.shape.device.type == "cuda" and torch.cuda.mem_get_info(self.shape.device)[0] < FREE_BYTES:
            torch.cuda.empty_cache()
        self.base.fill_((self.memory.data_ptr() - self.anchor.data_ptr()) // self.shape.dtype.itemsize)
        return blocks

    def _after_returning(self, blocks: int, min_blocks: int) -> int:
        """How many fit when torch has returned what it has cached."""
        torch.cuda.empty_cache()
        return blocks_that_fit(blocks, min_blocks, self.block_bytes, torch.cuda.mem_get_info(self.shape.device)[0])

    def _empty(self, blocks: int) -> Tensor:
        heads, dtype, device = self.shape.heads, self.shape.dtype, self.shape.device
        size = (blocks, self.shape.layers, 2, heads.kv, self.block_tokens, heads.size)
        return _lazily_zero(size, dtype) if device.type == "cpu" else torch.empty(size, dtype=dtype, device=device)

    def release(self, *, to_driver: bool = True) -> None:
        """`to_driver`: for other processes. Otherwise torch keeps it, and all that training has left, for the next tensors, if its
        segments expand: it could not use most of it for tensors of other sizes if they did not."""
        self.memory = None
        if self.shape.device.type == "cuda" and (to_driver or not segments_expand()):
            torch.cuda.empty_cache()

    def copy_blocks(self, moves: Sequence[tuple[int, int]], tokens: int) -> None:
        """Copy the first tokens of blocks, as (source, target). On a CPU all at once, since a target may also be a source."""
        assert self.memory is not None
        batch = len(moves) if self.shape.device.type == "cpu" else COPIED_AT_ONCE
        for some_moves in (moves[start : start + batch] for start in range(0, len(moves), batch)):
            sources, targets = to_device(np.array(some_moves).T, self.shape.device)
            self.memory[targets, ..., :tokens, :] = self.memory[sources, ..., :tokens, :]

    def set_block_tables(self, rows: Sequence[int], tables: np.ndarray) -> None:
        device = self.shape.device
        self.block_tables.index_copy_(0, to_device(np.array(rows, dtype=np.int64), device), to_device(tables, device, torch.int32))


def unused_memory(device: torch.device) -> int:
    """Free, or cached by torch and not in use."""
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


def blocks_that_fit(wanted: int, min_blocks: int, block_bytes: int, free: int) -> int:
    available, gigabytes = int(FREE_SHARE * free) // block_bytes, block_bytes / 1e9
    if available < min(wanted, min_blocks):
        raise PlauditError(
            f"{free / 1e9:.1f} GB of GPU memory are free, but the KV cache of one sequence takes {min_blocks * gigabytes:.1f}: "
            "lower max_new_tokens or max_prompt_tokens, or free GPU memory"
        )
    if available < wanted:
        warnings.warn(
            f"other uses of GPU memory leave {available * gigabytes:.1f} GB for the KV cache instead of {wanted * gigabytes:.1f}: "
            "sampling takes longer, and a repeated run may batch sequences differently",
            stacklevel=2,
        )
    return min(wanted, available)


def _lazily_zero(size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The system's zero pages, which take no memory until they are written: most rows never reach their full length.

    Not uninitialised memory: masked positions get weight 0, but 0 · NaN is NaN.
    """
    return torch.from_numpy(np.zeros(math.prod(size) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(size)
