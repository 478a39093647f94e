"""The native engine's own parts: architectures, windows, adapters, rows, and its scheduler.

What it shares with other engines is in the contract.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import KINDS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from plaudit.data.templates import load_template, load_tokenizer
from plaudit.errors import RecipeError
from plaudit.models.policy import Policy, load_policy
from plaudit.recipe import Lora, Model
from plaudit.rollout.engine import Request, Sampling
from plaudit.rollout.native import engine as native
from plaudit.rollout.native.engine import NativeEngine
from plaudit.rollout.native.noise import gumbel, position_keys
from plaudit.rollout.native.sampler import keep_likely
from plaudit.rollout.native.scheduler import Read, Running, Scheduler
from plaudit.rollout.native.stopping import Stopping
from plaudit.seeding import stable_seed
from plaudit.types import Sample

pytest.register_assert_rewrite("engine_contract")
from engine_contract import (  # noqa: E402
    CLOSE,
    assert_logprobs,
    greedy,
    prompt_of,
    requests_of,
    same,
    sharpen,
    whole_logits,
    whole_logprobs,
)

LENGTHS = (3, 120, 1, 33, 8, 2, 57)
COUNTS = (2, 1, 3, 1, 4, 1, 2)


def mixed_requests(limits: Sequence[int | None] = (20, 3, None, 40, 1, 12, 25)) -> list[Request]:
    """Prompts, counts and limits of all sizes."""
    mixed = zip(requests_of(LENGTHS), COUNTS, limits, strict=True)
    return [replace(request, n=n, max_new_tokens=limit) for request, n, limit in mixed]


def load(folder: Path, **model) -> Policy:
    template = load_template(load_tokenizer(str(folder)), None)
    policy = load_policy(Model(path=str(folder), dtype="float32", **model), template, torch.device("cpu"))
    sharpen(policy.model)
    return policy


def engine_of(policy: Policy, **settings) -> NativeEngine:
    return NativeEngine(policy.model, policy.template.tokenizer, **settings)


def sample(engine: NativeEngine, requests: Sequence[Request], sampling: Sampling) -> list[tuple[Request, Sample]]:
    """By request, then by index, each beside its request."""
    samples = {(s.prompt_id, s.index): s for s in engine.generate(requests, sampling)}
    assert len(samples) == sum(r.n for r in requests)
    return [(request, samples[request.prompt_id, index]) for request in requests for index in range(request.n)]


def assert_right(policy: Policy, engine: NativeEngine, requests: Sequence[Request], sampling: Sampling) -> None:
    """Log-probs are those of a whole forward pass, and tokens those of their keys."""
    for request, s in sample(engine, requests, sampling):
        assert_logprobs(policy.model, request.tokens, s, sampling.temperature)
        assert_tokens_of_keys(policy.model, request, s, sampling)


@pytest.fixture(scope="module")
def policies(tiny_models) -> dict[str, Policy]:
    return {kind: load(folder) for kind, folder in tiny_models.items()}


@pytest.fixture(params=KINDS)
def policy(request, policies) -> Policy:
    return policies[request.param]


@pytest.fixture
def llama(policies) -> Policy:
    return policies["llama"]


# What noise and logits say -------------------------------------------------------------------------------------------


def perturbed_logits(model: PreTrainedModel, request: Request, s: Sample, sampling: Sampling) -> torch.Tensor:
    """[t, V]: what each token of the sample must be the argmax of, from a whole forward pass and the sample's key."""
    logits = whole_logits(model, request.tokens, s.tokens) / sampling.temperature
    key = stable_seed(sampling.seed, sampling.step, request.prompt_id, s.index)
    key = torch.tensor(key - (1 << 64) if key >> 63 else key)
    keys = position_keys(key.expand(len(s)), torch.arange(len(s)))
    return keep_likely(logits, sampling.top_k, sampling.top_p, sampling.min_p) + gumbel(keys, logits.shape[1])


