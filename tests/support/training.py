"""A trainer on a tiny model."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from plaudit.data.templates import load_template, load_tokenizer
from plaudit.models.logprobs import target_logprobs
from plaudit.models.trainable import TrainableModel, load_policy
from plaudit.objectives.supervised import nll
from plaudit.recipe import ModelSettings, OptimSettings
from plaudit.train.schedule import lr_at
from plaudit.train.trainer import Trainer
from plaudit.types import Batch, Conversation, Example
from plaudit.world import World
from support.rows import arithmetic_rows

CPU = torch.device("cpu")


def load(folder: Path, **model) -> TrainableModel:
    template = load_template(load_tokenizer(str(folder)), None)
    return load_policy(ModelSettings(path=str(folder), **model), template, CPU)


def rows_of(policy: TrainableModel, count: int = 4) -> list[Example]:
    return [policy.template.example(Conversation(row["messages"]), "a row") for row in arithmetic_rows(count)]


def nll_of(policy: TrainableModel, batches: Sequence[Batch]) -> Callable[[Batch], Tensor]:
    num_targets = sum(batch.num_targets for batch in batches)
    return lambda batch: nll(target_logprobs(policy.model, batch).logprobs_N, num_targets)


class ScheduledTrainer(Trainer):
    """A trainer whose updates follow a schedule, with losses that return no metrics, as in most tests here."""

    def __init__(self, policy: TrainableModel, optim: OptimSettings, total_steps: int, max_skipped_steps: int):
        super().__init__(policy, optim, seed=0, max_skipped_steps=max_skipped_steps, world=World.alone(policy.device))
        self.optim, self.total_steps = optim, total_steps

    def update(self, micro_batches, loss):
        return super().update(micro_batches, lambda batch: (loss(batch), {}), lr_at(self.updates, self.total_steps, self.optim))


def make_trainer(policy: TrainableModel, *, total_steps: int = 100, max_skipped_steps: int = 10, **optim) -> Trainer:
    settings = OptimSettings(**{"lr": 1e-3, "schedule": "constant", **optim})
    return ScheduledTrainer(policy, settings, total_steps, max_skipped_steps)


def snapshot(trainer: Trainer) -> dict[str, Tensor]:
    """The model's weights, the master weights and the moments."""
    weights = {f"model/{name}": p for name, p in trainer.trained.model.named_parameters()}
    return {name: tensor.detach().clone() for name, tensor in {**weights, **trainer.optimiser.state()}.items()}


def assert_same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []
