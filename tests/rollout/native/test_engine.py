"""Features of the native engine: architectures, windows, adapters, rows and blocks, fused weights, precision.

The contract tests what it shares with other engines, test_scheduler.py the scheduling.
"""

import json
import shutil
import warnings
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from plaudit.data.pack import pack
from plaudit.data.templates import load_template, load_tokenizer
from plaudit.errors import PlauditError, RecipeError
from plaudit.models import fused
from plaudit.models.attention import NAME, attend_packed, packed_attention
from plaudit.models.heads import Heads
from plaudit.models.logprobs import target_logprobs
from plaudit.models.memory import total_memory
from plaudit.models.residual import has_fp32_residual, keep_residual_fp32
from plaudit.models.trainable import TrainableModel, load_policy
from plaudit.prepare.tiny_model import make_tiny_model
from plaudit.recipe import LoraSettings, ModelSettings
from plaudit.rollout.engine import Request, Sampling
from plaudit.rollout.native import cache as native_cache
from plaudit.rollout.native import cpu_linear, cpu_ops, forward
from plaudit.rollout.native import engine as native
from plaudit.rollout.native.cache import FREE_BYTES, CacheShape, KVCache, blocks_that_fit
from plaudit.rollout.native.decoder import FusedDecoder, ModuleDecoder
from plaudit.rollout.native.engine import NativeEngine
from plaudit.rollout.native.graphs import DecodeGraphs
from plaudit.rollout.native.noise import position_keys
from plaudit.rollout.native.sampler import draw_scores
from plaudit.rollout.stopping import Stopping
from plaudit.seeding import stable_seed
from plaudit.types import Example, Sample
from support.engine_contract import (
    CLOSE,
    assert_logprobs,
    full_logits,
    full_logprobs,
    greedy,
    logprobs_from,
    prompt_of,
    reference_logits,
    requests_of,
    same_tokens,
    sharpen,
)
from support.models import KINDS

pytestmark = pytest.mark.grid(1)

LENGTHS = (3, 120, 1, 33, 8, 2, 57)
COUNTS = (2, 1, 3, 1, 4, 1, 2)


def mixed_requests(limits: Sequence[int | None] = (20, 3, None, 40, 1, 12, 25)) -> list[Request]:
    """Prompts, counts and limits of all sizes."""
    mixed = zip(requests_of(LENGTHS), COUNTS, limits, strict=True)
    return [replace(request, n=n, max_new_tokens=limit) for request, n, limit in mixed]


def load_plain(folder: Path, **model) -> TrainableModel:
    template = load_template(load_tokenizer(str(folder)), None)
    return load_policy(ModelSettings(path=str(folder), **model), template, torch.device("cpu"))


def load(folder: Path, **model) -> TrainableModel:
    policy = load_plain(folder, **{"dtype": "float32", **model})
    sharpen(policy.model)
    return policy


def engine_of(policy: TrainableModel, **settings) -> NativeEngine:
    return NativeEngine(policy.model, policy.template.tokenizer, **settings)


def sample(engine: NativeEngine, requests: Sequence[Request], sampling: Sampling) -> list[tuple[Request, Sample]]:
    """Samples with their requests, sorted by request, then by index."""
    samples = {(s.prompt_id, s.index): s for s in engine.generate(requests, sampling)}
    assert len(samples) == sum(r.n for r in requests)
    return [(request, samples[request.prompt_id, index]) for request in requests for index in range(request.n)]


def assert_right(policy: TrainableModel, engine: NativeEngine, requests: Sequence[Request], sampling: Sampling) -> None:
    """Log-probs are those of a full forward pass, and tokens are those that the keys give."""
    for request, s, logits in with_reference(policy, sample(engine, requests, sampling)):
        assert_logprobs(s, logits, sampling.temperature)
        assert_tokens_of_keys(request, s, logits, sampling)


def with_reference(policy: TrainableModel, drawn: list[tuple[Request, Sample]]) -> list[tuple[Request, Sample, Tensor]]:
    """Each with the logits of a full forward pass."""
    logits = reference_logits(policy.model, [(request.tokens, s.tokens) for request, s in drawn])
    return [(request, s, expected) for (request, s), expected in zip(drawn, logits, strict=True)]


@pytest.fixture(scope="module")
def policies(tiny_models) -> dict[str, TrainableModel]:
    return {kind: load(folder) for kind, folder in tiny_models.items()}


@pytest.fixture(params=KINDS)
def policy(request, policies) -> TrainableModel:
    return policies[request.param]


@pytest.fixture
def llama(policies) -> TrainableModel:
    return policies["llama"]


@pytest.fixture(params=["block per row", "few blocks"])
def layout(request, monkeypatch) -> dict:
    """How the KV cache is laid out: one block per row, or small blocks that suffice for a single sequence."""
    if request.param == "few blocks":
        monkeypatch.setitem(native.CACHE_SHARE, "cpu", 0.0)
    return {} if request.param == "block per row" else {"block_tokens": 8}


def is_scarce() -> bool:
    return native.CACHE_SHARE["cpu"] == 0.0


# Tokens from noise and logits ----------------------------------------------------------------------------------------


def perturbed_logits(request: Request, s: Sample, logits: Tensor, sampling: Sampling) -> Tensor:
    """[t, V]: scores whose argmax must be the sample's tokens, from a full forward pass and the sample's key."""
    key = stable_seed(sampling.seed, sampling.step, request.prompt_id, s.index)
    key = torch.tensor(key - (1 << 64) if key >> 63 else key)
    keys = position_keys(key.expand(len(s)), torch.arange(len(s)))
    return draw_scores(logits, keys, sampling)


def assert_tokens_of_keys(request: Request, s: Sample, logits: Tensor, sampling: Sampling, close: float = CLOSE) -> None:
    perturbed = perturbed_logits(request, s, logits, sampling)
    short_of_best = perturbed.max(-1).values - perturbed.gather(-1, torch.from_numpy(s.tokens).long()[:, None])[:, 0]
    assert short_of_best.max() <= close, f"{s.prompt_id}/{s.index}: {short_of_best}"


def assert_same_tokens(
    model: PreTrainedModel, request: Request, a: Sample, b: Sample, sampling: Sampling, close: float = CLOSE
) -> None:
    """Equal; or where they first differ, they have the two best tokens, whose scores differ by no more than rounding."""
    if same_tokens([a], [b]):
        return
    at = next((i for i, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=False)) if x != y), None)
    assert at is not None, "one ends where the other continues"
    begun = replace(a, tokens=a.tokens[: at + 1])
    best = perturbed_logits(request, begun, full_logits(model, request.tokens, begun.tokens), sampling)[at].topk(2)
    assert set(best.indices.tolist()) == {int(a.tokens[at]), int(b.tokens[at])}
    assert best.values[0] - best.values[1] < close, f"{request.prompt_id}/{a.index}: tokens differ from {at} on"


def test_assert_same_tokens_detects_differences(llama):
    """It rejects a second-best token, unless its score is as good as the best."""
    request, sampling = Request("p", prompt_of(9)), Sampling(max_new_tokens=12)
    ((_, s),) = sample(engine_of(llama), [request], sampling)
    best = perturbed_logits(request, s, full_logits(llama.model, request.tokens, s.tokens), sampling)[4].topk(3)
    second, third = (replace(s, tokens=np.array([*s.tokens[:4], best.indices[i], *s.tokens[5:]])) for i in (1, 2))
    gap = (best.values[0] - best.values[1]).item()
    assert_same_tokens(llama.model, request, s, second, sampling, close=gap * 1.01)
    assert_same_tokens(llama.model, request, second, s, sampling, close=gap * 1.01)
    for other, close in [(second, gap * 0.99), (second, CLOSE), (third, 100.0), (replace(s, tokens=s.tokens[:4]), 100.0)]:
        with pytest.raises(AssertionError):
            assert_same_tokens(llama.model, request, s, other, sampling, close)


