"""A vLLM for the CPU in an environment of its own, and settings with which it starts fast."""

import os
from pathlib import Path

import pytest

from support.paths import REPOSITORY, TESTS

PYTHON = Path(os.environ.get("PLAUDIT_VLLM_PYTHON", REPOSITORY / ".venv-vllm" / "bin" / "python"))
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # no third process for the weights: the executor is "uni", as with one GPU
    "PYTHONPATH": str(TESTS / "support/vllm_start"),
}  # fmt: skip
ARGUMENTS = ["--enforce-eager", "--dtype float32", "--distributed-executor-backend uni"]
needs_vllm = pytest.mark.skipif(not PYTHON.exists(), reason=f"needs vLLM in {PYTHON} (or set PLAUDIT_VLLM_PYTHON)")
