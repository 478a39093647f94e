"""RL objectives: values computed by hand, verl's values, and invariances."""

import json
import math
from typing import get_args

import pytest
import torch
from torch import Tensor

from plaudit.objectives.advantages import gae, grpo, returns_to_go, rloo, whiten
from plaudit.objectives.aggregate import Aggregation, sequence_weights, spread, sum_by_sequence
from plaudit.objectives.importance import importance_weights
from plaudit.objectives.kl import KLEstimator, adapted, kl
from plaudit.objectives.policy import TokenLoss, cispo, clipped, gspo, policy_gradient, positive_sft
from support.paths import REFERENCE

AGGREGATIONS = get_args(Aggregation)
KL_ESTIMATORS = get_args(KLEstimator)
CLIP = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}
BOUNDS = {"clip_low": 0.2, "clip_high": 0.28}
# Every policy loss as a function of the same arguments.
LOSSES = {
    "clipped": lambda policy, old, advantages, lengths: clipped(policy, old, advantages, **CLIP),
    "gspo": lambda policy, old, advantages, lengths: gspo(policy, old, advantages, lengths, **BOUNDS),
    "cispo": lambda policy, old, advantages, lengths: cispo(policy, old, advantages, **BOUNDS),
    "policy_gradient": lambda policy, old, advantages, lengths: policy_gradient(policy, old, advantages),
}


