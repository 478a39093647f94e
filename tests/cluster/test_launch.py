"""Ranks that fail, hang, are killed or interrupted: all end, with one clear message, and no process is left.

Most ranks here run without torch (`support.rank_jobs.work_alone`), which takes seconds to import; slow tests have the real ones.
"""

import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from plaudit.cluster import process
from plaudit.errors import Interrupted, PlauditError, ProcessFailed, TrainingStopped
from support import rank_jobs
from support.processes import gone
from support.rank_jobs import launch, recipe

STOPPED = "All processes were stopped; start the run again to resume it."


@pytest.fixture(autouse=True)
def _logs_of_ranks(tmp_path_factory, monkeypatch):
    """They are written into the run folder, whose path is relative here."""
    monkeypatch.chdir(tmp_path_factory.mktemp("folder"))


@pytest.fixture
def kind(request, monkeypatch) -> str:
    if request.param == "plain":
        monkeypatch.setattr(process, "PROGRAM", rank_jobs.PLAIN)
    return request.param


def all_gone(folder: Path) -> bool:
    """The ranks and their workers."""
    pids = [int(pid) for file in folder.glob("*.pids") for pid in file.read_text().split()]
    assert len(pids) == 4
    return gone(*pids)


@pytest.mark.parametrize("kind", ["plain", pytest.param("torch", marks=pytest.mark.slow)], indirect=True)
def test_ranks_work_and_the_first_one_s_result_is_returned(kind, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["plaudit", "sft", "r.yaml"])
    assert launch(partial(rank_jobs.add, folder=tmp_path), 2, recipe()) == str(tmp_path / "0")
    assert [(tmp_path / name).read_text() for name in "01"] == ["3 ['sft', 'r.yaml']"] * 2
    out, err = capfd.readouterr()
    assert "printed by rank 0\n" in out
    lines = err.splitlines()
    assert "a warning of rank 0" in lines
    assert "rank 1: a warning of rank 1" in lines
    assert "printed by rank 1" not in out + err, "only its errors and warnings are shown"
    assert {"printed by rank 1", "a warning of rank 1"} <= set(Path("r/logs/rank_0001.log").read_text().splitlines())
    if kind == "torch":
        assert "rank 1: scores of rank 1 are damaged" in lines
        assert [line for line in lines if "a warning of all ranks" in line] == ["a warning of all ranks"]


FAILURES = {
    "raise": (ProcessFailed, f"rank 1 (step 3, sampling) failed: ZeroDivisionError: a bug\n{STOPPED}"),
    "user error": (TrainingStopped, "rank 1 (step 3, sampling): step 3: reward 'judge' failed on 37 of 64 samples"),
    "user error all": (TrainingStopped, "step 3: reward 'judge' failed on 37 of 64 samples"),
    "kill": (
        ProcessFailed,
        f"rank 1 (step 3, sampling) was killed by SIGKILL, as happens when the system's memory runs out. {STOPPED}",
    ),
    "segfault": (ProcessFailed, f"rank 1 (step 3, sampling) was killed by SIGSEGV. {STOPPED}"),
    "exit": (ProcessFailed, f"rank 1 (step 3, sampling) ended without a result (exit code 0). {STOPPED}"),
}
SLOW = [("plain", "segfault"), ("plain", "exit"), ("torch", "raise"), ("torch", "user error all"), ("torch", "segfault")]


# With torch, tests/cluster/test_failures.py has the others.
@pytest.mark.parametrize(
    ("kind", "how"),
    [
        *(("plain", how) for how in ("raise", "user error", "user error all", "kill")),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
    ],
    indirect=["kind"],
)
def test_one_rank_s_failure_stops_all(kind, how, tmp_path, capfd):
    """Its peers, which lose their connections to it, are not to blame."""
    with pytest.raises(PlauditError) as raised:
        launch(partial(rank_jobs.misbehave, folder=tmp_path, how=how), 2, recipe())
    assert (type(raised.value), str(raised.value)) == FAILURES[how]
    err = capfd.readouterr().err
    assert (how == "raise") == ("rank 1: ZeroDivisionError: a bug" in err), "a bug keeps its traceback"
    assert (how == "segfault") == bool(re.search(r"rank 1: crashed at .*rank_jobs.py:\d+ in _misbehave", err))
    assert all_gone(tmp_path)


