"""Weights on their way from the trainer into a server's worker: a stream of frames, in layer order.

    frame      length | JSON header | payload
    header     {"tensors": [[name, dtype, shape, offset], …], "bytes": n}; with shared memory also {"buffer": 0 or 1, "handle": …}
    end        {"end": number of tensors}
    answer     one byte for each frame, once its tensors have been taken

Between any two processes, the payload follows the header. If both use the same GPU, it is in one of two buffers on it, which the
trainer fills in turn, so that it fills one while the worker empties the other.

Only the standard library and torch are imported: this file is loaded in the server's environment too, in which plaudit is not.
"""

import hmac
import json
import re
import socket
import struct
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

LENGTH = struct.Struct(">I")
TOKEN_BYTES = 32
TAKEN = b"+"
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
Named = tuple[str, Tensor]
Sums = dict[str, list[float]]


def sums_by_layer(weights: Iterable[Named]) -> Sums:
    """Number of weights, Σw and Σw² of each layer, and of each tensor outside the layers. A server that stores weights side by side
    (queries, keys and values in one) has the same: only the order of additions differs."""
    sums: Sums = {}
    for name, tensor in weights:
        add_sums(sums, name, tensor)
    return sums


def add_sums(sums: Sums, name: str, tensor: Tensor) -> None:
    layer = LAYER.search(name)
    of = sums.setdefault(f"layer {layer[1]}" if layer else name, [0.0, 0.0, 0.0])
    of[0] += tensor.numel()
    for power in (1, 2):
        of[power] += float(tensor.detach().to(torch.float64).pow(power).sum())


# The trainer's side ----------------------------------------------------------------------------------------------------


class WeightSender:
    """Sends weights to each of a server's workers, which connect to it."""

    def __init__(self, token: bytes, *, shared: bool, bucket_bytes: int, timeout_s: float, host: str = "127.0.0.1"):
        """`token`: proves that a worker is ours. `shared`: the workers' GPU is ours. `bucket_bytes`: of a frame, about.
        `timeout_s`: how long a worker may take to connect, and to take a frame."""
        assert len(token) == TOKEN_BYTES
        self._timeout_s = timeout_s
        self._token, self._shared, self._bucket_bytes = token, shared, bucket_bytes
        self._listener = socket.create_server((host, 0))
        self._listener.settimeout(0.2)
        self._workers: list[socket.socket] = []
        self._buffers: list[Tensor | None] = [None, None]
        self._unanswered = 0
        self.address = "{}:{}".format(*self._listener.getsockname()[:2])

    def send(self, weights: Iterable[Named], workers: int, check: Callable[[], None]) -> tuple[int, int]:
        """Numbers of tensors and bytes sent. `check` is called while we wait, and raises to end it. Raises OSError if a worker is
        gone."""
        deadline = time.monotonic() + self._timeout_s
        while len(self._workers) < workers:
            check()
            self._accept()
            _require_time(deadline)
        count = sent = 0
        for frame in _frames(weights, self._bucket_bytes):
            sent += self._send_frame(frame, check)
            count += len(frame)
        for _ in range(self._unanswered):
            self._await_answer(check)
        self._send_header({"end": count})
        return count, sent

    def close(self) -> None:
        for connection in (*self._workers, self._listener):
            connection.close()

    def _accept(self) -> None:
        try:
            worker, _ = self._listener.accept()
        except TimeoutError:
            return
        worker.settimeout(10.0)
        try:
            ours = hmac.compare_digest(_read(worker, TOKEN_BYTES), self._token)
        except OSError:
            ours = False
        if not ours:
            worker.close()
            return
        worker.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        worker.settimeout(self._timeout_s)
        self._workers.append(worker)

    def _send_frame(self, frame: list[Named], check: Callable[[], None]) -> int:
        tensors, size = [], 0
        for name, tensor in frame:
            size += -size % 16
            tensors.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), size])
            size += tensor.nbytes
        header: dict[str, Any] = {"tensors": tensors, "bytes": size}
        if not self._shared:
            payload = torch.empty(size, dtype=torch.uint8)
            _fill(payload, frame, tensors)
            self._send_header(header)
            for worker in self._workers:
                worker.sendall(payload.numpy())  # pyright: ignore[reportArgumentType] (an array is a buffer)
            self._unanswered += 1
            self._await_answer(check)
            return size
        if self._unanswered == 2:
            self._await_answer(check)  # the oldest frame's buffer is free again
        buffers = self._buffers
        buffers.reverse()  # the other one's turn
        if (buffer := buffers[0]) is None or buffer.numel() < size:
            device = frame[0][1].device
            buffer = buffers[0] = torch.empty(max(size, self._bucket_bytes), dtype=torch.uint8, device=device)
            header["handle"] = _handle(buffer)
        _fill(buffer, frame, tensors)
        torch.cuda.synchronize(buffer.device)
        self._send_header(header)
        self._unanswered += 1
        return size

    def _send_header(self, header: dict[str, Any]) -> None:
        encoded = json.dumps(header).encode()
        for worker in self._workers:
            worker.sendall(LENGTH.pack(len(encoded)) + encoded)

    def _await_answer(self, check: Callable[[], None]) -> None:
        """That of the oldest frame, from every worker."""
        deadline = time.monotonic() + self._timeout_s
        for worker in self._workers:
            worker.settimeout(0.2)
            while True:
                try:
                    answer = worker.recv(1)
                    break
                except TimeoutError:
                    check()
                    _require_time(deadline)
            worker.settimeout(self._timeout_s)
            if answer != TAKEN:
                raise ConnectionResetError("the server's worker closed its connection")
        self._unanswered -= 1