def assert_tokens_of_keys(model: PreTrainedModel, request: Request, s: Sample, sampling: Sampling, close: float = CLOSE) -> None:
    perturbed = perturbed_logits(model, request, s, sampling)
    short_of_best = perturbed.max(-1).values - perturbed.gather(-1, torch.from_numpy(s.tokens).long()[:, None])[:, 0]
    assert short_of_best.max() <= close, f"{s.prompt_id}/{s.index}: {short_of_best}"


def assert_same_tokens(
    model: PreTrainedModel, request: Request, a: Sample, b: Sample, sampling: Sampling, close: float = CLOSE
) -> None:
    """Equal; or where they first differ, each has one of the two best tokens, and these are closer than rounding can tell."""
    if same([a], [b]):
        return
    at = next((i for i, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=False)) if x != y), None)
    assert at is not None, "one ends where the other goes on"
    best = perturbed_logits(model, request, replace(a, tokens=a.tokens[: at + 1]), sampling)[at].topk(2)
    assert set(best.indices.tolist()) == {int(a.tokens[at]), int(b.tokens[at])}
    assert best.values[0] - best.values[1] < close, f"{request.prompt_id}/{a.index}: other tokens from {at} on"


def test_that_check_itself(llama):
    """It takes a second-best token for a bad one, unless it is as good as the best."""
    request, sampling = Request("p", prompt_of(9)), Sampling(max_new_tokens=12)
    ((_, s),) = sample(engine_of(llama), [request], sampling)
    best = perturbed_logits(llama.model, request, s, sampling)[4].topk(3)
    second, third = (replace(s, tokens=np.array([*s.tokens[:4], best.indices[i], *s.tokens[5:]])) for i in (1, 2))
    gap = (best.values[0] - best.values[1]).item()
    assert_same_tokens(llama.model, request, s, second, sampling, close=gap * 1.01)
    assert_same_tokens(llama.model, request, second, s, sampling, close=gap * 1.01)
    for other, close in [(second, gap * 0.99), (second, CLOSE), (third, 100.0), (replace(s, tokens=s.tokens[:4]), 100.0)]:
        with pytest.raises(AssertionError):
            assert_same_tokens(llama.model, request, s, other, sampling, close)


# Architectures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_and_tokens(policy, temperature):
    """Four rows for 14 samples: they leave, move and start all the time."""
    sampling = Sampling(max_new_tokens=16, temperature=temperature, seed=1, step=3)
    assert_right(policy, engine_of(policy, max_sequences=4), mixed_requests(), sampling)


def test_greedy_is_what_generate_writes(policy):
    for request, s in sample(
        engine_of(policy, max_sequences=3), requests_of(LENGTHS), Sampling(max_new_tokens=16, temperature=0.0)
    ):
        assert s.tokens.tolist() == greedy(policy.model, request.tokens, 16)
        assert_logprobs(policy.model, request.tokens, s, temperature=0.0)


@pytest.mark.parametrize("window", [2, 8, 24])
@pytest.mark.parametrize("kind", ["mistral", "qwen2"])
def test_sliding_windows(tiny_models, policies, tmp_path, kind, window):
    """Prompts shorter and longer than the window, and answers that cross it. Qwen2 has windows in its second layer only."""
    shutil.copytree(tiny_models[kind], tmp_path / "windowed")
    config_file = tmp_path / "windowed" / "config.json"
    config = json.loads(config_file.read_text()) | {"sliding_window": window}
    if kind == "qwen2":
        config |= {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]}
    config_file.write_text(json.dumps(config))
    windowed, sampling = load(tmp_path / "windowed"), Sampling(max_new_tokens=20)
    assert_right(windowed, engine_of(windowed, max_sequences=5), mixed_requests(), sampling)
    request = requests_of((40,))[0]
    ((_, s),) = sample(engine_of(windowed), [request], Sampling(max_new_tokens=16, temperature=0.0))
    assert s.tokens.tolist() == greedy(windowed.model, request.tokens, 16)
    without = whole_logprobs(policies[kind].model, request.tokens, s.tokens, 1.0)
    assert np.abs(without - s.sampler_logprobs).max() > 100 * CLOSE, "a window makes a difference that is seen"


# Precision, adapters, modes ------------------------------------------------------------------------------------------


