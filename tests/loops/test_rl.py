"""`plaudit rl` from prompts to a trained model: it learns, updates match the formula, failing rewards are handled, and a run that
was interrupted in any way ends with the same result."""

import json
import math
import os
import random
import re
import signal
import sys
from collections.abc import Sequence
from decimal import Decimal
from itertools import combinations
from pathlib import Path
from statistics import fmean
from textwrap import dedent
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from plaudit.data.pack import micro_batches
from plaudit.data.rows import read_rows
from plaudit.data.templates import load_tokenizer
from plaudit.errors import DataError, Interrupted, PlauditError, RecipeError, RunError, TrainingStopped
from plaudit.loops import rl
from plaudit.models.logprobs import target_logprobs
from plaudit.models.reference import Reference
from plaudit.models.trainable import load_model, load_policy
from plaudit.recipe import AlgorithmSettings, ModelSettings
from plaudit.report.curves import draw_curves
from plaudit.rewards.handover import Handover
from plaudit.rl.collect import Collector
from plaudit.rl.experience import Update, make_update
from plaudit.rl.learner import Learner
from plaudit.rl.losses import policy_loss
from plaudit.rollout.engine import Request, Sampling
from plaudit.rollout.native.engine import NativeEngine
from plaudit.rollout.stopping import Stopping
from plaudit.run import Run
from plaudit.train.trainer import Trainer
from plaudit.types import Experience
from support.engine_contract import attention
from support.experience import batches_of
from support.processes import Command
from support.recipes import Stopped, rl_recipe, stop_before, train_rl, write_recipe
from support.rows import prompt_rows, write_jsonl


@pytest.fixture(scope="module", autouse=True)
def prompts_file(relative_prompts) -> Path:
    return relative_prompts


@pytest.fixture
def recipe(tmp_path, tiny_model, prompts_file, reward_file):
    """Writes a recipe whose run folder has the same name."""

    def write(name: str = "run", reward: Path | dict = reward_file, prompts: Path = prompts_file, **sections: dict) -> Path:
        return write_recipe(tmp_path / f"{name}.yaml", rl_recipe(tiny_model, prompts, tmp_path / name, reward, **sections))

    return write


def function(path: Path, **settings) -> dict:
    return {"kind": "function", "path": str(path), "workers": 1, "limits": {"timeout_s": 60}, **settings}


def write_function(path: Path, body: str) -> Path:
    path.write_text(dedent(body))
    return path


def metrics_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def exact_metrics(run: Path) -> list[dict]:
    return [{name: value for name, value in row.items() if not name.startswith("time/")} for row in metrics_of(run)]


def samples_of(run: Path, step: int, part: str = "train") -> list[dict]:
    return list(read_rows(run / f"samples/{part}_{step:06d}.parquet"))


def weights_of(model: Path) -> dict[str, torch.Tensor]:
    return load_file(model / "model.safetensors")


def assert_same_result(run: Path, reference: Path) -> None:
    """Weights, trainer state, metrics and samples, to the bit."""
    last = sorted((reference / "checkpoints").glob("step_*"))[-1].name
    files = ["model/model.safetensors", f"checkpoints/{last}/trainer/00000.safetensors", f"checkpoints/{last}/state.json"]
    if (reference / "critic").exists():
        files += [str(file.relative_to(reference)) for file in (reference / "critic").glob("*.safetensors")]
        files += [f"checkpoints/{last}/critic_trainer/00000.safetensors"]
    for file in files:
        assert (run / file).read_bytes() == (reference / file).read_bytes(), file
    assert exact_metrics(run) == exact_metrics(reference)
    samples = {path.name: path.read_bytes() for path in (reference / "samples").iterdir()}
    assert {path.name for path in (run / "samples").iterdir()} == set(samples)
    for name, content in samples.items():
        assert (run / "samples" / name).read_bytes() == content, name


@pytest.fixture
def recorded(monkeypatch) -> list[Update]:
    """Records every update."""
    updates: list[Update] = []

    def make_and_record(*arguments, **settings):
        updates.append(make_update(*arguments, **settings))
        return updates[-1]

    monkeypatch.setattr("plaudit.rl.learner.make_update", make_and_record)
    return updates


class EngineCall(NamedTuple):
    sampling: Sampling
    requests: Sequence[Request]


@pytest.fixture
def engine_calls(monkeypatch) -> list[EngineCall]:
    """What engines are called with."""
    calls: list[EngineCall] = []
    generate = NativeEngine.generate

    def generate_and_record(self, requests, sampling):
        calls.append(EngineCall(sampling, requests))
        return generate(self, requests, sampling)

    monkeypatch.setattr(NativeEngine, "generate", generate_and_record)
    return calls


# Learning ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_tiny_model_learns_to_raise_its_reward(tmp_path, recipe):
    """Random weights produce letters and digits less than half of the time; the reward is their share of the response."""
    file = recipe(
        rollout={"n": 8, "max_new_tokens": 8, "stop": []},
        train={"prompts_per_step": 4},
        data={"val": str(tmp_path / "val.jsonl")},
        run={"max_steps": 25},
    )
    write_jsonl(tmp_path / "val.jsonl", prompt_rows(20)[12:])
    model = train_rl(file)
    rows = metrics_of(tmp_path / "run")
    rewards = [row["reward"] for row in rows if "reward" in row]
    assert len(rewards) == 25
    assert sum(rewards[:5]) / 5 < 0.55
    assert sum(rewards[-5:]) / 5 > 0.7
    assert rows[-1]["val/reward"] > rows[0]["val/reward"] + 0.15
    assert rows[-1]["entropy"] < rows[1]["entropy"] - 0.1
    assert os.readlink(tmp_path / "run/best") == "checkpoints/step_000025"
    assert model == tmp_path / "run/model"


def test_curves_are_drawn(tmp_path, recipe, monkeypatch):
    def draw_one(rows, path):
        draw_curves([{"step": row["step"], "reward": row["reward"]} for row in rows], path)

    monkeypatch.setattr("plaudit.report.curves.draw_curves", draw_one)
    train_rl(recipe())
    assert (tmp_path / "run/curves.png").read_bytes().startswith(b"\x89PNG")


# Interruptions -------------------------------------------------------------------------------------------------------

VARIANTS = {
    "KL, entropy, several shuffled updates": {
        "algorithm": {"kl_coefficient": 0.05, "entropy_coefficient": 0.01},
        "train": {"prompts_per_step": 4, "prompts_per_update": 2, "epochs_per_step": 2},
    },
    "plain": {},
    "bfloat16, LoRA with dropout, KL": {
        "model": {"dtype": "bfloat16", "lora": {"rank": 4, "dropout": 0.1}, "gradient_checkpointing": True},
        "algorithm": {"kl_coefficient": 0.05},
        "rollout": {"temperature": 0.8, "top_p": 0.95, "max_sequences": 5},
    },
    "PPO with critic warm-up": {
        "algorithm": {"kind": "ppo", "gae_lambda": 0.95, "kl_reward": {"coefficient": 0.01, "target": 0.01, "horizon": 50}},
        "critic": {"pretrain_steps": 1, "optim": {"lr": 1e-3, "schedule": "linear"}},
        "train": {"prompts_per_step": 4, "prompts_per_update": 2},
    },
    "PPO with a shared critic": {
        "model": {"dtype": "bfloat16", "lora": {"rank": 4, "dropout": 0.1}},
        "algorithm": {"kind": "ppo", "gae_lambda": 0.95},
        "critic": {"shared": True, "pretrain_steps": 1, "optim": {"lr": 1e-3, "schedule": "linear"}},
        "train": {"prompts_per_step": 4, "prompts_per_update": 2},
    },
    "dynamic sampling": {"algorithm": {"dynamic_sampling": {}}, "rollout": {"n": 2, "max_new_tokens": 3}},
}
STEPS = 6

# Like the fixture's, but it halts if the environment says so: unlike the file, that is not part of the run's identity.
REWARD_THAT_CAN_HALT = """
import os, time

def compute_score(solution_str):
    halt = os.environ.get("HALT_SCORING", "")
    if halt and os.path.exists(halt):
        open(halt + ".reached", "w").close()
        time.sleep(50)
    return sum(c.isascii() and c.isalnum() for c in solution_str) / max(1, len(solution_str))
"""

