"""The compiled operations against torch's, and against the same in double precision."""

import ctypes
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from plaudit.models.heads import Heads, Rotation
from plaudit.rollout.native import cpu_library, cpu_ops, sampler, torch_ops
from plaudit.rollout.native.cache import CacheShape, KVCache

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
DTYPES = [torch.float32, torch.bfloat16]
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 8e-3}
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(autouse=True)
def _without_bf16_instructions(monkeypatch):
    """With them, oneDNN computes the products."""
    monkeypatch.setattr(cpu_ops, "multiplies_bf16", lambda: False)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(ours: Tensor, theirs: Tensor, dtype: torch.dtype, times: float = 1.0) -> None:
    """To within a few roundings of the largest value."""
    scale = theirs.double().abs().max()
    assert (ours.double() - theirs.double()).abs().max() <= times * ROUNDING[dtype] * scale


@each_dtype
def test_there_is_a_library(dtype):
    assert cpu_library.library_for(dtype) is not None


def test_there_is_none_without_a_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("CC", "no-such-compiler")
    assert cpu_library.library_for.__wrapped__(torch.float32) is None
    monkeypatch.setenv("CC", "false")  # a compiler that fails
    monkeypatch.setenv("PLAUDIT_CACHE", str(tmp_path))
    assert cpu_library.library_for.__wrapped__(torch.float32) is None


@pytest.mark.slow
def test_the_library_uses_the_threads_of_torch(monkeypatch, tmp_path):
    """Also where torch brings an OpenMP library under a name of its own."""
    theirs = cpu_library.openmp_runtime()
    if theirs is None or not theirs.endswith("/libgomp.so.1"):
        pytest.skip("needs torch with libgomp.so.1")
    renamed = tmp_path / "libgomp.so.9"
    renamed.write_bytes(Path(theirs).read_bytes().replace(b"\0libgomp.so.1\0", b"\0libgomp.so.9\0"))
    ctypes.CDLL(str(renamed))
    monkeypatch.setenv("PLAUDIT_CACHE", str(tmp_path))
    monkeypatch.setattr(cpu_library, "openmp_runtime", lambda: str(renamed))
    assert cpu_library.library_for.__wrapped__(torch.float32) is not None
    [compiled] = (tmp_path / "kernels").glob("*.so")
    assert b"libgomp.so.9" in compiled.read_bytes()
    assert b"libgomp.so.1" not in compiled.read_bytes()


@each_dtype
@pytest.mark.parametrize("rows", [1, 7, 300])
def test_norms_and_swiglu(dtype, rows):
    x, weight = normal(rows, 96), normal(96, seed=2, dtype=dtype)
    for delta in (None, normal(rows, 96, seed=1, dtype=dtype)):
        ours, theirs = cpu_ops.add_norm(x, delta, weight, 1e-5), torch_ops.add_norm(x, delta, weight, 1e-5)
        assert (ours[0].dtype, ours[1].dtype) == (dtype, torch.float32)
        assert torch.equal(ours[1], theirs[1])
        close(ours[0], theirs[0], dtype)
    gate_up = normal(rows, 512, seed=3, dtype=dtype) * 20
    close(cpu_ops.swiglu(gate_up), torch_ops.swiglu(gate_up), dtype)


@each_dtype
@pytest.mark.parametrize("rows", [1, 2, 11, 16, 64, 65])
@pytest.mark.parametrize(("inner", "outer"), [(64, 7), (1536, 96), (50, 12)])
def test_products(dtype, rows, inner, outer):
    x, weight = normal(rows, inner, dtype=dtype), normal(outer, inner, seed=1, dtype=dtype)
    for bias in (None, normal(outer, seed=2, dtype=dtype)):
        exact = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
        ours = cpu_ops.product(x, weight, bias)
        assert ours.dtype == dtype
        close(ours, exact, dtype)


@each_dtype
def test_a_row_does_not_depend_on_the_others(dtype):
    x, weight = normal(16, 576, dtype=dtype), normal(40, 576, seed=1, dtype=dtype)
    together = cpu_ops.product(x, weight, None)
    for rows in (*(slice(16 - count, 16) for count in range(1, 12)), slice(0, 1), slice(3, 12)):
        assert torch.equal(cpu_ops.product(x[rows], weight, None), together[rows])


