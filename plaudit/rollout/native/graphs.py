"""CUDA graphs of decode steps: hundreds of small kernels launched as one.

Launched from Python, the kernels of a step take longer to start than to run. A graph holds what a step did for one number of rows;
all that changes from step to step (tokens, positions, tables, where the cache lies) is read from memory that stays where it is.
"""

import threading
import warnings
from collections.abc import Callable, Hashable

import torch

from plaudit.models.heads import next_power_of_2

# Captures share one stream of torch's, and a judge in a thread of its own may come to one while the policy samples.
_CAPTURING = threading.Lock()


class Graphs:
    def __init__(self, device: torch.device, *, trusted: bool):
        """`trusted`: no step waits for the device. Of others it is found out first: a capture that fails breaks the process."""
        self.device, self.trusted = device, trusted
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._run_once: set[Hashable] = set()
        self._pool = None
        self._refused = False

    def run(self, key: Hashable, step: Callable[[], None]) -> None:
        """Do the step: as it stands the first time or two, and it is captured then; on a CPU always."""
        if graph := self._graphs.get(key):
            return graph.replay()
        if self.device.type != "cuda" or self._refused:
            return step()
        if not self.trusted and key not in self._run_once:
            self._run_once.add(key)  # the first time, much may wait that does not do so later
            return step()
        # Really, not only to be captured: the step counts, kernels are compiled, libraries take the memory they work in.
        if self.trusted:
            step()
        elif waits := _what_waits(step):
            self._refused = True
            warnings.warn(f"sampling is slower than it could be: the model waits for the GPU in every step ({waits})", stacklevel=2)
            return None
        graph = torch.cuda.CUDAGraph()
        with _CAPTURING, torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):  # only captured, nothing runs
            step()
        self._pool = self._pool or graph.pool()
        self._graphs[key] = graph
        return None

    def forget(self) -> None:
        """What they read has moved."""
        self._graphs.clear()
        self._run_once.clear()
        self._pool = None


def _what_waits(step: Callable[[], None]) -> str:
    """Do the step; what in it makes the host wait for the device, if anything."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    found = [w for w in caught if "called a synchronizing" in str(w.message)]  # not what torch says of the mode itself
    return f"{found[0].filename}:{found[0].lineno}" if found else ""


def rounded_rows(count: int) -> int:
    """The next of 1, 2, 4, … 32, then in steps of an eighth or so: what a step of more rows costs is less than one more graph."""
    if count <= 32:
        return next_power_of_2(count)
    step = max(16, next_power_of_2(count) // 8)
    return -(-count // step) * step


def rounded_length(longest: int) -> int:
    return max(512, next_power_of_2(longest))
