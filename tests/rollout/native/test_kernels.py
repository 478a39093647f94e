"""The engine's Triton kernels and their torch equivalents match float64 references.

Without a GPU, Triton's interpreter runs the kernels one program at a time: this finds wrong indices, masks and formulas, but not
compiler errors or races. With a GPU the same tests run compiled. The interpreter lacks bfloat16, so float16 stands in for it.

Unused memory holds NaN, so that reading it is detected.
"""

import importlib
import math
import random
import sys
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from plaudit.errors import PlauditError
from plaudit.models import fused, logprobs
from plaudit.models.heads import Heads, Rotation, block_tokens
from plaudit.models.logprobs import token_logprobs
from plaudit.models.products import PARTS, split_k_product, uses_split_k
from plaudit.rollout.engine import Request, Sampling
from plaudit.rollout.native import engine, prefixes, sampler, torch_ops, verify
from plaudit.rollout.native.batch import AT_LIMIT, ENDED, IDLE, KEY, LIMIT, POSITION, RUNNING, TOKEN, WRITTEN, device_sampling
from plaudit.rollout.native.cache import CacheShape, KVCache
from plaudit.rollout.native.engine import NativeEngine
from plaudit.rollout.native.noise import gumbel, position_keys
from plaudit.rollout.native.prefixes import SharedPrefixes
from support.interpreter import DEVICE, KERNELS, SHARED, interpreter, is_swapped

with interpreter():
    triton = pytest.importorskip("triton", reason="kernels need Triton; the dev extra installs it on machines without a GPU")
    tl = importlib.import_module("triton.language")
    kernels, shared = importlib.import_module(KERNELS), importlib.import_module(SHARED)
    _exponential, _position_key = kernels.draw._exponential, kernels.draw._position_key

    @triton.jit
    def _noise(keys_ptr, written_ptr, out_ptr, KEYS: tl.constexpr, TOKENS: tl.constexpr):
        """The arrival time of each token, for some keys."""
        at = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
        token = tl.arange(0, TOKENS)
        key = _position_key(tl.load(keys_ptr + at), tl.load(written_ptr + at))
        tl.store(out_ptr + at[:, None] * TOKENS + token[None, :], _exponential(key[:, None], token[None, :]))


pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # log(0), on purpose, in the interpreter's numpy
    pytest.mark.grid(3),
]
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE.type == "cuda" else [])
ROUNDING = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
both = pytest.mark.parametrize("ops", [torch_ops, kernels], ids=["torch", "kernels"])
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def shapes_of_each_dtype(count: int) -> pytest.MarkDecorator:
    """Different shapes for each dtype."""
    cases = [(dtype, i * count + seed) for i, dtype in enumerate(DTYPES) for seed in range(count)]
    return pytest.mark.parametrize(("dtype", "seed"), cases, ids=str)


@pytest.fixture(autouse=True, scope="module")
def _interpreted() -> Iterator[None]:
    with interpreter():
        yield


def test_the_interpreter_is_visible_to_these_tests_only(monkeypatch):
    """Inside, kernels are interpreted; outside, the previous Triton and environment are back."""
    if DEVICE.type == "cuda":
        pytest.skip("compiled here")
    assert type(kernels.attention._attend).__name__ == type(tl.sum).__name__ == "InterpretedFunction"
    others = ModuleType("triton")
    before = {name: module for name, module in sys.modules.items() if is_swapped(name)}
    for name in before:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setitem(sys.modules, "triton", others)
    with interpreter():
        assert sys.modules["triton"] is triton
        assert sys.modules[KERNELS] is kernels
        assert triton.knobs.runtime.interpret
    assert sys.modules["triton"] is others
    assert KERNELS not in sys.modules
    assert not triton.knobs.runtime.interpret


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def exact(x: Tensor) -> Tensor:
    return x.detach().cpu().double()


def close(ours: Tensor, reference: Tensor, dtype: torch.dtype, times: float = 1.0) -> None:
    """Equal to within a few roundings of the largest value; NaN only where the reference has it."""
    assert ours.dtype == dtype
    size = reference.nan_to_num(0.0).abs().max().item() if reference.numel() else 0.0
    rounding = ROUNDING[dtype] * times
    torch.testing.assert_close(exact(ours), reference, rtol=rounding, atol=rounding * max(size, 1.0) / 2, equal_nan=True)


def share_equal(a: Tensor, b: Tensor) -> float:
    return (a == b).double().mean().item()


# Norms and activations -----------------------------------------------------------------------------------------------


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return norm_of(x, exact(weight), eps)


@both
@each_dtype
@pytest.mark.parametrize(("tokens", "width"), [(1, 1), (3, 7), (2, 64), (4, 96), (3, 2050)])
def test_add_norm(ops, dtype, tokens, width):
    """Also of inputs so small that eps matters, and of large ones."""
    g = generator(width)
    for size, eps in ((1.0, 1e-6), (1e-3, 1e-5), (100.0, 1e-6)):
        x, delta = ((torch.randn(tokens, width, generator=g) * size).to(DEVICE, dtype) for _ in range(2))
        weight = torch.randn(width, generator=g).to(DEVICE, dtype)
        before = x.clone(), delta.clone()
        normed, summed = ops.add_norm(x, None, weight, eps)
        assert torch.equal(summed, x)
        close(normed, norm(exact(x), weight, eps), dtype)
        normed, summed = ops.add_norm(x, delta, weight, eps)
        assert torch.equal(summed, x + delta)
        close(normed, norm(exact(summed), weight, eps), dtype)
        assert torch.equal(x, before[0])
        assert torch.equal(delta, before[1])


@each_dtype
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_add_norm_of_split_k_parts(dtype, parts):
    """Parts of a split-K product are summed in fp32 and rounded once, like an unsplit product."""
    g = generator(parts)
    x, parts_PTD = torch.randn(3, 96, generator=g).to(DEVICE), torch.randn(parts, 3, 96, generator=g).to(DEVICE)
    weight = torch.randn(96, generator=g).to(DEVICE, dtype)
    ours, theirs = kernels.add_norm(x, parts_PTD, weight, 1e-6), torch_ops.add_norm(x, parts_PTD.sum(0).to(dtype), weight, 1e-6)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_split_k_product():
    g = generator(0)
    x, weight = (torch.randn(shape, generator=g).to(DEVICE, torch.float16) for shape in ((5, 160), (64, 160)))
    parts = split_k_product(x, weight)
    assert parts.shape == (PARTS, 5, 64)
    close(parts.sum(0), exact(x) @ exact(weight).T, torch.float32, times=4)
    assert uses_split_k(x, weight, None) == (DEVICE.type == "cuda")
    assert not uses_split_k(x[:, :120], weight[:, :120], None), "the inner dimension is too short"
    assert not uses_split_k(x, weight, weight[:, 0]), "split-K has no bias"


@both
@each_dtype
@pytest.mark.parametrize(("tokens", "half"), [(1, 1), (3, 100), (2, 1024), (2, 1500)])
def test_swiglu(ops, dtype, tokens, half):
    gate_up = (torch.randn(tokens, 2 * half, generator=generator(half)) * 3).to(DEVICE, dtype)
    gate_up[:, 0] = -200.0  # exp(200) overflows
    gate, up = exact(gate_up).chunk(2, -1)
    out = ops.swiglu(gate_up)
    assert out.shape == (tokens, half)
    close(out, gate / (1 + torch.exp(-gate)) * up, dtype)
    assert torch.equal(out[:, 0].abs(), torch.zeros_like(out[:, 0]))


def test_kernels_round_where_modules_round():
    """In half precision, intermediate results are rounded where transformers rounds them; one rounding fewer changes 1 in 5."""
    g, dtype = generator(0), torch.float16
    x, delta, weight = (torch.randn(shape, generator=g).to(DEVICE, dtype) for shape in ((8, 256), (8, 256), (256,)))
    for theirs, ours in zip(torch_ops.add_norm(x, delta, weight, 1e-6), kernels.add_norm(x, delta, weight, 1e-6), strict=True):
        assert share_equal(theirs, ours) > 0.98
    assert share_equal(torch_ops.swiglu(x), kernels.swiglu(x)) > 0.98
    heads, angles = Heads(6, 2, 64), torch.randn(32, 64, generator=g).to(DEVICE)
    for norms in ((None, None), (weight[:64], weight[64:128])):
        rotation = Rotation(angles.cos().to(dtype), angles.sin().to(dtype), *norms, 1e-6)
        rotated = []
        for ops in (torch_ops, kernels):
            cache = cache_of(heads, 16, 8, 2, dtype, seed=0)
            rotated.append(torch.randn(8, 10 * 64, generator=generator(1)).to(DEVICE, dtype))
            rows = torch.arange(8, dtype=torch.int32, device=DEVICE)
            ops.rotate_and_write(rotated[-1], heads, rotation, cache, 0, rows, torch.arange(8, device=DEVICE) * 3)
        assert share_equal(*rotated) > 0.98


# The cache -----------------------------------------------------------------------------------------------------------

SIZES = [16, 32, 48, 64, 80, 96, 128]
LAYERS = 3


def cache_of(heads: Heads, block_tokens: int, rows: int, blocks_per_row: int, dtype: torch.dtype, seed: int) -> KVCache:
    """All NaN; rows have random blocks, and some blocks are unused."""
    cache = KVCache(CacheShape(LAYERS, heads, dtype, DEVICE), rows, blocks_per_row, block_tokens=block_tokens)
    blocks = rows * blocks_per_row + 2
    cache.allocate(blocks)
    cache.memory.fill_(math.nan)
    tables = torch.randperm(blocks, generator=generator(seed))[: rows * blocks_per_row].view(rows, blocks_per_row)
    cache.block_tables.copy_(tables)
    return cache


