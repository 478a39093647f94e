"""LoRA with merged weights: rounding, sampling, saving. Forward and backward passes: tests/rollout/native/test_kernels.py."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from plaudit.data.pack import pack
from plaudit.data.templates import load_template, load_tokenizer
from plaudit.models.folder import read_config
from plaudit.models.logprobs import target_logprobs
from plaudit.models.lora import iter_merged_weights
from plaudit.models.merged import drop_merged, has_merged, merge_into
from plaudit.models.trainable import TrainableModel, load_policy
from plaudit.recipe import LoraSettings, ModelSettings
from plaudit.rollout.engine import Request, Sampling, Weights
from plaudit.rollout.native.decoder import FusedDecoder
from plaudit.rollout.native.engine import NativeEngine
from plaudit.train import optimiser
from plaudit.train.saved_state import given_tensors
from plaudit.types import Example
from support.training import make_trainer, nll_of, rows_of

CPU = torch.device("cpu")


def merged(update: float, rows: int = 96, columns: int = 128) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A bf16 weight, its update in fp32, and the weight with it."""
    generator = torch.Generator().manual_seed(0)
    base = (0.03 * torch.randn(rows, columns, generator=generator)).bfloat16()
    a, b = torch.randn(4, columns, generator=generator), update * torch.randn(rows, 4, generator=generator)
    out = torch.empty_like(base)
    merge_into(out, base, a, b, 2.0)
    return base, 2.0 * b @ a, out


@pytest.mark.parametrize("update", [1e-7, 1e-6, 1e-5, 1e-4, 1e-2])
def test_updates_smaller_than_the_spacing_of_bf16_are_kept_in_the_mean(update):
    base, delta, out = merged(update, rows=512, columns=1024)
    change = out.float() - base.float()
    slope = (change * delta).sum() / (delta * delta).sum()
    # Each element is one of its two neighbours, so what is lost has a mean of 0 and at most a spacing's size.
    spacing = 2.0**-7 * (base.float() + delta).abs()
    noise = (delta.abs() * spacing * delta * delta).sum().sqrt() / (delta * delta).sum()
    assert abs(slope - 1) < 4 * noise + 1e-3
    assert ((change - delta).abs() <= spacing).all()
    if update <= 1e-6:
        nearest = (base.float() + delta).bfloat16().float() - base.float()
        assert (nearest * delta).sum() / (delta * delta).sum() < 0.1, "to nearest, nearly all of it would be lost"


def test_a_weight_without_an_update_stays_as_it_is_and_merging_repeats():
    base, _, out = merged(0.0)
    assert torch.equal(out, base)
    assert torch.equal(merged(1e-5)[2], merged(1e-5)[2])


def test_fp32_is_not_rounded():
    generator = torch.Generator().manual_seed(0)
    base, a, b = (torch.randn(shape, generator=generator) for shape in ((8, 6), (2, 6), (8, 2)))
    out = torch.empty_like(base)
    merge_into(out, base, a, b, 0.5)
    torch.testing.assert_close(out, base + 0.5 * b @ a)


def load(folder, dtype="float32", **lora) -> TrainableModel:
    return load_policy(
        ModelSettings(path=str(folder), dtype=dtype, lora=LoraSettings(rank=4, **lora)),
        load_template(load_tokenizer(str(folder)), None),
        CPU,
    )


def shift(policy: TrainableModel, seed: int) -> None:
    with torch.no_grad():
        for _, parameter in policy.trainable():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))


def test_sampling_follows_the_adapters(tiny_models):
    """The engine runs its fused decoder; its log-probs are the trainer's, also after an update."""
    policy = load(tiny_models["qwen2"])
    engine = NativeEngine(policy.model, None)
    assert isinstance(engine.forward.decoder, FusedDecoder)
    prompt, found = np.array([5, 9, 200, 31]), []
    for step in range(3):
        (sample,) = engine.generate([Request("p", prompt, 1)], Sampling(12, seed=0, step=0))
        tokens = np.concatenate([prompt, sample.tokens]).astype(np.int32)
        batch = pack([Example(tokens, np.arange(len(tokens)) >= len(prompt))], CPU)
        with torch.no_grad():
            expected = target_logprobs(policy.model.eval(), batch).logprobs_N
        np.testing.assert_allclose(sample.sampler_logprobs, expected.numpy(), atol=1e-4)
        found.append(sample.sampler_logprobs[0])
        shift(policy, step)
        engine.sync(step + 1, Weights(policy.model))
    assert len(set(found)) == 3, "the adapters matter"


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "v_proj", "down_proj")])
def test_log_probs_and_gradients_are_those_of_peft(tiny_models, targets):
    """Also where some of the linear layers over an input have no adapter."""
    policy = load(tiny_models["qwen2"], targets=targets)
    assert has_merged(policy.model)
    shift(policy, 0)
    batch, found = pack([Example(np.arange(5, 25), np.arange(20) > 3), Example(np.arange(40, 47), np.arange(7) > 1)], CPU), []
    for _ in range(2):
        logprobs_N = target_logprobs(policy.model, batch).logprobs_N
        logprobs_N.square().mean().backward()
        found.append((logprobs_N.detach(), {name: parameter.grad for name, parameter in policy.trainable()}))
        policy.model.zero_grad()
        drop_merged(policy.model)
    (ours, our_grads), (theirs, their_grads) = found
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    assert our_grads.keys() == their_grads.keys()
    for name, expected in their_grads.items():
        assert expected.norm() > 0, name
        assert (our_grads[name] - expected).norm() < 1e-4 * expected.norm(), name


