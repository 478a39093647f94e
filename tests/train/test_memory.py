"""Settings that save memory: what they leave on the device, and that results do not change."""

import json
import math
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from plaudit.checkpoint import find_checkpoint, render_state, write_checkpoint
from plaudit.config import load as load_recipe
from plaudit.data.pack import micro_batches
from plaudit.doctor.memory import check_disk
from plaudit.errors import RecipeError
from plaudit.models import residual
from plaudit.models.liger import use_liger
from plaudit.models.memory import RUNTIME, Budget, gigabytes, plan_memory
from plaudit.models.products import fuse_parameters, fused_view
from plaudit.models.weights import OffloadedModule
from plaudit.recipe import LoraSettings, ModelSettings, OptimSettings
from plaudit.rl import learner
from plaudit.rollout.native.engine import NativeEngine
from plaudit.train import offload, optimiser, processes
from plaudit.train.auto import resolve_checkpointing
from plaudit.train.memory_plan import plan_devices, update_size
from plaudit.train.offload import HostState
from plaudit.train.optimiser import Optimiser
from plaudit.train.processes import Processes
from plaudit.train.saved_state import SavedTensor
from support.recipes import pair_recipe, rl_recipe, sft_recipe, train_dpo, train_rl, train_sft, write_recipe
from support.training import assert_same_bits, load, make_trainer, nll_of, rows_of, snapshot

CPU = torch.device("cpu")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=on_gpu)]

PLACEMENT = {False: "resident", True: "offload"}


@pytest.fixture
def cpu_as_gpu(monkeypatch):
    """Treats the CPU as a GPU: state is offloaded from it, and streamed through in chunks that split tensors."""
    monkeypatch.setattr(optimiser, "has_device_memory", lambda device: True)
    monkeypatch.setattr(optimiser, "HostState", lambda *shapes: HostState(*shapes, chunk_elements=1024))


# The optimiser's state ------------------------------------------------------------------------------------------------

TRAINED: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": "float32"},
    "bf16": {"dtype": "bfloat16"},
    "lora": {"dtype": "bfloat16", "lora": {"rank": 4}},
}


@pytest.mark.grid(1)
@pytest.mark.parametrize("how", TRAINED)
def test_offloaded_state_gives_the_same_updates(tiny_models, cpu_as_gpu, how):
    """Two updates of Qwen2 (matrices, biases and norms) without offloading and two with it."""
    trainers = []
    for offloaded in (False, True):
        policy = load(tiny_models["qwen2"], **TRAINED[how])
        trainer = make_trainer(policy, weight_decay=0.1, placement=PLACEMENT[offloaded])
        batches = micro_batches(rows_of(policy), 64)
        metrics = [trainer.update(batches, nll_of(policy, batches)) for _ in range(2)]
        trainers.append((trainer, [{k: v for k, v in m.items() if not k.startswith("time/")} for m in metrics]))
    (plain, metrics), (offloaded, offloaded_metrics) = trainers
    assert metrics == offloaded_metrics
    assert_same_bits(snapshot(plain), snapshot(offloaded))
    assert (plain.optimiser.resident_bytes, offloaded.optimiser.resident_bytes) == (
        sum(p.numel() for _, p in plain.trained.trainable()) * (12 if how == "bf16" else 8),
        0,
    )


@pytest.mark.parametrize("first", [False, True])
def test_checkpoints_do_not_depend_on_offload(tiny_model, tmp_path, cpu_as_gpu, first):
    """One update is saved; the next one, resumed with the other setting, equals that of an uninterrupted run."""
    policy = load(tiny_model, dtype="bfloat16")
    batches = micro_batches(rows_of(policy), 64)
    trainer = make_trainer(policy, placement=PLACEMENT[first])
    trainer.update(batches, nll_of(policy, batches))
    taken = trainer.snapshot(copy=first)
    write_checkpoint(tmp_path, 1, taken, render_state(1, taken), trainer.state_bytes(), trainer.world)
    trainer.update(batches, nll_of(policy, batches))

    again = load(tiny_model, dtype="bfloat16")
    resumed = make_trainer(again, placement=PLACEMENT[not first])
    found, _ = find_checkpoint(tmp_path)
    assert found is not None
    resumed.load_state(found.folder, found.state)
    resumed.update(batches, nll_of(again, batches))
    assert_same_bits(snapshot(trainer), snapshot(resumed))


def test_on_a_cpu_offload_has_no_effect(tiny_model):
    policy = load(tiny_model, dtype="bfloat16")
    kept = Optimiser(policy.trainable(), OptimSettings(placement="offload")).resident_bytes
    assert kept == Optimiser(policy.trainable(), OptimSettings()).resident_bytes > 0


