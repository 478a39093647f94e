"""Memory of the host for what is not on the GPU all the time: pinned, so that the GPU copies it without the CPU.

`HostMemory` has copies of tensors from which a checkpoint is written while training changes the tensors themselves.
"""

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

PAGE = 4096


def allocate_host_memory(owner: object, size: int) -> Tensor:
    """`size` bytes of host memory, all 0; if there is a GPU, pinned for the owner's lifetime. (torch's pinned allocator rounds up
    to powers of two, so it may take twice as much.)"""
    if not torch.cuda.is_available():
        return torch.zeros(size, dtype=torch.uint8)
    # Whole pages, since pinning a page twice (for two owners) is an error.
    memory = torch.empty(-(-size // PAGE) * PAGE + PAGE, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % PAGE :][: -(-max(size, 1) // PAGE) * PAGE]
    memory.zero_()  # faults the pages in from all threads; pinning would fault them in one by one
    cudart: Any = torch.cuda.cudart()
    torch.cuda.check_error(cudart.cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
    # The closure keeps the memory alive until it is unpinned.
    weakref.finalize(owner, lambda: cudart.cudaHostUnregister(memory.data_ptr()))
    return memory[:size]


class HostMemory:
    """Is kept from one snapshot to the next: to take memory anew costs a fault for every page of it, and on a GPU pages have to be
    locked, which takes many times as long as the copy. Pinned if there is a GPU."""

    def __init__(self):
        self._memory: dict[str, Tensor] = {}
        self._copied: dict[tuple[object, ...], Tensor] = {}

    def begin(self) -> None:
        """A new snapshot, which replaces the one before."""
        self._copied = {}

    def copy(self, name: str, tensor: Tensor) -> Tensor:
        memory = self._memory.get(name)
        if memory is None or memory.shape != tensor.shape or memory.dtype != tensor.dtype:
            size = tensor.numel() * tensor.element_size()
            memory = self._memory[name] = allocate_host_memory(self, size).view(tensor.dtype).view(tensor.shape)
        return memory.copy_(tensor.detach(), non_blocking=True)

    def copies(self, prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of tensors that live as long as training does. One that has several names, in this call or another (tied weights; an fp32
        weight, which is its own master), is copied once."""
        copies: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            if key not in self._copied:
                self._copied[key] = self.copy(f"{prefix}/{name}", tensor)
            copies[name] = self._copied[key]
        return copies

    def settle(self) -> None:
        """Wait until all copies are complete."""
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
