"""The sequences that run, as the device sees them: a row each, brought forward by every step without asking the host."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from plaudit.rollout.engine import Sampling
from plaudit.rollout.native.cache import to_device

# Columns of a row's state. A row that nobody uses, or whose sequence has ended, has position −1.
TOKEN, POSITION, KEY, WRITTEN, LIMIT = range(5)
COLUMNS = 5
NOBODY = (0, -1, 0, 0, 0)

# What a step says of a row, besides token and log-probs.
IDLE, RUNNING, ENDED, AT_LIMIT = range(4)


@dataclass(frozen=True)
class Draw:
    """`Sampling` as the device wants it: what changes the computation as constants, the rest as numbers in its memory."""

    sampling: Sampling
    greedy: bool
    tempered: bool
    truncated: bool
    top_k: int
    numbers: Tensor
    """Temperature, top_p, log min_p."""
    ends: Tensor
    """Tokens that end a response; at least one number, −1 if there are none."""

    @property
    def kind(self) -> tuple:
        """Draws of one kind are the same computation on the same memory."""
        return (self.greedy, self.tempered, self.truncated, self.top_k, self.numbers.data_ptr())


Memory = dict[frozenset[int], tuple[Tensor, Tensor]]
"""Numbers and end tokens on the device, by the end tokens: they stay where they are from call to call."""


def draw_of(sampling: Sampling, end_tokens: frozenset[int], device: torch.device, memory: Memory) -> Draw:
    greedy = sampling.temperature == 0.0
    log_min_p = math.log(sampling.min_p) if sampling.min_p > 0.0 else -math.inf
    if end_tokens not in memory:
        memory[end_tokens] = (torch.empty(3, device=device), torch.tensor(sorted(end_tokens) or [-1], device=device))
    numbers, ends = memory[end_tokens]
    numbers.copy_(torch.tensor([sampling.temperature or 1.0, sampling.top_p, log_min_p]))
    return Draw(
        sampling=sampling,
        greedy=greedy,
        tempered=sampling.temperature not in (0.0, 1.0),
        truncated=not greedy and (sampling.top_p < 1.0 or sampling.min_p > 0.0),
        top_k=0 if greedy else sampling.top_k or 0,
        numbers=numbers,
        ends=ends,
    )


class Rows:
    def __init__(self, count: int, device: torch.device):
        self.device = device
        self.state_RC = torch.tensor(NOBODY, device=device).repeat(count, 1)
        self.results_R4 = torch.zeros(count, 4, dtype=torch.int32, device=device)
        """Of the last step: what became of a row, its token, log-prob and untempered log-prob (fp32, as they lie in memory)."""
        self.indices_R = torch.arange(count, dtype=torch.int32, device=device)

    def clear(self) -> None:
        self.state_RC.copy_(torch.tensor(NOBODY, device=self.device))

    def change(self, changes: Sequence[tuple[int, ...]]) -> None:
        """(row, the row that its state comes from, or −1 and its columns), all at once."""
        changed = to_device(np.array(changes, dtype=np.int64), self.device)
        rows, sources, states = changed[:, 0], changed[:, 1], changed[:, 2:]
        moved = self.state_RC.index_select(0, sources.clamp(min=0))
        self.state_RC.index_copy_(0, rows, torch.where(sources[:, None] >= 0, moved, states))