@pytest.mark.parametrize("device", DEVICES)
def test_chunks_split_tensors_and_none_is_passed_twice(device):
    """200 and 70 elements start at 0 and 256, since slices start at multiples of 64; chunks hold 128."""
    shapes = {"a": torch.Size([10, 20]), "b": torch.Size([70])}
    state = HostState({"a": shapes["a"]}, {"b": shapes["b"]}, torch.device(device), chunk_elements=128)
    state.master("a").copy_(torch.arange(200.0).view(10, 20))
    passed = []

    def work(slices: list[offload.StateSlice]) -> None:
        for state_slice in slices:
            passed.append((state_slice.name, state_slice.at.start, state_slice.at.stop))
            state_slice.exp_avg.add_(1)
            state_slice.exp_avg_sq.add_(2)
            if state_slice.master is not None:
                state_slice.master.mul_(2)

    for _ in range(2):
        state.stream_through_device(work)  # pyright: ignore
    state.settled()
    assert passed == 2 * [("a", 0, 128), ("a", 128, 200), ("b", 0, 70)]
    assert torch.equal(state.master("a"), 4 * torch.arange(200.0).view(10, 20))
    for name, shape in shapes.items():
        assert torch.equal(state.moments(name)[0], torch.full(shape, 2.0))
        assert torch.equal(state.moments(name)[1], torch.full(shape, 4.0))


def test_a_parameter_without_gradient_is_left_alone(cpu_as_gpu):
    parameters = {name: nn.Parameter(torch.ones(3, 4, dtype=torch.bfloat16)) for name in ("trained", "unused")}
    optimiser = Optimiser(parameters.items(), OptimSettings(lr=0.1, weight_decay=0.5, placement="offload"))
    parameters["trained"].sum().backward()
    optimiser.step(0.1)
    assert torch.equal(parameters["unused"], torch.ones(3, 4, dtype=torch.bfloat16))
    assert not torch.equal(parameters["trained"], parameters["unused"])
    assert {key for key in optimiser.state() if key.endswith("/unused")} == {"weight/unused"}


def test_a_state_without_moments_starts_them_at_zero(cpu_as_gpu):
    """Also where an earlier state's are in memory."""
    weight = nn.Parameter(torch.ones(3, 4, dtype=torch.bfloat16))
    optimiser = Optimiser([("w", weight)], OptimSettings(placement="offload"))
    first = {key: tensor.clone() for key, tensor in optimiser.state().items()}
    assert set(first) == {"weight/w"}
    stepped = []
    for _ in range(2):
        weight.sum().backward()
        optimiser.step(0.1)
        stepped.append({key: tensor.clone() for key, tensor in optimiser.state().items()})
        optimiser.gradients.clear()
        optimiser.load_state(SavedTensor(key, t.numel(), lambda a, b, t=t: t.view(-1)[a:b]) for key, t in first.items())
    assert_same_bits(*stepped)


@on_gpu
@pytest.mark.parametrize("how", TRAINED)
def test_on_a_gpu_offloaded_state_gives_the_same_updates(tiny_models, monkeypatch, how):
    """Bit for bit, with chunks that split tensors and more of them than are in flight; nothing stays on the GPU between updates."""
    monkeypatch.setattr(optimiser, "HostState", lambda *shapes: HostState(*shapes, chunk_elements=1024))
    results, kept = [], []
    for offloaded in (False, True):
        policy = load(tiny_models["qwen2"], **TRAINED[how])
        policy.model.to("cuda")  # pyright: ignore
        trainer = make_trainer(policy, weight_decay=0.1, placement=PLACEMENT[offloaded])
        batches = micro_batches(rows_of(policy), 64, "cuda")
        for _ in range(3):
            trainer.update(batches, nll_of(policy, batches))
        results.append({name: tensor.cpu() for name, tensor in snapshot(trainer).items()})
        state = trainer.optimiser.state()
        kept.append(sum(t.numel() for n, t in state.items() if t.is_cuda and not n.startswith("weight/")))
    assert_same_bits(*results)
    assert kept[0] > 0
    assert kept[1] == 0


# Offloaded models -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_fused_parameters_stay_fused_after_offloading(device):
    """Otherwise their products would run one by one, or the fused tensor would have to be rebuilt."""
    module = nn.ModuleDict({name: nn.Linear(5, rows) for name, rows in (("a", 3), ("b", 4))}).to(device)
    module.register_buffer("strided", torch.arange(12.0, device=device).view(3, 4).T[1:])
    weights = [module[name].weight for name in "ab"]
    fused = fuse_parameters(weights).clone()
    offloaded = OffloadedModule(module, torch.device(device))
    for times in (1, 2, 4):
        with offloaded.on_device():
            found = fused_view(weights)
            assert torch.equal(found, fused * times)
            found.mul_(2)
            assert torch.equal(module.strided.cpu(), torch.arange(12.0).view(3, 4).T[1:])
        assert all(parameter.device == CPU for parameter in module.parameters())


