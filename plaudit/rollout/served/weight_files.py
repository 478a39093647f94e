"""Weights on their way to a server as safetensors files."""

import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from plaudit.rollout.served.worker.plaudit_weight_stream import Named


@contextmanager
def weight_files(folder: Path, weights: Iterable[Named]) -> Iterator[tuple[int, int]]:
    """Numbers of tensors and bytes in the folder, which is there until the end of the block."""
    from safetensors.torch import save_file

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        count = size = 0
        for count, (name, tensor) in enumerate(weights, 1):
            size += tensor.nbytes
            save_file({name: tensor.detach().cpu().contiguous()}, folder / f"{count:06d}.safetensors")
        yield count, size
    finally:
        shutil.rmtree(folder, ignore_errors=True)