# The command, which halts in the given phase of a step and creates a marker file.
COMMAND_THAT_HALTS = """
import os, sys, time
from pathlib import Path
from statistics import fmean

phase, step, marker = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
del sys.argv[1:4]

from plaudit.cli import main
from plaudit.rollout.native.engine import NativeEngine
from plaudit.train.optimiser import Optimiser

now = 0
generate, move = NativeEngine.generate, Optimiser.step

def halt():
    Path(f"{marker}.reached").touch()
    while not Path(f"{marker}.released").exists():
        time.sleep(0.01)

def generate_and_halt(self, requests, sampling):
    global now
    now = sampling.step
    if now == step and phase == "scoring":
        marker.touch()
    for number, sample in enumerate(generate(self, requests, sampling)):
        if now == step and phase == "sampling" and number == 2:
            halt()
        yield sample

def move_and_halt(self, lr):
    move(self, lr)
    if now == step and phase == "updating":
        halt()

NativeEngine.generate, Optimiser.step = generate_and_halt, move_and_halt
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_kill_9_while_sampling_scoring_and_updating(tmp_path, recipe, prompts_file, variant):
    reward = write_function(tmp_path / "reward.py", REWARD_THAT_CAN_HALT)
    sections = dict(VARIANTS[variant], data={"val": str(prompts_file)}, validation={"max_prompts": 3})
    sections["run"] = {"max_steps": STEPS, "save_every": 2, "validate_every": 3}
    train_rl(recipe("reference", reward, **sections))
    killed = recipe("killed", reward, **sections)
    seed = int(os.environ.get("PLAUDIT_TEST_SEED", random.SystemRandom().randrange(10**6)))
    print(f"PLAUDIT_TEST_SEED={seed}")
    rng = random.Random(seed)
    steps, phases = sorted(rng.sample(range(1, STEPS + 1), 3)), rng.sample(["sampling", "scoring", "updating"], 3)
    for step, phase in zip(steps, phases, strict=True):
        marker, reached = tmp_path / phase, tmp_path / f"{phase}.reached"
        process = Command(phase, step, marker, "rl", killed, script=COMMAND_THAT_HALTS, HALT_SCORING=str(marker))
        process.wait_for(reached.exists)
        assert [row["step"] for row in metrics_of(tmp_path / "killed")][-1:] == [step - 1]
        process.kill()
    train_rl(killed)
    assert_same_result(tmp_path / "killed", tmp_path / "reference")


# The call after which the run ends, with two updates per step, and validation before the first step and after every second.
BOUNDARIES = {
    "the first validation": (rl, "validate", 1),
    "the first line of metrics": (Run, "log", 1),
    "the first samples": (Collector, "collect", 1),
    "samples of step 3": (Collector, "collect", 3),
    "samples of step 3 written": (Run, "write_samples", 5),
    "the first update of step 3": (Trainer, "update", 5),
    "both updates of step 3": (Learner, "learn", 3),
    "the validation of step 2": (rl, "validate", 2),
    "the metrics of step 3": (Run, "log", 4),
    "the checkpoint of step 2": (Run, "save", 1),
    "the trained model": (Run, "finish", 1),
}
INTERRUPTIBLE = {
    "train": {"prompts_per_step": 4, "prompts_per_update": 2},
    "algorithm": {"kl_coefficient": 0.05},
    "run": {"max_steps": 4, "save_every": 2, "validate_every": 2},
}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, tiny_model, prompts_file, reward_file) -> Path:
    run = tmp_path_factory.mktemp("uninterrupted") / "run"
    tree = rl_recipe(tiny_model, prompts_file, run, reward_file, **INTERRUPTIBLE, data={"val": str(prompts_file)})
    train_rl(write_recipe(run.with_name("r.yaml"), tree))
    return run


@pytest.mark.grid(1)
@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_a_run_resumes_from_between_any_two_phases(tmp_path, recipe, prompts_file, uninterrupted, monkeypatch, boundary):
    owner, name, nth = BOUNDARIES[boundary]
    original, calls = getattr(owner, name), []

    def stop_after(*arguments, **settings):
        result = original(*arguments, **settings)
        calls.append(name)
        if len(calls) == nth:
            raise Stopped
        return result

    file = recipe(**INTERRUPTIBLE, data={"val": str(prompts_file)})
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, stop_after)
        with pytest.raises(Stopped):
            train_rl(file)
    train_rl(file)
    assert_same_result(tmp_path / "run", uninterrupted)


def test_output_after_the_checkpoint_is_dropped_on_resume(tmp_path, recipe, monkeypatch):
    """Otherwise an unfinished run would show samples and metrics of a policy that no longer exists."""
    file, learn = recipe(run={"max_steps": 4, "save_every": 2}), Learner.learn

    def stop_in_step_4(self, groups, step):
        if step == 4:
            raise Stopped
        return learn(self, groups, step)

    def stop_at_once(*_):
        raise Stopped

    def remaining() -> tuple[list[str], list[int]]:
        samples = sorted(path.stem for path in (tmp_path / "run/samples").iterdir())
        return samples, [row["step"] for row in metrics_of(tmp_path / "run")]

    monkeypatch.setattr(Learner, "learn", stop_in_step_4)
    with pytest.raises(Stopped):
        train_rl(file)
    assert remaining() == ([f"train_{step:06d}" for step in (1, 2, 3, 4)], [1, 2, 3])
    monkeypatch.setattr(Collector, "collect", stop_at_once)
    with pytest.raises(Stopped):
        train_rl(file)
    assert remaining() == (["train_000001", "train_000002"], [1, 2])


def test_ctrl_c_saves_and_says_how_to_resume(tmp_path, recipe):
    train_rl(recipe("reference", run={"max_steps": 4}))
    stopped = recipe("stopped", run={"max_steps": 4})
    marker = tmp_path / "sampling"
    process = Command("sampling", 2, marker, "rl", stopped, script=COMMAND_THAT_HALTS)
    process.wait_for((tmp_path / "sampling.reached").exists)
    process.send(signal.SIGINT)
    (tmp_path / "sampling.released").touch()
    assert process.wait() == 130, process.output
    output = process.output
    assert "stopping as soon as the state can be saved" in output
    assert f"stopped during step 2; step 1 is saved. Resume with: plaudit rl {stopped}" in output
    assert "Traceback" not in output
    assert json.loads((tmp_path / "stopped/checkpoints/step_000001/state.json").read_text())["step"] == 1
    train_rl(stopped)
    run, reference = tmp_path / "stopped", tmp_path / "reference"
    assert (run / "model/model.safetensors").read_bytes() == (reference / "model/model.safetensors").read_bytes()
    assert exact_metrics(run) == exact_metrics(reference)


# The call of the engine during which the run is asked to stop, and what it says.
STOPS = {
    "the first validation": ("val", 0, r"stopped during validation before training; there is no step to save yet\."),
    "sampling in step 1": ("train", 1, r"stopped during step 1; there is no step to save yet\."),
    "sampling in step 3": ("train", 3, r"stopped during step 3; step 2 is saved\."),
    "sampling in step 4": ("train", 4, r"stopped during step 4; step 3 is saved\."),
    "the validation of step 2": ("val", 2, r"stopped during validation after step 2; step 2 is saved\."),
}


@pytest.mark.grid(1)
@pytest.mark.parametrize("moment", STOPS)
def test_sigterm_leaves_sampling_at_the_next_step_of_the_engine(tmp_path, recipe, prompts_file, uninterrupted, monkeypatch, moment):
    part, step, message = STOPS[moment]
    generate, left = NativeEngine.generate, []

    def generate_and_signal(self, requests, sampling):
        if ("val" if sampling.temperature == 0 else "train", sampling.step) == (part, step):
            on_step = self.on_step

            def on_step_and_signal(new_tokens):
                left.append(new_tokens)
                os.kill(os.getpid(), signal.SIGTERM)
                on_step(new_tokens)

            self.on_step = on_step_and_signal
        yield from generate(self, requests, sampling)

    file = recipe(**INTERRUPTIBLE, data={"val": str(prompts_file)})
    with monkeypatch.context() as patch:
        patch.setattr(NativeEngine, "generate", generate_and_signal)
        with pytest.raises(Interrupted, match=f"^{message} Resume with: plaudit"):
            train_rl(file)
    assert len(left) == 1, "it left at once"
    train_rl(file)
    assert_same_result(tmp_path / "run", uninterrupted)


def test_sigterm_while_scoring_cancels_the_calls(tmp_path, recipe, monkeypatch):
    """A reward that hangs does not keep the run from stopping."""
    reward = write_function(tmp_path / "reward.py", REWARD_THAT_CAN_HALT)
    train_rl(recipe("reference", reward))
    wait_for = Handover.wait

    def signal_and_wait(self, every_s, report):
        if (tmp_path / "halt").exists():
            os.kill(os.getpid(), signal.SIGTERM)
        wait_for(self, every_s, report)

    monkeypatch.setenv("HALT_SCORING", str(tmp_path / "halt"))
    monkeypatch.setattr(Handover, "wait", signal_and_wait)
    (tmp_path / "halt").touch()
    file = recipe("run", reward)
    with pytest.raises(Interrupted, match=r"^stopped during step 1; there is no step to save yet\."):
        train_rl(file)
    (tmp_path / "halt").unlink()
    train_rl(file)
    assert_same_result(tmp_path / "run", tmp_path / "reference")


def test_sigterm_stops_the_run_after_the_step(tmp_path, recipe, monkeypatch):
    learn = Learner.learn
    monkeypatch.setattr(sys, "argv", ["plaudit", "rl", "my recipe.yaml"])
    monkeypatch.setattr(Learner, "learn", lambda *arguments: os.kill(os.getpid(), signal.SIGTERM) or learn(*arguments))
    with pytest.raises(Interrupted, match=r"^stopped after step 1 of 2, saved\. Resume with: plaudit rl 'my recipe\.yaml'"):
        train_rl(recipe())
    assert (tmp_path / "run/checkpoints/step_000001/model/model.safetensors").exists()


def test_restarting_a_finished_run_changes_nothing(tmp_path, recipe, capsys):
    file = recipe()
    train_rl(file)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file() and path.name != "run.json"}
    train_rl(file)
    assert "this run is finished: all 2 steps are done" in capsys.readouterr().err
    for path, content in before.items():
        assert path.read_bytes() == content, path


# Run identity --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"rollout": {"temperature": 0.9}}, r"rollout\.temperature: was 1\.0, is now 0\.9"),
        ({"algorithm": {"kl_coefficient": 0.1}}, r"algorithm\.kl_coefficient: was 0\.0, is now 0\.1"),
        ({"train": {"prompts_per_step": 2}}, r"train\.prompts_per_step: was 3, is now 2"),
        ({"seed": 1}, r"seed: was 0, is now 1"),
    ],
)
def test_a_changed_recipe_is_refused(tmp_path, recipe, sections, message):
    train_rl(recipe(run={"max_steps": 1}))
    seed = [f"seed={sections.pop('seed')}"] if "seed" in sections else []
    with pytest.raises(RunError, match=rf"belongs to a run with another recipe:\n  {message}\nChoose another run\.dir, or undo"):
        train_rl(recipe(**sections, run={"max_steps": 1}), *seed)


def test_a_changed_reward_setting_is_refused_but_not_a_changed_file(tmp_path, recipe, capsys):
    reward = write_function(tmp_path / "reward.py", "def compute_score(solution_str): return len(solution_str)")
    train_rl(recipe(reward=reward))
    with pytest.raises(RunError, match=r"\n  rewards\.0\.weight: was 1\.0, is now 2\.0\n"):
        train_rl(recipe(reward=function(reward, weight=2)))
    write_function(reward, "def compute_score(solution_str): return -len(solution_str)")
    capsys.readouterr()
    train_rl(recipe(reward=reward))
    assert f"resumes although {reward} has changed" in " ".join(capsys.readouterr().err.split())
    train_rl(recipe(reward=reward))
    assert "has changed" not in capsys.readouterr().err


def test_changed_prompts_are_refused(tmp_path, recipe):
    prompts = write_jsonl(tmp_path / "prompts.jsonl", prompt_rows(6))
    train_rl(recipe(prompts=prompts))
    write_jsonl(prompts, prompt_rows(7))
    with pytest.raises(RunError, match=rf"{prompts}: its content has changed"):
        train_rl(recipe(prompts=prompts))


def test_settings_that_do_not_affect_the_weights_may_change(tmp_path, recipe, prompts_file, reward_file, monkeypatch):
    settings = {"data": {"val": str(prompts_file)}, "run": {"max_steps": 4, "save_every": 2}}
    train_rl(recipe("reference", **settings))
    with monkeypatch.context() as patch:
        patch.setattr(Run, "stop_if_interrupted", _stop_at(3))
        with pytest.raises(Stopped):
            train_rl(recipe(**settings))
    changed = function(reward_file, workers=2, max_failure_rate=0.5)
    train_rl(recipe(reward=changed, **settings), "run.validate_every=3", "run.keep_last=1", "run.validate_first=false")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "run/model" / name).read_bytes() == (tmp_path / "reference/model" / name).read_bytes()
    assert samples_of(tmp_path / "run", 3, "val")


def test_a_changed_validation_set_is_refused(tmp_path, recipe, prompts_file):
    """It would mix two sets in one curve, and compare them to find the best checkpoint."""
    val = write_jsonl(tmp_path / "val.jsonl", prompt_rows(4))
    train_rl(recipe(data={"val": str(val)}, run={"max_steps": 1}))
    for changed, message in {
        "validation.max_prompts=2": r"validation\.max_prompts: was null, is now 2",
        "validation.n=2": r"validation\.n: was 1, is now 2",
        "validation.temperature=1": r"validation\.temperature: was 0\.0, is now 1\.0",
        "data.val=[]": r"data\.val: was .*, is now \[\]",
    }.items():
        with pytest.raises(RunError, match=rf"\n  {message}\n[\s\S]*\nA run keeps its validation set .*run\.validate_every"):
            train_rl(tmp_path / "run.yaml", changed)
    write_jsonl(val, prompt_rows(5))
    with pytest.raises(RunError, match="its content has changed"):
        train_rl(tmp_path / "run.yaml")


def test_validation_before_training_can_be_switched_off(tmp_path, recipe, prompts_file, capsys):
    validation = {"max_prompts": 5, "temperature": 1.0, "n": 4}
    train_rl(recipe(data={"val": str(prompts_file)}, validation=validation, run={"max_steps": 2, "validate_first": False}))
    assert [(row["step"], "val/reward" in row) for row in metrics_of(tmp_path / "run")] == [(1, False), (2, True)]
    shown = capsys.readouterr().err
    assert re.search(r"val: 5 of \d+ prompts, longest \d+ tokens; the others left out by validation.max_prompts\n", shown)
    best, worst = re.findall(r"^(?:best |worst) (\d\.\d{4}).*\n  › ", shown, re.MULTILINE)
    assert float(best) > float(worst)


def test_metrics_of_several_samples_at_each_validation(tmp_path, recipe, prompts_file):
    metrics = ["pass@2", "best_of@4", "majority@4"]
    validation = {"max_prompts": 3, "temperature": 1.0, "n": 4, "metrics": metrics, "threshold": 0.7}
    reward = {"kind": "length", "at_most": 0, "slack": 12, "view": {"extract": "line"}}
    train_rl(recipe(reward=reward, data={"val": str(prompts_file)}, validation=validation, run={"max_steps": 1}))
    first, _ = metrics_of(tmp_path / "run")
    table = pq.read_table(tmp_path / "run/samples/val_000000.parquet").to_pylist()
    groups = [[row for row in table if row["prompt_id"] == id] for id in dict.fromkeys(row["prompt_id"] for row in table)]
    rewards = [[row["reward"] for row in group] for group in groups]
    assert first["val/pass@2"] == pytest.approx(fmean(max(two) >= 0.7 for each in rewards for two in combinations(each, 2)))
    assert first["val/best_of@4"] == first["val/sums/best_of@4"] == pytest.approx(fmean(map(max, rewards)))
    assert 0 <= first["val/majority@4"] <= first["val/pass@2"] < 1
    # They may be added to a run that has begun.
    train_rl(tmp_path / "run.yaml", "validation.metrics=[pass@1]")


def _stop_at(step: int):
    def stop(self, now, total):
        if now == step:
            raise Stopped

    return stop


# Rewards that fail ---------------------------------------------------------------------------------------------------

# Fails on every third call, counted in a file that outlives the process.
FAILS_EVERY_THIRD_CALL = """
import os, time

