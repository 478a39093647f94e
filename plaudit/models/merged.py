"""LoRA computed with merged weights: forward and backward passes cost less than those of full training.

    W' = W + s B A           rounded to W's dtype, computed again whenever A or B have changed
    y  = x W'ᵀ               the sampler's product, to the bit
    dx = dy W'
    dB = dyᵀ (x (s A)ᵀ)      small products: A is [rank, in], B is [out, rank]
    dA = (dy (s B))ᵀ x

Updates are far smaller than the spacing of bf16, so rounding to nearest would drop most of them: W is itself a bf16 number, and
W + ΔW would be W until ΔW is half a spacing. Instead, noise that depends on an element's place alone decides whether it is rounded
up or down, with the probability that keeps its mean. An element without an update is left as it is.

W stays next to W' for the reference (the policy without adapters) and to merge again. Adapters remain peft's: trained, saved and
sent to engines as ever. Layers with dropout on adapters, with adapters of another kind or without any take peft's own way.

On a GPU fused layers compute with W'; on a CPU transformers' layers do, module by module.

Of a quantised base (models/quantised.py) neither W nor W' is kept: W' is made of the quantised W, A and B for every product, in
memory that all matrices share, by the same operations in the trainer and in the sampler, which may keep it for a call.

On a GPU a kernel makes W', in one pass over the weights (models/kernels/merging.py); elsewhere torch does.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from plaudit.models.gradient_sums import add_product, sum_of_product
from plaudit.models.products import fuse_parameters, product, summed_product
from plaudit.models.quantised import ELEMENTS_AT_ONCE, FrozenProduct, QuantisedLinear, kernels_for, nf4_levels

PLAIN_LINEARS = (nn.Linear, QuantisedLinear)


class Adapter:
    """A and B of one linear layer."""

    def __init__(self, module: Any, rows: slice, first_rank: int):
        """`rows`: of the product's output. `first_rank`: the ranks of the product's adapters before this one."""
        self.module, self.rows = module, rows
        self.a_RI: nn.Parameter = module.lora_A["default"].weight
        self.b_OR: nn.Parameter = module.lora_B["default"].weight
        self.scale: float = module.scaling["default"]
        self.ranks = slice(first_rank, first_rank + len(self.a_RI))


class MergedProduct(ABC):
    """Linear layers over the same input as one product, with merged weights."""

    def __init__(self, modules: Sequence[nn.Module]):
        bases: list[Any] = [getattr(module, "base_layer", module) for module in modules]
        self.base_layers = bases
        self.adapters: list[Adapter] = []
        self._modules = list(modules)
        at = ranks = 0
        for module, base in zip(modules, bases, strict=True):
            rows = slice(at, at + base.out_features)
            at = rows.stop
            adapter = None
            if base is not module:
                adapter = Adapter(module, rows, ranks)
                self.adapters.append(adapter)
                ranks = adapter.ranks.stop
            module.merged_with = (self, adapter)  # pyright: ignore
        self.shape = (at, bases[0].in_features)
        self.factors: Factors | None = None
        self._merged: list[tuple[int, int]] | None = None

    @property
    def disabled(self) -> bool:
        """Whether adapters are switched off (peft's `disable_adapter`)."""
        return bool(self.adapters) and self.adapters[0].module.disable_adapters

    @property
    def weight_OI(self) -> Tensor:
        return self.weight_of(None)

    @abstractmethod
    def weight_of(self, only: Adapter | None) -> Tensor:
        """W', or the rows of it that this adapter's module computes with."""

    @property
    def bias_O(self) -> Tensor | None:
        return None if self.base_layers[0].bias is None else fuse_parameters([base.bias for base in self.base_layers])

    @torch.no_grad()
    def merge(self) -> None:
        """If anything has changed since the last time. Parameters count the changes made to them."""
        if self._state() == self._merged:
            return
        self._update()
        self._merged = self._state()

    @abstractmethod
    def _update(self) -> None: ...

    def _depends_on(self) -> list[Tensor]:
        return [factor for adapter in self.adapters for factor in (adapter.a_RI, adapter.b_OR)]

    def _state(self) -> list[tuple[int, int]]:
        return [(tensor._version, tensor.data_ptr()) for tensor in self._depends_on()]

    def drop(self) -> None:
        for module in self._modules:
            del module.merged_with

    def __call__(self, x_TI: Tensor, only: Adapter | None = None) -> Tensor:
        """`only`: the part of the output that this adapter's module computes."""
        adapters = self.adapters if only is None else [only]
        factors = [factor for adapter in adapters for factor in (adapter.a_RI, adapter.b_OR)]
        return _MergedProduct.apply(x_TI, self, only, *factors)  # pyright: ignore


class StoredProduct(MergedProduct):
    """W' is kept next to W. At least one of the layers has an adapter."""

    def __init__(self, modules: Sequence[nn.Module], owner: nn.Module, buffer: str):
        """The merged weight becomes a buffer of `owner`, so that it is moved with its weights; it is not saved."""
        super().__init__(modules)
        self._owner, self._buffer = owner, buffer
        base_OI = fuse_parameters([base.weight for base in self.base_layers])
        with torch.inference_mode(False):
            owner.register_buffer(buffer, torch.empty_like(base_OI), persistent=False)

    def weight_of(self, only: Adapter | None) -> Tensor:
        weight_OI: Tensor = self._owner._buffers[self._buffer]  # pyright: ignore
        return weight_OI if only is None else weight_OI[only.rows]

    def _update(self) -> None:
        base = fuse_parameters([one.weight for one in self.base_layers])
        weight_OI, at = self.weight_OI, 0
        for adapter in self.adapters:
            rows = adapter.rows
            weight_OI[at : rows.start].copy_(base[at : rows.start])
            merge_into(weight_OI[rows], base[rows], adapter.a_RI, adapter.b_OR, adapter.scale)
            at = rows.stop
        weight_OI[at:].copy_(base[at:])
        self.factors = Factors.of(self.adapters, weight_OI)

    def _depends_on(self) -> list[Tensor]:
        return [*super()._depends_on(), *(base.weight for base in self.base_layers), self.weight_OI]

    def drop(self) -> None:
        super().drop()
        del self._owner._buffers[self._buffer]


class QuantisedProduct(MergedProduct):
    """W' is made whenever it is needed, in scratch memory, where the next product's replaces it. Layers may be without adapters."""

    base_layers: list[QuantisedLinear]

    def __init__(self, modules: Sequence[nn.Module]):
        super().__init__(modules)
        self._adapter_of: list[Adapter | None] = [module.merged_with[1] for module in modules]  # pyright: ignore
        self._scratch = self.base_layers[0].scratch
        self._scratch.reserve(self.shape[0] * self.shape[1])

    def memory_OI(self) -> Tensor:
        """Where W' will be."""
        like = self.base_layers[0]
        return self._scratch.matrix(*self.shape, like.dtype, like.codes.device)

    def weight_of(self, only: Adapter | None) -> Tensor:
        if only is None:
            return self._build_weight(self._adapter_of)
        base: QuantisedLinear = only.module.base_layer
        weight_OI = base.memory_OI()
        dequantise_merged_into(weight_OI, base, only)
        return weight_OI

    def _without_adapters(self) -> Tensor:
        return self._build_weight([None] * len(self.base_layers))

    def _build_weight(self, adapters: Sequence[Adapter | None]) -> Tensor:
        weight_OI, at = self.memory_OI(), 0
        for base, adapter in zip(self.base_layers, adapters, strict=True):
            dequantise_merged_into(weight_OI[at : at + base.out_features], base, adapter)
            at += base.out_features
        return weight_OI

    def _update(self) -> None:
        self.factors = Factors.of(self.adapters, self.memory_OI()) if self.adapters else None

    def __call__(self, x_TI: Tensor, only: Adapter | None = None) -> Tensor:
        if self.adapters and not self.disabled:
            return super().__call__(x_TI, only)
        return FrozenProduct.apply(x_TI, self._without_adapters, self.bias_O, len(self.base_layers) == 1)  # pyright: ignore


class Factors(NamedTuple):
    """s A and s B of all adapters of a product, as the backward pass computes with them: in the weights' dtype, K the sum of their
    ranks. An adapter has its own rows of A and its own block of B, which is 0 elsewhere; a few large products take less time than
    many small ones."""

    a_KI: Tensor
    b_OK: Tensor

    @classmethod
    def of(cls, adapters: Sequence[Adapter], like_OI: Tensor) -> Self:
        a_KI = torch.cat([adapter.scale * adapter.a_RI for adapter in adapters]).to(like_OI.dtype)
        b_OK = like_OI.new_zeros(len(like_OI), len(a_KI))
        for adapter in adapters:
            b_OK[adapter.rows, adapter.ranks] = (adapter.scale * adapter.b_OR).to(like_OI.dtype)
        return cls(a_KI, b_OK)

    def only(self, adapter: Adapter) -> Self:
        return type(self)(self.a_KI[adapter.ranks], self.b_OK[adapter.rows, adapter.ranks])


class _MergedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, merged: MergedProduct, only: Adapter | None, *factors: Tensor) -> Tensor:
        ctx.save_for_backward(x_TI)
        ctx.merged, ctx.only = merged, only
        weight_OI, bias_O = merged.weight_of(only), merged.bias_O
        if only is not None:
            return product(x_TI, weight_OI, None if bias_O is None else bias_O[only.rows])
        return (summed_product if len(merged.base_layers) == 1 else product)(x_TI, weight_OI, bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TO: Tensor):  # pyright: ignore
        [x_TI] = ctx.saved_tensors
        merged, only = ctx.merged, ctx.only
        assert merged.factors is not None
        a_KI, b_OK = merged.factors if only is None else merged.factors.only(only)
        grad_x_TI = grad_TO @ merged.weight_of(only) if ctx.needs_input_grad[0] else None
        from_a_TK, from_b_TK = x_TI @ a_KI.T, grad_TO @ b_OK
        first = 0 if only is None else only.ranks.start
        adapters = merged.adapters if only is None else [only]
        grads_a = _gradients([adapter.a_RI for adapter in adapters], from_b_TK, x_TI)
        grads: list[Tensor | None] = []
        for adapter, grad_a_RI in zip(adapters, grads_a, strict=True):
            own_TO = grad_TO[:, adapter.rows] if only is None else grad_TO
            ranks = slice(adapter.ranks.start - first, adapter.ranks.stop - first)
            grads += [grad_a_RI, *_gradients([adapter.b_OR], own_TO, from_a_TK[:, ranks])]
        return grad_x_TI, None, None, *grads