def test_peft_computes_adapters_of_other_layers(tiny_models):
    """The engine's own decoder does not know an adapter of the embeddings."""
    folder = next(folder for folder in tiny_models.values() if not read_config(str(folder)).tie_word_embeddings)
    policy = load(folder, targets=("q_proj", "embed_tokens"))
    assert not has_merged(policy.model)
    assert not isinstance(NativeEngine(policy.model, None).forward.decoder, FusedDecoder)


def test_merged_weights_are_saved_after_every_change(tiny_models):
    policy = load(tiny_models["llama"])
    for seed in range(2):
        shift(policy, seed)
        found = dict(iter_merged_weights(policy.model))
        plain = load(tiny_models["llama"], dropout=0.1)
        assert not has_merged(plain.model), "dropout is peft's"
        for before in range(seed + 1):
            shift(plain, before)
        for name, expected in iter_merged_weights(plain.model):
            torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-6)


def merged_copies(policy: TrainableModel) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in iter_merged_weights(policy.model) if name.endswith("proj.weight")}


def assert_merged(policy: TrainableModel) -> None:
    """Merged weights are W + s B A of the adapters as they are now; in bf16, within one spacing."""
    from peft.tuners.lora import Linear

    layers = [layer for layer in policy.model.modules() if isinstance(layer, Linear)]
    for layer, found in zip(layers, merged_copies(policy).values(), strict=True):
        exact = layer.base_layer.weight.float() + layer.get_delta_weight("default").float()
        torch.testing.assert_close(found.float(), exact, rtol=2.0**-7 if found.dtype == torch.bfloat16 else 1e-5, atol=1e-6)


@pytest.mark.parametrize(("dtype", "placement"), [("float32", "resident"), ("bfloat16", "resident"), ("bfloat16", "offload")])
def test_merged_weights_follow_every_update_and_a_resume(tiny_models, monkeypatch, dtype, placement):
    """torch's fused AdamW changes adapters without counting the change, by which a merged weight knows that it is out of date."""
    monkeypatch.setattr(optimiser, "has_device_memory", lambda device: True)  # else nothing is offloaded
    policy = load(tiny_models["llama"], dtype)
    trainer, batches = make_trainer(policy, lr=1e-2, placement=placement), [pack(rows_of(policy))]
    seen = [merged_copies(policy)]
    for _ in range(3):
        trainer.update(batches, nll_of(policy, batches))
        assert_merged(policy)
        seen.append(merged_copies(policy))
        assert not any(torch.equal(weight, seen[-2][name]) for name, weight in seen[-1].items())

    resumed = load(tiny_models["llama"], dtype)
    resumed_trainer = make_trainer(resumed)
    assert all(torch.equal(weight, seen[0][name]) for name, weight in merged_copies(resumed).items())
    resumed_trainer.optimiser.load_state(given_tensors(trainer.optimiser.state()))
    found = merged_copies(resumed)
    assert all(torch.equal(weight, found[name]) for name, weight in seen[-1].items()), "to the bit: what was rounded up is again"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_saved_models_compute_what_was_trained(tiny_models, tmp_path, dtype):
    """As a complete model in transformers, and as an adapter in peft. The complete model has the merged weights, to the bit; the
    adapter on the base is what they are rounded from."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    policy = load(tiny_models["qwen2"], dtype)
    shift(policy, 0)
    assert policy.lora is not None
    policy.save(tmp_path / "merged")
    policy.lora = policy.lora.model_copy(update={"merge_on_save": False})
    policy.save(tmp_path / "adapter")
    saved = load_file(tmp_path / "merged/model.safetensors")
    assert all(torch.equal(saved[name], weight) for name, weight in merged_copies(policy).items())

    tokens = np.array([5, 9, 200, 31, 7, 7, 60], dtype=np.int32)

    def logprobs(model) -> torch.Tensor:
        sequence = torch.from_numpy(tokens).long()
        return model(sequence[None]).logits[0, :-1].log_softmax(-1).gather(-1, sequence[1:, None])[:, 0]

    with torch.no_grad():
        merged = logprobs(AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32))
        base = AutoModelForCausalLM.from_pretrained(tiny_models["qwen2"], dtype=torch.float32)
        plain, adapted = logprobs(base), logprobs(PeftModel.from_pretrained(base, str(tmp_path / "adapter")))
        trained = target_logprobs(policy.model.eval(), pack([Example(tokens, np.arange(len(tokens)) >= 1)], CPU)).logprobs_N
    rounding = 1e-5 if dtype == "float32" else 0.02
    assert (adapted - plain).abs().max() > 10 * rounding, "the adapter matters"
    torch.testing.assert_close(merged, adapted, rtol=0, atol=rounding)
    torch.testing.assert_close(trained, adapted, rtol=0, atol=rounding)


def test_peft_computes_what_is_no_longer_merged(tiny_models):
    policy = load(tiny_models["llama"])
    shift(policy, 0)
    before = dict(iter_merged_weights(policy.model))
    drop_merged(policy.model)
    assert not has_merged(policy.model)
    assert not list(policy.model.get_decoder().layers[0].buffers(recurse=False))
    for name, weight in iter_merged_weights(policy.model):
        torch.testing.assert_close(before[name], weight, rtol=1e-5, atol=1e-6)
