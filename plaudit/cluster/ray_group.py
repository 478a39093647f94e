"""The ranks of a run on the machines of a Ray cluster, watched from here. Ray places and connects; it computes nothing.

this process ── calls ──▶ RankActor on a machine ── stdin, signals ──▶ rank
             ◀── events ─                        ◀── pipes ─────────
"""

import contextlib
import os
import pickle
import secrets
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any, Self

from plaudit import __version__
from plaudit.cluster.group import GRACE_S, LOOK_EVERY_S, STOP_SIGNALS, WatchedGroup
from plaudit.cluster.nodes import (
    Node,
    RankPlace,
    WorkerPlace,
    answers,
    assign_ranks,
    counted,
    describe_need,
    describe_nodes,
    runs_in_copy,
)
from plaudit.cluster.process import KILLED_S, RankEvent, RankStart
from plaudit.cluster.rank import RankJob
from plaudit.cluster.ranks import WorkerInfo
from plaudit.cluster.ray_actor import actor_class
from plaudit.cluster.ray_connection import connect, live_nodes, resource_of, wait_for_nodes
from plaudit.cluster.reward_worker import WorkerPlan
from plaudit.errors import PlauditError, ProcessFailed
from plaudit.recipe import TrainingRecipe
from plaudit.report.progress import console
from plaudit.types import TOKEN_BYTES, RewardWorkers

LISTEN_S = 1.0
"""How long an actor waits for something to relay."""
PLACE_S = 30.0
"""How long Ray may take to reserve what is free, if `cluster.timeout_s` is not less."""
ACTOR_S = 120.0
"""How long all actors may take to start, which import plaudit from a shared disk."""
SIGNAL_S = 1.0
"""How long an actor may take to pass on a signal, or to read a stack."""
CULPRIT_S = 30.0
"""Ray takes this long to notice that a machine is gone, while its ranks' peers lose their connections at once."""


