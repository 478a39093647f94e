"""Which process this is, from the environments of torchrun and SLURM; and how many to start."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from plaudit.cluster.ranks import (
    SLURM_PORTS,
    RankInfo,
    first_host,
    launched_ranks,
    process_count,
    ranks_from_environment,
    tasks_per_node,
)
from plaudit.errors import RecipeError
from plaudit.recipe import SFTRecipe
from support.rank_jobs import recipe

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "gpu01", "MASTER_PORT": "29500"
}  # fmt: skip
SRUN = {
    "SLURM_JOB_ID": "712345", "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_NTASKS": "12", "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1", "SLURM_NODELIST": "gpu[07-08,11]", "SLURM_TASKS_PER_NODE": "4(x3)",
}  # fmt: skip


def test_alone():
    assert ranks_from_environment({"HOME": "/root"}) is None


def test_torchrun():
    assert ranks_from_environment(TORCHRUN) == RankInfo(5, 16, 1, 4, "gpu01", 29500, "torchrun")


def test_srun():
    ranks = ranks_from_environment(SRUN)
    assert ranks is not None
    assert ranks == RankInfo(5, 12, 1, 4, "gpu07", ranks.port, "srun")
    assert ranks.port in SLURM_PORTS
    other = ranks_from_environment({**SRUN, "SLURM_JOB_ID": "712346"})
    assert other is not None
    assert other.port != ranks.port, "two jobs may share a machine"
    chosen = ranks_from_environment({**SRUN, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"})
    assert chosen is not None
    assert (chosen.address, chosen.port) == ("10.0.0.1", 1234)


def test_a_step_may_have_fewer_tasks_than_its_job():
    step = {"SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_NODELIST": "gpu[08,11]", "SLURM_STEP_TASKS_PER_NODE": "4,2"}
    ranks = ranks_from_environment({**SRUN, **step})
    assert ranks is not None
    assert (ranks.size, ranks.local_size, ranks.address) == (6, 2, "gpu08")


def test_a_batch_script_and_a_shell_of_one_task_are_alone():
    """A batch script has SLURM_PROCID=0 and the job's SLURM_NTASKS, but the other tasks do not exist."""
    assert ranks_from_environment({name: value for name, value in SRUN.items() if name != "SLURM_STEP_ID"}) is None
    assert ranks_from_environment({**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}) is None


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("n1", "n1"), ("n[03-05,9],gpu1", "n03"), ("a,b[1-2]", "a"), ("rack[2,4]n[01-16]", "rack2n01"), ("gpu-a-[7]", "gpu-a-7")],
)
def test_the_first_machine_of_a_list(nodes, host):
    assert first_host(nodes) == host


def test_tasks_per_node():
    assert tasks_per_node("4(x2),1") == [4, 4, 1]


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            {"RANK": "0"},
            r"has RANK but not WORLD_SIZE, MASTER_ADDR, MASTER_PORT\. Start with torchrun, which sets all",
        ),
        ({"WORLD_SIZE": "1"}, "has WORLD_SIZE but not RANK"),
        ({**TORCHRUN, "RANK": "16"}, r"rank 16 of 16 processes \(RANK and WORLD_SIZE\); ranks are 0 to 15"),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, r"rank 4 of 4 processes \(LOCAL_RANK"),
        ({**TORCHRUN, "RANK": "first"}, "RANK is 'first', which is not a number"),
        ({n: v for n, v in SRUN.items() if n != "SLURM_LOCALID"}, "SLURM_LOCALID is missing from the environment"),
        ({n: v for n, v in SRUN.items() if n != "SLURM_NODELIST"}, "SLURM_NODELIST is not: start with srun"),
    ],
)
def test_mistakes_are_explained(environment, message):
    with pytest.raises(RecipeError, match=message):
        ranks_from_environment(environment)


# The recipe ----------------------------------------------------------------------------------------------------------


def on(device: str, **cluster) -> SFTRecipe:
    settings = recipe(**cluster)
    return settings.model_copy(update={"run": settings.run.model_copy(update={"device": device})})


