"""Attention that keeps packed sequences apart, as a transformers attention implementation.

Any model that uses transformers' attention interface (Llama, Qwen, Mistral and similar) runs on packed batches with it, unchanged:
sequence starts are passed through the model's keyword arguments. On a GPU in half precision, all sequences run in one kernel, which
sums in the sampler's order; its backward pass is ours on Hopper GPUs, elsewhere torch's flash attention. With a sliding window or
unusual head sizes, they run in torch's variable-length flash attention. Otherwise each sequence runs by itself through
`scaled_dot_product_attention`.
Unsupported features (soft caps, attention sinks) are refused, never computed wrong.
"""

import inspect
from functools import cache
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from plaudit.errors import PlauditError
from plaudit.types import Batch, SharedPrompts

NAME = "plaudit_packed"


def packed_states(decoder: Any, batch: Batch) -> Tensor:
    """Final hidden states [T, D] of a packed batch."""
    attention = decoder.config._attn_implementation
    if attention != NAME:  # another one does not know which sequences share tokens
        raise PlauditError(
            f"{decoder.name_or_path}: its attention was replaced by {attention} after it was loaded. Code that builds another "
            "model from its config (an engine of your own) must copy the config first: copy.deepcopy(model.config)"
        )
    return decoder(**packed_arguments(batch), use_cache=False).last_hidden_state[0]


def packed_arguments(batch: Batch) -> dict[str, Any]:
    """Keyword arguments of a decoder's forward pass for a packed batch."""
    shared = batch.shared
    return {
        "input_ids": batch.tokens_T[None],
        "position_ids": batch.positions_T[None],
        "cu_seq_lens_q": batch.starts_S1,
        "cu_seq_lens_k": batch.starts_S1 if shared is None else shared.starts_S1,
        "max_length_q": batch.longest,
        "max_length_k": batch.longest if shared is None else shared.longest,
        **({} if shared is None else {"shared_prompts": shared}),
    }


class AttentionOverride(Protocol):
    """Replaces attention: the rollout engine, whose keys are in a cache."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None
    ) -> Tensor: ...


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    shared_prompts: SharedPrompts | None = None,
    kv: AttentionOverride | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [1, heads, T, d], key and value [1, kv heads, T, d] → [1, T, heads, d]."""
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"{type(module).__name__} uses {name}, which packed attention does not compute")
    assert attention_mask is None
    assert query.shape[0] == 1
    if kv is not None:
        return kv.attend(module.layer_idx, query, key, value, scaling, sliding_window), None  # pyright: ignore
    if cu_seq_lens_q is None or cu_seq_lens_k is None or max_length_q is None or max_length_k is None:
        raise NotImplementedError(
            f"{type(module).__name__} does not pass sequence starts to its attention: packed sequences would attend to each other"
        )
    query_THD, key_TKD, value_TKD = (x[0].transpose(0, 1) for x in (query, key, value))
    return attend_packed(
        query_THD, key_TKD, value_TKD, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k, shared_prompts,
        scale=scaling, window=sliding_window, dropout=dropout,
    )[None], None  # fmt: skip


def window_of(attention: Any) -> int | None:
    """Sliding window of a Llama, Mistral or Qwen attention module: an attribute in Qwen, from the config in Mistral, none in Llama
    whatever its config says."""
    from_config = type(attention).__name__ == "MistralAttention"
    return attention.config.sliding_window if from_config else getattr(attention, "sliding_window", None)


