"""The ranks of a run on the machines of a Ray cluster, watched from here. Ray places and connects; it computes nothing.

this process ── calls ──▶ RankActor on a machine ── stdin, signals ──▶ rank
             ◀── events ─                        ◀── pipes ─────────
"""

import contextlib
import os
import pickle
import signal
import sys
import time
from collections.abc import Iterable
from typing import Any, Self

from plaudit import __version__
from plaudit.cluster.group import GRACE_S, WatchedGroup
from plaudit.cluster.nodes import Node, RankPlace, answers, assign_ranks, describe_need, describe_nodes, runs_in_copy
from plaudit.cluster.process import KILLED_S, RankEvent, RankStart
from plaudit.cluster.rank import RankJob
from plaudit.cluster.ray_actor import actor_class
from plaudit.cluster.ray_connection import connect, live_nodes, wait_for_nodes
from plaudit.errors import PlauditError, ProcessFailed
from plaudit.recipe import TrainingRecipe
from plaudit.report.progress import console

LISTEN_S = 1.0
"""How long an actor waits for something to relay."""
PLACE_S = 30.0
"""How long Ray may take to reserve what is free."""
ACTOR_S = 120.0
"""How long all actors may take to start, which import plaudit from a shared disk."""
SIGNAL_S = 1.0
"""How long an actor may take to pass on a signal, or to read a stack."""
CULPRIT_S = 30.0
"""Ray takes this long to notice that a machine is gone, while its ranks' peers lose their connections at once."""


class RayRankGroup(WatchedGroup):
    def __init__(self, job: RankJob, recipe: TrainingRecipe):
        super().__init__(recipe)
        self._job = job
        self._actors: dict[int, Any] = {}
        self._places: list[RankPlace] = []
        self._pending: dict[Any, int] = {}
        """Calls of `listen` that have not returned, and their ranks."""
        self._lost: set[int] = set()
        self._placement: Any = None

    def __enter__(self) -> Self:
        connect(self._recipe)
        try:
            resource, per_node = wait_for_nodes(self._recipe)
            self._places = assign_ranks(self._reserve(resource, per_node), per_node, self._own_node())
            self._create_actors(resource)
            self._start_ranks()
        except BaseException:
            self.__exit__()
            raise
        self._watch_ranks(len(self._places), CULPRIT_S)
        for rank in self._actors:
            self._listen_to(rank)
        return self

    def _end(self) -> list[str]:
        import ray
        from ray.exceptions import RayError
        from ray.util import remove_placement_group

        closing = {rank: actor.close.remote() for rank, actor in self._actors.items() if rank not in self._lost}
        self._await(list(closing.values()), KILLED_S + GRACE_S)
        stuck = []
        for rank, call in closing.items():
            with contextlib.suppress(RayError):  # an actor that is gone has left nothing
                stuck += [f"{name} on {self._places[rank].node.address}" for name in ray.get(call, timeout=0.0)]
        while self._actors:
            with contextlib.suppress(RayError):
                ray.kill(self._actors.popitem()[1])
        if self._placement is not None:
            with contextlib.suppress(RayError):
                remove_placement_group(self._placement)
        return stuck

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
        from ray.util import placement_group, placement_group_table

        count = self._recipe.cluster.nodes
        self._placement = placement_group([{resource: per_node}] * count, strategy="STRICT_SPREAD")
        if not self._placement.wait(PLACE_S):
            need, has = describe_need(count, per_node, resource), describe_nodes(live_nodes(resource), resource)
            raise ProcessFailed(f"Ray could not reserve {need} within {PLACE_S:g} s; the cluster has {has}.")
        self._bundles = {node: int(i) for i, node in placement_group_table(self._placement)["bundles_to_node_id"].items()}
        nodes = [node for node in live_nodes(resource) if node.id in self._bundles]
        if len(nodes) < count:
            raise ProcessFailed(f"{count - len(nodes)} of the {count} machines that Ray had reserved are gone.")
        return nodes

    def _create_actors(self, resource: str) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        kind = actor_class()
        takes = {"num_gpus": 1, "num_cpus": 0} if resource == "GPU" else {"num_cpus": 1}
        for place in self._places:
            strategy = PlacementGroupSchedulingStrategy(self._placement, placement_group_bundle_index=self._bundles[place.node.id])
            self._actors[place.ranks.rank] = kind.options(**takes, scheduling_strategy=strategy).remote()

    def _start_ranks(self) -> None:
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError

        job, environment = pickle.dumps(self._job), dict(os.environ)
        folder = None if runs_in_copy() else os.getcwd()
        calls = []
        for place in self._places:
            start = RankStart(place.ranks, job, self._recipe, sys.argv, console.quiet, environment, path=(), has_terminal=False)
            calls.append(self._actors[place.ranks.rank].start.remote(start, place.node.address, __version__, folder))
        deadline = time.monotonic() + ACTOR_S
        for place, call in zip(self._places, calls, strict=True):
            try:
                problem: Any = ray.get(call, timeout=max(0.0, deadline - time.monotonic()))
            except GetTimeoutError:
                name = f"rank {place.ranks.rank} on {place.node.address}"
                raise ProcessFailed(f"the Ray actor of {name} has not started within {ACTOR_S:g} s.") from None
            except RayActorError:
                raise ProcessFailed(f"rank {place.ranks.rank} was lost: {_cause(place)}.") from None
            if problem:
                raise PlauditError(problem)

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
                yield RankEvent(rank, lost=_cause(self._places[rank]))
                continue
            yield from events
            if not any(event.is_end for event in events):
                self._listen_to(rank)

    def _signal(self, number: signal.Signals) -> None:
        # At once: this process may be about to suspend itself.
        self._await([actor.signal.remote(int(number)) for actor in self._actors.values()], SIGNAL_S)

    def _send_port(self, port: int) -> None:
        for actor in self._actors.values():
            actor.send_port.remote(port)

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


def _cause(place: RankPlace) -> str:
    """Whether the machine is gone, or only the actor."""
    where = f"{place.node.address} (Ray node {place.node.id[:8]})"
    if answers(place.node):
        return f"its Ray actor on {where} has ended"
    return f"the machine {where} is gone, or its Ray processes are"
