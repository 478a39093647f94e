"""LoRA on a base in 8 or 4 bits: the numbers of bitsandbytes, and everything that merged weights are tested for."""

import hashlib
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from plaudit.data.pack import pack
from plaudit.data.templates import load_template, load_tokenizer
from plaudit.errors import RecipeError
from plaudit.inputs import load_checked
from plaudit.loops.merge import merge_adapter
from plaudit.lora_folder import read_lora_folder
from plaudit.models.classifier import load_classifier
from plaudit.models.logprobs import target_logprobs
from plaudit.models.lora import iter_base_weights, iter_merged_weights
from plaudit.models.memory import plan_memory
from plaudit.models.merged import drop_merged, has_merged
from plaudit.models.quantised import QuantisedLinear, Scratch, dequantise_into, quantise
from plaudit.models.trainable import TrainableModel, load_policy
from plaudit.models.weights import OffloadedModule
from plaudit.recipe import LoraSettings, ModelSettings
from plaudit.rollout.engine import Request, Sampling, Weights
from plaudit.rollout.native.decoder import FusedDecoder
from plaudit.rollout.native.engine import NativeEngine
from plaudit.rollout.native.forward import Forward
from plaudit.train.saved_state import given_tensors
from plaudit.types import Example
from support.recipes import rl_recipe, sft_recipe, write_recipe
from support.training import make_trainer, nll_of, rows_of

CPU = torch.device("cpu")


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()[:16]


def example_weight(dtype: torch.dtype) -> torch.Tensor:
    """[72, 40]: 45 blocks of various sizes, one of them 0."""
    k = torch.arange(72 * 40, dtype=torch.float64)
    weight = ((k * 0.6180339887).frac() - 0.5) * (0.01 + (k // 64 % 5) * 0.02)
    weight[640:704] = 0
    return weight.view(72, 40).to(dtype)


def dequantised(weight: torch.Tensor, bits) -> torch.Tensor:
    out = torch.empty_like(weight)
    dequantise_into(out, *quantise(weight, bits))
    return out


@pytest.mark.parametrize(
    ("dtype", "codes", "values"),
    [(torch.float32, "02335f340eba652b", "1475ec869368efff"), (torch.bfloat16, "b266b0216bfaaf64", "be6c7fe7fd148332")],
)
def test_four_bits_are_those_of_bitsandbytes(dtype, codes, values):
    """quantize_4bit and dequantize_4bit (NF4, blocks of 64) of bitsandbytes 0.50.2, to the bit."""
    weight = example_weight(dtype)
    found, scales = quantise(weight, 4)
    assert found.flatten()[:8].tolist() == [10, 46, 97, 195, 249, 29, 80, 179]
    assert digest(found) == codes
    assert torch.equal(scales, weight.view(-1, 64).float().abs().amax(1))
    out = dequantised(weight, 4)
    assert digest(out.float()) == values
    assert ((out.float() - weight.float()).norm() / weight.float().norm()).item() == pytest.approx(0.0927, abs=1e-4)


def test_eight_bits_are_those_of_bitsandbytes():
    """int8_vectorwise_quant of bitsandbytes 0.50.2, a block being a row of it; torchao's symmetric int8 has the same codes."""
    weight = example_weight(torch.float32)
    found, scales = quantise(weight, 8)
    assert found.flatten()[:8].tolist() == [-127, 30, -67, 90, -7, -104, 53, -44]
    assert digest(found) == "a9e666f672d4912e"
    # A block is at most half a step off: 1/254 of its largest element.
    error = (dequantised(weight, 8) - weight).view(-1, 64).abs().amax(1)
    assert (error <= scales * 0.5001).all()
    assert error.max() > 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("bits", [4, 8])
def test_a_gpu_quantises_as_a_cpu_does(bits):
    """What is trained on one and merged on the other is the same model."""
    weight = (torch.randn(512, 1024, generator=torch.Generator().manual_seed(0)) * 0.02).to(torch.bfloat16)
    for on_gpu, on_cpu in zip(quantise(weight.cuda(), bits), quantise(weight, bits), strict=True):
        assert torch.equal(on_gpu.cpu(), on_cpu)


@pytest.mark.parametrize("bits", [4, 8])
def test_any_shape_and_zeros(bits, monkeypatch):
    """A last block that is not full, blocks in several chunks, and 0 stays 0."""
    weight = torch.randn(7, 33, generator=torch.Generator().manual_seed(0))
    whole = dequantised(weight, bits)
    assert (whole - weight).norm() < (0.12 if bits == 4 else 0.01) * weight.norm()
    monkeypatch.setattr("plaudit.models.quantised.ELEMENTS_AT_ONCE", {"cpu": 64})
    assert torch.equal(dequantised(weight, bits), whole)
    assert not dequantised(torch.zeros(3, 5), bits).any()


@pytest.mark.parametrize("bits", [4, 8])
def test_twice_is_once(bits):
    """Dequantised weights have the same codes: what a merged save starts from can be quantised again without another loss."""
    once = dequantised(example_weight(torch.float32), bits)
    torch.testing.assert_close(dequantised(once, bits), once, rtol=1e-6, atol=0)


# Models --------------------------------------------------------------------------------------------------------------


def load(folder, bits: Any = 4, dtype: Any = "float32", **lora) -> TrainableModel:
    return load_policy(
        ModelSettings(path=str(folder), dtype=dtype, lora=LoraSettings(rank=4, base_bits=bits, **lora)),
        load_template(load_tokenizer(str(folder)), None),
        CPU,
    )


def shift(policy: TrainableModel, seed: int) -> None:
    with torch.no_grad():
        for _, parameter in policy.trainable():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))


