"""plaudit's training and TRL's: losses step by step, GRPO's gradients. Needs TRL's own environment beside the checkout's."""

import re
import subprocess
import sys

import pytest

from support.paths import REPOSITORY

TRL_PYTHON = REPOSITORY / ".venv-trl/bin/python"


def compared(kind: str) -> list[str]:
    """What bench/parity_trl.py prints, if it agrees."""
    assert TRL_PYTHON.exists(), "TRL's environment is missing: make .venv-trl/installed"
    command = [sys.executable, REPOSITORY / "bench/parity_trl.py", "--kind", kind, "--trl-python", TRL_PYTHON]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_losses_and_gradients_are_trls(kind):
    """20 steps of SFT (2 cases), DPO (4) and reward models (2). GRPO's first gradients in 26 cases: each of six losses with ratios
    of 1 and others, with and without KL; an entropy bonus; a temperature."""
    lines = compared(kind)
    assert [int(line.split()[0]) for line in lines if re.match(r"\s*\d+  ", line)] == [*range(1, 21)] * 8, lines
    header = next(number for number, line in enumerate(lines) if line.startswith("case"))
    assert len([line for line in lines[header + 1 :] if line and not line.startswith("equal")]) == 26, lines
