"""Chunked log-probs equal log_softmax of the full logits: values, entropies and gradients, in a fraction of the memory."""

import json
import subprocess
import sys

import psutil
import pytest
import torch
from torch import Tensor

from plaudit.models import logprobs
from plaudit.models.logprobs import token_logprobs
from support.paths import REPOSITORY

N, D, V = 23, 16, 101


def inputs(dtype: torch.dtype = torch.float32, n: int = N) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden_ND, weight_VD = torch.randn(n, D, dtype=torch.float64), torch.randn(V, D, dtype=torch.float64) / 2
    tokens_N = torch.randint(V, (n,))
    return hidden_ND.to(dtype).requires_grad_(), weight_VD.to(dtype).requires_grad_(), tokens_N


def full_logprobs(hidden: Tensor, weight: Tensor, tokens: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies straight from the definition."""
    logp = (hidden @ weight.T / temperature).log_softmax(-1)
    return logp.gather(-1, tokens[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def relative_error(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.mark.parametrize("entropy", ["none", "value", "with_gradient"])
@pytest.mark.parametrize("rows", [1, 5, 10**6], ids=["one row per chunk", "5 rows per chunk", "one chunk"])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
def test_equals_log_softmax(dtype, tolerance, temperature, rows, entropy):
    """23 tokens in chunks of 5 leave a last one of 3. Every token's log-prob and entropy has its own weight."""
    hidden, weight, tokens = inputs(dtype)
    ours = token_logprobs(hidden, weight, tokens, temperature=temperature, entropy=entropy, chunk_logits=rows * V)
    logprobs, entropies = full_logprobs(hidden, weight, tokens, temperature)
    assert ours.logprobs_N.dtype == dtype
    assert relative_error(ours.logprobs_N, logprobs) < tolerance

    weights = torch.randn(2, N, dtype=dtype)
    loss, expected = weights[0] @ ours.logprobs_N, weights[0] @ logprobs
    if entropy == "none":
        assert ours.entropy_N is None
    else:
        assert ours.entropy_N is not None
        assert relative_error(ours.entropy_N, entropies) < tolerance
        assert ours.entropy_N.requires_grad == (entropy == "with_gradient")
        loss = loss + weights[1] @ ours.entropy_N  # it has no gradient with entropy="value"
    if entropy == "with_gradient":
        expected = expected + weights[1] @ entropies
    for our_gradient, gradient in zip(
        torch.autograd.grad(loss, [hidden, weight]), torch.autograd.grad(expected, [hidden, weight]), strict=True
    ):
        assert relative_error(our_gradient, gradient) < tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("entropy", ["value", "with_gradient"])
def test_kept_logits_give_the_same_bits(dtype, entropy, monkeypatch):
    """And the products that they save are saved."""
    products, compute = [], logprobs.logits_of
    monkeypatch.setattr(logprobs, "logits_of", lambda *inputs: products.append(len(inputs[0])) or compute(*inputs))
    found = {}
    for keep in (False, True):
        products.clear()
        hidden, weight, tokens = inputs(dtype)
        ours = token_logprobs(hidden, weight, tokens, temperature=0.7, entropy=entropy, chunk_logits=5 * V, keep=keep)
        gradients = torch.autograd.grad(ours.logprobs_N.square().sum() + ours.entropy_N.sum(), [hidden, weight])
        found[keep] = [*ours, *gradients]
        assert sum(products) == (N if keep else 2 * N)
    assert all(torch.equal(kept, computed_again) for kept, computed_again in zip(found[True], found[False], strict=True))


@pytest.mark.slow
def test_gradients_match_finite_differences():
    hidden, weight, tokens = inputs(torch.float64, n=4)

    def both(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        return tuple(token_logprobs(hidden, weight, tokens, temperature=0.7, entropy="with_gradient", chunk_logits=3 * V))

    assert torch.autograd.gradcheck(both, (hidden, weight))


def test_a_value_by_hand():
    """Logits 0 and log 3 are probabilities 1/4 and 3/4; at temperature 1/2 the odds are squared: 1/10 and 9/10."""
    hidden, weight, tokens = torch.tensor([[1.0]]), torch.tensor([[0.0], [torch.tensor(3.0).log()]]), torch.tensor([1])
    one = token_logprobs(hidden, weight, tokens, entropy="with_gradient")
    assert one.logprobs_N.exp().item() == pytest.approx(3 / 4)
    assert one.entropy_N.item() == pytest.approx(0.562335)  # −¼ log ¼ − ¾ log ¾
    assert token_logprobs(hidden, weight, tokens, temperature=0.5).logprobs_N.exp().item() == pytest.approx(9 / 10)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_frozen_inputs_get_no_gradient(frozen):
    """A frozen head, as with LoRA, gets no gradient of its size; the other input's gradient is the same."""
    hidden, weight, tokens = inputs()
    expected = torch.autograd.grad(full_logprobs(hidden, weight, tokens)[0].sum(), [hidden, weight])
    (hidden if frozen == "hidden" else weight).requires_grad_(False)
    token_logprobs(hidden, weight, tokens, chunk_logits=5 * V).logprobs_N.sum().backward()
    trained, gradient = (weight, expected[1]) if frozen == "hidden" else (hidden, expected[0])
    assert relative_error(trained.grad, gradient) < 1e-6
    assert (hidden if frozen == "hidden" else weight).grad is None


def test_no_tokens_give_no_log_probs_and_zero_gradients():
    hidden, weight, tokens = inputs(n=0)
    ours = token_logprobs(hidden, weight, tokens, entropy="with_gradient")
    assert ours.logprobs_N.shape == ours.entropy_N.shape == (0,)
    (ours.logprobs_N.sum() + ours.entropy_N.sum()).backward()
    assert hidden.grad.shape == (0, D)
    assert weight.grad.count_nonzero() == 0


@pytest.mark.parametrize("rows", [1, 10**6])
def test_bf16_is_close_to_fp32(rows):
    """bf16 keeps 8 bits: logits of about 2 are off by up to 1/128. Results are fp32, gradients bf16."""
    hidden, weight, tokens = inputs(torch.bfloat16, n=512)
    ours = token_logprobs(hidden, weight, tokens, entropy="with_gradient", chunk_logits=rows * V)
    assert ours.logprobs_N.dtype == ours.entropy_N.dtype == torch.float32
    ours.logprobs_N.sum().backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16

    exact_hidden, exact_weight = (x.detach().float().requires_grad_() for x in (hidden, weight))
    logprobs, entropies = full_logprobs(exact_hidden, exact_weight, tokens)
    logprobs.sum().backward()
    assert (ours.logprobs_N - logprobs).abs().max() < 0.05
    assert (ours.entropy_N - entropies).abs().max() < 0.05
    assert relative_error(hidden.grad, exact_hidden.grad) < 0.01
    # Even with 512 chunks: their contributions are summed in fp32.
    assert relative_error(weight.grad, exact_weight.grad) < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "logits",
    [
        [[1e4, -1e4, 0.0], [-1e4, 1e4, 1e4], [-1e4, -1e4, -1e4]],
        [[1e4 + 64, 1e4, 1e4 - 64], [-1e4, -1e4, -1e4 - 64], [1e4, 0.0, 1e4]],
    ],
    ids=["far apart", "far from zero"],
)
def test_extreme_logits_give_finite_and_correct_values(logits, dtype):
    hidden = torch.tensor(logits, dtype=dtype).requires_grad_()
    weight = torch.eye(3, dtype=dtype).requires_grad_()
    tokens = torch.tensor([0, 1, 2])
    ours = token_logprobs(hidden, weight, tokens, entropy="with_gradient")
    logprobs, entropies = full_logprobs(hidden.detach().double(), weight.detach().double(), tokens)
    torch.testing.assert_close(ours.logprobs_N.double(), logprobs, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours.entropy_N.double(), entropies, rtol=1e-6, atol=1e-6)
    (ours.logprobs_N + ours.entropy_N).sum().backward()
    assert hidden.grad.isfinite().all()
    assert weight.grad.isfinite().all()


def test_logits_far_from_zero_keep_their_entropy():
    """softmax(z + c) = softmax(z): with c = 1,000 only z itself is rounded, by 3e-5."""
    torch.manual_seed(0)
    z, tokens, identity = torch.randn(8, V), torch.randint(V, (8,)), torch.eye(V)
    near = token_logprobs(z, identity, tokens, entropy="with_gradient")
    far = token_logprobs(z + 1000, identity, tokens, entropy="with_gradient")
    assert (far.logprobs_N - near.logprobs_N).abs().max() < 1e-4
    assert (far.entropy_N - near.entropy_N).abs().max() < 1e-4


# Memory --------------------------------------------------------------------------------------------------------------

# VmHWM is the same peak as ru_maxrss, but is reset on exec: ru_maxrss would start from the parent's value.
MEASURE = """
import json, sys, torch
if sys.argv[1] == "chunked":
    from plaudit.models.logprobs import token_logprobs

def kilobytes(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name + ":"))

torch.set_num_threads(1)
torch.manual_seed(0)
hidden = torch.randn(2048, 16).requires_grad_()
weight = (torch.randn(151_936, 16) / 4).requires_grad_()
tokens = torch.randint(151_936, (2048,))
weights = torch.randn(2048)

before = kilobytes("VmRSS")
if sys.argv[1] == "chunked":
    logprobs = token_logprobs(hidden, weight, tokens).logprobs_N
else:
    logprobs = (hidden @ weight.T).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
(weights @ logprobs).backward()
print(json.dumps((kilobytes("VmHWM") - before) * 1024))
torch.save([logprobs.detach(), hidden.grad, weight.grad], sys.argv[2])
"""


@pytest.mark.slow
def test_memory_is_a_fraction_of_that_of_full_logits(tmp_path, record_property):
    """2,048 tokens × a vocabulary of 151,936: full logits are 1.2 GB, held three times over; chunks take at least 8 times less."""
    if not sys.platform.startswith("linux"):
        pytest.skip("reads the peak memory from /proc")
    if (free := psutil.virtual_memory().available) < 6e9:
        pytest.skip(f"full logits need 6 GB of memory to compare with; {free / 1e9:.1f} GB are available")
    files = {way: tmp_path / f"{way}.pt" for way in ("chunked", "full")}
    runs = {
        way: subprocess.Popen([sys.executable, "-c", MEASURE, way, str(file)], cwd=REPOSITORY, stdout=subprocess.PIPE)
        for way, file in files.items()
    }
    extra = {way: json.loads(run.communicate()[0]) for way, run in runs.items()}
    results = {way: torch.load(file, weights_only=True) for way, file in files.items()}
    for way, extra_bytes in extra.items():
        record_property(f"extra_bytes_{way}", extra_bytes)
    print(f"peak extra memory: {extra['chunked'] / 1e6:,.0f} MB chunked, {extra['full'] / 1e6:,.0f} MB full")
    for ours, theirs in zip(results["chunked"], results["full"], strict=True):
        assert relative_error(ours, theirs) < 1e-5
    assert extra["full"] > 2 * 2048 * 151_936 * 4, "the measurement sees the full logits"
    assert extra["chunked"] * 8 <= extra["full"]
