"""RL with a real vLLM server as the engine: killed, resumed, and nothing of it left."""

import json
import re
import signal
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from plaudit.prepare.tiny_model import make_tiny_model
from support.processes import gone, signalled
from support.recipes import rl_recipe, train_rl, write_recipe
from support.vllm import ARGUMENTS, ENVIRONMENT, PYTHON, needs_vllm

pytestmark = [pytest.mark.slow, needs_vllm]


def server_is_gone(run: Path) -> bool:
    """Both of its processes, which begin their lines with their names and numbers."""
    pids = dict(re.findall(r"^\((APIServer|EngineCore)[^)]*\bpid=(\d+)\)", (run / "engine_0.log").read_text(), re.M))
    assert pids.keys() == {"APIServer", "EngineCore"}
    return gone(*map(int, pids.values()))


def test_a_run_that_is_killed_resumes_with_its_server_and_loses_nothing(
    tmp_path, rows_file, prompts_file, reward_file, monkeypatch
):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    make_tiny_model([rows_file], tmp_path / "model", hidden_size=128, vocabulary=320)
    rollout = {"engine": "vllm", "server": {"program": str(PYTHON), "arguments": ARGUMENTS}}
    run = {"max_steps": 3, "save_every": 1}
    recipe = rl_recipe(tmp_path / "model", prompts_file, tmp_path / "run", reward_file, rollout=rollout, run=run)
    file = write_recipe(tmp_path / "r.yaml", recipe)
    signalled(signal.SIGKILL, "behind line 2", "rl", file, within_s=900.0)
    assert server_is_gone(tmp_path / "run"), "its guard has ended it"
    train_rl(file)
    assert server_is_gone(tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["mismatch"] < 1e-4, "in fp32: the server has the weights that are trained"
        assert 0.999 < row["importance"] < 1.001, "on by default, and with so small a mismatch about 1"
    samples = [pq.read_table(sample_file(tmp_path / "run", step)) for step in (1, 2, 3)]
    assert {len(table) for table in samples} == {12}


def sample_file(run: Path, step: int) -> Path:
    [found] = (run / "samples").glob(f"*train*{step:06d}*")
    return found
