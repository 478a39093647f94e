"""Attention while sampling: what `models/attention.py` hands over when a model runs for the engine.

A prefill computes what training computes, and keeps the keys and values. A decode step has one token per running sequence; each
looks at its own row of the cache, with the query heads of a key-value head as rows of one small matrix: a key is read once for all.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from plaudit.rollout.native.cache import KVCache


class PrefillStep:
    """Keeps the keys and values that a packed forward pass computes."""

    def __init__(self) -> None:
        self._layers: dict[int, Tensor] = {}

    def keep(self, layer: int, key: Tensor, value: Tensor) -> None:
        """key and value [1, kv heads, T, head size]."""
        self._layers[layer] = torch.cat([key, value])

    def stacked(self) -> Tensor:
        """[layer, 2, kv head, T, head size]"""
        return torch.stack([self._layers[layer] for layer in sorted(self._layers)])


class DecodeStep:
    """One token per row of the cache, at its own position."""

    def __init__(self, cache: KVCache, positions_B: Tensor, longest: int):
        self.cache, self.positions_B, self.longest = cache, positions_B, longest
        self.rows_B = torch.arange(len(positions_B), device=positions_B.device)
        self._masks: dict[int | None, Tensor] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
        """query [1, heads, B, d], key and value [1, kv heads, B, d] → [1, B, heads, d]."""
        heads, B = query.shape[1], query.shape[2]
        self.cache.write(layer, self.rows_B, self.positions_B, key[0].transpose(0, 1), value[0].transpose(0, 1))
        keys, values = self.cache.read(layer, B, self.longest)
        kv_heads = keys.shape[1]
        query = query[0].transpose(0, 1).reshape(B, kv_heads, heads // kv_heads, -1)
        output = scaled_dot_product_attention(query, keys, values, attn_mask=self._mask(window), scale=scaling)
        return output.reshape(1, B, heads, -1)

    def _mask(self, window: int | None) -> Tensor:
        """[B, 1, 1, longest]: up to and with the token's own position, and no further back than the window."""
        if window not in self._masks:
            at = torch.arange(self.longest, device=self.positions_B.device)[None]
            seen = at <= self.positions_B[:, None]
            if window:
                seen &= at > self.positions_B[:, None] - window
            self._masks[window] = seen[:, None, None]
        return self._masks[window]
