"""The trainer: learning rates, AdamW, master weights, skipped steps, saved models, refused models."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from plaudit.data.pack import micro_batches, pack
from plaudit.data.templates import load_template, load_tokenizer
from plaudit.errors import PlauditError, RecipeError, TrainingStopped
from plaudit.models import attention, logprobs
from plaudit.models.residual import keep_residual_fp32
from plaudit.models.trainable import TrainableModel, load_policy
from plaudit.models.verify import verify_packed
from plaudit.recipe import LoraSettings, ModelSettings, OptimSettings
from plaudit.train.optimiser import Optimiser
from plaudit.train.saved_state import given_tensors
from plaudit.train.schedule import lr_at
from plaudit.types import Batch
from support.examples import make_examples
from support.training import assert_same_bits, load, make_trainer, nll_of, rows_of, snapshot

CPU = torch.device("cpu")
TRAINED = {
    "fp32": {"dtype": "float32"},
    "bf16": {"dtype": "bfloat16"},
    "lora": {"dtype": "float32", "lora": LoraSettings(rank=8, alpha=16.0)},
    "lora on bf16": {"dtype": "bfloat16", "lora": LoraSettings(rank=8, alpha=16.0)},
}


def with_weights(model: Path, folder: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """A copy of the model folder with changed weights."""
    copy = shutil.copytree(model, folder / "model")
    weights = load_file(copy / "model.safetensors")
    change(weights)
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def with_active_adapters(policy: TrainableModel) -> TrainableModel:
    """Adapters start with B = 0 and have no effect; here they have one."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in policy.trainable():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    return policy


# Schedules -----------------------------------------------------------------------------------------------------------


def lr_shares(total_steps: int, **optim) -> list[float]:
    """The learning rate of every step as a share of the peak."""
    settings = OptimSettings(lr=2e-4, **optim)
    return [lr_at(step, total_steps, settings) / 2e-4 for step in range(total_steps)]


COS = [(1 + math.cos(math.pi * t)) / 2 for t in (0, 1 / 4, 1 / 2, 3 / 4)]  # 1, 0.853…, 0.5, 0.146…


@pytest.mark.parametrize(
    ("total_steps", "optim", "expected"),
    [
        (4, {"schedule": "constant"}, [1, 1, 1, 1]),
        (4, {"schedule": "linear"}, [1, 0.75, 0.5, 0.25]),
        (4, {"schedule": "cosine"}, COS),
        (4, {"schedule": "linear", "min_lr_ratio": 0.2}, [1, 0.8, 0.6, 0.4]),
        (4, {"schedule": "cosine", "min_lr_ratio": 0.5}, [0.5 + c / 2 for c in COS]),
        (4, {"schedule": "linear", "min_lr_ratio": 1.0}, [1, 1, 1, 1]),
        # The first step of a warm-up is already above 0; its last one is at the peak, and so is the step after it.
        (6, {"schedule": "constant", "warmup_steps": 2}, [0.5, 1, 1, 1, 1, 1]),
        (6, {"schedule": "linear", "warmup_steps": 2}, [0.5, 1, 1, 0.75, 0.5, 0.25]),
        (6, {"schedule": "cosine", "warmup_steps": 2}, [0.5, 1, *COS]),
        (6, {"schedule": "linear", "warmup_ratio": 1 / 3}, [0.5, 1, 1, 0.75, 0.5, 0.25]),
        (5, {"schedule": "constant", "warmup_ratio": 0.5}, [1 / 3, 2 / 3, 1, 1, 1]),
        (4, {"schedule": "cosine", "warmup_steps": 0}, COS),
        # wsd falls over the last decay_ratio of all steps.
        (10, {"schedule": "wsd", "decay_ratio": 0.4}, [1, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25]),
        (10, {"schedule": "wsd", "decay_ratio": 0.2, "warmup_steps": 2}, [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 0.5]),
        (5, {"schedule": "wsd", "decay_ratio": 0.8, "min_lr_ratio": 0.2}, [1, 1, 0.8, 0.6, 0.4]),
        (3, {"schedule": "wsd", "decay_ratio": 0.0}, [1, 1, 1]),
        # A warm-up longer than the run never reaches the peak; one as long as the run reaches it at the last step.
        (3, {"schedule": "cosine", "warmup_steps": 10}, [0.1, 0.2, 0.3]),
        (4, {"schedule": "linear", "warmup_ratio": 1.0}, [0.25, 0.5, 0.75, 1]),
        *((1, {"schedule": schedule}, [1]) for schedule in ("constant", "linear", "cosine", "wsd")),
        (1, {"schedule": "cosine", "warmup_steps": 4}, [0.25]),
    ],
)
def test_schedule(total_steps, optim, expected):
    assert lr_shares(total_steps, **optim) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("ratio", "total_steps", "steps"), [(0.07, 100, 7), (0.1, 70, 7), (0.03, 1000, 30), (0.03, 50, 2)])
