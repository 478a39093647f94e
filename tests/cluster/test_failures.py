"""Real runs of two processes that fail: one message names the rank, the step and the cause; nothing is left; and what is started
again, by itself or by the user, ends with the bits of a run that was not disturbed."""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from plaudit.checkpoint import find_checkpoint
from plaudit.run_progress import RunProgress
from support.processes import gone
from support.ranks import samples, train_with, weight_difference
from support.recipes import exact_metrics, rl_recipe, write_recipe

pytestmark = pytest.mark.slow
LIMIT_S = 900.0
STEPS = 24
FAULTY_ENGINE = """
import os, signal, time
import torch
from plaudit.rollout.native.engine import NativeEngine

class Faulty(NativeEngine):
    def __init__(self, setup):
        super().__init__(setup.model, setup.tokenizer)
        self.rank = setup.world.rank

    def generate(self, requests, sampling):
        if (self.rank, sampling.step) == (1, 2):
            fail(os.environ["HOW"])
        return super().generate(requests, sampling)

def fail(how):
    match how:
        case "hangs":
            time.sleep(600)
        case "has no memory left":
            torch.ones(2**50)
"""


class Launched:
    """`python -m plaudit rl RECIPE`, with all processes that it starts."""

    def __init__(self, recipe: Path, output: Path, **environment: str):
        self.mark = uuid.uuid4().hex
        self.output = output
        with output.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "plaudit", "rl", str(recipe)], stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                process_group=0, env={**os.environ, **environment, "LAUNCHED_BY": self.mark},
            )  # fmt: skip
        self.seen: set[int] = set()

    def ranks(self) -> list[int]:
        """Their process ids; all descendants are remembered."""
        try:
            children = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        self.seen |= {child.pid for child in children}
        return [child.pid for child in children if any(word.startswith("rank=") for word in command_of(child))]

    def ranks_at_work(self, run: Path, steps: int) -> list[int]:
        """Once they have resumed, and this number of steps is done."""
        ranks, began = [], 0.0
        while self.process.poll() is None:
            if (now := self.ranks()) != ranks:
                ranks, began = now, time.time()
            metrics = run / "metrics.jsonl"
            resumed = metrics.exists() and metrics.stat().st_mtime > began  # by what is left of earlier ones
            if len(ranks) == 2 and resumed and RunProgress(run, {}).steps_done() >= steps:
                return ranks
            time.sleep(0.1)
        raise AssertionError(self.output.read_text(errors="replace"))

    def wait(self) -> tuple[int, str]:
        code = self.process.wait(LIMIT_S)
        return code, self.output.read_text(errors="replace")

    def left(self) -> list[str]:
        """What outlives it."""
        gone(*self.seen)
        marked = [process for process in psutil.process_iter() if environment_of(process).get("LAUNCHED_BY") == self.mark]
        return [f"{process.pid} {command_of(process)}" for process in marked if not gone(process.pid)]

    def kill(self) -> None:
        self.ranks()
        for pid in (self.process.pid, *self.seen):
            kill(pid)
        self.process.wait()


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def command_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def environment_of(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except (psutil.Error, OSError):
        return {}


@pytest.fixture
def launch(tmp_path) -> Iterator:
    started: list[Launched] = []

    def start(recipe: Path, **environment: str) -> Launched:
        started.append(Launched(recipe, tmp_path / f"output{len(started)}", **environment))
        return started[-1]

    yield start
    for one in started:
        one.kill()


# One message ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            "hangs",
            r"rank 1 \(step 2, sampling\) has made no progress for 20 s\. If it was still at work, raise cluster\.timeout_s\.",
        ),
        (
            "has no memory left",
            r"step 2: rank 1: rollout\.engine Faulty: RuntimeError: .*allocate.* memory.* \(\S+faulty\.py:\d+\)\. Fix it and run",
        ),
    ],
)
def test_a_rank_of_a_training_run(tmp_path, tiny_model, prompts_file, launch, how, message):
    (tmp_path / "faulty.py").write_text(FAULTY_ENGINE)
    tree = rl_recipe(tiny_model, prompts_file, tmp_path / "run", {"kind": "length", "at_most": 4}, run={"save_every": 1})
    tree |= {"cluster": {"gpus": 2, "timeout_s": 20, "restarts": 0}}
    tree["rollout"]["engine"] = f"{tmp_path / 'faulty.py'}:Faulty"
    command = launch(write_recipe(tmp_path / "r.yaml", tree), HOW=how)
    while command.process.poll() is None:
        command.ranks()
        time.sleep(0.1)
    code, output = command.wait()
    print(output)
    assert code in (1, 2)
    assert len(re.findall(message, " ".join(output.split()))) == 1
    assert "Traceback" not in output
    assert (how == "hangs") == bool(re.search(r"rank 1: hangs at \S+faulty\.py:\d+ in fail", output))
    assert command.left() == []
    checkpoint, warnings = find_checkpoint(tmp_path / "run/checkpoints")
    assert not warnings
    assert checkpoint is not None, "the run can be resumed"
    assert checkpoint.step == 1