def _require_time(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError("the server's worker takes no weights")


def _frames(weights: Iterable[Named], bucket_bytes: int) -> Iterator[list[Named]]:
    """Tensors of about `bucket_bytes` together. A weight may only be used until the next one is taken, so it is copied."""
    frame: list[Named] = []
    size = 0
    for name, tensor in weights:
        if frame and size + tensor.nbytes > bucket_bytes:
            yield frame
            frame, size = [], 0
        frame.append((name, tensor.detach().clone()))
        size += tensor.nbytes
    if frame:
        yield frame


def _fill(buffer: Tensor, frame: list[Named], tensors: list[list[Any]]) -> None:
    for (_, tensor), (_, _, _, offset) in zip(frame, tensors, strict=True):
        part = buffer[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        part.copy_(tensor)


def _handle(buffer: Tensor) -> list[Any]:
    """By which another process opens this memory of the GPU."""
    parts = buffer.untyped_storage()._share_cuda_()
    return [b64encode(part).decode() if isinstance(part, bytes) else part for part in parts]


# The worker's side -----------------------------------------------------------------------------------------------------


def receive(address: str, token: str, device: torch.device) -> Iterator[Named]:
    """The weights that are sent from `address`. Raises ConnectionError if the sender is gone before the last one."""
    host, _, port = address.rpartition(":")
    buffers: list[Tensor | None] = [None, None]
    with socket.create_connection((host, int(port)), timeout=600.0) as sender:
        sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sender.sendall(bytes.fromhex(token))
        count, shared = 0, False
        while True:
            [length] = LENGTH.unpack(_read(sender, LENGTH.size))
            header = json.loads(_read(sender, length))
            if "end" in header:
                if header["end"] != count:
                    raise ConnectionError(f"{count} of {header['end']} weights arrived")
                return
            if "handle" in header:
                shared = True
                buffers[1] = _open(header["handle"], device)
            if shared:
                buffers.reverse()
                payload = buffers[0]
                assert payload is not None
            else:
                payload = torch.frombuffer(_read(sender, header["bytes"]), dtype=torch.uint8)
            for name, dtype, shape, offset in header["tensors"]:
                kind = getattr(torch, dtype)
                size = torch.Size(shape).numel() * kind.itemsize
                tensor = payload[offset : offset + size].view(kind).view(shape)
                # A server may keep what it is given until a layer is complete; the trainer reuses its buffer before that.
                yield name, tensor.clone() if shared else tensor.to(device)
                count += 1
            if shared:
                torch.cuda.synchronize(device)
            sender.sendall(TAKEN)


def _open(handle: list[Any], device: torch.device) -> Tensor:
    parts = [b64decode(part) if isinstance(part, str) else part for part in handle]
    parts[0] = device.index or 0  # the same GPU may have another number here
    storage = torch.UntypedStorage._new_shared_cuda(*parts)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _read(connection: socket.socket, count: int) -> bytearray:
    """Exactly this many bytes."""
    content = bytearray(count)
    left = memoryview(content)
    while left:
        read = connection.recv_into(left)
        if not read:
            raise ConnectionResetError("the connection was closed")
        left = left[read:]
    return content
