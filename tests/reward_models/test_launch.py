"""Servers launched for a judge: waited for, restarted, and always gone after we exit."""

import asyncio
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from textwrap import dedent

import psutil
import pytest

from plaudit.errors import RecipeError
from plaudit.recipe.limits import ModelLimits
from plaudit.recipe.reward_models import RewardModel
from plaudit.reward_models.backend import Answer, GenerationRequest, SamplingParams
from plaudit.reward_models.launch import LaunchedModel
from plaudit.servers.process import Startup
from plaudit.servers.vllm_command import VLLM
from support.paths import TESTS
from support.processes import gone
from support.recipes import write_recipe
from support.rows import write_jsonl
from support.servers import launched, starts


def generate(server: LaunchedModel, *contents: str) -> list[Answer]:
    async def run() -> list[Answer]:
        try:
            await server.open()
            requests = [GenerationRequest([{"role": "user", "content": content}]) for content in contents]
            return [(await server.generate([request], SamplingParams(16)))[0] for request in requests]
        finally:
            await server.close()

    return asyncio.run(run())


def test_a_server_is_started_used_and_stopped(program, capsys):
    answers = generate(launched(program, "--takes 0.5", "--child"), "a", "b")
    [start] = starts(program)
    assert [answer.text for answer in answers] == [f"{start['pid']} a", f"{start['pid']} b"]
    assert gone(start["pid"], start["child"])
    output = capsys.readouterr().err
    assert "starting a server for models/judge on port" in output
    assert "is ready after" in output
    assert (program.parent / "server.log").read_text() == "loading the weights\n"


@pytest.mark.parametrize("arguments", [(), ("--broken",), ("--dies-after 0",)], ids=["used", "broken", "dying"])
def test_a_temporary_log_is_kept_for_failures_only(program, tmp_path, monkeypatch, arguments):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    model = launched(program, *arguments).model
    message = ""
    try:
        limits = ModelLimits(backoff_s=0.01, retries=2)
        answers = generate(LaunchedModel(model, program=[sys.executable, str(program)], limits=limits), "a")
        message = answers[0].failure.message if answers[0].failure else ""
    except RecipeError as error:
        message = str(error)
    logs = list((tmp_path / "temporary").rglob("*.log"))
    assert len(logs) == bool(arguments)
    assert all(str(log) in message and "loading the weights" in log.read_text() for log in logs)
    assert bool(list((tmp_path / "temporary").iterdir())) == bool(arguments)


def test_keys_in_a_servers_last_line_are_not_shown(program, monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "a1b2c3d4e5f6g7h8")
    server = launched(program, "--broken", "--says a1b2c3d4e5f6g7h8")
    with pytest.raises(RecipeError, match="ended before it was ready") as caught:
        generate(server, "a")
    assert "$JUDGE_API_KEY" in str(caught.value)
    assert "a1b2c3d4" not in str(caught.value)


