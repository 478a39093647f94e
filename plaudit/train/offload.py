"""An optimiser's fp32 state in the host's memory, and a step that brings it through the device part by part.

    host → device    masters and moments of part k + 1        a stream of its own
    device           AdamW on part k, with the gradients, which are there; the model's weights from the masters
    device → host    masters and moments of part k − 1        another one

All state lies end to end in one vector of each kind, so a part is one copy of each, whatever tensors it cuts through: AdamW knows
no neighbours. The arithmetic is the device's, element by element that of a step without offload. Memory on the device is that of
CHUNKS_IN_FLIGHT parts, and only while a step is made.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plaudit.models.memory import CHUNK_ELEMENTS, CHUNKS_IN_FLIGHT
from plaudit.models.weights import allocate_host_memory

Event = torch.cuda.Event | torch.Event
ALIGNED = 64  # elements: kernels take tensors that begin there in their fast way, as they would take the whole ones


@dataclass(frozen=True)
class StateSlice:
    """A stretch of a parameter, on the device."""

    name: str
    at: slice
    """Of the parameter's elements, in a row."""
    master: Tensor | None
    """None: the parameter is its own."""
    exp_avg: Tensor
    exp_avg_sq: Tensor


class HostState:
    """Masters of `followers`, and moments of these and of `others`: names with shapes."""

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
        self._vectors = allocate_host_memory(self, 4 * sum(sizes)).view(torch.float32).zero_().split(sizes)
        self._in, self._out = _CopyStream(device), _CopyStream(device)

    def master(self, name: str) -> Tensor:
        return self._of(name, self._vectors[0])

    def moments(self, name: str) -> tuple[Tensor, Tensor]:
        return self._of(name, self._vectors[1]), self._of(name, self._vectors[2])

    def _of(self, name: str, vector: Tensor) -> Tensor:
        shape = self._shapes[name]
        return vector[self._begins[name] :][: shape.numel()].view(shape)

    def settled(self) -> None:
        """What is read from here on is the last step's."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def stream_through_device(self, work: Callable[[Sequence[StateSlice]], None]) -> None:
        """All of it, part by part: `work` changes in place what it is given."""
        total = len(self._vectors[1])
        parts = [slice(at, min(at + self._part, total)) for at in range(0, total, self._part)]
        kinds = self._vectors if self._masters_end else self._vectors[1:]
        buffers = torch.empty(min(CHUNKS_IN_FLIGHT, len(parts)), len(kinds), self._part, device=self._device)
        left: list[Event | None] = []
        begun = _mark(self._device)  # whoever had the buffers' memory before has done with it
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
    """Copies in a stream of their own on a GPU; on a CPU, at once."""

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]], *, after: Event | None) -> Event | None:
        """(to, from); returns when they are done."""
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