# Architectures -------------------------------------------------------------------------------------------------------


def test_logprobs_and_tokens(policy, layout):
    """Four rows for 14 samples, which finish, move and start all the time."""
    sampling = Sampling(max_new_tokens=16, temperature=0.6, seed=1, step=3)
    engine = engine_of(policy, max_sequences=4, **layout)
    assert_right(policy, engine, mixed_requests(), sampling)
    assert (engine.preempted > 0) == is_scarce()


def test_greedy_matches_generate(policy, layout):
    engine = engine_of(policy, max_sequences=3, **layout)
    drawn = sample(engine, requests_of(LENGTHS), Sampling(max_new_tokens=16, temperature=0.0))
    for request, s, logits in with_reference(policy, drawn):
        assert s.tokens.tolist() == greedy(policy.model, request.tokens, 16)
        assert_logprobs(s, logits, temperature=0.0)


@pytest.fixture
def windowed(request, tiny_models, tmp_path) -> TrainableModel:
    """(kind, window). Qwen2 has windows in its second layer only."""
    kind, window = request.param
    shutil.copytree(tiny_models[kind], tmp_path / "windowed")
    config_file = tmp_path / "windowed" / "config.json"
    config = json.loads(config_file.read_text()) | {"sliding_window": window}
    if kind == "qwen2":
        config |= {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]}
    config_file.write_text(json.dumps(config))
    return load(tmp_path / "windowed")


KINDS_AND_WINDOWS = [("mistral", 2), ("mistral", 24), ("qwen2", 8)]
WINDOWED = pytest.mark.parametrize("windowed", KINDS_AND_WINDOWS, indirect=True, ids=str)


@WINDOWED
def test_sliding_windows(windowed, policies, layout):
    """Prompts shorter and longer than the window, and answers that cross it."""
    assert_right(windowed, engine_of(windowed, max_sequences=5, **layout), mixed_requests(), Sampling(max_new_tokens=20))
    request = requests_of((40,))[0]
    ((_, s),) = sample(engine_of(windowed), [request], Sampling(max_new_tokens=16, temperature=0.0))
    assert s.tokens.tolist() == greedy(windowed.model, request.tokens, 16)
    without = full_logprobs(policies[windowed.model.config.model_type].model, request.tokens, s.tokens, 1.0)
    assert np.abs(without - s.sampler_logprobs).max() > 100 * CLOSE, "the window makes a visible difference"


# Fused layers and plain modules --------------------------------------------------------------------------------------


def unfused(policy: TrainableModel, **settings) -> NativeEngine:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward, "can_fuse", lambda model: False)
        engine = engine_of(policy, **settings)
    assert isinstance(engine.forward.decoder, ModuleDecoder)
    return engine


def test_fused_layers_match_modules(policy):
    requests, sampling = mixed_requests(), Sampling(max_new_tokens=16, temperature=0.8)
    engine = engine_of(policy, max_sequences=4)
    assert isinstance(engine.forward.decoder, FusedDecoder)
    modules = sample(unfused(policy, max_sequences=4, block_tokens=8), requests, sampling)
    for (request, a), (_, b) in zip(sample(engine, requests, sampling), modules, strict=True):
        assert_same_tokens(policy.model, request, a, b, sampling)
        if same_tokens([a], [b]):
            np.testing.assert_allclose(a.sampler_logprobs, b.sampler_logprobs, rtol=0, atol=CLOSE)
            np.testing.assert_allclose(a.untempered_logprobs, b.untempered_logprobs, rtol=0, atol=CLOSE)


@WINDOWED
def test_modules_with_windows(windowed, monkeypatch):
    monkeypatch.setitem(native.PREFILL_TOKENS, "cpu", 7)
    assert_right(windowed, unfused(windowed, max_sequences=5), mixed_requests(), Sampling(max_new_tokens=20))


def policy_from_config(config: AutoConfig, tokenizer) -> TrainableModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=NAME)
    return TrainableModel(sharpen(model).eval(), load_template(tokenizer, None))


SMALL = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "settings", "decoder"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}, FusedDecoder),
        ("llama", {"head_dim": 32, "num_key_value_heads": 4}, FusedDecoder),
        ("llama", {"num_key_value_heads": 1, "rope_theta": 50.0, "rms_norm_eps": 1e-2}, FusedDecoder),
        ("llama", {"hidden_act": "gelu"}, ModuleDecoder),
        ("qwen3", {"attention_bias": True, "head_dim": 8, "rms_norm_eps": 1e-2}, FusedDecoder),
        ("olmo2", {}, ModuleDecoder),  # norms after attention and MLP
        ("phi3", {}, ModuleDecoder),  # projections that are fused already
    ],
    ids=str,
)
def test_other_architectures(tokenizer, kind, settings, decoder):
    policy = policy_from_config(AutoConfig.for_model(kind, **{**SMALL, **settings}), tokenizer)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.ndim == 1:  # biases start as 0, norms as 1
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    engine = engine_of(policy, max_sequences=4, block_tokens=8)
    assert type(engine.forward.decoder) is decoder
    assert_right(policy, engine, mixed_requests(), Sampling(max_new_tokens=16))


def test_a_layer_of_another_class_is_not_fused(tiny_model):
    """A linear layer has been replaced."""

    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    policy = load(tiny_model)
    policy.model.model.layers[1].mlp.down_proj.__class__ = Doubled
    engine = engine_of(policy)
    assert isinstance(engine.forward.decoder, ModuleDecoder)
    assert_right(policy, engine, requests_of((9, 30)), Sampling(max_new_tokens=16))


# Fused weights -------------------------------------------------------------------------------------------------------


def bytes_held(model: PreTrainedModel) -> int:
    """Bytes of all storage that parameters use."""
    return sum({s.data_ptr(): s.nbytes() for p in model.parameters() if (s := p.untyped_storage())}.values())


def share_storage(*parameters: Tensor) -> bool:
    return len({p.untyped_storage().data_ptr() for p in parameters}) == 1


def test_weights_are_fused_without_a_second_copy(tiny_models):
    for folder in tiny_models.values():
        model = load(folder).model
        before, values = bytes_held(model), {name: p.detach().clone() for name, p in model.named_parameters()}
        names = [name for name, _ in model.named_parameters()]
        engine = NativeEngine(model, None)
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            assert share_storage(attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight)
            assert share_storage(mlp.gate_proj.weight, mlp.up_proj.weight)
            assert not share_storage(attention.q_proj.weight, mlp.gate_proj.weight)
        assert bytes_held(model) == before
        list(engine.generate(requests_of((5, 9), n=2), Sampling(max_new_tokens=4)))
        assert bytes_held(model) == before
        assert [name for name, _ in model.named_parameters()] == names
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, nn.Parameter)
            assert parameter.requires_grad
            assert parameter.is_leaf
            assert torch.equal(parameter, values[name])


def batch_of(*lengths: int):
    return pack([Example(prompt_of(n, n), np.arange(n) > 0) for n in lengths], torch.device("cpu"))


