"""Where training runs: in this process, in processes started here, or as one of those that a launcher started."""

import pickle
from contextlib import contextmanager

import pytest

import plaudit.cluster.join
from plaudit.errors import RecipeError
from plaudit.inputs import load_checked
from plaudit.loops import train as training
from plaudit.loops.train import train, train_in
from plaudit.world import World
from support.recipes import rl_recipe, write_recipe


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
