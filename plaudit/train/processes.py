"""How many processes train together, and what each has: what a memory plan is made for."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from plaudit.models.devices import resolve_device
from plaudit.models.memory import RUNTIME, Sharding, total_memory


@dataclass(frozen=True)
class Processes:
    """The processes that train together, each on a device of its own kind."""

    size: int = 1
    sharding: Sharding = "none"
    memory: float | None = None
    """Of each one's device. None: what this machine has; a CPU's memory is divided among them."""
    kind: str | None = None
    """cuda: plan for GPUs, whether or not this machine has any. None: the recipe's device."""
    machines: int = 1
    """That have the same number of them each."""

    @property
    def per_machine(self) -> int:
        return self.size // self.machines

    def device(self, device: Any, setting: str = "run.device") -> torch.device:
        return torch.device(self.kind) if self.kind is not None else resolve_device(device, setting)

    def available(self, kind: str, trains_on: str) -> float:
        """Memory of a device for each process."""
        if self.memory is not None and kind == trains_on:
            return self.memory
        if self.kind is not None and kind != self.kind:
            return math.inf  # another machine's: not known
        return total_memory(torch.device(kind)) / (self.per_machine if kind == "cpu" else 1)

    def taken_by_others(self) -> float:
        """Memory of this process's GPU that other processes have taken; 0 if the plan is for other GPUs."""
        if self.memory is not None or not torch.cuda.is_available():
            return 0.0
        free, total = torch.cuda.mem_get_info()
        return max(0.0, total - free - torch.cuda.memory_reserved() - RUNTIME["cuda"])


ALONE = Processes()