@pytest.mark.parametrize("device", DEVICES)
def test_an_offloaded_model_keeps_its_updates(tiny_model, device):
    policy = load(tiny_model, dtype="bfloat16")
    policy.model.to(device)  # pyright: ignore
    trainer, batches = make_trainer(policy), micro_batches(rows_of(policy), 64, device)
    other = load(tiny_model, dtype="bfloat16")
    other.model.to(device)  # pyright: ignore
    resident = make_trainer(other)
    offloaded = OffloadedModule(policy.model, torch.device(device))
    for _ in range(2):
        assert policy.device == CPU
        with offloaded.on_device():
            assert policy.device.type == device
            trainer.update(batches, nll_of(policy, batches))
        resident.update(batches, nll_of(other, batches))
    assert all(p.device == CPU for p in policy.model.parameters())
    a, b = ({name: tensor.cpu() for name, tensor in snapshot(one).items()} for one in (trainer, resident))
    assert_same_bits(a, b)


# Checkpointing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_any_number_of_checkpointed_layers_gives_the_same_gradients(tiny_models, lora):
    def gradients(checkpointed: Any) -> dict[str, torch.Tensor]:
        policy = load(tiny_models["qwen2"], dtype="float32", lora=lora, gradient_checkpointing=checkpointed)
        assert sum(getattr(m, "gradient_checkpointing", False) for m in policy.model.get_decoder().layers) == int(checkpointed)  # pyright: ignore
        for batch in micro_batches(rows_of(policy), 64):
            nll_of(policy, [batch])(batch).backward()
        return {name: p.grad for name, p in policy.trainable() if p.grad is not None}

    without = gradients(False)
    for checkpointed in (1, 2):
        assert_same_bits(without, gradients(checkpointed))


def test_checkpointing_more_layers_than_the_model_has_is_refused(tiny_model):
    with pytest.raises(RecipeError, match=r"gradient_checkpointing is 3, and .* has 2 layers: true stands for all"):
        load(tiny_model, gradient_checkpointing=3)


@pytest.fixture
def large(tmp_path) -> Path:
    """The config of an eight-layer model; a plan needs nothing else."""
    config = AutoConfig.for_model(
        "llama", vocab_size=1000, hidden_size=256, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=704,
    )  # fmt: skip
    config.save_pretrained(tmp_path / "large")
    (tmp_path / "large/model.safetensors").touch()  # never read
    return tmp_path / "large"


def sft_of(model: Path, rows_file: Path, tmp_path: Path, **settings: Any) -> Any:
    tree = sft_recipe(
        model, rows_file, tmp_path / "run", model=settings, train={"rows_per_step": 64, "tokens_per_micro_batch": 8192}
    )
    return load_recipe(write_recipe(tmp_path / "plan.yaml", {"stage": "sft", **tree})).recipe


