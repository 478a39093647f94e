"""The processes that train together, as seen from one of them.

A `World` is made where a process starts and passed down; nothing looks it up. With one process every collective is a no-op.
Every process is given the whole update and computes its share of the micro-batches. A micro-batch's loss is already divided by
the whole update's normaliser, so gradients only have to be summed, and the number of processes changes nothing but the order of
additions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")

BUCKET_ELEMENTS = 2**26
"""Gradients per all-reduce: few calls, and little memory on top of the gradients themselves."""


@dataclass(frozen=True)
class World:
    rank: int
    size: int
    device: torch.device
    """This process's own device."""
    group: dist.ProcessGroup | None = None
    """None: torch.distributed's default group."""

    @classmethod
    def alone(cls, device: torch.device | str = "cpu") -> Self:
        """One process."""
        return cls(rank=0, size=1, device=torch.device(device))

    @classmethod
    def joined(cls, device: torch.device | str = "cpu") -> Self:
        """All processes of torch.distributed's default group, which the caller has initialised (gloo on CPUs, NCCL on GPUs)."""
        return cls(rank=dist.get_rank(), size=dist.get_world_size(), device=torch.device(device))

    def shard(self, items: Sequence[T]) -> list[tuple[int, T]]:
        """This process's items, each with its index among all."""
        return list(enumerate(items))[self.rank :: self.size]

    def sum_metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The sum over processes, by name; a name that a process lacks counts as zero there."""
        if self.size == 1:
            return dict(metrics)
        gathered: list[Mapping[str, float]] = [{}] * self.size
        dist.all_gather_object(gathered, dict(metrics), group=self.group)
        names = dict.fromkeys(name for theirs in gathered for name in theirs)
        return {name: sum(theirs.get(name, 0.0) for theirs in gathered) for name in names}

    def any_true(self, flags: Sequence[bool]) -> list[bool]:
        """For each flag: whether it is true in any process."""
        if self.size == 1:
            return list(flags)
        flags_F = torch.tensor(flags, dtype=torch.int32, device=self.device)
        dist.all_reduce(flags_F, op=dist.ReduceOp.MAX, group=self.group)
        return [bool(flag) for flag in flags_F.tolist()]

    @torch.no_grad()
    def sum_in_place(self, tensors: Sequence[Tensor]) -> None:
        """Replaces each tensor by its sum over processes: the same bits in all of them."""
        if self.size == 1:
            return
        bucket: list[Tensor] = []
        elements = 0
        for tensor in tensors:
            bucket.append(tensor)
            elements += tensor.numel()
            if elements >= BUCKET_ELEMENTS:
                self._sum_bucket(bucket)
                bucket, elements = [], 0
        self._sum_bucket(bucket)

    def _sum_bucket(self, bucket: Sequence[Tensor]) -> None:
        if not bucket:
            return
        flat = torch.cat([tensor.flatten() for tensor in bucket])
        dist.all_reduce(flat, group=self.group)
        sums = flat.split([tensor.numel() for tensor in bucket])
        torch._foreach_copy_(list(bucket), [part.view_as(t) for part, t in zip(sums, bucket, strict=True)])  # pyright: ignore