def compute_score(solution_str, act, calls):
    with open(calls, "a") as file:
        file.write(".")
        if file.tell() % 3: return len(solution_str) / 10
    if act == "raises": raise ValueError("no digits")
    if act == "nan": return float("nan")
    if act == "hangs": time.sleep(1000)
    if act == "exits": os._exit(7)
    print("y" * 1_000_000)
    raise RuntimeError("printed a lot")
"""
ACTS = {
    "raises": ("exception", r"ValueError: no digits, at hostile\.py:8"),
    "nan": ("not_a_number", "the function returned nan"),
    "hangs": ("timeout", r"after 3 s, at hostile\.py:10"),
    "exits": ("died", "exit code 7"),
    "prints": ("exception", "RuntimeError: printed a lot"),
}


@pytest.fixture
def failing_reward(tmp_path):
    path = write_function(tmp_path / "hostile.py", FAILS_EVERY_THIRD_CALL)

    def settings(act: str, **more) -> dict:
        arguments, timeout_s = {"act": act, "calls": str(tmp_path / "calls")}, 3 if act == "hangs" else 60
        return function(path, arguments=arguments, limits={"timeout_s": timeout_s}, **{"max_failure_rate": 1.0, **more})

    return settings


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.grid(2)
def test_samples_whose_reward_fails_are_dropped(tmp_path, recipe, failing_reward, recorded, act):
    steps, prompts = (1, 1) if act == "hangs" else (2, 3)
    train_rl(recipe(reward=failing_reward(act), train={"prompts_per_step": prompts}, run={"max_steps": steps}))
    cause, message = ACTS[act]
    rows = metrics_of(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    for row, update in zip(rows, recorded, strict=True):
        samples = samples_of(tmp_path / "run", row["step"])
        failed, fine = [s for s in samples if s["failure"]], [s for s in samples if not s["failure"]]
        assert len(failed) == len(samples) // 3
        assert row["dropped"] == row[f"failures/{cause}"] == row[f"failures/function/{cause}"] == len(failed)
        assert row["reward"] == pytest.approx(np.mean([len(s["response"]) / 10 for s in fine]))
        for sample in failed:
            assert sample["reward"] is None
            assert sample["part/function"] is None
            assert sample["failure"].startswith(f"{cause}: function: ")
            assert sample["failure/function"].startswith(f"{cause}: ")
            assert re.search(message, sample["failure"])
        assert_trained_on(update, fine)


def assert_trained_on(update: Update, samples: list[dict]) -> None:
    """The update has exactly these samples, in order, with the advantages and weights they have without the dropped ones."""
    assert [experience.num_targets for experience in update.samples] == [sample["tokens"] for sample in samples]
    for experience, sample in zip(update.samples, samples, strict=True):
        group = [other["reward"] for other in samples if other["prompt_id"] == sample["prompt_id"]]
        spread = np.std(group, ddof=1) if len(group) > 1 else 0.0
        expected = (sample["reward"] - np.mean(group)) / (spread + 1e-6)
        np.testing.assert_allclose(experience.advantages, expected, atol=1e-9)
    assert update.weights == pytest.approx([1 / sum(s["tokens"] for s in samples)] * len(samples))


@pytest.mark.parametrize("act", ["raises", "exits"])
def test_a_failure_gets_the_value_of_on_failure(tmp_path, recipe, failing_reward, recorded, act):
    train_rl(recipe(reward=failing_reward(act, on_failure=-0.5), run={"max_steps": 1}))
    [row], samples = metrics_of(tmp_path / "run"), samples_of(tmp_path / "run", 1)
    failed = [sample for sample in samples if sample["failure/function"]]
    assert len(failed) == 4
    assert row["dropped"] == 0
    assert row[f"failures/{ACTS[act][0]}"] == len(failed)
    assert row["reward"] == pytest.approx(np.mean([-0.5 if s in failed else len(s["response"]) / 10 for s in samples]))
    assert all(sample["reward"] == -0.5 and sample["failure/function"].startswith(ACTS[act][0]) for sample in failed)
    assert_trained_on(recorded[0], samples)


def test_on_failure_stop_reports_reward_and_cause(tmp_path, recipe, failing_reward):
    message = (
        r"^step 1: reward 'style' failed on at least \d of \d+ samples \(\d exception: ValueError: no digits, at hostile\.py:8\); "
        r"on_failure is stop\. Fix it, then run the same command to resume\. "
        r"The failed samples are in .*run/failures/step_1\.jsonl$"
    )
    with pytest.raises(TrainingStopped, match=message):
        train_rl(recipe(reward=failing_reward("raises", on_failure="stop", name="style")))


def test_too_many_failures_stop_the_run_and_are_counted(tmp_path, recipe, failing_reward):
    with pytest.raises(TrainingStopped) as stopped:
        train_rl(recipe(reward=failing_reward("raises", max_failure_rate=0.01)))
    assert "step 1: reward 'function' failed on at least " in str(stopped.value)
    assert " of 12 samples (" in str(stopped.value)
    assert "max_failure_rate is 0.01. Fix it, then run the same command to resume." in str(stopped.value)
    assert not (tmp_path / "run/model").exists()
    [kept, *_] = map(json.loads, (tmp_path / "run/failures/step_1.jsonl").read_text().splitlines())
    assert (kept["reward"], kept["cause"]) == ("function", "exception")
    assert "no digits" in kept["message"]
    assert kept.keys() == {"prompt_id", "prompt", "response", "reward", "cause", "message"}


def test_a_run_stopped_by_a_reward_resumes_once_it_works(tmp_path, recipe, monkeypatch):
    """Its own file was fine; something it depends on was broken: a server, a disk, a library."""
    body = f"""
        import os
        def compute_score(solution_str):
            if os.path.exists({str(tmp_path / "broken")!r}): raise ConnectionError("no answer")
            return len(solution_str)
    """
    reward = function(write_function(tmp_path / "reward.py", body), on_failure="stop")
    settings = {"max_steps": 4}
    train_rl(recipe("reference", reward, run=settings))
    file, write_samples = recipe(reward=reward, run=settings), Run.write_samples

    def break_after_step_2(self, name, step, *rows):
        if step == 2:
            (tmp_path / "broken").touch()
        return write_samples(self, name, step, *rows)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "write_samples", break_after_step_2)
        with pytest.raises(TrainingStopped, match=r"^step 3: .*no answer"):
            train_rl(file)
    assert [folder.name for folder in (tmp_path / "run/checkpoints").iterdir()] == ["step_000002"], "finished steps are saved"
    (tmp_path / "broken").unlink()
    train_rl(file)
    assert_same_result(tmp_path / "run", tmp_path / "reference")


def test_a_run_resumes_with_a_fixed_reward_file(tmp_path, recipe):
    broken = "def compute_score(solution_str): raise ValueError('always')"
    fixed = "def compute_score(solution_str): return len(solution_str)"
    reward = write_function(tmp_path / "reward.py", broken)
    file = recipe(reward=reward)
    with pytest.raises(
        TrainingStopped, match=r"failed on at least \d+ of 12 samples \(\d+ exception: ValueError: always, at reward\.py"
    ):
        train_rl(file)
    write_function(reward, fixed)
    train_rl(file)
    assert metrics_of(tmp_path / "run")[-1]["step"] == 2


def test_a_step_whose_samples_all_failed_changes_no_weights(tmp_path, recipe, tiny_model, prompts_file):
    """The next step runs as usual, and a validation whose samples all failed is not the best."""
    reward = write_function(tmp_path / "reward.py", "def compute_score(solution_str): raise ValueError('always')")
    val = {"data": {"val": str(prompts_file)}, "run": {"max_steps": 3, "validate_every": 1}}
    model = train_rl(recipe(reward=function(reward, max_failure_rate=1), **val, algorithm={"kl_coefficient": 0.1}))
    rows = metrics_of(tmp_path / "run")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    for row in rows[1:]:
        assert row["dropped"] == 12
        assert row["updates"] == 0
        assert row["groups_without_signal"] == 1
        assert row["val/reward"] is None
        assert not row.keys() & {"reward", "loss", "grad_norm"}
    assert not (tmp_path / "run/best").exists()
    before, after = weights_of(tiny_model), weights_of(model)
    assert all(torch.equal(before[name], after[name]) for name in after)


# Updates -------------------------------------------------------------------------------------------------------------

# The first step of AdamW is lr · sign(gradient): a full step even for a rounding error. With a large eps it is lr · gradient.
LIKE_SGD = {"lr": 1.0, "eps": 1.0, "max_grad_norm": None}


@pytest.mark.slow
def test_micro_batches_do_not_change_the_update(tmp_path, recipe, tiny_model):
    settings = {"optim": LIKE_SGD, "run": {"max_steps": 1}, "algorithm": {"kl_coefficient": 0.5, "entropy_coefficient": 0.5}}
    before, results = weights_of(tiny_model), []
    for tokens in (1, 100, 10_000):
        model = train_rl(recipe(f"run{tokens}", **settings, train={"tokens_per_micro_batch": tokens}))
        results.append(weights_of(model))
    moved = max((results[0][name] - before[name]).abs().max().item() for name in before)
    assert moved > 1e-3
    for other in results[1:]:
        assert max((results[0][name] - other[name]).abs().max().item() for name in before) < 1e-6


@pytest.mark.grid(1)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampler_and_trainer_have_the_same_logprobs(tmp_path, recipe, recorded, temperature):
    settings = {"rollout": {"temperature": temperature, "n": 4, "max_new_tokens": 12}, "train": {"epochs_per_step": 2}}
    train_rl(recipe(**settings, run={"max_steps": 3}))
    for row in metrics_of(tmp_path / "run"):
        assert 0 <= row["mismatch"] < 1e-4
        assert row["mismatch_kl"] < 1e-6
    # The ratio is taken against the trainer's own log-probs, which equal the sampler's up to rounding.
    for samples in (update.samples for update in recorded[::2]):
        for experience in samples:
            np.testing.assert_allclose(experience.old_logprobs, experience.sampler_logprobs, rtol=0, atol=1e-4)
    # A temperature applied on one side only would show.
    untempered = [sample["mean_logprob"] for step in (1, 2, 3) for sample in samples_of(tmp_path / "run", step)]
    tempered = [experience.sampler_logprobs.mean() for update in recorded[::2] for experience in update.samples]
    difference = np.abs(np.array(untempered) - np.array(tempered)).mean()
    assert difference < 1e-6 if temperature == 1.0 else difference > 0.01


def test_the_samplers_old_logprobs_give_the_same_update(tmp_path, recipe, recorded):
    settings = {"optim": LIKE_SGD, "run": {"max_steps": 1}}
    recomputed = weights_of(train_rl(recipe("recomputed", **settings)))
    sampler = weights_of(train_rl(recipe("sampler", **settings, algorithm={"old_logprobs": "sampler"})))
    assert all(experience.old_logprobs is None for experience in recorded[0].samples), "a single update per step needs none"
    assert all(np.array_equal(experience.old_logprobs, experience.sampler_logprobs) for experience in recorded[1].samples)
    assert max((recomputed[name] - sampler[name]).abs().max().item() for name in sampler) < 1e-6


def test_kl_to_the_reference_starts_at_zero_and_grows(tmp_path, recipe):
    train_rl(recipe(algorithm={"kl_coefficient": 0.01}, run={"max_steps": 3}))
    kls = [row["kl"] for row in metrics_of(tmp_path / "run")]
    assert 0 <= kls[0] < 1e-9
    assert min(kls[1:]) > 1e-6


@pytest.mark.slow
def test_a_large_kl_coefficient_holds_the_policy_back(tmp_path, recipe):
    for name, coefficient in (("loose", 1e-6), ("held", 10.0)):
        train_rl(recipe(name, algorithm={"kl_coefficient": coefficient}, run={"max_steps": 6}))
    loose, held = (metrics_of(tmp_path / name)[-1]["kl"] for name in ("loose", "held"))
    assert held < loose / 2


def experiences_by_hand(count: int = 5, vocabulary: int = 300) -> list[Experience]:
    """Samples of different lengths and advantage signs, with ratios on both sides of every bound."""
    rng = np.random.RandomState(0)
    result = []
    for i in range(count):
        prompt, response = 2 + i, (1, 7, 3, 12, 4)[i]
        logprobs = rng.normal(-5.8, 0.8, response)
        result.append(
            Experience(
                tokens=rng.randint(3, vocabulary, prompt + response).astype(np.int32),
                loss_mask=np.arange(prompt + response) >= prompt,
                reward=0.0,
                advantages=rng.normal(0, 1, response),
                sampler_logprobs=logprobs,
                old_logprobs=logprobs + rng.normal(0, 0.3, response),
                ref_logprobs=rng.normal(-5.8, 0.5, response),
            )
        )
    return result


@pytest.fixture(scope="module")
def template(tiny_model):
    from plaudit.data.templates import load_model_template

    return load_model_template(ModelSettings(path=str(tiny_model)))


def test_the_reference_under_lora_is_the_model_without_adapters(tiny_model, template):
    settings = ModelSettings(path=str(tiny_model), lora={"rank": 4}, dtype="float32")
    device = torch.device("cpu")
    policy, base = load_policy(settings, template, device), load_model(settings, device).eval()
    with torch.no_grad():
        for name, parameter in policy.trainable():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    [batch] = micro_batches(experiences_by_hand(), 10_000)
    reference = Reference(settings, policy)
    assert reference.copy is None
    policy.model.train()
    given = reference.logprobs(batch, 0.7)
    with torch.no_grad():
        np.testing.assert_allclose(given, target_logprobs(base, batch, temperature=0.7).logprobs_N, rtol=0, atol=1e-6)
        own = target_logprobs(policy.model, batch, temperature=0.7).logprobs_N
    assert (own - given).abs().mean() > 0.01, "the adapters are active again"
    assert all(parameter.requires_grad for _, parameter in policy.trainable())
    assert any("lora_A" in name for name, _ in policy.trainable())
    # Without LoRA, the reference is a frozen copy.
    full = load_policy(ModelSettings(path=str(tiny_model), dtype="float32"), template, device)
    frozen = Reference(ModelSettings(path=str(tiny_model), dtype="float32"), full)
    with torch.no_grad():
        for parameter in full.model.parameters():
            parameter.mul_(1.5)
    np.testing.assert_allclose(frozen.logprobs(batch, 0.7), given, rtol=0, atol=1e-6)


AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
HORIZON, TEMPERATURE = 16, 0.7


def loss_by_hand(model, samples: list[Experience], algorithm: AlgorithmSettings) -> tuple[torch.Tensor, dict[str, float]]:
    """Straight from the formula, with padding, full logits and loops."""
    longest = max(map(len, samples))
    tokens, mask = torch.zeros(len(samples), longest, dtype=torch.long), torch.zeros(len(samples), longest, dtype=torch.long)
    for s, sample in enumerate(samples):
        tokens[s, : len(sample)], mask[s, : len(sample)] = torch.from_numpy(sample.tokens.astype(np.int64)), 1
    logits = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits / TEMPERATURE
    num_tokens = sum(sample.num_targets for sample in samples)
    by_sample, sums = [], dict.fromkeys(("entropy", "kl", "clip_fraction", "dual_clip_fraction"), 0.0)
    for s, sample in enumerate(samples):
        losses = []
        begin = len(sample) - sample.num_targets
        for t in range(sample.num_targets):
            logp_V = logits[s, begin + t - 1].log_softmax(-1)
            logp, A = logp_V[tokens[s, begin + t]], float(np.float32(sample.advantages[t]))
            ratio = (logp - float(np.float32(sample.old_logprobs[t]))).exp()
            low, high = 1 - algorithm.clip_ratio[0], 1 + algorithm.clip_ratio[1]
            loss = torch.maximum(-A * ratio, -A * ratio.clamp(low, high))
            sums["clip_fraction"] += (A > 0 and ratio.item() > high) or (A < 0 and ratio.item() < low)
            if A < 0 and loss.item() > -A * algorithm.dual_clip:
                loss = torch.tensor(-A * algorithm.dual_clip, dtype=logits.dtype)
                sums["dual_clip_fraction"] += 1
            d = float(np.float32(sample.ref_logprobs[t])) - logp
            kl = d.exp() - d - 1 if algorithm.kl_estimator == "k3" else d * d / 2
            entropy = -(logp_V.exp() * logp_V).sum()
            sums["kl"], sums["entropy"] = sums["kl"] + kl.item(), sums["entropy"] + entropy.item()
            losses.append(loss + algorithm.kl_coefficient * kl - algorithm.entropy_coefficient * entropy)
        by_sample.append(torch.stack(losses))
    S = len(samples)
    total = {
        "token-mean": lambda: sum(x.sum() for x in by_sample) / num_tokens,
        "token-sum": lambda: sum(x.sum() for x in by_sample),
        "seq-mean-token-sum": lambda: sum(x.sum() for x in by_sample) / S,
        "seq-mean-token-mean": lambda: sum(x.mean() for x in by_sample) / S,
        "seq-mean-token-sum-norm": lambda: sum(x.sum() for x in by_sample) / (S * HORIZON),
    }[algorithm.aggregation]()
    return total, {name: value / num_tokens for name, value in sums.items()}


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_loss_of_an_update_matches_the_formula(tiny_model, aggregation):
    """In float64, packed into several micro-batches, against padded rows in plain transformers: value, metrics and gradient."""
    algorithm = AlgorithmSettings(
        aggregation=aggregation, clip_ratio=(0.1, 0.15), dual_clip=1.5, kl_coefficient=0.3, entropy_coefficient=0.2,
        kl_estimator="k3" if aggregation != "token-sum" else "k2",
    )  # fmt: skip
    model = load_model(ModelSettings(path=str(tiny_model), dtype="float32"), torch.device("cpu")).double()
    update = make_update(experiences_by_hand(), algorithm, horizon=HORIZON)
    with attention(model, "eager"):
        expected, sums = loss_by_hand(model, list(update.samples), algorithm)
        expected.backward()
    gradient = {name: p.grad.clone() for name, p in model.named_parameters()}
    assert sums["clip_fraction"] > 0, "otherwise these bounds test nothing"
    assert sums["dual_clip_fraction"] > 0

    model.zero_grad()
    loss, total, metrics = policy_loss(model, update.num_tokens, algorithm, TEMPERATURE), 0.0, dict.fromkeys(sums, 0.0)
    batches = batches_of(update, 20)
    assert len(batches) > 1
    for batch in batches:
        share, others = loss(batch)
        share.backward()
        total += share.item()
        metrics = {name: metrics[name] + others[name].item() for name in metrics}
    assert total == pytest.approx(expected.item(), rel=1e-6)
    for name, value in sums.items():
        assert metrics[name] == pytest.approx(value, rel=1e-6), name
    for name, parameter in model.named_parameters():
        # Not tighter: transformers computes norms and softmax in fp32, whatever the model's dtype.
        difference, size = (parameter.grad - gradient[name]).norm().item(), gradient[name].norm().item()
        assert difference < 1e-5 * size, name


def test_groups_with_equal_rewards_change_no_weights(tmp_path, recipe, tiny_model):
    reward = write_function(tmp_path / "reward.py", "def compute_score(solution_str): return 0.1")
    model = train_rl(recipe(reward=reward, train={"prompts_per_update": 1}))
    for row in metrics_of(tmp_path / "run"):
        assert row["groups_without_signal"] == 1
        assert row["reward"] == pytest.approx(0.1)
        assert row["grad_norm"] == 0
        assert row["loss"] == 0
    before, after = weights_of(tiny_model), weights_of(model)
    assert all(torch.equal(before[name], after[name]) for name in after)


def test_entropy_token_by_token(recipe, tmp_path):
    """The mean over all tokens is the step's metric, if the updates do not move the policy."""
    file = recipe(train={"epochs_per_step": 2}, optim={"lr": 1e-12}, run={"keep_tokens": 99, "max_steps": 1})
    train_rl(file)
    tokens = [row for row in samples_of(tmp_path / "run", 1) if row["token/entropy"] is not None]
    assert all(len(row["token/entropy"]) == len(row["token/logprob"]) for row in tokens)
    entropies = np.concatenate([row["token/entropy"] for row in tokens])
    assert entropies.mean() == pytest.approx(metrics_of(tmp_path / "run")[-1]["entropy"], rel=1e-4)