def test_auto_checkpoints_as_few_layers_as_fit(large, rows_file, tmp_path, monkeypatch):
    def need(checkpointed: Any) -> float:
        recipe = sft_of(large, rows_file, tmp_path, gradient_checkpointing=checkpointed)
        return plan_devices(recipe)["cpu"].at("training", fixed_only=True)

    # A checkpointed layer keeps only its input: 8192 tokens of 256 fp32 values, instead of all activations.
    activations = 8192 * 4 * (12 * 256 + 2 * 128 + 3 * 704)
    assert need(3) - need(False) == 3 * (8192 * 4 * 256 - activations)
    assert need(True) == need(7) + 8192 * 4 * 256, "one layer is live in full, kept or recomputed"

    auto, messages = sft_of(large, rows_file, tmp_path, gradient_checkpointing="auto"), []
    for available, expected in ((need(3) / 0.9, 3), (need(3) / 0.9 - 1, 4), (need(False) / 0.9, False), (need(7) / 2, 8)):
        monkeypatch.setattr(processes, "total_memory", lambda _, available=available: available)
        assert resolve_checkpointing(auto, report=messages.append).model.gradient_checkpointing == expected
    assert [line.split(" layers")[0].removeprefix("model.gradient_checkpointing: ") for line in messages] == [
        "3 of 8", "4 of 8", "none of 8", "8 of 8",
    ]  # fmt: skip
    assert [line.endswith("which may be too much: lower train.tokens_per_micro_batch or use model.lora") for line in messages] == [
        False, False, False, True,
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("head_size", [16, 24])
def test_fused_layers_keep_fewer_activations(tiny_models, tmp_path, kind, head_size):
    """On a GPU and in half precision, for policies and scalar models, with merged adapters; dropout is not fused."""
    config = AutoConfig.from_pretrained(tiny_models[kind])
    config.head_dim = head_size  # so that the queries may be wider than the residual stream
    config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()  # never read

    def kept(device: str = "cuda", dtype: Any = "bfloat16", *, scalar: bool = False, **settings: Any) -> float:
        model = ModelSettings(path=str(tmp_path), dtype=dtype, **settings)
        plan = plan_memory(model, torch.device(device), micro_batch=1000, scalar=scalar)
        return plan.activations / plan.layers / (1000 * (2 if dtype == "bfloat16" else 4))

    h, f = config.hidden_size, config.intermediate_size
    q, k = config.num_attention_heads * head_size, config.num_key_value_heads * head_size
    expected = 7 * h + 2 * q + 2 * k + 3 * f + (q + 2 * k if kind == "qwen3" else 0)
    assert kept() == kept(scalar=True) == kept(liger=True) == expected
    unfused = 12 * h + 2 * k + 3 * f
    in_half = unfused + 8 * h  # norms keep inputs and results in fp32: twice the size
    assert kept(dtype="float32") == kept(dtype="float32", lora=LoraSettings(rank=4)) == unfused
    assert kept("cpu") == in_half
    assert kept(lora=LoraSettings(rank=4)) == kept(lora=LoraSettings(rank=4), scalar=True) == expected
    adapters = 5 * h + q + f  # elements of their inputs, converted to fp32: twice the size
    assert kept("cpu", lora=LoraSettings(rank=4)) == in_half, "merged adapters convert nothing"
    dropped = LoraSettings(rank=4, dropout=0.1)
    assert kept(lora=dropped) == kept("cpu", lora=dropped) == unfused + (2 + 2.5) * adapters
    assert kept(lora=dropped.model_copy(update={"targets": ("q_proj", "down_proj")})) == unfused + (2 + 2.5) * (h + f)
    config.attention_dropout = 0.1
    config.save_pretrained(tmp_path)
    assert kept() == in_half


def test_merged_adapters_have_a_copy_of_their_weights(tiny_models):
    """Of adapted linear layers and of others over the same input, on a GPU in half precision and on a CPU."""

    def weights(lora: LoraSettings | None = None, device: str = "cuda") -> float:
        model = ModelSettings(path=str(tiny_models["llama"]), dtype="bfloat16", lora=lora)
        plan = plan_memory(model, torch.device(device), micro_batch=1000)
        return plan.weights - (4 * plan.trainable if lora else 0)

    config = AutoConfig.from_pretrained(tiny_models["llama"])
    h, f, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    q, k = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    attention, mlp = h * (q + 2 * k), 3 * h * f
    assert weights(LoraSettings(rank=4)) - weights() == 2 * layers * (attention + h * q + mlp)
    assert weights(LoraSettings(rank=4, targets=("q_proj",))) - weights() == 2 * layers * attention
    assert weights(LoraSettings(rank=4), "cpu") == weights(LoraSettings(rank=4))
    assert weights(LoraSettings(rank=4, dropout=0.1)) == weights()


@pytest.mark.parametrize("lora", [None, {"rank": 4}, {"rank": 4, "dropout": 0.1}, {"rank": 4, "base_bits": 4}])
@pytest.mark.parametrize("tied", [True, False])
def test_copied_weights_are_those_that_the_engine_packs_or_dequantises(tiny_models, tmp_path, tied, lora):
    folder = tmp_path / "model"
    shutil.copytree(tiny_models["qwen2"], folder)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, tie_word_embeddings=tied))
    model.save_pretrained(folder)
    engine = NativeEngine(load(folder, lora=lora).model, None)
    engine.forward.decoder.refresh(16)
    packed = engine.forward.decoder.bytes_to_pack + engine.forward.head.nbytes
    engine.forward.decoder.keep_dequantised(math.inf)
    settings = ModelSettings.model_validate({"path": str(folder), "lora": lora})
    plan = plan_memory(settings, torch.device("cpu"), micro_batch=1000)
    assert (plan.packed, plan.dequantised) == (packed, engine.forward.kept_bytes)
    assert (plan.dequantised > 0) == bool(lora and "base_bits" in lora)


@pytest.fixture
def seven_billion(tmp_path) -> Path:
    """The config of Qwen2.5-7B; a plan needs nothing else."""
    config = AutoConfig.for_model(
        "qwen2", vocab_size=152_064, hidden_size=3584, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4,
        intermediate_size=18_944, tie_word_embeddings=False,
    )  # fmt: skip
    config.save_pretrained(tmp_path / "7B")
    (tmp_path / "7B/model.safetensors").touch()  # never read
    return tmp_path / "7B"


H200, A100 = 149.3e9, 80e9


