"""Decoder layers for training on a GPU, built from the sampler's kernels and matrix products, in the same order.

Every product, norm and sum of a token is computed exactly as in the sampler, so both give the same log-probs to the last bits even
in bf16, whatever else is in the batch (provided the BLAS library accumulates in one order for any number of rows: see
models/products.py). It is also less work: queries, keys and values are one product, as are gate and up, and everything between two
products is one fused operation that saves less for the backward pass.

Layers remain transformers' own modules with their own weights and forwards; only packed batches take the path here. LoRA takes it
with merged weights, with which it is computed on a CPU too (models/merged.py).
"""

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from plaudit.errors import RecipeError
from plaudit.models.attention import attend_packed, window_of
from plaudit.models.gradient_sums import ProductSum, add_or_return, add_product, sum_of_product
from plaudit.models.heads import Heads, Rotation
from plaudit.models.layer_blocks import own_layers
from plaudit.models.liger import use_liger
from plaudit.models.merged import (
    PLAIN_LINEARS,
    QuantisedProduct,
    has_merged,
    merged_product_of,
    use_merged,
    use_merged_modules,
)
from plaudit.models.products import fused_view, fused_weight_and_bias, product, summed_product
from plaudit.models.quantisable import find_obstacle, only_linear_layers, refusal
from plaudit.models.quantised import Scratch, is_quantised, quantise_linears
from plaudit.models.residual import has_fp32_residual, is_supported_family, keep_residual_fp32
from plaudit.recipe import LoraSettings


def prepare_layers(model: PreTrainedModel, *, liger: bool = False) -> None:
    """Switch the model to plaudit's training layers. Weights are unchanged, in memory and when saved. Layers are fused on a GPU in
    half precision if their family is supported, attention has no dropout and the recipe does not enable Liger's kernels."""
    keep_residual_fp32(model)
    if liger:
        use_liger(model, model.device)
    elif model.device.type == "cuda" and can_train_fused(model) and has_fp32_residual(model):
        fuse_layers(model)


def fuse_layers(model: PreTrainedModel) -> None:
    decoder: Any = model.get_decoder()
    if isinstance(decoder.layers[0], _FusedLayer):  # by `load_model`, on a GPU
        return
    for layer in decoder.layers:
        for modules in linears_by_input(layer):
            if all(type(module) is nn.Linear for module in modules):
                fused_weight_and_bias(modules)
        layer.__class__ = _with(_FusedLayer, type(layer))
    decoder.norm.__class__ = _with(_FusedNorm, type(decoder.norm))


def merge_adapters(model: PreTrainedModel, *, section: str = "model") -> None:
    """Compute a model's adapters with merged weights: in its fused layers, or on a CPU in those of a family that could be fused.
    A quantised base has no other way. `section`: of the recipe, which describes the model."""
    if has_merged(model) or not has_known_layers(model):
        return
    fused, quantised = all(isinstance(layer, _FusedLayer) for layer in model.get_decoder().layers), is_quantised(model)  # pyright: ignore
    if fused or quantised or model.device.type == "cpu":
        merges = use_merged(model, linears_by_input)
        if merges and not fused:
            use_merged_modules(model)
        if quantised and not merges:
            raise RecipeError(f"{model.name_or_path}: {only_linear_layers(section)}")


def quantise_base(model: PreTrainedModel, lora: LoraSettings | None, device: torch.device, *, section: str = "model") -> None:
    """As the recipe's `section` says: the linear layers of a model that is in host memory, which get to their device one by one."""
    if lora is None or lora.base_bits is None:
        return
    if not has_known_layers(model):
        own_code = type(model).__module__.split(".")[0] != "transformers"
        obstacle = find_obstacle(model.config.to_dict(), own_code=own_code) or f"this one is a {type(model).__name__}"
        raise RecipeError(refusal(str(model.name_or_path), section, obstacle))
    scratch = Scratch()
    for layer in own_layers(model.get_decoder()):
        quantise_linears(layer, lora.base_bits, scratch, device)


def can_fuse(model: PreTrainedModel) -> bool:
    """Whether all modules are of a supported kind and none has been replaced."""
    if not has_known_layers(model):
        return False
    if has_merged(model):
        return True
    return all(type(m) in PLAIN_LINEARS for m in model.get_decoder().modules() if hasattr(m, "in_features"))


