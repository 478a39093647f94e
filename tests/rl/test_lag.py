"""rollout.lag: 1: the next step is sampled and scored, with older weights, while this one is trained."""

import os
import signal
import threading
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from plaudit import config
from plaudit.data.order import RowOrder
from plaudit.data.prompts import EncodedPrompt
from plaudit.errors import Interrupted, RecipeError, TrainingStopped
from plaudit.rewards.rules.length import Length
from plaudit.rl.collect import Collected, Collector, require_lag_possible
from plaudit.rl.collected_files import read_collected, write_collected
from plaudit.rl.learner import Learner
from plaudit.rollout.native.engine import NativeEngine
from plaudit.types import Failure, Group, Prompt, Sample, Score, ScoredGroup
from support.processes import signalled
from support.recipes import Stopped, exact_metrics, rl_recipe, stop_before, train_rl, write_recipe

STEPS = 4
SMALL = {"n": 2, "max_new_tokens": 4, "stop": ["e", "."], "lag": 1}
SHORT = {"kind": "length", "unit": "characters", "at_most": 1, "slack": 8}


@pytest.fixture
def recipe(tmp_path, tiny_model, prompts_file):
    """Writes a recipe whose run folder has the same name."""

    def write(name: str = "run", reward: dict | Path = SHORT, **sections) -> Path:
        sections = {"rollout": SMALL, "train": {"prompts_per_step": 2}, **sections}
        sections["run"] = {"max_steps": STEPS, "save_every": 2, **sections.get("run", {})}
        return write_recipe(tmp_path / f"{name}.yaml", rl_recipe(tiny_model, prompts_file, tmp_path / name, reward, **sections))

    return write


@pytest.fixture
def scored(monkeypatch) -> list[int]:
    """The version of every sample that was scored."""
    found, value = [], Length.value

    def value_and_record(self, prompt, sample):
        found.append(sample.version)
        return value(self, prompt, sample)

    monkeypatch.setattr(Length, "value", value_and_record)
    return found


def versions(run: Path) -> list[set[int]]:
    return [set(pq.read_table(file)["version"].to_pylist()) for file in sorted((run / "samples").glob("train_*"))]


def assert_same_result(run: Path, expected: Path) -> None:
    """Metrics, samples and weights, to the bit."""
    assert exact_metrics(run) == exact_metrics(expected)
    files = [*(f"samples/{file.name}" for file in expected.glob("samples/*")), "model/model.safetensors"]
    assert len(files) > STEPS
    for file in files:
        assert (run / file).read_bytes() == (expected / file).read_bytes(), file


def test_a_step_is_sampled_by_the_weights_before_the_last_update_and_resumes_from_what_was_collected(
    tmp_path, recipe, monkeypatch, scored
):
    train_rl(recipe())
    assert versions(tmp_path / "run") == [{0}, {0}, {1}, {2}]
    assert [row["lag"] for row in exact_metrics(tmp_path / "run")] == [0, 1, 1, 1]
    assert Counter(scored) == {0: 8, 1: 4, 2: 4}
    stop_before(monkeypatch, 3)
    with pytest.raises(Stopped):
        train_rl(recipe("stopped"))
    assert not [thread for thread in threading.enumerate() if thread.name == "collecting"]
    scored.clear()
    train_rl(recipe("stopped"))
    assert Counter(scored) == {2: 4}, "step 3 is in the checkpoint of step 2"
    assert_same_result(tmp_path / "stopped", tmp_path / "run")


def test_training_does_not_wait_for_sampling(tmp_path, recipe, monkeypatch):
    """Neither the training of step 1 nor the sampling of step 2 can be completed before the other has begun."""
    sampling, training = threading.Event(), threading.Event()
    collect, learn = Collector.collect, Learner.learn

    def collect_while_training(self, step, version):
        if step == 2:
            sampling.set()
            assert training.wait(60)
        return collect(self, step, version)

    def learn_while_sampling(self, groups, step):
        training.set()
        assert sampling.wait(60)
        return learn(self, groups, step)

    monkeypatch.setattr(Collector, "collect", collect_while_training)
    monkeypatch.setattr(Learner, "learn", learn_while_sampling)
    train_rl(recipe(run={"max_steps": 2}))


# Like a server that has to be started again, it needs the weights when it samples.
LATE_ENGINE = """
from copy import deepcopy
from plaudit.rollout.native.engine import NativeEngine

class LateEngine(NativeEngine):
    def __init__(self, setup):
        super().__init__(deepcopy(setup.model), setup.tokenizer)

    def sync(self, version, weights):
        self.version, self.weights = version, weights

    def generate(self, requests, sampling):
        self.weights.copy_to(self.model)
        yield from super().generate(requests, sampling)
"""