def test_lora_on_seven_billion_parameters_by_hand(seven_billion, rows_file, tmp_path):
    """Micro-batches of 16,384 tokens, nothing checkpointed."""

    def resolve(memory: float, tokens: int = 16_384, **lora: Any) -> tuple[Any, dict[str, float]]:
        """What `auto` decides, and what the policy then takes."""
        model = {"path": str(seven_billion), "gradient_checkpointing": "auto", "lora": {"rank": 16, **lora}}
        train = {"rows_per_step": 512, "tokens_per_micro_batch": tokens}
        tree = sft_recipe(seven_billion, rows_file, tmp_path / "run", model=model, train=train)
        recipe, gpu = (
            load_recipe(write_recipe(tmp_path / "7b.yaml", {"stage": "sft", **tree})).recipe,
            Processes(kind="cuda", memory=memory),
        )
        resolved: Any = resolve_checkpointing(recipe, report=lambda _: None, processes=gpu)  # pyright: ignore
        needs = plan_devices(resolved, processes=gpu)["cuda"].needs
        return resolved.model.gradient_checkpointing, {need.name: need.fixed for need in needs}

    parameters, adapters = 7_615_616_512, 16 * 28 * (2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18_944))
    of_layer = 3584 * (3584 + 2 * 512) + 3584 * 3584 + 3 * 3584 * 18_944
    layer = 16_384 * 2 * (9 * 3584 + 2 * 512 + 3 * 18_944)
    checkpointed, needs = resolve(H200)
    assert checkpointed is False
    assert needs == {
        "torch and other libraries": 0.6e9,
        "policy: weights": 2 * parameters + 4 * adapters,
        "policy: weights merged with LoRA": 2 * 28 * of_layer,
        "policy: moments, masters": 8 * adapters,
        "policy: activations, logits, gradients": 28 * layer + 2 * 4 * 2**28 + 4 * adapters,
    }
    assert sum(needs.values()) == pytest.approx(114.35e9, abs=0.05e9)

    # Each of the layers that are checkpointed keeps its input alone, until 90 % of the memory are enough.
    saved, most = layer - 16_384 * 4 * 3584, 0.9 * A100
    checkpointed, fitting = resolve(A100)
    assert checkpointed == math.ceil((sum(needs.values()) - most) / saved) == 16
    assert sum(fitting.values()) == sum(needs.values()) - 16 * saved <= most

    # peft's own modules, which compute adapters with dropout, keep three times as much, and no merged weights.
    checkpointed, of_peft = resolve(H200, dropout=0.1)
    assert "policy: weights merged with LoRA" not in of_peft
    assert checkpointed == 16


def test_the_engine_keeps_dequantised_weights_where_they_are_a_small_part_of_what_is_left(seven_billion, prompts_file, tmp_path):
    def needs(memory: float, **sections: Any) -> dict[str, float]:
        reward = {"kind": "length", "unit": "characters", "at_most": 1}
        model = {"lora": {"rank": 16, "base_bits": 4}, "dtype": "bfloat16"}
        tree = rl_recipe(seven_billion, prompts_file, tmp_path / "run", reward, model=model, **sections)
        recipe = load_recipe(write_recipe(tmp_path / "7b.yaml", {"stage": "rl", **tree})).recipe
        budget = plan_devices(recipe, [20], processes=Processes(kind="cuda", memory=memory))["cuda"]  # pyright: ignore
        return {need.name: need.fixed + need.elastic for need in budget.needs if "sampling" in need.phases}

    whole = 2 * 28 * (3584 * (3584 + 2 * 512) + 3584 * 3584 + 3 * 3584 * 18_944)
    large, small = needs(H200), needs(24e9)
    assert large["engine: dequantised weights"] == whole
    held = sum(need for name, need in small.items() if name.startswith("policy: "))
    assert small["engine: dequantised weights"] == pytest.approx((24e9 - held) / 4, abs=0.3e9)
    assert small["engine: dequantised weights"] < whole / 2
    assert "engine: dequantised weights" not in needs(H200, rollout={"lag": 1}), "its copy has W' in full"


def test_doctor_shows_merged_weights_where_lora_has_them(plaudit, tiny_model, prompts_file, tmp_path):
    reward = {"kind": "length", "unit": "characters", "at_most": 1, "slack": 8}

    def doctor(**lora: Any) -> str:
        tree = rl_recipe(tiny_model, prompts_file, tmp_path / "run", reward, model={"lora": {"rank": 4, **lora}})
        return plaudit("doctor", write_recipe(tmp_path / "d.yaml", {"stage": "rl", **tree}), "--gpu-memory", 80)[1]

    config = AutoConfig.from_pretrained(tiny_model)
    h, k, f = config.hidden_size, config.num_key_value_heads * config.head_dim, config.intermediate_size
    size = gigabytes(2 * config.num_hidden_layers * (2 * h * h + 2 * h * k + 3 * h * f))
    out = doctor()
    assert f"merged weights {size}, " in out
    [row] = [line.split() for line in out.splitlines() if "policy: weights merged with LoRA" in line]
    assert " ".join(row[-6:]) == " ".join([size] * 3), "in all phases"
    assert not re.search("merged (weights|with)", doctor(dropout=0.1))