def test_user_arguments_are_passed_on_and_take_precedence(program):
    server = launched(
        program, "--tensor-parallel-size 2", "--max-model-len=4096", "--dtype half", tokenizer="models/t", dtype="bfloat16"
    )
    server.port = 1234
    words = server.command[2:]
    assert words[:6] == ["--model", "models/judge", "--host", "127.0.0.1", "--port", "1234"]
    assert words[6:8] == ["--tokenizer", "models/t"]
    assert words[8:13] == ["--tensor-parallel-size", "2", "--max-model-len=4096", "--dtype", "half"]
    scalar = LaunchedModel(server.model, scalar=True).command
    assert scalar[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    assert scalar[scalar.index("--runner") + 1] == "pooling"


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (None, [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", "m"]),
        (".venv-vllm/bin/python", [".venv-vllm/bin/python", "-m", "vllm.entrypoints.openai.api_server", "--model", "m"]),
        ("/envs/v/bin/vllm", ["/envs/v/bin/vllm", "serve", "m"]),
        ("~/v/bin/vllm", [os.path.expanduser("~/v/bin/vllm"), "serve", "m"]),
        ("env CUDA_VISIBLE_DEVICES=1 vllm", ["env", "CUDA_VISIBLE_DEVICES=1", "vllm", "serve", "m"]),
        ("uv run vllm serve", ["uv", "run", "vllm", "serve", "m"]),
        ("./start_judge.sh", ["./start_judge.sh", "--model", "m"]),
    ],
)
def test_which_vllm_is_started(program, words):
    command = LaunchedModel(RewardModel(placement="launch", path="m", program=program)).command
    assert command == [*words, "--host", "127.0.0.1", "--port", "0"]


def test_without_vllm_the_error_says_what_to_set(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'vllm'\"; exit 1\n")
    python.chmod(0o755)
    server = LaunchedModel(RewardModel(placement="launch", path="m", program=str(python)), log=tmp_path / "server.log")
    with pytest.raises(RecipeError, match="Install it, or set program to a vllm installed elsewhere"):
        generate(server, "a")


def python_that(folder: Path, does: str) -> str:
    file = folder / "python3"
    file.write_text(f"#!/bin/sh\n{does}\n")
    file.chmod(0o755)
    return str(file)


def test_a_missing_vllm_is_reported_before_the_run(tmp_path, plaudit, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *package: None if name == "vllm" else find(name, *package))
    judge = {"kind": "judge", "name": "main", "model": {"placement": "launch", "path": "models/judge"}}
    rewards = [{"kind": "exact"}, {"kind": "cascade", "rule": {"kind": "exact"}, "judge": judge}]
    recipe = write_recipe(tmp_path / "R.yaml", {"stage": "score", "rewards": rewards})
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "p", "response": "r"}])
    for command in (("doctor", recipe), ("score", recipe, rows, "--out", tmp_path / "out.jsonl")):
        code, _, err = plaudit(*command)
        assert code == 2
        assert err.strip().startswith("reward 'cascade/judge': placement: launch starts a vLLM server. It is not installed beside")
        assert "set model.program to .venv-vllm/bin/vllm" in err
        assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("does", "problem"),
    [
        ("exit 0", None),
        ("exit 3", "has no vLLM. Install it there: "),
        ("echo broken >&2; exit 1", "ends with exit code 1: broken"),
    ],
)
def test_the_python_that_should_have_vllm_is_tried(tmp_path, does, problem):
    for prefix in ("", "env A=1 "):
        found = VLLM.find_problem(prefix + python_that(tmp_path, does))
        assert (found is None) if problem is None else (problem in (found or ""))


@pytest.mark.parametrize("program", ["no/such/python", "no/such/vllm", "env A=1 no/such/vllm"])
def test_a_program_that_does_not_exist_is_reported(program):
    assert f"there is no command {program.split()[-1]}" in (VLLM.find_problem(program) or "")


@pytest.mark.parametrize("program", ["sh start_judge.sh", "env PATH=/elsewhere vllm"])
def test_a_program_of_unknown_kind_is_not_refused(program):
    assert VLLM.find_problem(program) is None


def test_a_server_that_cannot_start_says_why(program):
    server = launched(program, "--broken")
    with pytest.raises(RecipeError, match=r"ended before it was ready \(exit code 1, after printing 'ValueError: no such model'\)"):
        generate(server, "a")
    assert len(starts(program)) == 1  # not retried
    nothing = LaunchedModel(server.model, program=["/no/such/python"], log=program.parent / "other.log")
    with pytest.raises(RecipeError, match="/no/such/python cannot be started: No such file"):
        generate(nothing, "a")


def test_a_server_that_takes_too_long_to_start_is_stopped(program, monkeypatch):
    check = Startup.check
    monkeypatch.setattr(Startup, "check", lambda self: check(self) if "loading" in self._server.last_line() else None)
    server = launched(program, "--takes 1000", "--child", limits=ModelLimits(start_timeout_s=1.0))
    with pytest.raises(RecipeError, match=r"within limits.start_timeout_s, 1 s \(its last line: 'loading the weights'\)"):
        generate(server, "a")
    assert gone(*(starts(program)[0][name] for name in ("pid", "child")))


