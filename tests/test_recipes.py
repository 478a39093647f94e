"""Every recipe in the repository is valid, and trains: two steps of it, on a tiny model."""

import json

import pytest
from conftest import REPOSITORY, train_sft

from plaudit.config import load, to_yaml

RECIPES = sorted((REPOSITORY / "recipes").rglob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_recipe_is_valid_and_says_its_stage(path, tmp_path):
    loaded = load(path)
    assert "stage" in loaded.recipe.model_fields_set
    (tmp_path / "resolved.yaml").write_text(to_yaml(loaded))
    assert load(tmp_path / "resolved.yaml").recipe == loaded.recipe


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_recipe_trains_two_steps(path, tmp_path, tiny_model, rows_file):
    overrides = [
        f"model.path={tiny_model}",
        f"data.train={rows_file}",
        f"run.dir={tmp_path / 'run'}",
        "run.max_steps=2",
        "run.trackers=[]",
        "run.device=cpu",
        "train.rows_per_step=4",
    ]
    recipe = load(path).recipe
    if recipe.data.val:
        overrides.append(f"data.val={rows_file}")
    if recipe.model.tokenizer:
        overrides.append(f"model.tokenizer={tiny_model}")
    model = train_sft(path, *overrides)
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == 2
    assert (model / "model.safetensors").exists()


def test_the_first_recipe_learns(tmp_path, monkeypatch):
    """The README's two commands: the model must get much better at rows it has never seen."""
    from plaudit.prepare.tiny_model import make_tiny_model

    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").symlink_to(REPOSITORY / "recipes")
    make_tiny_model(["recipes/first/train.jsonl"], "models/tiny")
    train_sft(REPOSITORY / "recipes/first/sft.yaml")
    rows = map(json.loads, (tmp_path / "runs/first/metrics.jsonl").read_text().splitlines())
    losses = [row["val/loss"] for row in rows if "val/loss" in row]
    assert losses[0] > 5
    assert min(losses) < 0.6