def test_merged_weights_are_not_on_disk(seven_billion, rows_file, tmp_path):
    """A checkpoint has one set of weights."""
    tree = sft_recipe(seven_billion, rows_file, tmp_path / "run", model={"lora": {"rank": 16}}, run={"keep_last": 1})
    recipe: Any = load_recipe(write_recipe(tmp_path / "7b.yaml", {"stage": "sft", **tree})).recipe
    [(_, text)] = check_disk(recipe, 100, Processes(kind="cuda", memory=H200))
    assert f"1 checkpoints of {gigabytes(2 * 7_615_616_512 + 12 * 40_370_176)}" in text


def test_a_plan_counts_no_more_tokens_than_an_update_has(large, rows_file, tmp_path, ppo):
    def sft(rows: int, lengths: list[int] | None) -> tuple[int, bool]:
        tree = sft_recipe(large, rows_file, tmp_path / "run", train={"rows_per_step": rows, "tokens_per_micro_batch": 1000})
        tree["data"]["max_tokens"] = 300
        return update_size(load_recipe(write_recipe(tmp_path / "sft.yaml", {"stage": "sft", **tree})).recipe, lengths)[:2]

    assert sft(8, None) == (1000, False)
    assert sft(2, None) == (600, True), "unknown lengths may be as long as allowed"
    assert sft(2, [5, 70, 90]) == (160, True), "the longest rows may come together"
    assert sft(4, [70, 90]) == (340, True), "rows come again in the next epoch"
    assert sft(8, [1200] * 3) == (1200, False), "a long row gets a micro-batch of its own"

    train = {"prompts_per_step": 4, "prompts_per_update": 2, "tokens_per_micro_batch": 1000}
    sections: dict[str, Any] = {"train": train, "rollout": {"n": 3, "max_new_tokens": 10}}
    recipe = load_recipe(ppo("plan", model={"path": str(large)}, **sections)).recipe
    assert update_size(recipe, [20, 30, 40])[:2] == (30 + 40 + 3 * 2 * 10, True), "each prompt once"
    sections["train"] = {**train, "share_prompts": False}
    recipe = load_recipe(ppo("alone", model={"path": str(large)}, **sections)).recipe
    assert update_size(recipe, [20, 30, 40])[:2] == (3 * (30 + 40 + 2 * 10), True)


def test_auto_is_resolved_for_policy_and_critic(large, ppo, monkeypatch):
    """The critic has no LM head, so it checkpoints no more layers. Until it is resolved, it counts as fully checkpointed."""

    def recipe(policy: Any, critic: Any) -> Any:
        model = {"path": str(large), "gradient_checkpointing": policy}
        train = {"tokens_per_micro_batch": 8192, "share_prompts": False}  # so that an update is larger than that
        sections = ALL_RESIDENT | {"critic": {"gradient_checkpointing": critic}, "train": train}
        return load_recipe(ppo("plan", model=model, **sections)).recipe

    def need(policy: Any, critic: Any) -> float:
        return plan_devices(recipe(policy, critic))["cpu"].at("training", fixed_only=True)

    available = need(7, True) / 0.9
    monkeypatch.setattr(processes, "total_memory", lambda _: available)
    resolved = resolve_checkpointing(recipe("auto", "auto"), report=lambda line: None)
    assert resolved.model.gradient_checkpointing == 7
    assert need(7, resolved.critic.gradient_checkpointing) == need(7, True)
    assert 0 < resolved.critic.gradient_checkpointing <= 7
    with pytest.raises(RecipeError, match="no: no such folder"):
        resolve_checkpointing(
            load_recipe(ppo("no", **ALL_RESIDENT | {"critic": {"path": "no", "gradient_checkpointing": "auto"}})).recipe
        )


def test_auto_is_resolved_in_training_and_reported_by_doctor(plaudit, tiny_model, rows_file, tmp_path):
    tree = sft_recipe(tiny_model, rows_file, tmp_path / "run", model={"gradient_checkpointing": "auto"}, run={"max_steps": 1})
    file = write_recipe(tmp_path / "auto.yaml", {"stage": "sft", **tree})
    code, _, err = plaudit("sft", file)
    assert code == 0, err
    assert "model.gradient_checkpointing: none of 2 layers, with which training takes about" in " ".join(err.split())
    code, out, _ = plaudit("doctor", file)
    assert code == 0
    assert "none of 2 layers" in " ".join(out.split())
    code, out, _ = plaudit("doctor", file, "model.gradient_checkpointing=3")
    assert code == 1
    assert "model.gradient_checkpointing is 3, but" in " ".join(out.split())
    code, out, _ = plaudit("doctor", file, "model.liger=true")
    assert code == 1
    assert "Liger's kernels run on a GPU" in " ".join(out.split())


