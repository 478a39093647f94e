"""Several processes on this machine, started, watched and stopped together. Imports no torch."""

import os
import pickle
import signal
import sys
from collections.abc import Iterable, Sequence
from typing import Self

from plaudit.cluster.group import WatchedGroup
from plaudit.cluster.process import MachineRanks, RankEvent, RankStart
from plaudit.cluster.rank import RankJob
from plaudit.cluster.ranks import TORCHRUN, RankInfo
from plaudit.cluster.reward_worker import WorkerPlan
from plaudit.recipe import TrainingRecipe
from plaudit.report.progress import console

LOOPBACK_INTERFACE = {"linux": "lo", "darwin": "lo0"}


def rank_group(job: RankJob, count: int, recipe: TrainingRecipe, workers: Sequence[WorkerPlan] = ()) -> WatchedGroup:
    """On this machine, or on several, where reward workers may be placed alongside the ranks."""
    if recipe.cluster.nodes == 1:
        return RankGroup(job, count, recipe)

    from plaudit.cluster.ray_group import RayRankGroup

    return RayRankGroup(job, recipe, workers)


class RankGroup(WatchedGroup):
    """On this machine. Rank 0 has the terminal."""

    def __init__(self, job: RankJob, count: int, recipe: TrainingRecipe):
        super().__init__(recipe)
        self._job, self._count = job, count

    def __enter__(self) -> Self:
        job, environment = pickle.dumps(self._job), _environment()
        self._ranks = MachineRanks()
        try:
            for i in range(self._count):
                ranks = RankInfo(i, self._count, i, self._count, "127.0.0.1", 0)
                self._ranks.start(
                    RankStart(ranks, job, self._recipe, sys.argv, console.quiet, environment, sys.path, has_terminal=i == 0)
                )
        except BaseException:
            self.__exit__()
            raise
        self._watch_ranks(self._count)
        return self

    def _end(self) -> list[str]:
        return self._ranks.close()

    def _listen(self, wait_s: float) -> Iterable[RankEvent]:
        return self._ranks.listen(wait_s)

    def _signal(self, number: signal.Signals) -> None:
        self._ranks.signal(number)

    def _send_port(self, port: int) -> None:
        self._ranks.send_port(port)

    def _request_stacks(self, ranks: set[int]) -> None:
        self._ranks.request_stacks(ranks)

    def _where(self, ranks: set[int]) -> dict[int, str]:
        return self._ranks.where(ranks)


def _environment() -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name not in TORCHRUN}  # a container's, if any
    if sys.platform in LOOPBACK_INTERFACE:  # or gloo looks up the host's name, which may lead anywhere
        environment.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK_INTERFACE[sys.platform])
    return environment
