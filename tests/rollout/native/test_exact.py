"""On a GPU in half precision, the sampler's log-probs are the trainer's, up to the order of the last sum."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from plaudit.data.pack import pack
from plaudit.models.attention import NAME, packed_states
from plaudit.models.fused import prepare_layers
from plaudit.models.logprobs import target_logprobs
from plaudit.models.trainable import load_model
from plaudit.recipe import ModelSettings
from plaudit.rollout.engine import Request, Sampling
from plaudit.rollout.native import prefixes
from plaudit.rollout.native.engine import NativeEngine
from plaudit.types import Example

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: on a CPU, the order of sums varies")
KINDS = ["llama", "mistral", "qwen2", "qwen3"]
TOLERANCE = 1e-5  # sampler and trainer sum over the vocabulary in different orders


def assert_agreement(model, count: int, longest: int, new: int) -> None:
    """For prompts of 1…`longest` tokens, the engine's log-probs match those of training, packed and one by one."""
    rng, engine = np.random.default_rng(0), NativeEngine(model, None)
    requests = [Request(f"p{i}", rng.integers(5, 300, 1 + 17 * i % longest), n=2) for i in range(count)]
    prompts = {request.prompt_id: request.tokens for request in requests}
    samples = list(engine.generate(requests, Sampling(max_new_tokens=new)))
    examples = []
    for sample in samples:
        tokens = np.concatenate([prompts[sample.prompt_id], sample.tokens])
        examples.append(Example(tokens, np.arange(len(tokens)) >= len(prompts[sample.prompt_id])))
    sampled = torch.from_numpy(np.concatenate([sample.sampler_logprobs for sample in samples]))
    together = target_logprobs(model, pack(examples, "cuda")).logprobs_N.detach().cpu()
    assert (together - sampled).abs().max() < TOLERANCE
    alone = torch.cat([target_logprobs(model, pack([example], "cuda")).logprobs_N.detach().cpu() for example in examples[:5]])
    assert (alone - together[: len(alone)]).abs().max() < TOLERANCE


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", KINDS)
def test_sampler_and_trainer_agree(tiny_models, kind, dtype):
    """Few sequences and many, short ones and ones long enough for attention to split."""
    model = load_model(ModelSettings(path=str(tiny_models[kind]), dtype="bfloat16"), torch.device("cuda")).to(getattr(torch, dtype))
    for count, new in ((40, 60), (3, 700)):
        assert_agreement(model, count, 300, new)


@pytest.mark.parametrize("count", [1, 4, 17, 70])
def test_sampler_and_trainer_agree_at_the_widths_of_large_models(count):
    """Two layers of Qwen2.5-7B, whose matrix products the library would split for few rows if allowed."""
    config = Qwen2Config(
        vocab_size=32_000, hidden_size=3584, num_hidden_layers=2, num_attention_heads=28, num_key_value_heads=4,
        intermediate_size=18944, max_position_embeddings=2048, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=NAME)
    prepare_layers(model)
    assert_agreement(model, count, 90, 40)


@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(14, 2, 64), (12, 2, 128), (28, 4, 128), (4, 4, 64)])
def test_prefixes_that_tiles_read_change_no_bit(monkeypatch, heads, kv_heads, size, splits):
    """Prompts of one block and of several stretches, samples of all lengths, so that rows move and tiles shrink."""
    from plaudit.rollout.native.kernels import attention

    monkeypatch.setattr(prefixes, "WORTHWHILE_BYTES", 0)
    if not splits:  # as with more rows
        monkeypatch.setattr(attention, "PROGRAMS", 1)
        monkeypatch.setattr(attention, "MOST_TOKENS", 4096)
    config = Qwen2Config(
        vocab_size=1000, hidden_size=heads * size, num_hidden_layers=2, num_attention_heads=heads, num_key_value_heads=kv_heads,
        intermediate_size=512, max_position_embeddings=4096, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=NAME)
    model.generation_config.eos_token_id = list(range(7))
    prepare_layers(model)
    rng = np.random.default_rng(0)
    lengths = [40, 70, 257, 300, 513, 800, 1300, 1301, 1]
    requests = [Request(f"p{i}", rng.integers(7, 1000, length), n=5 + i) for i, length in enumerate(lengths)]
    found, updates = [], []
    update = prefixes.SharedPrefixes.update
    monkeypatch.setattr(prefixes.SharedPrefixes, "update", lambda self, *rest: (update(self, *rest), updates.append(self.in_use)))
    for shares in (False, True):
        engine = NativeEngine(model, None, max_sequences=60, shares_prefixes=shares)
        drawn = {(sample.prompt_id, sample.index): sample for sample in engine.generate(requests, Sampling(max_new_tokens=300))}
        found.append([drawn[key] for key in sorted(drawn)])
        assert any(updates) == engine.shares_prefixes == shares
    for alone, together in zip(*found, strict=True):
        assert np.array_equal(alone.tokens, together.tokens)
        assert np.array_equal(alone.sampler_logprobs.view(np.int32), together.sampler_logprobs.view(np.int32))


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_match_fp32(tiny_models, kind):
    """Up to the rounding of bf16, gradients are those of the same weights in fp32 on the CPU."""
    half = load_model(ModelSettings(path=str(tiny_models[kind]), dtype="bfloat16"), torch.device("cuda"))
    exact = load_model(ModelSettings(path=str(tiny_models[kind]), dtype="float32"), torch.device("cpu"))
    exact.load_state_dict({name: value.float().cpu() for name, value in half.state_dict().items()})
    sequences = [np.arange(length) % 300 for length in (20, 1, 300)]
    examples = [Example(tokens, np.zeros(len(tokens), dtype=bool)) for tokens in sequences]
    output_grad = torch.randn(321, half.config.hidden_size, generator=torch.Generator().manual_seed(0))
    for model, device in ((half, "cuda"), (exact, "cpu")):
        model.train()
        states = packed_states(model.get_decoder(), pack(examples, device))
        (states.float() * output_grad.to(device)).sum().backward()
    for (name, ours), (_, theirs) in zip(half.named_parameters(), exact.named_parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        if theirs.grad is None:
            continue  # the head is not used
        error = (ours.grad.float().cpu() - theirs.grad).norm() / theirs.grad.norm()
        assert error < 0.03, name
