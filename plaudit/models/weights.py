"""Offloading: a model's weights are on their device only while they are used.

`OffloadableWeights` holds a frozen model. On a CPU, unloaded weights are dropped and read again from safetensors. On a GPU they are
copied once to pinned host memory and loaded from there at bus speed; they never change, so unloading copies nothing after that.
`OffloadedModule` holds a model that is trained: its weights are copied back to the host after every use.
"""

import ctypes
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from plaudit.models.host_memory import allocate_host_memory
from plaudit.models.quantised import free_scratch

Model = TypeVar("Model", bound=nn.Module)
ALIGNED = 512  # bytes: fast copies start at multiples of this


@dataclass(frozen=True)
class ResidentModel:
    """A model whose weights are on its device right now."""

    name: str
    bytes: int
    """0 while the model is being loaded."""
    device: str
    offload: bool
    """On the device only while it is used."""


class ResidentModels:
    """The models whose weights are on a device now."""

    def __init__(self):
        self._lock = threading.Lock()
        self._models: dict[int, ResidentModel] = {}
        self.max_offloaded = 0
        """The most models with placement `offload` that were ever resident at the same time."""

    def models(self) -> list[ResidentModel]:
        with self._lock:
            return list(self._models.values())

    def bytes(self, device: str | None = None) -> int:
        return sum(model.bytes for model in self.models() if device in (None, model.device))

    def add(self, key: int, model: ResidentModel) -> None:
        with self._lock:
            self._models[key] = model
            self.max_offloaded = max(self.max_offloaded, sum(model.offload for model in self._models.values()))

    def remove(self, key: int) -> None:
        with self._lock:
            self._models.pop(key, None)


RESIDENT_MODELS = ResidentModels()


class OffloadableWeights(Generic[Model]):
    """The weights of one frozen model. All methods run in the model's own thread."""

    def __init__(self, name: str, read: Callable[[], Model], device: torch.device, *, offload: bool):
        self._name, self._read, self._device, self._offload = name, read, device, offload
        self._model: Model | None = None
        self._host: HostCopies | None = None
        self.on_device = False

    @property
    def model(self) -> Model:
        assert self.on_device
        assert self._model is not None
        return self._model

    def load(self) -> None:
        if self.on_device:
            return
        self._register(0)
        try:
            if self._host is not None:
                self._host.to_device(self._device)
            else:
                self._model = self._read()
        except BaseException:
            self.drop()
            raise
        self.on_device = True
        self._register(sum(p.numel() * p.element_size() for p in self.model.parameters()))

    def unload(self) -> None:
        """Free the device memory. Everything else that holds the model's tensors (an engine, its graphs) must be dropped first."""
        if not self.on_device:
            return
        if self._device.type == "cpu":
            self.drop()
            return
        self._host = self._host or HostCopies(self.model)
        self._host.to_host()
        self.on_device = False
        release_memory()
        RESIDENT_MODELS.remove(id(self))

    def drop(self) -> None:
        """Drop the weights everywhere; `load` reads them from disk again."""
        self._model, self._host, self.on_device = None, None, False
        release_memory()
        RESIDENT_MODELS.remove(id(self))

    def _register(self, size: int) -> None:
        RESIDENT_MODELS.add(id(self), ResidentModel(self._name, size, self._device.type, self._offload))


class HostCopies:
    """Host copies of all tensors of a module, pinned if there is a GPU. Tensors that are views of one storage stay so."""

    def __init__(self, module: nn.Module):
        by_storage: dict[int, list[Tensor]] = {}
        for tensor in (*module.parameters(), *module.buffers()):
            by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
        sizes = [-(-tensors[0].untyped_storage().nbytes() // ALIGNED) * ALIGNED for tensors in by_storage.values()]
        buffers = allocate_host_memory(self, sum(sizes)).split(sizes)
        layouts = [[(tensor, _Layout.of(tensor)) for tensor in tensors] for tensors in by_storage.values()]
        self._storages = list(zip(buffers, layouts, strict=True))
        self.update()

    def update(self) -> None:
        """Copy the tensors' current values to the host."""
        for buffer, tensors in self._storages:
            for tensor, layout in tensors:
                layout.view_of(buffer).copy_(tensor.detach(), non_blocking=True)
        _wait()

    def to_host(self) -> None:
        """Point the module's tensors at the host copies, which frees the device's."""
        for buffer, tensors in self._storages:
            for tensor, layout in tensors:
                tensor.data = layout.view_of(buffer)

    def to_device(self, device: torch.device) -> None:
        try:
            for buffer, tensors in self._storages:
                copy = buffer.to(device, non_blocking=True, copy=True)
                for tensor, layout in tensors:
                    tensor.data = layout.view_of(copy)
            _wait()
        except BaseException:
            self.to_host()  # all or nothing
            raise


class _Layout(NamedTuple):
    """Where a tensor lies in its storage."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> "_Layout":
        return cls(tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def view_of(self, buffer: Tensor) -> Tensor:
        """The tensor in a copy of its storage, given as bytes."""
        elements = buffer.view(self.dtype)
        return elements.as_strided(self.shape, self.stride, elements.storage_offset() + self.offset)


class OffloadedModule:
    """A trained module that is on its device only inside `on_device()`. Its optimiser's state is offloaded separately."""

    def __init__(self, module: nn.Module, device: torch.device):
        self._module, self._device, self._copies = module, device, HostCopies(module)
        self._leave()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        self._copies.to_device(self._device)
        try:
            yield
        finally:
            self._copies.update()
            self._leave()

    def _leave(self) -> None:
        self._copies.to_host()
        free_scratch(self._module)  # no CUDA graph refers to a trained module's that leaves its device
        release_memory()


def has_device_memory(device: torch.device) -> bool:
    """Whether the device has memory apart from the host's, so that offloading to the host frees any."""
    return device.type != "cpu"


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


def release_memory() -> None:
    """Return unused memory to the operating system and the driver, not just to the caching allocators."""
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)