# Everything together --------------------------------------------------------------------------------------------------

ALL_OFFLOADED = {
    "algorithm": {"kind": "ppo", "kl_coefficient": 0.01},
    "reference": {"placement": "offload"},
    "critic": {"placement": "offload", "optim": {"lr": 1e-3, "placement": "offload"}},
    "optim": {"placement": "offload"},
}
ALL_RESIDENT = {"algorithm": {"kind": "ppo", "kl_coefficient": 0.01}, "critic": {"optim": {"lr": 1e-3}}}


@pytest.fixture
def ppo(tmp_path, tiny_model, prompts_file, reward_file) -> Callable[..., Path]:
    def write(name: str, **sections: Any) -> Path:
        tree = rl_recipe(tiny_model, prompts_file, tmp_path / name, reward_file, **sections)
        return write_recipe(tmp_path / f"{name}.yaml", {"stage": "rl", **tree})

    return write


@pytest.mark.usefixtures("cpu_as_gpu")
@pytest.mark.slow
def test_ppo_with_everything_offloaded_gives_the_same_results(tmp_path, ppo, monkeypatch):
    """Weights, trainer states and metrics; and during sampling, no memory is reserved for anything but the policy."""
    monkeypatch.setattr(learner, "has_device_memory", lambda device: True)
    reserved = []
    init = NativeEngine.__init__
    monkeypatch.setattr(
        NativeEngine, "__init__", lambda self, *args, **kw: reserved.append(kw["reserved_bytes"]) or init(self, *args, **kw)
    )
    for name, settings in (("resident", ALL_RESIDENT), ("offloaded", ALL_OFFLOADED)):
        train_rl(ppo(name, model={"dtype": "bfloat16"}, **settings))
    files = ["model/model.safetensors", "critic/model.safetensors"]
    files += [f"checkpoints/step_000002/{who}/00000.safetensors" for who in ("trainer", "critic_trainer")]
    for file in files:
        one, other = (load_file(tmp_path / name / file) for name in ("resident", "offloaded"))
        assert_same_bits(one, other)
    rows = [
        [
            {name: value for name, value in json.loads(line).items() if not name.startswith("time/")}
            for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()
        ]
        for run in ("resident", "offloaded")
    ]
    assert rows[0] == rows[1]
    assert rows[0][1]["kl"] > 0
    assert reserved[0] > 0
    assert reserved[1] == 0


def test_the_memory_plan_accounts_for_offloading(ppo, tiny_model, monkeypatch):
    monkeypatch.setattr(processes, "resolve_device", lambda *_: torch.device("cuda"))
    monkeypatch.setattr(processes, "total_memory", lambda _: 1e12)

    def plans(**sections: Any) -> dict[str, Budget]:
        return plan_devices(load_recipe(ppo("plan", **sections)).recipe)

    policy = sum(tensor.numel() for tensor in load_file(tiny_model / "model.safetensors").values())
    critic = policy - 320 * 64 + 64 if "lm_head.weight" in load_file(tiny_model / "model.safetensors") else policy + 64
    resident, offloaded = plans(model={"dtype": "bfloat16"}, **ALL_RESIDENT), plans(model={"dtype": "bfloat16"}, **ALL_OFFLOADED)
    assert [need.name for need in resident["cpu"].needs] == ["checkpoint: copy while it is written"]
    # bf16: two bytes per weight, twelve for moments and master.
    [engine] = [need.fixed for need in resident["cuda"].needs if need.name.startswith("engine")]
    assert resident["cuda"].at("sampling", fixed_only=True) == RUNTIME["cuda"] + engine + (2 + 2 + 12) * policy + (2 + 12) * critic
    assert offloaded["cuda"].at("sampling", fixed_only=True) == RUNTIME["cuda"] + engine + 2 * policy
    assert [offloaded["cpu"].at(phase, fixed_only=True) for phase in ("sampling", "training")] == [
        (2 + 12) * policy + (2 + 12) * critic
    ] * 2
    # In training the critic is on device; the states of models this small are streamed in one chunk, one after the other.
    needs = {need.name: need for need in offloaded["cuda"].needs}
    assert needs["critic: weights"].phases == ("training",)
    assert needs["policy: moments, masters, streamed"].fixed == 12 * policy


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ({"reference": {"placement": "offload"}}, "reference has no effect: no KL is computed"),
        (
            {"algorithm": {"kl_coefficient": 0.1}, "reference": {"placement": "offload"}, "model": {"lora": {"rank": 2}}},
            "the reference is the policy without its adapters",
        ),
        ({"model": {"gradient_checkpointing": "some"}}, "model.gradient_checkpointing"),
        ({"model": {"gradient_checkpointing": -1}}, "model.gradient_checkpointing"),
    ],
)
def test_settings_without_effect_are_refused(ppo, sections, reason):
    with pytest.raises(RecipeError) as error:
        load_recipe(ppo("wrong", **sections))
    assert reason in str(error.value)


