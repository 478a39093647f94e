"""The commands that start servers."""

import importlib.util

import pytest

from plaudit.servers.sglang_command import SGLANG
from plaudit.servers.vllm_command import VLLM


@pytest.mark.parametrize(
    ("server", "program", "words"),
    [
        (SGLANG, ".venv-sglang/bin/python", (".venv-sglang/bin/python", "-m", "sglang.launch_server")),
        (SGLANG, "env A=1 sglang", ("env", "A=1", "sglang", "serve")),
        (SGLANG, "uv run sglang serve", ("uv", "run", "sglang", "serve")),
        (VLLM, "python3", ("python3", "-m", "vllm.entrypoints.openai.api_server")),
        (VLLM, "vllm", ("vllm", "serve")),
    ],
)
def test_the_command_is_completed(server, program, words):
    assert server.words(program) == words


def test_a_missing_sglang_comes_with_advice(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    problem = SGLANG.find_problem(None, "rollout.server.program") or ""
    assert problem.endswith("pip install sglang) and set rollout.server.program to .venv-sglang/bin/python")
    python = tmp_path / "python3"
    python.write_text("#!/bin/sh\nexit 3\n")
    python.chmod(0o755)
    assert f"{python} has no SGLang. Install it there" in (SGLANG.find_problem(str(python), "rollout.server.program") or "")
