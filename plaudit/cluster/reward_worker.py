"""Processes alongside the ranks, each with GPUs of its own and one reward model, for the calls of all ranks. Imports no torch.

A worker is started before the ranks, and listens before it loads its model, so that they are given its address. It is watched as
they are, and stopped after them.
"""

import pickle
import signal
from collections.abc import Callable
from dataclasses import dataclass

from plaudit.cluster.rank import Assignment, Lifeline
from plaudit.cluster.ranks import WorkerInfo
from plaudit.cluster.status import StatusPipe


@dataclass(frozen=True)
class WorkerSeat:
    """What a worker's job is given."""

    info: WorkerInfo
    token: bytes
    """The ranks', who send it with their calls."""
    listening: Callable[[str, int], None]
    """To be called with its address, once it accepts calls."""
    beat: Callable[[str], None]
    """To be called again and again, with what it is doing."""


WorkerJob = Callable[[WorkerSeat], None]
"""What a worker runs, until SIGTERM: a function that can be pickled."""


@dataclass(frozen=True)
class WorkerPlan:
    """A worker that is to be started."""

    model: str
    """For messages."""
    gpus: int
    job: WorkerJob


def serve(given: Assignment, lifeline: Lifeline, status: StatusPipe) -> None:
    """The program of a worker."""
    assert isinstance(given.ranks, WorkerInfo)
    assert given.reward_workers is not None
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the ranks still need it for the current step
    status.beat("starting", waiting=False)
    job: WorkerJob = pickle.loads(given.job)
    beat = status.beat
    job(WorkerSeat(given.ranks, given.reward_workers.token, status.listening, lambda doing: beat(doing, waiting=False)))
