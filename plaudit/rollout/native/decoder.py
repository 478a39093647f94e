"""A model's layers, run for the engine.

`FusedDecoder` computes what the Llama, Mistral, Qwen2 and Qwen3 modules of transformers compute, from their own weights, in fewer
and larger steps: one product for queries, keys and values, one for gate and up, and the little work between products in one
operation each. To be multiplied at once, weights have to lie side by side: a module's parameters become views of one tensor, which
they stay for training, saving and everything else. There is no second copy.

`ModuleDecoder` runs any other model that goes through transformers' attention interface (and any with adapters) as it is.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from plaudit.models.residual import is_known, is_precise
from plaudit.rollout.native.attention import DecodeStep, ReadStep, WholeStep
from plaudit.rollout.native.cache import Heads, Rotation, next_power_of_2
from plaudit.rollout.native.packed import packed

ALIGNED = 8  # numbers that fast products read at once
MOST_POSITIONS = 1 << 17  # that rotations are computed for before anyone needs them


def addresses(model: PreTrainedModel) -> list[tuple[int, torch.dtype]]:
    """Where the weights lie."""
    return [(parameter.data_ptr(), parameter.dtype) for parameter in model.parameters()]


class ModuleDecoder:
    def __init__(self, model: PreTrainedModel):
        self.model = model
        self._at: list[tuple[int, torch.dtype]] = []

    def refresh(self, longest: int) -> bool:
        before, self._at = self._at, addresses(self.model)
        return self._at != before

    def pack(self) -> None:
        """Adapters and layers we do not know stay as they are."""

    def unpack(self) -> None:
        pass

    def hidden(self, step: ReadStep | DecodeStep) -> Tensor:
        arguments = {"input_ids": step.tokens_T[None], "position_ids": step.positions_T.clamp(min=0)[None], "kv": step}
        return self.model.get_decoder()(**arguments, use_cache=False).last_hidden_state[0]  # pyright: ignore


class _Fused:
    """Linear layers over the same input, side by side."""

    def __init__(self, parts: list[nn.Linear]):
        self.parts = parts
        self.weight = self._together([part.weight for part in parts])
        self.bias = None if parts[0].bias is None else self._together([part.bias for part in parts])  # pyright: ignore
        self.packed: Callable[[Tensor], Tensor] | None = None

    @staticmethod
    def _together(parameters: list[Tensor]) -> Tensor:
        first, rows = parameters[0].detach(), sum(len(p) for p in parameters)
        if len(parameters) == 1:
            return first
        if _side_by_side(parameters):  # another engine has done it
            return first.as_strided((rows, *first.shape[1:]), first.stride())
        with torch.inference_mode(False):  # training goes on with this tensor
            whole = torch.cat([parameter.detach() for parameter in parameters])
        for parameter, view in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):
            parameter.data = view
        return whole

    def __call__(self, x_TD: Tensor) -> Tensor:
        return linear(x_TD, self.weight, self.bias) if self.packed is None else self.packed(x_TD)

    def in_parts(self, x_TI: Tensor, parts: int) -> Tensor:
        """Products over parts of the inner dimension, fp32 [parts, T, D], for whoever adds them up anyway; or the whole, [T, D]."""
        half = x_TI.is_cuda and x_TI.element_size() == 2
        if parts == 1 or not half or self.bias is not None or x_TI.shape[1] % (parts * ALIGNED):
            return self(x_TI)
        x_PTI = x_TI.unflatten(1, (parts, -1)).transpose(0, 1)
        weight_PID = self.weight.unflatten(1, (parts, -1)).permute(1, 2, 0)
        return torch.bmm(x_PTI, weight_PID, out_dtype=torch.float32)


def _side_by_side(parameters: list[Tensor]) -> bool:
    at = parameters[0].data_ptr()
    for parameter in parameters:
        same = parameter.untyped_storage().data_ptr() == parameters[0].untyped_storage().data_ptr()
        if not same or parameter.data_ptr() != at or not parameter.is_contiguous():
            return False
        at += parameter.numel() * parameter.element_size()
    return True


class _Layer:
    def __init__(self, layer: Any, eps: float):
        attention, mlp = layer.self_attn, layer.mlp
        self.qkv = _Fused([attention.q_proj, attention.k_proj, attention.v_proj])
        self.out = _Fused([attention.o_proj])
        self.gate_up = _Fused([mlp.gate_proj, mlp.up_proj])
        self.down = _Fused([mlp.down_proj])
        self.norms = (layer.input_layernorm.weight, layer.post_attention_layernorm.weight)
        self.head_norms = (attention.q_norm.weight, attention.k_norm.weight) if hasattr(attention, "q_norm") else (None, None)
        self.scale, self.eps = attention.scaling, eps
        # Qwen's layers know it, Mistral's ask the config; Llama's have none, whatever the config says.
        asks = type(attention).__name__ == "MistralAttention"
        self.window: int | None = attention.config.sliding_window if asks else getattr(attention, "sliding_window", None)

    @property
    def products(self) -> tuple[_Fused, ...]:
        return (self.qkv, self.out, self.gate_up, self.down)


class FusedDecoder:
    def __init__(self, model: PreTrainedModel, heads: Heads):
        self.model, self.heads = model, heads
        self.layers: list[_Layer] = []
        self.rotation: tuple[Tensor, Tensor] | None = None
        self._at: list[tuple[int, torch.dtype]] = []

    @staticmethod
    def fits(model: PreTrainedModel) -> bool:
        """The modules are those that we know, and nothing has been put in their place."""
        if not is_known(model) or model.config.hidden_act != "silu":
            return False
        return all(type(m) is nn.Linear for m in model.get_decoder().modules() if hasattr(m, "in_features"))

    def refresh(self, longest: int) -> bool:
        """Before a call: bring the weights together, unless they still are. True if anything lies elsewhere now."""
        moved = self._at != addresses(self.model)
        if moved:
            decoder: Any = self.model.get_decoder()
            self.layers = []  # before there are others
            self.layers = [_Layer(layer, self.model.config.rms_norm_eps) for layer in decoder.layers]
            self.embedding, self.norm = decoder.embed_tokens.weight, decoder.norm.weight
            self._at = addresses(self.model)
        if self.rotation is None or len(self.rotation[0]) < longest or self.rotation[0].dtype != self.model.dtype:
            self.rotation, moved = self._rotation(longest), True
        return moved

    def _rotation(self, longest: int) -> tuple[Tensor, Tensor]:
        """What each position turns by, from the model's own module; for the whole context, so that it need not grow."""
        context = getattr(self.model.config, "max_position_embeddings", None) or next_power_of_2(longest)
        at = torch.arange(max(longest, min(context, MOST_POSITIONS)), device=self.model.device)[None]
        x = torch.empty(1, dtype=self.model.dtype, device=self.model.device)
        cos, sin = self.model.get_decoder().rotary_emb(x, position_ids=at)  # pyright: ignore
        return cos[0].contiguous(), sin[0].contiguous()

    def pack(self) -> None:
        for product in (product for layer in self.layers for product in layer.products):
            product.packed = packed(product.weight, product.bias)

    def unpack(self) -> None:
        for product in (product for layer in self.layers for product in layer.products):
            product.packed = None

    def hidden(self, step: ReadStep | DecodeStep | WholeStep) -> Tensor:
        ops, eps = step.ops, self.layers[0].eps
        assert self.rotation is not None
        x_TD, delta = nn.functional.embedding(step.tokens_T, self.embedding), None
        if is_precise(self.model):
            x_TD = x_TD.float()
        for index, layer in enumerate(self.layers):
            rotation = Rotation(*self.rotation, *layer.head_norms, eps)
            normed_TD, x_TD = ops.add_norm(x_TD, delta, layer.norms[0], eps)
            qkv_TE = layer.qkv(normed_TD)
            if isinstance(step, ReadStep) and layer is self.layers[-1]:
                step.keep(index, qkv_TE, self.heads, rotation)
                return x_TD  # nobody wants to know what comes out of the last layer, only its keys and values
            attended_TE = step.attend_fused(index, qkv_TE, self.heads, rotation, layer.scale, layer.window)
            normed_TD, x_TD = ops.add_norm(x_TD, layer.out(attended_TE), layer.norms[1], eps)
            delta = layer.down.in_parts(ops.swiglu(layer.gate_up(normed_TD)), ops.parts_of_product(*x_TD.shape))
        return ops.add_norm(x_TD, delta, self.norm, eps)[0]
