"""Where the gradients of an update are summed: over micro-batches, and over the processes that train together.

An optimiser updates *pieces*: all of a parameter, or the range of it that belongs to this process. `Gradients` say which pieces
these are, sum their gradients in fp32, and pass on updated weights.

Alone, a piece is a parameter. Together, parameters are laid end to end in buckets, in about the order in which the backward pass
reaches them:

    bucket     | embed | layer 1 q | layer 1 k | … | padding |      of one dtype, about `BUCKET_ELEMENTS`
    rank       |     0     |     1     |     2     |     3   |      owns this part of each bucket, if the optimiser is sharded

While the last micro-batch's backward pass runs, each bucket is summed over processes as soon as it is complete: whole (every
process then makes the same update), or each process its own part, with a fraction of the optimiser's memory. Then updated weights
are gathered into the model's own tensors, which keep their addresses. Both ways compute the same bits: the sums are the same, and
AdamW is elementwise. If the model itself is sharded (models/sharded.py), a piece is this process's part of a parameter.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from plaudit.models.gradient_sums import GradientSums, forget_sums
from plaudit.models.memory import BUCKET_ELEMENTS
from plaudit.world import PendingCollective, World

ALIGNED = 64  # elements: kernels process tensors aligned to this on their fast path, as they would the full tensors


@dataclass(frozen=True)
class Piece:
    """A parameter, or a range of its elements."""

    name: str
    """Of the parameter."""
    weight: Tensor
    """In the model's own storage."""
    decays: bool
    """Matrices decay, biases and norms do not."""
    begin: int = 0
    """Where the range begins in the flattened parameter."""
    is_whole: bool = True

    @property
    def end(self) -> int:
        return self.begin + self.weight.numel()

    @property
    def key(self) -> str:
        """A name that says which elements these are; it is written into checkpoints."""
        return self.name if self.is_whole else f"{self.name}@{self.begin}:{self.end}"


def parse_key(key: str) -> tuple[str, int, int | None]:
    """A piece's parameter, and the range of its elements; to None if that is all of them."""
    name, at, elements = key.rpartition("@")
    if not at:
        return key, 0, None
    begin, _, end = elements.partition(":")
    return name, int(begin), int(end)


class Gradients(Protocol):
    pieces: Mapping[str, Piece]
    """What this process's optimiser updates, by key."""

    def begin_last_pass(self) -> None:
        """The next backward pass is the last of this process before `finish`."""

    def finish(self) -> None:
        """Complete the sums over processes."""

    def sums(self) -> dict[str, Tensor]:
        """By piece, in fp32, of those that have a gradient; may be changed in place."""
        ...

    def norm(self) -> Tensor:
        """Of the gradients of all pieces of all processes; not finite if any gradient is not."""
        ...

    def clear(self) -> None: ...

    def publish(self) -> None:
        """Pass on the updated weights of this process's pieces."""


def collect_gradients(named_parameters: Iterable[tuple[str, nn.Parameter]], world: World, *, sharded: bool) -> Gradients:
    parameters = dict(named_parameters)
    assert parameters, "nothing to train"
    forget_sums(parameters.values())
    shards = {name: parameter for name, parameter in parameters.items() if isinstance(parameter, DTensor)}
    if shards:
        assert len(shards) == len(parameters), "a model is sharded in full or not at all"
        return ShardedGradients(shards, world)
    return BucketedGradients(parameters, world, sharded=sharded) if world.is_joined else LocalGradients(parameters)