def test_ratios_are_not_affected_by_float_rounding(ratio, total_steps, steps):
    """0.07 · 100 is 7.000000000000001 in floats, which must not add an eighth step. Real fractions are rounded up."""
    warm = lr_shares(total_steps, schedule="constant", warmup_ratio=ratio)
    assert sum(share < 1 for share in warm) == steps - 1
    decaying = lr_shares(total_steps, schedule="wsd", decay_ratio=ratio)
    assert sum(share < 1 for share in decaying) == steps - 1
    assert [warm[0], decaying[-1]] == pytest.approx([1 / steps, 1 / steps])


# AdamW ---------------------------------------------------------------------------------------------------------------


def test_adamw_by_hand():
    """Three steps of the formula in float64; the matrix is decayed, the bias is not."""
    torch.manual_seed(0)
    parameters = {"matrix": nn.Parameter(torch.randn(3, 4)), "bias": nn.Parameter(torch.randn(4))}
    expected = {name: p.detach().double() for name, p in parameters.items()}
    optimiser = Optimiser(
        parameters.items(), OptimSettings(lr=1.0, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1, max_grad_norm=None)
    )
    mean = {name: torch.zeros_like(w) for name, w in expected.items()}
    square = {name: torch.zeros_like(w) for name, w in expected.items()}
    for k, lr in enumerate((0.1, 0.05, 0.02), start=1):
        for name, parameter in parameters.items():
            parameter.grad = torch.randn_like(parameter)
            g, decay = parameter.grad.double(), 0.1 if name == "matrix" else 0.0
            mean[name] = 0.8 * mean[name] + 0.2 * g
            square[name] = 0.95 * square[name] + 0.05 * g * g
            m, v = mean[name] / (1 - 0.8**k), square[name] / (1 - 0.95**k)
            expected[name] = expected[name] * (1 - lr * decay) - lr * m / (v.sqrt() + 1e-3)
        optimiser.step(lr)
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter.detach().double(), expected[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weight_decay_applies_only_to_matrices(tiny_models, dtype):
    """With a gradient of 0 a step is only the decay: 1 − lr · weight_decay = 0.5. Qwen2 has biases and norms."""
    policy = load(tiny_models["qwen2"], dtype=dtype)
    trainer = make_trainer(policy, lr=0.5, weight_decay=1.0)
    before = {name: p.detach().clone() for name, p in policy.trainable()}
    trainer.update([pack(rows_of(policy))], lambda batch: 0.0 * sum(p.float().sum() for _, p in policy.trainable()))
    for name, parameter in policy.trainable():
        undecayed = name.endswith("bias") or "norm" in name
        assert torch.equal(parameter, before[name] * (1.0 if undecayed else 0.5)), name


def test_clipping():
    """Gradients 3 and 4 have the norm 5; clipped to 1 they are 0.6 and 0.8."""

    def clipped(max_grad_norm: float | None) -> tuple[float, list[float]]:
        a, b = nn.Parameter(torch.zeros(1, 1)), nn.Parameter(torch.zeros(1))
        a.grad, b.grad = torch.tensor([[3.0]]), torch.tensor([4.0])
        norm = Optimiser([("a", a), ("b", b)], OptimSettings(max_grad_norm=max_grad_norm)).clip()
        return norm.item(), [a.grad.item(), b.grad.item()]

    assert clipped(1.0) == (5.0, pytest.approx([0.6, 0.8], rel=1e-6))
    assert clipped(10.0) == (5.0, [3.0, 4.0])
    assert clipped(None) == (5.0, [3.0, 4.0])


def test_the_reported_norm_is_the_one_before_clipping(tiny_model):
    policy = load(tiny_model)
    batches = [pack(rows_of(policy))]
    norms = [
        make_trainer(policy, lr=1e-30, max_grad_norm=limit).update(batches, nll_of(policy, batches))["grad_norm"]
        for limit in (None, 0.01)
    ]
    assert norms[0] == norms[1] > 0.01


# bf16 with fp32 masters ----------------------------------------------------------------------------------------------


def test_model_weights_are_the_masters_in_bf16(tiny_models):
    policy = load(tiny_models["qwen3"], dtype="bfloat16")
    trainer, batches = make_trainer(policy), micro_batches(rows_of(policy), 64)
    before = snapshot(trainer)
    for _ in range(3):
        trainer.update(batches, nll_of(policy, batches))
    state = trainer.optimiser.state()
    for name, parameter in policy.trainable():
        assert parameter.dtype == torch.bfloat16
        assert state[f"weight/{name}"].dtype == torch.float32
        assert torch.equal(parameter, state[f"weight/{name}"].bfloat16()), name
        assert not torch.equal(state[f"weight/{name}"], before[f"weight/{name}"]), name


def test_small_updates_add_up():
    """Below 1, bf16 values are 1/256 apart: a step of 1e-4 is rounded away, but twenty of them in the fp32 master are not."""
    parameter = nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))
    assert torch.equal(parameter - 1e-4, parameter)
    optimiser = Optimiser([("w", parameter)], OptimSettings(lr=1e-4, max_grad_norm=None))
    values = []
    for _ in range(25):
        parameter.sum().backward()
        optimiser.step(1e-4)
        optimiser.gradients.clear()
        values.append(parameter.flatten()[0].item())
    # The twentieth step of 1e-4 passes 1 − 1/512 = 0.998046875, where bf16 rounds down to its next value.
    assert values == [1.0] * 19 + [1 - 1 / 256] * 6
    assert optimiser.state()["weight/w"].flatten()[0].item() == pytest.approx(1 - 25e-4, rel=1e-6)