def has_known_layers(model: PreTrainedModel) -> bool:
    """Those that fused layers, merged weights and a quantised base are written for."""
    return is_supported_family(model) and model.config.hidden_act == "silu"


def can_train_fused(model: PreTrainedModel) -> bool:
    """As `can_fuse`, and without attention dropout, which no kernel supports."""
    return can_fuse(model) and not model.config.attention_dropout


@cache
def _with(ours: type, theirs: type) -> type:
    return type(theirs.__name__, (ours, theirs), {})


def linears_by_input(layer: Any) -> tuple[tuple[nn.Linear, ...], ...]:
    """Linear layers grouped by shared input: (q, k, v), (o,), (gate, up), (down,)."""
    attention, mlp = layer.self_attn, layer.mlp
    return (
        (attention.q_proj, attention.k_proj, attention.v_proj),
        (attention.o_proj,),
        (mlp.gate_proj, mlp.up_proj),
        (mlp.down_proj,),
    )


def _kernels_run_on(x: Tensor) -> bool:
    """The model may have been moved off the GPU since its layers were fused."""
    return x.is_cuda


class _FusedNorm(nn.Module):
    def forward(self, hidden_states: Tensor) -> Tensor:
        if not _kernels_run_on(hidden_states):
            return super().forward(hidden_states)
        norm: Any = self
        x_TD = hidden_states.flatten(0, -2).contiguous()
        _, normed_TD = _Norm.apply(x_TD, norm.weight, norm.variance_epsilon)  # pyright: ignore
        return normed_TD.view(hidden_states.shape)


class _FusedLayer(nn.Module):
    """Reads the weights of the layer's modules without calling them, so hooks on them do not run."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        layer: Any = self
        (q, k, v), (o,), (gate, up), (down,) = linears = linears_by_input(layer)
        attention = layer.self_attn
        packed = kwargs.get("cu_seq_lens_q") is not None and kwargs.get("kv") is None and _kernels_run_on(hidden_states)
        if not packed or not all(_is_fused(modules) for modules in linears):
            return super().forward(hidden_states, **kwargs)
        first, second = layer.input_layernorm, layer.post_attention_layernorm
        x_TD, size = hidden_states[0], attention.head_dim
        heads = Heads(q.out_features // size, k.out_features // size, size)
        x_TD, normed_TD = _Norm.apply(x_TD, first.weight, first.variance_epsilon)  # pyright: ignore
        qkv_TE = _product(normed_TD, q, k, v)
        if hasattr(attention, "q_norm"):
            norms = attention.q_norm.weight, attention.k_norm.weight
            qkv_TE = _NormHeads.apply(qkv_TE, *norms, heads, attention.q_norm.variance_epsilon)
        qkv_TE = _Rotate.apply(qkv_TE, *(table[0] for table in kwargs["position_embeddings"]), heads)
        q_THD, k_TKD, v_TKD = qkv_TE.view(len(x_TD), -1, size).split([heads.query, heads.kv, heads.kv], 1)  # pyright: ignore
        attended_THD = attend_packed(
            q_THD, k_TKD, v_TKD, kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"], kwargs["max_length_q"], kwargs["max_length_k"],
            kwargs.get("shared_prompts"), scale=attention.scaling, window=window_of(attention),
        )  # fmt: skip
        out_TD = _product(attended_THD.flatten(1), o)
        normed_TD, x_TD = _AddNorm.apply(x_TD, out_TD, second.weight, second.variance_epsilon)  # pyright: ignore
        gated_TI = _SwiGLU.apply(_product(normed_TD, gate, up))
        return _Add.apply(x_TD, _product(gated_TI, down))  # pyright: ignore


def _is_fused(modules: Sequence[nn.Module]) -> bool:
    return merged_product_of(modules) is not None or all(type(module) is nn.Linear for module in modules)


def _product(x_TD: Tensor, *modules: nn.Linear) -> Tensor:
    merged = merged_product_of(modules)
    if merged is not None:
        if not merged.disabled or isinstance(merged, QuantisedProduct):
            return merged(x_TD)
        modules = tuple(merged.base_layers)
    biases = [] if modules[0].bias is None else [module.bias for module in modules]
    return _Product.apply(x_TD, len(modules), *(module.weight for module in modules), *biases)  # pyright: ignore


class _Product(torch.autograd.Function):
    """x (W₁ W₂ …)ᵀ + (b₁ b₂ …): one product over adjacent weights; a single weight uses split-K wherever the sampler does."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, count: int, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(x_TD, *parameters)
        weights, biases = parameters[:count], parameters[count:]
        ctx.count, ctx.sum, ctx.sum_of_biases = count, sum_of_product(weights), sum_of_product(biases) if biases else None
        whole, bias = fused_view(weights), fused_view(biases) if biases else None
        if count == 1:
            return summed_product(x_TD, weights[0], biases[0] if biases else None)
        # Parameters that have been moved, or gathered from shards, are no longer adjacent; one product keeps the sampler's order.
        whole = torch.cat(weights) if whole is None else whole
        return product(x_TD, whole, torch.cat(biases) if biases and bias is None else bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TE: Tensor):  # pyright: ignore
        x_TD, *parameters = ctx.saved_tensors
        weights, biases, needed = parameters[: ctx.count], parameters[ctx.count :], ctx.needs_input_grad
        lengths = [len(weight) for weight in weights]
        grad_x_TD = None
        if needed[0]:
            whole = fused_view(weights)
            grad_x_TD = grad_TE @ (torch.cat(weights) if whole is None else whole)
        grads: list[Tensor | None] = [None] * len(parameters)
        if any(needed[2 : 2 + ctx.count]):
            sum_ED = None if ctx.sum is None else ctx.sum.get(weights)
            if sum_ED is None:
                grads[: ctx.count] = (grad_TE.T @ x_TD).split(lengths)
            else:
                add_product(sum_ED, grad_TE, x_TD)
        if biases and any(needed[2 + ctx.count :]):
            # A product, which is three times as fast as a sum over the rows.
            ones = _ones(len(grad_TE), grad_TE.dtype, grad_TE.device)
            in_half = grad_TE.is_cuda and grad_TE.element_size() == 2
            sums_1E = torch.mm(ones, grad_TE, out_dtype=torch.float32) if in_half else ones @ grad_TE
            grads[ctx.count :] = add_or_return(ctx.sum_of_biases, biases, sums_1E[0])
        return grad_x_TD, None, *grads


