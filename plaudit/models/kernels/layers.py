"""The operations between a layer's matrix products: residual and norm, rotary embedding, SwiGLU; forward and backward.

The forward passes round where the modules of transformers round.
"""

# A launch takes arguments that the kernel does not declare.
# pyright: reportCallIssue=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from plaudit.models.heads import Heads, Rotation, next_power_of_2
from plaudit.models.kernels.compile_options import NO_FP_FUSION


def add_norm(x_TD: Tensor, delta: Tensor | None, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`delta` [T, D], or [parts, T, D] in fp32."""
    normed_TD = torch.empty_like(x_TD, dtype=weight_D.dtype)
    summed_TD = x_TD if delta is None else torch.empty_like(x_TD)
    T, D = x_TD.shape
    block = next_power_of_2(D)
    parts = 0 if delta is None else 1 if delta.dim() == 2 else len(delta)
    _add_norm[(T,)](
        x_TD, x_TD if delta is None else delta, weight_D, normed_TD, summed_TD, eps, T * D,
        D=D, BLOCK=block, PARTS=parts, num_warps=4 if block <= 2048 else 16, **NO_FP_FUSION,
    )  # fmt: skip
    return normed_TD, summed_TD


@triton.jit
def _add_norm(
    x_ptr, delta_ptr, weight_ptr, normed_ptr, summed_ptr, eps, part_stride,
    D: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    dtype = x_ptr.dtype.element_ty
    weight_dtype = weight_ptr.dtype.element_ty
    at = tl.arange(0, BLOCK)
    inside = at < D
    row = tl.program_id(0).to(tl.int64) * D
    x = tl.load(x_ptr + row + at, mask=inside, other=0.0).to(tl.float32)
    if PARTS > 0:
        delta = tl.load(delta_ptr + row + at, mask=inside, other=0.0).to(tl.float32)
        for part in tl.static_range(1, PARTS):  # pyright: ignore[reportGeneralTypeIssues]
            delta += tl.load(delta_ptr + part * part_stride + row + at, mask=inside, other=0.0)
        x = (x + delta.to(weight_dtype).to(tl.float32)).to(dtype)
        tl.store(summed_ptr + row + at, x, mask=inside)
        x = x.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / D + eps)
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed_ptr + row + at, ((x * scale).to(dtype).to(tl.float32) * weight).to(weight_dtype), mask=inside)


def add(x_TD: Tensor, delta_TD: Tensor) -> Tensor:
    """x + delta of another dtype, in that of x, both contiguous; torch's own addition takes twice as long for two dtypes."""
    assert x_TD.is_contiguous()
    assert delta_TD.is_contiguous()
    summed_TD, numbers, block = torch.empty_like(x_TD), x_TD.numel(), 1024
    _add[(-(-numbers // block),)](x_TD, delta_TD, summed_TD, numbers, BLOCK=block, num_warps=4, **NO_FP_FUSION)
    return summed_TD


@triton.jit
def _add(x_ptr, delta_ptr, summed_ptr, numbers, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numbers
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    delta = tl.load(delta_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(summed_ptr + at, (x + delta).to(summed_ptr.dtype.element_ty), mask=inside)


def swiglu(gate_up_TI: Tensor) -> Tensor:
    T, width = gate_up_TI.shape
    half = width // 2
    out_TI = torch.empty(T, half, dtype=gate_up_TI.dtype, device=gate_up_TI.device)
    block = 1024
    _swiglu[(T, -(-half // block))](gate_up_TI, out_TI, HALF=half, BLOCK=block, num_warps=4, **NO_FP_FUSION)
    return out_TI


@triton.jit
def _swiglu(gate_up_ptr, out_ptr, HALF: tl.constexpr, BLOCK: tl.constexpr):
    dtype = out_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < HALF
    gate = tl.load(gate_up_ptr + row * 2 * HALF + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * HALF + HALF + at, mask=inside, other=0.0).to(tl.float32)
    gated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * HALF + at, (gated * up).to(dtype), mask=inside)


HEADS_AT_ONCE = 4


def rotate(qkv_TE: Tensor, heads: Heads, rotation: Rotation, positions_T: Tensor) -> None:
    """Rotary embedding of queries and keys, in place, after their norms if any. Negative positions (unused rows) are skipped."""
    norm_heads(qkv_TE, heads, rotation.query_norm, rotation.key_norm, rotation.eps)
    turned = heads.query + heads.kv
    _rotate[(len(qkv_TE), -(-turned // HEADS_AT_ONCE))](
        qkv_TE, qkv_TE.stride(0), rotation.cos, rotation.sin, positions_T, positions_T.stride(0),
        TURNED=turned, D=heads.size, HALF=next_power_of_2(heads.size // 2), AT_ONCE=HEADS_AT_ONCE, num_warps=2, **NO_FP_FUSION,
    )  # fmt: skip


@triton.jit
def _rotate(
    qkv_ptr, qkv_stride, cos_ptr, sin_ptr, positions_ptr, positions_stride,
    TURNED: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Each program: a few heads of one token. A head's halves a, b → a cos − b sin, b cos + a sin, in place."""
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + token * positions_stride).to(tl.int64)
    if position < 0:
        return
    dtype = qkv_ptr.dtype.element_ty
    head = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)[:, None]
    at = tl.arange(0, HALF)[None, :]
    inside = (head < TURNED) & (at < D // 2)
    place = qkv_ptr + token * qkv_stride + head * D + at
    a = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(place + D // 2, mask=inside, other=0.0).to(tl.float32)
    angle = position * D + at
    cos_a = tl.load(cos_ptr + angle, mask=at < D // 2, other=0.0).to(tl.float32)
    cos_b = tl.load(cos_ptr + angle + D // 2, mask=at < D // 2, other=0.0).to(tl.float32)
    sin_a = tl.load(sin_ptr + angle, mask=at < D // 2, other=0.0).to(tl.float32)
    sin_b = tl.load(sin_ptr + angle + D // 2, mask=at < D // 2, other=0.0).to(tl.float32)
    turned_a = (a * cos_a).to(dtype).to(tl.float32) + (-b * sin_a).to(dtype).to(tl.float32)
    turned_b = (b * cos_b).to(dtype).to(tl.float32) + (a * sin_b).to(dtype).to(tl.float32)
    tl.store(place, turned_a.to(dtype), mask=inside)
    tl.store(place + D // 2, turned_b.to(dtype), mask=inside)


def norm_heads(qkv_TE: Tensor, heads: Heads, query_norm: Tensor | None, key_norm: Tensor | None, eps: float) -> None:
    """Norms of queries and keys, in place, for models that have them."""
    if query_norm is None:
        return
    turned = heads.query + heads.kv
    _norm_heads[(len(qkv_TE), -(-turned // HEADS_AT_ONCE))](
        qkv_TE, qkv_TE.stride(0), query_norm, key_norm, eps,
        QUERY=heads.query, TURNED=turned, D=heads.size, WIDTH=next_power_of_2(heads.size), AT_ONCE=HEADS_AT_ONCE,
        num_warps=2, **NO_FP_FUSION,
    )  # fmt: skip


@triton.jit
def _norm_heads(
    qkv_ptr, qkv_stride, query_norm_ptr, key_norm_ptr, eps,
    QUERY: tl.constexpr, TURNED: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    dtype = qkv_ptr.dtype.element_ty
    head = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)[:, None]
    at = tl.arange(0, WIDTH)[None, :]
    inside = (head < TURNED) & (at < D)
    place = qkv_ptr + tl.program_id(0).to(tl.int64) * qkv_stride + head * D + at
    x = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 1) / D + eps)[:, None]
    weight = tl.load(query_norm_ptr + at, mask=inside & (head < QUERY), other=0.0)
    weight += tl.load(key_norm_ptr + at, mask=inside & (head >= QUERY), other=0.0)
    tl.store(place, ((x * scale).to(dtype).to(tl.float32) * weight.to(tl.float32)).to(dtype), mask=inside)


def sum_splits(parts_PTD: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of split-K partial products, in the order of `add_norm`."""
    joined_TD = torch.empty(parts_PTD.shape[1:], dtype=dtype, device=parts_PTD.device)
    numbers, block = joined_TD.numel(), 1024
    _join_parts[(-(-numbers // block),)](
        parts_PTD, joined_TD, numbers, PARTS=len(parts_PTD), BLOCK=block, num_warps=4, **NO_FP_FUSION
    )
    return joined_TD


@triton.jit
def _join_parts(parts_ptr, joined_ptr, numbers, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numbers
    joined = tl.load(parts_ptr + at, mask=inside, other=0.0)
    for part in tl.static_range(1, PARTS):  # pyright: ignore[reportGeneralTypeIssues]
        joined += tl.load(parts_ptr + part * numbers.to(tl.int64) + at, mask=inside, other=0.0)
    tl.store(joined_ptr + at, joined.to(joined_ptr.dtype.element_ty), mask=inside)


PROGRAMS = 1024  # among which a norm's backward pass divides the tokens


def norm_backward(
    grad_normed_TD: Tensor,
    x_TD: Tensor,
    weight_D: Tensor,
    eps: float,
    grad_x_TD: Tensor | None,
    *,
    also_in: torch.dtype | None = None,
    trains_weight: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Gradients of x and, if it is trained, of the weight, in fp32; and that of x in the dtype `also_in`. `grad_x_TD`: another
    gradient of x, which is added.

    y = w · x r,  r = (mean x² + ε)^−½:      ∂x = r (g − x r · mean(g · x r)),  g = w ∂y      ∂w = Σ_t ∂y · x r
    """
    T, D = x_TD.shape
    block, programs = next_power_of_2(D), min(T, PROGRAMS)
    grad_TD = torch.empty(T, D, dtype=torch.float32, device=x_TD.device)
    rounded_TD = grad_TD if also_in in (None, torch.float32) else torch.empty(T, D, dtype=also_in, device=x_TD.device)
    grad_weight_ND = torch.empty(programs if trains_weight else 1, D, dtype=torch.float32, device=x_TD.device)
    _norm_backward[(programs,)](
        grad_normed_TD, x_TD, weight_D, x_TD if grad_x_TD is None else grad_x_TD, grad_TD, rounded_TD, grad_weight_ND, eps, T,
        D=D, BLOCK=block, ADD=grad_x_TD is not None, ROUND=rounded_TD is not grad_TD, TRAINS=trains_weight,
        num_warps=4 if block <= 2048 else 16,
    )  # fmt: skip
    return grad_TD, grad_weight_ND.sum(0) if trains_weight else None, rounded_TD


@triton.jit
def _norm_backward(
    grad_normed_ptr, x_ptr, weight_ptr, grad_x_ptr, grad_ptr, rounded_ptr, grad_weight_ptr, eps, T,
    D: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, ROUND: tl.constexpr, TRAINS: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, BLOCK)
    inside = at < D
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    grad_weight = tl.zeros([BLOCK], tl.float32)
    for token in tl.range(tl.program_id(0), T, tl.num_programs(0)):
        row = (tl.zeros([BLOCK], tl.int64) + token) * D + at
        x = tl.load(x_ptr + row, mask=inside, other=0.0).to(tl.float32)
        from_normed = tl.load(grad_normed_ptr + row, mask=inside, other=0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / D + eps)
        x *= scale
        if TRAINS:
            grad_weight += from_normed * x
        grad = from_normed * weight
        grad = scale * (grad - x * (tl.sum(grad * x, 0) / D))
        if ADD:
            grad += tl.load(grad_x_ptr + row, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_ptr + row, grad, mask=inside)
        if ROUND:
            tl.store(rounded_ptr + row, grad.to(rounded_ptr.dtype.element_ty), mask=inside)
    if TRAINS:
        tl.store(grad_weight_ptr + tl.program_id(0).to(tl.int64) * D + at, grad_weight, mask=inside)


def swiglu_backward(grad_TI: Tensor, gate_up_TI: Tensor) -> Tensor:
    """y = a σ(a) b:      ∂a = ∂y b σ(a) (1 + a (1 − σ(a))),   ∂b = ∂y a σ(a)"""
    T, half = grad_TI.shape
    grad_gate_up_TI = torch.empty_like(gate_up_TI)
    block = 1024
    _swiglu_backward[(T, -(-half // block))](grad_TI, gate_up_TI, grad_gate_up_TI, HALF=half, BLOCK=block, num_warps=4)
    return grad_gate_up_TI


@triton.jit
def _swiglu_backward(grad_ptr, gate_up_ptr, grad_gate_up_ptr, HALF: tl.constexpr, BLOCK: tl.constexpr):
    dtype = grad_gate_up_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < HALF
    grad = tl.load(grad_ptr + row * HALF + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_up_ptr + row * 2 * HALF + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * HALF + HALF + at, mask=inside, other=0.0).to(tl.float32)
    open_by = 1.0 / (1.0 + tl.exp(-gate))
    grad_gate = grad * up * open_by * (1.0 + gate * (1.0 - open_by))
    tl.store(grad_gate_up_ptr + row * 2 * HALF + at, grad_gate.to(dtype), mask=inside)
    tl.store(grad_gate_up_ptr + row * 2 * HALF + HALF + at, (grad * gate * open_by).to(dtype), mask=inside)
