"""Log-probs and entropies of given tokens without materialising all logits.

For token y with logits z = W h / temperature, over a vocabulary V:

    log p_v = z_v − logsumexp(z)                    ∂ log p_y / ∂z = onehot(y) − p
    H       = −Σ p_v log p_v                        ∂ H / ∂z       = −p · (log p + H)

The logits of a chunk of tokens are computed, used and freed in the forward pass, and recomputed in the backward pass, so they take
one chunk's memory whatever the batch size. In full, T tokens × V = 152k would take 4·T·V bytes, several times over with gradients.
Where a GPU has room for them (`train.keep_logits`) they are kept instead, chunk by chunk: the same numbers, one product less.
"""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from plaudit.models.attention import packed_states
from plaudit.models.gradient_sums import add_product, sum_of_product
from plaudit.models.sharded import in_forward_pass
from plaudit.models.vocabulary import Summed
from plaudit.types import Batch

# Logits in memory at a time: few enough to suit a CPU's caches and memory, enough to keep a GPU busy.
CHUNK_LOGITS = {"cpu": 2**23, "cuda": 2**28}


KEEPS_LOGITS = "keeps_logits"
"""Attribute of a model: whether its logits are kept for the backward pass."""

Entropy = Literal["none", "value", "with_gradient"]
"""Not computed; computed; or computed with its gradient, which is slower."""


class TokenLogprobs(NamedTuple):
    logprobs_N: Tensor
    entropy_N: Tensor | None


@in_forward_pass
def target_logprobs(model: nn.Module, batch: Batch, *, temperature: float = 1.0, entropy: Entropy = "none") -> TokenLogprobs:
    """Log-prob (and entropy) of each token marked by `batch.loss_mask_T`, given the tokens before it, in order."""
    return state_logprobs(model, target_states(model, batch), batch, temperature=temperature, entropy=entropy)


@in_forward_pass
def target_states(model: nn.Module, batch: Batch) -> Tensor:
    """The hidden states that predict the tokens marked by `batch.loss_mask_T`, in order: each one position before its token."""
    hidden_TD = packed_states(model.get_decoder(), batch)  # pyright: ignore
    return hidden_TD[batch.predictors_N]


def state_logprobs(
    model: nn.Module, hidden_ND: Tensor, batch: Batch, *, temperature: float = 1.0, entropy: Entropy = "none"
) -> TokenLogprobs:
    """`target_logprobs` from the hidden states returned by `target_states`."""
    weight_VD, keep = model.get_output_embeddings().weight, getattr(model, KEEPS_LOGITS, False)  # pyright: ignore
    return token_logprobs(hidden_ND, weight_VD, batch.target_tokens_N, temperature=temperature, entropy=entropy, keep=keep)


def token_logprobs(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    tokens_N: Tensor,
    *,
    temperature: float = 1.0,
    entropy: Entropy = "none",
    chunk_logits: int | None = None,
    keep: bool = False,
) -> TokenLogprobs:
    """Log-probs (fp32 or finer) of tokens under softmax(W h / temperature), differentiable in h and W. `keep`: do not compute the
    logits again in the backward pass."""
    budget = chunk_logits or CHUNK_LOGITS.get(hidden_ND.device.type, 2**25)
    chunk = max(1, budget // weight_VD.shape[0])
    settings = temperature, entropy, chunk, keep and torch.is_grad_enabled()
    logprobs_N, entropy_N = _ChunkedLogprobs.apply(hidden_ND, weight_VD, tokens_N, *settings)  # pyright: ignore
    return TokenLogprobs(logprobs_N, None if entropy == "none" else entropy_N)


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, tokens_N: Tensor, temperature: float, entropy: Entropy, chunk: int,
        keep: bool,
    ):  # fmt: skip
        precise = _precise(hidden_ND.dtype)
        summed_N = Summed(*(torch.empty(len(tokens_N), dtype=precise, device=hidden_ND.device) for _ in Summed._fields))
        sums = _kernel_sums if _has_kernels(hidden_ND) else _torch_sums
        ctx.kept = {}
        for at in _chunks(len(tokens_N), chunk):
            z_NV = logits_of(hidden_ND[at], weight_VD)
            if keep:
                ctx.kept[at.start] = z_NV if sums is _kernel_sums else z_NV.clone()  # torch's sums are computed in place
            parts = sums(z_NV, tokens_N[at], temperature, entropy)
            del z_NV
            for whole_N, part in zip(summed_N, parts, strict=True):
                whole_N[at] = part
        ctx.save_for_backward(hidden_ND, weight_VD, tokens_N, *summed_N)
        ctx.temperature, ctx.learn_entropy, ctx.chunk = temperature, entropy == "with_gradient", chunk
        ctx.sum = sum_of_product([weight_VD])
        if not ctx.learn_entropy:
            ctx.mark_non_differentiable(summed_N.entropy_N)
        return summed_N.logprobs_N, summed_N.entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs_N: Tensor, grad_entropy_N: Tensor):  # pyright: ignore
        hidden_ND, weight_VD, tokens_N, *summed = ctx.saved_tensors
        summed_N = Summed(*summed)
        grad_hidden_ND = torch.empty_like(hidden_ND) if ctx.needs_input_grad[0] else None
        # Summed in fp32 over chunks: bf16 would lose the small contributions.
        sum_VD, grad_weight_VD = None, None
        if ctx.needs_input_grad[1]:
            sum_VD = None if ctx.sum is None else ctx.sum.get([weight_VD])
            if sum_VD is None:
                sum_VD = grad_weight_VD = torch.zeros_like(weight_VD, dtype=_precise(weight_VD.dtype))
        gradient = _kernel_gradient if _has_kernels(hidden_ND) else _torch_gradient
        for at in _chunks(len(tokens_N), ctx.chunk):
            grads = grad_logprobs_N[at], grad_entropy_N[at] if ctx.learn_entropy else None
            part = Summed(*(one[at] for one in summed_N))
            z_NV = ctx.kept.pop(at.start, None)
            z_NV = logits_of(hidden_ND[at], weight_VD) if z_NV is None else z_NV
            grad_z = gradient(z_NV, tokens_N[at], part, ctx.temperature, *grads, hidden_ND.dtype)
            del z_NV
            if grad_hidden_ND is not None:
                grad_hidden_ND[at] = grad_z @ weight_VD
            if sum_VD is not None:
                add_product(sum_VD, grad_z, hidden_ND[at])
        if grad_weight_VD is not None:
            grad_weight_VD = grad_weight_VD.to(weight_VD.dtype)
        return grad_hidden_ND, grad_weight_VD, None, None, None, None, None


