"""New weights for servers, if the policy is sharded: a weight is whole only while all processes iterate over all weights together.

So every process takes every weight, whatever becomes of its server: what a lost server did not take is iterated over to the end,
and then all processes iterate once more, for those servers that were started again.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from plaudit.errors import StopRequested, TrainingStopped
from plaudit.rollout.engine import Weights
from plaudit.rollout.served.dialect import ServerLost
from plaudit.rollout.served.server import PolicyServer
from plaudit.world import World

if TYPE_CHECKING:
    from torch import Tensor


class _Pass(Weights):
    """One iteration over the weights, which can be completed by another reader than it was begun by. (It is no generator, since
    those are closed with their reader.)"""

    def __init__(self, weights: Weights):
        self._left = iter(weights)

    @property
    def gathered(self) -> bool:
        return True

    def __iter__(self) -> "Iterator[tuple[str, Tensor]]":
        return self

    def __next__(self) -> "tuple[str, Tensor]":
        return next(self._left)

    def complete(self) -> None:
        for _ in self._left:
            pass


def sync_together(
    servers: Sequence[PolicyServer],
    weights: Weights,
    world: World,
    *,
    load: Callable[[PolicyServer, Weights], None],
    restart: Callable[[PolicyServer, str], None],
) -> None:
    """Give each process's servers the weights. Every process has the same number of servers. If one of them fails, it raises that,
    and the others return: they hear of it where all processes wait for each other next."""
    waiting: dict[int, PolicyServer] = dict(enumerate(servers))
    failure: BaseException | None = None
    while True:
        lost: list[tuple[PolicyServer, str]] = []
        for i in range(len(servers)):
            once = _Pass(weights)
            try:
                if i in waiting and failure is None:
                    load(waiting[i], once)
                    del waiting[i]
            except ServerLost as error:
                lost.append((waiting[i], str(error)))
            except (TrainingStopped, StopRequested) as error:
                failure = error
            once.complete()
        states = world.gather((len(waiting), failure is not None), "weights for servers")
        if failure is not None:
            raise failure
        if any(failed for _, failed in states) or not any(left for left, _ in states):
            return
        for server, why in lost:
            try:
                restart(server, why)
            except (TrainingStopped, StopRequested) as error:
                failure = error
