"""A process joins the others: its device, the process group, its share of the machine's cores."""

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, rendezvous  # pyright: ignore[reportPrivateImportUsage]

from plaudit.cluster.ranks import RankInfo
from plaudit.errors import PlauditError, ProcessFailed
from plaudit.models.devices import resolve_device
from plaudit.recipe import TrainingRecipe
from plaudit.report.progress import follow, print_line
from plaudit.threads import share_cores
from plaudit.types import RewardWorkers
from plaudit.world import Heartbeat, World

UNLIMITED = timedelta(days=30)
"""For collectives of processes that are watched: one that waits is right to wait for as long as the others make progress."""
REPEATABLE_NCCL = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}
"""Otherwise NCCL chooses by size and topology in which order it adds."""


@contextmanager
def join(
    ranks: RankInfo,
    recipe: TrainingRecipe,
    *,
    store: Store | None = None,
    heartbeat: Heartbeat | None = None,
    reward_workers: RewardWorkers | None = None,
) -> Iterator[World]:
    """The world of this process, one of `ranks`, until the block ends. `store`: where the processes find each other (default: at
    the address and port of `ranks`). `heartbeat`: given if the process is watched; otherwise collectives have the time limit."""
    if ranks.rank > 0:
        _leave_the_terminal(ranks)
    if ranks.launcher != "srun":  # which gives every task cores of its own
        share_cores(ranks.local_size)
    device = resolve_device(recipe.run.device)
    if device.type == "cuda":
        device = torch.device("cuda", ranks.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if recipe.run.deterministic:
        for name, value in REPEATABLE_NCCL.items():
            os.environ.setdefault(name, value)
    timeout = timedelta(seconds=recipe.cluster.timeout_s)
    if heartbeat is not None:
        heartbeat.beat("the other processes to start", waiting=True)
        timeout = UNLIMITED
    store = store or _store(ranks, timeout)
    store.set_timeout(timeout)
    backend = "gloo" if device.type == "cpu" else _gpu_backend(ranks, device, store)
    dist.init_process_group(
        backend,
        store=PrefixStore("plaudit", store),
        rank=ranks.rank,
        world_size=ranks.size,
        timeout=timeout,
        device_id=device if "nccl" in backend else None,
    )
    try:
        world = World.joined(device, heartbeat, timeout, ranks.local_size, reward_workers)
        world.heartbeat.begin_phase("loading")
        yield world
        world.wait("the end of the run")  # or the others would lose rank 0's store while they leave
    except PlauditError as error:
        _leave_at_once(backend)
        if heartbeat is None and ranks.rank > 0:  # rank 0 prints the same without a rank
            raise type(error)(f"rank {ranks.rank}: {error}") from None
        raise
    except BaseException:
        _leave_at_once(backend)
        raise
    dist.destroy_process_group()


def _store(ranks: RankInfo, timeout: timedelta) -> Store:
    """torchrun may have started the store already, in its own process: torch knows."""
    os.environ |= {
        "RANK": str(ranks.rank), "WORLD_SIZE": str(ranks.size), "MASTER_ADDR": ranks.address, "MASTER_PORT": str(ranks.port)
    }  # fmt: skip
    try:
        store, _, _ = next(rendezvous("env://", ranks.rank, ranks.size, timeout=timeout))
    except (dist.DistError, OSError) as error:
        raise ProcessFailed(
            f"rank {ranks.rank} of {ranks.size} did not find the others at {ranks.address}:{ranks.port} within "
            f"{timeout.total_seconds():g} s (cluster.timeout_s): {error}"
        ) from None
    return store


def _gpu_backend(ranks: RankInfo, device: torch.device, store: Store) -> str:
    """NCCL, unless processes share a GPU, which it refuses. Launchers may show every process only its own GPU, so that indices say
    nothing."""
    own = f"{socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}"
    store.set(f"gpu/{ranks.rank}", own)
    gpus = [store.get(f"gpu/{rank}").decode() for rank in range(ranks.size)]
    if len(set(gpus)) == ranks.size:
        return "cpu:gloo,cuda:nccl"
    print_line(f"{ranks.size} processes share {len(set(gpus))} GPU(s): they exchange data through gloo, which is slow", "yellow")
    return "gloo"


def _leave_the_terminal(ranks: RankInfo) -> None:
    """Rank 0 has it. Errors and this process's own warnings still reach it, with the rank. plaudit's launcher adds that itself, and
    writes what is printed into the rank's log."""
    if ranks.launcher == "plaudit":
        follow("")
        return
    follow(f"rank {ranks.rank}: ")
    sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (for the rest of the process)


def _leave_at_once(backend: str) -> None:
    """An orderly end of NCCL waits for collectives in flight, and so for peers that may be gone."""
    if "nccl" in backend:
        dist.distributed_c10d._abort_process_group()  # pyright: ignore[reportPrivateUsage]
    else:
        dist.destroy_process_group()