def test_gradients_of_micro_batches_add_up_in_fp32():
    """1 plus 256 times 1/512 is 1.5; in bf16 each of those additions would be rounded away."""
    parameter = nn.Parameter(torch.zeros(2, 2, dtype=torch.bfloat16))
    optimiser = Optimiser([("w", parameter)], OptimSettings(max_grad_norm=None))
    for slope in (1.0, *[1 / 512] * 256):
        (parameter * slope).sum().backward()
    assert optimiser.clip().item() == pytest.approx(2 * 1.5)  # the norm of four times 1.5
    assert parameter.grad is None, "no second copy in bf16"


@pytest.mark.parametrize("how", TRAINED)
def test_weights_are_updated_in_place(tiny_model, how):
    policy = load(tiny_model, **TRAINED[how])
    trainer, batches = make_trainer(policy), micro_batches(rows_of(policy), 64)
    addresses = {name: p.data_ptr() for name, p in policy.model.named_parameters()}
    before = snapshot(trainer)
    for _ in range(2):
        trainer.update(batches, nll_of(policy, batches))
    assert {name: p.data_ptr() for name, p in policy.model.named_parameters()} == addresses
    changed = {name for name, p in policy.model.named_parameters() if not torch.equal(p, before[f"model/{name}"])}
    if "lora" in how:
        assert changed == {name for name, _ in policy.trainable()}
    else:
        assert changed


# Non-finite steps ----------------------------------------------------------------------------------------------------


def infinite_loss(loss: Tensor, policy: TrainableModel) -> Tensor:
    return loss + math.inf


def nan_loss(loss: Tensor, policy: TrainableModel) -> Tensor:
    return loss * math.nan


def nan_gradient(loss: Tensor, policy: TrainableModel) -> Tensor:
    """√0 is finite, but its gradient is not."""
    return loss + (0.0 * sum(p.float().sum() for _, p in policy.trainable())).sqrt()