def tensor(values) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(ours: Tensor, expected: Tensor | list, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(ours.detach(), torch.as_tensor(expected, dtype=ours.dtype), rtol=0, atol=tolerance)


def clipped_at(ratios: list[float], advantages: list[float], **settings) -> tuple[TokenLoss, Tensor]:
    """The loss at these ratios π / π_old, and its gradient with respect to log π."""
    policy = tensor(ratios).log().requires_grad_()
    token_loss = clipped(policy, torch.zeros_like(policy), tensor(advantages), **{**CLIP, **settings})
    return token_loss, torch.autograd.grad(token_loss.loss_N.sum(), policy)[0]


# Values computed by hand.


def test_grpo_subtracts_the_mean():
    assert grpo(tensor([3.0, 0.0, 0.0, 1.0]), divide_by_std=False).tolist() == [2.0, -1.0, -1.0, 0.0]


def test_grpo_divides_by_the_unbiased_std():
    """Rewards 0, 2, 4: the squares 4 + 0 + 4 over 3 − 1 give a std of 2 (the biased one is 1.63)."""
    rewards = tensor([0.0, 2.0, 4.0])
    assert grpo(rewards, divide_by_std=True, eps=0.0).tolist() == [-1.0, 0.0, 1.0]
    assert grpo(rewards, divide_by_std=True, eps=2.0).tolist() == [-0.5, 0.0, 0.5]
    close(grpo(rewards, divide_by_std=True), [-2 / 2.000001, 0.0, 2 / 2.000001])


@pytest.mark.parametrize("divide_by_std", [False, True])
def test_a_group_of_one_carries_no_signal(divide_by_std):
    """verl keeps the raw reward of a group of one, here 5. plaudit differs on purpose: such a group carries no signal."""
    assert grpo(tensor([5.0]), divide_by_std=divide_by_std).tolist() == [0.0]
    assert grpo(tensor([]), divide_by_std=divide_by_std).tolist() == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("divide_by_std", [False, True])
@pytest.mark.parametrize("reward", [0.1, -0.04, 1e4 / 3])
def test_equal_rewards_give_exactly_zero(reward, divide_by_std, dtype):
    """Even if their mean is rounded: seven 0.1s in fp32 would get 0.007, a rounding error divided by a std near 0."""
    for n in (2, 3, 7):
        advantages = grpo(torch.full((n,), reward, dtype=dtype), divide_by_std=divide_by_std)
        assert advantages.dtype == dtype
        assert advantages.tolist() == [0.0] * n


def test_clip_bounds_are_asymmetric():
    """Clip 0.2 below, 0.28 above. For A > 0 only the upper bound acts, for A < 0 only the lower one."""
    rows = [  # ratio, A, loss, gradient, clipped
        (1.25, 2.0, -2.50, -2.5, False),  # within 1.28, though not within 1.2
        (1.50, 2.0, -2.56, 0.0, True),
        (5.00, 2.0, -2.56, 0.0, True),  # the dual clip is for A < 0
        (0.50, 2.0, -1.00, -1.0, False),
        (0.75, -2.0, 1.60, 0.0, True),  # outside 0.8, though not outside 0.72
        (0.50, -2.0, 1.60, 0.0, True),
        (1.50, -2.0, 3.00, 3.0, False),
        (1.00, -2.0, 2.00, 2.0, False),
        (1.50, 0.0, 0.00, 0.0, False),
    ]
    ratios, advantages, losses, gradients, is_clipped = (list(column) for column in zip(*rows, strict=True))
    token_loss, gradient = clipped_at(ratios, advantages)
    close(token_loss.loss_N, losses)
    close(gradient, gradients)
    assert token_loss.clipped_N.tolist() == is_clipped
    assert not token_loss.dual_clipped_N.any()


def test_dual_clip_bounds_the_loss_of_negative_advantages():
    """A = −2, dual clip 3: a loss of at most 6, without gradient at the bound."""
    ratios, advantages = [2.9, 3.1, 5.0, 0.5, 5.0], [-2.0, -2.0, -2.0, -2.0, 2.0]
    token_loss, gradient = clipped_at(ratios, advantages)
    close(token_loss.loss_N, [5.8, 6.0, 6.0, 1.6, -2.56])
    close(gradient, [5.8, 0.0, 0.0, 0.0, 0.0])
    assert token_loss.clipped_N.tolist() == [False, False, False, True, True]
    assert token_loss.dual_clipped_N.tolist() == [False, True, True, False, False]

    token_loss, gradient = clipped_at(ratios, advantages, dual_clip=None)
    close(token_loss.loss_N, [5.8, 6.2, 10.0, 1.6, -2.56])
    close(gradient, [5.8, 6.2, 10.0, 0.0, 0.0])
    assert not token_loss.dual_clipped_N.any()
    assert token_loss.dual_clipped_N.dtype == torch.bool


def test_ratio_is_policy_over_old():
    token_loss = clipped(tensor([-1.0]), tensor([-1.1]), tensor([1.0]), **CLIP)
    close(token_loss.loss_N, [-math.exp(0.1)])


def test_rloo_subtracts_the_mean_of_the_others():
    close(rloo(tensor([3.0, 0.0, 1.0])), [3 - 0.5, 0 - 2.0, 1 - 1.5])
    assert rloo(tensor([0.1] * 7)).tolist() == [0.0] * 7


def test_rloo_of_a_group_of_one_carries_no_signal():
    """verl keeps the raw reward, here 5. plaudit differs on purpose, as for GRPO."""
    assert rloo(tensor([5.0])).tolist() == [0.0]


def test_whitened_values_have_mean_0_and_std_1():
    """0, 2, 4: mean 2, variance (4 + 0 + 4) / 2 = 4."""
    counted = torch.tensor([True, True, False, True])
    close(whiten(tensor([0.0, 2.0, math.nan, 4.0]), counted), [-1.0, 0.0, 0.0, 1.0], 1e-8)
    assert whiten(tensor([0.1] * 7), torch.ones(7, dtype=torch.bool)).tolist() == [0.0] * 7
    assert whiten(tensor([5.0, 3.0]), torch.tensor([True, False])).tolist() == [0.0, 0.0]


def test_gae_of_two_tokens():
    """γ = 0.5, λ = 0.5; rewards 1, 2; values 4, 6. δ_2 = 2 − 6 = −4, δ_1 = 1 + 3 − 4 = 0, A_1 = 0 + 0.25 · −4."""
    advantages, returns = gae(tensor([[1.0, 2.0]]), tensor([[4.0, 6.0]]), torch.ones(1, 2, dtype=torch.bool), gamma=0.5, lam=0.5)
    assert advantages.tolist() == [[-1.0, -4.0]]
    assert returns.tolist() == [[3.0, 2.0]]


def test_gae_ignores_masked_tokens():
    """In the middle (a tool's output) and after the end: the same result as without them, whatever their values."""
    rewards, values, mask = (
        tensor([[1.0, 9.0, 2.0, 9.0]]),
        tensor([[4.0, 9.0, 6.0, 9.0]]),
        torch.tensor([[True, False, True, False]]),
    )
    advantages, returns = gae(rewards, values, mask, gamma=0.5, lam=0.5)
    assert advantages.tolist() == [[-1.0, 0.0, -4.0, 0.0]]
    assert returns.tolist() == [[3.0, 0.0, 2.0, 0.0]]


def test_returns_are_discounted_sums_of_later_rewards():
    rewards, mask = tensor([[1.0, 2.0, 4.0], [3.0, 5.0, 0.0]]), torch.tensor([[True, True, True], [True, True, False]])
    assert returns_to_go(rewards, mask, gamma=0.5).tolist() == [[3.0, 4.0, 4.0], [5.5, 5.0, 0.0]]
    assert returns_to_go(rewards, mask, gamma=1.0).tolist() == [[7.0, 6.0, 4.0], [8.0, 5.0, 0.0]]


def test_gspo_uses_one_ratio_per_sequence():
    """Token ratios 2 and 1/2 give a sequence ratio of 1; 1.5 and 1.5 give 1.5, which is clipped for A > 0."""
    policy = tensor([2.0, 0.5, 1.5, 1.5]).log().requires_grad_()
    token_loss = gspo(policy, torch.zeros(4, dtype=torch.float64), tensor([1.0, 1.0, 2.0, 2.0]), torch.tensor([2, 2]), **BOUNDS)
    close(token_loss.loss_N, [-1.0, -1.0, -2.56, -2.56])
    close(token_loss.ratio_N, [1.0, 1.0, 1.5, 1.5])
    close(torch.autograd.grad(token_loss.loss_N.sum(), policy)[0], [-1.0, -1.0, 0.0, 0.0])
    assert token_loss.clipped_N.tolist() == [False, False, True, True]


def test_gspo_equals_the_papers_loss_with_one_advantage_per_sequence():
    """Mean over sequences of −A · s, with the gradient through s itself; the bounds are too wide to act."""
    lengths = torch.tensor([3, 1, 4])
    policy, old, _, _ = random_inputs(8)
    advantages_S = tensor([1.0, -2.0, 0.5])
    wide = {"clip_low": 0.999, "clip_high": 1e9}
    s = (sum_by_sequence(policy - old, lengths) / lengths).exp()
    paper = (-advantages_S * s).mean()
    ours = (
        sequence_weights(lengths, "seq-mean-token-mean", horizon=4).repeat_interleave(lengths)
        @ gspo(policy, old, spread(advantages_S, lengths), lengths, **wide).loss_N
    )
    close(ours, paper.detach())
    close(torch.autograd.grad(ours, policy)[0], torch.autograd.grad(paper, policy)[0])


def test_cispo_bounds_a_tokens_weight_and_keeps_its_gradient():
    """Where clipping would stop the gradient, the bounded weight still multiplies that of log π."""
    policy = tensor([2.0, 0.5, 1.1]).log().requires_grad_()
    token_loss = cispo(policy, torch.zeros(3, dtype=torch.float64), tensor([1.0, -1.0, 1.0]), **BOUNDS)
    close(token_loss.loss_N, [-1.28 * math.log(2), 0.8 * math.log(0.5), -1.1 * math.log(1.1)])
    close(torch.autograd.grad(token_loss.loss_N.sum(), policy)[0], [-1.28, 0.8, -1.1])
    assert token_loss.clipped_N.tolist() == [True, True, False]


def test_policy_gradient_is_log_prob_times_advantage():
    policy = tensor([-1.0, -2.0]).requires_grad_()
    token_loss = policy_gradient(policy, tensor([-1.0, -1.0]), tensor([3.0, -1.0]))
    close(token_loss.loss_N, [3.0, -2.0])
    close(token_loss.ratio_N, [1.0, math.exp(-1)])
    close(torch.autograd.grad(token_loss.loss_N.sum(), policy)[0], [-3.0, 1.0])


def test_positive_sft_only_uses_positive_advantages():
    policy = tensor([-1.0, -2.0, -3.0]).requires_grad_()
    term = positive_sft(policy, tensor([2.0, -5.0, 0.0]))
    close(term, [2.0, 0.0, 0.0])
    close(torch.autograd.grad(term.sum(), policy)[0], [-2.0, 0.0, 0.0])


@pytest.mark.parametrize(
    ("settings", "weights", "bounded"),
    [  # π_old / sampler is 4, 1/4, 2 | 1, 1/2
        ({"level": "token", "mode": "truncate", "high": 3.0}, [3, 0.25, 2, 1, 0.5], [True, False, False, False, False]),
        ({"level": "token", "mode": "mask", "high": 3.0}, [0, 0.25, 2, 1, 0.5], [True, False, False, False, False]),
        ({"level": "token", "mode": "mask", "high": 3.0, "low": 0.4}, [0, 0, 2, 1, 0.5], [True, True, False, False, False]),
        ({"level": "sequence", "mode": "truncate", "high": 1.5}, [1.5, 1.5, 1.5, 0.5, 0.5], [True, True, True, False, False]),
        ({"level": "sequence", "mode": "mask", "high": 3.0, "low": 0.6}, [2, 2, 2, 0, 0], [False, False, False, True, True]),
    ],
)
def test_importance_weights(settings, weights, bounded):
    old = tensor([4.0, 0.25, 2.0, 1.0, 0.5]).log().requires_grad_()
    found = importance_weights(old, torch.zeros(5, dtype=torch.float64), torch.tensor([3, 2]), **settings)
    close(found.weights_N, weights)
    assert found.bounded_N.tolist() == bounded
    assert not found.weights_N.requires_grad


def test_kl_coefficient_adapts_towards_its_target():
    """512 samples, a horizon of 10,000; the relative error is clipped to 0.2."""
    assert adapted(0.1, 0.06, target=0.05, samples=512, horizon=10_000) == pytest.approx(0.1 * (1 + 0.2 * 0.0512))
    assert adapted(0.1, 5.0, target=0.05, samples=512, horizon=10_000) == pytest.approx(0.1 * (1 + 0.2 * 0.0512))
    assert adapted(0.1, 0.0, target=0.05, samples=512, horizon=10_000) == pytest.approx(0.1 * (1 - 0.2 * 0.0512))
    assert adapted(0.1, 0.055, target=0.05, samples=512, horizon=10_000) == pytest.approx(0.1 * (1 + 0.1 * 0.0512))
    assert adapted(0.1, 0.05, target=0.05, samples=512, horizon=10_000) == 0.1


@pytest.mark.parametrize(
    ("kind", "values", "gradients"),
    [  # log 2 = 0.6931; where π = 1/2, ref = 1/4, and where π = 1/4, ref = 1/2
        ("k1", [math.log(2), -math.log(2)], [1.0, 1.0]),
        ("abs", [math.log(2), math.log(2)], [1.0, -1.0]),
        ("k2", [math.log(2) ** 2 / 2, math.log(2) ** 2 / 2], [math.log(2), -math.log(2)]),
        ("k3", [1 / 2 + math.log(2) - 1, 2 - math.log(2) - 1], [1 - 1 / 2, 1 - 2]),
    ],
)
def test_kl_of_a_half_and_a_quarter(kind, values, gradients):
    policy = tensor([0.5, 0.25]).log().requires_grad_()
    estimate = kl(policy, tensor([0.25, 0.5]).log(), kind)
    close(estimate, values)
    close(torch.autograd.grad(estimate.sum(), policy)[0], gradients)


def test_k3_is_bounded_by_ten():
    """e³ − 4 = 16 and e⁻¹² + 11 = 11 become 10, without gradient; 9.86 at d = 2.6 and 9 at d = −10 stay."""
    policy = tensor([-3.0, 12.0, -2.6, 10.0]).requires_grad_()
    estimate = kl(policy, torch.zeros_like(policy), "k3")
    close(estimate, [10.0, 10.0, math.exp(2.6) - 3.6, math.exp(-10) + 9])
    close(torch.autograd.grad(estimate.sum(), policy)[0], [0.0, 0.0, 1 - math.exp(2.6), 1 - math.exp(-10)])


def test_k3_is_accurate_for_small_differences_in_fp32():
    """d = 10⁻³: exp(d) − d − 1 as written is 5 % off in fp32."""
    estimate = kl(torch.zeros(1), torch.full((1,), 1e-3), "k3")
    assert estimate.item() == pytest.approx(5.0017e-7, rel=1e-3)


@pytest.mark.parametrize(
    ("mode", "weights", "loss"),
    [
        ("token-mean", [1 / 6, 1 / 6, 0, 1 / 6], 21 / 6),
        ("token-sum", [1, 1, 0, 1], 21),
        ("seq-mean-token-sum", [1 / 3, 1 / 3, 0, 1 / 3], (6 + 4 + 11) / 3),
        ("seq-mean-token-mean", [1 / 9, 1 / 3, 0, 1 / 6], (2 + 4 + 5.5) / 3),
        ("seq-mean-token-sum-norm", [1 / 12, 1 / 12, 0, 1 / 12], (6 + 4 + 11) / 3 / 4),
    ],
)
def test_aggregation_of_three_sequences_and_an_empty_one(mode, weights, loss):
    """Token losses 1 2 3 | 4 | | 5 6, with a horizon of 4 tokens."""
    lengths = torch.tensor([3, 1, 0, 2])
    w = sequence_weights(lengths, mode, horizon=4)
    assert w.dtype == torch.float64
    close(w, weights)
    close(w.repeat_interleave(lengths) @ tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]), tensor(loss))


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_an_update_without_tokens_has_zero_weights(mode):
    assert sequence_weights(torch.tensor([0, 0]), mode, horizon=4).tolist() == [0.0, 0.0]


