"""Samples that share a prompt's tokens have the log-probs, scores and gradients that they have by themselves."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plaudit.data.pack import FEWEST_SHARED, KEYS_PER_TOKEN, pack, pack_pairs, split_examples, split_pairs
from plaudit.data.templates import load_template, load_tokenizer
from plaudit.models.classifier import load_classifier, sequence_scores
from plaudit.models.critic import target_values
from plaudit.models.logprobs import target_logprobs
from plaudit.models.trainable import TrainableModel, load_policy
from plaudit.recipe import ModelSettings
from plaudit.types import Example, Pair
from support.models import KINDS


def group(random: np.random.RandomState, prompt: int, responses: list[int], *, with_targets: bool = True) -> list[Example]:
    tokens = random.randint(3, 300, prompt).astype(np.int32)
    whole = [np.concatenate([tokens, random.randint(3, 300, n).astype(np.int32)]) for n in responses]
    return [Example(one, (np.arange(len(one)) >= prompt) & with_targets) for one in whole]


def two_groups() -> list[Example]:
    random = np.random.RandomState(0)
    return [*group(random, 40, [7, 1, 12, 30]), *group(random, 9, [5, 5]), *group(random, 21, [3])]


@pytest.fixture(params=KINDS)
def policy(request, tiny_models) -> TrainableModel:
    folder = str(tiny_models[request.param])
    template = load_template(load_tokenizer(folder), None)
    return load_policy(ModelSettings(path=folder, dtype="float32"), template, torch.device("cpu"))


def weighted(policy: TrainableModel, examples: list[Example], *, share: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probs; and the gradients of a sum in which every target has another weight, also of the entropies."""
    policy.model.zero_grad()
    logprobs_N, entropy_N = target_logprobs(policy.model, pack(examples, share=share), entropy="with_gradient")
    weights = torch.linspace(-1, 1, len(logprobs_N))
    ((logprobs_N + 0.1 * entropy_N) * weights).sum().backward()
    return logprobs_N.detach(), {name: p.grad.clone() for name, p in policy.trainable() if p.grad is not None}


def assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float) -> None:
    assert ours.keys() == theirs.keys()
    off = {name: ((ours[name] - g).norm() / g.norm()).item() for name, g in theirs.items()}
    assert max(off.values()) <= tolerance, max(off.items(), key=lambda item: item[1])


def test_same_log_probs_and_gradients(policy):
    examples = two_groups()
    shared, alone = (weighted(policy, examples, share=share) for share in (True, False))
    assert torch.allclose(shared[0], alone[0], atol=2e-6, rtol=0)
    assert_close(shared[1], alone[1], 1e-6)


def test_a_longer_sequence_than_a_sliding_window(tiny_models):
    folder = str(tiny_models["mistral"])
    template = load_template(load_tokenizer(folder), None)
    policy = load_policy(ModelSettings(path=folder, dtype="float32"), template, torch.device("cpu"))
    policy.model.config.sliding_window = 8
    examples = two_groups()
    shared, alone = (weighted(policy, examples, share=share) for share in (True, False))
    assert torch.allclose(shared[0], alone[0], atol=2e-6, rtol=0)
    assert_close(shared[1], alone[1], 1e-6)


def test_scores_of_pairs_and_values_of_a_critic(tiny_models):
    """Pairs without targets share what both answers begin with, up to the token whose state is scored."""
    folder = str(tiny_models["qwen2"])
    template = load_template(load_tokenizer(folder), None)
    classifier = load_classifier(ModelSettings(path=folder, dtype="float32"), template, torch.device("cpu"), seed=1)
    random = np.random.RandomState(3)
    pairs = [Pair(*group(random, prompt, [5, 9], with_targets=False)) for prompt in (3, 30, 50)]
    same_start = Pair(*(Example(np.r_[np.arange(3, 40), end].astype(np.int32), np.zeros(38, bool)) for end in (5, 6)))
    batches = [pack_pairs([*pairs, same_start], share=share) for share in (True, False)]
    assert batches[0].num_tokens == batches[1].num_tokens - 30 - 50 - 37
    with torch.no_grad():
        shared, alone = (sequence_scores(classifier.model, batch) for batch in batches)
    assert torch.allclose(shared, alone, atol=1e-6)
    with torch.no_grad():
        values = [target_values(classifier.model, pack(two_groups(), share=share)) for share in (True, False)]
    assert torch.allclose(*values, atol=1e-6)


# Packing -------------------------------------------------------------------------------------------------------------