def test_a_port_in_use_is_rejected(program):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        for settings in ({"port": port}, {"arguments": [f"--port={port}"]}):
            with pytest.raises(RecipeError, match=f"port {port} cannot be used"):
                generate(launched(program, **settings), "a")
    assert not (program.parent / "starts.jsonl").exists()


def test_a_server_that_dies_is_restarted_as_often_as_allowed(program, capsys):
    server = launched(program, "--dies-after 3", "--child", limits=ModelLimits(backoff_s=0.01, retries=2, restarts=1))
    answers = generate(server, *"abcdefgh")
    first, second = starts(program)
    texts = [*(f"{first['pid']} {letter}" for letter in "abc"), *(f"{second['pid']} {letter}" for letter in "def"), None, None]
    assert [answer.text for answer in answers] == texts
    output = " ".join(capsys.readouterr().err.split())
    assert "died (exit code 7, after printing 'out of memory'): starting it again in 0.01 s" in output
    for answer in answers[6:]:
        assert answer.failure is not None
        assert answer.failure.cause == "server_died"
        assert "and was started again 1 time before (limits.restarts)" in answer.failure.message
    usage = server.usage
    assert usage.calls == 8 + usage.retries
    assert {cause: count for cause, count in usage.failures.items() if count} == {"server_died": 2}
    assert sum(usage.faults.values()) == usage.retries + 2
    assert gone(*(start[name] for start in (first, second) for name in ("pid", "child")))


def test_concurrent_requests_wait_for_the_same_restart(program):
    server = launched(program, "--dies-after 30", limits=ModelLimits(max_concurrent_calls=8, retries=0, backoff_s=0.01))

    async def run() -> list[Answer]:
        try:
            await server.open()
            groups = [[GenerationRequest([{"role": "user", "content": f"{i} {k}"}]) for k in range(5)] for i in range(10)]
            return [
                answer
                for group in await asyncio.gather(*(server.generate(g, SamplingParams(16)) for g in groups))
                for answer in group
            ]
        finally:
            await server.close()

    answers = asyncio.run(run())
    assert [answer.text and answer.text.split(" ", 1)[1] for answer in answers] == [f"{i} {k}" for i in range(10) for k in range(5)]
    assert len(starts(program)) == 2


def test_a_server_that_ignores_sigterm_is_killed(program):
    generate(launched(program, "--stubborn", "--child", stop_s=0.5), "a")
    assert gone(*(starts(program)[0][name] for name in ("pid", "child")))


OURS = """
import asyncio, sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
from support.servers import launched
async def run():
    server = launched(Path({program!r}), "--stubborn", "--child", {takes!r})
    await server.open()
    print("open", flush=True)
    await asyncio.sleep(1000)
asyncio.run(run())
"""


@pytest.mark.parametrize("takes", ["--takes 0", "--takes 1000"], ids=["while serving", "while starting"])
def test_kill_9_leaves_no_process(program, takes):
    script = program.parent / "ours.py"
    script.write_text(dedent(OURS.format(tests=str(TESTS), program=str(program), takes=takes)))
    ours = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE)
    assert ours.stdout is not None
    if takes == "--takes 0":
        assert ours.stdout.readline() == b"open\n"
    deadline = time.monotonic() + 200
    while not (program.parent / "starts.jsonl").exists() or not starts(program):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    [start] = starts(program)
    family = [process.pid for process in psutil.Process(ours.pid).children(recursive=True)]
    assert {start["pid"], start["child"]} < set(family)  # the guard is the third
    os.kill(ours.pid, signal.SIGKILL)
    ours.wait()
    ours.stdout.close()
    assert gone(*family)