# verl's values.


@pytest.fixture(scope="module")
def reference() -> dict:
    """Outputs of verl 0.9.1's core_algos for stored inputs, all in float64."""
    return json.loads((REFERENCE / "verl_objectives.json").read_text())


def mask_of(reference: dict) -> Tensor:
    return tensor(reference["inputs"]["response_mask"]).bool()


def flat(reference: dict, name: str) -> Tensor:
    """An input's response tokens, packed without padding."""
    return tensor(reference["inputs"][name])[mask_of(reference)]


@pytest.mark.parametrize("divide_by_std", [True, False])
def test_grpo_equals_verl(reference, divide_by_std):
    mask, group_of = mask_of(reference), torch.tensor(reference["inputs"]["group_index"])
    rewards, advantages = tensor(reference["inputs"]["sequence_rewards"]), torch.zeros(len(mask), dtype=torch.float64)
    for group in group_of.unique():
        members = group_of == group
        advantages[members] = grpo(rewards[members], divide_by_std=divide_by_std)
    expected = tensor(reference["advantages"][f"grpo std={divide_by_std}"]["advantages"])
    close(advantages[:, None] * mask, expected)


def by_group(reference: dict, advantages, rewards: Tensor) -> Tensor:
    group_of, found = torch.tensor(reference["inputs"]["group_index"]), torch.zeros(len(rewards), dtype=torch.float64)
    for group in group_of.unique():
        members = group_of == group
        found[members] = advantages(rewards[members])
    return found