def _has_kernels(hidden_ND: Tensor) -> bool:
    return hidden_ND.is_cuda and hidden_ND.dtype != torch.float64


def _kernel_sums(z_NV: Tensor, tokens_N: Tensor, temperature: float, entropy: Entropy) -> Summed:
    from plaudit.models.kernels import token_logprobs

    return token_logprobs(z_NV, tokens_N, temperature)


def _kernel_gradient(
    z_NV: Tensor, tokens_N: Tensor, summed: Summed, temperature: float, grad_logprobs_N: Tensor, grad_entropy_N: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    from plaudit.models.kernels import logit_gradients

    grad_NV = torch.empty_like(z_NV, dtype=dtype)
    logit_gradients(z_NV, tokens_N, summed, temperature, grad_logprobs_N, grad_entropy_N, grad_NV)
    return grad_NV


def _torch_sums(z_NV: Tensor, tokens_N: Tensor, temperature: float, entropy: Entropy) -> Summed:
    greatest_N = z_NV.amax(-1)
    below_NV = _below(z_NV, greatest_N, temperature)
    odds_NV = below_NV.exp()
    odds_N = odds_NV.sum(-1)
    total_N = odds_N.log()
    entropy_N = torch.zeros_like(total_N)
    if entropy != "none":
        entropy_N = total_N - odds_NV.mul_(below_NV).sum(-1) / odds_N
    return Summed(below_NV.gather(-1, tokens_N[:, None])[:, 0] - total_N, entropy_N, greatest_N, total_N)


def _torch_gradient(
    z_NV: Tensor, tokens_N: Tensor, summed: Summed, temperature: float, grad_logprobs_N: Tensor, grad_entropy_N: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    logp_NV = _below(z_NV, summed.greatest_N, temperature).sub_(summed.total_N[:, None])
    if grad_entropy_N is None:
        grad_NV = logp_NV.exp_().mul_(-grad_logprobs_N[:, None])
    else:
        p_NV = logp_NV.exp()
        from_entropy_NV = logp_NV.add_(summed.entropy_N[:, None]).mul_(p_NV).mul_(-grad_entropy_N[:, None])
        grad_NV = p_NV.mul_(-grad_logprobs_N[:, None]).add_(from_entropy_NV)
    grad_NV.scatter_add_(-1, tokens_N[:, None], grad_logprobs_N[:, None])
    return grad_NV.div_(temperature).to(dtype)


def _below(z_NV: Tensor, greatest_N: Tensor, temperature: float) -> Tensor:
    """(z − greatest) / temperature, in place. The maximum is subtracted first: z − log Σ exp z rounds where logits are large."""
    below_NV = z_NV.sub_(greatest_N[:, None])
    return below_NV if temperature == 1.0 else below_NV.div_(temperature)


def logits_of(hidden_ND: Tensor, weight_VD: Tensor) -> Tensor:
    """Logits in fp32 or finer. A GPU accumulates half-precision products in fp32 anyway, and here the sum is not rounded back:
    around 20, half-precision logits are a sixteenth apart, most of the difference between two ways to compute a log-prob."""
    if hidden_ND.is_cuda and hidden_ND.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(hidden_ND, weight_VD.T, out_dtype=torch.float32)
    return (hidden_ND @ weight_VD.T).to(_precise(hidden_ND.dtype))


def _precise(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _chunks(total: int, size: int) -> Iterator[slice]:
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))
