"""The demo as a user runs it: RL must clearly beat its SFT cold start."""

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from plaudit.cli import app
from plaudit.errors import PlauditError
from plaudit.loops import demo
from plaudit.shipped import find_shipped
from support.recipes import Stopped


@pytest.mark.slow
def test_rl_beats_its_cold_start(tmp_path, monkeypatch):
    """One seed, and the first 40 of 120 steps of RL: docs/demo.md has the results of three whole runs, with the command."""
    recipe = find_shipped(demo.RL).read_text(encoding="utf-8")
    assert "max_steps: 120" in recipe
    (tmp_path / "rl.yaml").write_text(recipe.replace("max_steps: 120", "max_steps: 40"))
    monkeypatch.setattr(demo, "RL", tmp_path / "rl.yaml")
    seed = os.environ.get("PLAUDIT_DEMO_SEED", "0")
    out = tmp_path / "demo"
    result = CliRunner().invoke(app, ["demo", "--seed", seed, "--out", str(out)], catch_exceptions=False)
    assert result.exit_code == 0
    assert f"picture: {out / 'demo.png'}" in result.output
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
    rewards = [
        row["val/reward"] for row in map(json.loads, (out / "rl/metrics.jsonl").read_text().splitlines()) if "val/reward" in row
    ]
    assert 0.1 < rewards[0] < 0.6, "after SFT it solves some of the tasks"
    assert rewards[-1] - rewards[0] >= 0.25

    again = CliRunner().invoke(app, ["demo", "--seed", seed, "--out", str(out)], catch_exceptions=False)
    assert again.output.splitlines()[-3:] == result.output.splitlines()[-3:], "a second run prints the same summary"


def test_it_starts_in_any_folder(tmp_path, monkeypatch):
    """Its recipes ship with plaudit; the slow test runs it to the end."""
    from plaudit.loops.demo import RL, SFT, run_demo

    started = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "make_sorting", lambda out, **_: write_files(out, "sft.jsonl", "rl.jsonl", "val.jsonl"))
    monkeypatch.setattr(demo, "make_tiny_model", lambda _, out, **__: write_files(out, "config.json") and 0)
    monkeypatch.setattr(demo.rl, "evaluate", lambda loaded, sources: started.append(loaded.path) or {"val/reward": 0.0})

    def train(loaded, sources):
        assert loaded.recipe.cluster.gpus == 2
        if loaded.recipe.stage == "rl":
            raise Stopped(loaded.path)
        started.append(loaded.path)
        return tmp_path / "runs/demo/base"

    monkeypatch.setattr(demo, "train", train)
    with pytest.raises(Stopped, match=r"rl\.yaml"):
        run_demo(Path("runs/demo"), 0, ["cluster.gpus=2"])
    assert started == [find_shipped(RL), find_shipped(SFT)]
    assert not Path("recipes").exists()


def test_it_is_not_written_among_other_files(tmp_path):
    """Whose data/ and rl/ it would take for its own."""
    from plaudit.loops.demo import run_demo

    write_files(tmp_path / "data", "val.jsonl")
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(PlauditError, match=r"is not empty \(it has thesis\.tex\); name a new folder"):
        run_demo(tmp_path, 0)
    assert not (tmp_path / "base").exists()


def write_files(folder: Path, *names: str) -> bool:
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_text('{"prompt": "Sort: b a", "response": "a b"}\n')
    return True
