"""An optimiser's state in files: safetensors, in files of a few gigabytes, read by as much as is needed of each tensor."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

FILE_BYTES = 4 << 30
"""Size of a file of optimiser state: one file's tensors pass through main memory at a time."""


@dataclass(frozen=True)
class SavedTensor:
    key: str
    elements: int
    read: Callable[[int, int], Tensor]
    """Reads a range of the tensor's elements, flat."""


def save_tensors(tensors: Mapping[str, Tensor], folder: Path, prefix: str = "") -> list[Path]:
    """Returns the files; none without tensors: a process that has none must not replace the file of one that has."""
    files = []
    for number, chunk in enumerate(_chunks(tensors, FILE_BYTES)):
        files.append(folder / f"{prefix}{number:05d}.safetensors")
        save_file({name: t.contiguous() for name, t in chunk.items()}, files[-1])
    return files


def saved_tensors(folder: Path) -> Iterator[SavedTensor]:
    """Of all files in the folder."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118 (it is no dict)
                yield _saved_tensor(opened, key)


def given_tensors(tensors: Mapping[str, Tensor]) -> Iterator[SavedTensor]:
    """Of tensors in memory."""
    for key, tensor in tensors.items():
        flat = tensor.reshape(-1)
        yield SavedTensor(key, flat.numel(), lambda begin, end, flat=flat: flat[begin:end])


def _saved_tensor(opened: "safe_open", key: str) -> SavedTensor:
    saved = opened.get_slice(key)
    shape = list(saved.get_shape())
    if not shape:
        return SavedTensor(key, 1, lambda begin, end: opened.get_tensor(key).view(1)[begin:end])
    row = 1
    for length in shape[1:]:
        row *= length

    def read(begin: int, end: int) -> Tensor:
        """Only the rows that it touches."""
        first, last = begin // row, -(-end // row)
        return saved[first:last].reshape(-1)[begin - first * row : end - first * row]

    return SavedTensor(key, shape[0] * row, read)


def _chunks(tensors: Mapping[str, Tensor], limit: int) -> Iterator[dict[str, Tensor]]:
    """The tensors in order, as many at a time as stay within the limit (or one larger than it)."""
    chunk: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        tensor_bytes = tensor.numel() * tensor.element_size()
        if chunk and size + tensor_bytes > limit:
            yield chunk
            chunk, size = {}, 0
        chunk[name] = tensor
        size += tensor_bytes
    if chunk:
        yield chunk
