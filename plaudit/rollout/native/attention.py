"""Attention while sampling: what a pass over pieces of prompts, or over one token of every sequence, does with queries and keys."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plaudit.models.attention import attend_packed
from plaudit.models.heads import Heads, Rotation
from plaudit.rollout.native.cache import CacheView, to_device
from plaudit.rollout.native.rows import POSITION, TOKEN, Rows
from plaudit.rollout.native.scheduler import Piece
from plaudit.types import Batch


class ReadStep:
    """Pieces of prompts, packed. Computes what training computes, and keeps the keys and values."""

    def __init__(self, pieces: Sequence[Piece], cache: CacheView, ops: Any):
        self.cache, self.ops, device = cache.seen_by(_tables(pieces, cache.shape.device)), ops, cache.shape.device
        lengths, ends = [piece.end - piece.begin for piece in pieces], [piece.end for piece in pieces]
        self.tokens_T = to_device(np.concatenate([p.job.tokens[p.begin : p.end] for p in pieces]), device)
        self.positions_T = to_device(np.concatenate([np.arange(p.begin, p.end) for p in pieces]), device)
        self.rows_T = to_device(np.repeat(np.arange(len(pieces)), lengths), device, torch.int32)
        self.starts_q = to_device([0, *accumulate(lengths)], device, torch.int32)
        self.starts_k = to_device([0, *accumulate(ends)], device, torch.int32)
        self.longest_q, self.longest_k = max(lengths), max(ends)
        # Those that have been read in part already: where their new keys lie in the pass, and all their keys in the cache.
        self._past: list[tuple[int, Tensor | None, int]] = []
        for piece, length in zip(pieces, lengths, strict=True):
            blocks = to_device(piece.job.blocks, device) if piece.begin else None
            self._past.append((length, blocks, piece.end))
        self._continues = any(piece.begin for piece in pieces)

    def keep(self, layer: int, qkv_TE: Tensor, heads: Heads, rotation: Rotation) -> None:
        self.ops.rotate_and_write(qkv_TE, heads, rotation, self.cache, layer, self.rows_T, self.positions_T)

    def attend_fused(
        self, layer: int, qkv_TE: Tensor, heads: Heads, rotation: Rotation, scale: float, window: int | None
    ) -> Tensor:
        self.keep(layer, qkv_TE, heads, rotation)
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
        for length, blocks, end in self._past:
            if blocks is None:
                keys.append(key_TKD[at : at + length])
                values.append(value_TKD[at : at + length])
            else:
                key, value = _in_a_row(self.cache.memory[blocks, layer])
                keys.append(key[:end])
                values.append(value[:end])
            at += length
        return torch.cat(keys), torch.cat(values)


def _tables(pieces: Sequence[Piece], device: torch.device) -> Tensor:
    """Of the pieces' own: none of them has a row yet."""
    tables = np.zeros((len(pieces), max(len(piece.job.blocks) for piece in pieces)), dtype=np.int32)
    for table, piece in zip(tables, pieces, strict=True):
        table[: len(piece.job.blocks)] = piece.job.blocks
    return to_device(tables, device, torch.int32)


def _in_a_row(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """[block, 2, kv head, token, size] → keys and values [token, kv head, size]."""
    both = blocks.permute(1, 0, 3, 2, 4).flatten(1, 2)
    return both[0], both[1]


class DecodeStep:
    """The newest token of each of the first rows."""

    def __init__(self, rows: Rows, count: int, cache: CacheView, longest: int, ops: Any):
        self.cache, self.longest, self.ops = cache, longest, ops
        self.tokens_T = rows.state_RC[:count, TOKEN]
        self.positions_T = rows.state_RC[:count, POSITION]
        self.rows_T = rows.indices_R[:count]

    def attend_fused(
        self, layer: int, qkv_TE: Tensor, heads: Heads, rotation: Rotation, scale: float, window: int | None
    ) -> Tensor:
        options = {"scale": scale, "window": window, "longest": self.longest}
        return self.ops.rotate_and_attend(qkv_TE, heads, rotation, self.cache, layer, self.positions_T, **options)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
        """query [1, heads, B, d], key and value [1, kv heads, B, d] → [1, B, heads, d]."""
        query_BHD, key_BKD, value_BKD = (x[0].transpose(0, 1) for x in (query, key, value))
        self.ops.write(key_BKD, value_BKD, self.cache, layer, self.rows_T, self.positions_T)
        scale = query_BHD.shape[-1] ** -0.5 if scaling is None else scaling
        options = {"scale": scale, "window": window, "longest": self.longest}
        return self.ops.attend(query_BHD, self.cache, layer, self.positions_T, **options).view(1, *query_BHD.shape)


class WholeStep:
    """Whole sequences, packed, whose keys nobody will want again: what training computes, without gradients."""

    def __init__(self, batch: Batch, ops: Any):
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