def attend_packed(
    query_THD: Tensor,
    key_UKD: Tensor,
    value_UKD: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    longest_q: int,
    longest_k: int,
    shared: SharedPrompts | None = None,
    *,
    scale: float | None,
    window: int | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Causal attention within each packed sequence. If a sequence has more keys than queries, the queries are its last tokens.
    `shared`: keys and values are those of the tokens, to be copied for the sequences that share them."""
    # A window only affects sequences longer than itself.
    window = window if window and window < longest_k else None
    on_gpu = query_THD.is_cuda and query_THD.dtype in (torch.bfloat16, torch.float16) and dropout == 0.0
    if on_gpu and window is None and _is_supported(query_THD, key_UKD, value_UKD):
        scale = query_THD.shape[-1] ** -0.5 if scale is None else scale
        rest = starts_q, starts_k, longest_q, longest_k, shared, scale
        return _BatchInvariantAttention.apply(query_THD, key_UKD, value_UKD, *rest)  # pyright: ignore
    if shared is not None:
        key_UKD, value_UKD = (_CopiedKeys.apply(x, shared) for x in (key_UKD, value_UKD))
    if on_gpu:
        return _flash(query_THD, key_UKD, value_UKD, starts_q, starts_k, longest_q, longest_k, scale, window)
    return _per_sequence(query_THD, key_UKD, value_UKD, starts_q.tolist(), starts_k.tolist(), scale, dropout, window)


def _per_sequence(
    query: Tensor, key: Tensor, value: Tensor, starts_q: list[int], starts_k: list[int],
    scale: float | None, dropout: float, window: int | None,
) -> Tensor:  # fmt: skip
    lengths_q, lengths_k = ([end - start for start, end in pairwise(starts)] for starts in (starts_q, starts_k))
    query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
    outputs = []
    for q, k, v in zip(query.split(lengths_q, 2), key.split(lengths_k, 2), value.split(lengths_k, 2), strict=True):
        plain = q.shape[2] == k.shape[2] and not (window and q.shape[2] > window)
        mask = None if plain else _causal_mask(q.shape[2], k.shape[2], window, q.device)
        outputs.append(
            scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                dropout_p=dropout,
                is_causal=mask is None,
                scale=scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        )
    return torch.cat(outputs, 2)[0].transpose(0, 1)


def _causal_mask(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """The last query is at the last key. Each attends to the keys up to its own, or the last `window` of those."""
    behind = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)[None, :]
    return (behind >= 0) & (behind < (window or keys))


def _is_supported(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether both the kernel and flash attention's backward pass support these shapes."""
    size = query.shape[-1]
    alike = all(x.shape[-1] == size and x.stride(-1) == 1 for x in (query, key, value))
    return alike and 16 <= size <= 256 and size % 8 == 0


class _BatchInvariantAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, starts_q: Tensor, starts_k: Tensor, longest_q: int, longest_k: int,
        shared: SharedPrompts | None, scale: float,
    ) -> Tensor:  # fmt: skip
        from plaudit.models.kernels import attend

        out, logsum = attend(query, *_copies(key, value, shared), starts_q, starts_k, longest_q, scale)
        ctx.save_for_backward(query, key, value, starts_q, starts_k, out, logsum)
        ctx.longest_q, ctx.longest_k, ctx.shared, ctx.scale = longest_q, longest_k, shared, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor):  # pyright: ignore
        query, key, value, starts_q, starts_k, out, logsum = ctx.saved_tensors
        inputs = grad, query, *_copies(key, value, ctx.shared), out, logsum, starts_q, starts_k, ctx.longest_q, ctx.longest_k
        grad_query, *grads = _attention_gradients(*inputs, ctx.scale)
        if ctx.shared is not None:
            grads = [_sum_copies(of_copies, ctx.shared) for of_copies in grads]
        return grad_query, *grads, *[None] * 6


def _attention_gradients(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsum: Tensor, starts_q: Tensor, starts_k: Tensor,
    longest_q: int, longest_k: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from plaudit.models.kernels import attend_backward, is_hopper

    if is_hopper(grad.device):
        return attend_backward(grad, query, key, value, out, logsum, starts_q, starts_k, longest_q, longest_k, scale)
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=grad.device), torch.empty(0, device=grad.device)
    return torch.ops.aten._flash_attention_backward(
        grad.contiguous(),
        query,
        key,
        value,
        out,
        logsum,
        starts_q,
        starts_k,
        longest_q,
        longest_k,
        0.0,
        True,
        *no_dropout,
        scale=scale,
    )


# Keys of shared tokens -----------------------------------------------------------------------------------------------


class _CopiedKeys(torch.autograd.Function):
    """Keys (or values) of each sequence, from those of the tokens."""

    @staticmethod
    def forward(ctx: Any, key_TKD: Tensor, shared: SharedPrompts) -> Tensor:
        ctx.shared = shared
        return key_TKD[shared.keys_U]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_UKD: Tensor):  # pyright: ignore
        return _sum_copies(grad_UKD, ctx.shared), None


def _copies(key: Tensor, value: Tensor, shared: SharedPrompts | None) -> tuple[Tensor, Tensor]:
    """Not kept for the backward pass, which makes them again: there may be several times as many as tokens."""
    return (key, value) if shared is None else (key[shared.keys_U], value[shared.keys_U])


def _sum_copies(grad_UKD: Tensor, shared: SharedPrompts) -> Tensor:
    """The gradient of each token's key: summed over its copies, in order and in fp32 or finer."""
    if grad_UKD.is_cuda:
        from plaudit.models.kernels import sum_copies

        return sum_copies(grad_UKD, shared.copies_U, shared.copy_starts_T1)
    tokens, precise = len(shared.copy_starts_T1) - 1, torch.promote_types(grad_UKD.dtype, torch.float32)
    sums = torch.zeros(tokens, *grad_UKD.shape[1:], dtype=precise, device=grad_UKD.device)
    return sums.index_add_(0, shared.keys_U, grad_UKD.to(precise)).to(grad_UKD.dtype)


def _flash(
    query: Tensor, key: Tensor, value: Tensor, starts_q: Tensor, starts_k: Tensor, longest_q: int, longest_k: int,
    scale: float | None, window: int | None,
) -> Tensor:  # fmt: skip
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {"scale": scale, "window_size": (window - 1 if window else -1, 0)}
    if query.shape[1] != key.shape[1] and _needs_gqa_flag():
        options["enable_gqa"] = True
    return varlen_attn(query, key, value, starts_q, starts_k, longest_q, longest_k, **options)  # pyright: ignore


@cache
def _needs_gqa_flag() -> bool:
    """torch 2.11 needs no flag."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


AttentionInterface.register(NAME, packed_attention)
