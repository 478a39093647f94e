"""W' = W + s B A in one pass over the weights, of a W that is stored or quantised (formulas and rounding: models/merged.py,
models/quantised.py).

    W' = round(W + s Σ_k B_k A_k)        W = c · s_block, to nearest in W's dtype, if it is quantised

An element's sum is made of fused multiply-adds in the order of the ranks, and its noise depends on its place in its own matrix. So
its bits depend neither on the tile nor on the layers around it. Rounding to bf16 is integer arithmetic, as it is in torch.
"""

# A launch takes arguments that the kernel does not declare.
# pyright: reportCallIssue=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from plaudit.models.kernels.compile_options import NO_FP_FUSION

BLOCK = 64  # elements with a common scale
COLUMNS, WARPS = BLOCK, 8  # of a tile: its columns are one block wherever a row is made of complete blocks
# Rows of a tile. The registers for 128 would leave room for one program on a multiprocessor (compute capability 9.0), and nothing
# would be computed while it waits for its weights. Few where a row is not made of complete blocks, which takes more registers.
ROWS, FEW_ROWS = 64, 32


def merge(out_OI: Tensor, base_OI: Tensor, a_RI: Tensor, b_OR: Tensor, scale: float) -> None:
    """out = base + scale · B A. `out` may be the base itself."""
    assert out_OI.dtype == base_OI.dtype
    assert base_OI.is_contiguous()
    rows, grid = _tiles(out_OI)
    _merge[grid](
        base_OI, out_OI, *_factors(out_OI, a_RI, b_OR), scale, len(a_RI), *out_OI.shape,
        ROWS=rows, COLUMNS=COLUMNS, num_warps=WARPS, **NO_FP_FUSION,
    )  # fmt: skip


def dequantise(out_OI: Tensor, codes: Tensor, scales: Tensor, levels: Tensor) -> None:
    """`levels`: the 16 values of a 4-bit code, in fp32."""
    _dequantise(out_OI, codes, scales, levels, scales, scales, 0.0, 0)


def dequantise_merged(
    out_OI: Tensor, codes: Tensor, scales: Tensor, levels: Tensor, a_RI: Tensor, b_OR: Tensor, scale: float
) -> None:
    """The same and then `merge`, written once."""
    _dequantise(out_OI, codes, scales, levels, *_factors(out_OI, a_RI, b_OR), scale, len(a_RI))


def _dequantise(
    out_OI: Tensor, codes: Tensor, scales: Tensor, levels: Tensor, a_RI: Tensor, b_OR: Tensor, scale: float, rank: int
) -> None:
    assert codes.is_contiguous()
    assert scales.is_contiguous()
    rows, grid = _tiles(out_OI)
    _dequantise_merge[grid](
        codes, scales, levels, out_OI, a_RI, b_OR, scale, rank, *out_OI.shape,
        FOUR_BITS=codes.dtype == torch.uint8, MERGE=rank > 0, ALIGNED=out_OI.shape[1] % BLOCK == 0,
        ROWS=rows, COLUMNS=COLUMNS, num_warps=WARPS, **NO_FP_FUSION,
    )  # fmt: skip


