"""Two Ray nodes on this machine, with one rank each: the bits of two processes without Ray, whatever is killed in between."""

import os
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from plaudit.cluster.ray_node import running_nodes
from support.models import make_classifier
from support.paths import REPOSITORY, TESTS
from support.ranks import samples, train_with, weight_difference
from support.ray_nodes import LIMIT_S, RayNodes
from support.recipes import exact_metrics, rl_recipe, write_recipe
from support.servers import length_judge

pytest.importorskip("ray", reason="needs Ray, one of plaudit's extras: make dev")
pytestmark = pytest.mark.slow
STEPS = 6
SAVE = ("run.save_every=1", "run.keep_last=2")
# Rank 1's process kills what the environment names, in the given step and once: `FAULTS="2 actor, 4 machine"`.
FAULTY_ENGINE = """
import os, signal, time
from pathlib import Path
import psutil
from plaudit.rollout.native.engine import NativeEngine

class Faulty(NativeEngine):
    def __init__(self, setup):
        super().__init__(setup.model, setup.tokenizer)
        self.rank = setup.world.rank

    def generate(self, requests, sampling):
        for fault in filter(None, os.environ.get("FAULTS", "").split(", ")):
            step, what = fault.split()
            once = Path(os.environ["FAULT_FOLDER"], fault)
            if self.rank == 1 and sampling.step == int(step) and not once.exists():
                once.touch()
                if what == "stop":
                    os.kill(victim("command"), signal.SIGTERM)
                    continue
                os.kill(victim(what), signal.SIGKILL)
                time.sleep(600)
        return super().generate(requests, sampling)

def victim(what):
    actor = psutil.Process().parent()
    match what:
        case "rank":
            return os.getpid()
        case "actor":
            assert "RankActor" in actor.cmdline()[0]
            return actor.pid
        case "machine":
            raylet = actor.parent()
            assert raylet.name() == "raylet"
            return raylet.pid
        case "worker":  # of the second reward model: 0 and 1 are the ranks
            mark = os.environ["STARTED_BY"]
            [worker] = [one for one in psutil.process_iter() if "rank=3" in one.cmdline() and one.environ()["STARTED_BY"] == mark]
            return worker.pid
        case "command":
            return int(Path(os.environ["FAULT_FOLDER"], "command.pid").read_text())
"""


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    others = set(running_nodes())
    nodes = RayNodes(tmp_path_factory.mktemp("home"))
    try:
        nodes.join()
        yield nodes
        if not others:  # it would end those, too
            assert "stopped" in nodes.run("cluster", "down").stderr
            assert nodes.processes() == []
    finally:
        nodes.end()


@pytest.fixture(scope="module")
def work(tmp_path_factory, tiny_model, prompts_file) -> Path:
    """A folder with a recipe and its files, by relative paths."""
    folder = tmp_path_factory.mktemp("work")
    (folder / "faulty.py").write_text(FAULTY_ENGINE)
    (folder / "reward.py").write_text("def compute_score(solution_str):\n    return len(set(solution_str)) / 10\n")
    tree = rl_recipe(tiny_model, prompts_file, folder / "unused", Path("reward.py"), run={"max_steps": STEPS})
    tree["rollout"]["engine"] = "faulty.py:Faulty"
    write_recipe(folder / "r.yaml", tree)
    return folder


@pytest.fixture(scope="module")
def reference(work, tmp_path_factory) -> Path:
    return train_without_ray(work, tmp_path_factory.mktemp("reference") / "run")


def train_without_ray(work: Path, run: Path, recipe: str = "r.yaml") -> Path:
    """By two processes."""
    os.chdir(work)
    train_with(2, "rl", Path(recipe), f"run.dir={run}", *SAVE)
    return run


def train(
    nodes: RayNodes, work: Path, run: Path, *overrides: str, recipe: str = "r.yaml", **environment: str
) -> subprocess.Popen[bytes]:
    os.chdir(work)
    command = nodes.start("rl", recipe, f"run.dir={run}", *SAVE, *overrides, output=run.parent / "output",
                          FAULT_FOLDER=str(run.parent), **environment)  # fmt: skip
    (run.parent / "command.pid").write_text(str(command.pid))
    return command