@pytest.mark.grid(1)
@pytest.mark.parametrize(
    ("train", "per_step"),
    [
        ({}, 1),
        ({"prompts_per_update": 2}, 3),
        ({"prompts_per_update": 2, "epochs_per_step": 2}, 6),
        ({"prompts_per_update": 2, "epochs_per_step": 3, "shuffle": False}, 9),
        ({"epochs_per_step": 2}, 2),
    ],
)
def test_every_epoch_of_a_step_trains_on_each_sample_once(tmp_path, recipe, recorded, train, per_step):
    """Five prompts per step and twelve in all, so the third step spans two epochs of the data."""
    train_rl(recipe(train={"prompts_per_step": 5, **train}, rollout={"n": 2}, run={"max_steps": 3}))
    assert [row["updates"] for row in metrics_of(tmp_path / "run")] == [per_step, 2 * per_step, 3 * per_step]
    passes, per_pass = train.get("epochs_per_step", 1), per_step // train.get("epochs_per_step", 1)
    orders = []
    for step in range(3):
        samples = [sample["tokens"] for sample in samples_of(tmp_path / "run", step + 1)]
        for number in range(passes):
            at = step * per_step + number * per_pass
            mine = recorded[at : at + per_pass]
            trained_on = [experience for update in mine for experience in update.samples]
            assert sorted(e.num_targets for e in trained_on) == sorted(samples)
            assert len({e.sampler_logprobs.tobytes() for e in trained_on}) == 10
            assert [len(update.samples) for update in mine] == ([4, 4, 2] if per_pass == 3 else [10])
            orders.append([e.sampler_logprobs.tobytes() for e in trained_on])
            for update in mine:
                assert update.weights == pytest.approx([1 / update.num_tokens] * len(update.samples))
    if per_pass == 3 and passes > 1:
        assert (orders[0] == orders[1]) == (not train.get("shuffle", True))