def train_steps(model: PreTrainedModel, steps: int = 3, lr: float = 3e-2) -> list[float]:
    """Train for a few steps and return the losses."""
    optimiser, losses, batch = torch.optim.AdamW(model.parameters(), lr=lr), [], batch_of(30, 20)
    for _ in range(steps):
        loss = -target_logprobs(model, batch).logprobs_N.mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    model.zero_grad()
    target_logprobs(model, batch_of(30, 20)).logprobs_N.mean().backward()
    return {name: p.grad for name, p in model.named_parameters()}


def test_training_is_unaffected_and_the_next_call_uses_its_weights(tiny_models, policy):
    folder = tiny_models[policy.model.config.model_type]
    plain, own = load(folder), load(folder)
    engine, requests, sampling = engine_of(own, max_sequences=4), mixed_requests(), Sampling(max_new_tokens=16)
    before = [s for _, s in sample(engine, requests, sampling)]
    expected = gradients(plain.model)
    for name, gradient in gradients(own.model).items():
        assert gradient is not None
        assert torch.equal(gradient, expected[name]), name
    for _ in range(2):
        assert train_steps(own.model) == train_steps(plain.model)
        assert_right(own, engine, requests, sampling)
    assert not same_tokens([s for _, s in sample(engine, requests, sampling)], before)
    attention = own.model.model.layers[0].self_attn
    assert share_storage(attention.q_proj.weight, attention.k_proj.weight), "they are still fused"


