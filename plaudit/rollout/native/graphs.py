"""CUDA graphs of decode steps: hundreds of small kernels launched as one.

Launched from Python, the kernels of a step take longer to start than to run. A graph holds what a step did for one number of rows;
all that changes from step to step (tokens, positions, tables, where the cache lies) is read from memory that stays where it is.
"""

import warnings
from collections.abc import Callable, Hashable

import torch

from plaudit.rollout.native.cache import next_power_of_2


class Graphs:
    def __init__(self, device: torch.device):
        self.device = device
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool = None
        self._refused = False

    def run(self, key: Hashable, step: Callable[[], None]) -> None:
        """Do the step. The first time as it stands, and it is captured then; on a CPU always."""
        if graph := self._graphs.get(key):
            return graph.replay()
        step()  # really: it counts, and it compiles kernels and makes libraries take the memory they work in
        if self.device.type == "cuda" and not self._refused:
            self._capture(key, step)
        return None

    def _capture(self, key: Hashable, step: Callable[[], None]) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):  # only captured, nothing runs
                step()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # a module that waits for the device, say
            self._refused = True
            reason = " ".join(str(error).split())[:200]
            warnings.warn(f"sampling is slower than it could be: the model's steps make no CUDA graph ({reason})", stacklevel=2)
            return
        self._pool = self._pool or graph.pool()
        self._graphs[key] = graph

    def forget(self) -> None:
        """What they read has moved."""
        self._graphs.clear()
        self._pool = None


def rounded_rows(count: int) -> int:
    """The next of 1, 2, 4, … 32, then in steps of an eighth or so: what a step of more rows costs is less than one more graph."""
    if count <= 32:
        return next_power_of_2(count)
    step = max(16, next_power_of_2(count) // 8)
    return -(-count // step) * step


def rounded_length(longest: int) -> int:
    return max(512, next_power_of_2(longest))
