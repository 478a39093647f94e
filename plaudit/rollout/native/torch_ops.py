"""The engine's operations in torch: used on a CPU for prefill and without a C compiler; the reference for the kernels."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu

from plaudit.models.heads import Heads, Rotation
from plaudit.rollout.native import sampler
from plaudit.rollout.native.batch import AT_LIMIT, ENDED, IDLE, KEY, LIMIT, POSITION, RUNNING, TOKEN, WRITTEN, DeviceSampling
from plaudit.rollout.native.cache import KVCache
from plaudit.rollout.native.noise import position_keys


def add_norm(x_TD: Tensor, delta_TD: Tensor | None, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """RMS norm of x + delta in the weight's dtype, and the sum in x's dtype."""
    x_TD = x_TD if delta_TD is None else x_TD + delta_TD
    return _norm(x_TD, weight_D, eps).to(weight_D.dtype), x_TD


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    precise = x.to(torch.promote_types(x.dtype, torch.float32))
    precise = precise * torch.rsqrt(precise.pow(2).mean(-1, keepdim=True) + eps)
    return weight * precise.to(x.dtype)


def swiglu(gate_up_TI: Tensor) -> Tensor:
    gate_TI, up_TI = gate_up_TI.chunk(2, -1)
    return silu(gate_TI) * up_TI


def rotate_and_write(
    qkv_TE: Tensor, heads: Heads, rotation: Rotation, cache: KVCache, layer: int, rows_T: Tensor, positions_T: Tensor
) -> None:
    """Rotary embedding of queries and keys, in place; then keys and values to the cache."""
    rotate(qkv_TE, heads, rotation, positions_T)
    qkv_THD = qkv_TE.view(len(qkv_TE), -1, heads.size)
    write(qkv_THD[:, heads.query : heads.query + heads.kv], qkv_THD[:, heads.query + heads.kv :], cache, layer, rows_T, positions_T)


def rotate(qkv_TE: Tensor, heads: Heads, rotation: Rotation, positions_T: Tensor) -> None:
    """Rotary embedding of queries and keys, in place, after their norms if the model has any."""
    qkv_THD = qkv_TE.view(len(qkv_TE), -1, heads.size)
    turned = qkv_THD[:, : heads.query + heads.kv]
    x = turned
    if rotation.query_norm is not None and rotation.key_norm is not None:
        query, key = turned.split([heads.query, heads.kv], 1)
        x = torch.cat([_norm(query, rotation.query_norm, rotation.eps), _norm(key, rotation.key_norm, rotation.eps)], 1)
    cos, sin = rotation.cos[positions_T][:, None], rotation.sin[positions_T][:, None]
    half = heads.size // 2
    turned.copy_(x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin)


def write(key_TKD: Tensor, value_TKD: Tensor, cache: KVCache, layer: int, rows_T: Tensor, positions_T: Tensor) -> None:
    """Write keys and values to the cache. Tokens at negative positions (unused rows) are skipped."""
    assert cache.memory is not None
    if positions_T.min() < 0:
        used = positions_T >= 0
        key_TKD, value_TKD, rows_T, positions_T = key_TKD[used], value_TKD[used], rows_T[used], positions_T[used]
    blocks_T = cache.block_tables[rows_T, positions_T // cache.block_tokens]
    at_T = positions_T % cache.block_tokens
    cache.memory[blocks_T, layer, 0, :, at_T] = key_TKD
    cache.memory[blocks_T, layer, 1, :, at_T] = value_TKD


def attend(
    query_BHD: Tensor, cache: KVCache, layer: int, positions_B: Tensor, *, scale: float, window: int | None, longest: int
) -> Tensor:
    """Row i's query attends to row i's keys up to and including its position: [B, heads · size].

    The query heads of a key-value head form one small matrix, so that each key is read once for all of them.
    """
    B, heads, size = query_BHD.shape
    keys, values = _past(cache, layer, B, longest)
    query = query_BHD.reshape(B, cache.kv_heads, heads // cache.kv_heads, size)
    at = torch.arange(longest, device=query.device)[None]
    seen = at <= positions_B[:, None]
    if window is not None:
        seen &= at > positions_B[:, None] - window
    return scaled_dot_product_attention(query, keys, values, attn_mask=seen[:, None, None], scale=scale).reshape(B, -1)


def rotate_and_attend(
    qkv_BE: Tensor, heads: Heads, rotation: Rotation, cache: KVCache, layer: int, positions_B: Tensor,
    *, scale: float, window: int | None, longest: int,
) -> Tensor:  # fmt: skip
    """Both of the above, for one new token per row."""
    rotate_and_write(qkv_BE, heads, rotation, cache, layer, torch.arange(len(qkv_BE), device=qkv_BE.device), positions_B)
    query_BHD = qkv_BE.view(len(qkv_BE), -1, heads.size)[:, : heads.query]
    return attend(query_BHD, cache, layer, positions_B, scale=scale, window=window, longest=longest)


def _past(cache: KVCache, layer: int, rows: int, longest: int) -> tuple[Tensor, Tensor]:
    """Keys and values of the first rows: [row, kv head, position, size]; views, if row i uses block i."""
    assert cache.memory is not None
    if cache.blocks_match_rows:
        keys, values = cache.memory[:rows, layer, :, :, :longest].unbind(1)
        return keys, values
    blocks = cache.block_tables[:rows, : -(-longest // cache.block_tokens)]
    past = cache.memory[blocks, layer]  # [row, block, 2, kv head, token, size]
    past = past.permute(2, 0, 3, 1, 4, 5).flatten(3, 4)[:, :, :, :longest]
    return past[0], past[1]


def draw_and_advance(logits_BV: Tensor, rows_BC: Tensor, results_B4: Tensor, sampling: DeviceSampling) -> None:
    """Sample a token for each row in use from its fp32 logits, and advance the row's state."""
    drawn = sampler.draw(logits_BV, position_keys(rows_BC[:, KEY], rows_BC[:, WRITTEN]), sampling.settings)
    written_B = rows_BC[:, WRITTEN] + 1
    status_B = torch.where(written_B >= rows_BC[:, LIMIT], AT_LIMIT, RUNNING)
    status_B[torch.isin(drawn.tokens_B, sampling.end_tokens)] = ENDED
    used_B = rows_BC[:, POSITION] >= 0
    results_B4[:, 0] = torch.where(used_B, status_B, IDLE)
    results_B4[:, 1] = drawn.tokens_B
    results_B4[:, 2] = drawn.logprobs_B.float().view(torch.int32)
    results_B4[:, 3] = drawn.untempered_B.float().view(torch.int32)
    rows_BC[:, TOKEN] = torch.where(used_B, drawn.tokens_B, rows_BC[:, TOKEN])
    rows_BC[:, WRITTEN] = torch.where(used_B, written_B, rows_BC[:, WRITTEN])
    rows_BC[:, POSITION] = torch.where(used_B & (status_B == RUNNING), rows_BC[:, POSITION] + 1, -1)