# Restarts -------------------------------------------------------------------------------------------------------------


def test_lost_ranks_and_a_killed_command_leave_no_trace_in_the_result(tmp_path, tiny_model, prompts_file, reward_file, launch):
    """The command starts its ranks again when one was killed, and then or before all were, or one hangs, at random moments; then it
    is killed itself."""
    seed = int.from_bytes(os.urandom(4))
    print(f"seed {seed}")
    chance = random.Random(seed)

    def recipe(name: str) -> Path:
        sections = {"run": {"max_steps": STEPS, "save_every": 2, "validate_every": 3}, "data": {"val": str(prompts_file)}}
        tree = rl_recipe(tiny_model, prompts_file, tmp_path / name, reward_file, validation={"max_prompts": 4}, **sections)
        tree["rewards"].append({"kind": "length", "weight": 0.1, "at_most": 4, "slack": 8, "normalise": "running"})
        return write_recipe(tmp_path / f"{name}.yaml", {**tree, "cluster": {"gpus": 2, "timeout_s": 20}})

    run = tmp_path / "run"
    command = launch(recipe("run"))
    reached = -1
    victims = ["a rank", chance.choice(["all ranks", "hangs"])]
    chance.shuffle(victims)
    for victim in [*victims, "the command"]:
        steps = reached + chance.randint(1, 4)  # without a further step it could be the same failure
        delay_s = chance.uniform(0.0, 0.2)
        print(f"{victim}, {delay_s:.2f} s after step {steps}")
        ranks = command.ranks_at_work(run, steps)
        time.sleep(delay_s)
        match victim:
            case "a rank":
                kill(chance.choice(ranks))
            case "all ranks":
                for pid in ranks:
                    kill(pid)
            case "hangs":
                os.kill(chance.choice(ranks), signal.SIGSTOP)
            case _:
                kill(command.process.pid)
        reached = RunProgress(run, {}).steps_done()
        if victim != "the command":
            assert gone(*ranks, within_s=LIMIT_S), "all of them"
    code, output = command.wait()
    print(output)
    assert code == -signal.SIGKILL
    assert output.count("(cluster.restarts)") == 2
    message = r"rank [01] \([^)]+\) was killed by SIGKILL, as happens when the system's memory runs out\."
    assert re.search(message, " ".join(output.split()))
    assert command.left() == []
    code, output = launch(recipe("run")).wait()
    assert code == 0, output
    assert len(json.loads((run / "run.json").read_text())["restarts"]) == 2

    train_with(2, "rl", recipe("undisturbed"), "cluster.gpus=2")
    assert samples(run, but=()) == samples(tmp_path / "undisturbed", but=())
    assert exact_metrics(run) == exact_metrics(tmp_path / "undisturbed")
    assert weight_difference(run, tmp_path / "undisturbed") == 0.0
