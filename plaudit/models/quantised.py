"""A frozen base in 8 or 4 bits, for LoRA (QLoRA, Dettmers et al. 2023) of models that do not fit otherwise.

A matrix is divided into blocks of 64 elements, in the order in which they lie in memory. A block has a scale s in fp32:

    8 bits    w ≈ c · s           c = round(w / s), from −127 to 127      s = max |w| / 127
    4 bits    w ≈ level[c] · s    c: the nearest of NF4's 16 levels       s = max |w|

so a weight takes 1.0625 or 0.5625 bytes. A product is computed with the dequantised matrix, in the model's dtype: it is made in
scratch memory, which all matrices of a model share, and not kept, so a backward pass makes it again (the native engine
keeps a copy while it samples, if there is room). On a GPU one kernel makes it,
with its adapter's update (models/kernels/merging.py), elsewhere torch does.

These few lines rather than a library: bitsandbytes, with which they agree bit for bit, is compiled for each platform.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding, pad

from plaudit.models.products import product, summed_product

Bits = Literal[4, 8]
BLOCK = 64
BYTES_PER_WEIGHT = {8: 1 + 4 / BLOCK, 4: 0.5 + 4 / BLOCK}
ELEMENTS_AT_ONCE = {"cpu": 1 << 20, "cuda": 1 << 22}
"""Elements that torch merges, quantises or dequantises at once, to bound the memory for fp32 copies; on a CPU about as many as fit
in its caches."""
# Quantiles of a normal distribution, scaled to −1 … 1, with an exact 0; as published with QLoRA, and as bitsandbytes has them.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


@torch.no_grad()
def quantise(weight: Tensor, bits: Bits) -> tuple[Tensor, Tensor]:
    """Codes (4 bits: two in a byte, the first in the upper half) and scales, by block. The same bits on every device."""
    flat = weight.detach().flatten()
    blocks = -(-len(flat) // BLOCK)
    codes = torch.empty(
        blocks, BLOCK if bits == 8 else BLOCK // 2, dtype=torch.int8 if bits == 8 else torch.uint8, device=flat.device
    )
    scales = torch.empty(blocks, device=flat.device)
    for some in _chunks(blocks, flat.device):
        part = flat[some.start * BLOCK : some.stop * BLOCK].float()
        part = pad(part, (0, -len(part) % BLOCK)).view(-1, BLOCK)
        largest = part.abs().amax(1)
        # A tensor: torch multiplies by the reciprocal of a number on a GPU, which is another number than the quotient.
        scales[some] = largest / largest.new_tensor(127.0) if bits == 8 else largest
        scaled = part / scales[some].where(largest > 0, 1.0)[:, None]
        codes[some] = scaled.round().to(torch.int8) if bits == 8 else _packed(scaled)
    return codes, scales


def _packed(scaled: Tensor) -> Tensor:
    levels = torch.tensor(NF4, device=scaled.device)
    nearest = torch.bucketize(scaled, (levels[1:] + levels[:-1]) / 2).to(torch.uint8)
    return nearest[:, 0::2] << 4 | nearest[:, 1::2]


def kernels_for(device: torch.device) -> Any | None:
    """Kernels that dequantise and merge; None where torch does."""
    if device.type == "cuda":
        from plaudit.models import kernels

        return kernels
    return None


@torch.no_grad()
def dequantise_into(out: Tensor, codes: Tensor, scales: Tensor) -> None:
    """`out`: contiguous, of the matrix's shape."""
    kernels = kernels_for(out.device)
    if kernels is not None:
        kernels.dequantise(out, codes, scales, nf4_levels(out.device))
        return
    flat = out.view(-1)
    for some in _chunks(len(codes), out.device):
        part = codes[some]
        exact = part.float() if part.dtype == torch.int8 else embedding(part.int(), _pairs(out.device)).flatten(1)
        there = flat[some.start * BLOCK : some.stop * BLOCK]
        there.copy_(exact.mul_(scales[some, None]).view(-1)[: len(there)])


@cache
def nf4_levels(device: torch.device) -> Tensor:
    """Kept, as a CUDA graph cannot copy them to the device."""
    with torch.inference_mode(False):
        return torch.tensor(NF4, device=device)