def test_reference_rewards_are_at_the_last_token(reference):
    mask = mask_of(reference)
    at_last = torch.zeros(mask.shape, dtype=torch.float64)
    at_last[torch.arange(len(mask)), mask.sum(1) - 1] = tensor(reference["inputs"]["sequence_rewards"])
    assert torch.equal(at_last, tensor(reference["inputs"]["token_rewards"]))


def test_rloo_equals_verl(reference):
    mask = mask_of(reference)
    advantages = by_group(reference, rloo, tensor(reference["inputs"]["sequence_rewards"]))
    close(advantages[:, None] * mask, tensor(reference["advantages"]["rloo"]["advantages"]))


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95)])
def test_gae_equals_verl(reference, gamma, lam):
    """verl whitens the advantages of GAE; its means divide by n + 1e-8, a relative error of 2e-10 for 46 tokens."""
    mask, expected = mask_of(reference), reference["advantages"][f"gae gamma={gamma} lambda={lam}"]
    rewards, values = tensor(reference["inputs"]["token_rewards"]), tensor(reference["inputs"]["values"])
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=lam)
    close(returns[mask], tensor(expected["returns"])[mask])
    whitened = whiten(advantages[mask], torch.ones(int(mask.sum()), dtype=torch.bool))
    close(whitened, tensor(expected["advantages"])[mask], 1e-9)


