"""Which rows a step trains on: a function of the seed and the step alone, so there is nothing to save and nothing to replay.

Rows are one endless stream, each epoch its own permutation; step k takes rows [k·n, (k+1)·n) of it. A step may span two epochs.
(torchdata's stateful loader would keep workers and queues alive for what is a formula here.)
"""

import math
from decimal import Decimal
from functools import lru_cache

import numpy as np

from plaudit.seeding import stable_seed


class RowOrder:
    """Rows of `num_rows`, `per_step` at a time, for `epochs` passes."""

    def __init__(self, num_rows: int, *, per_step: int, epochs: float, seed: int):
        self.num_rows, self.per_step, self.seed = num_rows, per_step, seed
        # Decimal, because 1.1 epochs of 100 rows are 110 rows and not the 110.00000000000001 of floats.
        self.total_rows = math.ceil(num_rows * Decimal(str(epochs)))
        self._permutation = lru_cache(maxsize=2)(self._make_permutation)

    @property
    def num_steps(self) -> int:
        return math.ceil(self.total_rows / self.per_step)

    def rows(self, step: int) -> list[int]:
        """Row numbers of a step (from 0). Only the very last step may be short."""
        assert 0 <= step < self.num_steps
        start = step * self.per_step
        return self.stream(start, min(self.per_step, self.total_rows - start))

    def stream(self, start: int, count: int) -> list[int]:
        """So many rows of the stream, from one of its places on; it goes on behind the last epoch too."""
        return [int(self._permutation(i // self.num_rows)[i % self.num_rows]) for i in range(start, start + count)]

    def _make_permutation(self, epoch: int) -> np.ndarray:
        # RandomState, not Generator: numpy promises that its stream never changes.
        return np.random.RandomState(stable_seed("order", self.seed, epoch, bits=32)).permutation(self.num_rows)


class RowStream:
    """The order's rows, taken as they are needed. How far it has come is part of a run's state (it is a `Companion` of the run)."""

    def __init__(self, order: RowOrder):
        self.order, self.taken = order, 0

    def ahead(self, skip: int, count: int) -> list[int]:
        """Rows that come next, but for the first few; they are not taken by that."""
        return self.order.stream(self.taken + skip, count)

    # What a checkpoint holds

    def state(self) -> dict[str, int]:
        return {"taken": self.taken}

    def load_state(self, state: dict[str, int]) -> None:
        self.taken = state.get("taken", 0)

    def saved(self) -> None:
        pass
