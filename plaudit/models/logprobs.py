"""Log-probs and entropies of given tokens without materialising all logits.

For token y with logits z = W h / temperature, over a vocabulary V:

    log p_v = z_v − logsumexp(z)                    ∂ log p_y / ∂z = onehot(y) − p
    H       = −Σ p_v log p_v                        ∂ H / ∂z       = −p · (log p + H)

The logits of a chunk of tokens are computed, used and freed in the forward pass, and recomputed in the backward pass, so they take
one chunk's memory whatever the batch size. In full, T tokens × V = 152k would take 4·T·V bytes, several times over with gradients.
"""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from plaudit.models.attention import packed_arguments
from plaudit.models.sharded import in_forward_pass
from plaudit.types import Batch

# Logits in memory at a time: few enough to suit a CPU's caches and memory, enough to keep a GPU busy.
CHUNK_LOGITS = {"cpu": 2**23, "cuda": 2**27}


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
    hidden_TD = model.get_decoder()(**packed_arguments(batch), use_cache=False).last_hidden_state[0]  # pyright: ignore
    return hidden_TD[batch.predictors_N]


def state_logprobs(
    model: nn.Module, hidden_ND: Tensor, batch: Batch, *, temperature: float = 1.0, entropy: Entropy = "none"
) -> TokenLogprobs:
    """`target_logprobs` from the hidden states returned by `target_states`."""
    weight_VD = model.get_output_embeddings().weight  # pyright: ignore
    return token_logprobs(hidden_ND, weight_VD, batch.tokens_T[batch.loss_mask_T], temperature=temperature, entropy=entropy)


def token_logprobs(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    tokens_N: Tensor,
    *,
    temperature: float = 1.0,
    entropy: Entropy = "none",
    chunk_logits: int | None = None,
) -> TokenLogprobs:
    """Log-probs (fp32 or finer) of tokens under softmax(W h / temperature), differentiable in h and W."""
    budget = chunk_logits or CHUNK_LOGITS.get(hidden_ND.device.type, 2**25)
    chunk = max(1, budget // weight_VD.shape[0])
    logprobs_N, entropy_N = _ChunkedLogprobs.apply(hidden_ND, weight_VD, tokens_N, temperature, entropy, chunk)  # pyright: ignore
    return TokenLogprobs(logprobs_N, None if entropy == "none" else entropy_N)


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, tokens_N: Tensor, temperature: float, entropy: Entropy, chunk: int):
        logprobs_N = torch.empty(len(tokens_N), dtype=_precise(hidden_ND.dtype), device=hidden_ND.device)
        entropy_N = torch.zeros_like(logprobs_N)
        for at in _chunks(len(tokens_N), chunk):
            logp = _all_logprobs(hidden_ND[at], weight_VD, temperature)
            logprobs_N[at] = logp.gather(-1, tokens_N[at, None])[:, 0]
            if entropy != "none":
                entropy_N[at] = -logp.exp().mul_(logp).sum(-1)
        ctx.save_for_backward(hidden_ND, weight_VD, tokens_N, entropy_N)
        ctx.temperature, ctx.learn_entropy, ctx.chunk = temperature, entropy == "with_gradient", chunk
        if not ctx.learn_entropy:
            ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs_N: Tensor, grad_entropy_N: Tensor):  # pyright: ignore
        hidden_ND, weight_VD, tokens_N, entropy_N = ctx.saved_tensors
        grad_hidden_ND = torch.empty_like(hidden_ND) if ctx.needs_input_grad[0] else None
        # Summed in fp32 over chunks: bf16 would lose the small contributions.
        precise = _precise(weight_VD.dtype)
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=precise) if ctx.needs_input_grad[1] else None
        for at in _chunks(len(tokens_N), ctx.chunk):
            logp = _all_logprobs(hidden_ND[at], weight_VD, ctx.temperature)
            if ctx.learn_entropy:
                p = logp.exp()
                from_entropy = logp.add_(entropy_N[at, None]).mul_(p).mul_(-grad_entropy_N[at, None])
                grad_z = p.mul_(-grad_logprobs_N[at, None]).add_(from_entropy)
            else:
                grad_z = logp.exp_().mul_(-grad_logprobs_N[at, None])
            grad_z.scatter_add_(-1, tokens_N[at, None], grad_logprobs_N[at, None])
            grad_z = grad_z.div_(ctx.temperature).to(hidden_ND.dtype)
            if grad_hidden_ND is not None:
                grad_hidden_ND[at] = grad_z @ weight_VD
            if grad_weight_VD is not None:
                if weight_VD.dtype == precise:
                    grad_weight_VD.addmm_(grad_z.T, hidden_ND[at])
                else:
                    grad_weight_VD += grad_z.T @ hidden_ND[at]
        if grad_weight_VD is not None:
            grad_weight_VD = grad_weight_VD.to(weight_VD.dtype)
        return grad_hidden_ND, grad_weight_VD, None, None, None, None


def logits_of(hidden_ND: Tensor, weight_VD: Tensor) -> Tensor:
    """Logits in fp32 or finer. A GPU accumulates half-precision products in fp32 anyway, and here the sum is not rounded back:
    around 20, half-precision logits are a sixteenth apart, most of the difference between two ways to compute a log-prob."""
    if hidden_ND.is_cuda and hidden_ND.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(hidden_ND, weight_VD.T, out_dtype=torch.float32)
    return (hidden_ND @ weight_VD.T).to(_precise(hidden_ND.dtype))


def _all_logprobs(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    z = logits_of(hidden, weight)
    # Not z − z.logsumexp(), which rounds where logits are large; log_softmax subtracts the maximum first.
    return (z if temperature == 1.0 else z.div_(temperature)).log_softmax(-1)


def _precise(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _chunks(total: int, size: int) -> Iterator[slice]:
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))