def test_bf16(tiny_models):
    """Near the whole forward pass in bf16, and near that of the same weights in fp32."""
    policy, sampling = load(tiny_models["qwen3"]), Sampling(max_new_tokens=16, temperature=0.8)
    policy.model.to(torch.bfloat16)
    drawn = sample(engine_of(policy, max_sequences=4), mixed_requests(), sampling)
    assert engine_of(policy).shape.dtype == torch.bfloat16

    def off() -> np.ndarray:
        whole = [whole_logprobs(policy.model, request.tokens, s.tokens, 0.8) for request, s in drawn]
        return np.abs(np.concatenate([s.sampler_logprobs for _, s in drawn]) - np.concatenate(whole))

    near = off()
    policy.model.float()
    for errors in (near, off()):
        assert errors.mean() < 0.03, errors.mean()
        assert errors.max() < 0.25, errors.max()


@pytest.fixture
def adapted(tiny_models) -> Policy:
    """With adapters that do something, and dropout that would be seen."""
    policy = load(tiny_models["qwen2"], lora=Lora(rank=4, alpha=8.0, dropout=0.5))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in policy.trainable():
            if "lora_" in name:
                parameter.normal_(std=0.3)
    return policy


def test_adapters_are_sampled_with(adapted):
    requests, sampling = mixed_requests(), Sampling(max_new_tokens=16)
    engine = engine_of(adapted, max_sequences=4)
    assert_right(adapted, engine, requests, sampling)
    with_adapters = [s for _, s in sample(engine, requests, sampling)]
    with torch.no_grad():
        for name, parameter in adapted.trainable():
            if "lora_B" in name:
                parameter.zero_()
    assert not same([s for _, s in sample(engine, requests, sampling)], with_adapters)


def test_training_in_between_drops_nothing_out(adapted):
    """Whoever takes the samples may put the model in training mode."""
    requests, sampling, engine = mixed_requests(), Sampling(max_new_tokens=16), engine_of(adapted, max_sequences=4)
    undisturbed = [s for _, s in sample(engine, requests, sampling)]
    samples = {}
    adapted.model.train()
    for s in engine.generate(requests, sampling):
        samples[s.prompt_id, s.index] = s
        adapted.model.train()
    assert same([samples[s.prompt_id, s.index] for s in undisturbed], undisturbed)


def test_gradient_checkpointing_does_not_disturb(tiny_models, llama):
    checkpointed, requests, sampling = load(tiny_models["llama"], gradient_checkpointing=True), mixed_requests(), Sampling(16)
    plain = [s for _, s in sample(engine_of(llama), requests, sampling)]
    assert same([s for _, s in sample(engine_of(checkpointed), requests, sampling)], plain)


# Batches -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_tokens_do_not_depend_on_how_many_run_beside(llama, rows):
    sampling = Sampling(max_new_tokens=16, temperature=0.9, top_p=0.95, seed=4)
    many = sample(engine_of(llama), mixed_requests(), sampling)
    few = sample(engine_of(llama, max_sequences=rows), mixed_requests(), sampling)
    for (request, a), (_, b) in zip(many, few, strict=True):
        assert_same_tokens(llama.model, request, a, b, sampling)


def test_tokens_do_not_depend_on_order_or_company(llama):
    requests, sampling = mixed_requests(), Sampling(max_new_tokens=16)
    together = {(s.prompt_id, s.index): s for _, s in sample(engine_of(llama), requests, sampling)}
    others = [sample(engine_of(llama, max_sequences=6), requests[::-1], sampling)]
    others += [sample(engine_of(llama), [request], sampling) for request in requests]
    for drawn in others:
        for request, s in drawn:
            assert_same_tokens(llama.model, request, together[s.prompt_id, s.index], s, sampling)


@pytest.mark.parametrize("budget", [1, 40])
def test_tokens_do_not_depend_on_how_prompts_are_read(llama, monkeypatch, budget):
    """One by one, or a few at a time."""
    sampling = Sampling(max_new_tokens=16)
    at_once = sample(engine_of(llama), mixed_requests(), sampling)
    monkeypatch.setitem(native.PREFILL_TOKENS, "cpu", budget)
    for (request, a), (_, b) in zip(at_once, sample(engine_of(llama), mixed_requests(), sampling), strict=True):
        assert_same_tokens(llama.model, request, a, b, sampling)