def test_saved_weights_are_the_same(tiny_models, policy, tmp_path):
    folder = tiny_models[policy.model.config.model_type]
    plain, own = load(folder), load(folder)
    engine_of(own)
    plain.save(tmp_path / "plain")
    own.save(tmp_path / "own")
    files = sorted(path.name for path in (tmp_path / "plain").iterdir())
    assert sorted(path.name for path in (tmp_path / "own").iterdir()) == files
    for name in files:
        assert (tmp_path / "own" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes(), name
    again = load_plain(tmp_path / "own", dtype="float32").model.state_dict()
    for name, value in plain.model.state_dict().items():
        assert torch.equal(again[name], value), name


def test_moved_weights_are_detected(tiny_models, policy):
    """As by `model.to(dtype)` and back, between calls of the same engine."""
    own = load(tiny_models[policy.model.config.model_type])
    engine, requests, sampling = engine_of(own, max_sequences=4), mixed_requests(), Sampling(max_new_tokens=16)
    assert_right(own, engine, requests, sampling)
    own.model.to(torch.bfloat16)
    for _, s, logits in with_reference(own, sample(engine, requests, sampling)):
        assert np.abs(logprobs_from(logits, s.tokens, 1.0) - s.sampler_logprobs).max() < 0.3
    assert engine.forward.shape.dtype == torch.bfloat16
    own.model.float()
    assert_right(own, engine, requests, sampling)
    assert engine.forward.shape.dtype == torch.float32
    own.model.double()
    for _, s, logits in with_reference(own, sample(engine, requests, sampling)):
        assert_logprobs(s, logits, 1.0, close=1e-5)


@pytest.mark.parametrize(
    "part",
    ["q_proj.weight", "v_proj.weight", "k_proj.bias", "o_proj.weight", "up_proj.weight", "down_proj.weight", "norm.weight",
     "embed_tokens.weight"],
)  # fmt: skip
@pytest.mark.parametrize("how", ["data", "parameter"])
def test_a_replaced_tensor_is_detected(tiny_models, part, how):
    own = load(tiny_models["qwen2"])
    engine, requests, sampling = engine_of(own), requests_of((9, 30)), Sampling(max_new_tokens=16)
    torch.manual_seed(3)
    for name, parameter in list(own.model.named_parameters()):
        if name.endswith(part):
            other = parameter.detach() + 0.3 * torch.randn_like(parameter)
            if how == "data":
                parameter.data = other
            else:
                module, _, last = name.rpartition(".")
                setattr(own.model.get_submodule(module), last, nn.Parameter(other))
    if how == "parameter":
        own.model.tie_weights()
    assert_right(own, engine, requests, sampling)


def test_two_engines_on_one_model(llama, layout):
    requests, sampling = mixed_requests(), Sampling(max_new_tokens=16)
    first, second = engine_of(llama, max_sequences=4, **layout), engine_of(llama, max_sequences=3)
    assert_right(llama, first, requests, sampling)
    assert_right(llama, second, requests, sampling)
    held = bytes_held(llama.model)
    assert held == sum(p.numel() * p.element_size() for p in llama.model.parameters())
    one, other = first.generate(requests, sampling), second.generate(requests, sampling)
    drawn = {(s.prompt_id, s.index): s for pair in zip(one, other, strict=True) for s in pair[:1]}
    alone = {(s.prompt_id, s.index): s for s in first.generate(requests, sampling)}
    assert same_tokens([drawn[name] for name in alone], list(alone.values())), "also when they alternate"


# Precision, adapters, modes ------------------------------------------------------------------------------------------


def test_bf16_is_close_to_a_full_forward_pass(tiny_models):
    """In bf16, and in fp32 with the same weights."""
    policy, sampling = load(tiny_models["qwen3"]), Sampling(max_new_tokens=16, temperature=0.8)
    policy.model.to(torch.bfloat16)
    drawn = sample(engine_of(policy, max_sequences=4), mixed_requests(), sampling)
    assert engine_of(policy).forward.shape.dtype == torch.bfloat16

    def off() -> np.ndarray:
        full = [logprobs_from(logits, s.tokens, 0.8) for _, s, logits in with_reference(policy, drawn)]
        return np.abs(np.concatenate([s.sampler_logprobs for _, s in drawn]) - np.concatenate(full))

    near = off()
    policy.model.float()
    for errors in (near, off()):
        assert errors.mean() < 0.03, errors.mean()
        assert errors.max() < 0.25, errors.max()


def test_fp32_is_as_precise_as_training(tiny_models):
    """Sums have another order than the trainer's, and no larger error."""
    policy = load(tiny_models["llama"])
    drawn = sample(engine_of(policy), mixed_requests(), Sampling(max_new_tokens=16))
    tokens = [np.concatenate([request.tokens, s.tokens]) for request, s in drawn]
    batch = pack([Example(whole, np.arange(len(whole)) >= len(r.tokens)) for whole, (r, _) in zip(tokens, drawn, strict=True)])
    with torch.no_grad():
        trained = target_logprobs(policy.model.eval(), batch).logprobs_N.double()
        exact = target_logprobs(policy.model.double(), batch).logprobs_N
    sampled = torch.from_numpy(np.concatenate([s.sampler_logprobs for _, s in drawn]).astype(np.float64))
    assert exact.dtype == torch.float64
    assert 0 < (sampled - exact).abs().mean() < 1.5 * (trained - exact).abs().mean()


@pytest.fixture
def adapted(tiny_models) -> TrainableModel:
    """With adapters that have an effect, and dropout that would show."""
    policy = load(tiny_models["qwen2"], lora=LoraSettings(rank=4, alpha=8.0, dropout=0.5))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in policy.trainable():
            if "lora_" in name:
                parameter.normal_(std=0.3)
    return policy


def test_adapters_are_used_for_sampling(adapted, layout):
    requests, sampling = mixed_requests(), Sampling(max_new_tokens=16)
    engine = engine_of(adapted, max_sequences=4, **layout)
    assert isinstance(engine.forward.decoder, ModuleDecoder)
    assert_right(adapted, engine, requests, sampling)
    with_adapters = [s for _, s in sample(engine, requests, sampling)]
    with torch.no_grad():
        for name, parameter in adapted.trainable():
            if "lora_B" in name:
                parameter.zero_()
    assert not same_tokens([s for _, s in sample(engine, requests, sampling)], with_adapters)


def test_training_mode_between_samples_does_not_enable_dropout(adapted):
    """The consumer of the samples may put the model in training mode."""
    requests, sampling, engine = mixed_requests(), Sampling(max_new_tokens=16), engine_of(adapted, max_sequences=4)
    undisturbed = [s for _, s in sample(engine, requests, sampling)]
    samples = {}
    adapted.model.train()
    for s in engine.generate(requests, sampling):
        samples[s.prompt_id, s.index] = s
        adapted.model.train()
    assert same_tokens([samples[s.prompt_id, s.index] for s in undisturbed], undisturbed)


def test_gradient_checkpointing_does_not_change_samples(tiny_models, llama):
    checkpointed, requests, sampling = load(tiny_models["llama"], gradient_checkpointing=True), mixed_requests(), Sampling(16)
    plain = [s for _, s in sample(engine_of(llama), requests, sampling)]
    assert same_tokens([s for _, s in sample(engine_of(checkpointed), requests, sampling)], plain)


# Batches -------------------------------------------------------------------------------------------------------------


def assert_samples_agree(
    policy: TrainableModel, a: list[tuple[Request, Sample]], b: list[tuple[Request, Sample]], sampling: Sampling
):
    for (request, one), (_, other) in zip(a, b, strict=True):
        assert_same_tokens(policy.model, request, one, other, sampling)


@pytest.mark.parametrize("rows", [1, 3])
def test_tokens_do_not_depend_on_the_number_of_rows(llama, rows, layout):
    sampling = Sampling(max_new_tokens=16, temperature=0.9, top_p=0.95, seed=4)
    many = sample(engine_of(llama), mixed_requests(), sampling)
    few = sample(engine_of(llama, max_sequences=rows, **layout), mixed_requests(), sampling)
    assert_samples_agree(llama, many, few, sampling)


def test_tokens_do_not_depend_on_order_or_batch(llama, layout):
    requests, sampling = mixed_requests(), Sampling(max_new_tokens=16)
    together = {(s.prompt_id, s.index): s for _, s in sample(engine_of(llama), requests, sampling)}
    others = [sample(engine_of(llama, max_sequences=6, **layout), requests[::-1], sampling)]
    others += [sample(engine_of(llama, **layout), [request], sampling) for request in requests]
    for drawn in others:
        for request, s in drawn:
            assert_same_tokens(llama.model, request, together[s.prompt_id, s.index], s, sampling)


@pytest.mark.parametrize("budget", [1, 7, 40])
def test_tokens_do_not_depend_on_prefill_chunks(llama, monkeypatch, budget, layout):
    """Token by token, in chunks, or a few prompts at a time."""
    sampling, engine = Sampling(max_new_tokens=16), engine_of(llama, **layout)
    at_once = sample(engine_of(llama), mixed_requests(), sampling)
    monkeypatch.setitem(native.PREFILL_TOKENS, "cpu", budget)
    in_chunks = sample(engine, mixed_requests(), sampling)
    assert_samples_agree(llama, at_once, in_chunks, sampling)


@WINDOWED
def test_chunked_prefill_with_windows(windowed, layout, monkeypatch):
    sampling = Sampling(max_new_tokens=16)
    at_once = sample(engine_of(windowed), mixed_requests(), sampling)
    monkeypatch.setitem(native.PREFILL_TOKENS, "cpu", 7)
    engine = engine_of(windowed, max_sequences=5, **layout)
    assert_samples_agree(windowed, at_once, sample(engine, mixed_requests(), sampling), sampling)
    assert_right(windowed, engine, mixed_requests(), sampling)


@pytest.mark.parametrize("budget", [4, 1000])
def test_a_long_prompt_after_short_ones(llama, monkeypatch, budget, layout):
    """It is prefilled while they run, move to other rows, and end."""
    monkeypatch.setitem(native.PREFILL_TOKENS, "cpu", budget)
    requests = [Request("one", prompt_of(1), n=2), Request("long", prompt_of(70), n=2), *requests_of((1, 3, 1), n=2)]
    assert_right(llama, engine_of(llama, max_sequences=6, **layout), requests, Sampling(max_new_tokens=16))


@pytest.mark.parametrize("block_tokens", [1, 3, 8, 64])
def test_blocks_of_any_size(llama, block_tokens):
    assert_right(llama, engine_of(llama, max_sequences=4, block_tokens=block_tokens), mixed_requests(), Sampling(max_new_tokens=16))


@pytest.mark.parametrize(("kind", "rows", "budget"), [("llama", 3, 7), ("qwen3", 100, 1000)])
def test_preempted_sequences_resume(policies, monkeypatch, kind, rows, budget):
    """Memory suffices for one sequence of full length; the samples are the same as with plenty."""
    monkeypatch.setitem(native.CACHE_SHARE, "cpu", 0.0)
    monkeypatch.setitem(native.PREFILL_TOKENS, "cpu", budget)
    requests, sampling = requests_of((40, 33, 8, 57, 3, 70), n=3), Sampling(max_new_tokens=40, temperature=0.9)
    engine = engine_of(policies[kind], max_sequences=rows, block_tokens=8)
    drawn = sample(engine, requests, sampling)
    assert engine.preempted > 0
    for request, s, logits in with_reference(policies[kind], drawn):
        assert_logprobs(s, logits, 0.9)
        assert_tokens_of_keys(request, s, logits, sampling)
        assert len(s) == 40 or s.tokens[-1] in engine.end_tokens
    again = [s for _, s in sample(engine, requests, sampling)]
    assert same_tokens(again, [s for _, s in drawn]), "the same call gives the same samples"
    assert all(np.array_equal(a.sampler_logprobs, b.sampler_logprobs) for a, (_, b) in zip(again, drawn, strict=True))
    list(engine.generate(requests[:1], sampling))
    assert engine.preempted == 0, "counted for the last call only"


def test_all_sequences_whose_tables_have_changed_may_have_ended():
    """They got blocks, others did not, and the steps in flight ended both."""
    cache = KVCache(CacheShape(1, Heads(1, 1, 8), torch.float32, torch.device("cpu")), 2, 3, block_tokens=4)
    cache.set_block_tables([1], np.array([[1, 2, 0]]))
    cache.set_block_tables([], np.zeros((0, 3)))
    assert cache.block_tables.tolist() == [[0, 0, 0], [1, 2, 0]]


def blocks_held(engine: NativeEngine, requests: Sequence[Request], sampling: Sampling) -> int:
    """Blocks of the KV cache while it samples."""
    samples = engine.generate(requests, sampling)
    next(samples)
    assert engine._cache.memory is not None
    held = len(engine._cache.memory)
    samples.close()
    return held


def test_little_memory_means_fewer_blocks(llama, monkeypatch):
    requests, sampling = mixed_requests(), Sampling(max_new_tokens=16)
    plenty = sample(engine_of(llama), requests, sampling)
    assert blocks_held(engine_of(llama), requests, sampling) > 14, "one per row, and a few more"
    monkeypatch.setitem(native.CACHE_SHARE, "cpu", 0.0)
    assert_samples_agree(llama, plenty, sample(engine_of(llama), requests, sampling), sampling)
    assert blocks_held(engine_of(llama), requests, sampling) == 2, "for one sequence and the prompt it starts from"
    engine = engine_of(llama, block_tokens=8)
    assert_samples_agree(llama, plenty, sample(engine, requests, sampling), sampling)
    assert blocks_held(engine, requests, sampling) == 128 // 8 + 1


def test_only_as_much_memory_as_needed_is_allocated(llama):
    engine = engine_of(llama, block_tokens=8)
    few = blocks_held(engine, [Request("p", prompt_of(17), n=4)], Sampling(max_new_tokens=16))
    assert 2 + 4 * 2 <= few <= 16, "two shared blocks, and two more for each sample"
    many = blocks_held(engine, requests_of((17,) * 300), Sampling(max_new_tokens=1))
    assert many <= 256 * 3 + 65, "no more rows than MAX_SEQUENCES"
    assert len(engine._cache.block_tables) == native.MAX_SEQUENCES["cpu"]


def test_reserved_memory_is_left_free(llama, monkeypatch):
    total = 10**9
    monkeypatch.setattr(native, "total_memory", lambda device: total)
    weights = sum(tensor.numel() * 4 for tensor in (*llama.model.parameters(), *llama.model.buffers()))
    assert engine_of(llama)._cache_budget() == (total - weights) // 2
    assert engine_of(llama, reserved_bytes=10**8)._cache_budget() == (total - weights - 10**8) // 2
    engine = engine_of(llama, reserved_bytes=2 * total)
    assert engine._cache_budget() == 0
    assert len(sample(engine, mixed_requests(), Sampling(max_new_tokens=16))) == 14
    assert blocks_held(engine, mixed_requests(), Sampling(max_new_tokens=16)) == 2


def test_memory_is_freed_after_a_call(llama, layout):
    engine, requests, sampling = engine_of(llama, **layout), mixed_requests(), Sampling(max_new_tokens=16)
    samples = engine.generate(requests, sampling)
    next(samples)
    assert engine._cache.memory is not None
    samples.close()
    assert engine._cache.memory is None
    list(engine.generate(requests, sampling))
    assert engine._cache.memory is None


def test_uninitialised_memory_does_not_matter(llama, layout):
    """Deterministic torch fills new memory with NaN, which would spread despite masks."""
    requests, sampling = mixed_requests(), Sampling(max_new_tokens=16)
    expected = [s for _, s in sample(engine_of(llama, **layout), requests, sampling)]
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all(), "or the test shows nothing"
        samples = [s for _, s in sample(engine_of(llama, **layout), requests, sampling)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(np.isfinite(s.sampler_logprobs).all() for s in samples)
    assert same_tokens(samples, expected)


# Stop strings --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return load_tokenizer(str(tiny_model))


ALPHABET = "Whatis the answer 1 + 2é☕🎉\n"


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_stop_strings_are_found_in_the_last_tokens(tokenizer, data):
    """A response ends at the token that completes its first stop string, however the text is split into tokens."""
    pieces = data.draw(
        st.lists(st.text(ALPHABET, max_size=8) | st.sampled_from(["", "<|im_start|>", "☕"]), min_size=1, max_size=12)
    )
    tokens = [token for piece in pieces for token in tokenizer.encode(piece)]
    tokens += [data.draw(st.integers(3, 319)) for _ in range(3)]
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    begin = data.draw(st.integers(0, len(text) - 1))
    stops = (text[begin : begin + data.draw(st.integers(1, 12))], "never")
    stopping = Stopping(tokenizer, frozenset(), stops)
    full = [tokenizer.decode(tokens[: i + 1], skip_special_tokens=True) for i in range(len(tokens))]
    if "\ufffd" in stops[0]:  # an incomplete character, which later tokens may complete
        return
    first = next(i for i, text in enumerate(full) if stops[0] in text)
    for i in range(first + 1):
        assert stopping.stops(tokens[: i + 1]) == (i == first)
    assert stopping.text(tokens[: first + 1]) == full[first][: full[first].index(stops[0]) + len(stops[0])]


# Unsupported models --------------------------------------------------------------------------------------------------


def test_a_model_with_state_outside_attention_is_rejected(tiny_model):
    """A layer that reads the previous token without attention: right in one pass, wrong token by token."""
    model = load(tiny_model).model
    mlp = model.model.layers[0].mlp
    forward = mlp.forward
    mlp.forward = lambda x: forward(x) + torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]
    with pytest.raises(RecipeError, match=r"LlamaForCausalLM computes other log-probs token by token than on a full sequence"):
        NativeEngine(model, load_tokenizer(str(tiny_model)))


def test_a_model_with_keys_of_an_unexpected_shape_is_rejected(tiny_model):
    model = load(tiny_model).model
    model.config.head_dim = 2 * model.config.head_dim
    with pytest.raises(RecipeError, match=r"the native engine cannot sample LlamaForCausalLM: .*size"):
        NativeEngine(model, load_tokenizer(str(tiny_model)))


# Without a tokenizer -------------------------------------------------------------------------------------------------


def test_without_a_tokenizer_samples_have_no_text(llama, layout):
    requests, sampling = mixed_requests(), Sampling(max_new_tokens=16)
    with_text = sample(engine_of(llama, **layout), requests, sampling)
    engine = NativeEngine(llama.model, None, **layout)
    without = sample(engine, requests, sampling)
    assert any(s.text for _, s in with_text)
    assert {s.text for _, s in without} == {""}
    assert same_tokens([s for _, s in without], [s for _, s in with_text])
    assert [s.status for _, s in without] == [s.status for _, s in with_text]
    with pytest.raises(PlauditError, match="stop strings need a tokenizer"):
        list(engine.generate(requests, replace(sampling, stop=("e",))))
    assert same_tokens([s for _, s in sample(engine, requests, sampling)], [s for _, s in with_text]), "and the engine stays usable"


# Packed weights ------------------------------------------------------------------------------------------------------


needs_packing = pytest.mark.skipif(not cpu_linear._prepacking_works(), reason="this processor or build of torch cannot")


@pytest.fixture
def _packs(monkeypatch):
    """As on a processor with instructions for bf16: on others, our own kernel reads the weights as they are."""
    monkeypatch.setattr(cpu_ops, "multiplies_bf16", lambda: True)


def holds_packed_weights(engine: NativeEngine) -> bool:
    products = [product for layer in engine.forward.decoder.layers for product in layer.products]
    return engine.forward._prepacked_head is not None or any(product.prepacked is not None for product in products)


@pytest.mark.usefixtures("_packs")
def test_a_processor_that_cannot_prepack_samples_without(tiny_models, monkeypatch):
    """ARM, and x86 without AVX-512: oneDNN refuses when it is asked."""
    refusals = []

    def refuse(weight, rows):
        refusals.append(rows)
        raise RuntimeError("mkldnn_reorder_linear_weight: bf16 path needs the cpu support avx_ne_convert or avx512bw")

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", refuse)
    monkeypatch.setattr(forward, "PREPACK_AFTER_STEPS", 2)
    cpu_linear._prepacking_works.cache_clear()
    try:
        engine = NativeEngine(load_plain(tiny_models["llama"], dtype="bfloat16").model, load_tokenizer(str(tiny_models["llama"])))
        for _ in engine.generate(mixed_requests(), Sampling(max_new_tokens=8)):
            assert not holds_packed_weights(engine)
        assert len(refusals) == 1
    finally:
        cpu_linear._prepacking_works.cache_clear()


@needs_packing
@pytest.mark.usefixtures("_packs")
def test_packed_weights_do_not_change_samples(tiny_models, monkeypatch):
    """Half-precision models on a CPU use packed weights after a few steps: bitwise the same samples, and freed afterwards."""
    model = load_plain(tiny_models["qwen2"], dtype="bfloat16").model  # its linear layers have biases
    engine = NativeEngine(model, load_tokenizer(str(tiny_models["qwen2"])), packs=False)  # as for judges: these change no bit

    def roll_out(pack_after: int) -> list[tuple[list[int], list[float]]]:
        monkeypatch.setattr(forward, "PREPACK_AFTER_STEPS", pack_after)
        rows = []
        for drawn in engine.generate(mixed_requests(), Sampling(max_new_tokens=40)):
            rows.append((drawn.tokens.tolist(), drawn.sampler_logprobs.tolist()))
            packed.append(holds_packed_weights(engine))
        return rows

    held, packed = bytes_held(model), []
    never = roll_out(0)
    assert not any(packed)
    packed.clear()
    always = roll_out(1)
    assert all(packed)
    packed.clear()
    assert always == never == roll_out(8)
    assert packed == sorted(packed)
    assert len(set(packed)) == 2, "after the first samples"
    assert not holds_packed_weights(engine), "no second copy of the weights between calls"
    assert bytes_held(model) == held
    assert not [module for module in model.modules() if "forward" in vars(module)]


@needs_packing
@pytest.mark.usefixtures("_packs")
def test_packed_weights_are_up_to_date(tiny_models, monkeypatch):
    """After an update, and after a call that was closed early."""
    policy = load(tiny_models["llama"], dtype="bfloat16")
    monkeypatch.setattr(forward, "PREPACK_AFTER_STEPS", 1)
    engine, requests, sampling = engine_of(policy), mixed_requests(), Sampling(max_new_tokens=40)
    samples = engine.generate(requests, sampling)
    next(samples)
    assert holds_packed_weights(engine)
    samples.close()
    assert not holds_packed_weights(engine)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.25)
    packed = sample(engine, requests, sampling)
    monkeypatch.setattr(forward, "PREPACK_AFTER_STEPS", 0)
    assert same_tokens([s for _, s in packed], [s for _, s in sample(engine, requests, sampling)])
    for _, s, logits in with_reference(policy, packed):
        assert np.abs(logprobs_from(logits, s.tokens, 1.0) - s.sampler_logprobs).max() < 0.3