@pytest.mark.parametrize(
    ("device", "wanted", "gpus", "count"),
    [("auto", 1, 8, 1), ("auto", "all", 8, 8), ("cuda", 4, 8, 4), ("auto", 3, 0, 3), ("cpu", 3, 1, 3), ("auto", "all", 0, 1),
     ("cpu", "all", 8, 1)],
)  # fmt: skip
def test_a_process_per_gpu_and_any_number_on_a_cpu(device, wanted, gpus, count):
    assert process_count(on(device, gpus=wanted), gpus) == count


def test_more_gpus_than_there_are(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(RecipeError, match=r"cluster.gpus is 8, but torch sees 2 GPUs here \(CUDA_VISIBLE_DEVICES is 0,1\)\. Set"):
        process_count(on("auto", gpus=8), 2)


def test_a_launcher_decides_unless_the_recipe_contradicts():
    for gpus in (1, "all", 4, 16):
        assert launched_ranks(recipe(gpus=gpus), TORCHRUN) == RankInfo(5, 16, 1, 4, "gpu01", 29500, "torchrun")
    with pytest.raises(RecipeError, match=r"cluster\.gpus is 8, but torchrun has started 16 processes"):
        launched_ranks(recipe(gpus=8), TORCHRUN)


def test_a_container_s_world_of_one_is_no_launcher():
    alone = {"RANK": "0", "WORLD_SIZE": "1"}
    for gpus in (2, "all"):
        assert launched_ranks(recipe(gpus=gpus), alone) is None
    assert launched_ranks(recipe(), alone) == RankInfo(0, 1, 0, 1, "127.0.0.1", 0, "torchrun")
    torchrun = {**TORCHRUN, **alone, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"}
    with pytest.raises(RecipeError, match=r"cluster\.gpus is 2, but torchrun has started 1 process\."):
        launched_ranks(recipe(gpus=2), torchrun)


# Real launchers ------------------------------------------------------------------------------------------------------

JOINED = """
import json, sys
sys.path[:0] = sys.argv[2:]
from plaudit.cluster.join import join
from plaudit.cluster.ranks import ranks_from_environment
from plaudit.report.progress import print_line, print_own_warning
from support.rank_jobs import recipe

ranks = ranks_from_environment()
with join(ranks, recipe()) as world:
    total = sum(world.gather(world.rank + 1, "sum"))
    open(f"{sys.argv[1]}/{world.rank}", "w").write(json.dumps([ranks.launcher, ranks.local_size, world.size, total]))
    print(f"result of rank {world.rank}")
    print_line("a warning of all ranks", "yellow")
    print_own_warning("a warning of its own")
"""


@pytest.mark.slow
def test_torchrun_s_processes_join(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(JOINED)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*torchrun, str(program), str(tmp_path), *sys.path], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert [json.loads((tmp_path / name).read_text()) for name in "01"] == [["torchrun", 2, 2, 3]] * 2
    assert done.stdout == "result of rank 0\n"
    warnings = sorted(line for line in done.stderr.splitlines() if "a warning of" in line)
    assert warnings == ["a warning of all ranks", "a warning of its own", "rank 1: a warning of its own"]


@pytest.mark.slow
def test_srun_s_processes_join(tmp_path):
    """With its environment; SLURM itself is not run."""
    program = tmp_path / "program.py"
    program.write_text(JOINED)
    environment = {
        **os.environ, **SRUN, "SLURM_JOB_ID": str(os.getpid()), "SLURM_NTASKS": "2", "SLURM_NODEID": "0",
        "SLURM_NODELIST": "localhost", "SLURM_TASKS_PER_NODE": "2",
    }  # fmt: skip
    tasks = [
        subprocess.Popen(
            [sys.executable, str(program), str(tmp_path), *sys.path],
            env={**environment, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
        )
        for rank in (0, 1)
    ]
    assert [task.wait(200) for task in tasks] == [0, 0]
    assert [json.loads(Path(tmp_path / name).read_text()) for name in "01"] == [["srun", 2, 2, 3]] * 2