@pytest.mark.grid(3)
@pytest.mark.parametrize("broken", [infinite_loss, nan_loss, nan_gradient])
@pytest.mark.parametrize("how", ["fp32", "bf16", "lora"])
def test_a_non_finite_step_is_skipped(tiny_model, how, broken):
    policy = load(tiny_model, **TRAINED[how])
    trainer, batches = make_trainer(policy), [*micro_batches(rows_of(policy), 64)]
    assert len(batches) > 1
    loss = nll_of(policy, batches)
    trainer.update(batches, loss)
    before = snapshot(trainer)
    assert any(name.startswith("exp_avg_sq/") for name in before)

    metrics = trainer.update(batches, lambda batch: broken(loss(batch), policy) if batch is batches[-1] else loss(batch))
    assert_same_bits(before, snapshot(trainer))
    assert metrics["skipped_steps"] == trainer.skipped_steps == 1
    assert trainer.updates == 2, "a skipped step counts: the schedule continues"

    after = trainer.update(batches, loss)
    assert math.isfinite(after["loss"])
    assert math.isfinite(after["grad_norm"])
    assert after["skipped_steps"] == 1
    for name, tensor in snapshot(trainer).items():
        assert tensor.isfinite().all(), name


def test_a_skipped_step_does_not_affect_the_next_one(tiny_model):
    """Two runs, one with a broken step in between: the step after it is the same to the last bit."""
    states = []
    for broken in (False, True):
        policy = load(tiny_model)
        trainer, batches = make_trainer(policy), micro_batches(rows_of(policy), 64)
        loss = nll_of(policy, batches)
        trainer.update(batches, loss)
        if broken:
            trainer.update(batches, lambda batch, loss=loss: loss(batch) * math.nan)
        trainer.update(batches, loss)
        states.append(snapshot(trainer))
    assert_same_bits(*states)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_interrupted_update_does_not_affect_the_next_one(tiny_model, dtype):
    interrupted, other = load(tiny_model, dtype=dtype), load(tiny_model, dtype=dtype)
    trainers = make_trainer(interrupted), make_trainer(other)
    batches = micro_batches(rows_of(other), budget=60)
    assert len(batches) > 1
    whole, seen = nll_of(interrupted, batches), []

    def raises_at_the_second(batch: Batch) -> Tensor:
        seen.append(batch)
        if len(seen) == 2:
            raise KeyboardInterrupt
        return whole(batch)

    with pytest.raises(KeyboardInterrupt):
        trainers[0].update(batches, raises_at_the_second)
    for trainer, policy in zip(trainers, (interrupted, other), strict=True):
        trainer.update(batches, nll_of(policy, batches))
    assert_same_bits(snapshot(trainers[0]), snapshot(trainers[1]))


@pytest.mark.parametrize("method", ["clip", "step"])
def test_nor_does_one_that_ends_after_its_passes(tiny_model, method, monkeypatch):
    """For example without memory for the optimiser's state."""
    interrupted, other = load(tiny_model), load(tiny_model)
    trainers = make_trainer(interrupted), make_trainer(other)
    batches = [pack(rows_of(other))]

    def raises(*given: object) -> None:
        raise MemoryError

    loss = nll_of(interrupted, batches)
    with monkeypatch.context() as patch:
        patch.setattr(trainers[0].optimiser, method, raises)
        with pytest.raises(MemoryError):
            trainers[0].update(batches, loss)
    for trainer, policy in zip(trainers, (interrupted, other), strict=True):
        trainer.update(batches, nll_of(policy, batches))
    assert_same_bits(snapshot(trainers[0]), snapshot(trainers[1]))


def test_too_many_skipped_steps_stop_the_run(tiny_model):
    policy = load(tiny_model)
    trainer, batches = make_trainer(policy, max_skipped_steps=2), [pack(rows_of(policy))]
    loss = nll_of(policy, batches)
    before = snapshot(trainer)
    for _ in range(2):
        trainer.update(batches, lambda batch: loss(batch) * math.nan)
    with pytest.raises(TrainingStopped, match=r"^update 3: .*not finite \(loss nan.*max_skipped_steps is 2.*lower optim\.lr"):
        trainer.update(batches, lambda batch: loss(batch) * math.nan)
    assert_same_bits(before, snapshot(trainer))