def many_requests() -> list[Request]:
    """As many sequences as packing by our own kernel asks for, and a few more."""
    return [replace(request, n=cpu_linear.FEWEST_ROWS) for request in mixed_requests()[:2]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_that_our_kernel_packs(tiny_models, monkeypatch, dtype):
    """Sampled with them, also after an update, log-probs are as close to the trainer's; there is no copy before several sequences
    run, nor after a call, and none if it would take a large part of the memory, or must not be made."""
    monkeypatch.setattr(cpu_ops, "multiplies_bf16", lambda: False)
    if not cpu_ops.computes_products(getattr(torch, dtype)):
        pytest.skip("needs a C compiler")
    policy = load(tiny_models["qwen2"], dtype=dtype)  # its linear layers have biases
    engine, sampling, error = engine_of(policy), Sampling(max_new_tokens=24), {}
    for number, pack_after in enumerate((0, 1, 1)):
        monkeypatch.setattr(forward, "PREPACK_AFTER_STEPS", pack_after)
        if number == 2:
            with torch.no_grad():
                for parameter in policy.model.parameters():
                    parameter.mul_(1.25)
        drawn, packed = [], []
        for one in engine.generate(many_requests(), sampling):
            drawn.append((next(r for r in many_requests() if r.prompt_id == one.prompt_id), one))
            packed.append(holds_packed_weights(engine))
        assert all(packed) if pack_after else not any(packed)
        assert not holds_packed_weights(engine)
        references = with_reference(policy, drawn)
        error[number] = max(np.abs(logprobs_from(x, s.tokens, 1.0) - s.sampler_logprobs).max() for _, s, x in references)
    assert max(error[1], error[2] / 2) <= 2 * error[0] + 1e-6, error
    assert not any(holds_packed_weights(engine) for _ in engine.generate(mixed_requests()[:1], sampling)), "too few sequences"
    helps = [cpu_linear.prepacking_helps(rows, torch.device("cpu"), getattr(torch, dtype)) for rows in (8, 9, 64, 65)]
    assert helps == [False, True, True, False], "more rows are multiplied without"
    for options in ({"packs": False}, {"reserved_bytes": total_memory(torch.device("cpu"))}):
        without = engine_of(policy, **options)
        assert not any(holds_packed_weights(without) for _ in without.generate(many_requests()[:1], sampling))


def test_a_finished_sample_is_returned_while_others_run(llama):
    """The long one draws the rest of its tokens with weights that are changed in between."""
    requests = [Request("long", prompt_of(6), max_new_tokens=40), Request("short", prompt_of(5), max_new_tokens=1)]
    engine, sampling = engine_of(llama), Sampling(max_new_tokens=40, temperature=0.0)
    head = llama.model.get_output_embeddings().weight
    (_, undisturbed), _ = sample(engine, requests, sampling)
    kept, samples = head.detach().clone(), engine.generate(requests, sampling)
    assert next(samples).prompt_id == "short"
    head.data.neg_()
    (long,) = samples
    head.data.copy_(kept)
    assert not same_tokens([long], [undisturbed])
    assert len(undisturbed) > 4
    differ = long.tokens[:4] != undisturbed.tokens[:4]
    assert differ.any(), "some of the first tokens differ"


# The residual stream -------------------------------------------------------------------------------------------------


def deep_model(folder: Path, kind: str, rows_file: Path) -> Path:
    """Deep enough for rounding errors to accumulate."""
    make_tiny_model([rows_file], folder, kind=kind, hidden_size=64, layers=16, vocabulary=320)
    return folder


def load_imprecise(folder: Path, **model) -> TrainableModel:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "keep_residual_fp32", lambda model: None)
        return load_plain(folder, **model)


