"""Memory of each of several processes, by what they divide among themselves."""

import json
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from plaudit.config import load as load_recipe
from plaudit.models.memory import CHUNK_ELEMENTS, CHUNKS_IN_FLIGHT, PHASES, MemoryPlan, plan_memory
from plaudit.recipe import ModelSettings
from plaudit.train import processes
from plaudit.train.auto import agreed_sharding, choose_sharding, fits, resolve_checkpointing
from plaudit.train.memory_plan import plan_devices
from plaudit.train.memory_savers import smaller_weights
from plaudit.train.processes import Processes
from support.recipes import rl_recipe, sft_recipe, write_recipe

# The tiny llama: width 64, 2 layers, 4 heads of 16 and 2 for keys and values, MLP 160, 320 tokens.
LAYER = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 160 + 2 * 64
ROOT = 2 * 320 * 64 + 64
PARAMETERS = 2 * LAYER + ROOT
ADAPTERS = 2 * 4 * ((64 + 64) + 2 * (64 + 32) + (64 + 64) + 3 * (64 + 160))  # rank 4 on every linear layer
LORA = {"lora": {"rank": 4}}


@pytest.fixture
def plan(tiny_model) -> Callable[..., MemoryPlan]:
    def plan_for(sharding: Any = "none", processes: int = 1, *, tokens: int = 1000, **settings: Any) -> MemoryPlan:
        extra = {name: settings.pop(name) for name in ("offload", "scalar", "one_micro_batch") if name in settings}
        model = ModelSettings.model_validate({"path": str(tiny_model), "dtype": "bfloat16", **settings})
        return plan_memory(model, torch.device("cuda"), micro_batch=tokens, processes=processes, sharding=sharding, **extra)

    return plan_for


def test_each_sharding_by_hand(plan):
    none, optimiser, full = (plan(sharding, 4) for sharding in ("none", "optimiser", "full"))
    kept = none.activations + none.logits
    assert all(one.activations + one.logits == kept for one in (optimiser, full)), "a process computes micro-batches alone"
    # Weights in bf16; masters and moments in fp32.
    assert (none.weights, none.gradients, none.state) == (2 * PARAMETERS, 4 * PARAMETERS, 12 * PARAMETERS)
    assert none.total == (2 + 4 + 12) * PARAMETERS + kept
    assert (optimiser.weights, optimiser.gradients, optimiser.state) == (2 * PARAMETERS, 4 * PARAMETERS, 3 * PARAMETERS)
    assert optimiser.total == (2 + 4 + 3) * PARAMETERS + kept, "what is exchanged takes less than activations did"
    # The sharded weights are their own masters. Whole: two layers, the root, a layer's gradient and the fp32 copy that is summed.
    assert (full.weights, full.gradients, full.state) == (PARAMETERS, PARAMETERS, 2 * PARAMETERS)
    assert full.gathered == 2 * (2 * LAYER + ROOT) + (2 + 4) * LAYER
    assert full.total == (1 + 1 + 2) * PARAMETERS + full.gathered + kept


def test_each_sharding_with_adapters_by_hand(plan):
    none, optimiser, full = (plan(sharding, 4, **LORA) for sharding in ("none", "optimiser", "full"))
    merged = 2 * (LAYER - 2 * 64)  # all linear layers
    assert none.weights == optimiser.weights == 2 * (PARAMETERS + merged) + 4 * ADAPTERS
    assert (none.state, optimiser.state) == (8 * ADAPTERS, 2 * ADAPTERS)
    assert (full.weights, full.gradients, full.state) == ((2 * PARAMETERS + 4 * ADAPTERS) / 4, ADAPTERS, 2 * ADAPTERS)
    assert full.gathered == 2 * (2 * LAYER + ROOT) + (2 + 4) * ADAPTERS / 2, "frozen weights have no gradients"


def test_what_is_exchanged_counts_when_activations_do_not(plan):
    """All gradients and a process's own part of the sums; of FSDP, the gradient of embeddings and head."""
    fits_in_one = {"tokens": 0, "scalar": True, "one_micro_batch": True}
    trained = plan(**fits_in_one).trainable
    assert plan("none", 4, **fits_in_one).passes == 4 * trained
    assert plan("optimiser", 4, **fits_in_one).passes == (4 + 1) * trained
    full = plan("full", 4, **fits_in_one)
    assert full.passes == trained + (2 + 4) * (trained - 2 * LAYER) + full.gathered


def test_offloaded_state_is_divided_too(plan, monkeypatch):
    one, four = plan(offload=True), plan("optimiser", 4, offload=True)
    assert (one.state, four.state) == (12 * PARAMETERS, 3 * PARAMETERS)
    assert (one.streamed, four.streamed) == (12 * PARAMETERS, 3 * PARAMETERS), "models this small are streamed in one chunk"
    assert CHUNKS_IN_FLIGHT * CHUNK_ELEMENTS > PARAMETERS
    assert plan("full", 4, offload=True).streamed == 2 * PARAMETERS


