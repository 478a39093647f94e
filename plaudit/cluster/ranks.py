"""Which process of how many this is, as its launcher says: torchrun, or SLURM's srun. Imports no torch.

plaudit's own launcher (`launch.py`) gives its processes their rank directly.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from plaudit.errors import RecipeError
from plaudit.recipe import TrainingRecipe

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SLURM_PORTS = range(15_000, 30_000)
"""Below the ports that Linux and macOS give to programs that ask for any."""


@dataclass(frozen=True)
class RankInfo:
    """One process among those that train together."""

    rank: int
    size: int
    local_rank: int
    """Among the processes of this machine."""
    local_size: int
    address: str
    """Of the machine where rank 0 runs."""
    port: int
    """Where rank 0 listens; 0: wherever it finds a free one."""
    launcher: Literal["plaudit", "torchrun", "srun"] = "plaudit"

    def __post_init__(self) -> None:
        for rank, size, names in (
            (self.rank, self.size, ("RANK", "WORLD_SIZE")),
            (self.local_rank, self.local_size, ("LOCAL_RANK", "LOCAL_WORLD_SIZE")),
        ):
            if not 0 <= rank < size:
                raise RecipeError(
                    f"the environment says rank {rank} of {size} processes ({' and '.join(names)}); ranks are 0 to {size - 1}. "
                    "Start with torchrun or srun, which set them, or unset them to train with one process."
                )


@dataclass(frozen=True)
class WorkerInfo:
    """A process alongside those that train, with a reward model."""

    rank: int
    """Workers come after the processes that train."""
    size: int
    """How many train."""
    address: str
    """Of the machine where rank 0 runs."""
    host: str
    """The address of its own machine."""


def ranks_from_environment(environment: Mapping[str, str] = os.environ) -> RankInfo | None:
    """What torchrun or srun has set; None if neither started this process."""
    if "RANK" in environment or "WORLD_SIZE" in environment:
        return _from_torchrun(environment)
    # A batch script, too, has SLURM_PROCID and SLURM_NTASKS, though it is one process; only srun's tasks belong to a step.
    if "SLURM_PROCID" in environment and "SLURM_STEP_ID" in environment:
        return _from_srun(environment)
    return None


def _from_torchrun(environment: Mapping[str, str]) -> RankInfo:
    given = dict(environment)
    if (missing := [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in given]) and (
        given.get("WORLD_SIZE") != "1" or "RANK" not in given
    ):
        present = [name for name in TORCHRUN if name in given]
        raise RecipeError(
            f"the environment has {', '.join(present)} but not {', '.join(missing)}. Start with torchrun, which sets all of them, "
            f"or unset {' and '.join(present)} to train with one process."
        )
    rank, size = _number(given, "RANK"), _number(given, "WORLD_SIZE")
    return RankInfo(
        rank,
        size,
        _number(given, "LOCAL_RANK", rank),
        _number(given, "LOCAL_WORLD_SIZE", size),
        given.get("MASTER_ADDR", "127.0.0.1"),
        _number(given, "MASTER_PORT", 0),
        "torchrun",
    )


def _from_srun(environment: Mapping[str, str]) -> RankInfo | None:
    counted = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
    size = _number(environment, counted)
    if size == 1:  # such as a shell within an allocation: cluster.gpus decides
        return None
    per_node = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE") or str(size)
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    if not nodes and "MASTER_ADDR" not in environment:
        raise RecipeError("SLURM_PROCID is set but SLURM_NODELIST is not: start with srun, which sets both, or set MASTER_ADDR.")
    job, step = (_number(environment, name, 0) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return RankInfo(
        _number(environment, "SLURM_PROCID"),
        size,
        _number(environment, "SLURM_LOCALID"),
        tasks_per_node(per_node)[_number(environment, "SLURM_NODEID", 0)],
        environment.get("MASTER_ADDR") or first_host(nodes or ""),
        _number(environment, "MASTER_PORT", SLURM_PORTS[(job * 31 + step) % len(SLURM_PORTS)]),
        "srun",
    )


def first_host(nodes: str) -> str:
    """The first of SLURM's list of machines: `node[03-05,9],gpu1` is node03."""
    first = re.split(r",(?![^\[]*\])", nodes)[0]
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first)


def tasks_per_node(text: str) -> list[int]:
    """SLURM's counts: `4(x2),1` is [4, 4, 1]."""
    counts = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    return counts


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        what = "is missing from the environment" if text is None else f"is {text!r}, which is not a number"
        raise RecipeError(f"{name} {what}; torchrun and srun set it") from None


# The recipe ----------------------------------------------------------------------------------------------------------


def launched_ranks(recipe: TrainingRecipe, environment: Mapping[str, str] = os.environ) -> RankInfo | None:
    """What this process is among those that torchrun or srun has started; None if there are none, so that `cluster.gpus` decides.

    Some containers set RANK=0 and WORLD_SIZE=1 though nothing was launched: no reason not to start several processes.
    """
    ranks = ranks_from_environment(environment)
    if ranks is None or (ranks.size == 1 and recipe.cluster.gpus != 1 and "TORCHELASTIC_RUN_ID" not in environment):
        return None
    _require_agreement(recipe, ranks)
    return ranks


def _require_agreement(recipe: TrainingRecipe, ranks: RankInfo) -> None:
    """Refuse a recipe that asks for another number of processes than were started. (1, the default, asks for none.)"""
    gpus = recipe.cluster.gpus
    if gpus not in (1, "all", ranks.size, ranks.local_size):
        count = "process" if ranks.size == 1 else "processes"
        raise RecipeError(
            f"cluster.gpus is {gpus}, but {ranks.launcher} has started {ranks.size} {count}. Leave cluster.gpus out, or start "
            f"{gpus} of them. If nothing was launched, unset RANK and WORLD_SIZE, which this shell has."
        )


def process_count(recipe: TrainingRecipe, gpus: int) -> int:
    """How many processes to start on this machine with this number of GPUs. On a CPU, any number may share it."""
    wanted = recipe.cluster.gpus
    if recipe.run.device == "cpu" or (recipe.run.device == "auto" and not gpus):
        return 1 if wanted == "all" else wanted
    if wanted == "all":
        return max(1, gpus)
    if gpus and wanted > gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        limited = "" if visible is None else f" (CUDA_VISIBLE_DEVICES is {visible})"
        here = "1 GPU" if gpus == 1 else f"{gpus} GPUs"
        raise RecipeError(f"cluster.gpus is {wanted}, but torch sees {here} here{limited}. Set cluster.gpus={gpus}, or all.")
    return wanted
