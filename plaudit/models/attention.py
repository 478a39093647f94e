"""Attention that keeps packed sequences apart, as a transformers attention implementation.

Any model that goes through transformers' attention interface (Llama, Qwen, Mistral and their kin) runs on packed batches with it,
unchanged: the batch's sequence starts travel through the model's keyword arguments. On a GPU in half precision all sequences go
through torch's variable-length flash attention at once; elsewhere each goes through `scaled_dot_product_attention` on its own.
What this does not compute (soft caps, attention sinks) is refused, never computed wrong.
"""

import inspect
from functools import cache
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from plaudit.types import Batch

NAME = "plaudit_packed"


def packed_arguments(batch: Batch) -> dict[str, Any]:
    """What a model's forward needs to be told about a packed batch."""
    return {
        "input_ids": batch.tokens_T[None],
        "position_ids": batch.positions_T[None],
        "cu_seq_lens_q": batch.starts_S1,
        "cu_seq_lens_k": batch.starts_S1,
        "max_length_q": batch.longest,
        "max_length_k": batch.longest,
    }


class KeepsKeys(Protocol):
    def keep(self, layer: int, key: Tensor, value: Tensor) -> None: ...


class OwnAttention(Protocol):
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
    max_length_q: int | None = None,
    kv: "KeepsKeys | OwnAttention | None" = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [1, heads, T, d], key and value [1, kv heads, T, d] → [1, T, heads, d].

    While sampling, `kv` keeps the keys and values of a pass over prompts, or (a step of one token each) attends to those it has.
    """
    if kv is not None and cu_seq_lens_q is None:
        return kv.attend(module.layer_idx, query, key, value, scaling, sliding_window), None  # pyright: ignore
    if kv is not None:
        kv.keep(module.layer_idx, key, value)  # pyright: ignore
    if cu_seq_lens_q is None or max_length_q is None:
        raise NotImplementedError(
            f"{type(module).__name__} does not hand sequence starts on to its attention, so packed sequences would see each other"
        )
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"{type(module).__name__} uses {name}, which packed attention does not compute")
    assert attention_mask is None
    assert query.shape[0] == 1

    # A window only matters to sequences longer than it.
    window = sliding_window if sliding_window and sliding_window < max_length_q else None
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and dropout == 0.0:
        return _flash(query, key, value, cu_seq_lens_q, max_length_q, scaling, window), None
    return _one_by_one(query, key, value, cu_seq_lens_q.tolist(), scaling, dropout, window), None


def _one_by_one(
    query: Tensor, key: Tensor, value: Tensor, starts: list[int], scaling: float | None, dropout: float, window: int | None
) -> Tensor:
    lengths = [end - start for start, end in pairwise(starts)]
    outputs = []
    for q, k, v in zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True):
        mask = _window_mask(q.shape[2], window, q.device) if window and q.shape[2] > window else None
        outputs.append(
            scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                dropout_p=dropout,
                is_causal=mask is None,
                scale=scaling,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        )
    return torch.cat(outputs, 2).transpose(1, 2)


def _window_mask(length: int, window: int, device: torch.device) -> Tensor:
    """Token i sees the `window` tokens up to and with itself."""
    at = torch.arange(length, device=device)
    behind = at[:, None] - at[None, :]
    return (behind >= 0) & (behind < window)


def _flash(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, scaling: float | None, window: int | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    options: dict[str, Any] = {"scale": scaling, "window_size": (window - 1 if window else -1, 0)}
    if q.shape[1] != k.shape[1]:
        if _takes_gqa():
            options["enable_gqa"] = True
        else:  # torch 2.11
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    return varlen_attn(q, k, v, starts, starts, longest, longest, **options)[None]  # pyright: ignore


@cache
def _takes_gqa() -> bool:
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


AttentionInterface.register(NAME, packed_attention)
