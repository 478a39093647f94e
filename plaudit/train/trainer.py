"""One optimiser update: gradients of a whole batch from micro-batches, clipped, applied; a non-finite one skipped."""

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from plaudit.errors import TrainingStopped
from plaudit.recipe import OptimSettings
from plaudit.seeding import stable_seed
from plaudit.train.optimiser import Optimiser
from plaudit.types import Batch
from plaudit.world import World

Loss = Callable[[Batch], tuple[Tensor, Mapping[str, Tensor]]]
"""A micro-batch's share of the update's loss, and of metrics beside it: already divided by what the whole update is divided by, so
that shares add up."""


def compute_repeatably(device: torch.device) -> None:
    """From here on, the same step gives the same bits. CPU kernels always do; some of CUDA's add up in any order."""
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore (a debugging aid that costs time)


class Trained(Protocol):
    """A policy, or a critic: a model on its device, that can be saved."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def device(self) -> torch.device: ...
    def trainable(self) -> Iterator[tuple[str, nn.Parameter]]: ...
    def save(self, folder: Path) -> None: ...


class Trainer:
    """A policy with its optimiser. `updates` counts those done; everything random in one is keyed by its number."""

    def __init__(self, policy: Trained, optim: OptimSettings, *, seed: int, max_skipped_steps: int, world: World | None = None):
        self.policy, self.world = policy, world or World.alone(policy.device)
        self.beside: dict[str, Trainer] = {}
        """Models that learn beside the policy (a critic), by name. Saved, resumed and finished with it."""
        self.optimiser = Optimiser(policy.trainable(), optim)
        self.seed, self.max_skipped_steps = seed, max_skipped_steps
        self.updates = 0
        self.skipped_steps = 0

    def like_it(self, other: Trained, optim: OptimSettings) -> "Trainer":
        """One for another model, with the same seed and patience."""
        return Trainer(other, optim, seed=self.seed, max_skipped_steps=self.max_skipped_steps, world=self.world)

    def update(self, micro_batches: Sequence[Batch], loss: Loss, lr: float) -> dict[str, float]:
        """One update on the sum of the micro-batches' losses; returns it, the other sums, and how the update went.

        Processes that train together are all given the same micro-batches, and return the same."""
        began = time.perf_counter()
        self.policy.model.train()
        total = torch.zeros((), device=self.policy.device)
        sums: dict[str, Tensor] = {}
        for i, batch in self.world.shard(micro_batches):
            torch.manual_seed(stable_seed("step", self.seed, self.updates, i))  # dropout: resumed or shared out, the same
            share, others = loss(batch)
            share.backward()
            total += share.detach()
            for name, value in others.items():
                sums[name] = sums[name] + value.detach() if name in sums else value.detach()
        self.optimiser.sum_gradients(self.world)
        norm = self.optimiser.clip()
        told = self.world.sum_metrics({"loss": total.item(), **{name: value.item() for name, value in sums.items()}})
        finite = math.isfinite(told["loss"]) and bool(torch.isfinite(norm))
        if finite:
            self.optimiser.step(lr)
        else:
            self.skipped_steps += 1
        self.optimiser.forget_gradients()
        self.updates += 1
        if self.skipped_steps > self.max_skipped_steps:
            raise TrainingStopped(
                f"update {self.updates}: the loss or gradient was not finite (loss {told['loss']}, gradient norm {norm.item()}) "
                f"for the {self.skipped_steps}. time; train.max_skipped_steps is {self.max_skipped_steps}. Look at the data it was "
                "made of, lower optim.lr, or use model.dtype=float32."
            )
        return {
            **told,
            "grad_norm": norm.item(),
            "lr": lr,
            "skipped_steps": float(self.skipped_steps),
            "time/update_s": time.perf_counter() - began,
        }

    # What a checkpoint holds, besides the model

    def state(self) -> tuple[dict[str, int], dict[str, Tensor]]:
        return {"updates": self.updates, "skipped_steps": self.skipped_steps}, self.optimiser.state()

    def load_state(self, counts: dict[str, int], parts: Iterable[dict[str, Tensor]]) -> None:
        # Where updates were not counted yet, a step was one.
        self.updates, self.skipped_steps = counts.get("updates", counts.get("step", 0)), counts["skipped_steps"]
        self.optimiser.load_state(parts)
