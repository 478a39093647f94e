"""Which rows each step trains on: a function of seed and step alone, so there is nothing to save or replay.

Rows form one endless stream, one permutation per epoch; step k takes rows [k·n, (k+1)·n) of it. A step may span two epochs, unless
`last_batch` is drop: then the stream has no rows that would be an epoch's last, short step.
(torchdata's stateful loader would keep workers and queues alive for what is just a formula here.)
"""

import math
from decimal import Decimal
from functools import lru_cache
from typing import Literal

import numpy as np

from plaudit.errors import RecipeError
from plaudit.seeding import stable_seed


class RowOrder:
    """A shuffled order over `num_rows` rows, `per_step` at a time, for `epochs` passes."""

    def __init__(self, num_rows: int, *, per_step: int, epochs: float, seed: int, last_batch: Literal["keep", "drop"] = "keep"):
        self.num_rows, self.per_step, self.seed, self._epochs = num_rows, per_step, seed, epochs
        # Decimal: 1.1 epochs of 100 rows are 110 rows, not the 110.00000000000001 of floats.
        self.total_rows = math.ceil(num_rows * Decimal(str(epochs)))
        self.rows_per_epoch = num_rows
        """That the stream has."""
        if last_batch == "drop":
            whole_epochs, rest = divmod(self.total_rows, num_rows)
            self.rows_per_epoch -= num_rows % per_step
            self.total_rows = whole_epochs * self.rows_per_epoch + rest - rest % per_step
            if self.total_rows == 0:
                raise RecipeError(
                    f"train.last_batch is drop, and {epochs:g} epoch{'s' * (epochs != 1)} of {num_rows:,} rows are less than one "
                    f"step of {per_step:,}: take fewer rows per step, raise run.epochs, or set train.last_batch to keep"
                )
        self._permutation = lru_cache(maxsize=2)(self._make_permutation)

    @property
    def num_steps(self) -> int:
        return math.ceil(self.total_rows / self.per_step)

    def steps(self, most: int | None) -> int:
        """Of a run with at most this many (run.max_steps)."""
        return min(self.num_steps, most or self.num_steps)

    def ends_early(self, wanted: int | None) -> str | None:
        """That the data end before run.max_steps, if they do."""
        if wanted is None or wanted <= self.num_steps:
            return None
        ends = f"the data ends after {self.num_steps:,} step{'s' * (self.num_steps != 1)} (run.epochs = {self._epochs:g})"
        return f"{ends}, before run.max_steps = {wanted:,}: raise run.epochs to train that long"

    def repeats(self, setting: str, rows: str) -> str | None:
        """That a step takes more rows than there are, if it does. `setting`: how many it takes."""
        if self.num_rows >= self.per_step:
            return None
        effect = "a step has rows of several epochs" if self.total_rows > self.num_rows else "there is one step, of all of them"
        present = f"{self.num_rows:,} {rows.removesuffix('s' * (self.num_rows == 1))}"
        return f"{setting} = {self.per_step:,} exceeds the {present} in the data: {effect}"

    def dropped(self) -> str | None:
        """How many rows each epoch leaves out, if any."""
        left = self.num_rows - self.rows_per_epoch
        return f"each epoch leaves {left:,} of {self.num_rows:,} rows out (train.last_batch: drop)" if left else None

    def rows(self, step: int) -> list[int]:
        """Row numbers of a step (from 0). Only the last step may be short."""
        assert 0 <= step < self.num_steps
        start = step * self.per_step
        return self.stream(start, min(self.per_step, self.total_rows - start))

    def stream(self, start: int, count: int) -> list[int]:
        """`count` rows of the stream from position `start`; it continues past the last epoch."""
        return [int(self._permutation(i // self.rows_per_epoch)[i % self.rows_per_epoch]) for i in range(start, start + count)]

    def _make_permutation(self, epoch: int) -> np.ndarray:
        # RandomState, not Generator: numpy guarantees that its stream never changes.
        return np.random.RandomState(stable_seed("order", self.seed, epoch, bits=32)).permutation(self.num_rows)


class RowStream:
    """The order's rows, consumed as needed. The position is part of the run's checkpoint."""

    def __init__(self, order: RowOrder):
        self.order, self.taken = order, 0

    def ahead(self, skip: int, count: int) -> list[int]:
        """Look ahead: the next `count` rows after skipping `skip`, without consuming them."""
        return self.order.stream(self.taken + skip, count)

    # Checkpoint state

    def state(self) -> dict[str, int]:
        return {"taken": self.taken}

    def load_state(self, state: dict[str, int]) -> None:
        self.taken = state.get("taken", 0)

    def saving(self) -> None:
        pass
