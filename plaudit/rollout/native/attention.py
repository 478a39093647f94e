"""Attention while sampling: for prefill, for one decode step of every sequence, and for scoring full sequences."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plaudit.data.pack import to_device
from plaudit.models.attention import attend_packed
from plaudit.models.heads import Heads, Rotation
from plaudit.rollout.native.batch import POSITION, TOKEN, BatchRows
from plaudit.rollout.native.cache import KVCache
from plaudit.rollout.native.prefixes import SharedPrefixes
from plaudit.rollout.native.scheduler import PrefillChunk
from plaudit.types import Batch


class PrefillStep:
    """Chunks of prompts, packed. Computes what training computes, and writes keys and values to the cache."""

    def __init__(self, chunks: Sequence[PrefillChunk], cache: KVCache, ops: Any):
        self.cache, self.ops, device = cache.with_block_tables(_block_tables(chunks, cache.shape.device)), ops, cache.shape.device
        lengths, ends = [chunk.end - chunk.begin for chunk in chunks], [chunk.end for chunk in chunks]
        self.tokens_T = to_device(np.concatenate([p.job.tokens[p.begin : p.end] for p in chunks]), device, torch.int64)
        self.positions_T = to_device(np.concatenate([np.arange(p.begin, p.end) for p in chunks]), device)
        self.rows_T = to_device(np.repeat(np.arange(len(chunks)), lengths), device, torch.int32)
        self.starts_q = to_device([0, *accumulate(lengths)], device, torch.int32)
        self.starts_k = to_device([0, *accumulate(ends)], device, torch.int32)
        self.longest_q, self.longest_k = max(lengths), max(ends)
        # Per chunk: its length, the blocks of its job if earlier chunks are in the cache, and its end.
        self._spans: list[tuple[int, Tensor | None, int]] = []
        for chunk, length in zip(chunks, lengths, strict=True):
            blocks = to_device(chunk.job.blocks, device) if chunk.begin else None
            self._spans.append((length, blocks, chunk.end))
        self._continues = any(chunk.begin for chunk in chunks)

    def write(self, layer: int, qkv_TE: Tensor, heads: Heads, rotation: Rotation) -> None:
        self.ops.rotate_and_write(qkv_TE, heads, rotation, self.cache, layer, self.rows_T, self.positions_T)

    def attend_fused(
        self, layer: int, qkv_TE: Tensor, heads: Heads, rotation: Rotation, scale: float, window: int | None
    ) -> Tensor:
        self.write(layer, qkv_TE, heads, rotation)
        qkv_THD = qkv_TE.view(len(qkv_TE), -1, heads.size)
        query_THD, key_TKD, value_TKD = qkv_THD.split([heads.query, heads.kv, heads.kv], 1)
        return self._attend(layer, query_THD, key_TKD, value_TKD, scale, window).reshape(len(qkv_TE), -1)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
        """query [1, heads, T, d], key and value [1, kv heads, T, d] → [1, T, heads, d]."""
        query_THD, key_TKD, value_TKD = (x[0].transpose(0, 1) for x in (query, key, value))
        self.ops.write(key_TKD, value_TKD, self.cache, layer, self.rows_T, self.positions_T)
        return self._attend(layer, query_THD, key_TKD, value_TKD, scaling, window)[None]

    def _attend(
        self, layer: int, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, scale: float | None, window: int | None
    ) -> Tensor:
        if self._continues:
            key_TKD, value_TKD = self._all_keys(layer, key_TKD, value_TKD)
        return attend_packed(
            query_THD, key_TKD, value_TKD, self.starts_q, self.starts_k, self.longest_q, self.longest_k, scale=scale, window=window
        )

    def _all_keys(self, layer: int, key_TKD: Tensor, value_TKD: Tensor) -> tuple[Tensor, Tensor]:
        assert self.cache.memory is not None
        at, keys, values = 0, [], []
        for length, blocks, end in self._spans:
            if blocks is None:
                keys.append(key_TKD[at : at + length])
                values.append(value_TKD[at : at + length])
            else:
                key, value = _unpaged(self.cache.memory[blocks, layer])
                keys.append(key[:end])
                values.append(value[:end])
            at += length
        return torch.cat(keys), torch.cat(values)


def _block_tables(chunks: Sequence[PrefillChunk], device: torch.device) -> Tensor:
    """Block tables of the chunks' jobs, none of which has a row yet."""
    tables = np.zeros((len(chunks), max(len(chunk.job.blocks) for chunk in chunks)), dtype=np.int32)
    for table, chunk in zip(tables, chunks, strict=True):
        table[: len(chunk.job.blocks)] = chunk.job.blocks
    return to_device(tables, device, torch.int32)


def _unpaged(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """[block, 2, kv head, token, size] → keys and values [token, kv head, size]."""
    both = blocks.permute(1, 0, 3, 2, 4).flatten(1, 2)
    return both[0], both[1]


class DecodeStep:
    """The newest token of each of the first `count` rows."""

    def __init__(self, rows: BatchRows, count: int, cache: KVCache, longest: int, ops: Any, prefixes: SharedPrefixes | None = None):
        self.cache, self.ops = cache, ops
        self.options: dict[str, Any] = {"longest": longest} if prefixes is None else {"longest": longest, "prefixes": prefixes}
        self.tokens_T = rows.state_RC[:count, TOKEN]
        self.positions_T = rows.state_RC[:count, POSITION]
        self.rows_T = rows.indices_R[:count]

    def attend_fused(
        self, layer: int, qkv_TE: Tensor, heads: Heads, rotation: Rotation, scale: float, window: int | None
    ) -> Tensor:
        options = {"scale": scale, "window": window, **self.options}
        return self.ops.rotate_and_attend(qkv_TE, heads, rotation, self.cache, layer, self.positions_T, **options)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
        """query [1, heads, B, d], key and value [1, kv heads, B, d] → [1, B, heads, d]."""
        query_BHD, key_BKD, value_BKD = (x[0].transpose(0, 1) for x in (query, key, value))
        self.ops.write(key_BKD, value_BKD, self.cache, layer, self.rows_T, self.positions_T)
        scale = query_BHD.shape[-1] ** -0.5 if scaling is None else scaling
        options = {"scale": scale, "window": window, **self.options}
        return self.ops.attend(query_BHD, self.cache, layer, self.positions_T, **options).view(1, *query_BHD.shape)


class ScoringStep:
    """Full sequences, packed, without a cache: what training computes, without gradients."""

    def __init__(self, batch: Batch, ops: Any):
        assert batch.shared is None, "sequences that are scored have all their tokens"
        self.batch, self.ops = batch, ops
        self.tokens_T, self.positions_T = batch.tokens_T, batch.positions_T

    def attend_fused(
        self, layer: int, qkv_TE: Tensor, heads: Heads, rotation: Rotation, scale: float, window: int | None
    ) -> Tensor:
        self.ops.rotate(qkv_TE, heads, rotation, self.positions_T)
        query_THD, key_TKD, value_TKD = qkv_TE.view(len(qkv_TE), -1, heads.size).split([heads.query, heads.kv, heads.kv], 1)
        starts, longest = self.batch.starts_S1, self.batch.longest
        attended_THD = attend_packed(query_THD, key_TKD, value_TKD, starts, starts, longest, longest, scale=scale, window=window)
        return attended_THD.reshape(len(qkv_TE), -1)
