"""How many threads torch computes with on a CPU.

A small model loses by threads: handing a product of small matrices to a second core and waiting for the result takes about as long
as computing it, and much longer if something else runs on that core. So a model up to `SMALL_WIDTH` wide is computed by one thread,
a larger one by all cores that this process may use (torch would count the machine's, whatever a container or a job scheduler
allows). Waiting threads sleep: by default they spin, which takes a core from other work. A forked child computes with one thread:
it has none of its parent's, and OpenMP would wait for them forever.

Sums split among threads are added in another order, so the last bits of results depend on the number of threads: docs/runs.md.
"""

import math
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SMALL_WIDTH = 128
"""Hidden size up to which one thread is used. There a second one costs up to a fifth more CPU time (bench/README.md)."""
USER_SETTINGS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
CGROUP = Path("/sys/fs/cgroup")


def let_threads_sleep() -> None:
    """Waiting threads sleep instead of spinning, unless the user has chosen. OpenMP reads this when torch is imported; later it has
    an effect on processes started from here only."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def usable_cores() -> int:
    """Cores that this process may use: its affinity (where the system has one: not on macOS), within its container's quota."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    quota = _cgroup_quota()
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def _cgroup_quota() -> float | None:
    """The container's limit in cores, from version 2 or 1 of Linux's control groups; None without one."""
    with suppress(OSError, ValueError):
        limit, period = (CGROUP / "cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    with suppress(OSError, ValueError):
        limit, period = (int((CGROUP / f"cpu/cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
        return limit / period if limit > 0 else None
    return None


@dataclass
class _Choice:
    """This process's, for the widest of its models."""

    width: int = 0
    threads: int | None = None
    """None before the first model."""
    torch_default: int = 1
    survives_forks: bool = False
    is_forked: bool = False


_CHOICE = _Choice()


def fit_threads(config: Any, device: Any) -> None:
    """Choose the number of threads before a model with this config is computed on `device`. With several models the widest decides.
    A number set by the user (OMP_NUM_THREADS, torch.set_num_threads) is left as it is."""
    import torch

    _survive_forks()
    if device.type != "cpu" or _user_chose() or _CHOICE.is_forked:
        return
    now = torch.get_num_threads()
    if now != _CHOICE.threads and now not in _torch_defaults():
        return
    if _CHOICE.threads is None:
        _CHOICE.torch_default = now
    _CHOICE.width = max(_CHOICE.width, config.get_text_config().hidden_size)
    _CHOICE.threads = threads_for(_CHOICE.width, min(_CHOICE.torch_default, usable_cores()))
    if _CHOICE.threads != now:
        torch.set_num_threads(_CHOICE.threads)


def _survive_forks() -> None:
    """Children that this process forks from now on compute with one thread."""
    if not _CHOICE.survives_forks and hasattr(os, "register_at_fork"):
        _CHOICE.survives_forks = True
        os.register_at_fork(after_in_child=_use_one_thread)


def _use_one_thread() -> None:
    import torch

    _CHOICE.is_forked = True
    torch.set_num_threads(1)


def share_cores(processes: int) -> None:
    """Let each of several processes of this machine, of which this is one, compute with its share of the cores, unless the user has
    chosen."""
    import torch

    now = max(_torch_defaults()) if _torchrun_chose() else torch.get_num_threads()
    if processes == 1 or _user_chose() or now not in _torch_defaults():
        return
    _CHOICE.threads = _CHOICE.torch_default = max(1, min(now, usable_cores()) // processes)
    torch.set_num_threads(_CHOICE.threads)


def _user_chose() -> bool:
    return any(os.environ.get(name) for name in USER_SETTINGS[_torchrun_chose() :])


def _torchrun_chose() -> bool:
    """torchrun gives each of several processes OMP_NUM_THREADS=1, unless the user has set it."""
    several = "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("LOCAL_WORLD_SIZE", "1") != "1"
    return several and os.environ.get("OMP_NUM_THREADS") == "1"


def threads_for(width: int, cores: int) -> int:
    return 1 if width <= SMALL_WIDTH else cores


def threads_on_cpu(device: str) -> int | None:
    """The number in use, for a `run.device` that means the CPU; None for a GPU."""
    import torch

    return None if device != "cpu" and torch.cuda.is_available() else torch.get_num_threads()


def _torch_defaults() -> set[int]:
    """What torch may have chosen by itself. It depends on the build: physical cores, or all."""
    import psutil

    return {psutil.cpu_count(logical=False) or 1, usable_cores(), os.cpu_count() or 1}
