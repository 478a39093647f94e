"""Where training runs: in this process, in processes started here, or as one of those that a launcher started."""

import pickle
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import plaudit.cluster.join
from plaudit.errors import RecipeError
from plaudit.inputs import load_checked
from plaudit.loops import train as training
from plaudit.loops.train import train, train_in
from plaudit.models import logprobs
from plaudit.train import auto, build
from plaudit.train.trainer import Trainer
from plaudit.world import World
from support.recipes import pair_recipe, rl_recipe, sft_recipe, write_recipe


@pytest.fixture
def recipe_file(tiny_model, prompts_file, reward_file, tmp_path):
    return write_recipe(tmp_path / "r.yaml", rl_recipe(tiny_model, prompts_file, tmp_path / "run", reward_file))


@pytest.fixture
def worlds(monkeypatch, tmp_path) -> list[World]:
    """In which RL was trained."""
    seen = []
    monkeypatch.setattr("plaudit.loops.rl.train", lambda loaded, sources, world: seen.append(world) or tmp_path / "model")
    return seen


def test_one_process_by_default(recipe_file, worlds, tmp_path):
    assert train(*load_checked(recipe_file, [], "rl")) == tmp_path / "model"
    assert [(world.rank, world.size, world.is_joined) for world in worlds] == [(0, 1, False)]


def test_several_processes_are_started_with_all_they_need(recipe_file, monkeypatch):
    """The recipe with its rewards, and the data files, as they arrive in another process."""
    loaded, sources = load_checked(recipe_file, ["cluster.gpus=3", "cluster.restarts=2"], "rl")
    started = []
    monkeypatch.setattr(training, "run_ranks", lambda start, restarts, progress: started.append((start.args, restarts)) or "m")
    assert str(train(loaded, sources)) == "m"
    [((job, count, recipe, workers), restarts)] = started
    assert workers == [], "for reward models: on several machines only"
    job = pickle.loads(pickle.dumps(job))
    assert (count, restarts, recipe) == (3, 2, loaded.recipe)
    assert job.func is train_in
    assert job.keywords == {"loaded": loaded, "sources": sources}


def test_a_launched_process_joins(recipe_file, worlds, monkeypatch):
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": 29500}.items():
        monkeypatch.setenv(name, str(value))
    joined = World(1, 2, World.alone().device, True)

    @contextmanager
    def join(ranks, recipe):
        assert (ranks.rank, ranks.size, ranks.launcher) == (1, 2, "torchrun")
        yield joined

    monkeypatch.setattr(plaudit.cluster.join, "join", join)
    train(*load_checked(recipe_file, [], "rl"))
    assert worlds == [joined]
    with pytest.raises(RecipeError, match=r"cluster\.gpus is 4, but torchrun has started 2 processes"):
        train(*load_checked(recipe_file, ["cluster.gpus=4"], "rl"))


@pytest.fixture
def recipe_of(tiny_model, rows_file, pairs_file, prompts_file, reward_file, tmp_path):
    """One step of each stage, with everything decided by plaudit."""

    def write(stage: str) -> Any:
        run = tmp_path / "run"
        trees = {
            "sft": sft_recipe(tiny_model, rows_file, run),
            "dpo": pair_recipe(tiny_model, pairs_file, run),
            "reward-model": pair_recipe(tiny_model, pairs_file, run),
            "rl": rl_recipe(tiny_model, prompts_file, run, reward_file),
        }
        tree = {"stage": stage, **trees[stage]}
        tree["train"]["tokens_per_micro_batch"] = "auto"
        tree["model"]["gradient_checkpointing"] = "auto"
        tree["run"]["max_steps"] = 1
        return write_recipe(tmp_path / f"{stage}.yaml", tree)

    return write


@pytest.mark.parametrize("stage", ["sft", "dpo", "reward-model", "rl"])
def test_what_auto_stands_for_reaches_the_model(recipe_of, monkeypatch, stage):
    """As on a GPU whose memory suffices for all logits, but not for the activations of both layers or for large micro-batches."""
    has_logits = stage != "reward-model"

    def resolve(recipe: Any, *arguments: Any, **options: Any) -> Any:
        resolved = auto.resolve_auto(recipe, *arguments, **options)
        model = resolved.model.model_copy(update={"gradient_checkpointing": 1})
        train = resolved.train.model_copy(update={"keep_logits": True} if has_logits else {})
        return resolved.model_copy(update={"model": model, "train": train})

    kept, checkpointed, batch_sizes = [], [], []
    compute, update = logprobs.token_logprobs, Trainer.update

    def token_logprobs(*arguments: Any, keep: bool = False, **options: Any) -> Any:
        if torch.is_grad_enabled():
            kept.append(keep)
        return compute(*arguments, keep=keep, **options)

    def note_and_update(self: Trainer, batches: Any, *arguments: Any) -> Any:
        model: Any = self.trained.model
        checkpointed.append([layer.gradient_checkpointing for layer in model.base_model.layers])
        batch_sizes.extend(len(batch.tokens_T) for batch in batches)
        return update(self, batches, *arguments)

    monkeypatch.setattr(build, "resolve_auto", resolve)
    monkeypatch.setattr(auto, "choose_micro_batch", lambda *_: 128)
    monkeypatch.setattr(logprobs, "token_logprobs", token_logprobs)
    monkeypatch.setattr(Trainer, "update", note_and_update)
    train(*load_checked(recipe_of(stage), [], stage))
    assert set(kept) == ({True} if has_logits else set())
    assert checkpointed == [[True, False]]
    assert len(batch_sizes) > 1
    assert max(batch_sizes) <= 128


def test_a_trainer_is_not_built_from_an_unresolved_recipe(recipe_of):
    loaded, _ = load_checked(recipe_of("sft"), [], "sft")
    with pytest.raises(AssertionError, match=r"train\.keep_logits has not been resolved"):
        build.build_trainer(loaded.recipe, None, "none", World.alone())  # pyright: ignore


def test_a_reward_model_has_no_logits_to_keep(recipe_of):
    with pytest.raises(RecipeError, match=r"train\.keep_logits is not a setting"):
        load_checked(recipe_of("reward-model"), ["train.keep_logits=true"], "reward-model")
