"""The gradients of packed attention match autograd through plain softmax attention in float64, and are the same bits every time.

Without a GPU, Triton's interpreter runs the kernels, with descriptors of tiles and without; the memory between tensors is NaN.
"""

import importlib
import math
import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from support.interpreter import DEVICE, SHARED, interpreter

with interpreter():
    pytest.importorskip("triton", reason="kernels need Triton; the dev extra installs it on machines without a GPU")
    shared = importlib.import_module(SHARED)
    kernels = importlib.import_module(f"{SHARED}.attention_backward")

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, in the interpreter
    pytest.mark.grid(3),
]
ON_GPU = DEVICE.type == "cuda"
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if ON_GPU else [])
ROUNDING = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SHAPES = [(1, 16, 2), (2, 40, 3), (7, 64, 1), (1, 128, 2), (2, 64, 2), (7, 128, 1)]  # heads of a group, head size, groups
LENGTHS = [1, 2, 17, 64, 65, 130]


@pytest.fixture(autouse=True, scope="module")
def _interpreted() -> Iterator[None]:
    with interpreter():
        yield


class Packed(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    grad: Tensor
    starts_q: Tensor
    starts_k: Tensor
    queries: list[int]
    keys: list[int]
    scale: float

    def gradients(self, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        between = self.starts_q, self.starts_k
        out, logsum = shared.attend(self.query, self.key, self.value, *between, max(self.queries), self.scale)
        inputs = self.grad, self.query, self.key, self.value, out, logsum, *between
        return kernels.attend_backward(*inputs, max(self.queries), max(self.keys), self.scale, **options)


def packed(
    queries: list[int], keys: list[int], group: int, size: int, kv: int, dtype: torch.dtype, seed: int, tight: bool = True
) -> Packed:
    """Queries, keys and values are views of one tensor per token, as projections make them; others have NaN between heads."""
    g = torch.Generator().manual_seed(seed)
    heads = group * kv

    def views(tokens: int) -> tuple[Tensor, ...]:
        x = torch.full((tokens, heads + 2 * kv, size + (0 if tight else 8)), math.nan).to(DEVICE, dtype)
        x = x[..., :size]
        x.copy_(torch.randn(x.shape, generator=g))
        return x.split([heads, kv, kv], 1)

    query, (_, key, value) = views(sum(queries))[0], views(sum(keys))
    grad = torch.randn(sum(queries), heads, size, generator=g).to(DEVICE, dtype)
    starts = [torch.tensor([0, *np.cumsum(n)], dtype=torch.int32, device=DEVICE) for n in (queries, keys)]
    return Packed(query, key, value, grad, *starts, queries, keys, size**-0.5)


def reference(batch: Packed) -> list[Tensor]:
    """By autograd, in float64."""
    inputs = [x.detach().cpu().double().requires_grad_() for x in (batch.query, batch.key, batch.value)]
    query, key, value = inputs
    group = query.shape[1] // key.shape[1]
    outputs = []
    for q, k in zip(pairwise(batch.starts_q.tolist()), pairwise(batch.starts_k.tolist()), strict=True):
        keys, values = (x[slice(*k)].repeat_interleave(group, 1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[slice(*q)], keys) * batch.scale
        later = torch.ones(scores.shape[1:]).triu(k[1] - k[0] - (q[1] - q[0]) + 1).bool()
        outputs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -math.inf).softmax(-1), values))
    torch.cat(outputs).backward(batch.grad.cpu().double())
    return [x.grad for x in inputs]  # pyright: ignore


def check(found: tuple[Tensor, ...], expected: list[Tensor], dtype: torch.dtype) -> None:
    """Each number to a few roundings of the largest, and all of them together to about one."""
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == dtype
        difference = ours.detach().cpu().double() - theirs
        # If a query sees one key, its gradient is a difference of equal numbers.
        least = ROUNDING[dtype] / 10
        assert difference.norm() <= 2 * ROUNDING[dtype] * theirs.norm() + least * theirs.numel() ** 0.5
        assert difference.abs().max() <= 8 * ROUNDING[dtype] * theirs.abs().max() + 8 * least


CASES = [(shape, dtype, use_tma) for shape in SHAPES for dtype in DTYPES for use_tma in (False, True)]