class _Norm(torch.autograd.Function):
    """x and its norm: the gradient of x's other uses is added in the same kernel."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        from plaudit.models.kernels import add_norm

        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x_TD, weight_D)
        ctx.eps, ctx.sum = eps, sum_of_product([weight_D])
        return x_TD, add_norm(x_TD, None, weight_D, eps)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_x_TD: Tensor | None, grad_normed_TD: Tensor | None):  # pyright: ignore
        if grad_normed_TD is None:  # only x has been used
            return grad_x_TD, None, None
        x_TD, weight_D = ctx.saved_tensors
        grad_TD, grad_weight_D, _ = _norm_gradients(
            grad_normed_TD, x_TD, weight_D, ctx.eps, grad_x_TD, ctx.sum, trains=ctx.needs_input_grad[1]
        )
        return grad_TD.to(x_TD.dtype), grad_weight_D, None


def _norm_gradients(
    grad_normed_TD: Tensor, x_TD: Tensor, weight_D: Tensor, eps: float, grad_x_TD: Tensor | None, total: ProductSum | None, *,
    trains: bool, also_in: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """As `norm_backward`, with the weight's gradient added to its sum, if it has one."""
    from plaudit.models.kernels import norm_backward

    grad_x_TD = None if grad_x_TD is None else grad_x_TD.contiguous()
    found = norm_backward(grad_normed_TD.contiguous(), x_TD, weight_D, eps, grad_x_TD, also_in=also_in, trains_weight=trains)
    grad_TD, grad_weight_D, rounded_TD = found
    return grad_TD, None if grad_weight_D is None else add_or_return(total, [weight_D], grad_weight_D)[0], rounded_TD


