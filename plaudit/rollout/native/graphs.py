"""CUDA graphs of decode steps: hundreds of small kernels launched as one.

Launched from Python, the kernels of a step take longer to start than to run. A graph holds a step for one number of rows;
everything that changes from step to step (tokens, positions, block tables, the cache's address) is read from fixed memory.
"""

import threading
import warnings
from collections.abc import Callable, Hashable

import torch

from plaudit.models.heads import next_power_of_2

# Captures share one torch stream, and a judge in another thread may capture while the policy samples.
_CAPTURE_LOCK = threading.Lock()


class DecodeGraphs:
    def __init__(self, device: torch.device, *, never_syncs: bool):
        """`never_syncs`: no step waits for the device. Otherwise that is checked first: a failed capture breaks the process."""
        self.device, self.never_syncs = device, never_syncs
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._run_once: set[Hashable] = set()
        self._pool = None
        self._disabled = False

    def run(self, key: Hashable, step: Callable[[], None]) -> None:
        """Run the step: directly the first time or two, when it is captured, then by replaying its graph. On a CPU, directly."""
        if graph := self._graphs.get(key):
            return graph.replay()
        if self.device.type != "cuda" or self._disabled:
            return step()
        if not self.never_syncs and key not in self._run_once:
            self._run_once.add(key)  # a first run may synchronise where later ones do not
            return step()
        # An actual run before the capture: its results count, kernels are compiled and libraries allocate their workspaces.
        if self.never_syncs:
            step()
        elif sync := _find_sync(step):
            self._disabled = True
            warnings.warn(f"sampling is slower than it could be: the model waits for the GPU in every step ({sync})", stacklevel=2)
            return None
        graph = torch.cuda.CUDAGraph()
        # Returns what torch has cached, which a capture cannot use, to the driver; then records, and runs nothing.
        with _CAPTURE_LOCK, torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            step()
        self._pool = self._pool or graph.pool()
        self._graphs[key] = graph
        return None

    def clear(self) -> None:
        """Drop all graphs, because memory that they read has moved."""
        self._graphs.clear()
        self._run_once.clear()
        self._pool = None


def _find_sync(step: Callable[[], None]) -> str:
    """Run the step. Returns the place (file:line) where it makes the host wait for the device, or an empty string."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    syncs = [w for w in caught if "called a synchronizing" in str(w.message)]  # not the warning about the debug mode itself
    return f"{syncs[0].filename}:{syncs[0].lineno}" if syncs else ""


def rounded_rows(count: int) -> int:
    """Rounded up to 1, 2, 4, … 32, then in steps of about an eighth: a few idle rows cost less than one more graph."""
    if count <= 32:
        return next_power_of_2(count)
    step = max(16, next_power_of_2(count) // 8)
    return -(-count // step) * step


def rounded_length(longest: int) -> int:
    return max(512, next_power_of_2(longest))