def fused_decoder(engine: NativeEngine) -> FusedDecoder:
    assert isinstance(engine.forward.decoder, FusedDecoder)
    return engine.forward.decoder


def batch_of(*lengths: int):
    return pack([Example(np.arange(5 * n, 6 * n + 4), np.arange(n + 4) > 2) for n in lengths], CPU)


def test_only_adapters_are_trained_and_no_matrix_is_kept(tiny_models):
    policy = load(tiny_models["qwen2"])
    assert has_merged(policy.model)
    layers = [m for m in policy.model.modules() if isinstance(m, QuantisedLinear)]
    assert len(layers) == 7 * policy.model.config.num_hidden_layers
    assert all(".lora_" in name for name, _ in policy.trainable())
    names = [name for name, _ in (*policy.model.named_parameters(), *policy.model.named_buffers())]
    assert not [name for name in names if "proj" in name and name.endswith("weight") and ".lora_" not in name]
    assert not [name for name in names if "merged_" in name]


@pytest.mark.parametrize(("bits", "targets"), [(4, "all-linear"), (8, ("q_proj", "v_proj", "down_proj"))])
def test_gradients_are_those_of_autograd(tiny_models, bits, targets):
    """Of one product: autograd through deq(Wq) + s B A, in fp32; also where some or all layers over an input have no adapter."""
    policy = load(tiny_models["qwen2"], bits, targets=targets)
    shift(policy, 0)
    products: Any = policy.model.get_decoder().merged_products
    assert len(products) == 4 * policy.model.config.num_hidden_layers
    for merged in products[:4]:
        merged.merge()
        x = torch.randn(9, merged.shape[1], generator=torch.Generator().manual_seed(1), requires_grad=True)
        factors = [factor for adapter in merged.adapters for factor in (adapter.a_RI, adapter.b_OR)]
        weight = torch.cat([base.weight for base in merged.base_layers])
        for adapter in merged.adapters:
            update = torch.zeros_like(weight).index_add(
                0, torch.arange(adapter.rows.start, adapter.rows.stop), adapter.scale * adapter.b_OR @ adapter.a_RI
            )
            weight = weight + update
        expected_y = torch.nn.functional.linear(x, weight, merged.bias_O)
        found_y = merged(x)
        torch.testing.assert_close(found_y, expected_y, rtol=1e-5, atol=1e-6)
        found = torch.autograd.grad(found_y.square().sum(), [x, *factors])
        expected = torch.autograd.grad(expected_y.square().sum(), [x, *factors])
        for ours, theirs in zip(found, expected, strict=True):
            assert (ours - theirs).norm() <= 1e-6 * theirs.norm()


@pytest.mark.parametrize(("bits", "targets"), [(8, "all-linear"), (4, ("q_proj", "v_proj", "down_proj"))])
def test_log_probs_and_gradients_are_those_of_peft(tiny_models, bits, targets):
    """peft's modules on the dequantised base."""
    policy = load(tiny_models["qwen2"], bits, targets=targets)
    shift(policy, 0)
    batch, found = batch_of(16, 5), []
    for _ in range(2):
        logprobs_N = target_logprobs(policy.model, batch).logprobs_N
        logprobs_N.square().mean().backward()
        found.append((logprobs_N.detach(), {name: parameter.grad for name, parameter in policy.trainable()}))
        policy.model.zero_grad()
        drop_merged(policy.model)
    (ours, our_grads), (theirs, their_grads) = found
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    for name, expected in their_grads.items():
        assert (our_grads[name] - expected).norm() < 1e-4 * expected.norm(), name