class _AddNorm(torch.autograd.Function):
    """Norm of x + delta, and the sum itself."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, delta_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        from plaudit.models.kernels import add_norm

        normed_TD, summed_TD = add_norm(x_TD, delta_TD, weight_D, eps)
        ctx.save_for_backward(summed_TD, weight_D)
        ctx.eps, ctx.dtypes, ctx.sum = eps, (x_TD.dtype, delta_TD.dtype), sum_of_product([weight_D])
        return normed_TD, summed_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_normed_TD: Tensor, grad_summed_TD: Tensor):  # pyright: ignore
        summed_TD, weight_D = ctx.saved_tensors
        grad_TD, grad_weight, grad_delta_TD = _norm_gradients(
            grad_normed_TD, summed_TD, weight_D, ctx.eps, grad_summed_TD, ctx.sum, trains=ctx.needs_input_grad[2],
            also_in=ctx.dtypes[1],
        )  # fmt: skip
        return grad_TD.to(ctx.dtypes[0]), grad_delta_TD, grad_weight, None


class _Add(torch.autograd.Function):
    """x + delta, as [1, T, D] that is no view: FSDP hooks into its gradient."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, delta_TD: Tensor) -> Tensor:
        from plaudit.models.kernels import add

        ctx.dtypes = x_TD.dtype, delta_TD.dtype
        return add(x_TD[None], delta_TD.contiguous())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_1TD: Tensor):  # pyright: ignore
        return tuple(grad_1TD[0].to(dtype) for dtype in ctx.dtypes)


class _NormHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv_TE: Tensor, query_norm: Tensor, key_norm: Tensor, heads: Heads, eps: float) -> Tensor:
        from plaudit.models.kernels import norm_heads

        normed_TE = qkv_TE.clone()
        norm_heads(normed_TE, heads, query_norm, key_norm, eps)
        ctx.save_for_backward(qkv_TE, query_norm, key_norm)
        ctx.heads, ctx.eps = heads, eps
        ctx.sums = [sum_of_product([weight]) for weight in (query_norm, key_norm)]
        return normed_TE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TE: Tensor):  # pyright: ignore
        qkv_TE, *weights = ctx.saved_tensors
        heads, size, grads_of_weights = ctx.heads, ctx.heads.size, []
        grad_TE, at = grad_TE.clone(), 0
        widths = heads.query * size, heads.kv * size
        for width, weight, total, trains in zip(widths, weights, ctx.sums, ctx.needs_input_grad[1:3], strict=True):
            part = slice(at, at + width)
            rows = grad_TE[:, part].reshape(-1, size), qkv_TE[:, part].reshape(-1, size)
            grad, grad_weight, _ = _norm_gradients(*rows, weight, ctx.eps, None, total, trains=trains)
            grad_TE[:, part] = grad.view(len(grad_TE), width)
            grads_of_weights.append(grad_weight)
            at += width
        return grad_TE, *grads_of_weights, None, None


class _Rotate(torch.autograd.Function):
    """In place, unless it is a view. The backward pass rotates by the negative angle (both halves of a head rotate by the same
    angles)."""

    @staticmethod
    def forward(ctx: Any, qkv_TE: Tensor, cos_TD: Tensor, sin_TD: Tensor, heads: Heads) -> Tensor:
        ctx.save_for_backward(cos_TD, sin_TD)
        ctx.heads = heads
        if qkv_TE._is_view():  # of a product with padding; autograd does not let a view be changed that a function has returned
            qkv_TE = qkv_TE.clone(memory_format=torch.contiguous_format)
        else:
            ctx.mark_dirty(qkv_TE)
        return _rotated(qkv_TE, cos_TD, sin_TD, heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TE: Tensor):  # pyright: ignore
        cos_TD, sin_TD = ctx.saved_tensors
        # Nobody else's: it has been put together from those of queries, keys and values.
        return _rotated(grad_TE.contiguous(), cos_TD, -sin_TD, ctx.heads), None, None, None


def _rotated(qkv_TE: Tensor, cos_TD: Tensor, sin_TD: Tensor, heads: Heads) -> Tensor:
    from plaudit.models.kernels import rotate

    rotate(qkv_TE, heads, Rotation(cos_TD.contiguous(), sin_TD.contiguous()), _rows(len(qkv_TE), qkv_TE.device))
    return qkv_TE


@lru_cache(maxsize=4)
def _ones(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.ones(1, count, dtype=dtype, device=device)


@lru_cache(maxsize=4)
def _rows(count: int, device: torch.device) -> Tensor:
    """Of tables that have a row for each token."""
    return torch.arange(count, device=device)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up_TI: Tensor) -> Tensor:
        from plaudit.models.kernels import swiglu

        ctx.save_for_backward(gate_up_TI)
        return swiglu(gate_up_TI)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TI: Tensor):  # pyright: ignore
        from plaudit.models.kernels import swiglu_backward

        return swiglu_backward(grad_TI.contiguous(), *ctx.saved_tensors)
