"""A model's layers, run for the engine.

`FusedDecoder` computes what the Llama, Mistral, Qwen2 and Qwen3 modules of transformers compute, from their own weights, in fewer
and larger operations: one product for queries, keys and values, one for gate and up, and one operation between two products. For
this, the parameters of a module become views of one contiguous tensor, and remain so for training and saving. There is no second
copy.

`ModuleDecoder` runs any other model that uses transformers' attention interface (and adapters that are not merged) through its own
modules.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from plaudit.models.attention import window_of
from plaudit.models.fused import linears_by_input
from plaudit.models.heads import Heads, Rotation, next_power_of_2
from plaudit.models.layer_blocks import ReceivedStates, own_layers
from plaudit.models.merged import QuantisedProduct, merge_all, merged_product_of
from plaudit.models.products import fused_weight_and_bias, product, split_k_product, uses_split_k
from plaudit.models.residual import has_fp32_residual
from plaudit.rollout.native.attention import DecodeStep, PrefillStep, ScoringStep
from plaudit.rollout.native.cpu_linear import prepack_linear
from plaudit.rollout.native.cpu_ops import product as few_rows_product

ALIGNED_BYTES = 512  # as torch aligns tensors: a product's order of sums may depend on it
MAX_POSITIONS = 1 << 17  # rotary tables are computed up to here in advance, beyond only as needed


def addresses(model: PreTrainedModel) -> list[tuple[int, torch.dtype]]:
    """Addresses and dtypes of the weights."""
    return [(tensor.data_ptr(), tensor.dtype) for tensor in (*model.parameters(), *model.buffers())]


class ModuleDecoder:
    bytes_to_pack = kept_bytes = 0

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self._addresses: list[tuple[int, torch.dtype]] = []

    def refresh(self, longest: int) -> bool:
        before, self._addresses = self._addresses, addresses(self.model)
        return self._addresses != before

    def keep_dequantised(self, room: float) -> bool:
        """Does nothing, like the next two: adapters and unknown layers stay as they are."""
        return False

    def prepack(self) -> None:
        pass

    def drop_copies(self) -> None:
        pass

    def hidden(self, step: PrefillStep | DecodeStep) -> Tensor:
        arguments = {"input_ids": step.tokens_T[None], "position_ids": step.positions_T.clamp(min=0)[None], "kv": step}
        return self.model.get_decoder()(**arguments, use_cache=False).last_hidden_state[0]  # pyright: ignore


class _Fused:
    """Linear layers over the same input, as one product."""

    def __init__(self, modules: Sequence[nn.Linear]):
        self._merged = merged = merged_product_of(modules)
        self._weight, self.bias = fused_weight_and_bias(modules) if merged is None else (None, merged.bias_O)
        self.prepacked: Callable[[Tensor], Tensor] | None = None
        self.kept: Tensor | None = None
        """The weight of a quantised base, made once for a call."""

    @property
    def weight(self) -> Tensor:
        """Of a quantised base it is made now, and stays only until the next one is, unless it is kept."""
        if self.kept is not None:
            return self.kept
        return self._merged.weight_OI if self._weight is None else self._weight  # pyright: ignore

    def keep(self, memory: Tensor) -> None:
        like = self.memory
        self.kept = memory.view(like.dtype)[: like.numel()].view(like.shape).copy_(self.weight)

    @property
    def bytes_to_keep(self) -> int:
        return -(-self.memory.nbytes // ALIGNED_BYTES) * ALIGNED_BYTES if isinstance(self._merged, QuantisedProduct) else 0

    @property
    def memory(self) -> Tensor:
        """Where the weight is when it is used, or made."""
        return self._merged.memory_OI() if isinstance(self._merged, QuantisedProduct) else self.weight

    def __call__(self, x_TD: Tensor) -> Tensor:
        return self._times(x_TD, self.weight) if self.prepacked is None else self.prepacked(x_TD)

    def _times(self, x_TD: Tensor, weight: Tensor) -> Tensor:
        return (product if x_TD.is_cuda else few_rows_product)(x_TD, weight, self.bias)

    def in_parts(self, x_TI: Tensor) -> Tensor:
        """Split-K partial sums in fp32 [parts, T, D], for a caller that adds them up; or the full product [T, D]."""
        if self.prepacked is not None:
            return self.prepacked(x_TI)
        weight = self.weight
        return split_k_product(x_TI, weight) if uses_split_k(x_TI, weight, self.bias) else self._times(x_TI, weight)

    @property
    def bytes_to_pack(self) -> int:
        return 0 if isinstance(self._merged, QuantisedProduct) else self.weight.nbytes  # of those there is one copy at most

    def prepack(self) -> None:
        if self.bytes_to_pack:
            self.prepacked = prepack_linear(self.weight, self.bias)


class _Layer:
    def __init__(self, layer: Any, eps: float):
        attention = layer.self_attn
        self.qkv, self.out, self.gate_up, self.down = map(_Fused, linears_by_input(layer))
        self.norms = (layer.input_layernorm.weight, layer.post_attention_layernorm.weight)
        self.head_norms = (attention.q_norm.weight, attention.k_norm.weight) if hasattr(attention, "q_norm") else (None, None)
        self.scale, self.eps = attention.scaling, eps
        self.window = window_of(attention)

    @property
    def products(self) -> tuple[_Fused, ...]:
        return (self.qkv, self.out, self.gate_up, self.down)


class FusedDecoder:
    def __init__(self, model: PreTrainedModel, heads: Heads):
        self.model, self.heads = model, heads
        self.layers: list[_Layer] = []
        self.rotation: tuple[Tensor, Tensor] | None = None
        self._addresses: list[tuple[int, torch.dtype]] = []
        self.kept_bytes = 0
        self._kept_at: list[int | None] = []

    def refresh(self, longest: int) -> bool:
        """Before a call: fuse the weights again if they have moved. True if any address has changed."""
        merge_all(self.model)
        moved = self._addresses != addresses(self.model)
        if moved:
            decoder: Any = self.model.get_decoder()
            self.layers = []  # free the old ones first
            self.layers = [_Layer(layer, self.model.config.rms_norm_eps) for layer in own_layers(decoder)]
            embeddings, last_norm = decoder.embed_tokens, decoder.norm
            received = isinstance(embeddings, ReceivedStates)
            self.embed = embeddings if received else partial(nn.functional.embedding, weight=embeddings.weight)
            self.norm = None if isinstance(last_norm, nn.Identity) else last_norm.weight
            self._addresses = addresses(self.model)
        if self.rotation is None or len(self.rotation[0]) < longest or self.rotation[0].dtype != self.model.dtype:
            self.rotation, moved = self._rotation(longest), True
        return moved

    def _rotation(self, longest: int) -> tuple[Tensor, Tensor]:
        """Rotary tables from the model's own module, for the full context so that they need not grow."""
        context = getattr(self.model.config, "max_position_embeddings", None) or next_power_of_2(longest)
        positions = torch.arange(max(longest, min(context, MAX_POSITIONS)), device=self.model.device)[None]
        x = torch.empty(1, dtype=self.model.dtype, device=self.model.device)
        cos, sin = self.model.get_decoder().rotary_emb(x, position_ids=positions)  # pyright: ignore
        return cos[0].contiguous(), sin[0].contiguous()

    @property
    def weights_OI(self) -> list[Tensor]:
        return [fused.memory for fused in self.products]

    @property
    def norms(self) -> list[Tensor]:
        norms = (self.norm, *(norm for layer in self.layers for norm in (*layer.norms, *layer.head_norms)))
        return [norm for norm in norms if norm is not None]

    @property
    def products(self) -> Iterator[_Fused]:
        return (fused for layer in self.layers for fused in layer.products)

    @property
    def bytes_to_pack(self) -> int:
        return sum(fused.bytes_to_pack for fused in self.products)

    def prepack(self) -> None:
        for fused in self.products:
            fused.prepack()

    def keep_dequantised(self, room: float) -> bool:
        """Make as many weights of a quantised base as fit into some bytes, so that no step has to; they have the same bits. True if
        they are elsewhere than those of the last call."""
        self.drop_copies()
        places: list[tuple[_Fused, int]] = []
        for fused in self.products:
            if 0 < fused.bytes_to_keep <= room - self.kept_bytes:
                places.append((fused, self.kept_bytes))
                self.kept_bytes += fused.bytes_to_keep
        try:
            # In one piece, which is likely to be where it was in the last call, so that captured graphs find the weights there.
            memory = torch.empty(self.kept_bytes, dtype=torch.uint8, device=self.model.device)
        except torch.OutOfMemoryError:  # others have taken what should have been there
            places, self.kept_bytes, memory = [], 0, None
        for fused, at in places:
            assert memory is not None
            fused.keep(memory[at : at + fused.bytes_to_keep])
        before, self._kept_at = self._kept_at, [None if fused.kept is None else fused.kept.data_ptr() for fused in self.products]
        return self._kept_at != before

    def drop_copies(self) -> None:
        self.kept_bytes = 0
        for fused in self.products:
            fused.prepacked = fused.kept = None

    def hidden(self, step: PrefillStep | DecodeStep | ScoringStep) -> Tensor:
        ops, eps = step.ops, self.layers[0].eps
        assert self.rotation is not None
        x_TD, delta = self.embed(step.tokens_T), None
        if has_fp32_residual(self.model):
            x_TD = x_TD.float()
        for index, layer in enumerate(self.layers):
            rotation = Rotation(*self.rotation, *layer.head_norms, eps)
            normed_TD, x_TD = ops.add_norm(x_TD, delta, layer.norms[0], eps)
            qkv_TE = layer.qkv(normed_TD)
            if isinstance(step, PrefillStep) and layer is self.layers[-1]:
                step.write(index, qkv_TE, self.heads, rotation)
                return x_TD  # prefill needs only the last layer's keys and values, not its output
            attended_TE = step.attend_fused(index, qkv_TE, self.heads, rotation, layer.scale, layer.window)
            normed_TD, x_TD = ops.add_norm(x_TD, layer.out.in_parts(attended_TE), layer.norms[1], eps)
            delta = layer.down.in_parts(ops.swiglu(layer.gate_up(normed_TD)))
        if self.norm is None:  # a block that is not the last: the sum that the next layer's norm begins with
            return ops.add_norm(x_TD, delta, self.layers[-1].norms[0], eps)[1]
        return ops.add_norm(x_TD, delta, self.norm, eps)[0]
