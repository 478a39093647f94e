"""Several processes train what one trains: the same samples, rewards and advantages, and the same weights up to rounding."""

from pathlib import Path
from typing import Any

import pytest

from support.ranks import differences, samples, train_with, weight_difference
from support.recipes import pair_recipe, rl_recipe, sft_recipe, write_recipe

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
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("stage", ["sft", "dpo", "reward-model"])
def test_other_stages_by_several_processes(tmp_path, recipe, stage, size):
    together, alone = both(recipe, size, stage, "", tmp_path)
    assert differences(together, alone) == {}
    assert weight_difference(together, alone) < 1e-6
