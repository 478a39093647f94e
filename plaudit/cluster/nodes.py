"""Which machine runs which ranks, what it has, and what ranks are given there. Imports neither Ray nor torch."""

import json
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from plaudit.cluster.ranks import TORCHRUN, RankInfo, WorkerInfo
from plaudit.errors import RecipeError
from plaudit.recipe import TrainingRecipe

RAY_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Ray sets it for what `ray job submit` runs."""
PRIVATE = (*TORCHRUN, "CUDA_VISIBLE_DEVICES", "HOSTNAME", "TMPDIR", "DISPLAY")
PRIVATE_BEGINNINGS = ("RAY_", "SLURM_", "SSH_", "XDG_")
"""Of variables that mean this machine, or this process."""
CONNECT_S = 3.0
"""How long a machine may take to accept a connection."""


@dataclass(frozen=True)
class Node:
    """A machine of the cluster, and how many of the resource in question it has: GPUs, or CPUs."""

    id: str
    address: str
    total: int
    free: int
    port: int = 0
    """Of its Ray processes."""


@dataclass(frozen=True)
class RankPlace:
    node: Node
    ranks: RankInfo


@dataclass(frozen=True)
class WorkerPlace:
    node: Node
    ranks: WorkerInfo


def assign_ranks(nodes: Iterable[Node], per_node: int, first: str) -> list[RankPlace]:
    """Rank = position of the node · per_node + position on the node. The node with the id `first`, where the command runs, comes
    first; the others by their addresses, so that a run that is started again has the same ranks on the same machines."""
    ordered = sorted(nodes, key=lambda node: (node.id != first, _sortable(node.address), node.id))
    size = len(ordered) * per_node
    return [
        RankPlace(node, RankInfo(i * per_node + local, size, local, per_node, ordered[0].address, 0))
        for i, node in enumerate(ordered)
        for local in range(per_node)
    ]


def _sortable(address: str) -> str:
    """10.0.0.9 comes before 10.0.0.10."""
    return ".".join(part.zfill(3) for part in address.split("."))


def processes_per_node(recipe: TrainingRecipe, nodes: Sequence[Node], resource: str) -> int:
    """`cluster.gpus`; all: as many as the machines have, provided that there are enough with the same number."""
    wanted = recipe.cluster.gpus
    if wanted != "all":
        return wanted
    if resource == "CPU":
        return 1
    counts = {node.total for node in nodes if node.total}
    if len(counts) > 1:
        raise RecipeError(f"cluster.gpus is all, but machines have different numbers. Give one: {describe_nodes(nodes, resource)}")
    return max(counts, default=1)


def answers(node: Node) -> bool:
    """Whether its Ray processes do. Ray itself notices much later that a machine is gone."""
    try:
        socket.create_connection((node.address, node.port), CONNECT_S).close()
    except OSError:
        return False
    return True


def suffices(nodes: Iterable[Node], count: int, per_node: int) -> bool:
    return sum(node.free >= per_node for node in nodes) >= count


def describe_nodes(nodes: Sequence[Node], resource: str) -> str:
    """`10.0.0.1: 8 GPUs (2 free), 10.0.0.2: 8 GPUs (8 free)`"""
    return ", ".join(f"{node.address}: {counted(node.total, resource)} ({node.free} free)" for node in nodes) or "no machines"


def describe_need(count: int, per_node: int, resource: str) -> str:
    return f"{counted(count, 'machine')} with {counted(per_node, resource)} free" + (" each" if count > 1 else "")


def counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


# Processes -----------------------------------------------------------------------------------------------------------


def rank_environment(there: Mapping[str, str], command: Mapping[str, str], interface: str | None, leader: str) -> dict[str, str]:
    """Of a rank on another machine: what that has, replaced by the command's own variables, as srun would do it, except those that
    mean a machine. `interface`: the network that leads to the others. `leader`: the address of rank 0's machine."""
    kept = {name: value for name, value in there.items() if name not in (*TORCHRUN, "OMP_NUM_THREADS")}  # Ray sets the latter
    passed = {name: value for name, value in command.items() if name not in PRIVATE and not name.startswith(PRIVATE_BEGINNINGS)}
    if RAY_JOB in command and command.get("OMP_NUM_THREADS") == "1":
        passed.pop("OMP_NUM_THREADS")  # as Ray sets it for the commands of its jobs
    environment = kept | passed | {"MASTER_ADDR": leader}
    if interface is not None:
        environment.setdefault("GLOO_SOCKET_IFNAME", interface)
        environment.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # =: exactly this one
    return environment


def interface_of(address: str) -> str | None:
    """The network interface of this machine with this address."""
    return next((name for name, own in psutil.net_if_addrs().items() if any(one.address == address for one in own)), None)


# Ray jobs ------------------------------------------------------------------------------------------------------------


def runs_in_copy(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether `ray job submit` runs this command, in a copy of `--working-dir`."""
    try:
        settings = json.loads(environment.get(RAY_JOB, "{}"))
    except ValueError:
        return False
    return bool(settings.get("runtime_env", {}).get("working_dir"))


def require_lasting_folder(recipe: TrainingRecipe, environment: Mapping[str, str] = os.environ) -> None:
    """Refuse a run folder that would be deleted with the copy of a job's files."""
    folder = Path(recipe.run.dir)
    if runs_in_copy(environment) and folder.resolve().is_relative_to(Path.cwd()):
        raise RecipeError(
            f"run.dir is {folder}, within the copy of --working-dir that Ray deletes after the job, and every machine has its own. "
            f"Give a folder on a disk that all machines share: run.dir=/shared/{folder.name}"
        )
