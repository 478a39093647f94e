"""Gradients of half-precision weights are summed in fp32, whoever adds them."""

import numpy as np
import pytest
import torch
from torch import nn

from plaudit.models.gradient_sums import GradientSums, add_or_return, add_product, forget_sums, sum_of_product
from plaudit.models.logprobs import token_logprobs
from plaudit.train.gradients import LocalGradients


def test_a_product_adds_to_the_sum_of_its_weights():
    weights = {name: nn.Parameter(torch.randn(rows, 4).bfloat16()) for name, rows in (("q", 3), ("k", 2))}
    sums = GradientSums(weights)
    product = sum_of_product([*weights.values()])
    assert product is not None
    whole = product.get([*weights.values()])
    assert whole is not None
    grad, x = torch.randn(7, 5).bfloat16(), torch.randn(7, 4).bfloat16()
    add_product(whole, grad, x)
    assert torch.equal(torch.cat([sums.by_name["q"], sums.by_name["k"]]), (grad.T @ x).float())
    (weights["q"].sum() * 2).backward()  # another use of the same weight
    assert weights["q"].grad is None
    assert torch.equal(sums.by_name["q"], (grad.T @ x)[:3].float() + 2)
    sums.clear()
    assert not sums.by_name


def test_weights_that_have_got_gradients_in_another_way_have_no_sum_of_their_product():
    weight = nn.Parameter(torch.ones(2, 2).bfloat16())
    sums = GradientSums({"w": weight})
    weight.sum().backward()
    product = sum_of_product([weight])
    assert product is not None
    assert product.get([weight]) is None
    assert torch.equal(sums.by_name["w"], torch.ones(2, 2))
    assert sum_of_product([weight, nn.Parameter(torch.ones(2, 2).bfloat16())]) is None
    assert sum_of_product([torch.ones(2)]) is None


def test_the_sum_of_fp32_weights_is_their_grad():
    weights = {name: nn.Parameter(torch.randn(rows, 4)) for name, rows in (("q", 3), ("k", 2))}
    gradients, both = LocalGradients(weights), [*weights.values()]
    grad, x = torch.randn(7, 5), torch.randn(7, 4)

    def add() -> None:
        product = sum_of_product(both)
        assert product is not None
        whole = product.get(both)
        assert whole is not None
        add_product(whole, grad, x)

    add()
    add()
    weights["q"].sum().backward()  # another use of the same weight
    expected = (2 * grad.T @ x + torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0])[:, None]).split([3, 2])
    for found, wanted in zip(gradients.sums().values(), expected, strict=True):
        torch.testing.assert_close(found, wanted)
    for weight in both:  # by somebody who does not know of the sum
        weight.grad = None
    add()
    torch.testing.assert_close(torch.cat([*gradients.sums().values()]), grad.T @ x)
    gradients.clear()
    assert not gradients.sums()


def test_sums_of_an_earlier_trainer_are_forgotten():
    """Its hooks stay, and must not touch gradients that others sum."""
    weight = nn.Parameter(torch.ones(3, 2).bfloat16())
    before = LocalGradients({"weight": weight})
    forget_sums([weight])
    assert sum_of_product([weight]) is None
    weight.sum().backward()
    assert torch.equal(weight.grad, torch.ones(3, 2).bfloat16())
    assert not before.sums()


def test_copies_of_fp32_weights_have_no_sum():
    """A checkpointed layer saves detached copies, whose `grad` nobody reads."""
    weight = nn.Parameter(torch.ones(3, 2))
    gradients = LocalGradients({"weight": weight})
    product = sum_of_product([weight])
    assert product is not None
    assert product.get([weight.detach()]) is None
    assert add_or_return(product, [weight.detach()], torch.full((3, 2), 2.0))[0].tolist() == [[2.0, 2.0]] * 3
    assert add_or_return(product, [weight], torch.full((3, 2), 2.0)) == [None]
    assert gradients.sums()["weight"].tolist() == [[2.0, 2.0]] * 3


def test_gradients_belong_to_the_last_of_several_trainers():
    weight, bias = nn.Parameter(torch.ones(3, 2).bfloat16()), nn.Parameter(torch.ones(2).bfloat16())
    before, now = (LocalGradients({"weight": weight, "bias": bias}) for _ in range(2))
    logprobs = token_logprobs(torch.randn(4, 2).bfloat16() + bias, weight, torch.tensor([0, 1, 2, 0])).logprobs_N
    logprobs.sum().backward()
    assert not before.sums()
    assert now.sums().keys() == {"weight", "bias"}


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_adds_its_gradient_in_fp32(tied):
    """Over chunks and micro-batches; also where the embeddings, whose gradient autograd adds, are the same weight."""
    torch.manual_seed(0)
    head = nn.Parameter(torch.randn(50, 8).bfloat16())
    gradients, exact = LocalGradients({"head": head}), torch.zeros(50, 8, dtype=torch.float64)
    for seed in range(2):
        random = np.random.RandomState(seed)
        tokens, inputs = (torch.from_numpy(random.randint(0, 50, 12)) for _ in range(2))
        hidden = nn.functional.embedding(inputs, head) if tied else torch.randn(12, 8).bfloat16()
        token_logprobs(hidden, head, tokens, chunk_logits=200).logprobs_N.sum().backward()
        weight = head.detach().double().requires_grad_()
        there = weight[inputs] if tied else hidden.double()
        (there @ weight.T).log_softmax(-1).gather(1, tokens[:, None]).sum().backward()
        exact += weight.grad
    assert head.grad is None
    found = gradients.sums()["head"].double()
    assert found.dtype == torch.float64
    assert ((found - exact).norm() / exact.norm()).item() < 0.02
    gradients.clear()
    assert not gradients.sums()