@pytest.mark.parametrize(("bits", "dtype"), [(4, "float32"), (8, "float32"), (4, "bfloat16")])
def test_sampling_follows_the_adapters(tiny_models, bits, dtype):
    """The engine runs its fused decoder; its log-probs are the trainer's, also after an update."""
    policy = load(tiny_models["qwen2"], bits, dtype)
    engine = NativeEngine(policy.model, None)
    assert isinstance(engine.forward.decoder, FusedDecoder)
    prompt, found = np.array([5, 9, 200, 31]), []
    for step in range(2):
        (sample,) = engine.generate([Request("p", prompt, 1)], Sampling(12, seed=0, step=0))
        tokens = np.concatenate([prompt, sample.tokens]).astype(np.int32)
        batch = pack([Example(tokens, np.arange(len(tokens)) >= len(prompt))], CPU)
        with torch.no_grad():
            expected = target_logprobs(policy.model.eval(), batch).logprobs_N
        np.testing.assert_allclose(sample.sampler_logprobs, expected.numpy(), atol=1e-4 if dtype == "float32" else 0.05)
        found.append(sample.sampler_logprobs[0])
        shift(policy, step)
        engine.sync(step + 1, Weights(policy.model))
    assert len(set(found)) == 2, "the adapters matter"


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_kept_for_a_call_change_no_bit(tiny_models, bits, monkeypatch):
    """However many fit: none, those of the first products, all. In every call they are made from the adapters as they are now."""
    policy = load(tiny_models["qwen2"], bits, "bfloat16")
    engine, begin = NativeEngine(policy.model, None), Forward.begin
    every = sum(fused.bytes_to_keep for fused in fused_decoder(engine).products)
    room, kept, found = 0, [], []

    def begin_in_room(forward: Forward, longest: int, *_, packs: bool) -> None:
        begin(forward, longest, room, packs=packs)
        kept.append(forward.kept_bytes)

    monkeypatch.setattr(Forward, "begin", begin_in_room)
    for step in range(2):
        for room in (0, every // 2, every):  # noqa: B007 (begin_in_room reads it)
            samples = engine.generate([Request("p", np.array([5, 9, 200, 31]), 3)], Sampling(12, seed=0, step=0))
            found.append(sorted((s.index, s.tokens.tobytes(), s.sampler_logprobs.tobytes()) for s in samples))
            assert engine.forward.kept_bytes == 0, "the next call may have other adapters, and training wants the memory"
        shift(policy, step)
    assert found[0] == found[1] == found[2] != found[3] == found[4] == found[5]
    assert kept == [0, kept[1], every] * 2
    assert 0 < kept[1] < every


def test_an_engine_keeps_what_it_has_room_for(tiny_models, monkeypatch):
    """Of its own accord, and its cache has less room for it; none at all if the memory turns out to be taken."""
    engine, kept, prefill = NativeEngine(load(tiny_models["qwen2"]).model, None), [], Forward.prefill

    def watch_prefill(forward: Forward, *arguments: Any) -> None:
        kept.append((forward.kept_bytes, engine._cache_budget()))
        prefill(forward, *arguments)

    def sample() -> bytes:
        (found,) = engine.generate([Request("p", np.array([5, 9, 200, 31]), 1)], Sampling(12))
        return found.sampler_logprobs.tobytes()

    monkeypatch.setattr(Forward, "prefill", watch_prefill)
    budget, every = engine._cache_budget(), sum(fused.bytes_to_keep for fused in fused_decoder(engine).products)
    expected = sample()

    def none_left(*_, **options: Any) -> torch.Tensor:
        if options.get("dtype") is torch.uint8:
            raise torch.OutOfMemoryError
        return empty(*_, **options)

    empty = torch.empty
    monkeypatch.setattr("plaudit.rollout.native.decoder.torch.empty", none_left)
    assert sample() == expected
    assert kept == [(every, pytest.approx(budget - every / 2, abs=2)), (0, budget)]


def test_graphs_do_not_outlive_the_weights_that_they_read(tiny_models, monkeypatch):
    """A captured step has the addresses of its weights: of kept ones too, which may be elsewhere in the next call."""
    engine, cleared = NativeEngine(load(tiny_models["qwen2"]).model, None), []
    forward, products = engine.forward, list(fused_decoder(engine).products)
    monkeypatch.setattr(forward.graphs, "clear", lambda: cleared.append(True))
    held = []
    for room in (math.inf, math.inf, 0.0):
        forward.begin(16, room)
        held += [fused.kept for fused in products]  # so that the next ones cannot be in the same place
        forward.end()
    assert len(cleared) == 3
    forward.begin(16, 0.0)
    assert len(cleared) == 3, "nothing has moved"


def test_without_adapters_it_is_the_dequantised_base(tiny_models):
    """The KL reference, which new adapters do not change: bit for bit, in bf16 too."""
    policy = load(tiny_models["llama"], dtype="bfloat16")
    policy.model.eval()
    batch = batch_of(16)
    assert policy.peft is not None
    with torch.no_grad():
        before = target_logprobs(policy.model, batch).logprobs_N
        shift(policy, 0)
        moved = target_logprobs(policy.model, batch).logprobs_N
        with policy.peft.disable_adapter():
            reference = target_logprobs(policy.model, batch).logprobs_N
    assert torch.equal(before, reference)
    assert (moved - reference).abs().max() > 1e-2
    base = dict(iter_base_weights(policy.model))
    original = load_file(tiny_models["llama"] / "model.safetensors")
    for name, weight in original.items():
        expected = dequantised(weight.bfloat16(), 4) if "proj" in name else weight.bfloat16()
        assert torch.equal(base[name], expected), name


def train(policy: TrainableModel, trainer: Any) -> list[float]:
    batches = [pack(rows_of(policy))]
    return [trainer.update(batches, nll_of(policy, batches))["loss"] for _ in range(6)]


@pytest.mark.parametrize("bits", [4, 8])
def test_it_learns_and_a_resumed_run_has_the_same_weights(tiny_models, bits):
    policy, plain = (load(tiny_models["llama"], some, "bfloat16") for some in (bits, None))
    trainer, plain_trainer = make_trainer(policy, lr=3e-3), make_trainer(plain, lr=3e-3)
    losses, expected = train(policy, trainer), train(plain, plain_trainer)
    assert losses[-1] < losses[0] - 0.4
    assert losses == pytest.approx(expected, abs=0.01), "as on the base that is not quantised"
    resumed = load(tiny_models["llama"], bits, "bfloat16")
    make_trainer(resumed).optimiser.load_state(given_tensors(trainer.optimiser.state()))
    trained, found = dict(iter_merged_weights(policy.model)), dict(iter_merged_weights(resumed.model))
    assert trained.keys() == found.keys()
    assert all(torch.equal(weight, found[name]) for name, weight in trained.items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_saved_models_compute_what_was_trained(tiny_models, tmp_path, dtype):
    """A complete model has the weights that were trained, to the bit; an adapter is peft's, for the base as it is on disk."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder = tiny_models["qwen2"]
    policy = load(folder, 8, dtype)
    shift(policy, 0)
    assert policy.lora is not None
    policy.save(tmp_path / "merged")
    policy.lora = policy.lora.model_copy(update={"merge_on_save": False})
    policy.save(tmp_path / "adapter")
    saved, original = load_file(tmp_path / "merged/model.safetensors"), load_file(folder / "model.safetensors")
    assert saved.keys() == original.keys()
    assert {name: t.shape for name, t in saved.items()} == {name: t.shape for name, t in original.items()}
    assert all(torch.equal(saved[name], weight) for name, weight in iter_merged_weights(policy.model) if name in saved)
    tokens = np.array([5, 9, 200, 31, 7, 7, 60], dtype=np.int32)

    def logprobs(model) -> torch.Tensor:
        sequence = torch.from_numpy(tokens).long()
        return model(sequence[None]).logits[0, :-1].log_softmax(-1).gather(-1, sequence[1:, None])[:, 0]

    with torch.no_grad():
        merged = logprobs(AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32))
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        plain, adapted = logprobs(base), logprobs(PeftModel.from_pretrained(base, str(tmp_path / "adapter")))
        trained = target_logprobs(policy.model.eval(), pack([Example(tokens, np.arange(len(tokens)) >= 1)], CPU)).logprobs_N
    assert (adapted - plain).abs().max() > 0.2, "the adapter matters"
    torch.testing.assert_close(trained, merged, rtol=0, atol=1e-4 if dtype == "float32" else 0.02)
    torch.testing.assert_close(adapted, merged, rtol=0, atol=0.05)  # the base without the error of 8 bits


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapter_stands_for_the_model_that_was_trained(plaudit, tiny_models, tmp_path, dtype):
    """Its folder says what its base, in fp32 on disk, was rounded to: `plaudit merge` writes the trained weights, to the bit."""
    policy = load(tiny_models["llama"], 4, dtype, merge_on_save=False)
    shift(policy, 0)
    policy.save(tmp_path / "adapter")
    lora = read_lora_folder(tmp_path / "adapter")
    assert lora is not None
    assert lora.quantised == (4, dtype)
    code, out, _ = plaudit("merge", tmp_path / "adapter", "--out", tmp_path / "complete")
    assert code == 0
    assert "its linear layers are rounded to 4 bits, as in training (quantised_base.json)" in " ".join(out.split())
    trained, found = dict(iter_merged_weights(policy.model)), load_file(tmp_path / "complete/model.safetensors")
    assert all(torch.equal(weight, trained[name]) for name, weight in found.items())
    other: Any = {"float32": "bfloat16", "bfloat16": "float32"}[dtype]
    merge_adapter(lora, tmp_path / "other", other)
    converted = load_file(tmp_path / "other/model.safetensors")
    assert all(torch.equal(converted[name], trained[name].to(getattr(torch, other))) for name in found)
    assert json.loads((tmp_path / "other/config.json").read_text())["dtype"] == other


def test_a_reward_models_adapter_stands_for_it_too(tiny_models, tmp_path):
    template, lora = load_template(load_tokenizer(str(tiny_models["qwen2"])), None), LoraSettings(base_bits=8, merge_on_save=False)
    classifier = load_classifier(
        ModelSettings(path=str(tiny_models["qwen2"]), dtype="float32", lora=lora), template, CPU, section="critic"
    )
    shift(classifier, 0)
    classifier.save(tmp_path / "adapter")
    trained = dict(iter_merged_weights(classifier.model))
    for dtype in ("float32", "bfloat16"):
        settings = ModelSettings(path=str(tmp_path / "adapter"), dtype=dtype)
        found = load_classifier(settings, template, CPU).model.state_dict()
        assert found.keys() == trained.keys()
        for name, weight in found.items():
            assert weight.dtype == (torch.float32 if "score" in name else getattr(torch, dtype))
            assert torch.equal(weight, trained[name].to(weight.dtype)), name


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"quantised_base.json cannot be read: .* Copy the adapter's folder again"),
        ('{"base_bits": 3, "dtype": "float32"}', "base_bits should be 4 or 8, not 3"),
        ('{"base_bits": [4]}', r"base_bits should be 4 or 8, not \[4\]"),
        ('{"base_bits": 4}', r'dtype should be that of training, "float32" or "bfloat16", not null'),
        ('{"base_bits": 4, "dtype": ["float32"]}', r'dtype should be .*, not \["float32"\]'),
    ],
)
def test_a_damaged_description_is_reported(tmp_path, content, message):
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "org/base"}')
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    (tmp_path / "quantised_base.json").write_text(content)
    with pytest.raises(RecipeError, match=message):
        read_lora_folder(tmp_path)


def test_one_place_for_all_matrices():
    """Of any shape, at one address, which CUDA graphs refer to."""
    scratch = Scratch()
    scratch.reserve(12)
    scratch.reserve(40)
    first, second = scratch.matrix(3, 4, torch.float32, CPU), scratch.matrix(8, 5, torch.float32, CPU)
    assert first.data_ptr() == second.data_ptr() == scratch.matrix(1, 2, torch.float32, CPU).data_ptr()


def test_settings_without_a_way_are_refused(tiny_models):
    with pytest.raises(ValueError, match=r"base_bits merges the adapters .* dropout rules out"):
        LoraSettings(base_bits=4, dropout=0.1)
    message = r"with model\.lora\.base_bits, only linear layers of the decoder can be adapted: set model\.lora\.targets to"
    with pytest.raises(RecipeError, match=message):
        load(tiny_models["llama"], targets=("q_proj", "embed_tokens"))


@pytest.mark.parametrize("targets", ["[q_proj, embed_tokens]", "[q_proj]"])
def test_the_doctor_reports_adapters_of_other_layers(plaudit, tmp_path, tiny_model, rows_file, targets):
    file = write_recipe(tmp_path / "sft.yaml", {"stage": "sft", **sft_recipe(tiny_model, rows_file, tmp_path / "run")})
    code, out, _ = plaudit("doctor", file, "model.lora.base_bits=4", f"model.lora.targets={targets}")
    reported = "✗ memory with model.lora.base_bits, only linear layers of the decoder can be adapted" in " ".join(out.split())
    assert (code == 1) == reported == ("embed_tokens" in targets), out


def changed(source: Path, folder: Path, **config: Any) -> Path:
    shutil.copytree(source, folder)
    (folder / "config.json").write_text(json.dumps(json.loads((source / "config.json").read_text()) | config))
    return folder


@pytest.mark.parametrize(
    ("config", "trusted", "reason"),
    [
        ({"hidden_act": "gelu"}, False, "this one computes gelu"),
        ({"model_type": "gemma"}, False, "this one is a gemma model"),
        ({"auto_map": {"AutoModelForCausalLM": "own.Model"}}, True, "this one comes with code of its own"),
    ],
)
def test_models_without_a_way_are_refused_before_anything_is_loaded(tiny_model, rows_file, tmp_path, config, trusted, reason):
    """With the same message when they are loaded; of a critic, with its section."""
    model = changed(tiny_model, tmp_path / "model", **config)
    settings = {"lora": {"base_bits": 4}, "trust_remote_code": trusted}
    file = write_recipe(tmp_path / "r.yaml", {"stage": "sft", **sft_recipe(model, rows_file, tmp_path / "run", model=settings)})
    families = "Llama, Mistral, Qwen2 and Qwen3 models, whose MLPs compute SiLU"
    expected = re.escape(f"{model}: model.lora.base_bits is for {families}, and {reason}. Remove it")
    for stage in ("sft", None):  # training, and the doctor
        with pytest.raises(RecipeError, match=expected):
            load_checked(file, None, stage)
    if "hidden_act" in config:
        with pytest.raises(RecipeError, match=expected):
            load(model)
        critic, template = (
            ModelSettings(path=str(model), lora=LoraSettings(base_bits=4)),
            load_template(load_tokenizer(str(model)), None),
        )
        with pytest.raises(RecipeError, match=r"critic\.lora\.base_bits is for .* this one computes gelu"):
            load_classifier(critic, template, CPU, section="critic")


def test_a_critic_and_sharded_weights_are_refused_as_early(tiny_model, prompts_file, reward_file, tmp_path):
    other = changed(tiny_model, tmp_path / "model", hidden_act="gelu")
    tree = rl_recipe(tiny_model, prompts_file, tmp_path / "run", reward_file)
    tree |= {"stage": "rl", "algorithm": {"kind": "ppo"}, "critic": {"path": str(other), "lora": {"base_bits": 8}}}
    file = write_recipe(tmp_path / "r.yaml", tree)
    with pytest.raises(RecipeError, match=r"model: critic\.lora\.base_bits is for .* this one computes gelu"):
        load_checked(file, None, "rl")
    overrides = [f"critic.path={tiny_model}", "cluster.gpus=2"]
    load_checked(file, overrides, "rl")
    with pytest.raises(RecipeError, match=r"cluster\.sharding: full cannot divide a base with critic\.lora\.base_bits"):
        load_checked(file, [*overrides, "cluster.sharding=full"], "rl")


def test_attention_dropout_rules_nothing_out(tiny_model, tmp_path):
    """Its layers are not fused, and are computed module by module. The plan knows."""
    model = changed(tiny_model, tmp_path / "model", attention_dropout=0.1)
    policy = load(model)
    assert has_merged(policy.model)
    assert plan_memory(ModelSettings(path=str(model), lora=policy.lora), CPU, micro_batch=64).base_bits == 4


def test_an_offloaded_model_leaves_no_scratch_memory(tiny_models):
    policy = load(tiny_models["qwen2"])
    offloaded = OffloadedModule(policy.model, CPU)
    scratch = next(m.scratch for m in policy.model.modules() if isinstance(m, QuantisedLinear))
    found = []
    for _ in range(2):
        with offloaded.on_device(), torch.no_grad():
            found.append(target_logprobs(policy.model, batch_of(16)).logprobs_N)
            assert scratch._memory is not None
        assert scratch._memory is None
    assert torch.equal(*found)