@pytest.fixture
def models(work, tiny_model, tmp_path) -> dict[str, list[dict[str, Any]]]:
    """Rewards by a judge on a launched server and by a resident scalar model: on ranks, and on GPUs of their own."""
    program = Path(shutil.copy(TESTS / "support/launched_judge.py", tmp_path / "server.py"))
    scalar = str(make_classifier(tiny_model, tmp_path / "scalar"))

    def rewards(**placed: int) -> list[dict[str, Any]]:
        return [length_judge(program, **placed), {"kind": "scalar_model", "model": {"path": scalar, **placed}}]

    return {"on ranks": rewards(), "on workers": rewards(gpus=1)}


@pytest.fixture(autouse=True)
def _stay_here():
    here = Path.cwd()
    yield
    os.chdir(here)


def assert_same(run: Path, reference: Path) -> None:
    assert samples(run, but=()) == samples(reference, but=())
    assert exact_metrics(run) == exact_metrics(reference)
    assert weight_difference(run, reference) == 0.0


def test_a_ray_job_computes_what_two_processes_do(nodes, work, reference, tmp_path):
    """With the command of docs/cluster.md. The files of its folder are found on all nodes."""
    [command] = re.findall(r"^ray job submit .+", (REPOSITORY / "docs/cluster.md").read_text(encoding="utf-8"), re.M)
    words = command.replace("R.yaml", "r.yaml").replace("/shared/runs/mine", str(tmp_path / "run")).split()
    done = subprocess.run(
        [*words, *SAVE], capture_output=True, text=True, timeout=LIMIT_S, cwd=work,
        env={**nodes.environment, "RAY_ADDRESS": nodes.address, "RAY_AUTH_MODE": "token"},
    )  # fmt: skip
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same(tmp_path / "run", reference)
    assert f"trained model: {tmp_path / 'run/model'}" in done.stdout
    assert f"rl {STEPS}/{STEPS}" in (tmp_path / "run/logs/rank_0000.log").read_text()
    assert nodes.ranks() == []


def test_whatever_is_killed(nodes, work, reference, tmp_path):
    """An actor, the command, a machine and a rank, one after the other, then SIGTERM: the run ends with the bits of an undisturbed
    one."""
    run, output = tmp_path / "run", tmp_path / "output"
    settings = ("cluster.nodes=2", f"cluster.address={nodes.address}", "cluster.restarts=1")

    assert train(nodes, work, run, *settings, FAULTS="2 actor, 3 command").wait(LIMIT_S) == -9
    print(first := output.read_text())
    assert first.count("was lost: its Ray actor on") == 1
    assert "Restart 1 of 1" in first
    assert nodes.ranks() == [], "they end with the command"

    command = train(nodes, work, run, *settings, FAULTS="4 machine, 5 rank")
    while not (tmp_path / "4 machine").exists():
        assert command.poll() is None, output.read_text()
        time.sleep(0.1)
    nodes.join()  # the restart waits for it
    assert command.wait(LIMIT_S) == 1
    print(second := output.read_text())
    assert "the run failed 2 times, and cluster.restarts is 1:" in second
    assert (
        len(
            re.findall(
                r"  1\. after step \d: rank 1 \(step \d, sampling\) was lost: the machine \S+ \(Ray node \w+\) is gone", second
            )
        )
        == 1
    )
    assert "rank 1 (step 5, sampling) was killed by SIGKILL" in second
    assert nodes.ranks() == []

    assert train(nodes, work, run, *settings, FAULTS="5 stop").wait(LIMIT_S) == 130
    print(third := output.read_text())
    assert "saved" in third

    assert train(nodes, work, run, *settings).wait(LIMIT_S) == 0, output.read_text()
    assert "Traceback" not in first + second + third + output.read_text()
    assert_same(run, reference)
    assert nodes.ranks() == []


def test_too_few_machines(nodes, work, tmp_path):
    command = train(nodes, work, tmp_path / "run", "cluster.nodes=3", f"cluster.address={nodes.address}", "cluster.timeout_s=1")
    assert command.wait(LIMIT_S) == 2
    output = (tmp_path / "output").read_text()
    print(output)
    assert "training needs 3 machines with 1 CPU free each" in output
    assert output.count("1 CPU (1 free)") >= 2