# Learning ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", TRAINED)
@pytest.mark.grid(1)
def test_it_memorises_a_few_rows(tiny_model, tmp_path, how):
    """From about log 320 ≈ 5.8, a random model's loss, to almost nothing.

    The random head is scaled up ten times: adapters do not train it, and with weights as small as a new model's no hidden state
    could predict a token with confidence.
    """
    folder = with_weights(tiny_model, tmp_path, lambda weights: weights["lm_head.weight"].mul_(10))
    policy = load(folder, **TRAINED[how])
    trainer = make_trainer(policy, total_steps=30, lr=1e-2, schedule="cosine", warmup_steps=3)
    batches = micro_batches(rows_of(policy, 2), 64)
    losses = [trainer.update(batches, nll_of(policy, batches))["loss"] for _ in range(30)]
    assert losses[0] > 5.5
    assert losses[-1] < 0.05


def test_dropout_is_keyed_by_the_step(tiny_model):
    """A repeated step draws the same masks, whatever was drawn in between; another step draws others."""
    policy = with_active_adapters(load(tiny_model, lora=LoraSettings(rank=8, alpha=64.0, dropout=0.5)))
    trainer, batches = make_trainer(policy), micro_batches(rows_of(policy), 64)
    loss = nll_of(policy, batches)
    trainer.update(batches, loss)
    tensors = {name: tensor.clone() for name, tensor in trainer.optimiser.state().items()}

    def again(step: int) -> tuple[float, dict[str, Tensor]]:
        torch.rand(7)
        trainer.updates = step
        trainer.optimiser.load_state(given_tensors(tensors))
        return trainer.update(batches, loss)["loss"], snapshot(trainer)

    first, second, other = again(1), again(1), again(2)
    assert first[0] == second[0] != other[0]
    assert_same_bits(first[1], second[1])


# Saving --------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def logits_of(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    model.eval()
    model.set_attn_implementation("eager")
    return model(input_ids=tokens, use_cache=False).logits


@pytest.fixture
def base_model(tiny_models, tmp_path) -> Callable[[str], Path]:
    """A model folder like a base model's: its end-of-text token is not its end-of-turn token."""

    def make(kind: str) -> Path:
        folder = shutil.copytree(tiny_models[kind], tmp_path / f"base-{kind}")
        config = json.loads((folder / "generation_config.json").read_text())
        (folder / "generation_config.json").write_text(json.dumps({**config, "eos_token_id": 0}))
        return folder

    return make


@pytest.mark.parametrize("kind", ["llama", "qwen2"], ids=["untied head", "tied head"])
@pytest.mark.parametrize("how", ["fp32", "bf16", "lora"])
def test_a_saved_model_is_a_plain_transformers_model(base_model, tmp_path, kind, how):
    policy = with_active_adapters(load(base_model(kind), **TRAINED[how]))
    batches = [pack(rows_of(policy))]
    make_trainer(policy).update(batches, nll_of(policy, batches))
    policy.save(tmp_path / "saved")

    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    keep_residual_fp32(saved)  # as in ours: the files do not record it
    ours, theirs = (logits_of(model, batches[0].tokens_T[None]) for model in (policy.model, saved))
    assert saved.dtype == policy.model.dtype
    if how == "lora":  # merged W + ΔW, instead of two products
        assert (ours - theirs).abs().max() < 1e-5
        with_adapters_off = AutoModelForCausalLM.from_pretrained(policy.model.name_or_path)
        assert (ours - logits_of(with_adapters_off, batches[0].tokens_T[None])).abs().max() > 1e-2
    else:
        assert torch.equal(ours, theirs)
    base_names = set(AutoModelForCausalLM.from_pretrained(policy.model.name_or_path).state_dict())
    assert set(saved.state_dict()) == base_names

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert tokenizer.chat_template == policy.template.text
    messages = [{"role": "user", "content": "What is 1 + 2?"}]
    as_prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert as_prompt == policy.template.prompt_tokens(messages)
    assert saved.generation_config.eos_token_id == [0, tokenizer.convert_tokens_to_ids("<|im_end|>")]
    assert "plaudit" not in (tmp_path / "saved" / "config.json").read_text()
    assert list((tmp_path / "saved").glob("*.bin")) == []