@pytest.mark.parametrize("kind", ["plain"], indirect=True)
def test_a_rank_that_hangs_is_named_with_the_place(kind, tmp_path, capfd):
    with pytest.raises(ProcessFailed) as raised:
        launch(partial(rank_jobs.misbehave, folder=tmp_path, how="hang"), 2, recipe(timeout_s=1.0))
    assert str(raised.value) == (
        f"rank 1 (step 3, sampling) has made no progress for 1 s. If it was still at work, raise cluster.timeout_s. {STOPPED}"
    )
    assert re.search(r"rank 1: hangs at \S+rank_jobs.py:\d+ in _misbehave, called from \S+", capfd.readouterr().err)
    assert all_gone(tmp_path)


@pytest.mark.parametrize("kind", ["plain"], indirect=True)
def test_ranks_that_wait_for_each_other_are_stopped(kind, tmp_path):
    with pytest.raises(
        ProcessFailed, match=r"have waited for each other for 1 s: rank 0 \(step 3, sampling\) for 'scored groups', "
    ):
        launch(partial(rank_jobs.misbehave, folder=tmp_path, how="nothing"), 2, recipe(timeout_s=1.0))
    assert all_gone(tmp_path)


@pytest.mark.parametrize("kind", ["plain"], indirect=True)
def test_all_ranks_that_hang_show_where(kind, tmp_path, capfd):
    with pytest.raises(ProcessFailed, match="has made no progress for 1 s, nor have rank"):
        launch(partial(rank_jobs.misbehave, folder=tmp_path, how="hang all"), 2, recipe(timeout_s=1.0))
    assert sorted(re.findall(r"rank (\d): hangs at \S+rank_jobs.py:\d+ in _misbehave", capfd.readouterr().err)) == ["0", "1"]


@pytest.mark.parametrize("kind", ["plain"], indirect=True)
def test_the_last_words_of_a_rank_are_shown(kind, capfd):
    """They come after its result, are more than a pipe takes, and do not end with a newline."""
    launch(rank_jobs.write_last, 2, recipe())
    lines = capfd.readouterr().err.splitlines()
    assert lines.count("rank 1: " + "x" * 1000) == rank_jobs.LAST_LINES
    assert lines[-1] == "rank 1: the end"


# Restarts ------------------------------------------------------------------------------------------------------------


def pids_of_attempts(folder: Path, attempts: int) -> list[int]:
    pids = [int(file.read_text()) for file in folder.glob("*.attempt*")]
    assert len(set(pids)) == 2 * attempts
    return pids


@pytest.mark.parametrize("kind", ["plain"], indirect=True)
def test_all_ranks_are_started_again(kind, tmp_path, capfd):
    job = partial(rank_jobs.be_killed, folder=tmp_path, attempts=1)
    assert launch(job, 2, recipe(restarts=3), tmp_path) == "result of attempt 2"
    assert "rank 1 (step 1, sampling) was killed by SIGKILL" in (err := capfd.readouterr().err)
    assert "Restart 1 of 3" in err
    assert gone(*pids_of_attempts(tmp_path, 2))


@pytest.mark.parametrize("kind", ["plain"], indirect=True)
def test_one_message_names_all_failures(kind, tmp_path):
    with pytest.raises(ProcessFailed) as raised:
        launch(partial(rank_jobs.be_killed, folder=tmp_path, attempts=5), 2, recipe(restarts=1), tmp_path)
    header, first, second, advice = str(raised.value).splitlines()
    assert header == "the run failed 2 times, and cluster.restarts is 1:"
    assert first.startswith("  1. after step 0: rank 1 (step 1, sampling) was killed by SIGKILL")
    assert second.startswith("  2. after step 1: rank 1 (step 2, sampling) was killed by SIGKILL")
    assert "start the run again" in advice
    assert gone(*pids_of_attempts(tmp_path, 2))


