"""Several processes train what one trains: the same samples, rewards and advantages, and the same weights up to rounding."""

import signal
from pathlib import Path
from typing import Any

import pytest

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
    "lora": {"model": {"lora": {"rank": 4}}, "algorithm": {"kl_coefficient": 0.05}},
}


@pytest.fixture
def recipe(tmp_path, tiny_model, rows_file, pairs_file, prompts_file, reward_file):
    """A recipe's file and run folder, by stage and case."""

    def make(stage: str, case: str = "grpo", name: str = "run") -> Path:
        model, folder = tiny_model, tmp_path / name
        if stage == "sft":
            tree = sft_recipe(model, rows_file, folder, data={"val": str(rows_file)}, run=RUN["run"])
        elif stage == "rl":
            sections = {"data": {"val": str(prompts_file)}, "validation": {"max_prompts": 4}, **RL[case], **RUN}
            tree = rl_recipe(model, prompts_file, folder, reward_file, **sections)
            tree["rewards"].append(
                {"kind": "length", "weight": 0.1, "unit": "characters", "at_most": 4, "slack": 8, "normalise": "running"}
            )
            if case in ("ppo", "ppo, shared critic", "reinforce++", "remax"):
                tree["rewards"][-1].pop("normalise")
        else:
            tree = pair_recipe(model, pairs_file, folder, data={"val": str(pairs_file)}, run=RUN["run"])
        tree["optim"] = {"lr": 1e-4, "schedule": "constant"}
        return write_recipe(tmp_path / f"{name}.yaml", {"stage": stage, **tree})

    return make


def both(recipe, size: int, stage: str, case: str, tmp_path: Path, *overrides: str) -> tuple[Path, Path]:
    train_with(1, stage, recipe(stage, case, "alone"))
    train_with(size, stage, recipe(stage, case, "together"), *overrides)
    return tmp_path / "together", tmp_path / "alone"


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", ["grpo", *(pytest.param(case, marks=pytest.mark.slow) for case in RL if case != "grpo")])
def test_rl_by_several_processes(tmp_path, recipe, case, size):
    together, alone = both(recipe, size, "rl", case, tmp_path)
    assert samples(together) == samples(alone)
    assert differences(together, alone) == {}
    assert weight_difference(together, alone) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("case", ["grpo", "ppo", "ppo, shared critic", "kl", "lora"])
def test_rl_with_sharded_weights(tmp_path, recipe, case):
    together, alone = both(recipe, 2, "rl", case, tmp_path, "cluster.sharding=full")
    assert samples(together) == samples(alone)
    assert differences(together, alone) == {}
    assert weight_difference(together, alone) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "lora"), [("sft", False), ("dpo", False), ("dpo", True), ("reward-model", True)])
def test_other_stages_with_sharded_weights(tmp_path, recipe, stage, lora):
    adapted = ["model.lora.rank=4"] if lora else []
    for size, name in ((1, "alone"), (3, "together")):
        train_with(size, stage, recipe(stage, "", name), "cluster.sharding=full", *adapted)
    together, alone = tmp_path / "together", tmp_path / "alone"
    assert differences(together, alone) == {}
    assert weight_difference(together, alone) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("stage", ["sft", "dpo", "reward-model"])
def test_other_stages_by_several_processes(tmp_path, recipe, stage, size):
    together, alone = both(recipe, size, stage, "", tmp_path)
    assert differences(together, alone) == {}
    assert weight_difference(together, alone) < 1e-6


# Checkpoints ---------------------------------------------------------------------------------------------------------


def with_checkpoints(file: Path, every: int = 2) -> tuple[Path, str]:
    return file, f"run.save_every={every}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved_by", "sharding", "loaded_by"),
    [(2, "optimiser", 1), (2, "optimiser", 3), (1, "none", 2), (3, "optimiser", 2), (2, "none", 2), (2, "full", 1), (3, "full", 2)],
)
def test_a_checkpoint_is_loaded_by_any_number_of_processes(tmp_path, recipe, saved_by, sharding, loaded_by):
    train_with(1, "rl", *with_checkpoints(recipe("rl", "grpo", "alone")))
    moved = recipe("rl", "grpo", "moved")
    killed = ["SIGKILL", "before line 3", "rl", *with_checkpoints(moved), f"cluster.sharding={sharding}"]
    for rank in start_ranks(saved_by, *killed, scripts=dict.fromkeys(range(saved_by), SIGNAL_ITSELF)):
        assert rank.wait() == -signal.SIGKILL, rank.output
    parts = sorted(file.name for file in (tmp_path / "moved/checkpoints/step_000002/trainer").iterdir())
    assert len(parts) == (1 if sharding == "none" else saved_by)
    train_with(loaded_by, "rl", *with_checkpoints(moved))
    assert samples(tmp_path / "moved") == samples(tmp_path / "alone")
    assert differences(tmp_path / "moved", tmp_path / "alone") == {}
    assert weight_difference(tmp_path / "moved", tmp_path / "alone") < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
@pytest.mark.parametrize("moment", ["before line 3", "open .step_000004.aside/state.json", "behind line 4"])
def test_kill_9_of_a_rank_and_resume(tmp_path, recipe, killed, moment):
    """The others notice, and end; started again, the run ends with the bits of one that was not disturbed."""
    train_with(2, "rl", *with_checkpoints(recipe("rl", "grpo", "undisturbed")))
    file = recipe("rl", "grpo", "killed")
    if killed == 1:
        moment = moment.replace("open .step_000004.aside/state.json", "open trainer/rank1_00000.safetensors")
    arguments = [signal.SIGKILL.name, moment, "rl", *with_checkpoints(file)]
    ranks = start_ranks(2, *arguments, scripts={killed: SIGNAL_ITSELF, 1 - killed: f"import sys; del sys.argv[1:3]\n{MAIN}"})
    assert ranks[killed].wait() == -signal.SIGKILL
    assert ranks[1 - killed].wait() != 0
    train_with(2, "rl", *with_checkpoints(file))
    assert samples(tmp_path / "killed", but=()) == samples(tmp_path / "undisturbed", but=())
    assert exact_metrics(tmp_path / "killed") == exact_metrics(tmp_path / "undisturbed")
    assert weight_difference(tmp_path / "killed", tmp_path / "undisturbed") == 0.0