def test_an_epochs_last_short_batch_is_dropped_also_on_resume(tmp_path, recipe, monkeypatch):
    prompts = write_jsonl(tmp_path / "prompts.jsonl", prompt_rows(3))
    settings = {"prompts": prompts, "train": {"prompts_per_step": 2, "last_batch": "drop"}}
    settings["run"] = {"epochs": 2, "max_steps": None, "save_every": 1}
    train_rl(recipe("reference", **settings))
    assert [row["epoch"] for row in metrics_of(tmp_path / "reference")] == [1.0, 2.0]
    for step in (1, 2):
        assert len({row["prompt_id"] for row in samples_of(tmp_path / "reference", step)}) == 2
    file = recipe("stopped", **settings)
    stop_before(monkeypatch, step=2)
    with pytest.raises(Stopped):
        train_rl(file)
    train_rl(file)
    assert_same_result(tmp_path / "stopped", tmp_path / "reference")


def test_a_prompt_that_occurs_twice_in_a_step_is_sampled_twice(tmp_path, recipe):
    """A step may span two epochs, or need more prompts than the data has; a file may be listed twice."""
    prompts = write_jsonl(tmp_path / "three.jsonl", prompt_rows(3))
    val = write_jsonl(tmp_path / "val.jsonl", prompt_rows(2))
    file = recipe(
        prompts=prompts, data={"val": [str(val), str(val)]}, train={"prompts_per_step": 5}, run={"epochs": 5, "max_steps": 3}
    )
    train_rl(file, f"data.train=[{prompts},{prompts}]")
    for step in (1, 2, 3):
        samples = samples_of(tmp_path / "run", step)
        assert len(samples) == 20
        assert len({sample["prompt_id"] for sample in samples}) == 5
        assert len({(sample["prompt_id"], sample["index"]) for sample in samples}) == 20
        # Each time with different samples.
        written = {}
        for sample in samples:
            written.setdefault(sample["prompt_id"], []).append(sample["response"])
        assert len(set(map(tuple, written.values()))) == 5
    assert len(samples_of(tmp_path / "run", 0, "val")) == 4


