"""The number of threads follows the model's width and the cores that may be used; the user's own setting stays."""

import json
import os
import subprocess
import sys

import psutil
import pytest
import torch

from plaudit import threads
from plaudit.threads import SMALL_WIDTH, fit_threads, let_threads_sleep, share_cores, threads_for, usable_cores
from support.recipes import sft_recipe, train_sft, write_recipe

CPU, GPU = torch.device("cpu"), torch.device("cuda")


class Config:
    def __init__(self, width: int):
        self.hidden_size = width

    def get_text_config(self) -> "Config":
        return self


@pytest.fixture
def torch_threads(monkeypatch) -> list[int]:
    """Four free cores, no settings of the user's; the number that torch would use."""
    current = [4]
    for name in threads.USER_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(threads, "_CHOICE", threads._Choice())
    monkeypatch.setattr(threads, "usable_cores", lambda: 4)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 8 if logical else 4)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: current[0])
    monkeypatch.setattr(torch, "set_num_threads", lambda n: current.__setitem__(0, n))
    return current


def test_a_small_model_gets_one_thread_and_a_large_one_all_cores():
    assert threads_for(96, 8) == 1
    assert threads_for(SMALL_WIDTH, 8) == 1
    assert threads_for(576, 8) == 8, "SmolLM2-135M"
    assert threads_for(4096, 2) == 2


def test_the_widest_model_decides(torch_threads):
    fit_threads(Config(96), CPU)
    assert torch_threads == [1]
    fit_threads(Config(4096), CPU)
    assert torch_threads == [4]
    fit_threads(Config(64), CPU)
    assert torch_threads == [4]


def test_no_more_threads_than_usable_cores(torch_threads, monkeypatch):
    monkeypatch.setattr(threads, "usable_cores", lambda: 2)
    fit_threads(Config(4096), CPU)
    assert torch_threads == [2]


@pytest.mark.parametrize("name", threads.USER_SETTINGS)
def test_the_user_s_environment_wins(torch_threads, monkeypatch, name):
    monkeypatch.setenv(name, "3")
    fit_threads(Config(96), CPU)
    assert torch_threads == [4]


def test_the_user_s_torch_setting_wins(torch_threads):
    torch_threads[0] = 3
    fit_threads(Config(96), CPU)
    assert torch_threads == [3]
    torch_threads[0] = 4
    fit_threads(Config(96), CPU)
    assert torch_threads == [1]
    torch_threads[0] = 2  # in between, by the user's code
    fit_threads(Config(4096), CPU)
    assert torch_threads == [2]


def test_processes_share_the_cores(torch_threads):
    share_cores(2)
    assert torch_threads == [2]
    fit_threads(Config(96), CPU)
    assert torch_threads == [1]
    fit_threads(Config(4096), CPU)
    assert torch_threads == [2]
    share_cores(1)
    assert torch_threads == [2]


def test_more_processes_than_cores_have_a_thread_each(torch_threads):
    share_cores(9)
    fit_threads(Config(4096), CPU)
    assert torch_threads == [1]


def test_processes_leave_the_user_s_number_as_it_is(torch_threads, monkeypatch):
    torch_threads[0] = 3
    share_cores(2)
    assert torch_threads == [3]
    torch_threads[0] = 4
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    share_cores(2)
    assert torch_threads == [4]


def test_torchrun_s_one_thread_is_not_the_user_s_choice(torch_threads, monkeypatch):
    torch_threads[0] = 1
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    share_cores(2)
    assert torch_threads == [1], "set by the user"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    share_cores(2)
    fit_threads(Config(4096), CPU)
    assert torch_threads == [2]
    torch_threads[0] = 3
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    share_cores(2)
    assert torch_threads == [3], "set by the user"


def test_a_model_on_a_gpu_changes_nothing(torch_threads):
    fit_threads(Config(96), GPU)
    assert torch_threads == [4]


# Cores ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine of 16 cores, 8 of which this process may use, with the given control groups."""
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(threads, "CGROUP", tmp_path)
    (tmp_path / "cpu").mkdir()
    return tmp_path


def test_affinity_limits_cores(machine):
    assert usable_cores() == 8


