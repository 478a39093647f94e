"""A Ray actor per rank. It starts the rank as a process of its own, the same as without Ray, and relays what that reports.

The rank's process ends with the actor, and the actor with its machine's Ray processes and with the command.
"""

import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from plaudit import __version__
from plaudit.cluster.nodes import interface_of, rank_environment
from plaudit.cluster.process import MachineRanks, RankEvent, RankStart

GATHER_S = 0.05
"""What arrives within this time is relayed together."""


class RankActor:
    """One rank's; its class in Ray is made by `actor_class`."""

    def __init__(self) -> None:
        self._ranks = MachineRanks()

    def start(self, start: RankStart, address: str, version: str, folder: str | None) -> str:
        """Starts the rank; returns why that is not possible, or "". `address`: of this machine. `folder`: where the command runs,
        unless Ray has copied the files of a job."""
        if version != __version__:
            return f"plaudit is {__version__} on {address}, but {version} where the command runs: install the same version"
        if folder is not None:
            try:
                os.chdir(folder)
            except OSError as error:
                return (
                    f"{address} cannot enter {folder}, where the command runs ({error.strerror}). Run it in a folder on a disk "
                    "that all machines share, or let Ray copy your files: ray job submit --working-dir . -- plaudit …"
                )
        environment = rank_environment(os.environ, start.environment, interface_of(address), start.ranks.address)
        import ray

        own = Path(ray.__file__).parent  # Ray puts its copies of some libraries in front
        path = [place for place in sys.path if not Path(place).is_relative_to(own)]
        self._ranks.start(replace(start, environment=environment, path=path))
        return ""

    def listen(self, wait_s: float) -> list[RankEvent]:
        events = list(self._ranks.listen(wait_s))
        if not any(event.is_end for event in events):
            time.sleep(GATHER_S)
            events += self._ranks.listen(0.0)
        return _without_outdated(events)

    def signal(self, number: int) -> None:
        self._ranks.signal(signal.Signals(number))

    def send_port(self, port: int) -> None:
        self._ranks.send_port(port)

    def request_stack(self, rank: int) -> None:
        self._ranks.request_stacks({rank})

    def where(self, rank: int) -> str:
        return self._ranks.where({rank}).get(rank, "")

    def close(self) -> list[str]:
        return self._ranks.close()


def _without_outdated(events: list[RankEvent]) -> list[RankEvent]:
    """Of heartbeats, only the last one counts."""
    beats = [i for i, event in enumerate(events) if event.status is not None and "doing" in event.status]
    outdated = set(beats[:-1])
    return [event for i, event in enumerate(events) if i not in outdated]


def actor_class() -> Any:
    import ray

    # Never restarted by Ray: a rank alone cannot join the others again. Several threads, since `listen` waits.
    options: dict[str, Any] = {"max_restarts": 0, "max_task_retries": 0, "max_concurrency": 4}
    return ray.remote(**options)(RankActor)
