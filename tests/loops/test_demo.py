"""The demo as a user runs it: RL must clearly beat its SFT cold start."""

import json
import os

import pytest
from typer.testing import CliRunner

from plaudit.cli import app


@pytest.mark.slow
def test_rl_beats_its_cold_start(tmp_path):
    """One seed: docs/demo.md has three, with the command."""
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


def test_missing_recipes_are_reported(tmp_path, monkeypatch):
    from plaudit.errors import PlauditError
    from plaudit.loops import demo

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "RECIPES", ("recipes/demo/none.yaml", "recipes/demo/rl.yaml"))
    with pytest.raises(PlauditError, match=r"none\.yaml is missing: run the demo in a clone of the repository"):
        demo.run_demo(tmp_path / "demo", 0)
