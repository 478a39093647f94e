"""`plaudit doctor` on an engine that is a server."""

import shutil
import sys

import pytest

from plaudit.config import load
from plaudit.doctor.engine import check_engine
from plaudit.errors import RecipeError
from plaudit.train.memory_plan import plan_devices
from plaudit.train.processes import Processes
from support.recipes import rl_recipe, write_recipe

PROGRAM = f"rollout.server.program={sys.executable}"


@pytest.fixture
def recipe_for(tmp_path, tiny_model, prompts_file, reward_file):
    tree = rl_recipe(tiny_model, prompts_file, tmp_path / "run", reward_file, run={"device": "auto"})
    file = write_recipe(tmp_path / "rl.yaml", {"stage": "rl", **tree})
    return lambda *settings: load(file, ["rollout.engine=vllm", *settings], "rl").recipe


@pytest.fixture
def has_vllm(monkeypatch):
    """As if the program had vLLM."""
    monkeypatch.setattr("plaudit.servers.server_command.PROBE", "import sys")
    monkeypatch.setattr("plaudit.servers.server_command.VERSION_PROBE", "print('0.99.1')")


@pytest.mark.parametrize(
    ("size", "settings", "finding"),
    [
        (1, ["rollout.server.program=/no/such"], "✗ rollout.server.program: there is no command /no/such"),
        (1, [PROGRAM], "✓ vLLM 0.99.1, started for each process that trains"),
        (
            2,
            [PROGRAM, "rollout.server.tensor_parallel=2"],
            "✗ rollout.server.tensor_parallel is 2, and each of 2 processes has a GPU",
        ),
        (2, [PROGRAM, "rollout.server.gpus=[4]"], "✗ rollout.server.gpus names 1 GPUs; 2 processes need 2"),
        (2, [PROGRAM, "rollout.server.gpus=[1,2]"], "✗ rollout.server.gpus: the trainer uses GPU 1 too (cluster.gpus)"),
        (
            1,
            ["rollout.engine=sglang", "rollout.server.url=http://a:1"],
            "✗ rollout.server.url: rollout.engine sglang",
        ),
        (1, ["rollout.server.url=http://a:1"], "✗ rollout.server.url needs rollout.server.credential"),
        (1, ["rollout.server.url=http://a:1", "rollout.server.credential=NOT_SET"], "✗ rollout.server.credential: the environment"),
        (1, ["rollout.server.url=http://a:1", "rollout.server.credential=IS_SET"], "✓ 1 servers that run already"),
    ],
)
def test_what_is_found(recipe_for, has_vllm, monkeypatch, size, settings, finding):
    monkeypatch.setenv("IS_SET", "secret")
    found = [f"{mark} {text}" for mark, text in check_engine(recipe_for(*settings), Processes(size, memory=80e9, kind="cuda"))]
    assert any(one.startswith(finding) for one in found), found


def test_a_models_stop_strings_are_shown(recipe_for, has_vllm, tiny_model, tmp_path):
    shutil.copytree(tiny_model, tmp_path / "zero")
    (tmp_path / "zero/stop.txt").write_text("</response>\n")
    settings, processes = [PROGRAM, f"model.path={tmp_path / 'zero'}"], Processes(1, memory=80e9, kind="cuda")
    shown = ("✓", f"responses also end with '</response>': {tmp_path / 'zero/stop.txt'}")
    assert shown in [*check_engine(recipe_for(*settings, "rollout.stop=null"), processes)]
    assert shown not in [*check_engine(recipe_for(*settings, "rollout.stop=[]"), processes)]


def test_each_machine_has_gpus_for_the_servers_of_its_own_processes(recipe_for, has_vllm):
    """As torchrun and srun start them on several machines."""
    processes = Processes(8, memory=80e9, kind="cuda", machines=2)
    found = list(check_engine(recipe_for(PROGRAM, "rollout.server.gpus=[4,5,6,7]"), processes))
    assert "✗" not in [mark for mark, _ in found], found


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["rollout.server.gpus=[4]", "cluster.nodes=2"], "name them in rollout.server.url"),
        (["rollout.server.arguments=--api-key x"], "should not contain a key"),
        (["rollout.server.lora=adapters", "cluster.sharding=full"], "all weights are sent, merged"),
    ],
)
def test_servers_that_are_refused(recipe_for, settings, message):
    with pytest.raises(RecipeError, match=message):
        recipe_for(*settings)


@pytest.mark.parametrize(
    ("settings", "sampling", "training"),
    [
        ([], 40e9, 0.0),
        (["rollout.server.memory_share=0.25"], 20e9, 0.0),
        (["rollout.server.sleep=false"], 40e9, 40e9),
        (["rollout.server.gpus=[1]"], 0.0, 0.0),
        (["rollout.server.url=http://a:1"], 0.0, 0.0),
    ],
)
def test_the_memory_of_a_server(recipe_for, settings, sampling, training):
    budget = plan_devices(recipe_for(*settings), processes=Processes(memory=80e9, kind="cuda"))["cuda"]
    for phase, size in (("sampling", sampling), ("training", training)):
        taken = sum(need.fixed for need in budget.needs if phase in need.phases and need.part == "sampling")
        assert taken == pytest.approx(size)