class LocalGradients:
    """Of one process: summed in fp32, for an fp32 parameter where torch puts its gradients, for others aside."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]):
        self._parameters = parameters
        self.pieces: Mapping[str, Piece] = {name: Piece(name, p, p.ndim >= 2) for name, p in parameters.items()}
        self._sums = GradientSums(parameters)

    def begin_last_pass(self) -> None:
        pass

    def finish(self) -> None:
        pass

    def sums(self) -> dict[str, Tensor]:
        found = (
            (name, p.grad if p.dtype == torch.float32 else self._sums.by_name.get(name)) for name, p in self._parameters.items()
        )
        return {name: gradient for name, gradient in found if gradient is not None}

    def norm(self) -> Tensor:
        return torch.nn.utils.get_total_norm(list(self.sums().values()))

    def clear(self) -> None:
        self._sums.clear()
        for parameter in self._parameters.values():
            parameter.grad = None

    def publish(self) -> None:
        pass


# Several processes ---------------------------------------------------------------------------------------------------


@dataclass
class Bucket:
    """Parameters of one dtype, end to end."""

    dtype: torch.dtype
    begins: dict[str, int] = field(default_factory=dict)
    """Where each parameter begins."""
    length: int = 0
    gradients: Tensor | None = None
    """fp32 sums, while there are any: first of this process, then of all."""
    own: Tensor | None = None
    """This process's part of the sums of all processes, if it has no more than that."""
    filled: set[str] = field(default_factory=set)
    """Parameters with a gradient in this process."""
    work: PendingCollective | None = None
    """The sum over processes, once it has begun."""

    def clear(self) -> None:
        self.gradients = self.own = self.work = None
        self.filled.clear()