def test_without_affinity_all_cores_count(machine, monkeypatch):
    """As on macOS."""
    monkeypatch.delattr(os, "sched_getaffinity")
    assert usable_cores() == 16


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("200000 100000", 2), ("150000 100000", 2), ("50000 100000", 1), ("max 100000", 8), ("", 8), ("9000000 100000", 8)],
)
def test_a_container_s_quota_limits_cores(machine, quota, cores):
    (machine / "cpu.max").write_text(quota)
    assert usable_cores() == cores


@pytest.mark.parametrize(("quota", "cores"), [("300000", 3), ("-1", 8)])
def test_a_quota_of_the_first_version_of_control_groups(machine, quota, cores):
    (machine / "cpu/cpu.cfs_quota_us").write_text(quota)
    (machine / "cpu/cpu.cfs_period_us").write_text("100000")
    assert usable_cores() == cores


# Waiting and resuming ------------------------------------------------------------------------------------------------


def test_waiting_threads_sleep_unless_the_user_says_otherwise(monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    let_threads_sleep()
    assert os.environ["OMP_WAIT_POLICY"] == "passive"
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    let_threads_sleep()
    assert os.environ["OMP_WAIT_POLICY"] == "active"


@pytest.mark.parametrize(("given", "used"), [(None, "passive"), ("active", "active")])
def test_importing_plaudit_lets_threads_sleep_before_torch_is_imported(given, used):
    """From Python as from the command line."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment |= {} if given is None else {"OMP_WAIT_POLICY": given}
    code = "import os, sys, plaudit; print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == f"{used} False\n"


def test_resuming_with_another_number_of_threads_is_reported(tiny_model, rows_file, tmp_path, capsys):
    recipe = write_recipe(tmp_path / "r.yaml", sft_recipe(tiny_model, rows_file, tmp_path / "run", run={"max_steps": 1}))
    train_sft(recipe)
    file = tmp_path / "run/run.json"
    description = json.loads(file.read_text())
    assert description["threads"] == torch.get_num_threads()
    file.write_text(json.dumps(description | {"threads": 64}))
    capsys.readouterr()
    train_sft(recipe)
    assert "threads and had 64" in " ".join(capsys.readouterr().err.split())
    train_sft(recipe)
    assert "threads and had" not in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("processes", "sharding", "had"), [(1, "none", None), (2, "optimiser", "2 processes (sharding: optimiser)")]
)
def test_resuming_with_another_number_of_processes_is_reported(tiny_model, rows_file, tmp_path, capsys, processes, sharding, had):
    recipe = write_recipe(tmp_path / "r.yaml", sft_recipe(tiny_model, rows_file, tmp_path / "run", run={"max_steps": 1}))
    train_sft(recipe)
    file = tmp_path / "run/run.json"
    description = json.loads(file.read_text())
    assert (description["processes"], description["sharding"]) == (1, "none")
    file.write_text(
        json.dumps(description | {"processes": processes, "sharding": sharding, "threads": 64 if had else description["threads"]})
    )
    capsys.readouterr()
    train_sft(recipe)
    said = [line for line in capsys.readouterr().err.splitlines() if " and had " in line]
    note = f"{tmp_path / 'run'} resumes with 1 process and had {had}, so its result is not that of an uninterrupted run to the last"
    assert said == ([f"{note} bit"] if had else [])
    assert json.loads(file.read_text())["processes"] == 1


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_computes_by_itself():
    """The threads of torch and of the compiled kernels stay behind in the parent; waiting for them would never end."""
    program = """
import multiprocessing
from types import SimpleNamespace
import torch
from plaudit.rollout.native import cpu_ops
from plaudit.threads import fit_threads

config = SimpleNamespace(hidden_size=4096, get_text_config=lambda: config)

def compute():
    fit_threads(config, torch.device("cpu"))
    x, weight = torch.ones(16, 1024), torch.ones(1024, 1024)
    assert (cpu_ops.product(x, weight, None) == 1024).all()
    assert (torch.ones(512, 1024) @ weight == 1024).all()

torch.set_num_threads(2)
compute()
child = multiprocessing.get_context("fork").Process(target=compute, daemon=True)
child.start()
child.join(60)
assert child.exitcode == 0, child.exitcode
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