def test_a_nan_loss_is_skipped_and_counted(tmp_path, recipe, monkeypatch):
    calls = []

    def nan_loss(*arguments):
        loss = policy_loss(*arguments)
        calls.append(1)
        return loss if len(calls) != 2 else lambda batch: (loss(batch)[0] * math.nan, loss(batch)[1])

    monkeypatch.setattr("plaudit.rl.learner.policy_loss", nan_loss)
    train_rl(recipe(run={"max_steps": 3, "save_every": 1, "keep_last": 3}))
    rows = metrics_of(tmp_path / "run")
    assert [row["skipped_steps"] for row in rows] == [0, 1, 1]
    assert [row["updates"] for row in rows] == [1, 2, 3]
    assert rows[1]["loss"] is None
    assert rows[2]["loss"] is not None
    first, second, third = (weights_of(tmp_path / f"run/checkpoints/step_{step:06d}/model") for step in (1, 2, 3))
    assert all(torch.equal(first[name], second[name]) for name in first), "the second step changes no weight"
    assert not all(torch.equal(second[name], third[name]) for name in second)
    assert all(torch.isfinite(tensor).all() for tensor in weights_of(tmp_path / "run/model").values())


def test_too_many_nan_losses_stop_the_run(recipe, monkeypatch):
    def nan_loss(*arguments):
        loss = policy_loss(*arguments)
        return lambda batch: (loss(batch)[0] * math.nan, loss(batch)[1])

    monkeypatch.setattr("plaudit.rl.learner.policy_loss", nan_loss)
    with pytest.raises(TrainingStopped, match=r"update 2: the loss or gradient was not finite \(loss nan.*max_skipped_steps is 1"):
        train_rl(recipe(train={"max_skipped_steps": 1}, run={"max_steps": 3}))


def test_lora_is_saved_as_a_full_model(tmp_path, recipe, tiny_model, prompts_file):
    settings = {"model": {"lora": {"rank": 4}}, "algorithm": {"kl_coefficient": 0.01}, "rollout": {"stop": []}}
    model = train_rl(recipe(**settings, data={"val": str(prompts_file)}, validation={"max_prompts": 3}))
    rows = metrics_of(tmp_path / "run")
    assert rows[1]["kl"] < 1e-9 < rows[2]["kl"]
    before, after = weights_of(tiny_model), weights_of(model)
    assert before.keys() == after.keys()
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    assert changed
    assert all(name.endswith("_proj.weight") for name in changed)
    loaded, report = AutoModelForCausalLM.from_pretrained(model, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    state = load_file(tmp_path / "run/checkpoints/step_000002/trainer/00000.safetensors")
    assert all(".lora_" in name for name in state)
    # The saved model is the policy: it generates what the last validation generated with the adapters.
    tokenizer = AutoTokenizer.from_pretrained(model)
    for sample in samples_of(tmp_path / "run", 2, "val"):
        chat = tokenizer.apply_chat_template(sample["prompt"], add_generation_prompt=True, return_tensors="pt", return_dict=True)
        written = loaded.generate(**chat, max_new_tokens=12, do_sample=False)[0, chat["input_ids"].shape[1] :]
        assert tokenizer.decode(written, skip_special_tokens=True) == sample["response"]


# Validation ----------------------------------------------------------------------------------------------------------


def test_validation_is_greedy_by_default(tmp_path, recipe, prompts_file, engine_calls):
    file = recipe(data={"val": str(prompts_file)}, validation={"max_prompts": 3}, run={"max_steps": 5, "validate_every": 2})
    train_rl(file)
    rows = metrics_of(tmp_path / "run")
    assert [row["step"] for row in rows if "val/reward" in row] == [0, 2, 4, 5]
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5]
    calls = [(sampling, requests) for sampling, requests in engine_calls if sampling.temperature == 0]
    assert [sampling.step for sampling, _ in calls] == [0, 2, 4, 5]
    for sampling, requests in calls:
        assert sampling.max_new_tokens == 12
        assert [request.n for request in requests] == [1, 1, 1]
    trained = [(sampling, requests) for sampling, requests in engine_calls if sampling.temperature == 1]
    assert [sampling.step for sampling, _ in trained] == [1, 2, 3, 4, 5]
    assert all(request.n == 4 for _, requests in trained for request in requests)
    for row in rows:
        if "val/reward" in row:
            samples = samples_of(tmp_path / "run", row["step"], "val")
            assert len(samples) == 3
            assert {sample["version"] for sample in samples} == {row["step"]}
            assert row["val/reward"] == pytest.approx(np.mean([sample["reward"] for sample in samples]))
            assert row["val/sums/reward"] == row["val/reward"]  # all of one data source
            assert row["val/length"] == pytest.approx(np.mean([sample["tokens"] for sample in samples]))
    assert sorted(path.name for path in (tmp_path / "run/samples").glob("val_*")) == [f"val_{s:06d}.parquet" for s in (0, 2, 4, 5)]


