"""plaudit's SFT, DPO and reward models and TRL's, step by step. Needs TRL's own environment beside the checkout's."""

import re
import subprocess
import sys

import pytest
from conftest import REPOSITORY

TRL_PYTHON = REPOSITORY / ".venv-trl/bin/python"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_sft_has_trls_losses_at_every_step(kind):
    assert TRL_PYTHON.exists(), "TRL's environment is missing: make .venv-trl/installed"
    script = REPOSITORY / "bench/parity_trl.py"
    command = [sys.executable, script, "--kind", kind, "--trl-python", TRL_PYTHON]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [int(line.split()[0]) for line in done.stdout.splitlines() if re.match(r"\s*\d+  ", line)]
    assert steps == [*range(1, 21)] * 2, done.stdout  # with and without warm-up


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", ["dpo", "ipo", "hinge", "dpo with nll", "reward model", "reward model with margins and centring"])
def test_pairs_have_trls_losses_at_every_step(case):
    assert TRL_PYTHON.exists(), "TRL's environment is missing: make .venv-trl/installed"
    script = REPOSITORY / "bench/parity_trl_pairs.py"
    done = subprocess.run([sys.executable, script, "--case", case, "--trl-python", TRL_PYTHON], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [int(line.split()[0]) for line in done.stdout.splitlines() if re.match(r"\s*\d+  ", line)]
    assert steps == [*range(1, 21)], done.stdout
