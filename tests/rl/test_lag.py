"""rollout.lag: 1: the next step is sampled and scored, with older weights, while this one is trained."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from support.recipes import Stopped, exact_metrics, rl_recipe, stop_before, train_rl, write_recipe

STEPS = 5


@pytest.fixture
def recipe(tmp_path, tiny_model, prompts_file, reward_file):
    def write(name: str = "run", **sections) -> Path:
        sections = {"rollout": {"n": 2, "max_new_tokens": 6, "stop": ["e", "."], "lag": 1}, **sections}
        sections["run"] = {"max_steps": STEPS, "save_every": 2, **sections.get("run", {})}
        return write_recipe(
            tmp_path / f"{name}.yaml", rl_recipe(tiny_model, prompts_file, tmp_path / name, reward_file, **sections)
        )

    return write


def versions(run: Path) -> list[set[int]]:
    return [set(pq.read_table(file)["version"].to_pylist()) for file in sorted((run / "samples").glob("train_*"))]


def assert_same(run: Path, expected: Path) -> None:
    assert exact_metrics(run) == exact_metrics(expected)
    for file in expected.glob("samples/*"):
        assert pq.read_table(run / "samples" / file.name) == pq.read_table(file)
    model = "model/model.safetensors"
    assert (run / model).read_bytes() == (expected / model).read_bytes()


def test_each_step_is_sampled_by_the_weights_before_the_last_update(tmp_path, recipe, monkeypatch):
    train_rl(recipe())
    assert versions(tmp_path / "run") == [{0}, {0}, {1}, {2}, {3}]
    assert [row["lag"] for row in exact_metrics(tmp_path / "run")] == [0, 1, 1, 1, 1]
    stop_before(monkeypatch, 4)
    with pytest.raises(Stopped):
        train_rl(recipe("again"))
    train_rl(recipe("again"))
    assert_same(tmp_path / "again", tmp_path / "run")
