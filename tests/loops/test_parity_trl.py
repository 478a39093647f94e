"""Parity with TRL: losses step by step, and GRPO's gradients. Needs TRL's own environment next to the checkout's."""

import re
import subprocess
import sys

import pytest

from support.paths import REPOSITORY

TRL_PYTHON = REPOSITORY / ".venv-trl/bin/python"


def compare_with_trl(kind: str) -> list[str]:
    """The output of bench/parity_trl.py, which fails unless both agree."""
    assert TRL_PYTHON.exists(), "TRL's environment is missing: make .venv-trl/installed"
    command = [sys.executable, REPOSITORY / "bench/parity_trl.py", "--kind", kind, "--trl-python", TRL_PYTHON]
    result = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout.splitlines()


@pytest.mark.slow
def test_losses_and_gradients_match_trl():
    """20 steps of SFT (2 cases), DPO (4) and reward models (2). GRPO's first gradients in 26 cases: each of six losses with ratios
    equal to 1 and not, with and without KL; an entropy bonus; a temperature. One architecture: all are compared with transformers
    elsewhere, and a loss sees only logits."""
    lines = compare_with_trl("qwen2")
    assert [int(line.split()[0]) for line in lines if re.match(r"\s*\d+  ", line)] == [*range(1, 21)] * 8, lines
    header = next(number for number, line in enumerate(lines) if line.startswith("case"))
    assert len([line for line in lines[header + 1 :] if line and not line.startswith("equal")]) == 26, lines