@each_dtype
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 64, 65])
@pytest.mark.parametrize(("inner", "outer"), [(64, 7), (1536, 96), (50, 25), (130, 48)])
def test_products_with_packed_weights(dtype, rows, inner, outer):
    x, weight = normal(rows, inner, dtype=dtype), normal(outer, inner, seed=1, dtype=dtype)
    for bias in (None, normal(outer, seed=2, dtype=dtype)):
        exact = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
        multiply = cpu_ops.pack(weight, bias)
        ours = multiply(x)
        assert ours.dtype == dtype
        close(ours, exact, dtype)
        if rows <= 64:
            assert torch.equal(multiply(x[rows // 2 :]), ours[rows // 2 :]), "a row does not depend on the others"
    logits = cpu_ops.pack_head(weight)(x)
    assert logits.dtype == torch.float32
    close(logits, x.double() @ weight.double().T, torch.float32 if rows <= 64 else dtype)
    x[0, 3] = math.nan
    assert cpu_ops.pack(weight, None)(x).isnan().all(1).tolist() == [True] + [False] * (rows - 1)


@each_dtype
def test_swiglu_of_extreme_numbers(dtype):
    """Numbers whose exponential is beyond fp32's, infinities and NaN."""
    gates = [-1e30, -1000.0, -89.0, -87.5, -20.0, -1.0, 0.0, 1.0, 20.0, 87.5, 89.0, 1000.0, 1e30, math.inf, math.nan]
    gate = torch.tensor(gates).to(dtype)
    ours = cpu_ops.swiglu(torch.cat([gate, torch.ones_like(gate)])[None])[0]
    assert ours[-1].isnan()
    assert ours[-2] == math.inf
    finite = gate[:-2].double()
    assert torch.allclose(ours[:-2].double(), finite * finite.sigmoid(), rtol=2**-8 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)


def test_many_rows_in_pieces(monkeypatch):
    monkeypatch.setattr(cpu_ops, "CONVERTED_AT_ONCE", 200)
    x, weight, bias = (normal(*shape, seed=i, dtype=torch.bfloat16) for i, shape in enumerate([(100, 64), (17, 64), (17,)]))
    close(cpu_ops.product(x, weight, bias), x.double() @ weight.double().T + bias.double(), torch.bfloat16)


@each_dtype
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("heads", [Heads(9, 3, 64), Heads(2, 2, 128), Heads(4, 1, 10)])
def test_attention(dtype, heads, normed, window):
    """The result, and what is written to the cache, for rows of several lengths, one of them unused."""
    lengths, layer, width = [1, 37, 0, 12], 1, (heads.query + 2 * heads.kv) * heads.size
    angles = torch.arange(64)[:, None] * torch.linspace(1, 0.01, heads.size // 2).repeat(2)
    norms = (normal(heads.size, seed=3, dtype=dtype), normal(heads.size, seed=4, dtype=dtype)) if normed else (None, None)
    rotation = Rotation(angles.cos().to(dtype), angles.sin().to(dtype), *norms, 1e-5)
    qkv, positions = normal(4, width, dtype=dtype), torch.tensor(lengths)[:, None].repeat(1, 3)[:, 1] - 1
    found = []
    for ops in (cpu_ops, torch_ops):
        cache = KVCache(CacheShape(2, heads, dtype, torch.device("cpu")), 4, 1, block_tokens=64)
        cache.allocate(4)
        assert cache.memory is not None
        cache.memory.copy_(normal(*cache.memory.shape, seed=5))
        cache.set_block_tables(range(4), np.arange(4)[:, None])
        cache.blocks_match_rows = True
        options = {"scale": 0.3, "window": window, "longest": max(lengths)}
        out = ops.rotate_and_attend(qkv.clone(), heads, rotation, cache, layer, positions, **options)
        found.append((out, cache.memory))
    (ours, our_memory), (theirs, their_memory) = found
    used = torch.tensor(lengths) > 0
    close(ours[used], theirs[used], dtype, times=4)
    close(our_memory, their_memory, dtype)
    changed = our_memory != normal(*our_memory.shape, seed=5).to(dtype)
    assert not changed[:, 0].any()
    assert not changed[2].any()


@pytest.mark.parametrize("vocabulary", [5, sampler.TILE, 3 * sampler.TILE + 100])
def test_sums_of_tiles(vocabulary):
    logits = normal(3, vocabulary) * 8
    logits[1] += 300
    logits[2, : vocabulary // 2] = -math.inf
    expected = torch.stack([tile.double().logsumexp(-1) for tile in logits.split(sampler.TILE, 1)], 1)
    torch.testing.assert_close(sampler.tile_sums(logits).double(), expected, rtol=1e-6, atol=2e-6)