def _tiles(out_OI: Tensor) -> tuple[int, tuple[int, int]]:
    """The rows of a tile, and how many tiles there are along columns and rows."""
    assert out_OI.is_contiguous()
    height, width = out_OI.shape
    rows = ROWS if width % BLOCK == 0 else FEW_ROWS
    return rows, (-(-width // COLUMNS), -(-height // rows))


def _factors(out_OI: Tensor, a_RI: Tensor, b_OR: Tensor) -> tuple[Tensor, Tensor]:
    assert out_OI.dtype in (torch.bfloat16, torch.float32)
    return a_RI.float().contiguous(), b_OR.float().contiguous()


@triton.jit
def _update(a_ptr, b_ptr, rank, first_row, row, column, rows, columns, place):
    """B A of the tile at `place`. Nothing is read from there: the load makes the compiler divide the tile among threads as for the
    store. Otherwise each thread would get one column, which needs a load for every multiplication."""
    total = tl.load(place, mask=rank < 0, other=0.0).to(tl.float32)
    b_place = b_ptr + first_row.to(tl.int64) * rank + row * rank
    for k in tl.range(0, rank):  # pyright: ignore[reportGeneralTypeIssues]
        a = tl.load(a_ptr + k * columns + column, mask=column < columns, other=0.0)
        b = tl.load(b_place + k, mask=row < rows - first_row, other=0.0)
        total = tl.fma(tl.broadcast_to(b[:, None], total.shape), tl.broadcast_to(a[None, :], total.shape), total)
    return total


@triton.jit
def _noise(row, column):
    """16 bits for each place: `_rounded` of models/merged.py, unsigned."""
    x = row.to(tl.uint32)[:, None] * 0x9E3779B9 + column.to(tl.uint32)[None, :]
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846BA98B
    return ((x ^ (x >> 16)) & 0xFFFF).to(tl.int32)


@triton.jit
def _upper_half(x, added):
    """The upper half of x's bits, as fp32, after something was added to all of them. NaN stays one: on a GPU it has all bits set,
    and would overflow."""
    bits = (x.to(tl.int32, bitcast=True) + added) & -0x10000
    return tl.where(x == x, bits, 0x7FC00000).to(tl.float32, bitcast=True)


@triton.jit
def _nearest(x, dtype: tl.constexpr):
    """x as the dtype can hold it, in fp32. The interpreter rounds to bf16 in a way of its own."""
    if dtype == tl.bfloat16:
        return _upper_half(x, 0x7FFF + ((x.to(tl.int32, bitcast=True) >> 16) & 1))
    return x.to(dtype).to(tl.float32)


@triton.jit
def _load(place, mask):
    x = tl.load(place, mask=mask, other=0.0)
    if x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def _store(place, x, mask):
    """x is a number of that dtype already."""
    dtype: tl.constexpr = place.dtype.element_ty
    if dtype == tl.bfloat16:
        x = (x.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    tl.store(place, x.to(dtype), mask=mask)


@triton.jit
def _merged(base, update, scale, row, column, dtype: tl.constexpr):
    exact = base + scale * update
    return _upper_half(exact, _noise(row, column)) if dtype == tl.bfloat16 else exact


@triton.jit
def _merge(
    base_ptr, out_ptr, a_ptr, b_ptr, scale, rank, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Each program: a tile."""
    first_row = tl.program_id(1) * ROWS
    row = tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows - first_row)[:, None] & (column < columns)[None, :]
    start = first_row.to(tl.int64) * columns  # beyond 2^31 in large matrices; a tile is not
    at = row[:, None] * columns + column[None, :]
    base = _load(base_ptr + start + at, inside)
    update = _update(a_ptr, b_ptr, rank, first_row, row, column, rows, columns, out_ptr + start + at)
    merged = _merged(base, update, scale, first_row + row, column, out_ptr.dtype.element_ty)
    _store(out_ptr + start + at, merged, inside)


@triton.jit
def _dequantise_merge(
    codes_ptr, scales_ptr, levels_ptr, out_ptr, a_ptr, b_ptr, scale, rank, rows, columns,
    FOUR_BITS: tl.constexpr, MERGE: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Each program: a tile. ALIGNED: a row is made of complete blocks, so that a tile has one in each of its rows."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    first_row = tl.program_id(1) * ROWS
    row = tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_row = row < rows - first_row
    inside = is_row[:, None] & (column < columns)[None, :]
    start = first_row.to(tl.int64) * columns
    at = row[:, None] * columns + column[None, :]
    if ALIGNED:
        tl.static_assert(COLUMNS == 64)
        blocks = columns // COLUMNS
        block_scale = tl.load(scales_ptr + start // COLUMNS + row * blocks + tl.program_id(0), mask=is_row, other=0.0)[:, None]
        if FOUR_BITS:
            byte = tl.program_id(0) * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
            pair_place = codes_ptr + start // 2 + row[:, None] * (columns // 2) + byte[None, :]
            pair = tl.load(pair_place, mask=is_row[:, None], other=0)
            level = tl.interleave(tl.load(levels_ptr + (pair >> 4)), tl.load(levels_ptr + (pair & 15)))
        else:
            level = tl.load(codes_ptr + start + at, mask=inside, other=0).to(tl.float32)
    else:
        place = start + at
        block_scale = tl.load(scales_ptr + place // 64, mask=inside, other=0.0)
        if FOUR_BITS:
            pair = tl.load(codes_ptr + place // 2, mask=inside, other=0).to(tl.int32)
            level = tl.load(levels_ptr + ((pair >> (4 - 4 * (place % 2).to(tl.int32))) & 15))
        else:
            level = tl.load(codes_ptr + place, mask=inside, other=0).to(tl.float32)
    weight = _nearest(level * block_scale, dtype)
    if MERGE:
        update = _update(a_ptr, b_ptr, rank, first_row, row, column, rows, columns, out_ptr + start + at)
        weight = _merged(weight, update, scale, first_row + row, column, dtype)
    _store(out_ptr + start + at, weight, inside)
