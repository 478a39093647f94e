"""Which rows of the batch share the beginning of a prompt, so that attention on a GPU reads it once for all of them.

The samples of a prompt share its full blocks (scheduler.py). Those that run are dealt to tiles, each of which one program serves:
a tile is the number of tokens that its rows share, and the rows. A row that is in no tile reads its whole past by itself.
Either way a token has the same bits, so what is faster decides.
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
WORTHWHILE_BYTES = 16_000_000  # that a layer no longer reads: the extra kernel takes as long as reading a few megabytes


class SharedPrefixes:
    """Device memory for up to `rows` rows, at addresses that stay: captured graphs read it."""

    def __init__(self, rows: int, longest: int, heads: Heads, device: torch.device):
        self.rows, self.longest = rows, longest
        """The most rows, and the most tokens that any of them share."""
        self.samples_per_tile = max(1, TILE_QUERIES // (heads.query // heads.kv))
        most_tiles, columns = max(1, rows // FEWEST_ROWS), 1 + self.samples_per_tile
        numbers = torch.zeros(most_tiles * columns + rows, dtype=torch.int32, device=device)
        self._numbers = numbers
        self.tiles_TS = numbers[: most_tiles * columns].view(most_tiles, columns)
        """Shared tokens, then rows, −1 after the last. Tiles of 0 tokens are unused."""
        self.tokens_R = numbers[most_tiles * columns :]
        """Shared tokens that a row's tile reads for it."""
        self.tiles = 0
        """Tiles in use, rounded up so that few graphs are captured."""
        self.unread_tokens = 0
        """Tokens that a step does not read since they are read for another row."""

    def fits(self, rows: int, longest: int) -> bool:
        return rows <= self.rows and longest <= self.longest

    def update(self, sequences: Sequence[RunningSequence | None], block_tokens: int) -> None:
        """After rows have changed."""
        rows_of: dict[int, list[int]] = {}
        for row, sequence in enumerate(sequences):
            if sequence is not None and sequence.shared_blocks:
                rows_of.setdefault(sequence.blocks[0], []).append(row)
        numbers = np.zeros(len(self._numbers), dtype=np.int32)
        tiles, tokens = numbers[: self.tiles_TS.numel()].reshape(self.tiles_TS.shape), numbers[self.tiles_TS.numel() :]
        tile = self.unread_tokens = 0
        for rows in rows_of.values():
            sequence = sequences[rows[0]]
            assert sequence is not None
            shared = sequence.shared_blocks * block_tokens
            for some_rows in np.array_split(rows, -(-len(rows) // self.samples_per_tile)):
                if len(some_rows) < FEWEST_ROWS:
                    continue
                tiles[tile, 0], tiles[tile, 1:] = shared, -1
                tiles[tile, 1 : 1 + len(some_rows)] = some_rows
                tokens[some_rows] = shared
                tile += 1
                self.unread_tokens += (len(some_rows) - 1) * shared
        self.tiles = min(next_power_of_2(tile), len(tiles)) if tile else 0
        self._numbers.copy_(to_device(numbers, self._numbers.device, torch.int32))

    def save_time(self, cache: KVCache) -> bool:
        return self.tiles > 0 and self.unread_tokens * cache.shape.bytes_per_token >= WORTHWHILE_BYTES * cache.shape.layers


def longest_shared(prompt_tokens: Sequence[int], block_tokens: int) -> int:
    """Tokens that the samples of the longest prompt share: all full blocks before its last token. Rounded up to a power of 2."""
    longest = max(((tokens - 1) // block_tokens * block_tokens for tokens in prompt_tokens), default=0)
    return next_power_of_2(longest) if longest > 0 else 0
