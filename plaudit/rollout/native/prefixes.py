"""Which rows of the batch share the beginning of a prompt, so that attention on a GPU reads it for several of them at once.

The samples of a prompt share its full blocks (scheduler.py). Those that run are grouped into tiles: the number of tokens that some
rows share, and these rows, which a program serves together. A row that is in no tile reads its whole past by itself.
Either way a token has the same bits (verify.py tests it), so what is faster decides.
"""

from collections.abc import Sequence

import numpy as np
import torch

from plaudit.data.pack import to_device
from plaudit.models.heads import Heads, next_power_of_2
from plaudit.rollout.native.cache import KVCache
from plaudit.rollout.native.scheduler import RunningSequence

TILE_QUERIES = 64  # query heads of a tile's rows, for each key-value head
FEWEST_ROWS = 2  # of a tile
WIDEST_HEAD = 128  # the states of a tile of wider ones do not fit into registers
# Saved reads of a layer, mostly of the GPU's cache, from which on tiles are used: from here on they were never slower, on an H200.
WORTHWHILE_BYTES = 200_000_000


def fits_tiles(heads: Heads, dtype: torch.dtype) -> bool:
    """Whether the kernel is meant for these heads and numbers: those of fp32 do not fit into registers either."""
    return FEWEST_ROWS * (heads.query // heads.kv) <= TILE_QUERIES and heads.size <= WIDEST_HEAD and dtype.itemsize == 2


Tile = tuple[int, Sequence[int]]
"""Tokens that the rows share, and the rows."""


class SharedPrefixes:
    """Device memory for up to `rows` rows, at addresses that stay: captured graphs read it."""

    def __init__(self, rows: int, heads: Heads, device: torch.device):
        self.rows, self.samples_per_tile = rows, TILE_QUERIES // (heads.query // heads.kv)
        most_tiles, columns = -(-rows // FEWEST_ROWS), 1 + self.samples_per_tile
        numbers = torch.zeros(most_tiles * columns + rows, dtype=torch.int32, device=device)
        self._numbers = numbers
        self.tiles_TS = numbers[: most_tiles * columns].view(most_tiles, columns)
        """Shared tokens, then rows, −1 after the last. Tiles of 0 tokens are unused."""
        self.tokens_R = numbers[most_tiles * columns :]
        """Tokens that a row's tile reads for it."""
        self.tile_count = 0
        """Tiles to launch: a power of 2 that changes rarely, so that few graphs are captured."""
        self.unread_tokens = 0
        """Tokens that rows need not read, because their tile reads them once for several rows."""
        self.in_use = False
        """Whether tiles save time now."""

    def update(self, sequences: Sequence[RunningSequence | None], cache: KVCache) -> None:
        """After rows have changed."""
        tiles = self._tiles(sequences, cache.block_tokens)
        self.unread_tokens = sum((len(rows) - 1) * tokens for tokens, rows in tiles)
        self.in_use = bool(tiles) and self.unread_tokens * cache.shape.bytes_per_token >= WORTHWHILE_BYTES * cache.shape.layers
        if self.in_use:
            self.assign(tiles)

    def assign(self, tiles: Sequence[Tile]) -> None:
        needed = min(next_power_of_2(len(tiles)), len(self.tiles_TS))
        if not needed <= self.tile_count <= 4 * needed:
            self.tile_count = needed
        numbers, in_tiles = np.zeros(len(self._numbers), dtype=np.int32), self.tiles_TS.numel()
        tiles_TS, tokens_R = numbers[:in_tiles].reshape(self.tiles_TS.shape), numbers[in_tiles:]
        tiles_TS[: len(tiles)] = [(tokens, *rows, *[-1] * (self.samples_per_tile - len(rows))) for tokens, rows in tiles]
        rows_TS = tiles_TS[: len(tiles), 1:]
        used = rows_TS >= 0
        tokens_R[rows_TS[used]] = np.broadcast_to(tiles_TS[: len(tiles), :1], rows_TS.shape)[used]
        self._numbers.copy_(to_device(numbers, self._numbers.device, torch.int32))

    def _tiles(self, sequences: Sequence[RunningSequence | None], block_tokens: int) -> list[Tile]:
        rows_of: dict[int, list[int]] = {}
        for row, sequence in enumerate(sequences):
            if sequence is not None and sequence.shared_blocks:
                # A block that is held belongs to one prompt, so those with the same first block share all that they share.
                rows_of.setdefault(sequence.blocks[0], []).append(row)
        tiles: list[Tile] = []
        for rows in rows_of.values():
            count, sequence = -(-len(rows) // self.samples_per_tile), sequences[rows[0]]
            if sequence is not None and len(rows) >= FEWEST_ROWS * count:
                parts = (rows[i * len(rows) // count : (i + 1) * len(rows) // count] for i in range(count))
                tiles += [(sequence.shared_blocks * block_tokens, some_rows) for some_rows in parts]
        return tiles
