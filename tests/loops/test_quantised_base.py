"""Every training stage with LoRA on a base in 8 or 4 bits: trained, resumed, saved."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from support.recipes import (
    Stopped,
    exact_metrics,
    pair_recipe,
    rl_recipe,
    sft_recipe,
    stop_before,
    train_dpo,
    train_reward_model,
    train_rl,
    train_sft,
    write_recipe,
)

TRAIN = {"sft": train_sft, "dpo": train_dpo, "reward-model": train_reward_model, "rl": train_rl}


@pytest.fixture
def recipe_of(tiny_model, rows_file, pairs_file, prompts_file, reward_file):
    def tree(stage: str, run: Path, bits: int, **sections: dict) -> dict[str, Any]:
        rows = {"sft": rows_file, "rl": prompts_file}.get(stage, pairs_file)
        make = {"sft": sft_recipe, "rl": rl_recipe}.get(stage, pair_recipe)
        more = {"algorithm": {"kl_coefficient": 0.1}} if stage == "rl" else {}
        model = {"dtype": "bfloat16", "lora": {"rank": 4, "base_bits": bits}}
        sections = {"model": model, "run": {"max_steps": 3, "save_every": 2}, **more, **sections}
        return {"stage": stage, **make(tiny_model, rows, run, *([reward_file] if stage == "rl" else []), **sections)}

    return tree


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("stage", "bits"),
    [
        ("sft", 4),
        pytest.param("dpo", 8, marks=SLOW),
        pytest.param("reward-model", 4, marks=SLOW),
        pytest.param("rl", 4, marks=SLOW),
    ],
)
def test_a_resumed_run_is_the_same_to_the_bit(tmp_path, monkeypatch, recipe_of, tiny_model, stage, bits):
    train = TRAIN[stage]
    whole = train(write_recipe(tmp_path / "whole.yaml", recipe_of(stage, tmp_path / "whole", bits)))
    file = write_recipe(tmp_path / "halves.yaml", recipe_of(stage, tmp_path / "halves", bits))
    stop_before(monkeypatch, 3)
    with pytest.raises(Stopped):
        train(file)
    halves = train(file)
    assert exact_metrics(tmp_path / "whole") == exact_metrics(tmp_path / "halves")
    weights, again = load_file(whole / "model.safetensors"), load_file(halves / "model.safetensors")
    assert all(torch.equal(weight, again[name]) for name, weight in weights.items())
    original = load_file(tiny_model / "model.safetensors")
    assert set(original) - set(weights) <= {"lm_head.weight"}, "complete, under the base's names"
    assert torch.equal(weights["model.norm.weight"].float(), original["model.norm.weight"].bfloat16().float())
    if stage == "rl":
        steps = exact_metrics(tmp_path / "whole")
        assert steps[0]["kl"] == 0.0, "before the first update the policy is the dequantised base, which is the reference"