def test_saving_does_not_change_the_trained_weights(tiny_model, tmp_path):
    policy = with_active_adapters(load(tiny_model, lora=LoraSettings(rank=4)))
    trainer, batches = make_trainer(policy), [pack(rows_of(policy))]
    before = snapshot(trainer)
    policy.save(tmp_path / "saved")
    assert_same_bits(before, snapshot(trainer))
    trainer.update(batches, nll_of(policy, batches))


def test_an_adapter_saved_alone_loads_in_peft(tiny_model, tmp_path):
    from peft import PeftModel

    policy = with_active_adapters(load(tiny_model, lora=LoraSettings(rank=4, merge_on_save=False)))
    policy.save(tmp_path / "saved")
    assert (tmp_path / "saved" / "adapter_model.safetensors").exists()
    assert not (tmp_path / "saved" / "model.safetensors").exists()
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").chat_template == policy.template.text

    tokens = pack(rows_of(policy)).tokens_T[None]
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    adapted = PeftModel.from_pretrained(base, str(tmp_path / "saved"))
    torch.testing.assert_close(logits_of(policy.model, tokens), logits_of(adapted.get_base_model(), tokens), rtol=0, atol=1e-5)


# Refused models ------------------------------------------------------------------------------------------------------


def test_pickled_weights_are_refused(tiny_model, tmp_path):
    folder = shutil.copytree(tiny_model, tmp_path / "pickled")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    AutoModelForCausalLM.from_pretrained(folder)  # transformers would load it
    with pytest.raises(RecipeError, match="its weights are pickled"):
        load(folder)


def test_incomplete_weights_are_refused(tiny_model, tmp_path):
    """transformers would initialise them at random and only log a warning."""
    with pytest.raises(RecipeError, match=r"weights are missing.*: lm_head\.weight$"):
        load(with_weights(tiny_model, tmp_path / "1", lambda weights: weights.pop("lm_head.weight")))
    with pytest.raises(RecipeError, match=r"of another shape.*: lm_head\.weight$"):
        load(with_weights(tiny_model, tmp_path / "2", lambda weights: weights.update({"lm_head.weight": torch.zeros(5, 64)})))
    half = with_weights(tiny_model, tmp_path / "3", lambda weights: None) / "model.safetensors"
    half.write_bytes(half.read_bytes()[:100_000])
    with pytest.raises(RecipeError, match="no model could be loaded from"):
        load(half.parent)


@pytest.mark.parametrize(("kind", "targets"), [("llama", ".*head"), ("qwen2", ("embed_tokens", "q_proj"))])
def test_adapters_on_the_head_are_refused(tiny_models, kind, targets):
    with pytest.raises(RecipeError, match=r"model\.lora\.targets: the output head"):
        load(tiny_models[kind], lora=LoraSettings(targets=targets))


SMALL = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def small_model(kind: str, **settings) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SMALL, **settings)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME)


@pytest.mark.parametrize(
    ("kind", "settings", "named"),
    [
        ("granite", {"logits_scaling": 8.0}, "logits_scaling"),
        ("gemma2", {}, "softcapping"),
        ("gemma2", {"attn_logit_softcapping": None}, "final_logit_softcapping"),
        ("cohere", {"logit_scale": 0.0625}, "logit_scale"),
    ],
)
def test_models_with_scaled_or_capped_logits_are_refused(tiny_model, tmp_path, kind, settings, named):
    folder = tmp_path / kind
    small_model(kind, **settings).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    with pytest.raises(RecipeError, match=named):
        load(folder)


def test_the_probe_accepts_an_equivalent_model(tiny_models):
    """The probe leaves attention, training mode and weights unchanged."""
    for training in (False, True):
        model = small_model("granite", logits_scaling=1.0).train(training)
        before = {name: p.clone() for name, p in model.named_parameters()}
        verify_packed(model)
        assert model.training == training
        assert model.config._attn_implementation == attention.NAME
        assert_same_bits(before, dict(model.named_parameters()))