def test_weights_that_are_read_while_the_trainer_is_ahead_are_the_older_ones(tmp_path, recipe, monkeypatch):
    train_rl(recipe("expected"))
    (tmp_path / "late.py").write_text(LATE_ENGINE)
    trained, collect, learn = [threading.Event() for _ in range(STEPS + 1)], Collector.collect, Learner.learn

    def collect_after_training(self, step, version):
        assert step == 1 or trained[step - 1].wait(60)
        return collect(self, step, version)

    def learn_and_say(self, groups, step):
        metrics = learn(self, groups, step)
        trained[step].set()
        return metrics

    monkeypatch.setattr(Collector, "collect", collect_after_training)
    monkeypatch.setattr(Learner, "learn", learn_and_say)
    train_rl(recipe(), f"rollout.engine={tmp_path / 'late.py'}:LateEngine")
    assert_same_result(tmp_path / "run", tmp_path / "expected")


# Stops ---------------------------------------------------------------------------------------------------------------


def stop_by_signal(monkeypatch) -> None:
    generate = NativeEngine.generate

    def generate_and_signal(self, requests, sampling):
        if sampling.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        yield from generate(self, requests, sampling)

    monkeypatch.setattr(NativeEngine, "generate", generate_and_signal)


def stop_by_reward(monkeypatch) -> None:
    value = Length.value

    def fail_in_step_3(self, prompt, sample):
        if sample.version == 1:
            raise ValueError("broken")
        return value(self, prompt, sample)

    monkeypatch.setattr(Length, "value", fail_in_step_3)


@pytest.mark.parametrize(
    ("stop", "error", "message"),
    [
        (stop_by_signal, Interrupted, r"^stopped during step 3; step 2 is saved\. Resume with"),
        (stop_by_reward, TrainingStopped, "^step 3: .*broken"),
    ],
)
def test_a_step_that_was_cut_short_is_sampled_again_by_the_same_weights(
    tmp_path, recipe, prompts_file, monkeypatch, stop, error, message
):
    """Step 2 is complete by then, except for its validation."""
    settings = {"reward": {**SHORT, "on_failure": "stop"}, "run": {"save_every": 10, "validate_every": 2, "validate_first": False}}
    settings |= {"data": {"val": str(prompts_file)}, "validation": {"max_prompts": 1}}
    train_rl(recipe("expected", **settings))
    with monkeypatch.context() as patch:
        stop(patch)
        for _ in range(2):
            with pytest.raises(error, match=message):
                train_rl(recipe(**settings))
    assert [folder.name for folder in (tmp_path / "run/checkpoints").iterdir()] == ["step_000002"]
    train_rl(recipe(**settings))
    assert_same_result(tmp_path / "run", tmp_path / "expected")


@pytest.mark.slow
@pytest.mark.parametrize(
    "sections",
    [
        {"algorithm": {"dynamic_sampling": {}}},
        {"algorithm": {"kind": "remax"}},
        {"algorithm": {"kl_coefficient": 0.05}, "model": {"lora": {"rank": 4, "dropout": 0.1}}},
        {"algorithm": {"kind": "ppo"}, "critic": {}, "train": {"prompts_per_step": 2, "prompts_per_update": 1}},
    ],
    ids=["dynamic sampling", "remax", "lora, KL", "ppo, two updates"],
)
def test_runs_of_all_kinds_resume_exactly_after_kill_9(tmp_path, recipe, prompts_file, reward_file, sections):
    sections |= {"data": {"val": str(prompts_file)}, "validation": {"max_prompts": 2}, "run": {"validate_every": 2}}
    train_rl(recipe("expected", reward_file, **sections))
    killed = recipe("run", reward_file, **sections)
    signalled(signal.SIGKILL, "before line 3", "rl", killed)
    train_rl(killed)
    assert_same_result(tmp_path / "run", tmp_path / "expected")


@pytest.mark.slow
def test_a_policy_learns_from_samples_of_older_weights(tmp_path, recipe, reward_file):
    settings = {"rollout": {**SMALL, "n": 8, "max_new_tokens": 8}, "train": {"prompts_per_step": 6}, "run": {"max_steps": 30}}
    train_rl(recipe("run", reward_file, optim={"lr": 1e-2}, **settings))
    rows = exact_metrics(tmp_path / "run")
    first, last = (np.mean([row["reward"] for row in part]) for part in (rows[:3], rows[-3:]))
    assert last > first + 0.2
    assert all(row["mismatch"] > 1e-4 for row in rows[1:]), "it includes the lag"
    assert rows[0]["mismatch"] < 1e-5


