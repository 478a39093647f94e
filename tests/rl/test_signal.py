"""Samples whose advantages are 0 need no backward pass: the update is the same without it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from plaudit.objectives.registry import POLICY_LOSSES
from plaudit.recipe import AlgorithmSettings
from plaudit.rl.experience import Update
from plaudit.rl.learner import Learner
from plaudit.rl.losses import token_loss
from plaudit.train.trainer import Trainer
from plaudit.types import Batch
from support.experience import batches_of, handmade_samples
from support.ranks import differences, weight_difference
from support.recipes import rl_recipe, train_rl, write_recipe

# Of two samples of a random model both have one, or one has, or none.
HAS_LETTER = {"kind": "regex", "pattern": "[aeiou]"}


@pytest.fixture
def train(tmp_path, tiny_model, prompts_file) -> Callable[..., Path]:
    def train(name: str, **sections: dict) -> Path:
        small = {"rollout": {"n": 2, "max_new_tokens": 6}, "train": {"prompts_per_step": 6}, "run": {"max_steps": 3}}
        tree = rl_recipe(tiny_model, prompts_file, tmp_path / name, HAS_LETTER, **small | sections)
        train_rl(write_recipe(tmp_path / f"{name}.yaml", tree))
        return tmp_path / name

    return train


@pytest.fixture
def passes(monkeypatch) -> list[tuple[bool, int]]:
    """Of each micro-batch, whether it has a backward pass, and its target tokens."""
    update, seen = Trainer.update, []

    def update_and_record(self, batches: list[Batch], *arguments):
        seen.extend((batch.has_signal, batch.num_targets) for batch in batches)
        return update(self, batches, *arguments)

    monkeypatch.setattr(Trainer, "update", update_and_record)
    return seen


@pytest.mark.parametrize("per_update", [None, 3])
def test_a_run_is_the_same_with_and_without_those_passes(train, passes, monkeypatch, per_update):
    sections = {"train": {"prompts_per_step": 6, "prompts_per_update": per_update}}
    run = train("run", **sections)
    forward_only = sum(tokens for has_signal, tokens in passes if not has_signal)
    assert 0.1 < forward_only / sum(tokens for _, tokens in passes) < 0.9
    monkeypatch.setattr(Learner, "_only_advantages_count", False)
    passes.clear()
    everything = train("everything", **sections)
    assert all(has_signal for has_signal, _ in passes)
    assert differences(run, everything, relative=1e-5) == {}
    assert weight_difference(run, everything) < 1e-5


@pytest.mark.parametrize("algorithm", [{"kl_coefficient": 0.01}, {"entropy_coefficient": 0.01}])
def test_with_other_terms_every_sample_has_a_gradient(train, passes, algorithm):
    train("run", algorithm=algorithm, run={"max_steps": 1})
    assert all(has_signal for has_signal, _ in passes)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_no_loss_has_a_gradient_where_advantages_are_zero(name):
    [batch] = batches_of(Update(handmade_samples(), [1.0] * 5))
    logprobs_N = torch.linspace(-3, -0.1, batch.num_targets, requires_grad=True)
    old_N, zeros_N = logprobs_N.detach() - 0.5, torch.zeros_like(logprobs_N)
    loss_N = token_loss(logprobs_N, old_N, zeros_N, batch, AlgorithmSettings(loss=name)).loss_N
    loss_N.sum().backward()
    assert logprobs_N.grad is not None
    assert not loss_N.any()
    assert not logprobs_N.grad.any()