class BucketedGradients:
    def __init__(self, parameters: Mapping[str, nn.Parameter], world: World, *, sharded: bool):
        self._parameters, self._world, self._sharded = parameters, world, sharded
        self._buckets = lay_out(parameters, world.size)
        self._device = next(iter(parameters.values())).device
        owned = {rank: {p.key: p for p in self._owned_by(rank)} for rank in range(world.size)}
        self._owned = owned[world.rank]
        """This process's share of the norm, and of the optimiser if that is sharded."""
        self._owned_names = [[piece.name for piece in pieces.values()] for pieces in owned.values()]
        whole = {name: Piece(name, parameter, parameter.ndim >= 2) for name, parameter in parameters.items()}
        self.pieces: Mapping[str, Piece] = self._owned if sharded else whole
        self._present: set[str] = set()
        """Parameters with a gradient in any process."""
        self._last_pass = _LastPass(self._buckets, world, sharded=sharded)
        for bucket in self._buckets:
            for name in bucket.begins:
                self._move_into(bucket, name, parameters[name])

    def _owned_by(self, rank: int) -> Iterator[Piece]:
        """In the order of parameters."""
        ranges = {
            name: (begin, *self._part(bucket, rank)) for bucket in self._buckets for name, begin in bucket.begins.items()
        }  # fmt: skip
        for name, parameter in self._parameters.items():
            begin, first, end = ranges[name]
            first, end = max(first - begin, 0), min(end - begin, parameter.numel())
            if first < end:
                whole = end - first == parameter.numel()
                weight = parameter if whole else parameter.detach().view(-1)[first:end]
                yield Piece(name, weight, parameter.ndim >= 2, first, whole)

    def _part(self, bucket: Bucket, rank: int) -> tuple[int, int]:
        """The range of the bucket that belongs to a process."""
        part = bucket.length // self._world.size
        return rank * part, (rank + 1) * part

    def _move_into(self, bucket: Bucket, name: str, parameter: nn.Parameter) -> None:
        """Move the parameter's gradients into the bucket as soon as they are computed."""
        at, last_pass = slice(bucket.begins[name], bucket.begins[name] + parameter.numel()), self._last_pass

        def move_gradient(p: Tensor) -> None:
            assert p.grad is not None
            assert bucket.work is None, "a gradient after its sum over processes has begun"
            if bucket.gradients is None:
                bucket.gradients = torch.empty(bucket.length, dtype=torch.float32, device=p.device)
            total = bucket.gradients[at].view_as(p)
            total.add_(p.grad) if name in bucket.filled else total.copy_(p.grad)
            bucket.filled.add(name)
            p.grad = None
            last_pass.reached(bucket, name)

        parameter.register_post_accumulate_grad_hook(move_gradient)

    # An update

    def begin_last_pass(self) -> None:
        self._last_pass.begin()

    def finish(self) -> None:
        self._last_pass.finish()
        names = list(self._parameters)
        filled = set[str]().union(*(bucket.filled for bucket in self._buckets))
        present = self._world.any_true([name in filled for name in names])
        self._present = {name for name, somewhere in zip(names, present, strict=True) if somewhere}

    def sums(self) -> dict[str, Tensor]:
        return {
            key: self._sum(piece).view_as(piece.weight) for key, piece in self.pieces.items() if piece.name in self._present
        }  # fmt: skip

    def norm(self) -> Tensor:
        own = [self._sum(piece) for piece in self._owned.values() if piece.name in self._present]
        counts = [sum(name in self._present for name in names) for names in self._owned_names]
        norms = torch.zeros(max(counts), device=self._device)
        if own:
            norms[: len(own)] = torch.stack(torch._foreach_norm(own))  # pyright: ignore
        gathered = _gathered(norms, self._world)
        present = [norms[:count] for norms, count in zip(gathered, counts, strict=True)]
        return torch.linalg.vector_norm(torch.cat(present))

    def _sum(self, piece: Piece) -> Tensor:
        """A piece's gradients, flat."""
        bucket = next(bucket for bucket in self._buckets if piece.name in bucket.begins)
        begin = bucket.begins[piece.name] + piece.begin
        if bucket.own is None:
            assert bucket.gradients is not None
            return bucket.gradients[begin : begin + piece.weight.numel()]
        begin -= self._part(bucket, self._world.rank)[0]
        return bucket.own[begin : begin + piece.weight.numel()]

    def clear(self) -> None:
        for bucket in self._buckets:
            bucket.clear()
        self._present.clear()
        self._last_pass.end()

    @torch.no_grad()
    def publish(self) -> None:
        """All-gather the weights, bucket by bucket: one is copied into the model while the next is on its way."""
        if not self._sharded:
            return
        before: tuple[Bucket, Tensor, PendingCollective] | None = None
        for bucket in self._buckets:
            first, end = self._part(bucket, self._world.rank)
            everything = torch.empty(bucket.length, dtype=bucket.dtype, device=self._device)
            own = everything.new_empty(end - first)
            for piece in self._owned.values():
                if piece.name in bucket.begins:
                    begin = bucket.begins[piece.name] + piece.begin - first
                    own[begin : begin + piece.weight.numel()].copy_(piece.weight.detach().view(-1))
            now = bucket, everything, self._world.gather_parts(everything, own)
            if before is not None:
                self._receive(*before)
            before = now
        if before is not None:
            self._receive(*before)

    def _receive(self, bucket: Bucket, everything: Tensor, work: PendingCollective) -> None:
        with self._world.waiting("updated weights"):
            work.wait()
        there = [self._parameters[name].detach() for name in bucket.begins]
        here = [everything[begin:][: t.numel()].view_as(t) for begin, t in zip(bucket.begins.values(), there, strict=True)]
        torch._foreach_copy_(there, here)  # pyright: ignore