def test_validation_is_reported_by_data_source(tmp_path, recipe, capsys):
    files = []
    for source in ("sums", "open/web", None):
        rows = [{**row, "data_source": source} if source else {"prompt": row["prompt"]} for row in prompt_rows(3 if source else 1)]
        files.append(str(write_jsonl(tmp_path / f"{len(files)}.jsonl", rows)))
    train_rl(recipe(data={"val": files}, run={"max_steps": 1, "validate_first": False}))
    [row] = metrics_of(tmp_path / "run")
    samples = samples_of(tmp_path / "run", 1, "val")
    means = {}
    for source in ("sums", "open/web"):
        means[source] = np.mean([sample["reward"] for sample in samples if sample["data_source"] == source])
        assert row[f"val/{source}/reward"] == pytest.approx(means[source])
    # The prompt without a source is in the mean of all only.
    assert len(samples) == 7
    assert row["val/reward"] == pytest.approx(np.mean([sample["reward"] for sample in samples]))
    found = {name for name in row if name.startswith("val/") and name.endswith("/reward")}
    assert found == {"val/reward", "val/sums/reward", "val/open/web/reward"}
    assert f"val/reward by data_source:  sums {means['sums']:.4f}  open/web {means['open/web']:.4f}" in capsys.readouterr().err


def test_validation_has_its_own_sampling_settings(tmp_path, recipe, prompts_file, engine_calls):
    validation = {"n": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "max_new_tokens": 7}
    train_rl(recipe(data={"val": str(prompts_file)}, validation=validation, run={"max_steps": 1}))
    (first, requests), (train, _), (last, _) = engine_calls
    for sampling in (first, last):
        got = (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.max_new_tokens)
        assert got == (0.5, 0.9, 20, 0.01, 7)
        assert sampling.stop == ("e", ".")
    assert (train.temperature, train.top_p, train.top_k, train.min_p, train.max_new_tokens) == (1.0, 1.0, None, 0.0, 12)
    assert [request.n for request in requests] == [3] * 12
    samples = samples_of(tmp_path / "run", 0, "val")
    assert len(samples) == 36
    assert max(sample["tokens"] for sample in samples) <= 7
    # Without validation data, validate_every does nothing.
    train_rl(recipe("without", run={"max_steps": 2, "validate_every": 1}))
    assert not any("val/reward" in row for row in metrics_of(tmp_path / "without"))


def test_best_is_the_highest_validation_reward(tmp_path, recipe, prompts_file, monkeypatch):
    rewards = iter([5.0, 0.1, 0.9, math.nan, 0.3, 0.9])
    monkeypatch.setattr(rl, "validate", lambda *_, **__: ([], {"val/reward": next(rewards)}))
    train_rl(recipe(data={"val": str(prompts_file)}, run={"max_steps": 5, "validate_every": 1, "keep_last": 1}))
    assert os.readlink(tmp_path / "run/best") == "checkpoints/step_000002"
    assert {path.name for path in (tmp_path / "run/checkpoints").iterdir()} == {"step_000002", "step_000005"}
    assert json.loads((tmp_path / "run/best/state.json").read_text())["best"] == {"step": 2, "val/reward": 0.9}


# Prompts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("too_long", ["filter", "error", "cut_left"])
def test_prompts_that_are_too_long(tmp_path, recipe, engine_calls, capsys, too_long):
    rows = prompt_rows(5)
    long = {**rows[0], "prompt": [{"role": "user", "content": "What is 1 + 2? " * 40}]}
    prompts = write_jsonl(tmp_path / "prompts.jsonl", [*rows, long])
    file = recipe(
        prompts=prompts, data={"too_long": too_long, "max_prompt_tokens": 50}, train={"prompts_per_step": 6}, run={"max_steps": 1}
    )
    if too_long == "error":
        with pytest.raises(
            DataError, match=r"prompts\.jsonl:6: [\d,]+ tokens, more than data\.max_prompt_tokens = 50\. Raise it, or"
        ):
            train_rl(file)
        assert not engine_calls
        return
    train_rl(file)
    said = capsys.readouterr().err
    lengths = [len(request.tokens) for request in engine_calls[0].requests]
    if too_long == "filter":
        assert "train: 5 of 6 prompts, longest " in said
        assert "; 1 longer than 50 left out" in said
        assert max(lengths) < 50
    else:
        assert "train: 6 of 6 prompts, longest 50 tokens; 1 longer than 50 cut" in said
        [cut] = [request.tokens for request in engine_calls[0].requests if len(request.tokens) == 50]
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run/model")
        assert tokenizer.decode(cut).endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_it_is_an_error_if_all_prompts_are_too_long(recipe):
    with pytest.raises(DataError, match=r"all 12 .* data\.max_prompt_tokens = 3\. Raise it: the shortest has \d+ tokens"):
        train_rl(recipe(data={"max_prompt_tokens": 3}))


@pytest.mark.parametrize("part", ["train", "val"])
def test_exceeding_the_context_is_reported_before_sampling(tmp_path, recipe, prompts_file, engine_calls, part):
    """A single row of many, which no early step would reach, is found immediately."""
    long = {**prompt_rows(1)[0], "prompt": [{"role": "user", "content": "What is 1 + 2? " * 150}]}
    rows = write_jsonl(tmp_path / "rows.jsonl", [*prompt_rows(11), long])
    data = {"train": str(prompts_file), "val": str(prompts_file), part: str(rows), "max_prompt_tokens": 4000}
    file = recipe(data=data, rollout={"max_new_tokens": 1000}, run={"max_steps": 1}, train={"prompts_per_step": 1})
    with pytest.raises(PlauditError) as error:
        train_rl(file)
    message = str(error.value)
    assert f"{rows.name}:12: 1," in message
    assert "exceed the context of the model, 2,048 tokens" in message
    assert message.endswith("or leave out longer prompts: data.max_prompt_tokens=1048.")
    assert ". Lower rollout.max_new_tokens to " in message
    assert "\n" not in message
    assert not engine_calls
    assert not (tmp_path / "run/samples").exists()


# Samples -------------------------------------------------------------------------------------------------------------


def test_sample_files_have_prompts_responses_and_rewards(tmp_path, recipe, reward_file, prompts_file):
    odd = write_function(
        tmp_path / "odd.py",
        """
        def compute_score(solution_str, ground_truth, extra_info):
            if extra_info["index"] == 1: return {"score": 0.0, "malformed": True}
            return {"score": len(solution_str) % 2, "even": len(solution_str) % 2 == 0, "judge": "words"}
        """,
    )
    file = recipe(train={"prompts_per_step": 12}, run={"max_steps": 1})
    tree = json.loads(file.read_text())
    tree["rewards"] = [function(reward_file, name="letters"), function(odd, name="odd", weight=0.5, malformed=-1.0)]
    train_rl(write_recipe(file, tree))
    samples, [row] = samples_of(tmp_path / "run", 1), metrics_of(tmp_path / "run")
    assert len(samples) == 48
    columns = (
        "prompt_id index data_source prompt tools response reward reward_model extra_info status tokens mean_logprob version "
        "malformed failure advantage failure/letters failure/odd part/letters part/letters/written part/odd part/odd/even "
        "trace/odd view/letters view/odd"
    )
    assert list(samples[0]) == columns.split()
    by_id = {f"{prompts_file}:{i}": prompt for i, prompt in enumerate(prompt_rows(), 1)}
    assert {sample["prompt_id"] for sample in samples} == set(by_id)
    for i, sample in enumerate(samples):
        prompt = by_id[sample["prompt_id"]]
        assert json.loads(sample["extra_info"]) == prompt["extra_info"]
        assert sample["index"] == i % 4
        assert sample["prompt"] == prompt["prompt"]
        assert sample["reward_model"] == prompt["reward_model"]
        assert sample["data_source"] == "sums"
        assert sample["view/letters"] == sample["view/odd"] == sample["response"]
        assert sample["malformed"] == (prompt["extra_info"]["index"] == 1)
        assert sample["part/odd"] == (-1.0 if sample["malformed"] else len(sample["response"]) % 2)
        assert sample["reward"] == pytest.approx(sample["part/letters"] + 0.5 * sample["part/odd"])
        assert sample["failure"] is sample["failure/odd"] is None
        assert sample["trace/odd"] == (None if sample["malformed"] else '{"judge": "words"}')
        assert sample["status"] in ("finished", "truncated")
        assert (sample["tokens"] == 12) or sample["status"] == "finished"
        assert sample["mean_logprob"] < 0
        assert sample["version"] == 0
    assert row["malformed"] == pytest.approx(4 / 48)
    assert row["parts/odd"] == pytest.approx(np.mean([sample["part/odd"] for sample in samples]))
    assert row["length"] == pytest.approx(np.mean([sample["tokens"] for sample in samples]))
    assert row["truncated"] == pytest.approx(np.mean([sample["status"] == "truncated" for sample in samples]))
    assert row["sampled_tokens"] == sum(sample["tokens"] for sample in samples)


