"""Data-parallel processes: each computes some of an update's micro-batches on a copy of the model, and gradients are added up.

Every process is given the whole update. A micro-batch's loss is already divided by what the whole update is divided by, so the sum
over processes is all there is to do, and how many processes there are changes nothing but the order of additions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from plaudit.train.optimiser import Optimiser

T = TypeVar("T")

BUCKET = 2**26
"""Elements that are added up at once: few calls, and little memory beside the gradients themselves."""


@dataclass(frozen=True)
class Ranks:
    """This process among those that train together: alone, if nothing else is said."""

    rank: int = 0
    count: int = 1

    @classmethod
    def joined(cls) -> "Ranks":
        """All processes of torch.distributed's group, which the caller has joined (gloo on CPUs, NCCL on GPUs)."""
        return cls(dist.get_rank(), dist.get_world_size())

    def share(self, items: Sequence[T]) -> list[tuple[int, T]]:
        """This process's items, each with its place among all."""
        return list(enumerate(items))[self.rank :: self.count]

    @torch.no_grad()
    def add_up_gradients(self, optimiser: Optimiser) -> None:
        """In place, the same bits in all processes. A gradient that no process has stays away, or the optimiser would decay its
        weight; one that only others have (there were fewer micro-batches than processes) counts as zero here."""
        if self.count == 1:
            return
        own, names = optimiser.gradients(), list(optimiser.parameters)
        device = optimiser.parameters[names[0]].device
        present = torch.tensor([name in own for name in names], dtype=torch.int32, device=device)
        dist.all_reduce(present, op=dist.ReduceOp.MAX)
        bucket: list[Tensor] = []
        for name, somewhere in zip(names, present.tolist(), strict=True):
            if not somewhere:
                continue
            bucket.append(own[name] if name in own else optimiser.begin_gradient(name))
            if sum(gradient.numel() for gradient in bucket) >= BUCKET:
                _add_up(bucket)
                bucket = []
        _add_up(bucket)

    def add_up(self, sums: Mapping[str, float]) -> dict[str, float]:
        """By name; one that a process lacks counts as zero."""
        if self.count == 1:
            return dict(sums)
        everyones: list[Mapping[str, float]] = [{}] * self.count
        dist.all_gather_object(everyones, dict(sums))
        names = dict.fromkeys(name for theirs in everyones for name in theirs)
        return {name: sum(theirs.get(name, 0.0) for theirs in everyones) for name in names}


def _add_up(gradients: Sequence[Tensor]) -> None:
    if not gradients:
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    torch._foreach_copy_(  # pyright: ignore
        list(gradients), [part.view_as(g) for part, g in zip(flat.split([g.numel() for g in gradients]), gradients, strict=True)]
    )