def test_little_memory_means_fewer_rows(llama, monkeypatch):
    engine, requests, sampling = engine_of(llama), mixed_requests(), Sampling(max_new_tokens=16)
    plenty = sample(engine, requests, sampling)
    assert engine._rows(14, 192) == 14
    assert engine._rows(1000, 192) == 256
    monkeypatch.setattr(native, "CACHE_SHARE", 0.0)
    assert engine._rows(14, 192) == 1
    for (request, a), (_, b) in zip(plenty, sample(engine, requests, sampling), strict=True):
        assert_same_tokens(llama.model, request, a, b, sampling)


def test_what_memory_held_before_does_not_matter(llama):
    """Deterministic torch fills new memory with NaN, which no mask would keep from spreading."""
    requests, sampling = mixed_requests(), Sampling(max_new_tokens=16)
    expected = [s for _, s in sample(engine_of(llama), requests, sampling)]
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all(), "or nothing is shown"
        samples = [s for _, s in sample(engine_of(llama), requests, sampling)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(np.isfinite(s.sampler_logprobs).all() for s in samples)
    assert same(samples, expected)


# Stop strings alone --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return load_tokenizer(str(tiny_model))


ALPHABET = "Whatis the answer 1 + 2é☕🎉\n"


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_looking_at_the_last_tokens_is_enough(tokenizer, data):
    """A response ends at the token with which its whole text first holds a stop string, however it is cut into tokens."""
    pieces = data.draw(
        st.lists(st.text(ALPHABET, max_size=8) | st.sampled_from(["", "<|im_start|>", "☕"]), min_size=1, max_size=12)
    )
    tokens = [token for piece in pieces for token in tokenizer.encode(piece)]
    tokens += [data.draw(st.integers(3, 319)) for _ in range(3)]
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    begin = data.draw(st.integers(0, len(text) - 1))
    stops = (text[begin : begin + data.draw(st.integers(1, 12))], "never")
    stopping = Stopping(tokenizer, frozenset(), stops)
    whole = [tokenizer.decode(tokens[: i + 1], skip_special_tokens=True) for i in range(len(tokens))]
    if "\ufffd" in stops[0]:  # half a character, which more tokens may make whole
        return
    first = next(i for i, text in enumerate(whole) if stops[0] in text)
    for i in range(first + 1):
        sequence = Running(Request("p", np.zeros(1)), 0, 1000, 0, tokens[: i + 1])
        assert stopping.status(sequence) == ("finished" if i == first else None)
    assert stopping.text(tokens[: first + 1]) == whole[first][: whole[first].index(stops[0]) + len(stops[0])]


# The scheduler alone -------------------------------------------------------------------------------------------------


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    counts=st.lists(st.integers(0, 6), max_size=8),
    rows=st.integers(1, 7),
    budget=st.integers(1, 40),
    data=st.data(),
)
def test_scheduler(counts, rows, budget, data):
    """Sequences end at random. `cells` is the cache: who lies in which row, moved as the engine moves keys and values."""
    lengths = [data.draw(st.integers(1, 30)) for _ in counts]
    limits = [data.draw(st.none() | st.integers(1, 5)) for _ in counts]
    requests = [Request(f"p{i}", np.zeros(lengths[i]), n, limits[i]) for i, n in enumerate(counts)]
    scheduler = Scheduler(requests, Sampling(max_new_tokens=4, seed=1, step=2), rows=rows, prefill_tokens=budget)
    cells: list[Running | None] = [None] * rows
    read, began = [], []

    for _ in range(10 * sum(counts) + 10):
        if not scheduler.busy:
            break
        prompts = scheduler.next_prompts()
        assert len(prompts) <= 1 or sum(len(p.tokens) for p in prompts) <= budget
        assert not prompts or len(scheduler.running) < rows, "none is read before a row is free"
        assert sum(p.n for p in prompts[:-1]) < rows - len(scheduler.running) or not prompts, "nor one that could not start"
        read += prompts
        scheduler.read.extend(Read(p, torch.empty(0), torch.empty(0)) for p in prompts)
        assert scheduler.read or scheduler.running, "there is always something to do"

        free, left = rows - len(scheduler.running), sum(r.request.n - r.started for r in scheduler.read)
        started = scheduler.start()
        assert len(started) == min(free, left), "no row is left free that could be used"
        for of, sequence in started:
            assert of.request is sequence.request
            assert sequence.limit == (sequence.request.max_new_tokens or 4)
            key = stable_seed(1, 2, sequence.request.prompt_id, sequence.index)
            assert -(1 << 63) <= sequence.key < 1 << 63
            assert sequence.key % (1 << 64) == key
            began.append((sequence.request.prompt_id, sequence.index))
            sequence.tokens.append(0)
            assert sequence.position == len(sequence.request.tokens)
            if sequence.limit > 1:
                cells[len(scheduler.running)] = sequence
                scheduler.running.append(sequence)

        assert len(scheduler.running) <= rows
        for row in range(len(scheduler.running) - 1, -1, -1):
            sequence = scheduler.running[row]
            sequence.tokens.append(0)
            if len(sequence.tokens) == sequence.limit or data.draw(st.booleans()):
                moved = scheduler.leave(row)
                assert moved == len(scheduler.running), "the last row's sequence"
                cells[row], cells[moved] = cells[moved], None
                assert sequence not in [s for s in scheduler.running if s is sequence]
        running = len(scheduler.running)
        assert all(a is b for a, b in zip(cells, scheduler.running, strict=False))
        assert cells[running:] == [None] * (rows - running), "rows in use have no gap"

    assert not scheduler.busy
    assert read == [r for r in requests if r.n], "in order, each once"
    assert began == [(r.prompt_id, index) for r in requests for index in range(r.n)]


