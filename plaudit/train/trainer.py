"""One optimisation step: gradients of a whole batch from micro-batches, clipped, applied; a non-finite one skipped."""

import os
import time
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from plaudit.data.order import stable_seed
from plaudit.errors import TrainingStopped
from plaudit.models.policy import Policy
from plaudit.recipe import Optim
from plaudit.train.optimiser import Optimiser
from plaudit.train.schedule import lr_at
from plaudit.types import Batch

Loss = Callable[[Batch], Tensor]
"""A micro-batch's share of the step's loss: already divided by what the whole batch is divided by, so that shares add up."""


def compute_repeatably(device: torch.device) -> None:
    """From here on, the same step gives the same bits. CPU kernels always do; some of CUDA's add up in any order."""
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore (a debugging aid that costs time)


class Trainer:
    """A policy with its optimiser. `step` counts the steps done; everything random in one is keyed by its number."""

    def __init__(self, policy: Policy, optim: Optim, *, total_steps: int, seed: int, max_skipped_steps: int):
        self.policy, self.optim = policy, optim
        self.optimiser = Optimiser(policy.trainable(), optim)
        self.total_steps, self.seed, self.max_skipped_steps = total_steps, seed, max_skipped_steps
        self.step = 0
        self.skipped_steps = 0

    def update(self, micro_batches: Sequence[Batch], loss: Loss) -> dict[str, float]:
        """One step on the sum of the micro-batches' losses."""
        began = time.perf_counter()
        self.policy.model.train()
        torch.manual_seed(stable_seed("step", self.seed, self.step))  # dropout; a resumed run draws the same
        total = torch.zeros((), device=self.policy.device)
        for batch in micro_batches:
            share = loss(batch)
            share.backward()
            total += share.detach()
        norm = self.optimiser.clip()
        lr = lr_at(self.step, self.total_steps, self.optim)
        finite = bool(torch.isfinite(total) & torch.isfinite(norm))
        if finite:
            self.optimiser.step(lr)
        else:
            self.skipped_steps += 1
        self.optimiser.forget_gradients()
        self.step += 1
        if self.skipped_steps > self.max_skipped_steps:
            raise TrainingStopped(
                f"step {self.step}: the loss or gradient was not finite (loss {total.item()}, gradient norm {norm.item()}) for the "
                f"{self.skipped_steps}. time; train.max_skipped_steps is {self.max_skipped_steps}. Look at the data of that step, "
                "lower optim.lr, or use model.dtype=float32."
            )
        return {
            "loss": total.item(),
            "grad_norm": norm.item(),
            "lr": lr,
            "skipped_steps": float(self.skipped_steps),
            "time/update_s": time.perf_counter() - began,
        }

    # What a checkpoint holds, besides the model

    def state(self) -> tuple[dict[str, int], dict[str, Tensor]]:
        return {"step": self.step, "skipped_steps": self.skipped_steps}, self.optimiser.state()

    def load_state(self, counts: dict[str, int], parts: Iterable[dict[str, Tensor]]) -> None:
        self.step, self.skipped_steps = counts["step"], counts["skipped_steps"]
        self.optimiser.load_state(parts)
