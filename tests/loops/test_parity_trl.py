"""plaudit's training and TRL's: losses step by step, GRPO's gradients. Needs TRL's own environment beside the checkout's."""

import re
import subprocess
import sys

import pytest

from support.paths import REPOSITORY

TRL_PYTHON = REPOSITORY / ".venv-trl/bin/python"


def compared(kind: str, stage: str) -> list[str]:
    """What bench/parity_trl.py prints, if it agrees."""
    assert TRL_PYTHON.exists(), "TRL's environment is missing: make .venv-trl/installed"
    command = [sys.executable, REPOSITORY / "bench/parity_trl.py", "--kind", kind, "--stage", stage, "--trl-python", TRL_PYTHON]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize(("stage", "cases"), [("sft", 2), ("dpo", 4), ("reward-model", 2)])
def test_losses_are_trls_at_every_step(kind, stage, cases):
    lines = compared(kind, stage)
    assert [int(line.split()[0]) for line in lines if re.match(r"\s*\d+  ", line)] == [*range(1, 21)] * cases, lines


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_grpos_first_gradients_are_trls(kind):
    """Each of six losses with ratios of 1 and others, with and without KL; an entropy bonus; a temperature."""
    lines = compared(kind, "grpo")
    header = next(number for number, line in enumerate(lines) if line.startswith("case"))
    assert len([line for line in lines[header + 1 :] if line and not line.startswith("equal")]) == 26, lines