def hooks(model: PreTrainedModel) -> int:
    return sum(len(module._forward_hooks) for module in model.modules())


@torch.no_grad()
def logprobs_of(model: PreTrainedModel) -> Tensor:
    return target_logprobs(model, batch_of(60, 100, 33)).logprobs_N


@pytest.mark.parametrize(("kind", "larger", "margin"), [("llama", 1.0, 1.4), ("qwen3", 1.0, 1.4), ("llama", 8.0, 2.0)])
def test_an_fp32_residual_stream_is_more_accurate(tmp_path, rows_file, kind, larger, margin):
    """Reference: the same half-precision weights in fp32. The gain is larger where layers add little to the residual stream.
    (Measured: 1.8 to 2.0 times closer, and 4.1 times.)"""
    folder = deep_model(tmp_path / kind, kind, rows_file)
    precise, plain, truth = load_plain(folder, dtype="bfloat16"), *(load_imprecise(folder, dtype="bfloat16") for _ in range(2))
    assert has_fp32_residual(precise.model)
    assert not has_fp32_residual(plain.model)
    with torch.no_grad():
        for policy in (precise, plain, truth):
            policy.model.get_input_embeddings().weight.mul_(larger)
    expected = logprobs_of(truth.model.float())
    near, far = ((logprobs_of(policy.model) - expected).abs().mean() for policy in (precise, plain))
    assert far > margin * near > 0


