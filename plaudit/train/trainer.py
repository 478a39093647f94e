"""One optimiser update: gradients of a batch from its micro-batches, clipped, applied; skipped if not finite."""

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from plaudit.balance import idle_share
from plaudit.checkpoint import Snapshot
from plaudit.errors import TrainingStopped
from plaudit.models.host_memory import HostMemory
from plaudit.models.memory import Sharding
from plaudit.models.sharded import PASS, run_in_pass
from plaudit.recipe import OptimSettings
from plaudit.seeding import stable_seed
from plaudit.train.optimiser import Optimiser
from plaudit.train.saved_state import save_tensors, saved_tensors
from plaudit.types import Batch
from plaudit.world import World

Loss = Callable[[Batch], tuple[Tensor, Mapping[str, Tensor]]]
"""A micro-batch's share of the update's loss and of its metrics: already divided by the whole update's normaliser, so that shares
add up."""


def compute_repeatably(device: torch.device) -> None:
    """From here on, the same step gives the same bits. CPU kernels always do; some CUDA kernels add in any order."""
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore (a debugging aid that costs time)


class Trainable(Protocol):
    """A policy, a critic or a reward model: a module on its device that can be saved."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def device(self) -> torch.device: ...
    def trainable(self) -> Iterator[tuple[str, nn.Parameter]]: ...
    def saved_bytes(self) -> int: ...
    def save(self, folder: Path | None) -> None:
        """Called in all processes, of which one has a folder to write to: the weights may have to be gathered."""

    def snapshot(self, memory: HostMemory | None, *, keep: bool) -> Callable[[Path], None]:
        """What saves the model as it is now, or with `memory`, as it was now. Called in all processes, of which one keeps it."""
        ...


class Trainer:
    """A model with its optimiser. `updates` counts the updates done; all randomness in an update is keyed by its number."""

    def __init__(
        self,
        trained: Trainable,
        optim: OptimSettings,
        *,
        seed: int,
        max_skipped_steps: int,
        world: World,
        sharding: Sharding = "none",
        name: str = "model",
    ):
        """`sharding`: what the world's processes divide among themselves; under `full`, the caller has sharded the models.
        `name`: the model's folder in a checkpoint and in the run folder."""
        self.trained, self.name = trained, name
        self.world, self.sharding = world, sharding
        self.sharded = sharding != "none"
        """Whether each process has a part of the optimiser's state only."""
        self.optimiser = Optimiser(trained.trainable(), optim, world, sharded=self.sharded)
        self.seed, self.max_skipped_steps = seed, max_skipped_steps
        self.updates = 0
        self.skipped_steps = 0
        self._memory: HostMemory | None = None
        """For copies of what is being saved."""

    def sibling(self, trained: Trainable, optim: OptimSettings, name: str) -> "Trainer":
        """A trainer for another model of the same run."""
        shared = {"seed": self.seed, "max_skipped_steps": self.max_skipped_steps, "world": self.world, "sharding": self.sharding}
        return Trainer(trained, optim, name=name, **shared)

    def update(self, micro_batches: Sequence[Batch], loss: Loss, lr: float) -> dict[str, float]:
        """One update on the sum of the micro-batches' losses; returns the loss, its metrics, and how the update went.

        Processes that train together are all given the same micro-batches, and return the same metrics."""
        began = time.perf_counter()
        self.trained.model.train()
        try:
            total, sums = self._run_passes(micro_batches, loss)
            self.optimiser.gradients.finish()
            norm = self.optimiser.clip()
            metrics = self.world.sum_metrics({"loss": total.item(), **{name: value.item() for name, value in sums.items()}})
            if math.isfinite(metrics["loss"]) and bool(torch.isfinite(norm)):
                self.optimiser.step(lr)
            else:
                self.skipped_steps += 1
        finally:
            self.optimiser.gradients.clear()  # even of an update that something has ended: not a part of the next one
        self.updates += 1
        if self.skipped_steps > self.max_skipped_steps:
            raise TrainingStopped(
                f"update {self.updates}: the loss or gradient was not finite (loss {metrics['loss']}, gradient norm "
                f"{norm.item()}), {self.skipped_steps} times so far; train.max_skipped_steps is {self.max_skipped_steps}. Check "
                "the data of this update, lower optim.lr, or set model.dtype=float32."
            )
        if self.world.size > 1:
            tokens = [batch.num_tokens for batch in micro_batches]
            metrics["time/update_idle_share"] = idle_share(
                [sum(tokens[rank :: self.world.size]) for rank in range(self.world.size)]
            )
        return {
            **metrics,
            "grad_norm": norm.item(),
            "lr": lr,
            "skipped_steps": float(self.skipped_steps),
            "time/update_s": time.perf_counter() - began,
        }

    def _run_passes(self, micro_batches: Sequence[Batch], loss: Loss) -> tuple[Tensor, dict[str, Tensor]]:
        """Forward and backward passes over this process's micro-batches; returns its share of the loss and of the metrics."""
        total = torch.zeros((), device=self.trained.device)
        sums: dict[str, Tensor] = {}
        own = self.world.share(len(micro_batches))
        repeats = self.world.repeats(len(micro_batches)) if self.sharding == "full" else []
        for number, i in enumerate([*own, *repeats]):
            self.world.heartbeat.beat()
            # Keyed by the micro-batch, so that dropout is the same after a resume and on any number of processes.
            _seed_generators(stable_seed("step", self.seed, self.updates, i), self.trained.device)
            batch = micro_batches[i]
            with torch.set_grad_enabled(batch.has_signal):
                share, metric_shares = run_in_pass(self.trained.model, loss, batch)
            if number == len(own) + len(repeats) - 1:
                self.optimiser.gradients.begin_last_pass()
            counts = number < len(own)  # a repeat is counted elsewhere
            if batch.has_signal:
                with self.world.waiting(PASS) if self.sharding == "full" else nullcontext():
                    (share if counts else 0.0 * share).backward()
            if not counts:
                continue
            total += share.detach()
            for name, value in metric_shares.items():
                sums[name] = sums[name] + value.detach() if name in sums else value.detach()
        return total, sums

    # Checkpoints (a `Saveable`)

    def state_bytes(self) -> int:
        """Of this process's part of a checkpoint."""
        state = sum(tensor.numel() * tensor.element_size() for tensor in self._own_state().values())
        return state + (self.trained.saved_bytes() if self.world.leads else 0)

    def snapshot(self, *, copy: bool) -> Snapshot:
        """This process's part."""
        self._memory = memory = (self._memory or HostMemory()) if copy else None
        if memory is not None:
            memory.begin()
        write_model = self.trained.snapshot(memory, keep=self.world.leads)
        state = self._own_state() if memory is None else memory.copies(self._optimiser_folder, self._own_state())
        if memory is not None:
            memory.settle()

        def write(folder: Path) -> list[Path]:
            written = []
            if self.world.leads:
                write_model(folder / self.name)
                written = [file for file in (folder / self.name).rglob("*") if file.is_file()]
            optimiser_folder = folder / self._optimiser_folder
            optimiser_folder.mkdir(exist_ok=True)
            return written + save_tensors(state, optimiser_folder, prefix=f"rank{self.world.rank}_" if self.sharded else "")

        return Snapshot({"updates": self.updates, "skipped_steps": self.skipped_steps}, write)

    def _own_state(self) -> dict[str, Tensor]:
        """What only this process saves."""
        return self.optimiser.state() if self.sharded or self.world.leads else {}

    def load_state(self, folder: Path, state: dict[str, Any]) -> None:
        self.updates, self.skipped_steps = state["updates"], state["skipped_steps"]
        self.optimiser.load_state(saved_tensors(folder / self._optimiser_folder))

    def models(self) -> Mapping[str, Callable[[Path | None], None]]:
        return {self.name: self.trained.save}

    @property
    def _optimiser_folder(self) -> str:
        return "trainer" if self.name == "model" else f"{self.name}_trainer"


def _seed_generators(seed: int, device: torch.device) -> None:
    """As torch.manual_seed, which without a GPU also formats a stack trace for CUDA's sake, at 9 % of a small update's time."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):  # the current device may be another one
            torch.cuda.manual_seed(seed)