# Models that it must refuse ------------------------------------------------------------------------------------------


def test_a_model_with_another_memory_of_its_past_is_refused(tiny_model):
    """A layer that also looks at the token before by other means than attention: right in one pass, wrong token by token."""
    model = load(tiny_model).model
    mlp = model.model.layers[0].mlp
    forward = mlp.forward
    mlp.forward = lambda x: forward(x) + torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]
    with pytest.raises(RecipeError, match=r"LlamaForCausalLM computes other log-probs token by token than on a whole sequence"):
        NativeEngine(model, load_tokenizer(str(tiny_model)))


def test_a_model_with_keys_of_another_shape_is_refused(tiny_model):
    model = load(tiny_model).model
    model.config.head_dim = 2 * model.config.head_dim
    with pytest.raises(RecipeError, match=r"the native engine cannot sample LlamaForCausalLM: .*size"):
        NativeEngine(model, load_tokenizer(str(tiny_model)))


def test_packed_linear_layers_change_nothing(tiny_models, monkeypatch):
    """Half-precision models on a CPU are sampled with packed weights after a few steps: the same bits, and no trace afterwards."""
    from plaudit.rollout.native import forward

    folder = tiny_models["qwen2"]  # its linear layers have biases
    template = load_template(load_tokenizer(str(folder)), None)
    model = load_policy(Model(path=str(folder), dtype="bfloat16"), template, torch.device("cpu")).model
    engine = NativeEngine(model, template.tokenizer)

    def rolled(pays_after: int) -> list[tuple[list[int], list[float]]]:
        monkeypatch.setattr(forward, "PAYS_AFTER_STEPS", pays_after)
        samples = engine.generate(mixed_requests(), Sampling(max_new_tokens=40))
        return [(sample.tokens.tolist(), sample.sampler_logprobs.tolist()) for sample in samples]

    packed = []
    monkeypatch.setattr(forward, "PackedLinears", type("Counted", (forward.PackedLinears,), {
        "__init__": lambda self, model: packed.append(model) or forward.PackedLinears.__mro__[1].__init__(self, model)
    }))  # fmt: skip
    never, always = rolled(0), rolled(1)
    assert packed == [model]
    assert always == never
    assert engine.forward._packed is None, "no second copy of the weights while others compute"
    assert not [module for module in model.modules() if "forward" in vars(module)]
