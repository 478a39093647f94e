"""RL with SGLang as the engine, on a stand-in for its server."""

import json

import pytest

from support.recipes import rl_recipe, train_rl, write_recipe
from support.sglang import stand_in, stand_ins


@pytest.mark.slow
def test_training_steps_reach_the_server(tmp_path, tiny_model, prompts_file, reward_file):
    rollout = {"engine": "sglang", "server": stand_in()}
    recipe = rl_recipe(tiny_model, prompts_file, tmp_path / "run", reward_file, rollout=rollout, run={"max_steps": 3})
    train_rl(write_recipe(tmp_path / "r.yaml", recipe))
    assert not stand_ins()
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["mismatch"] < 1e-4, "in fp32: the server has the weights that are trained"
        assert 0.999 < row["importance"] < 1.001, "on by default, as for every served engine"
