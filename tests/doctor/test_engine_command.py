"""`plaudit engine-command`: how to start a server that `rollout.server.url` names."""

import shlex

import pytest

from plaudit.rollout.served.vllm import WORKER_FOLDER
from plaudit.servers.server_command import INSIDE
from support.recipes import rl_recipe, write_recipe

URLS = "rollout.server.url=[http://a:8001, http://b:8001, http://c:8002]"


@pytest.fixture
def recipe(tmp_path, tiny_model, prompts_file, reward_file):
    tree = rl_recipe(tiny_model, prompts_file, tmp_path / "run", reward_file)
    return write_recipe(tmp_path / "rl.yaml", {"stage": "rl", **tree})


def test_a_command_for_each_port(plaudit, recipe, tiny_model):
    settings = ["rollout.engine=vllm", URLS, "rollout.server.credential=POLICY_KEY", "model.lora.rank=12"]
    code, out, err = plaudit("engine-command", recipe, *settings)
    assert code == 0, err
    commands = [shlex.split(line) for line in out.splitlines() if not line.startswith("#")]
    assert [command[command.index("--port") + 1] for command in commands] == ["8001", "8002"]
    for command in commands:
        assert {f"PYTHONPATH={WORKER_FOLDER}:{INSIDE}", "PLAUDIT_SERVER_TOKEN=$POLICY_KEY"} <= set(command[: command.index("vllm")])
        assert command[command.index("--model") + 1] == str(tiny_model)
        assert command[command.index("--max-lora-rank") + 1] == "16", "the smallest that vLLM can reserve memory for"


def test_engines_without_such_servers(plaudit, recipe):
    code, _, err = plaudit("engine-command", recipe)
    assert code == 2
    assert "set rollout.engine=vllm" in " ".join(err.split())
    code, _, err = plaudit("engine-command", recipe, "rollout.engine=sglang")
    assert code == 2
    assert "rollout.engine sglang starts its own servers" in " ".join(err.split())
