"""The processes that train together, as seen from one of them.

A `World` is made where a process starts and passed down; nothing looks it up. With one process every collective is a no-op.
Every process runs the same loop (SPMD): data order, noise and packing are functions of the seed and the step, so that processes
agree without messages, and only scored groups, gradients and files are exchanged. Every process is given the whole update and
computes its share of the micro-batches. A micro-batch's loss is already divided by the whole update's normaliser, so gradients
only have to be summed, and the number of processes changes nothing but the order of additions.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Protocol, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from plaudit.errors import ProcessFailed
from plaudit.types import RewardWorkers

T = TypeVar("T")
# torch renames these, and warns of the old names.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


PHASE_BEAT_S = 1.0
WITHOUT_PROGRESS_S = 7200.0
"""How long a process is believed to be at work though no progress is visible: in a phase, or while it waits for answers."""


class PendingCollective(Protocol):
    """A collective that is under way."""

    def wait(self) -> Any: ...


class _Done:
    def wait(self) -> None:
        pass


class Heartbeat:
    """What a process is doing, for the process that watches it. Without a watcher it is only remembered, for messages."""

    def __init__(self, send: Callable[[str, bool], None] | None = None):
        """`send` is called with what the process does now, and whether it is waiting for the other processes."""
        self._send = send
        self._waits = False
        self._end_of_phase: threading.Event | None = None
        self._progress_at = time.monotonic()
        self.doing = "starting"

    def beat(self, doing: str | None = None, *, waiting: bool = False) -> None:
        """Called with every micro-batch and every engine step. What is done next ends a phase."""
        self._waits, self._progress_at = waiting, time.monotonic()
        if doing is not None and not waiting:
            self.end_phase()
            self.doing = doing
        if self._send is not None:
            self._send(doing or self.doing, waiting)

    def beat_while_waiting(self) -> None:
        """Called again and again while there is nothing to do until an answer comes, from a reward or a model. Answers that do not
        come at all must not go unnoticed, so these heartbeats end."""
        if self._send is not None and self._is_believed:
            self._send(self.doing, False)

    @property
    def _is_believed(self) -> bool:
        return time.monotonic() - self._progress_at < WITHOUT_PROGRESS_S

    def begin_phase(self, doing: str) -> None:
        """From here until something else is done, long work without visible progress: to import libraries, read data, load models,
        write files."""
        self.beat(doing)
        if self._send is not None:
            self._end_of_phase = threading.Event()
            threading.Thread(target=self._beat_until, args=(self._end_of_phase,), name="heartbeat", daemon=True).start()

    def end_phase(self) -> None:
        if self._end_of_phase is not None:
            self._end_of_phase.set()
            self._end_of_phase = None

    def _beat_until(self, end: threading.Event) -> None:
        while not end.wait(PHASE_BEAT_S):
            if not self._waits:
                self.beat_while_waiting()


class SecondHeartbeat(Heartbeat):
    """Of a second thread. While the first one works, its own heartbeats are the process's; while it waits for the second, it passes
    on what it has heard (`pass_on`)."""

    def __init__(self, first: Heartbeat):
        super().__init__(self._note)
        self._first, self._first_thread = first, threading.get_ident()
        self._heard: tuple[str, bool] | None = None

    def beat(self, doing: str | None = None, *, waiting: bool = False) -> None:
        if threading.get_ident() == self._first_thread:  # nothing runs in the second one then
            self._first.beat(doing, waiting=waiting)
        else:
            super().beat(doing, waiting=waiting)

    def beat_while_waiting(self) -> None:
        if threading.get_ident() == self._first_thread:
            self._first.beat_while_waiting()
        else:
            super().beat_while_waiting()

    def _note(self, doing: str, waiting: bool) -> None:
        self._heard = doing, waiting

    def pass_on(self) -> None:
        heard, self._heard = self._heard, None
        if heard is not None:
            self._first.beat(heard[0], waiting=heard[1])


@dataclass(frozen=True)
class World:
    rank: int
    size: int
    device: torch.device
    """This process's own device."""
    is_joined: bool = False
    """Whether there is a process group, of one process or more: torch.distributed's default group."""
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    group: dist.ProcessGroup | None = None
    """Of the agreements below; None: the default group."""
    background_group: dist.ProcessGroup | None = None
    """Of `in_background`."""
    timeout: timedelta | None = None
    """For exchanges in other threads than the first."""
    local_size: int | None = None
    """Processes of this machine, with consecutive ranks; None: all."""
    reward_workers: RewardWorkers | None = None
    """Where reward models with GPUs of their own are."""

    @classmethod
    def alone(cls, device: torch.device | str = "cpu") -> Self:
        """One process."""
        return cls(rank=0, size=1, device=torch.device(device))

    @classmethod
    def joined(
        cls,
        device: torch.device | str = "cpu",
        heartbeat: Heartbeat | None = None,
        timeout: timedelta | None = None,
        local_size: int | None = None,
        reward_workers: RewardWorkers | None = None,
    ) -> Self:
        """All processes of torch.distributed's default group, which the caller has initialised (gloo on CPUs, NCCL on GPUs).
        `timeout`: for exchanges in the background."""
        apart = dist.new_group(backend="gloo", timeout=timeout)
        assert isinstance(apart, dist.ProcessGroup)
        beats = heartbeat or Heartbeat()
        return cls(
            dist.get_rank(), dist.get_world_size(), torch.device(device), True, beats,
            background_group=apart, timeout=timeout, local_size=local_size, reward_workers=reward_workers,
        )  # fmt: skip

    @property
    def in_background(self) -> "World":
        """The same processes, as another thread of each sees them: it agrees with the others' in a group of its own, since two
        threads that use one group would take each other's messages. Its waits are not this process's, so it has no heartbeat."""
        return replace(self, group=self.background_group, heartbeat=Heartbeat())

    def for_second_thread(self) -> "World":
        """The same for a thread that shares the work of a step with this one: it has a heartbeat, which this one passes on. All
        processes call it at the same time."""
        group = dist.new_group(backend="gloo", timeout=self.timeout) if self.size > 1 else None
        assert group is None or isinstance(group, dist.ProcessGroup)
        return replace(self, group=group, heartbeat=SecondHeartbeat(self.heartbeat))

    @property
    def leads(self) -> bool:
        """Whether this process owns the run folder, the terminal and the trackers."""
        return self.rank == 0

    # Shares of work

    def share(self, count: int) -> range:
        """Indices of this process's items among `count`."""
        return range(self.rank, count, self.size)

    def repeats(self, count: int) -> list[int]:
        """Items that a process with a smaller share than others computes once more, where all must make the same number of passes
        (a model whose weights are sharded)."""
        own = self.share(count)
        return [own[0] if own else 0] * (-(-count // self.size) - len(own))

    def shard(self, items: Sequence[T], *, equal: bool = False) -> list[tuple[int, T]]:
        """This process's items, each with its index among all. `equal`: with `repeats`."""
        repeats = self.repeats(len(items)) if equal else ()
        return [(i, items[i]) for i in (*self.share(len(items)), *repeats)]

    # Agreement

    def agree(self, value: T, what: str) -> T:
        """The leading process's value, in all of them. `what`: for messages, should the others not come."""
        if self.size == 1:
            return value
        box: list[Any] = [(what, value) if self.leads else None]
        with self.waiting(what):
            dist.broadcast_object_list(box, src=0, group=self.group, device=torch.device("cpu"))
        self._require_same([what, box[0][0]])
        return box[0][1]

    def gather(self, value: T, what: str) -> list[T]:
        """Every process's value, in the order of ranks."""
        if self.size == 1:
            return [value]
        gathered: list[Any] = [None] * self.size
        with self.waiting(what):
            dist.all_gather_object(gathered, (what, value), group=self.group)
        self._require_same([theirs for theirs, _ in gathered])
        return [value for _, value in gathered]

    def _require_same(self, exchanged: Sequence[str]) -> None:
        """Processes that have diverged must not read each other's values."""
        if len(set(exchanged)) > 1:
            raise ProcessFailed(f"processes exchange different things, a bug: {', '.join(map(repr, exchanged))} (rank {self.rank})")

    def any(self, flag: bool, what: str) -> bool:
        """Whether the flag is true in any process."""
        return any(self.gather(flag, what))

    def wait(self, what: str) -> None:
        """Until all processes are here."""
        self.gather(None, what)

    @contextmanager
    def leader_first(self, what: str) -> Iterator[None]:
        """The leading process does this before the others, who find what it has cached."""
        if not self.leads:
            self.wait(what)
        yield
        if self.leads:
            self.wait(what)

    def sum_metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The sum over processes, by name; a name that a process lacks counts as zero there."""
        gathered = self.gather(dict(metrics), "metrics of an update")
        names = dict.fromkeys(name for theirs in gathered for name in theirs)
        return {name: sum(theirs.get(name, 0.0) for theirs in gathered) for name in names}

    def any_true(self, flags: Sequence[bool]) -> list[bool]:
        """For each flag: whether it is true in any process."""
        if self.size == 1:
            return list(flags)
        flags_F = torch.tensor(flags, dtype=torch.int32, device=self.device)
        with self.waiting("gradients"):
            dist.all_reduce(flags_F, op=dist.ReduceOp.MAX)
        return [bool(flag) for flag in flags_F.tolist()]

    # Tensors

    def sum_all(self, flat: Tensor) -> PendingCollective:
        """Replaces a tensor by its sum over processes: the same bits in all of them."""
        if not self.through_host:
            return dist.all_reduce(flat, async_op=True) or _Done()
        host = flat.cpu()
        dist.all_reduce(host)
        flat.copy_(host)
        return _Done()

    def sum_parts(self, own: Tensor, flat: Tensor) -> PendingCollective:
        """As `sum_all`, but each process gets the part of the sum at its rank."""
        if not self.through_host:
            return _reduce_scatter(own, flat, async_op=True) or _Done()
        host, part = flat.cpu(), own.cpu()
        _reduce_scatter(part, host)
        own.copy_(part)
        return _Done()

    def gather_parts(self, flat: Tensor, own: Tensor) -> PendingCollective:
        """Fills `flat` with every process's part, in the order of ranks."""
        if not self.through_host:
            return all_gather(flat, own, async_op=True) or _Done()
        host = flat.cpu()
        all_gather(host, own.cpu())
        flat.copy_(host)
        return _Done()

    @property
    def through_host(self) -> bool:
        """gloo computes on a CPU. It is used on a GPU that several processes share, which NCCL cannot."""
        return self.device.type == "cuda" and "nccl" not in str(dist.get_backend())

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Around a collective: while in it, a silent process is not to blame."""
        self.heartbeat.beat(what, waiting=True)
        yield
        self.heartbeat.beat()