def test_offload_may_be_turned_on_when_resuming(tmp_path, tiny_model, rows_file):
    def recipe(name: str) -> Path:
        tree = sft_recipe(tiny_model, rows_file, tmp_path / name, run={"max_steps": 3, "save_every": 1})
        return write_recipe(tmp_path / f"{name}.yaml", {"stage": "sft", **tree})

    uninterrupted = train_sft(recipe("uninterrupted"))
    train_sft(recipe("run"))
    shutil.rmtree(tmp_path / "run/model")
    for step in (2, 3):
        shutil.rmtree(tmp_path / f"run/checkpoints/step_{step:06d}")
    again = train_sft(recipe("run"), "optim.placement=offload")
    for name, weight in load_file(uninterrupted / "model.safetensors").items():
        assert torch.equal(load_file(again / "model.safetensors")[name], weight), name


# Liger ----------------------------------------------------------------------------------------------------------------


def test_liger_is_refused_where_it_cannot_be_used(tiny_model, monkeypatch):
    with pytest.raises(RecipeError, match="Liger's kernels run on a GPU, and the model is on the cpu; set liger to false"):
        load(tiny_model, liger=True)
    model = load(tiny_model).model
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(RecipeError, match=r"liger is true, but it is not here .*pip install liger-kernel"):
        use_liger(model, torch.device("cuda"))
    monkeypatch.setattr(residual, "KNOWN", set())
    with pytest.raises(RecipeError, match="Liger's kernels are used for Llama, Mistral, Qwen2 and Qwen3 models"):
        use_liger(model, torch.device("cuda"))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
def test_liger_patches_only_the_given_model(tiny_models, monkeypatch, kind):
    """With a stub that patches transformers as Liger does; the kernels themselves need a GPU."""
    model = load(tiny_models[kind]).model
    modeling = sys.modules[type(model).__module__]
    norm = type(model.get_decoder().norm)  # pyright: ignore
    given = []

    def apply(model: Any, **options: bool) -> None:
        given.append((model, options))
        setattr(modeling, norm.__name__, SimpleNamespace)

    stub = ModuleType("liger_kernel.transformers")
    stub._apply_liger_kernel_to_instance = apply  # pyright: ignore
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", stub)
    use_liger(model, torch.device("cuda"))
    [(changed, options)] = given
    assert changed is model.get_decoder()
    assert options == {
        "rope": False, "cross_entropy": False, "fused_linear_cross_entropy": False, "rms_norm": True, "swiglu": True,
    }  # fmt: skip
    assert getattr(modeling, norm.__name__) is norm, "models created later are not patched"


@on_gpu
@pytest.mark.parametrize("how", ["bf16", "lora"])
def test_liger_matches_the_unpatched_model(tiny_models, how):
    pytest.importorskip("liger_kernel")
    results = []
    for liger in (False, True):
        policy = load(tiny_models["qwen2"], **TRAINED[how])
        policy.model.to("cuda")  # pyright: ignore
        if liger:
            use_liger(policy.model, torch.device("cuda"))
        batches = micro_batches(rows_of(policy), 10_000, "cuda")
        loss = nll_of(policy, batches)(batches[0])
        loss.backward()
        results.append((loss.item(), torch.cat([p.grad.float().flatten() for _, p in policy.trainable() if p.grad is not None])))
    (loss, gradient), (other_loss, other_gradient) = results
    assert other_loss == pytest.approx(loss, rel=1e-3)
    assert (gradient - other_gradient).norm() < 0.02 * gradient.norm()


# LoRA in every stage (RL, critic and reward model: in their own files) --------------------------------------------------


@pytest.mark.parametrize("stage", ["sft", "dpo"])
def test_lora_is_saved_as_a_model_that_loads(tmp_path, tiny_model, rows_file, pairs_file, stage):
    settings = {"model": {"dtype": "float32", "lora": {"rank": 4}}, "run": {"max_steps": 2}, "optim": {"lr": 1e-2}}
    if stage == "sft":
        tree, train = sft_recipe(tiny_model, rows_file, tmp_path / "run", **settings), train_sft
    else:
        tree, train = pair_recipe(tiny_model, pairs_file, tmp_path / "run", **settings), train_dpo
    folder = train(write_recipe(tmp_path / "lora.yaml", {"stage": stage, **tree}))
    _, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    before, after = load_file(tiny_model / "model.safetensors"), load_file(folder / "model.safetensors")
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    assert changed
    assert all(name.endswith("_proj.weight") for name in changed)