def strided(numbers: list[int]) -> Tensor:
    """A column of a wider tensor, as positions are; the values around it would be far out of range."""
    wide = torch.full((len(numbers), 5), 1 << 40)
    wide[:, 1] = torch.tensor(numbers)
    return wide.to(DEVICE)[:, 1]


class Tokens:
    """Random tokens of random rows, each in a different place; position −1 marks an idle one."""

    def __init__(self, seed: int, dtype: torch.dtype):
        pick = random.Random(seed)
        kv = pick.choice([1, 2, 3, 5])
        self.heads = Heads(kv * pick.choice([1, 2, 3, 5, 7, 8, 16]), kv, pick.choice(SIZES))
        self.layer, rows, self.block = pick.randrange(LAYERS), pick.randint(1, 4), pick.choice([16, 32, 64])
        blocks_per_row = pick.randint(1, 3)
        self.longest = blocks_per_row * self.block
        places = [(row, at) for row in range(rows) for at in range(self.longest)]
        self.places = [*pick.sample(places, 5), (0, -1), (rows - 1, self.longest - 1)]
        self.places = list(dict.fromkeys(self.places))
        pick.shuffle(self.places)
        self.rows = torch.tensor([row for row, _ in self.places], dtype=torch.int32, device=DEVICE)
        self.positions = strided([at for _, at in self.places])
        self.used = [at >= 0 for _, at in self.places]
        self.cache = cache_of(self.heads, self.block, rows, blocks_per_row, dtype, seed)

    def expected_memory(self, keys: Tensor, values: Tensor) -> Tensor:
        """NaN except for these tokens' keys and values."""
        memory = torch.full(self.cache.memory.shape, math.nan, dtype=torch.float64)
        for i, (row, at) in enumerate(self.places):
            if at >= 0:
                block = int(self.cache.block_tables[row, at // self.block])
                memory[block, self.layer, 0, :, at % self.block] = keys[i]
                memory[block, self.layer, 1, :, at % self.block] = values[i]
        return memory


@both
@shapes_of_each_dtype(5)
def test_rotate_and_write(ops, dtype, seed):
    """Queries and keys are rotated, values are not; keys and values are written to their places, and nothing else changes."""
    tokens, g, with_norms = Tokens(seed, dtype), generator(seed), seed % 2 == 1
    heads, size, count = tokens.heads, tokens.heads.size, len(tokens.places)
    angles = torch.randn(2, tokens.longest, size, generator=g)  # real tables repeat their first half
    norms = [torch.randn(size, generator=g).to(DEVICE, dtype) for _ in range(2)] if with_norms else [None, None]
    rotation = Rotation(angles[0].cos().to(DEVICE, dtype), angles[1].sin().to(DEVICE, dtype), *norms, 0.01)
    width = (heads.query + 2 * heads.kv) * size
    wide = torch.full((count, width + 24), math.nan)
    wide[:, :width] = torch.randn(count, width, generator=g)
    wide = wide.to(DEVICE, dtype)
    qkv, before = wide[:, :width], wide.clone()

    ops.rotate_and_write(qkv, heads, rotation, tokens.cache, tokens.layer, tokens.rows, tokens.positions)
    without_cache = before.clone()
    ops.rotate(without_cache[:, :width], heads, rotation, tokens.positions)
    assert torch.equal(without_cache[:, :width], qkv), "rotated without a cache"
    assert without_cache[:, width:].isnan().all()

    query, key, value = exact(before[:, :width]).view(count, -1, size).split([heads.query, heads.kv, heads.kv], 1)
    if with_norms:
        query, key = norm(query, norms[0], 0.01), norm(key, norms[1], 0.01)
    at = tokens.positions.cpu().clamp(min=0)
    cos, sin = exact(rotation.cos)[at, None], exact(rotation.sin)[at, None]

    def rotate_reference(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat([-b, a], -1) * sin

    expected = torch.cat([rotate_reference(query), rotate_reference(key), value], 1)
    used = torch.tensor(tokens.used)
    close(qkv.view(count, -1, size).cpu()[used], expected[used], dtype, times=2)
    assert torch.equal(qkv[:, -heads.kv * size :], before[:, :width][:, -heads.kv * size :]), "values"
    assert wide[:, width:].isnan().all()
    if ops is kernels and not with_norms:
        assert torch.equal(qkv.cpu()[~used], before.cpu()[~used, :width]), "an idle row"
    close(tokens.cache.memory, tokens.expected_memory(expected[:, heads.query : -heads.kv], value), dtype, times=2)


@both
@each_dtype
@pytest.mark.parametrize("seed", range(8))
def test_write(ops, dtype, seed):
    """Keys and values laid out by head, as transformers passes them, or by token, as a matrix product returns them."""
    tokens, g = Tokens(seed, dtype), generator(seed)
    count, kv, size = len(tokens.places), tokens.heads.kv, tokens.heads.size
    if seed % 2:
        keys = torch.randn(kv, count, size, generator=g).to(DEVICE, dtype).transpose(0, 1)
        values = torch.randn(count, 3, kv, size, generator=g).to(DEVICE, dtype)[:, 1]
    else:
        keys, values = torch.randn(count, 2 * kv, size, generator=g).to(DEVICE, dtype).split([kv, kv], 1)
    ops.write(keys, values, tokens.cache, tokens.layer, tokens.rows, tokens.positions)
    expected = tokens.expected_memory(exact(keys), exact(values))
    torch.testing.assert_close(exact(tokens.cache.memory), expected, rtol=0, atol=0, equal_nan=True)


# Attention -----------------------------------------------------------------------------------------------------------


class Past:
    """Queries, and a cache that holds numbers only where they may attend."""

    def __init__(self, seed: int, dtype: torch.dtype):
        pick, g = random.Random(1000 + seed), generator(seed)
        kv = pick.choice([1, 1, 2, 3])
        group, size = pick.choice([1, 2, 3, 5, 7, 8, 16, 20]), pick.choice(SIZES)
        self.heads, self.block = Heads(kv * group, kv, size), pick.choice([16, 32, 64])
        blocks_per_row, count = pick.choice([1, 3, 5, 6]), pick.randint(1, 3)
        longest = blocks_per_row * self.block
        # At the edges of blocks and of parts, and at random.
        lengths = [1, longest, self.block, self.block + 1, 2 * self.block, pick.randint(1, longest), pick.randint(1, longest)]
        self.lengths = [min(pick.choice(lengths), longest) for _ in range(count)] + [0]
        pick.shuffle(self.lengths)
        self.longest = max(*self.lengths, pick.randint(1, longest))
        self.positions = strided([length - 1 for length in self.lengths])
        self.layer, self.scale = pick.randrange(LAYERS), pick.choice([size**-0.5, 1.0])
        self.window = pick.choice([None, None, 1, 5, self.block, self.block + 3, 10 * longest])
        self.rows = len(self.lengths)
        cache = self.cache = cache_of(self.heads, self.block, self.rows + 1, blocks_per_row, dtype, seed)
        self.keys, self.values = (torch.randn(self.rows, kv, longest, size, generator=g).to(dtype) for _ in range(2))
        for row, length in enumerate(self.lengths):
            for at in range(length):
                place = cache.memory[int(cache.block_tables[row, at // self.block]), self.layer, :, :, at % self.block]
                place[0], place[1] = self.keys[row, :, at], self.values[row, :, at]
        # Small, so that all keys count; or so large that a naive softmax overflows.
        self.size = pick.choice([0.1, 1.0, 1.0, 30.0 / (self.scale * size**0.5)])
        query = (torch.randn(self.rows, self.heads.query + 2 * kv, size, generator=g) * self.size).to(DEVICE, dtype)
        query[:, self.heads.query :] = math.nan
        self.query = query[:, : self.heads.query]
        if seed % 3 == 0:
            self.query = self.query.transpose(0, 1).contiguous().transpose(0, 1)

    def expected(self) -> Tensor:
        """Row by row and head by head; NaN for idle rows."""
        out = torch.full((self.rows, self.heads.query, self.heads.size), math.nan, dtype=torch.float64)
        for row, length in enumerate(self.lengths):
            first = 0 if self.window is None else max(0, length - self.window)
            for head in range(self.heads.query if length else 0):
                kv_head = head // (self.heads.query // self.heads.kv)
                keys, values = (exact(x[row, kv_head, first:length]) for x in (self.keys, self.values))
                out[row, head] = (keys @ exact(self.query[row, head]) * self.scale).softmax(0) @ values
        return out.flatten(1)

    def check(self, out: Tensor, dtype: torch.dtype) -> None:
        used = torch.tensor(self.lengths) > 0
        assert out.shape == (self.rows, self.heads.query * self.heads.size)
        # Errors grow with the scores: a score of 100 is off by 100 roundings of its terms.
        times = max(1.0, self.size * self.scale * self.heads.size**0.5) * 2
        close(out.cpu()[used], self.expected()[used], dtype, times=times if dtype == torch.float32 else 2)

    def attend(self, ops: ModuleType, **more) -> Tensor:
        options = {"scale": self.scale, "window": self.window, "longest": self.longest, **more}
        return ops.attend(self.query, self.cache, self.layer, self.positions, **options)


@shapes_of_each_dtype(6)
def test_attend(dtype, seed, monkeypatch):
    """The same result in one part and in many; memory outside a row is not read."""
    past = Past(seed, dtype)
    pick = random.Random(seed)
    monkeypatch.setattr(kernels.attention, "PROGRAMS", pick.choice([1, 1, 16, 512]))
    stretch = past.block * pick.choice([1, 1, 2])
    monkeypatch.setattr(kernels.attention, "STRETCH", stretch)
    monkeypatch.setattr(kernels.attention, "MOST_TOKENS", stretch * pick.choice([1, 2, 8, 8]))
    found, used = past.attend(kernels), past.positions >= 0
    past.check(found, dtype)
    for programs in (1, 512):
        monkeypatch.setattr(kernels.attention, "PROGRAMS", programs)
        assert torch.equal(past.attend(kernels)[used], found[used]), "bitwise equal, however the work is split"


class Siblings(Past):
    """Rows of two prompts, in no order, one of which has just ended, and one row that shares nothing; stretches of two blocks."""

    def __init__(self, dtype: torch.dtype, shared_blocks: int, group: int, size: int):
        g, kv, self.block, blocks_per_row = generator(group), 2, 16, 6
        self.heads, self.layer, self.scale, self.window, self.size = Heads(kv * group, kv, size), 1, size**-0.5, None, 1.0
        self.longest = blocks_per_row * self.block
        self.shared = {(5, 0, 2, 3): shared_blocks, (1, 6): 1}
        first = shared_blocks * self.block
        self.lengths = [first + 1, self.longest, 0, first + 3, 40, self.longest - 1, 17]
        self.rows, self.positions = len(self.lengths), strided([length - 1 for length in self.lengths])
        cache = self.cache = cache_of(self.heads, self.block, self.rows + 1, blocks_per_row, dtype, shared_blocks)
        self.keys, self.values = (torch.randn(self.rows, kv, self.longest, size, generator=g).to(dtype) for _ in range(2))
        for rows, blocks in self.shared.items():
            for row in rows[1:]:
                cache.block_tables[row, :blocks] = cache.block_tables[rows[0], :blocks]
                for x in (self.keys, self.values):
                    x[row, :, : blocks * self.block] = x[rows[0], :, : blocks * self.block]
        for row, length in enumerate(self.lengths):
            for at in range(length):
                place = cache.memory[int(cache.block_tables[row, at // self.block]), self.layer, :, :, at % self.block]
                place[0], place[1] = self.keys[row, :, at], self.values[row, :, at]
        self.query = torch.randn(self.rows, self.heads.query, size, generator=g).to(DEVICE, dtype)
        self.prefixes = SharedPrefixes(self.rows, self.heads, DEVICE)
        self.prefixes.assign([(blocks * self.block, rows) for rows, blocks in self.shared.items()])

    def shared_cache_blocks(self) -> Tensor:
        return torch.cat([self.cache.block_tables[rows[0], :blocks] for rows, blocks in self.shared.items()]).long()


def split_in(monkeypatch, split: bool, block: int) -> None:
    monkeypatch.setattr(kernels.attention, "STRETCH", 2 * block)
    monkeypatch.setattr(kernels.attention, "PROGRAMS", 512 if split else 14)  # as many as there are rows and heads


@pytest.fixture
def prefix_launches(monkeypatch) -> list[tuple[int, ...]]:
    """Grids with which the kernel of prefixes is launched."""
    launches, launch = [], kernels.attention._attend_prefix

    class Launcher:
        def __getitem__(self, grid: tuple[int, ...]):
            launches.append(grid)
            return launch[grid]

    monkeypatch.setattr(kernels.attention, "_attend_prefix", Launcher())
    return launches


PREFIXES = [(1, 7, 32), (2, 6, 16), (3, 1, 80), (5, 7, 16)]
"""Shared blocks, of which two make a stretch (part of one, one, one and a part, two and a part); query heads per key; size."""
prefix_shapes = pytest.mark.parametrize(("shared", "group", "size"), PREFIXES)
in_one_or_more_parts = pytest.mark.parametrize("split", [False, True], ids=["one part", "split"])


@pytest.mark.grid(4)
@prefix_shapes
@in_one_or_more_parts
def test_attend_to_shared_prefixes(shared, group, size, split, monkeypatch, prefix_launches):
    """Read by tiles for several rows: the result of reading them row by row. On a GPU to the bit; in the interpreter, numpy decides
    the order of sums. What a tile has read is not read again: it is gone by then."""
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
    past = Siblings(dtype, shared, group, size)
    split_in(monkeypatch, split, past.block)
    alone = past.attend(kernels)
    assert not prefix_launches
    launched = kernels.attention._attend_prefix

    class LosesPrefixes:
        def __getitem__(self, grid):
            def launch(*args, **options):
                launched[grid](*args, **options)
                past.cache.memory[past.shared_cache_blocks()] = math.nan

            return launch

    monkeypatch.setattr(kernels.attention, "_attend_prefix", LosesPrefixes())
    together = past.attend(kernels, prefixes=past.prefixes)
    assert prefix_launches == [(2, 2, 4)]
    past.check(together, dtype)
    if DEVICE.type == "cuda":
        used = past.positions >= 0
        assert torch.equal(together[used], alone[used])


@in_one_or_more_parts
def test_rotate_and_attend_to_shared_prefixes(split, monkeypatch, prefix_launches):
    """Queries of several positions, rotated in one tile."""
    shared, group, size = 3, 2, 16
    past, g = Siblings(torch.float16, shared, group, size), generator(0)
    split_in(monkeypatch, split, past.block)
    angles = torch.randn(2, past.longest, size, generator=g)
    rotation = Rotation(angles[0].cos().to(DEVICE, torch.float16), angles[1].sin().to(DEVICE, torch.float16))
    qkv = torch.randn(past.rows, (past.heads.query + 2 * past.heads.kv) * size, generator=g).to(DEVICE, torch.float16)
    options = {"scale": size**-0.5, "window": None, "longest": past.longest}
    rest = past.heads, rotation, past.cache, past.layer, past.positions
    alone, together = (kernels.rotate_and_attend(qkv.clone(), *rest, **options, prefixes=given) for given in (None, past.prefixes))
    assert len(prefix_launches) == 1
    used = past.positions >= 0
    close(together[used], exact(alone[used]), torch.float16)
    if DEVICE.type == "cuda":
        assert torch.equal(together[used], alone[used])


def test_windows_and_prefixes(monkeypatch, prefix_launches):
    """A window that hides keys may begin inside a prefix, which is then read row by row; a longer one changes nothing."""
    past = Siblings(torch.float32, 3, 2, 16)
    split_in(monkeypatch, False, past.block)
    for window, launches in ((past.longest - 1, 0), (past.longest, 1), (10 * past.longest, 2)):
        past.window = window
        past.check(past.attend(kernels, prefixes=past.prefixes), torch.float32)
        assert len(prefix_launches) == launches


@pytest.mark.parametrize(
    ("heads", "dtype", "fits"),
    [
        (Heads(14, 2, 64), torch.bfloat16, True),
        (Heads(28, 4, 128), torch.float16, True),
        (Heads(64, 2, 128), torch.float16, True),
        (Heads(48, 1, 128), torch.bfloat16, False),
        (Heads(8, 1, 256), torch.bfloat16, False),
        (Heads(14, 2, 64), torch.float32, False),
    ],
)
def test_which_heads_fit_tiles(heads, dtype, fits):
    """At least two samples in a tile, and their states in registers."""
    assert prefixes.fits_tiles(heads, dtype) == fits


def test_without_tiles_no_prefix_is_read(prefix_launches):
    past = Siblings(torch.float32, 3, 2, 16)
    past.check(past.attend(kernels, prefixes=SharedPrefixes(past.rows, past.heads, DEVICE)), torch.float32)
    assert not prefix_launches


@shapes_of_each_dtype(8)
def test_attend_in_torch(dtype, seed):
    """Masked values are multiplied by 0, so they must be finite."""
    past = Past(seed, dtype)
    past.cache.memory.nan_to_num_(nan=7.0)
    past.check(past.attend(torch_ops), dtype)


@shapes_of_each_dtype(6)
def test_rotate_and_attend(dtype, seed, monkeypatch):
    """Output and cache are those of rotating, writing and attending in turn, each of which is tested above."""
    past, pick, g = Past(seed, dtype), random.Random(seed), generator(seed)
    heads, size = past.heads, past.heads.size
    monkeypatch.setattr(kernels.attention, "PROGRAMS", pick.choice([1, 1, 16, 512]))
    stretch = past.block * pick.choice([1, 1, 2])
    monkeypatch.setattr(kernels.attention, "STRETCH", stretch)
    monkeypatch.setattr(kernels.attention, "MOST_TOKENS", stretch * pick.choice([1, 2, 8, 8]))
    angles = torch.randn(2, max(past.lengths), size, generator=g)
    norms = [torch.randn(size, generator=g).to(DEVICE, dtype) for _ in range(2)] if seed % 2 else [None, None]
    rotation = Rotation(angles[0].cos().to(DEVICE, dtype), angles[1].sin().to(DEVICE, dtype), *norms, 0.01)
    qkv = torch.randn(past.rows, (heads.query + 2 * heads.kv) * size, generator=g).to(DEVICE, dtype)
    options = {"scale": size**-0.5, "window": past.window, "longest": past.longest}
    before, found = past.cache.memory.clone(), {}
    for ops in (kernels, torch_ops):
        past.cache.memory.copy_(before if ops is kernels else before.nan_to_num(nan=7.0))
        out = ops.rotate_and_attend(qkv.clone(), heads, rotation, past.cache, past.layer, past.positions, **options)
        found[ops] = (out.cpu()[torch.tensor(past.lengths) > 0], past.cache.memory.nan_to_num(nan=7.0))
    for ours, theirs in zip(found[kernels], found[torch_ops], strict=True):
        close(ours, exact(theirs), dtype, times=2)


def test_split_for(monkeypatch):
    """Shows that the tests above cover one part, several, and more than some sequences need."""
    attention = kernels.attention
    monkeypatch.setattr(attention, "STRETCH", 16)
    monkeypatch.setattr(attention, "MOST_TOKENS", 64)
    monkeypatch.setattr(attention, "PROGRAMS", 8)
    assert attention.split_for(1, 2, 100) == (4, 32), "8 programs"
    assert attention.split_for(8, 2, 100) == (2, 64), "no part longer than 64"
    assert attention.split_for(1, 2, 30) == (2, 16), "nor shorter than 16"
    assert attention.split_for(8, 2, 15) == (1, 16)


@pytest.mark.parametrize("sequences", [1, 3, 64, 1024])
@pytest.mark.parametrize("longest", [1, 100, 128, 1000, 4097, 131_072])
def test_parts_are_multiples_of_a_stretch_and_cover_the_sequence(sequences, longest):
    for kv_heads in (1, 2, 8):
        parts, tokens = kernels.attention.split_for(sequences, kv_heads, longest)
        assert parts * tokens >= longest
        assert parts == 1 or tokens % kernels.attention.STRETCH == 0
        assert tokens <= max(1024, longest)


# Training ------------------------------------------------------------------------------------------------------------


@pytest.mark.grid(1)
@shapes_of_each_dtype(6)
def test_attend_packed(dtype, seed, monkeypatch):
    """Packed sequences, some with earlier keys; tiles and stretches of several sizes; the memory between them is NaN."""
    pick, g = random.Random(seed), generator(seed)
    kv, size = pick.choice([1, 2, 3]), pick.choice(SIZES)
    heads, scale = kv * pick.choice([1, 2, 7]), pick.choice([size**-0.5, 1.0])
    monkeypatch.setattr(shared.attention, "ROWS", pick.choice([16, 64, 128]))
    monkeypatch.setattr(shared.attention, "STRETCH", 64 * pick.choice([1, 2]))
    keys = [pick.choice([1, 2, 17, 64, 65, 130, 200]) for _ in range(pick.randint(1, 3))]
    queries = [pick.randint(1, n) if seed % 2 else n for n in keys]
    wide = [torch.full((sum(n), 2 * heads, size + 16), math.nan).to(DEVICE, dtype) for n in (queries, keys, keys)]
    query, key, value = (x[:, :many, :size] for x, many in zip(wide, (heads, kv, kv), strict=True))
    for x in (query, key, value):
        x.copy_(torch.randn(x.shape, generator=g))
    starts_q, starts_k = (torch.tensor([0, *np.cumsum(n)], dtype=torch.int32, device=DEVICE) for n in (queries, keys))
    out, logsum = shared.attend(query, key, value, starts_q, starts_k, max(queries), scale)
    for i in range(len(keys)):
        q, k, v = (exact(x[s[i] : s[i + 1]]) for x, s in ((query, starts_q), (key, starts_k), (value, starts_k)))
        k, v = (x.repeat_interleave(heads // kv, 1) for x in (k, v))
        hidden = torch.ones(len(q), len(k)).triu(len(k) - len(q) + 1).bool()
        scores = (torch.einsum("qhd,khd->hqk", q, k) * scale).masked_fill(hidden, -math.inf)
        at = slice(int(starts_q[i]), int(starts_q[i + 1]))
        times = 2 * max(1.0, scale * size**0.5) if dtype == torch.float32 else 2
        close(out[at], torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), dtype, times=times)
        # The kernel rounds attention weights before it sums them.
        torch.testing.assert_close(exact(logsum[:, at]), scores.logsumexp(-1), rtol=1e-4, atol=max(1e-4, ROUNDING[dtype] / 4))


@pytest.mark.grid(1)
@pytest.mark.parametrize("seed", range(6))
def test_decoding_and_training_attend_alike(seed):
    """The sampler's kernel and the trainer's are bitwise equal on a GPU; in the interpreter, numpy decides the order of sums."""
    g, dtype = generator(seed), torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
    size, group = (64, 7) if seed % 2 else (128, 4)
    lengths = (300, 40, 257, 511, 64, 1) if DEVICE.type == "cuda" else (70, 40, 65, 129, 64, 1)  # the interpreter is slow
    heads, length = Heads(2 * group, 2, size), lengths[seed]
    block = block_tokens(size)
    qkv = torch.randn(length, heads.query + 4, size, generator=g).to(DEVICE, dtype)
    query, key, value = qkv.split([heads.query, 2, 2], 1)
    starts = torch.tensor([0, length], dtype=torch.int32, device=DEVICE)
    others = length if DEVICE.type == "cuda" else min(length, 8)
    few = torch.tensor([0, others], dtype=torch.int32, device=DEVICE)
    packed, _ = shared.attend(query[-others:], key, value, few, starts, others, size**-0.5)
    cache = cache_of(heads, block, 1, -(-length // block), dtype, seed)
    rows, positions = torch.zeros(length, dtype=torch.int32, device=DEVICE), torch.arange(length, device=DEVICE)
    kernels.write(key, value, cache, 1, rows, positions)
    alone = kernels.attend(query[-1:], cache, 1, positions[-1:], scale=size**-0.5, window=None, longest=length)
    if DEVICE.type == "cuda":
        assert torch.equal(alone.view(-1), packed[-1].view(-1))
    else:
        close(alone.view(-1), exact(packed[-1].view(-1)), dtype)


@each_dtype
def test_add_rounds_as_torch_does(dtype):
    g = generator(0)
    x, delta = torch.randn(1, 5, 301, generator=g).to(DEVICE), torch.randn(5, 301, generator=g).to(DEVICE, dtype)
    assert torch.equal(shared.add(x, delta), x + delta)
    assert torch.equal(shared.add(x.to(dtype), delta), x.to(dtype) + delta)


@each_dtype
@pytest.mark.parametrize("parts", [2, 4])
def test_sum_splits_matches_add_norm(dtype, parts):
    parts_PTD = torch.randn(parts, 5, 301, generator=generator(parts)).to(DEVICE)
    joined = shared.sum_splits(parts_PTD, dtype)
    _, summed = kernels.add_norm(torch.zeros(5, 301, device=DEVICE), parts_PTD, torch.ones(301, device=DEVICE, dtype=dtype), 1e-6)
    assert torch.equal(joined.float(), summed)
    close(joined, exact(parts_PTD).sum(0), dtype)


@each_dtype
@pytest.mark.parametrize(("tokens", "width"), [(1, 1), (3, 7), (70, 64), (4, 2050)])
@pytest.mark.parametrize("added", [False, True])
def test_norm_backward(dtype, tokens, width, added, monkeypatch):
    monkeypatch.setattr(shared.layers, "PROGRAMS", 4)  # so that each has several tokens
    g = generator(width)
    x, grad_x = (torch.randn(tokens, width, generator=g).to(DEVICE) for _ in range(2))
    weight, grad = (torch.randn(shape, generator=g).to(DEVICE, dtype) for shape in ((width,), (tokens, width)))
    found = shared.norm_backward(grad, x, weight, 1e-5, grad_x if added else None, also_in=dtype)
    at = exact(x).requires_grad_(), exact(weight).requires_grad_()
    expected = torch.autograd.grad(norm_of(*at, 1e-5), at, exact(grad))
    close(found[0], expected[0] + exact(grad_x) * added, torch.float32, times=4)
    close(found[1], expected[1], torch.float32, times=4)
    assert torch.equal(found[2], found[0].to(dtype))


def norm_of(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


@each_dtype
@pytest.mark.parametrize(("tokens", "half"), [(1, 1), (3, 100), (2, 1500)])
def test_swiglu_backward(dtype, tokens, half):
    g = generator(half)
    gate_up, grad = ((torch.randn(tokens, n, generator=g) * 3).to(DEVICE, dtype) for n in (2 * half, half))
    gate_up[:, 0] = -200.0  # exp(200) overflows
    found = shared.swiglu_backward(grad, gate_up)
    at = exact(gate_up).requires_grad_()
    gate, up = at.chunk(2, -1)
    [expected] = torch.autograd.grad(torch.nn.functional.silu(gate) * up, at, exact(grad))
    close(found, expected, dtype)


@pytest.mark.grid(1)
@pytest.mark.parametrize(("kind", "checkpointed"), [("llama", True), ("mistral", False), ("qwen2", False), ("qwen3", False)])
def test_fused_layers(tiny_models, monkeypatch, kind, checkpointed):
    """Hidden states and all gradients match the model's own modules; also after its fused weights have been separated again."""
    from plaudit.data.pack import pack
    from plaudit.models.attention import packed_states
    from plaudit.models.trainable import load_model
    from plaudit.recipe import ModelSettings
    from plaudit.types import Example

    recipe = ModelSettings(path=str(tiny_models[kind]), dtype="float32")
    theirs, *fused_models = (load_model(recipe, DEVICE) for _ in range(3 if kind == "llama" else 2))
    monkeypatch.setattr(fused, "_kernels_run_on", lambda x: True)
    for model in fused_models:
        fused.fuse_layers(model)
    for separated in fused_models[1:]:
        for parameter in separated.parameters():
            parameter.data = parameter.data.clone()
    sequences = [np.arange(length) % 300 for length in (3, 1, 2)]
    batch = pack([Example(tokens, np.zeros(len(tokens), dtype=bool)) for tokens in sequences], DEVICE)
    output_grad = torch.randn(6, theirs.config.hidden_size, generator=generator(0)).to(DEVICE)
    for model in (theirs, *fused_models):
        model.train()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        states = packed_states(model.get_decoder(), batch)
        (states * output_grad).sum().backward()
        model.found = states.detach()
    for model in fused_models:
        torch.testing.assert_close(model.found, theirs.found, rtol=1e-5, atol=1e-5)
        for (name, expected), (_, parameter) in zip(theirs.named_parameters(), model.named_parameters(), strict=True):
            if expected.grad is not None:
                size = expected.grad.abs().max().item()
                torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-4, atol=1e-5 * size, msg=lambda m, n=name: n + m)
            else:
                assert parameter.grad is None, name


@pytest.mark.grid(1)
@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_checkpointing_fused_layers_keeps_every_bit_of_fp32_sums(tiny_models, monkeypatch, kind):
    """Of norms and biases, too: a checkpointed layer computes with copies of them, which have no sums."""
    from plaudit.data.pack import pack
    from plaudit.models.attention import packed_states
    from plaudit.models.trainable import load_model
    from plaudit.recipe import ModelSettings
    from plaudit.train.gradients import LocalGradients
    from plaudit.types import Example

    monkeypatch.setattr(fused, "_kernels_run_on", lambda x: True)
    found = []
    for checkpoints in (False, True):
        model = load_model(ModelSettings(path=str(tiny_models[kind]), dtype="bfloat16"), DEVICE)
        fused.fuse_layers(model)
        model.train()
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        gradients = LocalGradients(dict(model.named_parameters()))
        for seed in range(3):
            tokens = [np.random.RandomState(seed).randint(0, 300, length) for length in (3, 2)]
            batch = pack([Example(one, np.zeros(len(one), dtype=bool)) for one in tokens], DEVICE)
            states = packed_states(model.get_decoder(), batch)
            (states.float() * torch.randn(states.shape, generator=generator(seed)).to(DEVICE)).sum().backward()
        found.append(gradients.sums())
    plain, checkpointed = found
    assert plain.keys() == checkpointed.keys()
    for name, total in plain.items():
        assert torch.equal(total, checkpointed[name]), name
    rounded = [name for name, total in plain.items() if "embed" not in name and torch.equal(total, total.bfloat16().float())]
    assert not [name for name in rounded if "norm" in name], "summed in fp32, not rounded by micro-batch"


@each_dtype
def test_sum_copies(dtype):
    """Tokens with no copy, one and several."""
    tokens_of = torch.tensor([0, 1, 2, 1, 2, 4, 0, 1, 5])
    grad = torch.randn(len(tokens_of), 2, 24, generator=generator(1)).to(DEVICE, dtype)
    starts = torch.cat([torch.tensor([0]), tokens_of.bincount(minlength=7).cumsum(0)]).int().to(DEVICE)
    found = shared.sum_copies(grad, tokens_of.argsort(stable=True).int().to(DEVICE), starts)
    close(found, torch.zeros(7, 2, 24, dtype=torch.float64).index_add_(0, tokens_of, exact(grad)), dtype)


def exact_logprobs(logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logp = (logits / temperature).log_softmax(-1)
    return logp.gather(-1, tokens[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


VOCABULARY_TILE = 256


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.8])
@pytest.mark.parametrize("vocabulary", [1, VOCABULARY_TILE, 2 * VOCABULARY_TILE + 77])
def test_token_logprobs(vocabulary, temperature, monkeypatch):
    """Log-probs and entropies of all kinds of logits, and the gradients of both."""
    monkeypatch.setattr(shared.vocabulary, "TILE", VOCABULARY_TILE)
    logits = logits_of(vocabulary, [kind for kind in LOGITS if vocabulary > 99 or "impossible" not in kind], 5)
    tokens = torch.tensor([int(row.argmax()) if i % 2 else vocabulary // 2 for i, row in enumerate(logits)], device=DEVICE)
    tokens = torch.where(logits.gather(1, tokens[:, None])[:, 0].isfinite(), tokens, logits.argmax(1))
    found = shared.token_logprobs(logits, tokens, temperature)
    at = exact(logits).clamp(min=-1e30).requires_grad_()  # −inf would give the reference NaN gradients
    logprobs, entropy = exact_logprobs(at, tokens.cpu(), temperature)
    torch.testing.assert_close(exact(found.logprobs_N), logprobs, rtol=3e-7, atol=2e-5)
    torch.testing.assert_close(exact(found.entropy_N), entropy, rtol=1e-6, atol=2e-5)
    weights = torch.linspace(-1, 2, len(logits), device=DEVICE), torch.linspace(3, -1, len(logits), device=DEVICE)
    for with_entropy in (False, True):
        grad = torch.full((len(logits), vocabulary + 3), 7.0, device=DEVICE)[:, :vocabulary]
        shared.logit_gradients(logits, tokens, found, temperature, weights[0], weights[1] if with_entropy else None, grad)
        wanted = (exact(weights[0]) * logprobs).sum() + with_entropy * (exact(weights[1]) * entropy).sum()
        [expected] = torch.autograd.grad(wanted, at, retain_graph=True)
        torch.testing.assert_close(exact(grad), expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("entropy", ["value", "with_gradient"])
@pytest.mark.parametrize("weighted", [False, True], ids=["sum", "weighted"])
def test_gradients_of_log_probs_in_chunks(monkeypatch, entropy, weighted):
    """The gradient of a plain sum is one number that stands for all tokens."""
    hidden, weight = (torch.randn(shape, generator=generator(7)).to(DEVICE).requires_grad_() for shape in ((11, 16), (300, 16)))
    tokens = torch.arange(11, device=DEVICE) * 27

    def gradients() -> tuple[Tensor, ...]:
        found = token_logprobs(hidden, weight, tokens, temperature=0.8, entropy=entropy, chunk_logits=1200)
        terms = found.logprobs_N + 0.5 * found.entropy_N
        loss = (terms * torch.linspace(-1, 2, 11, device=DEVICE)).sum() if weighted else -terms.sum() / 11
        return torch.autograd.grad(loss, (hidden, weight))

    monkeypatch.setattr(logprobs, "_has_kernels", lambda hidden: False)
    expected = gradients()
    monkeypatch.setattr(logprobs, "_has_kernels", lambda hidden: True)
    for ours, theirs in zip(gradients(), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.6}, {"temperature": 0.6, "top_p": 0.8}, {"top_k": 7}], ids=str)
def test_the_sampler_and_the_trainer_report_the_same_log_prob(settings, monkeypatch):
    """To the bit, whatever the number of warps."""
    tile = 4096 if DEVICE.type == "cuda" else VOCABULARY_TILE
    monkeypatch.setattr(shared.vocabulary, "TILE", tile)
    monkeypatch.setattr(sampler, "TILE", tile)
    rows = 200 if DEVICE.type == "cuda" else 12
    logits, state = (torch.randn(rows, 9 * tile + 64, generator=generator(3)) * 3).to(DEVICE), state_of(rows, 3)
    state[:, POSITION] = 3
    _, results = drawn(kernels, logits, state, Sampling(max_new_tokens=1, **settings), END_TOKENS)
    sampled = results[:, 2].contiguous().view(torch.float32)
    trained = shared.token_logprobs(logits, results[:, 1].long(), settings.get("temperature", 1.0)).logprobs_N
    assert torch.equal(sampled, trained)


def test_a_nan_logit_gives_a_nan_log_prob():
    logits = torch.zeros(2, 300, device=DEVICE)
    logits[1, 7] = math.nan
    found = shared.token_logprobs(logits, torch.tensor([3, 3], device=DEVICE), 1.0)
    assert found.logprobs_N.isnan().tolist() == found.entropy_N.isnan().tolist() == [False, True]


def test_split_k_product_backward(monkeypatch):
    monkeypatch.setattr("plaudit.models.products.uses_split_k", lambda *product: True)
    g = generator(1)
    x, weight = (torch.randn(shape, generator=g).to(DEVICE).requires_grad_() for shape in ((5, 160), (64, 160)))
    output_grad = torch.randn(5, 64, generator=g).to(DEVICE)
    found = fused._Product.apply(x, 1, weight)
    close(found.detach(), exact(x) @ exact(weight).T, torch.float32, times=4)
    at = exact(x).requires_grad_(), exact(weight).requires_grad_()
    expected = torch.autograd.grad(at[0] @ at[1].T, at, exact(output_grad))
    for ours, theirs in zip(torch.autograd.grad(found, (x, weight), output_grad), expected, strict=True):
        close(ours, theirs, torch.float32, times=4)


# Noise ---------------------------------------------------------------------------------------------------------------


def random_keys(count: int, seed: int) -> Tensor:
    """Random 64-bit keys, and edge cases of integer arithmetic."""
    numbers = np.random.default_rng(seed).integers(-(2**63), 2**63 - 1, count, dtype=np.int64)
    numbers[:6] = [0, 1, -1, 2**63 - 1, -(2**63), 2**32][:count]
    return torch.from_numpy(numbers)


def test_noise():
    """Arrival times match noise.gumbel up to rounding, so thousands of draws give the same tokens, except for near ties."""
    count, tokens, together = 4096, 128, 512
    keys, written = random_keys(count, 0), torch.arange(count) * 3
    out = torch.empty(count, tokens, device=DEVICE)
    _noise[(count // together,)](keys.to(DEVICE), written.to(DEVICE), out, KEYS=together, TOKENS=tokens)
    reference = gumbel(position_keys(keys, written), tokens)
    torch.testing.assert_close(-exact(out).log(), exact(reference), rtol=0, atol=5e-6)
    logits = torch.randn(count, tokens, generator=generator(0)) * 3
    ours, scores = (logits.exp() / out.cpu()).argmax(-1), exact(logits) + exact(reference)
    lost = scores.max(-1).values - scores.gather(1, ours[:, None])[:, 0]
    assert lost.max() < 1e-5
    assert (lost > 0).sum() <= 1


# Draws ---------------------------------------------------------------------------------------------------------------

TILE = 256
END_TOKENS = frozenset(range(0, 1000, 3))
SETTINGS = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "cold": {"temperature": 0.6},
    "hot": {"temperature": 1.8},
    "nearly greedy": {"temperature": 1e-3},
    "top k": {"top_k": 7},
    "top 1": {"top_k": 1},
    "top k above the vocabulary": {"top_k": 100_000},
    "top p": {"top_p": 0.8},
    "small p": {"top_p": 0.05},
    "zero p": {"top_p": 0.0},
    "min p": {"min_p": 0.1},
    "top k and p": {"top_k": 20, "top_p": 0.5},
    "top k and min p": {"temperature": 1.3, "top_k": 60, "min_p": 0.05},
    "all": {"temperature": 0.7, "top_k": 50, "top_p": 0.7, "min_p": 0.02},
    "all, hot": {"temperature": 1.5, "top_k": 100, "top_p": 0.9, "min_p": 0.002},
}


def likely(scaled: np.ndarray, sampling: Sampling, lenience: float) -> np.ndarray:
    """Which tokens of a row may be drawn, by sorting; with some lenience (negative: strictness) where rounding decides."""
    kept = np.isfinite(scaled)
    if sampling.top_k is not None and sampling.top_k < len(scaled):
        kept &= scaled >= np.sort(scaled)[-sampling.top_k]
    if sampling.top_p < 1.0:
        order = np.argsort(-np.where(kept, scaled, -np.inf), kind="stable")
        mass = np.where(kept, np.exp(scaled - scaled.max()), 0.0)[order]
        before = (np.cumsum(mass) - mass) / mass.sum()
        needed = before < sampling.top_p + lenience
        needed[0] = True
        kept &= scaled >= scaled[order][needed].min()
    if sampling.min_p > 0.0:
        kept &= scaled - scaled.max() >= math.log(sampling.min_p) - lenience
    kept[scaled == scaled.max()] = True
    return kept


def log_softmax(scaled: np.ndarray) -> np.ndarray:
    above = scaled - scaled.max()
    return above - np.log(np.exp(above).sum())


LOGITS = {
    "usual": lambda z: z * 3,
    "flat": lambda z: z * 0,
    "nearly flat": lambda z: z * 0.01,
    "peaked": lambda z: z.index_fill(0, torch.tensor([len(z) // 2]), 60.0),
    "ties": lambda z: (z * 2).round(),
    "far below 0": lambda z: z * 5 - 90,
    "some impossible": lambda z: (z * 2).masked_fill(torch.arange(len(z)) % 3 != 1, -math.inf),
    "nearly all impossible": lambda z: z.masked_fill(torch.arange(len(z)) % 97 != 13, -1e30),
}
PLACES = {"idle": (-1, 0, 3), "first": (5, 0, 9), "last": (7, 8, 9), "beyond": (0, 9, 4)}  # position, written, limit


def state_of(count: int, seed: int) -> Tensor:
    """Rows with different keys, at their limits and before, some idle."""
    pick = random.Random(seed)
    keys = random_keys(count, seed).tolist()
    some = [(pick.randrange(2000), *pick.choice(list(PLACES.values())), keys[i]) for i in range(count)]
    rows = [[token, position, key, written, limit] for token, position, written, limit, key in some]
    return torch.tensor(rows, device=DEVICE)


def logits_of(vocabulary: int, kinds: list[str], seed: int) -> Tensor:
    """A slice of a wider tensor that is NaN elsewhere."""
    wide = torch.full((len(kinds), vocabulary + 11), math.nan)
    for i, kind in enumerate(kinds):
        wide[i, :vocabulary] = LOGITS[kind](torch.randn(vocabulary, generator=generator(seed * 1000 + i)))
    return wide.to(DEVICE)[:, :vocabulary]


def drawn(ops: ModuleType, logits: Tensor, state: Tensor, sampling: Sampling, ends: frozenset[int]) -> tuple[Tensor, Tensor]:
    """State and results after a step."""
    state, results = state.clone(), torch.full((len(state), 4), 12345, dtype=torch.int32, device=DEVICE)
    before = logits.clone()
    ops.draw_and_advance(logits, state, results, device_sampling(sampling, ends, DEVICE, {}))
    assert torch.equal(logits.nan_to_num(7.0), before.nan_to_num(7.0))
    return state, results


def two_race_scores(scaled: np.ndarray, noise: np.ndarray, of_tiles: np.ndarray) -> np.ndarray:
    """Highest for the token that wins both races; others are lower by what they lack to win the first and the second."""
    scores = scaled + noise
    for tile, start in enumerate(range(0, len(scaled), sampler.TILE)):
        inside = slice(start, start + sampler.TILE)
        if np.isfinite(scaled[inside]).any():
            scores[inside] += np.logaddexp.reduce(scaled[inside]) + of_tiles[tile] - scores[inside].max()
    return scores


def check_draws(ops: ModuleType, logits: Tensor, state: Tensor, ends: frozenset[int] = END_TOKENS, **settings) -> None:
    """Check everything a step returns and changes."""
    sampling = Sampling(max_new_tokens=1, **settings)
    after, results = (x.cpu() for x in drawn(ops, logits, state, sampling, ends))
    before = state.cpu()
    keys = position_keys(before[:, KEY], before[:, WRITTEN])
    noise = exact(gumbel(keys, logits.shape[1])).numpy()
    of_tiles = exact(sampler.tile_noise(keys, -(-logits.shape[1] // sampler.TILE))).numpy()
    numbers = results[:, 2:].contiguous().view(torch.float32).tolist()
    for i, z in enumerate(exact(logits).numpy()):
        if before[i, POSITION] < 0:
            assert torch.equal(after[i], before[i])
            assert results[i, 0] == IDLE
            continue
        status, token = results[i, :2].tolist()
        scaled = z / (settings.get("temperature") or 1.0)
        greatest = np.abs(scaled[np.isfinite(scaled)]).max()
        if sampling.temperature == 0.0:
            assert token == z.argmax(), "the first of the highest"
        else:
            # fp32 cannot resolve differences in the last digits: neither at the cutoff, nor between the best two.
            truncated = sampler.is_truncated(sampling, len(z))
            scores = scaled + noise[i] if truncated else two_race_scores(scaled, noise[i], of_tiles[i])
            last_digits = 1e-5 + 3e-7 * greatest
            assert likely(scaled, sampling, 1e-5)[token], f"row {i}: {token} should not have been kept"
            rivals = scores[likely(scaled, sampling, -1e-5)]
            assert scores[token] >= rivals.max() - last_digits, f"row {i}: {token} did not win"
        written = before[i, WRITTEN] + 1
        expected = ENDED if token in ends else AT_LIMIT if written >= before[i, LIMIT] else RUNNING
        assert status == expected
        position = before[i, POSITION] + 1 if expected == RUNNING else -1
        assert after[i].tolist() == [token, position, before[i, KEY], written, before[i, LIMIT]]
        atol = 1e-5 if ops is kernels else 1e-5 + 3e-7 * greatest
        assert numbers[i] == pytest.approx([log_softmax(scaled)[token], log_softmax(z)[token]], rel=3e-7, abs=atol)


@pytest.mark.grid(1)
@both
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_draws(ops, settings, monkeypatch):
    """All kinds of logits in one batch, over three tiles of which the last is not full."""
    monkeypatch.setattr(sampler, "TILE", TILE)
    kinds = [*LOGITS, "usual", "ties"]
    seed = list(SETTINGS.values()).index(settings)
    state = state_of(len(kinds), seed)
    state[: len(LOGITS), POSITION] = state[: len(LOGITS), POSITION].clamp(min=0)
    logits = logits_of(2 * TILE + 77, kinds, seed)
    logits[state[:, POSITION] < 0] = math.nan
    check_draws(ops, logits, state, **settings)


@pytest.mark.grid(1)
@pytest.mark.parametrize(("k", "vocabulary"), [(20, 10_000), (1, 64 * 64 + 1), (2, 50), (20, 130), (64, 4096), (128, 10_000)])
def test_kth_greatest(k, vocabulary):
    """As torch finds it, of equals, too, and wherever the greatest are: all in one block, or one in each. Rows are slices of wider
    ones; one has no sequence."""
    g = generator(k)
    wide = torch.full((10, vocabulary + 11), math.nan)
    logits = wide[:, :vocabulary]
    logits[:9] = torch.randn(9, vocabulary, generator=g) * 5
    logits[1] = logits[1].round()
    logits[2] = -3.0
    logits[3] = torch.arange(vocabulary)
    logits[4, torch.randperm(vocabulary, generator=g)[: vocabulary - 5]] = -math.inf
    logits[5, torch.randperm(vocabulary, generator=g)[:5]] = math.inf
    logits[6] = logits[6].sign() * 0.0  # zeros of both signs
    logits[7, ::64] += 100
    logits[8] = torch.where(torch.randperm(vocabulary, generator=g) < k, 7.0, logits[8].clamp(max=6.9))
    state = state_of(10, 1)
    state[:9, POSITION], state[9, POSITION] = 3, -1
    found = kernels.top_k.kth_greatest(wide.to(DEVICE)[:, :vocabulary], state, k)
    assert found[:9].tolist() == logits[:9].topk(k).values[:, -1].tolist()


some_settings = pytest.mark.parametrize("settings", [SETTINGS[name] for name in ("plain", "greedy", "top p", "all")], ids=str)


@both
@some_settings
def test_tiles_without_a_possible_token(ops, settings, monkeypatch):
    """As when a vocabulary is padded and the padding masked, or when only one token is allowed."""
    monkeypatch.setattr(sampler, "TILE", TILE)
    logits, at = logits_of(3 * TILE - 5, ["usual"] * 4, 2), torch.arange(3 * TILE - 5, device=DEVICE)
    for row, possible in zip(logits, (at < 9, at >= 2 * TILE, (at >= TILE) & (at < 2 * TILE), at == TILE + 3), strict=True):
        row.masked_fill_(~possible, -math.inf)
    state = state_of(4, 2)
    state[:, POSITION] = 3
    check_draws(ops, logits, state, **settings)


@both
@some_settings
@pytest.mark.timeout(100)
def test_nan_logits_give_nan_logprobs(ops, settings, monkeypatch):
    """With a diverged model a step still ends, whatever the settings: a token of the vocabulary, with NaN log-probs."""
    monkeypatch.setattr(sampler, "TILE", TILE)
    logits, state = torch.full((2, TILE + 7), math.nan, device=DEVICE), state_of(2, 1)
    logits[1, : TILE // 2] = 1.0
    state[:, POSITION] = 3
    _, results = drawn(ops, logits, state, Sampling(max_new_tokens=1, **settings), END_TOKENS)
    assert all(0 <= token < TILE + 7 for token in results[:, 1].tolist())
    assert results[:, 2:].contiguous().view(torch.float32).isnan().all()


@both
@some_settings
@pytest.mark.parametrize("vocabulary", [1, 2, TILE - 1, TILE, TILE + 1])
def test_vocabulary_sizes(ops, settings, vocabulary, monkeypatch):
    monkeypatch.setattr(sampler, "TILE", TILE)
    check_draws(ops, logits_of(vocabulary, ["usual", "flat", "ties"], 1), state_of(3, 3), **settings)


@both
@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.699}, {0, 1}),
        ({"top_p": 0.701}, {0, 1, 2}),
        ({"min_p": 0.501}, {0, 1}),
        ({"min_p": 0.499}, {0, 1, 2}),
        ({"top_k": 2, "top_p": 0.57}, {0}),
        ({"top_k": 2, "top_p": 0.573}, {0, 1}),
        ({"top_p": 0.701, "min_p": 0.74}, {0, 1}),
        ({"temperature": 0.5, "top_p": 0.534, "min_p": 0.1}, {0, 1}),
    ],
    ids=str,
)
def test_cutoffs(ops, settings, kept):
    """Probabilities of 0.4, 0.3, 0.2, 0.1 (squared, by temperature 0.5: 16, 9, 4 and 1 in 30). All kept tokens are drawn."""
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1], device=DEVICE).log().repeat(12, 1)
    state = state_of(12, 4)
    state[:, POSITION] = 3
    _, results = drawn(ops, logits, state, Sampling(max_new_tokens=1, **settings), frozenset())
    assert set(results[:, 1].tolist()) == kept


@both
@pytest.mark.parametrize("ends", [frozenset(), frozenset([41]), frozenset([0, 41, 99]), frozenset(range(100))], ids=len)
def test_ends_and_limits(ops, ends):
    """Token 41 is always drawn. An end token ends a row even at its limit; at or past the limit, a row stops without one."""
    logits = torch.zeros(4, 100, device=DEVICE)
    logits[:, 41] = 100.0
    state = torch.tensor([[9, 5, 1, 0, 2], [9, 5, 2, 1, 2], [9, 5, 3, 2, 2], [9, -1, 4, 0, 2]], device=DEVICE)
    after, results = drawn(ops, logits, state, Sampling(max_new_tokens=1), ends)
    usual = [RUNNING, AT_LIMIT, AT_LIMIT] if 41 not in ends else [ENDED] * 3
    assert results[:, 0].tolist() == [*usual, IDLE]
    assert after[:, POSITION].tolist() == [-1 if status != RUNNING else 6 for status in usual] + [-1]
    assert after[:, TOKEN].tolist() == [41, 41, 41, 9]
    assert after[:, WRITTEN].tolist() == [1, 2, 3, 0]
    assert after[:, [KEY, LIMIT]].tolist() == state[:, [KEY, LIMIT]].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("settings", [SETTINGS["plain"], SETTINGS["all, hot"]], ids=str)
def test_draws_do_not_depend_on_the_batch(settings, monkeypatch):
    monkeypatch.setattr(sampler, "TILE", 128)
    logits, state = logits_of(600, ["usual", "nearly flat"] * 4, 5), state_of(8, 5)
    state[:, POSITION] = 3
    sampling = Sampling(max_new_tokens=1, **settings)
    together = drawn(kernels, logits, state, sampling, frozenset())[1][:, 1].tolist()
    alone = [drawn(kernels, logits[i : i + 1], state[i : i + 1], sampling, frozenset())[1][0, 1].item() for i in range(8)]
    assert alone == together
    if sampler.is_truncated(sampling, 600):  # a single race, whatever the tile size
        monkeypatch.setattr(sampler, "TILE", 1024)
        assert drawn(kernels, logits, state, sampling, frozenset())[1][:, 1].tolist() == together


class Poisoned(kernels.draw._Found):
    """What no program has written would replace the winner with the first token, if it were used."""

    @staticmethod
    def empty(rows: int, programs: int, device: torch.device) -> kernels.draw._Found:
        found = EMPTY(rows, programs, device)
        for field, value in zip(found, (1 << 30, 1 << 58, math.nan, 0), strict=True):
            field.fill_(value)
        return found


EMPTY = kernels.draw._Found.empty


@pytest.mark.grid(3)  # all
@pytest.mark.parametrize(
    ("rounds", "programs", "settings"),  # of the 4 tiles of a row two for each program, or one
    [(1, 20, {"top_p": 0.05}), (2, 40, {"top_p": 0.5, "min_p": 0.3}), (2, 40, {"top_k": 60, "top_p": 0.4})],
)
def test_rounds_and_the_search_after_them(rounds, programs, settings, monkeypatch):
    monkeypatch.setattr(sampler, "TILE", 32)
    monkeypatch.setattr(kernels.draw, "ROUNDS", rounds)
    monkeypatch.setattr(kernels.draw, "PROGRAMS", programs)
    monkeypatch.setattr(kernels.draw, "_Found", Poisoned)
    logits, state = logits_of(120, ["usual", "nearly flat"] * 5, 6), state_of(10, 6)
    logits[:, 0], state[:, POSITION] = logits.max(-1).values, 3  # kept, as soon as something takes it for the winner
    check_draws(kernels, logits, state, **settings)


@pytest.mark.timeout(100)
@pytest.mark.parametrize("settings", [SETTINGS[name] for name in ("plain", "top p", "zero p", "min p", "all")], ids=str)
def test_a_step_with_an_infinite_logit_ends(settings, monkeypatch):
    monkeypatch.setattr(sampler, "TILE", TILE)
    logits, state = logits_of(TILE + 7, ["usual"], 3), state_of(1, 1)
    logits[0, TILE + 2], state[:, POSITION] = math.inf, 3
    _, results = drawn(kernels, logits, state, Sampling(max_new_tokens=1, **settings), END_TOKENS)
    assert 0 <= results[0, 1] < TILE + 7
    assert results[:, 2:].contiguous().view(torch.float32).isnan().all()


@pytest.mark.slow
@pytest.mark.parametrize("settings", [SETTINGS[name] for name in ("small p", "min p", "all, hot")], ids=str)
def test_draws_do_not_depend_on_how_they_are_shared_out(settings, monkeypatch):
    """Among programs, and between the rounds and the search that a single program continues; a small top-p excludes many winners in
    turn."""
    monkeypatch.setattr(kernels.draw, "_Found", Poisoned)
    monkeypatch.setattr(sampler, "TILE", 64)
    logits, state = logits_of(600, ["usual", "nearly flat", "ties"], 8), state_of(3, 8)
    state[:, POSITION] = 3
    sampling = Sampling(max_new_tokens=1, **settings)
    found = []
    for rounds, programs in ((3, 1024), (1, 1), (2, 12)):  # 16, 1 and 4 for a row
        monkeypatch.setattr(kernels.draw, "ROUNDS", rounds)
        monkeypatch.setattr(kernels.draw, "PROGRAMS", programs)
        found.append(drawn(kernels, logits, state, sampling, frozenset())[1])
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.slow
def test_kernels_and_torch_draw_the_same_tokens(monkeypatch):
    """For as many rows as the interpreter has time for; the noise itself is compared above, for thousands."""
    monkeypatch.setattr(sampler, "TILE", 128)
    logits, state = logits_of(500, ["usual", "nearly flat", "ties"] * 14, 9), state_of(42, 9)
    state[:, POSITION] = 3
    ours, theirs = (
        drawn(ops, logits, state, Sampling(max_new_tokens=1, temperature=0.9), END_TOKENS) for ops in (kernels, torch_ops)
    )
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1][:, :2], theirs[1][:, :2])


# The engine with kernels ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("qwen2", {}), ("qwen3", {"temperature": 0.8, "top_p": 0.9})],
    ids=str,
)
@pytest.mark.slow
def test_the_engine_samples_the_same_with_kernels(tiny_models, monkeypatch, prefix_launches, kind, settings):
    """As on a GPU, but without graphs: the same samples as in torch, with rows that come and go and shared blocks."""
    from plaudit.models.trainable import load_model
    from plaudit.recipe import ModelSettings
    from plaudit.rollout.native import forward

    sizes = [(18, 2, 3), (1, 1, 4), (5, 1, 3)]  # prompt length, number of samples, new tokens
    requests = [Request(f"p{i}", np.arange(length) % 300, n=n, max_new_tokens=new) for i, (length, n, new) in enumerate(sizes)]
    monkeypatch.setattr(prefixes, "WORTHWHILE_BYTES", 0)
    monkeypatch.setattr(forward.Forward, "reads_shared_prefixes", property(lambda self: self.ops is kernels))
    monkeypatch.setattr(engine, "shared_prefixes_are_exact", lambda *_: True)
    sampling = Sampling(max_new_tokens=8, seed=3, **settings)
    monkeypatch.setattr(sampler, "TILE", 64)

    def samples(device: torch.device) -> dict:
        model = load_model(ModelSettings(path=str(tiny_models[kind]), dtype="float32"), device)
        subject = NativeEngine(model, None, max_sequences=2, block_tokens=16)
        return {(s.prompt_id, s.index): s for s in subject.generate(requests, sampling)}

    expected = samples(torch.device("cpu"))
    monkeypatch.setattr(forward, "ops_for", lambda device: kernels)
    found = samples(DEVICE)
    assert found.keys() == expected.keys()
    for key, sample in found.items():
        assert sample.tokens.tolist() == expected[key].tokens.tolist()
        assert np.abs(sample.sampler_logprobs - expected[key].sampler_logprobs).max() < 1e-5
    assert prefix_launches, "the first prompt is read once for its two samples"


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [False, True])
def test_prefixes_that_change_a_bit_are_not_shared(tiny_models, monkeypatch, prefix_launches, wrong):
    """Before they are, both ways are tried. On a GPU they agree to the bit; in the interpreter, numpy decides the order of sums."""
    from plaudit.models.trainable import load_model
    from plaudit.recipe import ModelSettings
    from plaudit.rollout.native import forward

    monkeypatch.setattr(forward, "ops_for", lambda device: kernels)
    monkeypatch.setattr(forward.Forward, "reads_shared_prefixes", property(lambda self: self.ops is kernels))
    monkeypatch.setattr(verify, "SHARED_LENGTHS", (20, 40))
    monkeypatch.setattr(verify, "ENOUGH_PROGRAMS", 4)
    if DEVICE.type != "cuda":
        monkeypatch.setattr(torch, "equal", lambda a, b: torch.allclose(a, b, rtol=1e-4, atol=1e-4))
    if wrong:  # one row's prefix ends a block too early
        assign = SharedPrefixes.assign
        monkeypatch.setattr(SharedPrefixes, "assign", lambda self, tiles: (assign(self, tiles), self.tokens_R[1:2].sub_(16)))
    model = load_model(ModelSettings(path=str(tiny_models["qwen2"]), dtype="float32"), DEVICE)
    subject = NativeEngine(model, None, block_tokens=16)
    monkeypatch.setattr(kernels.attention, "STRETCH", 32)
    assert not prefix_launches, "not before samples share a prompt"
    assert verify.shared_prefixes_are_exact(subject.forward, 16) is not wrong
    assert len(prefix_launches) == 2 * 2, "two prompts, two layers"
    model.config.max_position_embeddings = 20
    assert verify.shared_prefixes_are_exact(subject.forward, 16), "one prompt is not longer than that"
    assert len(prefix_launches) == 3 * 2
    model.config.max_position_embeddings = 19
    assert verify.shared_prefixes_are_exact(subject.forward, 16) is None
    model.config.max_position_embeddings = 2048
    if wrong:
        requests = [Request("p", np.arange(20), n=2)]
        with pytest.warns(UserWarning, match="does not give the same bits"):
            assert len(list(subject.generate(requests, Sampling(max_new_tokens=1)))) == 2
        assert not subject.shares_prefixes


@pytest.mark.slow
def test_prefixes_are_not_shared_if_memory_is_too_small_for_the_test(tiny_models, monkeypatch, prefix_launches):
    """The next call may have enough, so there is no warning."""
    from plaudit.models.trainable import load_model
    from plaudit.recipe import ModelSettings
    from plaudit.rollout.native import forward

    monkeypatch.setattr(forward, "ops_for", lambda device: kernels)
    monkeypatch.setattr(forward.Forward, "reads_shared_prefixes", property(lambda self: self.ops is kernels))
    subject = NativeEngine(
        load_model(ModelSettings(path=str(tiny_models["qwen2"]), dtype="float32"), DEVICE), None, block_tokens=16
    )
    allocate = KVCache.allocate

    def scarce(self: KVCache, blocks: int, min_blocks: int = 1) -> int:
        if min_blocks > 50:
            raise PlauditError("0.1 GB of GPU memory are free")
        return allocate(self, blocks, min_blocks)

    monkeypatch.setattr(KVCache, "allocate", scarce)
    assert len(list(subject.generate([Request("p", np.arange(20), n=2)], Sampling(max_new_tokens=1)))) == 2
    assert subject.shares_prefixes
    assert not prefix_launches


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("mistral", torch.float32), ("qwen2", torch.bfloat16), ("qwen3", torch.bfloat16)],
    ids=str,
)
def test_scoring_passes_match_modules(tiny_models, monkeypatch, kind, dtype):
    """Hidden states of packed sequences, with kernels and in torch, match the model's own modules."""
    from plaudit.data.pack import pack
    from plaudit.models.attention import packed_states
    from plaudit.models.trainable import load_model
    from plaudit.recipe import ModelSettings
    from plaudit.rollout.native import scoring_pass
    from plaudit.types import Example

    model = load_model(ModelSettings(path=str(tiny_models[kind]), dtype=str(dtype).removeprefix("torch.")), DEVICE).get_decoder()
    sequences = [np.arange(length) % 300 for length in (6, 1, 3)]
    batch = pack([Example(tokens, np.zeros(len(tokens), dtype=bool)) for tokens in sequences], DEVICE)
    with torch.no_grad():
        expected = packed_states(model, batch)
    for ops in (torch_ops, kernels) if DEVICE.type == "cpu" else (kernels,):
        monkeypatch.setattr(scoring_pass, "ops_for", lambda device, ops=ops: ops)
        found = scoring_pass.ScoringPass(model)(batch)
        assert found.dtype == expected.dtype
        error = (found.float() - expected.float()).abs().max().item()
        assert error < (1e-4 if dtype == torch.float32 else 0.06), ops.__name__


@pytest.mark.grid(1)
@pytest.mark.parametrize(
    ("kind", "targets", "bits"),
    [
        ("llama", "all-linear", None),
        ("qwen2", ("q_proj", "v_proj", "up_proj"), None),
        ("qwen3", "all-linear", None),
        ("qwen2", ("q_proj", "v_proj", "up_proj"), 4),
        ("qwen3", "all-linear", 8),
    ],
)
def test_merged_adapters(tiny_models, monkeypatch, kind, targets, bits):
    """Hidden states and the adapters' gradients are peft's; without adapters the states are the base model's; after a change of an
    adapter, all of it again."""
    from plaudit.data.pack import pack
    from plaudit.models import merged, quantised
    from plaudit.models.attention import packed_states
    from plaudit.models.lora import attach_lora, iter_merged_weights
    from plaudit.models.merged import has_merged
    from plaudit.models.trainable import load_model
    from plaudit.recipe import LoraSettings, ModelSettings
    from plaudit.types import Example

    for module in (merged, quantised):
        monkeypatch.setattr(module, "kernels_for", lambda device: shared)
    lora = LoraSettings(rank=3, alpha=5.0, targets=targets, base_bits=bits)
    recipe = ModelSettings(path=str(tiny_models[kind]), dtype="float32", lora=lora)
    theirs, ours = (load_model(recipe, DEVICE) for _ in range(2))
    monkeypatch.setattr(fused, "_kernels_run_on", lambda x: True)
    fused.fuse_layers(ours)
    wrapped = [attach_lora(model, lora, seed=1) for model in (theirs, ours)]
    fused.merge_adapters(ours)
    assert has_merged(ours)
    assert not has_merged(theirs)
    sequences = [np.arange(length) % 300 for length in (3, 1, 2)]
    batch = pack([Example(tokens, np.zeros(len(tokens), dtype=bool)) for tokens in sequences], DEVICE)
    output_grad = torch.randn(6, theirs.config.hidden_size, generator=generator(0)).to(DEVICE)

    def states(model):
        return packed_states(model.get_decoder(), batch)

    for change in (0.05, 0.1):
        for model in (theirs, ours):
            model.zero_grad()
            with torch.no_grad():
                for i, (name, parameter) in enumerate(model.named_parameters()):
                    if ".lora_" in name:
                        parameter += change * torch.randn(parameter.shape, generator=generator(i)).to(DEVICE)
            model.found = states(model)
            (model.found * output_grad).sum().backward()
        torch.testing.assert_close(ours.found, theirs.found, rtol=1e-5, atol=1e-5)
        for (name, expected), (_, parameter) in zip(theirs.named_parameters(), ours.named_parameters(), strict=True):
            if ".lora_" in name:
                size = expected.grad.abs().max().item()
                torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-4, atol=1e-5 * size, msg=lambda m, n=name: n + m)
            else:
                assert parameter.grad is None, name
    plain = []
    for model, peft in zip((theirs, ours), wrapped, strict=True):
        with peft.disable_adapter(), torch.no_grad():
            plain.append(states(model))
    torch.testing.assert_close(plain[1], plain[0], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(plain[1], ours.found, atol=1e-3)
    found = dict(iter_merged_weights(ours))
    for name, expected in iter_merged_weights(theirs):
        torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: n + m)


@pytest.mark.slow
def test_merged_adapters_train_as_peft_does(tiny_models, monkeypatch):
    """20 steps of SFT through every kernel of a fused layer, against a plain loop without plaudit: losses differ by up to 1e-6."""
    from plaudit.data.pack import pack
    from plaudit.models.lora import Adapters
    from support.examples import make_examples
    from support.peft_training import load_peft, saved_adapters, train_with_peft
    from support.training import load, make_trainer, nll_of

    monkeypatch.setattr(fused, "_kernels_run_on", lambda x: True)
    policy = load(tiny_models["qwen2"], dtype="float32", lora={"rank": 8, "alpha": 24.0})
    policy.model.to(DEVICE)  # pyright: ignore
    fused.fuse_layers(policy.model)
    fused.merge_adapters(policy.model)
    adapters = Adapters.of(policy.model)
    assert adapters is not None
    peft = load_peft(tiny_models["qwen2"], {name: a.cpu().clone() for name, a in adapters}, rank=8, alpha=24.0)
    steps, settings = (
        [make_examples((3, 7, 2), step % 2) for step in range(20)],
        {"lr": 5e-3, "weight_decay": 0.1, "max_grad_norm": 1.0},
    )
    trainer = make_trainer(policy, total_steps=20, schedule="linear", **settings)
    losses = []
    for rows in steps:
        batches = [pack(rows, DEVICE)]
        losses.append(trainer.update(batches, nll_of(policy, batches))["loss"])
    expected = train_with_peft(peft, steps, **settings)
    assert losses == pytest.approx(expected, abs=1e-5)
    assert losses[-1] < losses[1] - 0.3
    trained = saved_adapters(peft)
    for name, adapter in adapters:
        assert (adapter.cpu() - trained[name]).norm() < 1e-3 * trained[name].norm(), name