def test_reinforce_plus_plus_equals_verl(reference):
    mask, expected = mask_of(reference), reference["advantages"]["reinforce_plus_plus gamma=1.0"]
    returns = returns_to_go(tensor(reference["inputs"]["token_rewards"]), mask, gamma=1.0)
    close(returns[mask], tensor(expected["returns"])[mask])
    close(whiten(returns[mask], torch.ones(int(mask.sum()), dtype=torch.bool)), tensor(expected["advantages"])[mask], 1e-9)


def test_reinforce_plus_plus_baseline_equals_verl(reference):
    mask = mask_of(reference)
    centred = by_group(reference, lambda r: grpo(r, divide_by_std=False), tensor(reference["inputs"]["sequence_rewards"]))
    whitened = whiten(spread(centred, mask.sum(1)), torch.ones(int(mask.sum()), dtype=torch.bool))
    close(whitened, tensor(reference["advantages"]["reinforce_plus_plus_baseline"]["advantages"])[mask], 1e-9)


def test_remax_equals_verl(reference):
    mask = mask_of(reference)
    returns = returns_to_go(tensor(reference["inputs"]["token_rewards"]), mask, gamma=1.0)
    advantages = returns - tensor(reference["inputs"]["remax_baselines"])[:, None]
    close(advantages[mask], tensor(reference["advantages"]["remax"]["advantages"])[mask])


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize(
    ("name", "loss", "bounds"),
    [
        ("gspo low=0.0003 high=0.0004", gspo, {"clip_low": 0.0003, "clip_high": 0.0004}),
        ("gspo_wide low=0.2 high=0.2", gspo, {"clip_low": 0.2, "clip_high": 0.2}),
        ("cispo low=0.2 high=0.28", cispo, BOUNDS),
    ],
)
def test_gspo_and_cispo_equal_verl(reference, name, loss, bounds, mode):
    """The stored name says dual_clip=3.0, which neither has. For verl's 1e-8 added to token counts, see the clipped loss."""
    mask, padded_width = mask_of(reference), 12
    lengths = mask.sum(1)
    expected = reference["losses"][f"{name} dual_clip=3.0 agg={mode}"]
    policy = flat(reference, "policy_logprobs").requires_grad_()
    of_sequences = (lengths,) if loss is gspo else ()
    token_loss = loss(policy, flat(reference, "old_logprobs"), flat(reference, "advantages"), *of_sequences, **bounds)
    weights = sequence_weights(lengths, mode, horizon=padded_width)
    if mode == "seq-mean-token-mean":
        weights = weights * lengths / (lengths.double() + 1e-8)
    total = weights.repeat_interleave(lengths) @ token_loss.loss_N
    close(total, tensor(expected["loss"]))
    gradient = torch.zeros(mask.shape, dtype=torch.float64)
    gradient[mask] = torch.autograd.grad(total, policy)[0]
    close(gradient, tensor(expected["grad"]))
    close(token_loss.clipped_N.sum() / (lengths.sum().double() + 1e-8), tensor(expected["clipfrac"]))


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_clipped_loss_equals_verl(reference, mode):
    """verl adds 1e-8 to the token counts of some of its means. plaudit does not: one-token sequences differ by one part in 10⁸."""
    mask, padded_width = mask_of(reference), 12
    lengths = mask.sum(1)
    expected = reference["losses"][f"ppo_clip low=0.2 high=0.28 dual_clip=3.0 agg={mode}"]
    policy = flat(reference, "policy_logprobs").requires_grad_()
    token_loss = clipped(policy, flat(reference, "old_logprobs"), flat(reference, "advantages"), **CLIP)
    weights = sequence_weights(lengths, mode, horizon=padded_width)
    if mode == "seq-mean-token-mean":
        weights = weights * lengths / (lengths.double() + 1e-8)
    loss = weights.repeat_interleave(lengths) @ token_loss.loss_N
    close(loss, tensor(expected["loss"]))
    gradient = torch.zeros(mask.shape, dtype=torch.float64)
    gradient[mask] = torch.autograd.grad(loss, policy)[0]
    close(gradient, tensor(expected["grad"]))
    close(token_loss.clipped_N.sum() / (lengths.sum().double() + 1e-8), tensor(expected["clipfrac"]))


