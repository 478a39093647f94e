"""An optimiser's fp32 state in host memory, and a step that streams it through the device in chunks.

    host → device    masters and moments of chunk k + 1       its own stream
    device           AdamW on chunk k with the gradients already there; masters copied into the model's weights
    device → host    masters and moments of chunk k − 1       another stream

All state is contiguous in one vector per kind, so a chunk is one copy per kind, whatever tensors it cuts across: AdamW is
elementwise. The arithmetic runs on the device and matches a step without offload element by element. Device memory is
CHUNKS_IN_FLIGHT chunks, and only during a step.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plaudit.models.host_memory import allocate_host_memory
from plaudit.models.memory import CHUNK_ELEMENTS, CHUNKS_IN_FLIGHT

Event = torch.cuda.Event | torch.Event
ALIGNED = 64  # elements: kernels process tensors aligned to this on their fast path, as they would the full tensors


@dataclass(frozen=True)
class StateSlice:
    """A slice of a parameter's state, on the device."""

    name: str
    at: slice
    """Range of the flattened parameter."""
    master: Tensor | None
    """None: the parameter is its own master."""
    exp_avg: Tensor
    exp_avg_sq: Tensor


class HostState:
    """Masters of `followers`, and moments of both `followers` and `others`: names with shapes."""

    def __init__(
        self,
        followers: Mapping[str, torch.Size],
        others: Mapping[str, torch.Size],
        device: torch.device,
        *,
        chunk_elements: int = CHUNK_ELEMENTS,
    ):
        assert chunk_elements % ALIGNED == 0
        self._device = device
        self._shapes = {**followers, **others}
        self._begins: dict[str, int] = {}
        total = self._masters_end = 0
        for name, shape in self._shapes.items():
            self._begins[name] = total
            total += -(-shape.numel() // ALIGNED) * ALIGNED
            if name in followers:
                self._masters_end = total
        self._part = min(chunk_elements, total)
        sizes = [self._masters_end, total, total]
        self._vectors = allocate_host_memory(self, 4 * sum(sizes)).view(torch.float32).split(sizes)
        self._in, self._out = _CopyStream(device), _CopyStream(device)

    def master(self, name: str) -> Tensor:
        return self._of(name, self._vectors[0])

    def moments(self, name: str) -> tuple[Tensor, Tensor]:
        return self._of(name, self._vectors[1]), self._of(name, self._vectors[2])

    def _of(self, name: str, vector: Tensor) -> Tensor:
        shape = self._shapes[name]
        return vector[self._begins[name] :][: shape.numel()].view(shape)

    def settled(self) -> None:
        """Wait until the host state reflects the last step."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def stream_through_device(self, work: Callable[[Sequence[StateSlice]], None]) -> None:
        """Stream all state through the device in chunks; `work` updates each chunk in place."""
        total = len(self._vectors[1])
        parts = [slice(at, min(at + self._part, total)) for at in range(0, total, self._part)]
        kinds = self._vectors if self._masters_end else self._vectors[1:]
        buffers = torch.empty(min(CHUNKS_IN_FLIGHT, len(parts)), len(kinds), self._part, device=self._device)
        left: list[Event | None] = []
        begun = _mark(self._device)  # the first copies wait for earlier users of the buffers' memory
        for i, part in enumerate(parts):
            pairs = [
                (buffer[: len(vector[part])], vector[part]) for buffer, vector in zip(buffers[i % len(buffers)], kinds, strict=True)
            ]
            arrived = self._in.copy(pairs, after=left[i - len(buffers)] if i >= len(buffers) else begun)
            _wait_for(arrived, self._device)
            work(list(self._pieces(part, [buffer for buffer, _ in pairs])))
            left.append(self._out.copy([(there, here) for here, there in pairs], after=_mark(self._device)))
        for event in left[-len(buffers) :]:
            _wait_for(event, self._device)

    def _pieces(self, part: slice, buffers: Sequence[Tensor]) -> Iterator[StateSlice]:
        *masters, exp_avg, exp_avg_sq = buffers
        for name, shape in self._shapes.items():
            begin = self._begins[name]
            first, end = max(begin, part.start), min(begin + shape.numel(), part.stop)
            if first < end:
                here = slice(first - part.start, end - part.start)
                master = masters[0][here] if begin < self._masters_end else None
                yield StateSlice(name, slice(first - begin, end - begin), master, exp_avg[here], exp_avg_sq[here])


class _CopyStream:
    """Copies on a separate stream on a GPU; synchronous on a CPU."""

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]], *, after: Event | None) -> Event | None:
        """Copy (destination, source) pairs; returns an event that marks completion."""
        if self._stream is None:
            for there, here in pairs:
                there.copy_(here)
            return None
        with torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            for there, here in pairs:
                there.copy_(here, non_blocking=True)
            return self._stream.record_event()


def _mark(device: torch.device) -> Event | None:
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def _wait_for(event: Event | None, device: torch.device) -> None:
    if event is not None:
        torch.cuda.current_stream(device).wait_event(event)