@pytest.mark.parametrize("kind", ["plain"], indirect=True)
def test_a_rank_that_cannot_be_killed_is_no_reason_to_start_again(kind, tmp_path, monkeypatch):
    """It may hold what the next one needs."""
    ends = process.RankProcess.ends_before
    monkeypatch.setattr(process.RankProcess, "ends_before", lambda self, deadline: ends(self, deadline) and self.rank != 0)
    with pytest.raises(PlauditError, match=r"(?s)rank 1 .* was killed by .*\nrank 0 \(process \d+\) did not end within 60 s"):
        launch(partial(rank_jobs.be_killed, folder=tmp_path, attempts=1), 2, recipe(restarts=3), tmp_path)
    assert gone(*pids_of_attempts(tmp_path, 1))


# Signals -------------------------------------------------------------------------------------------------------------


def start(job: str, folder: Path, how: str = "") -> subprocess.Popen[str]:
    """A command with two ranks, when both are at work."""
    program = f"from support.rank_jobs import launch_and_exit; launch_and_exit({job!r}, {str(folder)!r}, {how!r})"
    path = os.pathsep.join([str(Path(rank_jobs.__file__).parents[1]), *sys.path])
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "PYTHONPATH": path}, process_group=0,
    )  # fmt: skip
    while len(list(folder.glob("*.pids"))) < 2:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_lets_all_ranks_save(number, tmp_path):
    command = start("stop_when_asked", tmp_path)
    command.send_signal(number)
    output, _ = command.communicate(timeout=250)
    assert output == "stopped after step 3 of 5, saved. Resume with: plaudit rl r.yaml\n"
    assert command.returncode == Interrupted.exit_status == 130
    assert {file.name for file in tmp_path.glob("*.saved")} == {"0.saved", "1.saved"}
    assert all_gone(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_while_loading_just_stops(number, tmp_path):
    command = start("stop_when_asked", tmp_path, "loading")
    command.send_signal(number)
    assert command.communicate(timeout=250)[0] == "stopped\n"
    assert command.returncode == 130
    assert all_gone(tmp_path)


@pytest.mark.slow
def test_further_signals_stop_ranks_that_do_not_react(tmp_path):
    command = start("stop_when_asked", tmp_path, "ignore")
    for count in (1, 2, 3):
        command.send_signal(signal.SIGINT)
        received = tmp_path / "0.signals"
        while count < 3 and (not received.exists() or len(received.read_text().split()) < count):
            time.sleep(0.01)
    assert command.communicate(timeout=250)[0] == "stopped\n"
    assert command.returncode == 130
    assert all_gone(tmp_path)


def test_no_rank_outlives_a_killed_command(tmp_path):
    command = start("stop_when_asked", tmp_path)
    command.kill()
    command.wait()
    assert all_gone(tmp_path)
    assert command.stdout is not None
    command.stdout.close()


@pytest.mark.slow
def test_a_suspended_command_suspends_its_ranks(tmp_path):
    import psutil

    command = start("stop_when_asked", tmp_path)
    ranks = [psutil.Process(int(file.read_text().split()[0])) for file in sorted(tmp_path.glob("*.pids"))]
    command.send_signal(signal.SIGTSTP)
    while {rank.status() for rank in ranks} != {psutil.STATUS_STOPPED}:
        time.sleep(0.01)
    command.send_signal(signal.SIGCONT)
    while psutil.STATUS_STOPPED in {rank.status() for rank in ranks}:
        time.sleep(0.01)
    command.send_signal(signal.SIGINT)
    assert "saved" in command.communicate(timeout=250)[0]
    assert all_gone(tmp_path)
