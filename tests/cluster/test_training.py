"""Several processes train what one trains: the same samples, rewards and advantages, and the same weights up to rounding."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from plaudit.run_folder import read_metrics
from support.processes import MAIN, SIGNAL_ITSELF
from support.ranks import differences, samples, start_ranks, train_with, weight_difference
from support.recipes import exact_metrics, pair_recipe, rl_recipe, sft_recipe, write_recipe

STEPS = 5
RUN = {"run": {"max_steps": STEPS, "epochs": 10, "validate_every": 2, "device": "cpu"}}
RL: dict[str, dict[str, Any]] = {
    "grpo": {},
    "ppo": {"algorithm": {"kind": "ppo"}, "critic": {}, "train": {"prompts_per_step": 4, "prompts_per_update": 2}},
    "ppo, shared critic": {"algorithm": {"kind": "ppo"}, "critic": {"shared": True}},
    "dynamic sampling": {"algorithm": {"dynamic_sampling": {"max_rounds": 3}}},
    "remax": {"algorithm": {"kind": "remax"}},
    "reinforce++": {"algorithm": {"kind": "reinforce++"}},
    "kl": {"algorithm": {"kl_coefficient": 0.05, "kl_reward": {"coefficient": 0.05}}},
    "lag": {"rollout": {"n": 4, "max_new_tokens": 12, "stop": ["e", "."], "lag": 1}},
    "lora": {"model": {"lora": {"rank": 4}}, "algorithm": {"kl_coefficient": 0.05}},
}


SAVE = "run.save_every=2"


@pytest.fixture(scope="module")
def make_recipe(tiny_model, rows_file, pairs_file, prompts_file, reward_file):
    """Writes a recipe, by stage and case, for a run in `folder`."""

    def make(folder: Path, stage: str, case: str = "grpo") -> Path:
        if stage == "sft":
            tree = sft_recipe(tiny_model, rows_file, folder, data={"val": str(rows_file)}, run=RUN["run"])
        elif stage == "rl":
            sections = {"data": {"val": str(prompts_file)}, "validation": {"max_prompts": 4}, **RL[case], **RUN}
            tree = rl_recipe(tiny_model, prompts_file, folder, reward_file, **sections)
            length = {"kind": "length", "weight": 0.1, "unit": "characters", "at_most": 4, "slack": 8}
            if case not in ("ppo", "ppo, shared critic", "reinforce++", "remax"):
                length["normalise"] = "running"
            tree["rewards"].append(length)
        else:
            tree = pair_recipe(tiny_model, pairs_file, folder, data={"val": str(pairs_file)}, run=RUN["run"])
        tree["optim"] = {"lr": 1e-4, "schedule": "constant"}
        return write_recipe(folder.with_suffix(".yaml"), {"stage": stage, **tree})

    return make


@pytest.fixture(scope="module")
def undisturbed(make_recipe, tmp_path_factory):
    """Whole runs, each made once: the folder of one by `size` processes."""
    root, done = tmp_path_factory.mktemp("undisturbed"), {}

    def run(stage: str, case: str = "", *overrides: str, size: int = 1) -> Path:
        key = (stage, case, overrides, size)
        if key not in done:
            done[key] = folder = root / f"run{len(done)}"
            train_with(size, stage, make_recipe(folder, stage, case), *overrides)
        return done[key]

    return run


def assert_same_but_for_rounding(run: Path, reference: Path) -> None:
    assert samples(run) == samples(reference)
    assert differences(run, reference) == {}
    assert weight_difference(run, reference) < 1e-6


# Each case once, as a rule: what the processes divide is independent of what the algorithm computes. (tests/test_world.py and
# tests/models/test_sharded.py compare single updates, with every sharding and 2 and 3 processes.)
@pytest.mark.parametrize(
    ("case", "size", "sharding"),
    [
        ("grpo", 2, "optimiser"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("grpo", 2, "full"),
                ("ppo", 3, "optimiser"),
                ("ppo", 2, "full"),
                ("ppo, shared critic", 2, "full"),
                ("dynamic sampling", 3, "optimiser"),
                ("remax", 2, "optimiser"),
                ("reinforce++", 2, "optimiser"),
                ("kl", 2, "full"),
                ("lora", 2, "full"),
                ("lag", 2, "optimiser"),
                ("lag", 2, "full"),
            )
        ),
    ],
)
def test_rl_by_several_processes(tmp_path, make_recipe, undisturbed, case, size, sharding):
    train_with(size, "rl", make_recipe(tmp_path / "run", "rl", case), f"cluster.sharding={sharding}")
    assert_same_but_for_rounding(tmp_path / "run", undisturbed("rl", case))
    for row in read_metrics(tmp_path / "run" / "metrics.jsonl"):
        assert row["step"] == 0 or 0.0 <= row["time/update_idle_share"] < 1.0
    steps = [row["step"] for row in read_metrics(tmp_path / "run/metrics.jsonl")]
    by_rank = [json.loads(line) for line in (tmp_path / "run/ranks.jsonl").read_text().splitlines()]
    assert [(row["step"], row["rank"]) for row in by_rank] == [(step, rank) for step in steps for rank in range(size)]
    for row in by_rank[size:]:  # after the first validation
        assert row["memory_gb"] > 0
        assert row["sample_s"] > 0
        assert row["update_s"] > 0
        assert row["waiting_s"] >= 0
    assert all(min(row["waiting_s"] for row in by_rank if row["step"] == step) == 0.0 for step in steps if step)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "sharding"), [(2, "optimiser"), (3, "full")])
@pytest.mark.parametrize("stage", ["sft", "dpo", "reward-model"])
def test_other_stages_by_several_processes(tmp_path, make_recipe, undisturbed, stage, size, sharding):
    train_with(size, stage, make_recipe(tmp_path / "run", stage), f"cluster.sharding={sharding}")
    assert_same_but_for_rounding(tmp_path / "run", undisturbed(stage))


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["dpo", "reward-model"])
def test_adapters_of_sharded_weights(tmp_path, make_recipe, undisturbed, stage):
    train_with(2, stage, make_recipe(tmp_path / "run", stage), "cluster.sharding=full", "model.lora.rank=4")
    assert_same_but_for_rounding(tmp_path / "run", undisturbed(stage, "", "model.lora.rank=4"))


# Checkpoints ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved_by", "sharding", "loaded_by"),
    [(2, "optimiser", 3), (1, "none", 2), (2, "full", 1), (3, "full", 2)],
)
def test_a_checkpoint_is_loaded_by_any_number_of_processes(tmp_path, make_recipe, undisturbed, saved_by, sharding, loaded_by):
    recipe = make_recipe(tmp_path / "run", "rl")
    killed = ["SIGKILL", "before line 5", "rl", recipe, SAVE, f"cluster.sharding={sharding}"]
    for rank in start_ranks(saved_by, *killed, scripts=dict.fromkeys(range(saved_by), SIGNAL_ITSELF)):
        assert rank.wait() == -signal.SIGKILL, rank.output
    parts = [*(tmp_path / "run/checkpoints/step_000002/trainer").iterdir()]
    assert len(parts) == (1 if sharding == "none" else saved_by)
    train_with(loaded_by, "rl", recipe, SAVE)
    assert_same_but_for_rounding(tmp_path / "run", undisturbed("rl", "grpo"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("killed", "moment"),
    [
        (0, "open .step_000004.aside/state.json"),
        (0, "behind line 4"),
        (1, "before line 3"),
        (1, "open trainer/rank1_00000.safetensors"),  # which it has just written
    ],
)
def test_kill_9_of_a_rank_and_resume(tmp_path, make_recipe, undisturbed, killed, moment):
    """The other one notices, and ends; started again, the run ends with the bits of one that was not disturbed."""
    recipe = make_recipe(tmp_path / "run", "rl")
    unharmed = f"import sys; del sys.argv[1:3]\n{MAIN}"
    ranks = start_ranks(2, "SIGKILL", moment, "rl", recipe, SAVE, scripts={killed: SIGNAL_ITSELF, 1 - killed: unharmed})
    assert ranks[killed].wait() == -signal.SIGKILL
    assert ranks[1 - killed].wait() != 0
    train_with(2, "rl", recipe, SAVE)
    reference = undisturbed("rl", "grpo", SAVE, size=2)
    assert samples(tmp_path / "run", but=()) == samples(reference, but=())
    assert exact_metrics(tmp_path / "run") == exact_metrics(reference)
    assert weight_difference(tmp_path / "run", reference) == 0.0


# Before, since the few tokens of these samples may be there before any later moment.
SIGNAL_ITSELF_BEFORE_SAMPLING_AHEAD = f"""
import os, signal
from plaudit.rl.pipeline import Pipeline

begin_training = Pipeline.begin_training

def send_and_begin(self, step):
    if step == 3:
        os.kill(os.getpid(), signal.SIGTERM)
    return begin_training(self, step)

Pipeline.begin_training = send_and_begin
{MAIN}
"""


@pytest.mark.slow
def test_a_signal_to_one_process_while_all_sample_ahead(tmp_path, make_recipe, undisturbed):
    """All processes leave the next step, complete this one and save; the next step is sampled again by the same weights."""
    recipe = make_recipe(tmp_path / "run", "rl", "lag")
    for rank in start_ranks(2, "rl", recipe, scripts={0: SIGNAL_ITSELF_BEFORE_SAMPLING_AHEAD}):
        assert rank.wait() == 130, rank.output
    assert (tmp_path / "run/checkpoints/step_000003/next_step/00000.safetensors").exists()
    train_with(2, "rl", recipe)
    reference = undisturbed("rl", "lag", size=2)
    assert samples(tmp_path / "run", but=()) == samples(reference, but=())
    assert exact_metrics(tmp_path / "run") == exact_metrics(reference)
    assert weight_difference(tmp_path / "run", reference) == 0.0