@pytest.mark.parametrize(("kind", "verl_name"), [("k1", "kl"), ("abs", "abs"), ("k2", "mse"), ("k3", "low_var_kl")])
def test_kl_equals_verl(reference, kind, verl_name):
    estimate = kl(flat(reference, "policy_logprobs"), flat(reference, "ref_logprobs"), kind)
    close(estimate, tensor(reference["kl"][verl_name])[mask_of(reference)])


# Properties that hold for any input.


def random_inputs(n: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probs of the policy, of the old policy and of the reference, and advantages; every branch of the losses is taken."""
    generator = torch.Generator().manual_seed(seed)
    old, policy, ref, advantages = torch.randn(4, n, generator=generator, dtype=torch.float64)
    return (old + policy).requires_grad_(), old, old + ref, advantages


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("seed", range(3))
def test_micro_batch_losses_add_up_for_any_split(mode, seed):
    """Tokens are assigned to micro-batches at random, which splits sequences; the last micro-batch is empty."""
    lengths = torch.tensor([7, 1, 0, 12, 4, 1])
    n = int(lengths.sum())
    policy, old, ref, advantages = random_inputs(n, seed)
    weights = sequence_weights(lengths, mode, horizon=12).repeat_interleave(lengths)

    def share(at: Tensor) -> Tensor:
        token_loss = clipped(policy[at], old[at], advantages[at], **CLIP).loss_N + 0.1 * kl(policy[at], ref[at], "k3")
        return weights[at] @ token_loss

    total = share(torch.arange(n))
    gradient = torch.autograd.grad(total, policy)[0]
    assert gradient.abs().sum() > 0
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    for sizes in ([n, 0], [1, n - 1, 0], [5, 9, 2, n - 16, 0], [1] * n + [0]):
        shares = [share(at) for at in order.split(sizes)]
        close(torch.stack(shares).sum(), total.detach())
        close(sum(torch.autograd.grad(s, policy)[0] for s in shares), gradient)


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_adds_up_over_complete_sequences_in_any_order(name, mode):
    """As in training: micro-batches never split a sequence. Sequence-level importance weights are included."""
    lengths = torch.tensor([7, 1, 12, 4, 1])
    n, S = int(lengths.sum()), len(lengths)
    policy, old, sampler, advantages = random_inputs(n)
    weights_S = sequence_weights(lengths, mode, horizon=12)
    tokens = torch.arange(n).split(lengths.tolist())

    def share(members: list[int]) -> Tensor:
        at, some = torch.cat([tokens[s] for s in members]), lengths[members]
        importance = importance_weights(old[at], sampler[at], some, level="sequence", mode="truncate", high=2.0).weights_N
        return spread(weights_S[members], some) @ (importance * LOSSES[name](policy[at], old[at], advantages[at], some).loss_N)

    total = share(list(range(S)))
    gradient = torch.autograd.grad(total, policy)[0]
    assert gradient.abs().sum() > 0
    for groups in ([[4, 2, 0, 3, 1]], [[0], [1], [2], [3], [4]], [[3, 0], [4, 1, 2]]):
        shares = [share(group) for group in groups]
        close(torch.stack(shares).sum(), total.detach())
        close(sum(torch.autograd.grad(s, policy)[0] for s in shares), gradient)


@pytest.mark.parametrize("name", LOSSES)
def test_padding_does_not_change_the_loss(name):
    """Packed sequences give the same loss as the formula on padded rows, whatever the padding contains."""
    lengths = torch.tensor([3, 1, 5])
    mask = torch.arange(5) < lengths[:, None]
    policy, old, _, advantages = random_inputs(15)
    policy_ST, old_ST, advantages_ST = (x.reshape(3, 5) for x in (policy, old, advantages))
    ours = LOSSES[name](policy_ST[mask], old_ST[mask], advantages_ST[mask], lengths).loss_N.sum()
    ratio = (policy_ST - old_ST).exp()
    if name == "gspo":
        sequence = (((policy_ST - old_ST) * mask).sum(1) / lengths).exp().detach()[:, None]
        ratio = sequence * (policy_ST - policy_ST.detach()).exp()
    bounded = ratio.clamp(0.8, 1.28)
    rows = {
        "clipped": lambda: torch.where(
            advantages_ST < 0,
            torch.minimum(torch.maximum(-advantages_ST * ratio, -advantages_ST * bounded), -advantages_ST * 3.0),
            torch.maximum(-advantages_ST * ratio, -advantages_ST * bounded),
        ),
        "gspo": lambda: torch.maximum(-advantages_ST * ratio, -advantages_ST * bounded),
        "cispo": lambda: -bounded.detach() * advantages_ST * policy_ST,
        "policy_gradient": lambda: -advantages_ST * policy_ST,
    }[name]()
    theirs = torch.where(mask, rows, 0.0).sum()
    close(ours, theirs.detach())
    close(torch.autograd.grad(ours, policy)[0], torch.autograd.grad(theirs, policy)[0])


def test_gspo_is_the_clipped_loss_at_length_one():
    policy, old, _, advantages = random_inputs(20)
    sequences = gspo(policy, old, advantages, torch.ones(20, dtype=torch.long), **BOUNDS)
    tokens = clipped(policy, old, advantages, **BOUNDS, dual_clip=None)
    close(sequences.loss_N, tokens.loss_N.detach())
    close(torch.autograd.grad(sequences.loss_N.sum(), policy)[0], torch.autograd.grad(tokens.loss_N.sum(), policy)[0])
    assert torch.equal(sequences.clipped_N, tokens.clipped_N)


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_of_an_unchanged_policy_is_the_policy_gradient(name):
    _, old, _, advantages = random_inputs(20)
    policy = old.clone().requires_grad_()
    token_loss = LOSSES[name](policy, old, advantages, torch.tensor([15, 5]))
    close(torch.autograd.grad(token_loss.loss_N.sum(), policy)[0], -advantages)
    assert not token_loss.clipped_N.any()
    assert token_loss.ratio_N.tolist() == [1.0] * 20


def test_importance_weights_are_one_if_sampler_and_trainer_agree():
    _, old, _, _ = random_inputs(20)
    for level in ("token", "sequence"):
        for mode in ("truncate", "mask"):
            found = importance_weights(old, old, torch.tensor([15, 5]), level=level, mode=mode, high=2.0, low=0.5)
            assert found.weights_N.tolist() == [1.0] * 20
            assert not found.bounded_N.any()


def test_importance_weights_correct_for_the_sampler():
    """E_sampler[w · f] = E_π_old[f] if no bound acts, computed exactly over a vocabulary of five tokens."""
    generator = torch.Generator().manual_seed(0)
    old, sampler = (torch.randn(2, 5, generator=generator, dtype=torch.float64) / 4).log_softmax(-1)
    f = torch.randn(5, generator=generator, dtype=torch.float64)
    w = importance_weights(old, sampler, torch.ones(5, dtype=torch.long), level="token", mode="truncate", high=50.0).weights_N
    close((sampler.exp() * w * f).sum(), (old.exp() * f).sum())


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_weights_do_not_depend_on_order_or_empty_sequences(mode):
    lengths = torch.tensor([7, 1, 12, 4])
    weights = sequence_weights(lengths, mode, horizon=12)
    order = torch.tensor([2, 0, 3, 1])
    close(sequence_weights(lengths[order], mode, horizon=12), weights[order])
    close(sequence_weights(torch.cat([lengths, torch.tensor([0, 0])]), mode, horizon=12)[:4], weights)


@pytest.mark.parametrize("divide_by_std", [False, True])
def test_permuting_a_group_permutes_its_advantages(divide_by_std):
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(8, generator=generator, dtype=torch.float64)
    advantages = grpo(rewards, divide_by_std=divide_by_std)
    for seed in range(5):
        order = torch.randperm(8, generator=torch.Generator().manual_seed(seed))
        close(grpo(rewards[order], divide_by_std=divide_by_std), advantages[order])
    close(advantages.sum(), tensor(0.0))
    close(grpo(rewards + 100, divide_by_std=divide_by_std), advantages, 1e-10)
    close(grpo(rewards * 3, divide_by_std=divide_by_std, eps=0.0), advantages * (1 if divide_by_std else 3), 1e-5)


def test_an_unchanged_policy_has_no_clipping_and_zero_kl():
    """At π = π_old the loss is −A with gradient −A: the plain policy gradient. At π = ref every KL is 0, and k2 and k3 are flat."""
    _, old, _, advantages = random_inputs(20)
    policy = old.clone().requires_grad_()
    token_loss = clipped(policy, old, advantages, **CLIP)
    close(token_loss.loss_N, -advantages)
    close(torch.autograd.grad(token_loss.loss_N.sum(), policy)[0], -advantages)
    assert not token_loss.clipped_N.any()
    assert not token_loss.dual_clipped_N.any()
    for kind in KL_ESTIMATORS:
        estimate = kl(policy, old, kind)
        assert estimate.tolist() == [0.0] * 20
        if kind in ("k2", "k3"):
            assert torch.autograd.grad(estimate.sum(), policy)[0].tolist() == [0.0] * 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_extreme_log_ratios_stay_finite(dtype, dual_clip):
    policy = torch.tensor([1e4, -1e4, 1e4, -1e4], dtype=dtype, requires_grad=True)
    old = torch.zeros_like(policy)
    token_losses = [clipped(policy, old, torch.tensor([1, 1, -1, -1], dtype=dtype), **{**CLIP, "dual_clip": dual_clip}).loss_N]
    token_losses += [kl(policy, old, kind) for kind in KL_ESTIMATORS]
    for loss in token_losses:
        assert loss.dtype == dtype
        assert loss.isfinite().all()
        assert torch.autograd.grad(loss.sum(), policy)[0].isfinite().all()
    at_most = math.exp(20) if dual_clip is None else 3.0
    torch.testing.assert_close(token_losses[0], torch.tensor([-1.28, -math.exp(-20), at_most, 0.8], dtype=dtype))


def test_gradients_match_finite_differences():
    """Away from the kinks, which are the bounds of the ratio, of the dual clip and of k3."""
    policy, old, ref, advantages = random_inputs(40)
    ratio = (policy - old).detach().exp()
    smooth = torch.stack([(ratio - kink).abs() > 0.01 for kink in (0.8, 1.28, 3.0)]).all(0) & ((policy - ref).abs() > 0.01)
    assert smooth.sum() > 30
    policy, old, ref, advantages = (x.detach()[smooth] for x in (policy, old, ref, advantages))
    branches = clipped(policy, old, advantages, **CLIP)
    assert branches.clipped_N.any()
    assert branches.dual_clipped_N.any()
    policy.requires_grad_()
    for dual_clip in (None, 3.0):
        assert torch.autograd.gradcheck(
            lambda x, c=dual_clip: clipped(x, old, advantages, **{**CLIP, "dual_clip": c}).loss_N, policy
        )
    for kind in KL_ESTIMATORS:
        assert torch.autograd.gradcheck(lambda x, kind=kind: kl(x, ref, kind), policy)


def test_expectation_of_each_kl_estimator():
    """Exact expectations over a vocabulary of five tokens, of the estimates and of their gradients in the logits."""
    generator = torch.Generator().manual_seed(0)
    logits, ref_logits = torch.randn(2, 5, generator=generator, dtype=torch.float64) / 2
    logits.requires_grad_()
    policy, ref = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    p = policy.exp().detach()
    divergence = policy.exp() @ (policy - ref)
    mean = {kind: p @ kl(policy, ref, kind) for kind in KL_ESTIMATORS}

    close(mean["k1"], divergence.detach())
    close(mean["k3"], divergence.detach())
    assert mean["abs"] > divergence
    assert abs(mean["k2"] - divergence) / divergence < 0.2

    def gradient(of: Tensor) -> Tensor:
        return torch.autograd.grad(of, logits, retain_graph=True)[0]

    close(gradient(mean["k1"]), torch.zeros(5))
    close(gradient(mean["abs"]), gradient((policy.exp() - ref.exp()).abs().sum()))
    close(gradient(mean["k2"]), gradient(divergence))
    close(gradient(mean["k3"]), gradient(ref.exp() @ (ref - policy)))


def test_an_adapted_kl_coefficient_never_changes_sign():
    """Whatever the number of samples per step."""
    assert adapted(0.05, 0.0, target=5.0, samples=16, horizon=2) == pytest.approx(0.04)
    assert adapted(0.05, 0.0, target=5.0, samples=1, horizon=2) == pytest.approx(0.045)
    assert adapted(0.05, 100.0, target=5.0, samples=10_000, horizon=1) == pytest.approx(0.06)