class ShardedGradients:
    """Of parameters that are sharded along their first dimension: every backward pass sums over processes by itself."""

    def __init__(self, parameters: Mapping[str, DTensor], world: World):
        self._parameters, self._world = parameters, world
        self._device = next(iter(parameters.values())).to_local().device
        owned = (self._owned(name, parameter) for name, parameter in parameters.items())
        self.pieces: Mapping[str, Piece] = {piece.key: piece for piece in owned if piece is not None}

    def _owned(self, name: str, parameter: DTensor) -> Piece | None:
        """This process's part; None if it is empty, as it may be of a parameter with few rows."""
        weight = parameter.to_local().detach()
        rows = -(-len(parameter) // self._world.size)  # as torch.chunk divides them
        begin = min(self._world.rank * rows, len(parameter))
        assert len(weight) == min(rows, len(parameter) - begin)
        if not weight.numel():
            return None
        return Piece(name, weight, parameter.ndim >= 2, begin * weight[0].numel(), len(weight) == len(parameter))

    def begin_last_pass(self) -> None:
        pass

    def finish(self) -> None:
        pass

    def sums(self) -> dict[str, Tensor]:
        found = {key: self._parameters[piece.name].grad for key, piece in self.pieces.items()}
        return {key: gradient.to_local() for key, gradient in found.items() if isinstance(gradient, DTensor)}

    def norm(self) -> Tensor:
        places = {name: i for i, name in enumerate(self._parameters)}
        sums, norms = self.sums(), torch.zeros(len(places), device=self._device)
        if sums:
            at = torch.tensor([places[self.pieces[key].name] for key in sums], device=self._device)
            norms[at] = torch.stack(torch._foreach_norm(list(sums.values())))  # pyright: ignore
        return torch.linalg.vector_norm(_gathered(norms, self._world))

    def clear(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def publish(self) -> None:
        pass


class _LastPass:
    """Sums buckets over processes in the same order in all of them, each as soon as it and those before it are complete."""

    def __init__(self, buckets: list[Bucket], world: World, *, sharded: bool):
        self._buckets, self._world, self._sharded = buckets, world, sharded
        self._is_running = False
        self._missing: list[set[str]] = []
        self._next = 0

    def begin(self) -> None:
        self._missing, self._is_running = [set(bucket.begins) for bucket in self._buckets], True

    def reached(self, bucket: Bucket, name: str) -> None:
        if not self._is_running:
            return
        self._missing[next(i for i, one in enumerate(self._buckets) if one is bucket)].discard(name)
        while self._next < len(self._buckets) and not self._missing[self._next]:
            self._start_next()

    def finish(self) -> None:
        """Also the buckets that this pass has not reached, or all if there was none."""
        while self._next < len(self._buckets):
            self._start_next()
        with self._world.waiting("gradients"):
            for bucket in self._buckets:
                assert bucket.work is not None
                bucket.work.wait()
                if self._sharded:
                    bucket.gradients = None
        self.end()

    def end(self) -> None:
        self._is_running, self._next = False, 0

    def _start_next(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        device = self._world.device
        if bucket.gradients is None:
            bucket.gradients = torch.zeros(bucket.length, dtype=torch.float32, device=device)
        else:
            _zero_gaps(bucket)
        if self._sharded:
            bucket.own = torch.empty(bucket.length // self._world.size, dtype=torch.float32, device=device)
            bucket.work = self._world.sum_parts(bucket.own, bucket.gradients)
        else:
            bucket.work = self._world.sum_all(bucket.gradients)


def _zero_gaps(bucket: Bucket) -> None:
    """Zero the parameters that have no gradient in this process. (What lies between parameters is summed too, and never read.)"""
    assert bucket.gradients is not None
    names = [*bucket.begins]
    ends = [bucket.begins[name] for name in names[1:]] + [bucket.length]
    for name, end in zip(names, ends, strict=True):
        if name not in bucket.filled:
            bucket.gradients[bucket.begins[name] : end].zero_()


def lay_out(parameters: Mapping[str, nn.Parameter], size: int) -> list[Bucket]:
    """The parameters in buckets that divide into `size` aligned parts."""
    buckets: list[Bucket] = []
    current: dict[torch.dtype, Bucket] = {}
    for name, parameter in reversed([*parameters.items()]):  # the backward pass reaches the last one first
        bucket = current.get(parameter.dtype)
        if bucket is None or bucket.length >= BUCKET_ELEMENTS:
            bucket = current[parameter.dtype] = Bucket(parameter.dtype)
            buckets.append(bucket)
        bucket.begins[name] = bucket.length
        bucket.length += -(-parameter.numel() // ALIGNED) * ALIGNED
    for bucket in buckets:
        bucket.length = -(-bucket.length // (ALIGNED * size)) * ALIGNED * size
    return buckets


def _gathered(norms: Tensor, world: World) -> Tensor:
    """Every process's, a row each."""
    gathered = norms.new_empty(world.size, len(norms))
    with world.waiting("the gradient's norm"):
        world.gather_parts(gathered.view(-1), norms).wait()
    return gathered