def test_tokens_of_a_prompt_are_in_the_batch_once():
    examples = two_groups()
    batch = pack(examples, share=True)
    assert batch.num_tokens == (40 + 7 + 1 + 12 + 30) + (9 + 5 + 5) + (21 + 3)
    assert batch.shared is not None
    keys = np.split(batch.tokens_T[batch.shared.keys_U].numpy(), batch.shared.starts_S1[1:-1].numpy())
    assert all((of_sequence == example.tokens).all() for of_sequence, example in zip(keys, examples, strict=True))
    assert batch.tokens_T[batch.loss_mask_T].tolist() == [t for e in examples for t in e.tokens[e.loss_mask]]
    assert batch.target_lengths_S.tolist() == [example.num_targets for example in examples]
    before = [t for e in examples for t in e.tokens[np.flatnonzero(e.loss_mask) - 1]]
    assert batch.tokens_T[batch.predictors_N].tolist() == before


def test_targets_are_never_shared():
    """Two samples may begin with the same words: each has its own log-probs of them."""
    tokens = np.arange(3, 40).astype(np.int32)
    examples = [Example(tokens, np.arange(37) >= 20)] * 3
    batch = pack(examples, share=True)
    assert batch.num_tokens == 20 + 3 * 17
    assert batch.num_targets == 3 * 17


def test_few_common_tokens_are_not_shared():
    random = np.random.RandomState(0)
    assert pack(group(random, FEWEST_SHARED - 1, [4, 4]), share=True).shared is None
    assert pack(group(random, FEWEST_SHARED, [4, 4]), share=True).shared is not None


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.lists(st.integers(1, 40), min_size=1, max_size=6)), min_size=1, max_size=5),
    st.integers(1, 200),
    st.integers(1, 3),
)
def test_splits(shapes, budget, processes):
    """Every sequence exactly once, within the budget wherever sequences are shorter than it, never more batches than without
    sharing; and what is packed is what was split."""
    random = np.random.RandomState(0)
    examples = [example for prompt, responses in shapes for example in group(random, prompt, responses)]
    parts = split_examples(examples, budget, processes, share=True)
    assert sorted(i for part in parts for i in part) == list(range(len(examples)))
    assert len(parts) >= min(processes, len(examples))
    for part in parts:
        batch = pack([examples[i] for i in part], share=True)
        assert batch.num_tokens <= budget or len(part) == 1
        keys = len(batch.tokens_T) if batch.shared is None else len(batch.shared.keys_U)
        assert keys <= KEYS_PER_TOKEN * max(budget, batch.num_tokens) or len(part) == 1


def test_samples_of_a_prompt_stay_together():
    random = np.random.RandomState(0)
    examples = [example for _ in range(6) for example in group(random, 50, [10, 10, 10, 10])]
    parts = split_examples(examples, 200, share=True)
    assert [len(part) for part in parts] == [8, 8, 8]
    assert all(part[0] % 4 == 0 and part[4] % 4 == 0 and part[3] - part[0] == 3 for part in parts)


def test_keys_of_large_groups_stay_within_their_limit():
    """They are many where prompts are long and responses short: each sample has those of the whole prompt."""
    random = np.random.RandomState(0)
    examples = [example for _ in range(8) for example in group(random, 100, [1] * 24)]
    parts = split_examples(examples, 400, share=True)
    keys = [sum(len(examples[i]) for i in part) for part in parts]
    assert max(keys) <= KEYS_PER_TOKEN * 400
    assert max(map(len, parts)) == 15, "101 keys each, of which 1,600 fit, though only 124 tokens of 400 are there"


def test_pairs_count_their_common_tokens_once():
    random = np.random.RandomState(0)
    pairs = [Pair(*group(random, 80, [10, 10])) for _ in range(4)]
    assert [len(part) for part in split_pairs(pairs, 200, share=True)] == [2, 2]
    assert [len(part) for part in split_pairs(pairs, 200)] == [1, 1, 1, 1]


@pytest.mark.parametrize("prompts", [8, 9, 12, 30])
def test_processes_get_about_as_many_tokens(prompts):
    """Even where there are hardly more prompts than processes."""
    random = np.random.RandomState(prompts)
    examples = [example for _ in range(prompts) for example in group(random, 20, list(random.randint(30, 90, 8)))]
    parts = split_examples(examples, 10_000, 8, share=True)
    tokens = [pack([examples[i] for i in part], share=True).num_tokens for part in parts]
    by_process = [sum(tokens[rank::8]) for rank in range(8)]
    assert max(by_process) <= 1.2 * sum(by_process) / 8
