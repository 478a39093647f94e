"""The residual stream of a half-precision model, kept in fp32.

Every layer adds to the stream, and in bf16 every sum is rounded to eight bits: over all layers that is most of a model's rounding
error, and it differs with every way of batching the same tokens. Here the sum stays in fp32, while products and attention run in
half precision as before. Training keeps about a tenth more activation memory than it would in bf16.
"""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from plaudit.models.layer_blocks import own_layers
from plaudit.models.quantisable import FAMILIES

# Models whose layers compute x + attention(norm(x)), then x + mlp(norm(x)), with norms in fp32.
KNOWN = {f"{family.capitalize()}{head}" for family in FAMILIES for head in ("ForCausalLM", "Model")}


def keep_residual_fp32(model: PreTrainedModel) -> None:
    """Hooks only: weights and saved files are unchanged. Does nothing for fp32 models or unsupported families."""
    if model.dtype not in (torch.bfloat16, torch.float16) or not is_supported_family(model) or has_fp32_residual(model):
        return
    decoder: Any = model.get_decoder()
    decoder.embed_tokens.register_forward_hook(_in_fp32)
    norms = [norm for layer in own_layers(decoder) for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
    if isinstance(decoder.norm, nn.Identity):  # a block that is not the last
        like = norms[0]
    else:
        # Not a layer's: if the weights are sharded, a layer has them in the dtype that it computes in only while it runs.
        like = decoder.norm
        norms.append(decoder.norm)
    for norm in norms:
        norm.register_forward_hook(_in_weight_dtype)
    decoder.rotary_emb.register_forward_hook(_InDtypeOf(like))
    model.residual_is_fp32 = True  # pyright: ignore


def is_supported_family(model: PreTrainedModel) -> bool:
    return type(model).__name__ in KNOWN and type(model).__module__.split(".")[0] == "transformers"


def has_fp32_residual(model: PreTrainedModel) -> bool:
    return getattr(model, "residual_is_fp32", False)


class _InDtypeOf:
    """Refers to a module, not the model, which would create a reference cycle."""

    def __init__(self, module: nn.Module):
        self.module = module

    def __call__(self, module: nn.Module, arguments: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(x.to(self.module.weight.dtype) for x in output)  # pyright: ignore


def _in_fp32(module: nn.Module, arguments: Any, output: torch.Tensor) -> torch.Tensor:
    return output.float()


def _in_weight_dtype(module: nn.Module, arguments: Any, output: torch.Tensor) -> torch.Tensor:
    return output.to(module.weight.dtype)  # pyright: ignore