@cache
def _pairs(device: torch.device) -> Tensor:
    """The two levels of each byte [256, 2]."""
    with torch.inference_mode(False):
        levels = torch.tensor(NF4)
        return torch.stack([levels.repeat_interleave(16), levels.repeat(16)], 1).to(device)


def _chunks(blocks: int, device: torch.device) -> list[slice]:
    size = ELEMENTS_AT_ONCE.get(device.type, 1 << 22) // BLOCK
    return [slice(at, min(at + size, blocks)) for at in range(0, blocks, size)]


class Scratch:
    """Memory for one matrix at a time. It is allocated once, as large as the largest one, so that CUDA graphs find it again."""

    def __init__(self):
        self._elements = 0
        self._memory: Tensor | None = None

    def reserve(self, elements: int) -> None:
        if elements > self._elements:
            self._elements, self._memory = elements, None

    def matrix(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self._memory is None or self._memory.dtype != dtype or self._memory.device != device:
            self._memory = None  # free the old one first
            with torch.inference_mode(False):  # training uses it too
                self._memory = torch.empty(self._elements, dtype=dtype, device=device)
        return self._memory[: rows * columns].view(rows, columns)

    def free(self) -> None:
        """Until it is needed again. Not while CUDA graphs refer to it."""
        self._memory = None


class QuantisedLinear(nn.Linear):
    """A linear layer that is never trained."""

    codes: Tensor
    scales: Tensor

    def __init__(self, linear: nn.Linear, bits: Bits, scratch: Scratch, device: torch.device):
        nn.Module.__init__(self)  # nn.Linear's would create a weight
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self.bits, self.dtype, self.scratch = bits, linear.weight.dtype, scratch
        codes, scales = quantise(linear.weight.to(device), bits)
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)
        scratch.reserve(self.in_features * self.out_features)

    @property
    def weight(self) -> Tensor:  # pyright: ignore (of nn.Linear it is a parameter)
        """Dequantised, in memory of its own."""
        out_OI = torch.empty(self.out_features, self.in_features, dtype=self.dtype, device=self.codes.device)
        self.dequantise_into(out_OI)
        return out_OI

    def dequantise_into(self, out_OI: Tensor) -> None:
        dequantise_into(out_OI, self.codes, self.scales)

    def memory_OI(self) -> Tensor:
        """Where the matrix will be."""
        return self.scratch.matrix(self.out_features, self.in_features, self.dtype, self.codes.device)

    def in_scratch(self) -> Tensor:
        out_OI = self.memory_OI()
        self.dequantise_into(out_OI)
        return out_OI

    def forward(self, input: Tensor) -> Tensor:
        out_TO = FrozenProduct.apply(input.flatten(0, -2), self.in_scratch, self.bias, False)
        return out_TO.view(*input.shape[:-1], -1)  # pyright: ignore


class FrozenProduct(torch.autograd.Function):
    """x Wᵀ + b with a matrix that is made twice, for the forward pass and for the backward pass, and kept by neither."""

    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weight: Callable[[], Tensor], bias_O: Tensor | None, may_split: bool) -> Tensor:
        ctx.weight = weight
        return (summed_product if may_split else product)(x_TI, weight(), bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TO: Tensor):  # pyright: ignore
        return grad_TO @ ctx.weight() if ctx.needs_input_grad[0] else None, None, None, None


def quantise_linears(layer: nn.Module, bits: Bits, scratch: Scratch, device: torch.device) -> None:
    """Replace the layer's linear modules, one after the other: only one of them is on the device as a whole."""
    found = [(name, module) for name, module in layer.named_modules() if type(module) is nn.Linear]
    for name, module in found:
        owner, _, leaf = name.rpartition(".")
        setattr(layer.get_submodule(owner), leaf, QuantisedLinear(module, bits, scratch, device))


@torch.no_grad()
def round_linears(layer: nn.Module, bits: Bits) -> None:
    """The layer's linear modules as they are after quantising and dequantising, and not quantised."""
    for module in layer.modules():
        if type(module) is nn.Linear:
            dequantise_into(module.weight, *quantise(module.weight, bits))


def free_scratch(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, QuantisedLinear):
            module.scratch.free()


def is_quantised(model: nn.Module) -> bool:
    return any(isinstance(module, QuantisedLinear) for module in model.modules())