def test_the_probe_finds_scaled_logits():
    with pytest.raises(RecipeError, match="GraniteForCausalLM computes other log-probs on packed batches"):
        verify_packed(small_model("granite", logits_scaling=8.0))


def test_the_probe_finds_capped_attention():
    with pytest.raises(RecipeError, match="Gemma2Attention uses softcap"):
        verify_packed(small_model("gemma2", final_logit_softcapping=None))


def test_the_probe_finds_a_model_that_loses_sequence_starts():
    model = small_model("llama")
    for layer in model.model.layers:
        attend = layer.self_attn.forward
        layer.self_attn.forward = lambda *args, attend=attend, **kwargs: attend(
            *args, **{name: value for name, value in kwargs.items() if not name.startswith(("cu_seq", "max_length"))}
        )
    with pytest.raises(RecipeError, match="LlamaAttention does not pass sequence starts"):
        verify_packed(model)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
def test_the_probe_finds_a_model_whose_sequences_see_each_other(tiny_models, monkeypatch, kind):
    original = attention.packed_arguments

    def one_sequence(batch: Batch) -> dict:
        starts = torch.tensor([0, batch.num_tokens], dtype=torch.int32)
        bounds = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}
        return {**original(batch), **bounds, "max_length_q": batch.num_tokens, "max_length_k": batch.num_tokens}

    monkeypatch.setattr(attention, "packed_arguments", one_sequence)
    with pytest.raises(RecipeError, match="computes other log-probs on packed batches"):
        load(tiny_models[kind])


def test_the_probe_finds_a_model_that_does_not_see_shared_tokens(tiny_models, monkeypatch):
    original = attention.packed_arguments

    def own_tokens_only(batch: Batch) -> dict:
        arguments = {name: value for name, value in original(batch).items() if name != "shared_prompts"}
        return {**arguments, "cu_seq_lens_k": batch.starts_S1, "max_length_k": batch.longest}

    monkeypatch.setattr(attention, "packed_arguments", own_tokens_only)
    with pytest.raises(RecipeError, match="computes other hidden states where sequences share their first tokens"):
        load(tiny_models["llama"])


def test_a_model_whose_attention_was_replaced_is_not_trained(tiny_models):
    """As by an engine that builds a model of its own from the policy's config."""
    model = load(tiny_models["llama"]).model
    AutoModelForCausalLM.from_config(model.config, attn_implementation="sdpa")
    with pytest.raises(PlauditError, match=r"its attention was replaced by sdpa .* must copy the config"):
        logprobs.target_logprobs(model, pack(make_examples((5, 9))))


def test_a_generation_config_that_cannot_be_saved_is_fixed(tmp_path, tiny_model):
    """Published models set a temperature without do_sample; training must not fail on that at its first checkpoint."""
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    config = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**config, "do_sample": False, "temperature": 0.6, "top_p": 0.9}))
    template = load_template(load_tokenizer(str(folder)), None)
    load_policy(ModelSettings(path=str(folder)), template, torch.device("cpu")).save(tmp_path / "saved")
    assert not json.loads((tmp_path / "saved/generation_config.json").read_text()).get("do_sample")


def test_positions_that_depend_on_the_batch_are_refused(tmp_path, tiny_model):
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {**config["rope_parameters"], "rope_type": "dynamic", "factor": 2.0}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(RecipeError, match="dynamic position embeddings depend on what else is in the batch"):
        load_policy(ModelSettings(path=str(folder)), load_template(load_tokenizer(str(folder)), None), torch.device("cpu"))


def test_a_deep_model_with_large_logits_in_bf16_is_not_refused(tmp_path, rows_file):
    """On such a model two correct ways to compute log-probs differ a lot, so the tolerance depends on the model."""
    from plaudit.prepare.tiny_model import make_tiny_model

    make_tiny_model([rows_file], tmp_path / "deep", kind="qwen2", hidden_size=64, layers=24, vocabulary=320)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "deep", dtype=torch.bfloat16, attn_implementation=attention.NAME)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(40)
    verify_packed(model)
