"""Rewards whose models take turns on the device: which ones, which model is loaded next, for which passes over a step's groups."""

from collections.abc import Sequence
from dataclasses import InitVar, dataclass

from plaudit.rewards.client import RewardClient
from plaudit.rewards.reward import Loadable
from plaudit.types import Score


@dataclass(eq=False)
class Passes:
    """A reward's progress through its passes over a step's groups."""

    client: RewardClient
    phases: Sequence[Loadable | None]
    groups: InitVar[int]
    phase: int = 0
    failed: Sequence[Sequence[Score | None]] = ()
    """Failures so far, by group and sample."""

    def __post_init__(self, groups: int) -> None:
        self.failed = [()] * groups

    @property
    def needed(self) -> Loadable | None:
        return self.phases[self.phase]

    @property
    def is_last(self) -> bool:
        return self.phase == len(self.phases) - 1

    @property
    def done(self) -> bool:
        return self.phase == len(self.phases)


def deferred_clients(clients: Sequence[RewardClient]) -> list[RewardClient]:
    """Rewards that wait for all groups, and those gated by one of them."""
    deferred: list[RewardClient] = []
    for client in clients:
        gate = client.reward.gate
        if client.reward.waits_for_all or (gate is not None and gate.reward in {one.reward.label for one in deferred}):
            deferred.append(client)
    return deferred


def ready(left: Sequence[Passes]) -> list[Passes]:
    """Those whose gate is decided."""
    pending = {one.client.reward.label for one in left}
    return [one for one in left if (gate := one.client.reward.gate) is None or gate.reward not in pending]


def next_to_load(left: Sequence[Passes]) -> Loadable | None:
    """What to load next: nothing while some pass needs no model, else preferably a model that no later pass needs again."""
    needs = [one.needed for one in ready(left)]
    later = [needed for one in left for needed in one.phases[one.phase + 1 :]]
    later += [one.needed for one in left if one not in ready(left)]
    return min(needs, key=lambda needed: (needed is not None, any(needed is other for other in later)))
