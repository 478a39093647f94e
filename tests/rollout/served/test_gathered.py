"""New weights for servers while the policy is sharded: every process must take every weight, whatever becomes of its server."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from plaudit.errors import TrainingStopped
from plaudit.rollout.engine import Weights
from plaudit.rollout.served.dialect import ServerLost
from plaudit.rollout.served.gathered import sync_together
from plaudit.world import World

NAMES = ["a", "b", "c"]


class Counted(Weights):
    """Weights that count how often each was gathered."""

    def __init__(self):
        super().__init__(nn.Linear(1, 1))
        self.taken: list[str] = []

    def __iter__(self) -> Iterator[Any]:
        for name in NAMES:
            self.taken.append(name)
            yield name, torch.ones(1)


class Server:
    """Fails with these errors, one for each attempt, after `after` weights."""

    def __init__(self, *faults: Exception, after: int = 1):
        self.faults, self.after = list(faults), after
        self.got: list[str] = []
        self.restarts = 0

    def load(self, weights: Weights) -> None:
        self.got = []
        for name, _ in _through_a_generator(weights):
            self.got.append(name)
            if self.faults and len(self.got) == self.after:
                raise self.faults.pop(0)


def _through_a_generator(weights: Weights) -> Iterator[Any]:
    yield from weights


def start_again(server: Server, why: str) -> None:
    server.restarts += 1


def sync(weights: Weights, *servers: Server, restart: Any = start_again) -> None:
    sync_together(servers, weights, World.alone(), load=lambda server, some: server.load(some), restart=restart)  # pyright: ignore


def test_every_server_gets_all_weights_in_one_pass():
    weights, servers = Counted(), (Server(), Server())
    sync(weights, *servers)
    assert weights.taken == NAMES * 2
    assert [server.got for server in servers] == [NAMES, NAMES]


def test_a_pass_is_completed_for_the_others_and_repeated_for_a_lost_server():
    weights, lost, fine = Counted(), Server(ServerLost("gone")), Server()
    sync(weights, lost, fine)
    assert weights.taken == NAMES * 4, "two passes for two servers, each complete"
    assert (lost.got, lost.restarts) == (NAMES, 1)
    assert (fine.got, fine.restarts) == (NAMES, 0)


@pytest.mark.parametrize("after", [1, 3])
def test_a_failure_is_raised_once_the_pass_is_complete(after):
    weights, server = Counted(), Server(TrainingStopped("wrong weights"), after=after)
    with pytest.raises(TrainingStopped, match="wrong weights"):
        sync(weights, server)
    assert weights.taken == NAMES


def test_a_server_that_cannot_be_started_again_ends_after_one_more_pass():
    """The other processes iterate again, and this one with them, before it raises."""

    def refuse(server: Server, why: str) -> None:
        raise TrainingStopped("too many restarts")

    weights = Counted()
    with pytest.raises(TrainingStopped, match="too many restarts"):
        sync(weights, Server(ServerLost("gone")), restart=refuse)
    assert weights.taken == NAMES * 2
