"""Random numbers as pure functions of a key: the same on every machine, in any batch, in any order.

A sequence's key is a 64-bit hash of (seed, step, prompt id, sample index). Key and token position give a new key by splitmix64, and
that key and the vocabulary index give 31 random bits by two rounds of a 32-bit mixer. Integers wrap around on overflow.
Negative indices are not tokens: the sampler uses them for the noise of tiles.
"""

import torch
from torch import Tensor

LARGEST_BELOW_1 = 1.0 - 2.0**-24


def position_keys(keys_B: Tensor, positions_B: Tensor) -> Tensor:
    """splitmix64 of key + position · golden ratio."""
    x = keys_B + (positions_B + 1) * _signed(0x9E3779B97F4A7C15, 64)
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9, 64)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB, 64)
    return x ^ _shift(x, 31)


def gumbel(keys_B: Tensor, indices: Tensor | int) -> Tensor:
    """Standard Gumbel noise, fp32 [B, V]: −log(−log(1 − w)), w uniform with a resolution of 2^-32 near 0, where the winners are.
    `indices`: the size of a full vocabulary, or the indices themselves, [V] for every key or [B, V]."""
    if isinstance(indices, int):
        indices = torch.arange(indices, device=keys_B.device)
    low_B, high_B = keys_B.to(torch.int32), (keys_B >> 32).to(torch.int32)
    x = _mix(indices.to(torch.int32) * _signed(0x9E3779B1, 32) ^ low_B[:, None])
    x = _mix(x.add_(high_B[:, None]))
    w = x.bitwise_and_(0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31).clamp_(max=LARGEST_BELOW_1)
    return w.neg_().log1p_().neg_().log_().neg_()


def _mix(x: Tensor) -> Tensor:
    """A 32-bit mixer with low bias (two multiplications between three xor-shifts), in place."""
    shifted = torch.empty_like(x)
    for by, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97), (15, 1)):
        x ^= torch.bitwise_right_shift(x, by, out=shifted).bitwise_and_((1 << (32 - by)) - 1)
        if factor != 1:
            x *= _signed(factor, 32)
    return x


def _shift(x: Tensor, by: int) -> Tensor:
    """Logical right shift: torch's integers are signed."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value