# The command ---------------------------------------------------------------------------------------------------------


def test_the_command_prints_where_its_output_is(tmp_path, recipe, plaudit):
    code, out, err = plaudit("rl", recipe())
    assert code == 0
    run = tmp_path / "run"
    assert out == f"trained model: {run / 'model'}\ncurves:        {run / 'curves.png'}\nsamples:       {run / 'samples'}\n"
    assert "rl 2/2  reward " in err


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (None, "reward 'function': {path} is not a file."),
        ("def compute(:", "reward 'function': {path} cannot be imported: SyntaxError"),
        (
            "def compute_scores(solution_str): ...",
            "reward 'function': {path} has no function compute_score (it has: compute_scores)",
        ),
        ("def compute_score(solution_str): raise ValueError('no')", "step 1: reward 'function' failed on at least "),
    ],
)
def test_an_unusable_reward_gives_a_one_line_error(tmp_path, recipe, plaudit, body, message):
    path = tmp_path / "mine.py"
    if body is not None:
        write_function(path, body)
    code, _, err = plaudit("rl", recipe(reward=path))
    assert code == 2
    assert err.splitlines()[-1].startswith(message.format(path=path))
    assert "Traceback" not in err


def test_doctor_counts_rows_that_no_reward_matches(tmp_path, recipe, plaudit):
    rows = [{"prompt": "p", "ground_truth": "4", "data_source": source} for source in ("sums", "prose", "prose", "code")]
    prompts = write_jsonl(tmp_path / "rows.jsonl", rows)
    code, out, _ = plaudit("doctor", recipe(reward={"kind": "exact", "when": {"data_source": "sums"}}, prompts=prompts))
    assert code == 1
    assert (
        "no reward's `when` matches 3 of 4 prompts (by data_source: 'prose': 2, 'code': 1). Add a reward for them; `when: oth"
        in out
    )


def test_doctor_reports_problems_before_training(tmp_path, recipe, plaudit, monkeypatch, tiny_model):
    code, out, _ = plaudit("doctor", recipe())
    assert code == 0
    for line in (
        "train: 12 prompts rendered: ",
        "at most 2 steps of 3 prompts × 4 samples, 1 update per step",
        "the longest prompt plus max_new_tokens is ",
        "for the ground truth, 0 for an empty answer; weight 1, on failure drop",
    ):
        assert f" {line}" in out
    assert out.endswith("<|im_start|>assistant\n\n")
    [longest] = map(int, re.findall(r"prompts rendered: .* longest (\d+)", " ".join(out.split())))
    for setting in ("rollout", "validation"):
        code, out, _ = plaudit("doctor", recipe(), f"{setting}.max_new_tokens=2040")
        assert code == 1
        assert (
            f"✗ context  the longest prompt plus max_new_tokens is {2040 + longest:,} tokens; the model's context is 2,048" in out
        )
    code, out, _ = plaudit("doctor", recipe(), f"rollout.max_new_tokens={2048 - longest}")
    assert code == 0
    code, out, _ = plaudit("doctor", recipe(reward=write_function(tmp_path / "mine.py", "import nothing_of_that_name")))
    assert code == 1
    assert "✗ reward   reward 'function': " in out
    assert "cannot be imported: ModuleNotFoundError: No module named 'nothing_of_that_name', at mine.py:1" in out
    config = AutoConfig.from_pretrained(tiny_model)
    vars(config)["max_position_embeddings"] = None
    monkeypatch.setattr("plaudit.doctor.rows.read_config", lambda *_, **__: config)
    code, out, _ = plaudit("doctor", recipe())
    assert "the model's context is unlimited" in out


# Regressions ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_validation_stopped_by_a_reward_is_repeated_on_resume(tmp_path, recipe, prompts_file):
    """Even at the last step, where nothing else is left to do."""
    body = f"""
        import os
        def compute_score(solution_str):
            if os.path.exists({str(tmp_path / "broken")!r}): raise ConnectionError("no answer")
            return len(solution_str)
    """
    reward = function(write_function(tmp_path / "reward.py", body), on_failure="stop")
    settings = {"data": {"val": str(prompts_file)}, "run": {"max_steps": 2, "validate_every": 2}}
    train_rl(recipe("reference", reward, **settings))
    file, update = recipe(reward=reward, **settings), Trainer.update

    def break_after_step_2(self, *arguments):
        if self.updates == 1:
            (tmp_path / "broken").touch()
        return update(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "update", break_after_step_2)
        with pytest.raises(TrainingStopped, match=r"^validation after step 2: reward 'function' failed on"):
            train_rl(file)
    assert metrics_of(tmp_path / "run")[-1]["step"] == 1
    (tmp_path / "broken").unlink()
    train_rl(file)
    resumed = [{name: x for name, x in row.items() if not name.startswith("time/")} for row in metrics_of(tmp_path / "run")]
    assert resumed == [
        {name: x for name, x in row.items() if not name.startswith("time/")} for row in metrics_of(tmp_path / "reference")
    ]
    assert "val/reward" in resumed[-1]


def test_samples_of_all_steps_form_one_table_without_secrets(tmp_path, recipe, prompts_file):
    """Even if only one step has failures, and ground truths have types that JSON lacks."""
    body = """
        import os
        def compute_score(solution_str, extra_info):
            if extra_info["index"] == 3: raise ValueError("token hf_abcdefghijklmnop1234")
            return len(solution_str)
    """
    rows = [{**row, "reward_model": {"ground_truth": Decimal(i) / 4}} for i, row in enumerate(prompt_rows(12))]
    prompts = tmp_path / "prompts.parquet"
    pq.write_table(pa.Table.from_pylist(rows), prompts)
    reward = function(write_function(tmp_path / "reward.py", body), max_failure_rate=1)
    train_rl(recipe(prompts=prompts, reward=reward, run={"max_steps": 4}))
    table = pq.read_table(tmp_path / "run/samples").to_pylist()
    assert len(table) == 4 * 3 * 4
    failed = [row for row in table if row["failure"]]
    assert len(failed) == 4
    assert all("[secret]" in row["failure/function"] and "hf_" not in str(row) for row in failed)
    assert {row["reward_model"]["ground_truth"] for row in table} == {f"{i / 4:.2f}" for i in range(12)}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"rollout": {"n": 1}}, "rollout.n is 1, but grpo compares the samples of a group"),
        ({"rollout": {"stop": ""}}, "rollout.stop: an empty string would end every response immediately"),
    ],
)
def test_settings_that_would_train_nothing_are_refused(recipe, sections, message):
    with pytest.raises(RecipeError, match=message):
        train_rl(recipe(**sections))


def test_a_failing_reward_of_weight_zero_does_not_stop_the_run(tmp_path, recipe, reward_file):
    broken = write_function(tmp_path / "broken.py", "def compute_score(solution_str): raise ValueError('always')")
    file = recipe(run={"max_steps": 1})
    tree = json.loads(file.read_text())
    tree["rewards"] = [function(reward_file), function(broken, name="value", weight=0)]
    train_rl(write_recipe(file, tree))
    [row] = metrics_of(tmp_path / "run")
    assert (row["failures/value/exception"], row["dropped"]) == (12, 0)


def test_a_special_token_may_be_a_stop_string(tiny_model):
    tokenizer = load_tokenizer(str(tiny_model))
    end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    assert Stopping(tokenizer, frozenset(), ("<|endoftext|>", "so")).end_tokens == {end}
    assert Stopping(tokenizer, frozenset({5}), ("so",)).end_tokens == {5}
    with pytest.raises(PlauditError, match=r"contains the special token <\|endoftext\|>"):
        Stopping(tokenizer, frozenset(), ("x<|endoftext|>",))


def test_a_validation_repeated_on_resume_is_saved(tmp_path, recipe, prompts_file, monkeypatch):
    """The last validation stops the run. Repeated, it is the best; a third start finds nothing to do."""
    validate, fails = rl.validate, [True]

    def validate_or_stop(*arguments, step):
        if step == 2 and fails:
            fails.clear()
            raise TrainingStopped("a judge died")
        groups, metrics = validate(*arguments, step=step)
        return groups, metrics | {"val/reward": float(step)}

    monkeypatch.setattr(rl, "validate", validate_or_stop)
    file = recipe(data={"val": str(prompts_file)}, run={"max_steps": 2, "validate_every": 1})
    with pytest.raises(TrainingStopped, match="validation after step 2: a judge died"):
        train_rl(file)
    train_rl(file)
    assert os.readlink(tmp_path / "run/best") == "checkpoints/step_000002"
    finished = exact_metrics(tmp_path / "run")
    assert [row["step"] for row in finished] == [0, 1, 2]
    monkeypatch.setattr(rl, "validate", lambda *_, **__: pytest.fail("validated again"))
    train_rl(file)
    assert exact_metrics(tmp_path / "run") == finished