def test_where_the_residual_stream_is_fp32(tiny_models, policy):
    """Between layers and into norms; attention and MLP read half precision."""
    model = load_plain(tiny_models[policy.model.config.model_type], dtype="bfloat16").model
    seen: dict[str, list[torch.dtype]] = {}
    for name, module in model.model.named_modules():

        def note(module: nn.Module, arguments: tuple, name: str = name) -> None:
            seen[name] = [argument.dtype for argument in arguments if isinstance(argument, Tensor)]

        module.register_forward_pre_hook(note)
    logprobs_of(model)
    assert seen["layers.0"] == seen["layers.1"] == seen["norm"] == [torch.float32]
    for layer in ("layers.0", "layers.1"):
        assert seen[f"{layer}.input_layernorm"] == seen[f"{layer}.post_attention_layernorm"] == [torch.float32]
        for product in ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp", "mlp.down_proj"):
            assert seen[f"{layer}.{product}"] == [torch.bfloat16], product


def test_an_fp32_residual_stream_trains(tiny_models, policy):
    """All parameters get gradients in their own dtype, close to those in fp32."""
    folder = tiny_models[policy.model.config.model_type]
    half, full = load_plain(folder, dtype="bfloat16").model, load_imprecise(folder, dtype="bfloat16").model.float()
    expected = gradients(full)
    for name, gradient in gradients(half).items():
        assert gradient is not None, name
        assert gradient.dtype == torch.bfloat16
        assert (gradient.float() - expected[name]).norm() < 0.1 * expected[name].norm(), name


def test_an_fp32_residual_stream_is_not_saved(tiny_models, policy, tmp_path):
    folder = tiny_models[policy.model.config.model_type]
    load_plain(folder, dtype="bfloat16").save(tmp_path / "precise")
    load_imprecise(folder, dtype="bfloat16").save(tmp_path / "plain")
    files = sorted(path.name for path in (tmp_path / "plain").iterdir())
    assert sorted(path.name for path in (tmp_path / "precise").iterdir()) == files
    for name in files:
        assert (tmp_path / "precise" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes(), name


def test_models_whose_residual_stream_is_left_alone(tiny_models, tokenizer):
    """fp32 models have an fp32 stream already; other architectures are not supported."""
    for folder in tiny_models.values():
        model = load_plain(folder, dtype="float32").model
        assert not has_fp32_residual(model)
        assert hooks(model) == 0
    other = policy_from_config(AutoConfig.for_model("olmo2", **SMALL), tokenizer).model.to(torch.bfloat16)
    keep_residual_fp32(other)
    assert not has_fp32_residual(other)
    assert hooks(other) == 0


def test_keep_residual_fp32_is_idempotent(tiny_model):
    model = load_plain(tiny_model, dtype="bfloat16").model
    before = hooks(model)
    keep_residual_fp32(model)
    assert hooks(model) == before > 0


@pytest.mark.parametrize("decoder", ["fused", "modules"])
def test_engine_and_trainer_agree_in_half_precision(tiny_models, policy, decoder):
    """Both keep the residual stream in fp32; only rounding within layers remains."""
    own = load(tiny_models[policy.model.config.model_type], dtype="bfloat16")
    engine = engine_of(own, max_sequences=4, block_tokens=8) if decoder == "fused" else unfused(own, max_sequences=4)
    drawn, rows = sample(engine, mixed_requests(), Sampling(max_new_tokens=16)), []
    for request, s in drawn:
        tokens = np.concatenate([request.tokens, s.tokens])
        rows.append(Example(tokens, np.arange(len(tokens)) >= len(request.tokens)))
    with torch.no_grad():
        trained = target_logprobs(own.model, pack(rows, torch.device("cpu"))).logprobs_N.numpy()
    off = np.abs(trained - np.concatenate([s.sampler_logprobs for _, s in drawn]))
    assert off.mean() < 0.01
    assert off.max() < 0.15


@pytest.mark.parametrize("make", [engine_of, unfused], ids=["fused", "modules"])
@pytest.mark.slow
def test_the_engine_keeps_the_residual_stream_in_fp32(tmp_path, rows_file, make):
    """As above, for sampled log-probs. (Measured: 3.2 times closer.)"""
    folder, off = deep_model(tmp_path / "llama", "llama", rows_file), []
    for load_half in (load_plain, load_imprecise):
        half, truth = load_half(folder, dtype="bfloat16"), load_imprecise(folder, dtype="bfloat16")
        with torch.no_grad():
            for policy in (half, truth):
                policy.model.get_input_embeddings().weight.mul_(8.0)
        truth.model.float()
        drawn = sample(make(half), mixed_requests(), Sampling(max_new_tokens=16))
        errors = [
            np.abs(logprobs_from(logits, s.tokens, 1.0) - s.sampler_logprobs) for _, s, logits in with_reference(truth, drawn)
        ]
        off.append(np.concatenate(errors).mean())
    assert off[1] > 2.0 * off[0] > 0


# Attention -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["softcap", "s_aux", "position_bias"])
@pytest.mark.parametrize("own", [True, False])
def test_unsupported_attention_arguments_are_rejected(name, own):
    """Also where the engine overrides attention."""

    class Override:
        def attend(self, *arguments):
            raise AssertionError("must not be called")

    module = nn.Module()
    module.layer_idx = 0
    query, key = torch.ones(1, 4, 3, 8), torch.ones(1, 2, 3, 8)
    starts = {"cu_seq_lens_q": torch.tensor([0, 3]), "max_length_q": 3}
    with pytest.raises(NotImplementedError, match=name):
        packed_attention(module, query, key, key, None, **starts, kv=Override() if own else None, **{name: torch.tensor(1.0)})


def slow_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
    """[queries, heads, d] in float64, one query and head at a time; the queries are the last of the sequence."""
    queries, heads, _ = query.shape
    keys, kv_heads, _ = key.shape
    out = torch.empty_like(query, dtype=torch.float64)
    for i in range(queries):
        at = keys - queries + i
        first = 0 if window is None else max(0, at - window + 1)
        for head in range(heads):
            kv_head = head // (heads // kv_heads)
            scores = key[first : at + 1, kv_head].double() @ query[i, head].double() * scale
            out[i, head] = scores.softmax(0) @ value[first : at + 1, kv_head].double()
    return out


@pytest.mark.parametrize("window", [None, 1, 3, 8, 100])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("scale", [None, 0.5])
def test_more_keys_than_queries(window, kv_heads, scale):
    """Against a slow reference: chunks of prompts that start anywhere, next to complete ones."""
    queries, keys = (3, 1, 7, 12, 5), (10, 9, 7, 30, 6)
    torch.manual_seed(0)
    query, key, value = torch.randn(sum(queries), 4, 8), *torch.randn(2, sum(keys), kv_heads, 8)
    starts_q, starts_k = (torch.tensor([0, *np.cumsum(lengths)]) for lengths in (queries, keys))
    found = attend_packed(query, key, value, starts_q, starts_k, max(queries), max(keys), scale=scale, window=window, dropout=0.0)
    parts = zip(query.split(queries), key.split(keys), value.split(keys), strict=True)
    expected = torch.cat([slow_attention(q, k, v, scale or 8**-0.5, window) for q, k, v in parts])
    assert found.shape == expected.shape
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-6)


def test_one_call_at_a_time(llama):
    """Two would share rows and cache."""
    engine, requests, sampling = engine_of(llama), mixed_requests(), Sampling(max_new_tokens=8)
    expected = [s for _, s in sample(engine, requests, sampling)]
    first = engine.generate(requests, sampling)
    begun = next(first)
    with pytest.raises(PlauditError, match="this engine is still generating"):
        next(engine.generate(requests, sampling))
    rest = {(s.prompt_id, s.index): s for s in (begun, *first)}
    assert same_tokens([rest[s.prompt_id, s.index] for s in expected], expected), "and the first is undisturbed"
    unfinished = engine.generate(requests, sampling)
    next(unfinished)
    unfinished.close()
    assert same_tokens([s for _, s in sample(engine, requests, sampling)], expected)