@pytest.mark.parametrize("settings", [{}, LORA, {"scalar": True}, {"offload": True}, {"one_micro_batch": True}])
def test_more_processes_never_take_more_each(plan, settings):
    for sharding in ("none", "optimiser", "full"):
        plans = [plan(sharding, size, **settings) for size in (1, 2, 3, 4, 8, 64)]
        for one, more in pairwise(plans):
            assert more.total <= one.total
            assert more.weights + more.state + more.gradients <= one.weights + one.state + one.gradients
        divided = [size * (one.state if sharding != "none" else 0) for size, one in zip((1, 2, 3, 4, 8, 64), plans, strict=True)]
        assert divided == pytest.approx([divided[0]] * 6), "together they have what one has"
    at_any_size = [[plan(sharding, size, **settings).state for sharding in ("none", "optimiser", "full")] for size in (2, 8)]
    assert all(none >= optimiser >= full for none, optimiser, full in at_any_size)


# Of a recipe ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def rl(tmp_path, tiny_model, prompts_file, reward_file) -> Callable[..., Any]:
    def load(**sections: Any) -> Any:
        tree = rl_recipe(tiny_model, prompts_file, tmp_path / "run", reward_file, **sections)
        return load_recipe(write_recipe(tmp_path / "rl.yaml", {"stage": "rl", **tree})).recipe

    return load


@pytest.fixture
def sft(tmp_path, rows_file) -> Callable[..., Any]:
    """Of an eight-layer model with a small vocabulary; a plan needs no more than its config."""
    config = AutoConfig.for_model(
        "llama", vocab_size=1000, hidden_size=256, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=704,
    )  # fmt: skip
    config.save_pretrained(tmp_path / "deep")
    (tmp_path / "deep/model.safetensors").touch()  # never read

    def load(**sections: Any) -> Any:
        tree = sft_recipe(tmp_path / "deep", rows_file, tmp_path / "run", **sections)
        return load_recipe(write_recipe(tmp_path / "sft.yaml", {"stage": "sft", **tree})).recipe

    return load


GPUS = {"memory": 1e12, "kind": "cuda"}
"""Planned for wherever the tests run."""


def needs(recipe: Any, sharding: Any = "none", size: int = 1) -> dict[str, float]:
    budget = plan_devices(recipe, [20], Processes(size, sharding, **GPUS))["cuda"]
    return {need.name: need.fixed + need.elastic for need in budget.needs}


def test_sampling_is_divided_and_sharded_weights_are_copied_for_it(rl):
    recipe = rl(train={"prompts_per_step": 8}, model={"dtype": "bfloat16"})
    cache = {size: next(name for name in needs(recipe, size=size) if name.startswith("cache")) for size in (1, 3, 8)}
    assert cache == {size: f"cache: {prompts * 4} × 32 tokens" for size, prompts in ((1, 8), (3, 3), (8, 1))}
    assert "engine: whole weights" not in needs(recipe, "optimiser", 2)
    assert needs(recipe, "full", 2)["engine: whole weights"] == 2 * PARAMETERS
    with_adapters = rl(train={"prompts_per_step": 8}, model={"dtype": "bfloat16", **LORA})
    assert needs(with_adapters, "full", 2)["engine: whole weights"] == 2 * PARAMETERS + 4 * ADAPTERS


def test_with_a_lag_the_engines_copy_stays_while_the_trainer_computes(rl):
    plans = [
        plan_devices(rl(rollout={"lag": lag}, model={"dtype": "bfloat16"}), [20], Processes(1, "none", **GPUS))["cuda"]
        for lag in (0, 1)
    ]
    for phase in PHASES:
        without, copied = (budget.at(phase, fixed_only=True) for budget in plans)
        assert copied - without == 2 * PARAMETERS, phase


def test_reference_and_critic_are_divided_like_the_policy(rl):
    recipe = rl(
        algorithm={"kind": "ppo", "kl_coefficient": 0.1}, critic={"optim": {"lr": 1e-3}}, model={"dtype": "bfloat16"}
    )  # fmt: skip
    critic = PARAMETERS - 320 * 64 + 64
    none, optimiser, full = (needs(recipe, sharding, 4) for sharding in ("none", "optimiser", "full"))
    assert [one["reference: weights"] for one in (none, optimiser, full)] == [2 * PARAMETERS, 2 * PARAMETERS, PARAMETERS / 2]
    assert [one["critic: weights"] for one in (none, optimiser, full)] == [2 * critic, 2 * critic, critic]
    assert [one["critic: moments, masters"] for one in (none, optimiser, full)] == [12 * critic, 3 * critic, 2 * critic]


