"""The batch on the device: one row of state per running sequence, advanced by every step without the host."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from plaudit.data.pack import to_device
from plaudit.rollout.engine import Sampling

# Columns of a row's state. An unused row, or one whose sequence has ended, has position −1.
TOKEN, POSITION, KEY, WRITTEN, LIMIT = range(5)
COLUMNS = 5
EMPTY_ROW = (0, -1, 0, 0, 0)

# A row's status after a step.
IDLE, RUNNING, ENDED, AT_LIMIT = range(4)


@dataclass(frozen=True)
class DeviceSampling:
    """`Sampling` for the device: options that change the computation as constants, the others as numbers in device memory."""

    settings: Sampling
    greedy: bool
    tempered: bool
    truncated: bool
    top_k: int
    parameters: Tensor
    """Temperature, top_p, log min_p."""
    end_tokens: Tensor
    """Tokens that end a response; [−1] if there are none."""

    @property
    def kind(self) -> tuple:
        """Equal for settings that run the same computation on the same memory, and so can share a CUDA graph."""
        return (self.greedy, self.tempered, self.truncated, self.top_k, self.parameters.data_ptr())


SamplingBuffers = dict[frozenset[int], tuple[Tensor, Tensor]]
"""Device tensors of parameters and end tokens, by the set of end tokens: reused, so that they keep their addresses."""


def device_sampling(
    sampling: Sampling, end_tokens: frozenset[int], device: torch.device, buffers: SamplingBuffers
) -> DeviceSampling:
    greedy = sampling.temperature == 0.0
    log_min_p = math.log(sampling.min_p) if sampling.min_p > 0.0 else -math.inf
    if end_tokens not in buffers:
        buffers[end_tokens] = (torch.empty(3, device=device), torch.tensor(sorted(end_tokens) or [-1], device=device))
    parameters, ends = buffers[end_tokens]
    parameters.copy_(torch.tensor([sampling.temperature or 1.0, sampling.top_p, log_min_p]))
    return DeviceSampling(
        settings=sampling,
        greedy=greedy,
        tempered=sampling.temperature not in (0.0, 1.0),
        truncated=not greedy and (sampling.top_p < 1.0 or sampling.min_p > 0.0),
        top_k=0 if greedy else sampling.top_k or 0,
        parameters=parameters,
        end_tokens=ends,
    )


class BatchRows:
    def __init__(self, count: int, device: torch.device):
        self.device = device
        self.state_RC = torch.tensor(EMPTY_ROW, device=device).repeat(count, 1)
        self.results_R4 = torch.zeros(count, 4, dtype=torch.int32, device=device)
        """Of the last step: status, token, log-prob and untempered log-prob (the latter two as the bits of an fp32)."""
        self.indices_R = torch.arange(count, dtype=torch.int32, device=device)

    def clear(self) -> None:
        self.state_RC.copy_(torch.tensor(EMPTY_ROW, device=self.device))

    def update(self, changes: Sequence[tuple[int, ...]]) -> None:
        """Set rows, all at once. Each change is (row, source row whose state it takes over, or −1; new columns)."""
        changes_NC = to_device(np.array(changes, dtype=np.int64), self.device)
        rows, sources, states = changes_NC[:, 0], changes_NC[:, 1], changes_NC[:, 2:]
        moved = self.state_RC.index_select(0, sources.clamp(min=0))
        self.state_RC.index_copy_(0, rows, torch.where(sources[:, None] >= 0, moved, states))
