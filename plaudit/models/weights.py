"""A model's weights in this process: on their device when they are needed, and really gone from there when they are not.

On a CPU, unloaded weights are dropped and read again from safetensors. On a GPU they are copied once to pinned memory of the host,
from where they come back as fast as the bus is; they never change, so nothing is copied on the way out after that. Those of a model
that learns (`Visitor`) do, and are: on a CPU they just stay.
"""

import ctypes
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

Model = TypeVar("Model", bound=nn.Module)
ALIGNED = 512  # bytes that copies like to begin at
PAGE = 4096


@dataclass(frozen=True)
class Alive:
    """A model whose weights take memory on its device right now."""

    name: str
    bytes: int
    """0 while it is being loaded."""
    device: str
    offload: bool
    """It stays only while it is asked."""


class Census:
    """Which models are alive."""

    def __init__(self):
        self._lock = threading.Lock()
        self._alive: dict[int, Alive] = {}
        self.most_offloaded = 0
        """The most models of placement `offload` that ever were alive at the same time."""

    def alive(self) -> list[Alive]:
        with self._lock:
            return list(self._alive.values())

    def bytes(self, device: str | None = None) -> int:
        return sum(one.bytes for one in self.alive() if device in (None, one.device))

    def put(self, key: int, alive: Alive) -> None:
        with self._lock:
            self._alive[key] = alive
            self.most_offloaded = max(self.most_offloaded, sum(one.offload for one in self._alive.values()))

    def remove(self, key: int) -> None:
        with self._lock:
            self._alive.pop(key, None)


CENSUS = Census()


class Weights(Generic[Model]):
    """One model's. All methods run in the model's own thread."""

    def __init__(self, name: str, read: Callable[[], Model], device: torch.device, *, offload: bool):
        self._name, self._read, self._device, self._offload = name, read, device, offload
        self._model: Model | None = None
        self._host: HostCopies | None = None
        self.present = False

    @property
    def model(self) -> Model:
        assert self.present
        assert self._model is not None
        return self._model

    def load(self) -> None:
        if self.present:
            return
        self._tell(0)
        try:
            if self._host is not None:
                self._host.bring_back(self._device)
            else:
                self._model = self._read()
        except BaseException:
            self.drop()
            raise
        self.present = True
        self._tell(sum(p.numel() * p.element_size() for p in self.model.parameters()))

    def unload(self) -> None:
        """Off the device. Whoever else holds parts of the model (an engine, its graphs) must have let go of them before."""
        if not self.present:
            return
        if self._device.type == "cpu":
            self.drop()
            return
        self._host = self._host or HostCopies(self.model)
        self._host.send_away()
        self.present = False
        return_memory()
        CENSUS.remove(id(self))

    def drop(self) -> None:
        """For good, or until it is read again."""
        self._model, self._host, self.present = None, None, False
        return_memory()
        CENSUS.remove(id(self))

    def _tell(self, size: int) -> None:
        CENSUS.put(id(self), Alive(self._name, size, self._device.type, self._offload))


class HostCopies:
    """All tensors of a module, in the host's memory: pinned where there is a GPU to copy them to. Those that lie side by side, as
    views of one tensor, come back so."""

    def __init__(self, module: nn.Module):
        shared: dict[int, list[Tensor]] = {}
        for tensor in (*module.parameters(), *module.buffers()):
            shared.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
        sizes = [-(-tensors[0].untyped_storage().nbytes() // ALIGNED) * ALIGNED for tensors in shared.values()]
        pieces = host_memory(self, sum(sizes)).split(sizes)
        layouts = [[(tensor, _Layout.of(tensor)) for tensor in tensors] for tensors in shared.values()]
        self._pieces = list(zip(pieces, layouts, strict=True))
        self.take_changes()

    def take_changes(self) -> None:
        """What the device's tensors have become since."""
        for piece, tensors in self._pieces:
            for tensor, layout in tensors:
                layout.in_piece(piece).copy_(tensor.detach(), non_blocking=True)
        _wait()

    def send_away(self) -> None:
        """The module's tensors are those of the host now; the device's have no owner left."""
        for piece, tensors in self._pieces:
            for tensor, layout in tensors:
                tensor.data = layout.in_piece(piece)

    def bring_back(self, device: torch.device) -> None:
        try:
            for piece, tensors in self._pieces:
                there = piece.to(device, non_blocking=True, copy=True)
                for tensor, layout in tensors:
                    tensor.data = layout.in_piece(there)
            _wait()
        except BaseException:
            self.send_away()  # not half of it
            raise


class _Layout(NamedTuple):
    """Where a tensor lies in its memory."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> "_Layout":
        return cls(tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def in_piece(self, piece: Tensor) -> Tensor:
        """The tensor in a copy of its memory, given as bytes."""
        numbers = piece.view(self.dtype)
        return numbers.as_strided(self.shape, self.stride, numbers.storage_offset() + self.offset)


class Visitor:
    """A model that learns, and is on its device only while `present`; its optimiser's state is not its own."""

    def __init__(self, module: nn.Module, device: torch.device):
        self._device, self._copies = device, HostCopies(module)
        self._copies.send_away()
        return_memory()

    @contextmanager
    def present(self) -> Iterator[None]:
        self._copies.bring_back(self._device)
        try:
            yield
        finally:
            self._copies.take_changes()
            self._copies.send_away()
            return_memory()


def is_apart_from_host(device: torch.device) -> bool:
    """Whether what leaves it has anywhere to go: a CPU's memory is the host's."""
    return device.type != "cpu"


def host_memory(owner: object, size: int) -> Tensor:
    """So many bytes, pinned as long as the owner lives where there is a GPU to copy them to. (torch's own pinned memory comes in
    powers of two: up to twice of what is asked for.)"""
    if not torch.cuda.is_available():
        return torch.empty(size, dtype=torch.uint8)
    # Whole pages: one that is pinned twice, for two owners, is an error.
    memory = torch.empty(-(-size // PAGE) * PAGE + PAGE, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % PAGE :][: -(-max(size, 1) // PAGE) * PAGE]
    memory.zero_()  # by all threads: pages that nobody has touched yet are pinned one by one
    cudart: Any = torch.cuda.cudart()
    torch.cuda.check_error(cudart.cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
    # It holds the memory, which must not be freed before.
    weakref.finalize(owner, lambda: cudart.cudaHostUnregister(memory.data_ptr()))
    return memory[:size]


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


def return_memory() -> None:
    """To the system and to the driver, not only to the allocators that keep it for later."""
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)