def _gradients(factors: Sequence[nn.Parameter], left_TM: Tensor, right_TN: Tensor) -> list[Tensor | None]:
    """leftᵀ right, whose rows are the gradients of these factors, end to end; None for each if it has been added to their sum."""
    added = sum_of_product(factors)
    if added is not None and (sum_MN := added.get(factors)) is not None:
        add_product(sum_MN, *_precise(left_TM, right_TN))
        return [None] * len(factors)
    return [*_in_fp32(left_TM.T, right_TN).split([len(factor) for factor in factors])]


def _in_fp32(x: Tensor, y: Tensor) -> Tensor:
    """x y, not rounded to half precision: it is a sum over all tokens."""
    if x.is_cuda and x.element_size() == 2:
        return torch.mm(x, y, out_dtype=torch.float32)
    x, y = _precise(x, y)
    return x @ y


def _precise(*tensors: Tensor) -> list[Tensor]:
    """In fp32 or finer where half-precision products would be rounded: a GPU can sum them in fp32."""
    return [x if x.is_cuda else x.to(torch.promote_types(x.dtype, torch.float32)) for x in tensors]


# Merging -------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def merge_into(out_OI: Tensor, base_OI: Tensor, a_RI: Tensor, b_OR: Tensor, scale: float) -> None:
    """out = base + scale · B A, rounded with the noise of each element's place. `out` may be the base itself."""
    kernels = kernels_for(out_OI.device)
    if kernels is not None:
        kernels.merge(out_OI, base_OI, a_RI, b_OR, scale)
        return
    rows = max(1, ELEMENTS_AT_ONCE.get(base_OI.device.type, 1 << 22) // base_OI.shape[1])
    for at in range(0, len(base_OI), rows):
        some = slice(at, at + rows)
        exact = torch.addmm(base_OI[some].float(), b_OR[some].float(), a_RI.float(), alpha=scale)
        out_OI[some].copy_(_rounded(exact, at, out_OI.dtype) if out_OI.element_size() == 2 else exact)


@torch.no_grad()
def dequantise_merged_into(out_OI: Tensor, base: QuantisedLinear, adapter: Adapter | None) -> None:
    """The dequantised base, with the adapter merged into it if there is one."""
    kernels = kernels_for(out_OI.device)
    if adapter is not None and kernels is not None:
        levels = nf4_levels(out_OI.device)
        kernels.dequantise_merged(out_OI, base.codes, base.scales, levels, adapter.a_RI, adapter.b_OR, adapter.scale)
        return
    base.dequantise_into(out_OI)
    if adapter is not None:
        merge_into(out_OI, out_OI, adapter.a_RI, adapter.b_OR, adapter.scale)


def _rounded(exact_OI: Tensor, first_row: int, dtype: torch.dtype) -> Tensor:
    """To bf16: the upper half of an fp32 number's bits, after noise of up to one of its units was added to the lower half."""
    assert dtype == torch.bfloat16
    rows, columns = exact_OI.shape
    row = torch.arange(first_row, first_row + rows, device=exact_OI.device, dtype=torch.int32)
    column = torch.arange(columns, device=exact_OI.device, dtype=torch.int32)
    noise = _mix_(row[:, None] * -1640531527 + column).bitwise_and_(0xFFFF)
    return noise.add_(exact_OI.view(torch.int32)).bitwise_and_(-0x10000).view(torch.float32).to(dtype)


def _mix_(x: Tensor) -> Tensor:
    """A well-mixed 32-bit number for each 32-bit number, in place."""
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(0x7FEB352D)
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(-2073319029)
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


# Models --------------------------------------------------------------------------------------------------------------


def use_merged(model: PreTrainedModel, groups_of: Callable[[Any], Sequence[Sequence[Any]]]) -> bool:
    """Compute the model's adapted layers with merged weights. `groups_of` a layer: its linear modules by shared input. False, and
    nothing changes, if some adapter is of a kind that this cannot compute."""
    decoder: Any = model.get_decoder()
    groups = [(layer, i, modules) for layer in decoder.layers for i, modules in enumerate(groups_of(layer))]
    linears = [module for _, _, modules in groups for module in modules]
    adapted_elsewhere = len(_adapted(decoder.modules())) > len(_adapted(linears))
    if adapted_elsewhere or not all(map(_is_plain, linears)):
        return False
    products = []
    for layer, i, modules in groups:
        if isinstance(getattr(modules[0], "base_layer", modules[0]), QuantisedLinear):
            products.append(QuantisedProduct(modules))
        elif _adapted(modules):
            products.append(StoredProduct(modules, layer, f"merged_{i}"))
    decoder.merged_products = products
    decoder.register_forward_pre_hook(lambda module, _: merge_all(module))
    return True


def _adapted(modules: Iterable[nn.Module]) -> list[nn.Module]:
    return [module for module in modules if hasattr(module, "base_layer")]


def use_merged_modules(model: PreTrainedModel) -> None:
    """Let the model's own layers compute with the merged weights, outside of fused layers."""
    for adapter in (adapter for merged in _merged_products(model) for adapter in merged.adapters):
        adapter.module.__class__ = _merged_linear()


@cache
def _merged_linear() -> type:
    from peft.tuners.lora import Linear

    class MergedLinear(Linear):
        """One product, while the adapter is merged and enabled; else peft's."""

        merged_with: tuple[MergedProduct, Adapter]

        def forward(self, x: Tensor, *arguments: Any, **settings: Any) -> Tensor:
            if not hasattr(self, "merged_with") or self.disable_adapters:
                return super().forward(x, *arguments, **settings)
            merged, adapter = self.merged_with
            return merged(x.flatten(0, -2), adapter).view(*x.shape[:-1], -1)

    return MergedLinear


def _is_plain(module: Any) -> bool:
    """A linear layer, or peft's with one adapter and nothing else."""
    from peft.tuners.lora import Linear

    if type(module) in PLAIN_LINEARS:
        return True
    if type(module) is not Linear or type(module.base_layer) not in PLAIN_LINEARS:
        return False
    dropout = module.lora_dropout["default"] if "default" in module.lora_dropout else nn.Identity()
    has_dora = bool(getattr(module, "use_dora", {}).get("default"))
    return (
        list(module.lora_A) == ["default"]
        and isinstance(dropout, nn.Identity)
        and not has_dora
        and module.lora_B["default"].bias is None
    )


def merge_all(model: PreTrainedModel) -> None:
    """After adapters may have changed."""
    for merged in _merged_products(model):
        merged.merge()


def has_merged(model: PreTrainedModel) -> bool:
    return bool(_merged_products(model))


def _merged_products(model: PreTrainedModel) -> list[MergedProduct]:
    return getattr(model.get_decoder(), "merged_products", [])


def merged_weight_of(module: Any) -> Tensor | None:
    """W' of a module with an adapter, as it is computed with."""
    if not hasattr(module, "merged_with"):
        return None
    merged, adapter = module.merged_with
    merged.merge()
    weight_OI = merged.weight_of(adapter).detach()
    return weight_OI.clone() if isinstance(merged, QuantisedProduct) else weight_OI


def drop_merged(model: PreTrainedModel) -> None:
    """Compute adapters in peft's way again."""
    for merged in _merged_products(model):
        merged.drop()
    model.get_decoder().merged_products = []  # pyright: ignore


def merged_product_of(modules: Sequence[nn.Module]) -> MergedProduct | None:
    """What computes these modules, which share an input; None if they have no adapters, or if peft computes them."""
    return next((module.merged_with[0] for module in modules if hasattr(module, "merged_with")), None)  # pyright: ignore