def test_without_a_cluster_one_is_started(nodes, work, tmp_path):
    """And ends with the command, which other machines have not joined in time."""
    elsewhere = tempfile.mkdtemp(dir="/tmp", prefix="ray_")  # where Ray would find that of this machine
    (tmp_path / "home").mkdir()  # without a token, which is made
    own = {"RAY_TMPDIR": elsewhere, "HOME": str(tmp_path / "home")}
    command = train(nodes, work, tmp_path / "run", "cluster.nodes=2", "cluster.timeout_s=1", **own)
    assert command.wait(LIMIT_S) == 2
    output = (tmp_path / "output").read_text()
    print(output)
    shutil.rmtree(elsewhere, ignore_errors=True)
    [address] = re.findall(r"plaudit cluster up --join (\S+:\d+)\n", output)
    assert address != nodes.address
    assert "training needs 2 machines with 1 CPU free each" in output
    assert not [line for line in nodes.processes("--port=") if address.partition(":")[2] in line]


def test_status(nodes):
    shown = nodes.run("cluster", "status", "--address", nodes.address).stdout
    print(shown)
    assert shown.count("1 CPU (1 free)") == 2


def test_a_wrong_token_is_refused(nodes):
    nodes.environment |= (wrong := {"RAY_AUTH_TOKEN": "0" * 64, "RAY_NUM_REDIS_GET_RETRIES": "2"})  # Ray would try for 20 s
    try:
        done = nodes.run("cluster", "status", "--address", nodes.address, check=False)
    finally:
        for name in wrong:
            del nodes.environment[name]
    print(done.stderr)
    assert done.returncode == 2
    assert "cannot join the Ray cluster" in done.stderr
    assert "RAY_AUTH_TOKEN" in done.stderr


def test_reward_models_with_gpus_of_their_own(nodes, work, models, tmp_path):
    """Two reward workers alongside the ranks: the run is that of two processes that share the models. One worker is killed."""

    tree = yaml.safe_load((work / "r.yaml").read_text())
    for name, rewards in models.items():
        write_recipe(work / f"{name}.yaml", {**tree, "rewards": rewards, "run": {**tree["run"], "deterministic": True}})
    reference = train_without_ray(work, tmp_path / "reference", "on ranks.yaml")
    nodes.join(cpus=2)
    settings, killed = ("cluster.nodes=2", f"cluster.address={nodes.address}"), tmp_path / "killed"
    code = train(nodes, work, killed, *settings, recipe="on workers.yaml", FAULTS="3 worker").wait(LIMIT_S)
    print(output := (tmp_path / "output").read_text())
    assert code == 0, output
    assert "reward worker 1 (" in output
    assert "scalar, scoring) was killed by SIGKILL" in output
    answers = tuple(name for name in samples(killed)["train_000001.parquet"].column_names if name.startswith("trace/"))
    assert samples(killed, but=answers) == samples(reference, but=answers)  # the judge's answers begin with its server's pid
    assert weight_difference(killed, reference) == 0.0
    metrics = [exact_metrics(one) for one in (killed, reference)]
    assert metrics[0][-1] == metrics[1][-1], "calls of the models included"
    assert metrics[0][-1]["judge/calls"] > 0
    assert (killed / "logs/reward_worker_0000.log").exists()
    assert nodes.ranks() == []
    assert not nodes.processes(str(tmp_path / "server.py")), "the judge's server ends with its worker"


def test_too_few_gpus_for_a_reward_model(nodes, work, models, tmp_path):
    models["on workers"][0]["model"]["gpus"] = 8
    write_recipe(work / "models.yaml", {**yaml.safe_load((work / "r.yaml").read_text()), "rewards": models["on workers"]})
    settings = ("cluster.nodes=2", f"cluster.address={nodes.address}", "cluster.restarts=0", "cluster.timeout_s=10")
    command = train(nodes, work, tmp_path / "run", *settings, recipe="models.yaml")
    assert command.wait(LIMIT_S) == 1
    print(output := (tmp_path / "output").read_text())
    output = " ".join(output.split())
    assert "could not reserve 8 CPUs for models/judge (model.gpus) and 1 CPU for" in output
    assert "within 10 s" in output
