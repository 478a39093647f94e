"""Packed batches give the same loss and gradient as padded ones in transformers, whatever the split.

Two gradients count as equal if ‖a − b‖ ≤ tolerance · ‖b‖ for every parameter. In fp32, which models are trained in, rounding alone
makes up to 7e-7 of difference. In float64 it hardly matters: a difference above 1e-12 there means another formula.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from plaudit.data.pack import micro_batches, pack
from plaudit.data.templates import load_template, load_tokenizer
from plaudit.models import attention
from plaudit.models.logprobs import target_logprobs
from plaudit.models.trainable import TrainableModel, load_policy
from plaudit.objectives.supervised import nll
from plaudit.recipe import LoraSettings, ModelSettings
from plaudit.types import Batch, Example
from support.examples import make_examples
from support.models import KINDS

pytestmark = pytest.mark.grid(4)

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}
LENGTHS = (5, 33, 2, 17, 48, 9, 21, 40)
TOTAL_TOKENS = sum(LENGTHS)

Gradients = dict[str, Tensor]


def load(folder: Path, dtype: torch.dtype = torch.float32, **model) -> TrainableModel:
    template = load_template(load_tokenizer(str(folder)), None)
    policy = load_policy(ModelSettings(path=str(folder), dtype="float32", **model), template, torch.device("cpu"))
    policy.model.to(dtype)
    return policy


@pytest.fixture(scope="module")
def policies(tiny_models) -> dict[tuple[str, torch.dtype], TrainableModel]:
    return {(kind, dtype): load(folder, dtype) for kind, folder in tiny_models.items() for dtype in TOLERANCE}


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.fixture(params=TOLERANCE, ids=["fp32", "fp64"])
def dtype(request) -> torch.dtype:
    return request.param


@pytest.fixture
def policy(policies, kind, dtype) -> TrainableModel:
    return policies[kind, dtype]


def gradients_of(policy: TrainableModel) -> Gradients:
    return {name: p.grad.clone() for name, p in policy.trainable() if p.grad is not None}


def packed(policy: TrainableModel, batches: Sequence[Batch]) -> tuple[float, Gradients]:
    """Our loss and gradient, summed over micro-batches."""
    num_targets = sum(batch.num_targets for batch in batches)
    policy.model.zero_grad()
    total = 0.0
    for batch in batches:
        loss = nll(target_logprobs(policy.model, batch).logprobs_N, num_targets)
        loss.backward()
        total += loss.item()
    return total, gradients_of(policy)


def padded(policy: TrainableModel, examples: Sequence[Example], attn_implementation: str) -> tuple[float, Gradients]:
    """The same in plain transformers: padded on the right, its own attention and mask, full logits."""
    shape = len(examples), max(map(len, examples))
    tokens, attention_mask = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    loss_mask = torch.zeros(shape, dtype=torch.bool)
    for i, example in enumerate(examples):
        tokens[i, : len(example)] = torch.from_numpy(example.tokens)
        loss_mask[i, : len(example)] = torch.from_numpy(example.loss_mask)
        attention_mask[i, : len(example)] = 1
    policy.model.set_attn_implementation(attn_implementation)
    policy.model.zero_grad()
    logits = policy.model(input_ids=tokens, attention_mask=attention_mask, use_cache=False).logits
    logprobs = logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    loss = -logprobs[loss_mask[:, 1:]].sum() / loss_mask.sum()
    loss.backward()
    policy.model.set_attn_implementation(attention.NAME)
    return loss.item(), gradients_of(policy)


def assert_same(ours: tuple[float, Gradients], theirs: tuple[float, Gradients]) -> None:
    tolerance = TOLERANCE[next(iter(ours[1].values())).dtype]
    assert ours[0] == pytest.approx(theirs[0], rel=tolerance)
    assert ours[1].keys() == theirs[1].keys()
    off = {name: ((ours[1][name] - g).norm() / g.norm()).item() for name, g in theirs[1].items()}
    worst = max(off, key=lambda name: off[name])
    assert off[worst] <= tolerance, f"{worst}: {off[worst]:.2e}"


# Packed and padded ---------------------------------------------------------------------------------------------------


# Not eager in float64: transformers computes its softmax in fp32.
@pytest.mark.parametrize(
    ("dtype", "attn_implementation"),
    [(torch.float32, "eager"), (torch.float32, "sdpa"), (torch.float64, "sdpa")],
    indirect=["dtype"],
    ids=["fp32-eager", "fp32-sdpa", "fp64-sdpa"],
)
def test_packed_equals_padded(policy, attn_implementation):
    examples = make_examples()
    ours, theirs = packed(policy, [pack(examples)]), padded(policy, examples, attn_implementation)
    assert_same(ours, theirs)
    assert set(ours[1]) == {name for name, _ in policy.model.named_parameters()}, "every parameter has a gradient"


def test_a_leak_between_sequences_would_be_detected(policy):
    """The tolerance is tight enough: all rows as one long sequence give a clearly different gradient."""
    examples = make_examples()
    one_sequence = Example(np.concatenate([e.tokens for e in examples]), np.concatenate([e.loss_mask for e in examples]))
    with pytest.raises(AssertionError):
        assert_same(packed(policy, [pack([one_sequence])]), padded(policy, examples, "sdpa"))


# Splits and order ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1, 20, 50, 64, 100, TOTAL_TOKENS - 1])
def test_any_token_budget_gives_the_full_batch_gradient(policy, budget):
    """A budget of 1 gives every row its own micro-batch."""
    examples = make_examples()
    split, full = micro_batches(examples, budget), micro_batches(examples, TOTAL_TOKENS)
    assert len(full) == 1 < len(split)
    assert len(split) == len(examples) or budget > 1
    assert_same(packed(policy, split), packed(policy, full))


@st.composite
def partitions(draw) -> list[list[int]]:
    """The rows in any order, in any groups."""
    order = draw(st.permutations(range(len(LENGTHS))))
    cuts = sorted(draw(st.sets(st.integers(1, len(order) - 1))))
    return [list(order[a:b]) for a, b in zip([0, *cuts], [*cuts, len(order)], strict=True)]


@settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(groups=partitions())
def test_any_grouping_gives_the_full_batch_gradient(policy, groups):
    examples = make_examples()
    batches = [pack([examples[i] for i in group]) for group in groups]
    assert_same(packed(policy, batches), packed(policy, [pack(examples)]))


def test_row_order_does_not_matter(policy):
    examples = make_examples()
    in_order, backwards = packed(policy, [pack(examples)]), packed(policy, [pack(examples[::-1])])
    assert_same(in_order, backwards)
    assert_same(packed(policy, [pack(sorted(examples, key=len))]), in_order)


# Isolation -----------------------------------------------------------------------------------------------------------


def test_sequences_do_not_see_each_other(policy):
    """Changing the tokens of one sequence leaves the log-probs of all others the same, bit for bit."""
    examples, others = make_examples(seed=0), make_examples(seed=1)

    def per_sequence(rows: list[Example]) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return target_logprobs(policy.model, pack(rows)).logprobs_N.split([e.num_targets for e in rows])

    before = per_sequence(examples)
    for changed in range(len(examples)):
        rows = list(examples)
        rows[changed] = Example(others[changed].tokens, examples[changed].loss_mask)
        after = per_sequence(rows)
        assert [i for i in range(len(rows)) if not torch.equal(before[i], after[i])] == [changed]


# Sliding windows -----------------------------------------------------------------------------------------------------


def with_config(folder: Path, to: Path, **settings) -> Path:
    """A copy of the model folder with changed settings in its config.json."""
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**config, **settings}))
    return to


@pytest.mark.parametrize("window", [4, 8, 40, 46, 48])
@pytest.mark.parametrize("kind", ["mistral", "qwen2"])
def test_sliding_windows_match_transformers(tiny_models, policies, tmp_path, kind, dtype, window):
    """The longest row has 48 tokens, so a window of 48 has no effect. Qwen2 has windows in its second layer only."""
    settings = {"sliding_window": window}
    if kind == "qwen2":
        settings |= {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]}
    policy = load(with_config(tiny_models[kind], tmp_path / "windowed", **settings), dtype)
    examples = make_examples()
    ours = packed(policy, [pack(examples)])
    assert_same(ours, padded(policy, examples, "eager" if dtype == torch.float32 else "sdpa"))
    assert_same(packed(policy, micro_batches(examples, 50)), ours)
    without_window = packed(policies[kind, dtype], [pack(examples)])[1]
    assert all(torch.equal(g, without_window[name]) for name, g in ours[1].items()) == (window >= 48)


# Gradient checkpointing ----------------------------------------------------------------------------------------------


def test_gradient_checkpointing_does_not_change_gradients(policy, tiny_models, kind, dtype):
    checkpointed, batches = load(tiny_models[kind], dtype, gradient_checkpointing=True), micro_batches(make_examples(), 100)
    runs = []
    for layer in checkpointed.model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    assert_same(packed(checkpointed, batches), packed(policy, batches))
    assert len(runs) == 2 * 2 * len(batches), "each of the two layers runs again in the backward pass"


# LoRA ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[False, True], ids=["plain", "checkpointed"])
def adapted(request, tiny_models, dtype) -> TrainableModel:
    """Adapters with B ≠ 0: they start with B = 0, where the gradient of A is 0."""
    policy = load(tiny_models["qwen2"], dtype, lora=LoraSettings(rank=4, alpha=8.0), gradient_checkpointing=request.param)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in policy.trainable():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    return policy


@pytest.mark.grid(2)
def test_lora_trains_only_adapters_and_the_same_for_any_split(adapted):
    examples = make_examples()
    full = packed(adapted, [pack(examples)])
    assert set(full[1]) == {name for name, _ in adapted.model.named_parameters() if ".lora_" in name}
    assert all(p.grad is None for name, p in adapted.model.named_parameters() if ".lora_" not in name)
    # 7 linear layers in each of 2 blocks, 2 matrices each; the head has none.
    assert len(full[1]) == 7 * 2 * 2
    assert_same(full, padded(adapted, examples, "sdpa"))
    for budget in (1, 50, 100):
        assert_same(packed(adapted, micro_batches(examples, budget)), full)