def test_a_window_in_a_llama_config_is_ignored(tiny_models, tmp_path, llama):
    """Its modules ignore it too. (Converted models carry such keys.)"""
    folder = shutil.copytree(tiny_models["llama"], tmp_path / "stray")
    config = json.loads((folder / "config.json").read_text()) | {"sliding_window": 4}
    (folder / "config.json").write_text(json.dumps(config))
    stray, sampling = load(folder), Sampling(max_new_tokens=12)
    assert_right(stray, engine_of(stray), mixed_requests(), sampling)


def test_a_second_engine_makes_no_second_copy(tiny_models):
    policy = load(tiny_models["qwen2"])
    first, second = engine_of(policy), engine_of(policy)
    for engine in (first, second, first):
        sample(engine, mixed_requests(), Sampling(max_new_tokens=4))
    decoders = [engine.forward.decoder for engine in (first, second)]
    products = [[product.weight.data_ptr() for layer in d.layers for product in layer.products] for d in decoders]
    assert products[0] == products[1]
    where = policy.model.model.layers[1].self_attn.q_proj.weight.data_ptr()
    policy.model.model.norm.weight.data = policy.model.model.norm.weight.data.clone()
    sample(first, mixed_requests(), Sampling(max_new_tokens=4))
    assert policy.model.model.layers[1].self_attn.q_proj.weight.data_ptr() == where, "weights that have not moved stay in place"


@pytest.mark.parametrize("expands", [False, True])
@pytest.mark.parametrize("to_driver", [False, True])
def test_memory_goes_back_to_the_driver_if_others_need_it(to_driver, expands, monkeypatch):
    """What training has cached goes with it: this process keeps it for the next update, unless another one is to use it, or what
    it could use of it again would be in pieces."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True" if expands else "")
    shape, emptied = CacheShape(1, Heads(1, 1, 16), torch.float32, torch.device("cpu")), []
    cache = KVCache(shape, rows=1, blocks_per_row=1, block_tokens=16)
    cache.allocate(1)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(cache.memory is None))
    cache.shape = replace(shape, device=torch.device("cuda"))
    cache.release(to_driver=to_driver)
    assert cache.memory is None
    assert emptied == [True] * (to_driver or not expands)


def test_cached_memory_in_pieces_is_returned_before_the_cache_is_made_smaller(monkeypatch):
    """Torch has room for 100 blocks, but not in one piece; when it has returned what it can, 46 fit."""
    shape, calls = CacheShape(1, Heads(1, 1, 16), torch.float32, torch.device("cpu")), []
    cache = KVCache(shape, rows=1, blocks_per_row=1, block_tokens=16)
    make = cache._empty
    cache.shape = replace(shape, device=torch.device("cuda"))

    def empty(blocks):
        calls.append(blocks)
        if blocks > 50:
            raise torch.OutOfMemoryError
        cache.shape = shape
        return make(blocks)

    monkeypatch.setattr(cache, "_empty", empty)
    monkeypatch.setattr(native_cache, "unused_memory", lambda device: 1000 * cache.block_bytes)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("returned"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (50 * cache.block_bytes, 0))
    with pytest.warns(UserWarning, match=r"sampling takes longer"):
        assert cache.allocate(100, min_blocks=10) == 46
    assert calls == [100, "returned", 46]
    assert cache.memory is not None


@pytest.mark.parametrize("free", [10**9, 10**10])
def test_the_driver_has_memory_while_sampling(monkeypatch, free):
    """Kernels are loaded into memory that torch has not cached."""
    shape, returned = CacheShape(1, Heads(1, 1, 16), torch.float32, torch.device("cpu")), []
    cache = KVCache(shape, rows=1, blocks_per_row=1, block_tokens=16)
    memory = cache._empty(1)
    cache.shape = replace(shape, device=torch.device("cuda"))
    monkeypatch.setattr(cache, "_empty", lambda blocks: memory)
    monkeypatch.setattr(native_cache, "unused_memory", lambda device: 10**11)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 10**11))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: returned.append(cache.memory))
    assert cache.allocate(1) == 1
    assert returned == ([memory] if free < FREE_BYTES else [])


def test_blocks_are_limited_by_free_memory():
    assert blocks_that_fit(100, 10, block_bytes=1000, free=200_000) == 100
    with pytest.warns(UserWarning, match=r"sampling takes longer"):
        assert blocks_that_fit(100, 10, block_bytes=1000, free=50_000) == 46
    with pytest.raises(PlauditError, match=r"lower max_new_tokens"):
        blocks_that_fit(100, 10, block_bytes=1000, free=9_000)


def test_a_bad_stop_string_allocates_no_memory(llama):
    engine = engine_of(llama)
    with pytest.raises(PlauditError, match="special token"):
        list(engine.generate(mixed_requests(), Sampling(max_new_tokens=4, stop=("x<|im_end|>",))))
    assert engine._cache is None
    assert len(sample(engine, mixed_requests(), Sampling(max_new_tokens=4))) == 14


# CUDA graphs, with a fake device --------------------------------------------------------------------------------------------


@pytest.fixture
def operations(monkeypatch) -> list[str]:
    """The operations on a fake CUDA device."""
    log: list[str] = []

    class Graph:
        def replay(self) -> None:
            log.append("replay")

        def pool(self) -> str:
            return "pool"

    @contextmanager
    def capture(graph, pool, capture_error_mode):
        log.append(f"capture in {pool}")
        yield
        log.append("captured")

    def set_sync_debug_mode(mode) -> None:
        text = "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing operations"
        warnings.warn(text, stacklevel=2)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_sync_debug_mode)
    return log


def test_a_step_is_run_then_captured_then_replayed(operations):
    graphs = DecodeGraphs(torch.device("cuda"), never_syncs=True)
    for key in ("a", "a", "a", "b"):
        graphs.run(key, lambda key=key: operations.append(f"step {key}"))
    once, later = ["step a", "capture in None", "step a", "captured"], ["step b", "capture in pool", "step b", "captured"]
    assert operations == [*once, "replay", "replay", *later]
    graphs.clear()
    graphs.run("a", lambda: operations.append("again"))
    assert operations[-3:] == ["capture in None", "again", "captured"]


def test_a_module_that_does_not_sync_is_captured(operations):
    graphs = DecodeGraphs(torch.device("cuda"), never_syncs=False)
    for _ in range(3):
        graphs.run("a", lambda: operations.append("step"))
    assert operations == ["step", "step", "capture in None", "step", "captured", "replay"], "the first run may sync"


def test_a_module_that_syncs_is_never_captured(operations):
    graphs = DecodeGraphs(torch.device("cuda"), never_syncs=False)

    def step() -> None:
        operations.append("step")
        warnings.warn("called a synchronizing CUDA operation", stacklevel=2)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for key in ("a", "a", "a", "b"):
            graphs.run(key, step)
    assert operations == ["step"] * 4
    assert [str(w.message)[:44] for w in caught if "sampling" in str(w.message)] == ["sampling is slower than it could be: the mod"]


def test_no_graphs_on_a_cpu(operations):
    graphs = DecodeGraphs(torch.device("cpu"), never_syncs=True)
    for _ in range(2):
        graphs.run("a", lambda: operations.append("step"))
    assert operations == ["step"] * 2