def test_processes_on_one_host_share_its_memory(rl, monkeypatch):
    monkeypatch.setattr(processes, "total_memory", lambda device: 8e9)
    recipe = rl(model={"dtype": "bfloat16"}, optim={"placement": "offload"})
    monkeypatch.setattr(processes, "resolve_device", lambda *_: torch.device("cuda"))
    for size in (1, 4):
        budgets = plan_devices(recipe, [20], Processes(size, "optimiser"))
        assert (budgets["cuda"].available, budgets["cpu"].available) == (8e9, 8e9 / size)
        assert budgets["cpu"].at("training", fixed_only=True) == 12 * PARAMETERS / size
        assert budgets["cpu"].at("training") == (12 + 12 + 2) * PARAMETERS / size, "and a checkpoint's copy"
    monkeypatch.setattr(processes, "resolve_device", lambda *_: torch.device("cpu"))
    assert plan_devices(recipe, [20], Processes(4))["cpu"].available == 2e9


def test_auto_shards_weights_only_if_it_must(sft):
    recipe, lengths = sft(cluster={"gpus": 4}), [100]

    def need(sharding: Any) -> float:
        budget = plan_devices(recipe, lengths, Processes(4, sharding, memory=1e12))["cpu"]
        return budget.at("training", fixed_only=True)

    enough = need("optimiser") / 0.9
    assert need("full") < need("optimiser") < need("none")
    assert choose_sharding(recipe, lengths, 4, 4 * enough + 1) == "optimiser"
    assert choose_sharding(recipe, lengths, 4, 4 * enough - 1e5) == "full"
    assert choose_sharding(recipe, lengths, 4) == "optimiser", "this machine has memory for tiny models"
    assert choose_sharding(recipe, lengths, 1, 1.0) == "none"
    for chosen in ("none", "optimiser", "full"):
        asked = recipe.model_copy(update={"cluster": recipe.cluster.model_copy(update={"sharding": chosen})})
        assert choose_sharding(asked, lengths, 4, 1.0) == chosen, "no setting is overruled"
        assert choose_sharding(asked, lengths, 1) == "none", "one process has nothing to divide"


def test_what_keeps_weights_from_being_divided_is_named_if_nothing_else_fits(sft):
    recipe, said = sft(model={"lora": {"rank": 4, "base_bits": 4}}, cluster={"gpus": 4}), []
    world: Any = SimpleNamespace(is_joined=True, size=4, agree=lambda value, what: value)
    assert agreed_sharding(recipe, [100], world, said.append) == "optimiser"
    assert not said, "it fits"
    assert agreed_sharding(recipe, [10**9], world, said.append) == "optimiser"
    assert said == [
        "cluster.sharding: optimiser, with which training may take too much memory; full, which divides all weights, cannot divide "
        "a base with model.lora.base_bits"
    ]


def test_a_quantised_base_is_suggested_only_where_there_is_a_way(sft, tmp_path):
    def suggested(lora: dict[str, Any], **sections: Any) -> str:
        model = sections.pop("model", {})
        return smaller_weights(sft(model={"lora": lora, **model}, **sections))

    assert suggested({}) == suggested({"base_bits": 8}) == "set model.lora.base_bits=4"
    assert suggested({"base_bits": 4}) == "choose a smaller model"
    assert suggested({"dropout": 0.1}) == suggested({}, model={"liger": True}) == "choose a smaller model"
    assert suggested({"targets": ["q_proj", "embed_tokens"]}) == "choose a smaller model"
    assert suggested({}, cluster={"sharding": "full"}) == "choose a smaller model"
    model = Path(sft().model.path)
    other = json.loads((model / "config.json").read_text()) | {"hidden_act": "gelu"}
    shutil.copytree(model, tmp_path / "other")
    (tmp_path / "other/config.json").write_text(json.dumps(other))
    assert suggested({}, model={"path": str(tmp_path / "other")}) == "choose a smaller model"


def test_layers_are_checkpointed_before_weights_are_sharded(sft):
    def recipe(checkpointed: Any) -> Any:
        train = {"rows_per_step": 64, "tokens_per_micro_batch": 8192}
        return sft(model={"gradient_checkpointing": checkpointed}, cluster={"gpus": 4}, train=train)

    def need(checkpointed: Any, sharding: Any) -> float:
        budget = plan_devices(recipe(checkpointed), None, Processes(4, sharding, memory=1e12))["cpu"]
        return budget.at("training", fixed_only=True)

    enough = need(3, "optimiser") / 0.9 + 1

    def layers(sharding: Any) -> int:
        processes = Processes(4, sharding, memory=enough)
        return resolve_checkpointing(recipe("auto"), None, lambda line: None, processes).model.gradient_checkpointing

    assert layers("full") <= layers("optimiser") == 3 <= layers("none")
    assert choose_sharding(recipe("auto"), None, 4, 4 * enough) == "optimiser"
    assert choose_sharding(recipe(2), None, 4, 4 * enough) == "full", "checkpointing as set does not fit"
    least = need(7, "optimiser") / 0.9  # one layer is live in full, kept or recomputed
    assert fits(recipe("auto"), None, Processes(4, "optimiser", memory=least + 1))
    assert not fits(recipe("auto"), None, Processes(4, "optimiser", memory=least - 1))