# What a checkpoint keeps of the next step ----------------------------------------------------------------------------


def test_collected_groups_are_read_as_they_were_written(tmp_path):
    prompts = [EncodedPrompt(Prompt(f"p{i}", [{"role": "user", "content": "?"}]), np.arange(3 + i)) for i in range(3)]
    collector = Collector.__new__(Collector)
    collector.prompts, collector.order = prompts, RowOrder(3, per_step=2, epochs=1, seed=0)

    def group(encoded: EncodedPrompt, id: str, *scores: Score, baseline: Score | None = None) -> ScoredGroup:
        samples = tuple(
            Sample(
                id, i, np.arange(i + 1, dtype=np.int32), "unpaired \ud800 \x00", "finished",
                np.full(i + 1, -0.1, np.float32), np.full(i + 1, np.float32(-1 / 3)), version=4,
            )
            for i in range(len(scores))
        )  # fmt: skip
        prompt = Prompt(id, encoded.prompt.messages)
        return ScoredGroup(Group(prompt, encoded.tokens, samples), scores, {"a": scores, "b": scores[::-1]}, baseline)

    value = Score(
        1 / 3, {"part": float(np.float32(0.1))}, malformed=True, view="v", trace={"answer": ["x", 1, None]}, unjudged=True
    )
    failed, declined = Score(None, failure=Failure("timeout", "after 3 s")), Score(None)
    sampled = [
        group(prompts[2], "p2", value, failed, baseline=value),
        group(prompts[0], "p0", declined),
        group(prompts[2], "p2#2", value),
    ]
    before = Collected([sampled[0], sampled[2]], sampled, [2, 0, 2], {"reward": float("inf"), "length": 1 / 3})
    files = write_collected(before, tmp_path)
    after = read_collected(tmp_path, collector, before.metrics)
    assert {file.suffix for file in files} == {".jsonl", ".safetensors"}
    np.testing.assert_equal([asdict(one) for one in after.sampled], [asdict(one) for one in before.sampled])
    assert [one.group.samples[0].tokens.dtype for one in after.sampled] == [np.int32] * 3
    assert [[one is group for one in after.groups] for group in after.sampled] == [[True, False], [False, False], [False, True]]
    assert (after.rows, after.metrics) == (before.rows, before.metrics)


# Settings ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"rollout": {"lag": 2}}, "rollout.lag"),
        ({"rollout": {"engine": "vllm", "lag": 1}}, "set rollout.server.sleep to false"),
        (
            {"rewards": [{"kind": "scalar_model", "model": {"path": "rm", "placement": "offload"}}], "rollout": {"lag": 1}},
            "the model of reward scalar_model has placement offload",
        ),
        (
            {
                "rewards": [{"kind": "judge", "model": {"path": "rm", "placement": "launch", "sleep": True}}],
                "rollout": {"lag": 1},
            },
            "the model of reward judge has sleep",
        ),
    ],
)
def test_what_needs_a_resting_trainer_is_refused(tmp_path, tiny_model, prompts_file, sections, message):
    tree = rl_recipe(tiny_model, prompts_file, tmp_path / "run", SHORT) | sections
    with pytest.raises(RecipeError, match=message):
        config.load(write_recipe(tmp_path / "r.yaml", tree))


def test_a_native_engine_on_the_trainers_gpu_is_refused(tmp_path, recipe):
    settings: Any = config.load(recipe()).recipe
    require_lag_possible(settings, torch.device("cpu"))
    with pytest.raises(RecipeError, match=r"rollout\.engine native samples on the trainer's own GPU"):
        require_lag_possible(settings, torch.device("cuda"))


@pytest.mark.parametrize(
    ("settings", "weighted"),
    [
        ({"rollout": {"lag": 0}}, False),
        ({"rollout": {"lag": 1}}, True),
        ({"rollout": {"lag": 1, "top_p": 0.9}}, True),  # the native engine's log-probs are those of the full distribution
        ({"rollout": {"lag": 1, "top_p": 0.9, "engine": "vllm", "server": {"sleep": False}}}, False),
        ({"rollout": {"lag": 1}, "algorithm": {"old_logprobs": "sampler"}}, False),
        ({"rollout": {"lag": 1}, "algorithm": {"importance": None}}, False),
    ],
)
def test_samples_of_older_weights_are_weighted_by_default(recipe, settings, weighted):
    loaded: Any = config.load(recipe(**settings)).recipe
    assert (loaded.resolved_algorithm.importance is not None) == weighted