@pytest.mark.grid(6)
@pytest.mark.parametrize(("shape", "dtype", "use_tma"), CASES, ids=str)
def test_gradients(shape, dtype, use_tma):
    group, size, kv = shape
    pick = random.Random(CASES.index((shape, dtype, use_tma)))
    use_tma &= size in (16, 64, 128)
    if use_tma and ON_GPU and not kernels.is_hopper(DEVICE):
        pytest.skip("needs a Hopper GPU")
    times, many = (5, 3) if ON_GPU else (1, 1 if group > 2 else 2)  # the interpreter is slow
    keys = [times * pick.choice(LENGTHS) for _ in range(pick.randint(1, many))]
    queries = [pick.randint(1, n) if pick.random() < 0.6 else n for n in keys]
    batch = packed(queries, keys, group, size, kv, dtype, pick.randint(0, 99), tight=use_tma)
    sides = [16, 32, 64] if size < 64 else [32, 64]
    tilings = [kernels.Tiling(pick.choice(sides), pick.choice(sides), 4, 2) for _ in range(2)]
    options = {} if ON_GPU and pick.random() < 0.5 else {"query_tiling": tilings[0], "key_tiling": tilings[1]}
    split = pick.choice([1, group])
    expected = reference(batch)
    found = batch.gradients(use_tma=use_tma, split=split, **options)
    check(found, expected, dtype)


@pytest.mark.parametrize("use_tma", [False, True])
@pytest.mark.parametrize("tiles", [(64, 16), (16, 64)], ids=str)
def test_sequences_without_queries(use_tma, tiles):
    """Their keys have gradient 0."""
    if use_tma and ON_GPU and not kernels.is_hopper(DEVICE):
        pytest.skip("needs a Hopper GPU")
    dtype = torch.float32 if tiles[0] == 64 else torch.float16
    batch = packed([0, 5, 0, 33], [4, 40, 20, 33], 2, 32, 2, dtype, 1)
    tile = kernels.Tiling(*tiles, 4, 2)
    _, key, value = found = batch.gradients(use_tma=use_tma, query_tiling=tile, key_tiling=tile)
    check(found, reference(batch), dtype)
    assert not key[:4].any()
    assert not value[44:64].any()


@pytest.mark.parametrize("size", [64, 128, 256, 96])
def test_tilings_of_each_head_size(size):
    """Those that training uses, on Hopper GPUs alone: others may not have the memory for them."""
    if ON_GPU and not kernels.is_hopper(DEVICE):
        pytest.skip("needs a Hopper GPU")
    dtype = torch.bfloat16 if ON_GPU else torch.float16
    lengths = [700, 513, 64, 1] if ON_GPU else [70, 1]
    batch = packed([max(1, n - 40) for n in lengths], lengths, 2, size, 1, dtype, size)
    check(batch.gradients(), reference(batch), dtype)


@pytest.mark.parametrize("use_tma", [False, True])
def test_the_same_bits_every_time(use_tma):
    if use_tma and ON_GPU and not kernels.is_hopper(DEVICE):
        pytest.skip("needs a Hopper GPU")
    dtype = torch.bfloat16 if ON_GPU else torch.float16
    lengths = [900, 700, 64] if ON_GPU else [40, 3]
    batch = packed(lengths, lengths, 2, 64, 2, dtype, 3)
    found = batch.gradients(use_tma=use_tma)
    for _ in range(5 if ON_GPU else 1):
        again = batch.gradients(use_tma=use_tma)
        assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


def test_a_gradient_that_tma_cannot_read(monkeypatch):
    """Contiguous, but not where an address may begin: on a Hopper GPU too, tiles are then loaded without TMA."""
    monkeypatch.setattr(kernels, "is_hopper", lambda device: True)
    dtype = torch.bfloat16 if ON_GPU else torch.float16
    batch = packed([5, 40], [5, 40], 2, 64, 1, dtype, 4)
    at = torch.empty(batch.grad.numel() + 4, dtype=dtype, device=DEVICE)[4:].view(batch.grad.shape)
    at.copy_(batch.grad)
    assert not kernels._fits_tma(at)
    check(batch._replace(grad=at).gradients(), reference(batch), dtype)


def test_heads_are_split_if_sequences_are_few():
    assert kernels.split_for(keys=16_384, kv=2, group=6, tile=128) == 1
    assert kernels.split_for(keys=8192, kv=2, group=6, tile=128) == 2
    assert kernels.split_for(keys=2048, kv=2, group=7, tile=128) == 7
    assert kernels.split_for(keys=100, kv=1, group=6, tile=128) == 6
    assert kernels.split_for(keys=100, kv=1, group=1, tile=128) == 1


def test_descriptors_describe_views_of_whole_heads_only():
    x = torch.zeros(4, 6, 64, dtype=torch.float16)
    assert kernels._fits_tma(x)
    assert kernels._fits_tma(x[:, 2:4])
    assert not kernels._fits_tma(x[:, ::2])
    assert not kernels._fits_tma(x[..., :32])
    assert not kernels._fits_tma(x[..., :40])
    assert not kernels._fits_tma(x[:0])
    assert not kernels._fits_tma(torch.zeros(4 * 6 * 64 + 4, dtype=torch.float16)[4:].view(4, 6, 64))