class RayRankGroup(WatchedGroup):
    def __init__(self, job: RankJob, recipe: TrainingRecipe, workers: Sequence[WorkerPlan] = ()):
        super().__init__(recipe)
        self._job, self._workers = job, workers
        self._actors: dict[int, Any] = {}
        """Of the ranks, then of the reward workers."""
        self._places: list[RankPlace] = []
        self._worker_places: list[WorkerPlace] = []
        self._pending: dict[Any, int] = {}
        """Calls of `listen` that have not returned, and their ranks."""
        self._lost: set[int] = set()
        self._placements: list[Any] = []

    def __enter__(self) -> Self:
        connect(self._recipe)
        try:
            resource, per_node = wait_for_nodes(self._recipe)
            self._places = assign_ranks(self._reserve(resource, per_node), per_node, self._own_node())
            self._watch_ranks(len(self._places), CULPRIT_S, [worker.model for worker in self._workers])
            if self._workers:
                self._worker_places = self._reserve_workers(resource)
            self._start_ranks(resource, self._start_workers(resource))
        except BaseException:
            self.__exit__()
            raise
        return self

    def _end(self) -> list[str]:
        import ray
        from ray.exceptions import RayError
        from ray.util import remove_placement_group

        self._stop_workers()
        closing = {rank: actor.close.remote() for rank, actor in self._actors.items() if rank not in self._lost}
        self._await(list(closing.values()), KILLED_S + GRACE_S)
        stuck = []
        for rank, call in closing.items():
            with contextlib.suppress(RayError):  # an actor that is gone has left nothing
                stuck += [f"{name} on {self._place(rank).node.address}" for name in ray.get(call, timeout=0.0)]
        while self._actors:
            with contextlib.suppress(RayError):
                ray.kill(self._actors.popitem()[1])
        while self._placements:
            with contextlib.suppress(RayError):
                remove_placement_group(self._placements.pop())
        return stuck

    def _stop_workers(self) -> None:
        """They end their models' servers in good order; ranks that could need them are gone, or are about to be."""
        workers = [rank for rank in self._actors if rank >= len(self._places) and rank not in self._lost]
        self._await([self._actors[rank].signal.remote(int(signal.SIGTERM)) for rank in workers], SIGNAL_S)
        deadline = time.monotonic() + GRACE_S
        while any(self._watch.ranks[rank].exit_code is None for rank in workers) and (left := deadline - time.monotonic()) > 0:
            self._look(min(left, LOOK_EVERY_S))

    def _place(self, rank: int) -> RankPlace | WorkerPlace:
        return [*self._places, *self._worker_places][rank]

    @staticmethod
    def _await(calls: list[Any], within_s: float) -> None:
        """Until all calls have returned, or failed."""
        import ray

        if calls:
            ray.wait(calls, num_returns=len(calls), timeout=within_s)

    # Starting

    @staticmethod
    def _own_node() -> str:
        import ray

        return ray.get_runtime_context().get_node_id()

    def _reserve(self, resource: str, per_node: int) -> list[Node]:
        """`per_node` of each of `cluster.nodes` machines. STRICT_SPREAD: never two parts on one machine."""
        count = self._recipe.cluster.nodes
        need = describe_need(count, per_node, resource)
        self._bundles = {node: i for i, node in self._reserved([{resource: per_node}] * count, "STRICT_SPREAD", need).items()}
        nodes = [node for node in live_nodes(resource) if node.id in self._bundles]
        if len(nodes) < count:
            raise ProcessFailed(f"{count - len(nodes)} of the {count} machines that Ray had reserved are gone.")
        return nodes

    def _reserve_workers(self, resource: str) -> list[WorkerPlace]:
        """What is left by the ranks, for each worker on one machine."""
        need = " and ".join(f"{counted(worker.gpus, resource)} for {worker.model} (model.gpus)" for worker in self._workers)
        found = self._reserved([{resource: worker.gpus} for worker in self._workers], "PACK", need)
        nodes = {node.id: node for node in live_nodes(resource)}
        if gone := set(found.values()) - nodes.keys():
            raise ProcessFailed(f"{len(gone)} of the machines that Ray had reserved for reward models are gone.")
        size, leader = len(self._places), self._places[0].node.address
        return [
            WorkerPlace(node := nodes[found[i]], WorkerInfo(size + i, size, leader, node.address))
            for i in range(len(self._workers))
        ]

    def _reserved(self, bundles: list[dict[str, float]], strategy: str, need: str) -> dict[int, str]:
        """The id of the machine that has each bundle."""
        from ray.util import placement_group, placement_group_table

        self._placements.append(placement := placement_group(bundles, strategy=strategy))
        within_s = min(PLACE_S, self._recipe.cluster.timeout_s)
        if not placement.wait(within_s):
            has = describe_nodes(live_nodes(resource_of(self._recipe)), resource_of(self._recipe))
            raise ProcessFailed(f"Ray could not reserve {need} within {within_s:g} s; the cluster has {has}.")
        return {int(i): node for i, node in placement_group_table(placement)["bundles_to_node_id"].items()}

    def _start_workers(self, resource: str) -> RewardWorkers | None:
        """Until all of them listen."""
        if not self._workers:
            return None
        workers = RewardWorkers(secrets.token_bytes(TOKEN_BYTES))
        placement, jobs = self._placements[-1], [pickle.dumps(worker.job) for worker in self._workers]
        for i, worker in enumerate(self._workers):
            self._create_actor(len(self._places) + i, placement, i, resource, worker.gpus)
        self._start(self._worker_places, jobs, workers)
        while len(self._workers_listen) < len(self._workers):
            self._look(LOOK_EVERY_S)
            if (verdict := self._watch.verdict()) is not None:
                raise verdict.error
        self._watch.resumed()  # the ranks start only now
        return RewardWorkers(workers.token, tuple(address for _, address in sorted(self._workers_listen.items())))

    def _start_ranks(self, resource: str, workers: RewardWorkers | None) -> None:
        for place in self._places:
            self._create_actor(place.ranks.rank, self._placements[0], self._bundles[place.node.id], resource, 1)
        self._start(self._places, [pickle.dumps(self._job)] * len(self._places), workers)

    def _create_actor(self, rank: int, placement: Any, bundle: int, resource: str, count: int) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        takes = {"num_gpus": count, "num_cpus": 0} if resource == "GPU" else {"num_cpus": count}
        strategy = PlacementGroupSchedulingStrategy(placement, placement_group_bundle_index=bundle)
        self._actors[rank] = actor_class().options(**takes, scheduling_strategy=strategy).remote()

    def _start(self, places: Sequence[RankPlace | WorkerPlace], jobs: Sequence[bytes], workers: RewardWorkers | None) -> None:
        """Processes whose actors were created, and listen to them."""
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError

        environment, folder = dict(os.environ), None if runs_in_copy() else os.getcwd()
        calls = []
        for place, job in zip(places, jobs, strict=True):
            start = RankStart(place.ranks, job, self._recipe, sys.argv, console.quiet, environment, (), False, workers)
            calls.append(self._actors[place.ranks.rank].start.remote(start, place.node.address, __version__, folder))
        deadline = time.monotonic() + ACTOR_S
        for place, call in zip(places, calls, strict=True):
            name = self._watch.label(place.ranks.rank)
            try:
                problem: Any = ray.get(call, timeout=max(0.0, deadline - time.monotonic()))
            except GetTimeoutError:
                raise ProcessFailed(
                    f"the Ray actor of {name} on {place.node.address} has not started within {ACTOR_S:g} s."
                ) from None
            except RayActorError:
                raise ProcessFailed(f"{name} was lost: {_cause(place)}.") from None
            if problem:
                raise PlauditError(problem)
        for place in places:
            self._listen_to(place.ranks.rank)

    # Watching

    def _listen_to(self, rank: int) -> None:
        self._pending[self._actors[rank].listen.remote(LISTEN_S)] = rank

    def _listen(self, wait_s: float) -> Iterable[RankEvent]:
        import ray
        from ray.exceptions import RayError, RayTaskError

        if not self._pending:
            time.sleep(wait_s)
            return
        ready, _ = ray.wait(list(self._pending), num_returns=len(self._pending), timeout=wait_s)
        for call in ready:
            rank = self._pending.pop(call)
            try:
                events: list[RankEvent] = ray.get(call)
            except RayTaskError:  # a bug
                raise
            except RayError:
                self._lost.add(rank)
                yield RankEvent(rank, lost=_cause(self._place(rank)))
                continue
            yield from events
            if not any(event.is_end for event in events):
                self._listen_to(rank)

    def _signal(self, number: signal.Signals) -> None:
        # At once: this process may be about to suspend itself. Reward workers are stopped when no rank needs them any more.
        stops = number in STOP_SIGNALS
        actors = [actor for rank, actor in self._actors.items() if rank < len(self._places) or not stops]
        self._await([actor.signal.remote(int(number)) for actor in actors], SIGNAL_S)

    def _send_port(self, port: int) -> None:
        for place in self._places:
            self._actors[place.ranks.rank].send_port.remote(port)

    def _request_stacks(self, ranks: set[int]) -> None:
        for rank in ranks:
            self._actors[rank].request_stack.remote(rank)

    def _where(self, ranks: set[int]) -> dict[int, str]:
        import ray
        from ray.exceptions import RayError

        calls = {rank: self._actors[rank].where.remote(rank) for rank in ranks}
        self._await(list(calls.values()), SIGNAL_S)
        found = {}
        for rank, call in calls.items():
            try:
                found[rank] = ray.get(call, timeout=0.0)
            except RayError:
                found[rank] = ""
        return found


def _cause(place: RankPlace | WorkerPlace) -> str:
    """Whether the machine is gone, or only the actor."""
    where = f"{place.node.address} (Ray node {place.node.id[:8]})"
    if answers(place.node):
        return f"its Ray actor on {where} has ended"
    return f"the machine {where} is gone, or its Ray processes are"
