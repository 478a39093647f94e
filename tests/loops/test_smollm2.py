"""The recipe for a real pretrained model, on a CPU: fewer and smaller steps, everything else unchanged."""

import json
import os
from pathlib import Path

import pytest

from plaudit.prepare.arithmetic import make_arithmetic
from plaudit.prepare.smollm2 import make_smollm2
from support.paths import REPOSITORY
from support.recipes import train_rl


@pytest.mark.slow
def test_grpo_on_smollm2(tmp_path, monkeypatch):
    monkeypatch.chdir(REPOSITORY)  # the recipe's path to its reward is relative to it
    model = Path(os.environ.get("PLAUDIT_SMOLLM2", REPOSITORY / "models/smollm2"))
    if not (model / "config.json").exists():
        model = tmp_path / "smollm2"
        make_smollm2(model)
    make_arithmetic(tmp_path / "data", train=64, val=16, digits=1, operators="+", seed=0)
    train_rl(
        REPOSITORY / "recipes/smollm2/grpo.yaml",
        f"model.path={model}", "model.dtype=bfloat16", "run.device=cpu", f"run.dir={tmp_path / 'run'}",
        f"data.train={tmp_path / 'data/train.parquet'}", f"data.val={tmp_path / 'data/val.parquet'}",
        "train.prompts_per_step=4", "rollout.n=4", "run.max_steps=2", "run.validate_every=2", "run.save_every_minutes=null",
    )  # fmt: skip
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert rows[0]["val/reward"] > 0.3, "the pretrained model can add small numbers"
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["mismatch"] < 0.05 for row in rows[1:])
    assert not [name for row in rows for name in row if name.startswith("failures/")]
    assert all(0 < row["length"] <= 24 and row["grad_norm"] > 0 for row in rows[1:] if row["groups_without_signal"] < 1)
