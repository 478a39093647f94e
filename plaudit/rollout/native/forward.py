"""The model's passes while sampling: over whole prompts, and over one token of every running sequence."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from plaudit.data.pack import pack
from plaudit.errors import RecipeError
from plaudit.models.attention import packed_arguments
from plaudit.rollout.engine import Request
from plaudit.rollout.native.attention import DecodeStep, PrefillStep
from plaudit.rollout.native.cache import CacheShape, KVCache
from plaudit.rollout.native.packed import PAYS_AFTER_STEPS, PackedLinears
from plaudit.rollout.native.scheduler import Read
from plaudit.types import Example


class Forward:
    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.shape = _cache_shape(model)
        self._packed: PackedLinears | None = None
        self._steps = 0

    def end(self) -> None:
        """Of a call of the engine: before the next one the weights may change."""
        self._packed, self._steps = None, 0

    @torch.inference_mode()
    def read(self, prompts: Sequence[Request]) -> list[Read]:
        """Keys, values and last logits of the prompts, in one packed pass."""
        examples = [Example(prompt.tokens, np.zeros(len(prompt.tokens), dtype=bool)) for prompt in prompts]
        batch, step = pack(examples, self.shape.device), PrefillStep()
        hidden_TD = self._hidden(**packed_arguments(batch), kv=step)
        starts = batch.starts_S1.tolist()
        logits_SV = self._logits(hidden_TD[[end - 1 for end in starts[1:]]])
        prefixes = step.stacked()
        return [
            Read(request, prefixes[:, :, :, begin:end], logits_V)
            for request, (begin, end), logits_V in zip(prompts, pairwise(starts), logits_SV, strict=True)
        ]

    @torch.inference_mode()
    def next_logits(self, cache: KVCache, tokens_B: Tensor, positions_B: Tensor, longest: int) -> Tensor:
        """What follows the newest token of each row, whose keys and values go into the cache."""
        self._steps += 1
        if self._steps == PAYS_AFTER_STEPS and PackedLinears.pays(self.model):
            self._packed = PackedLinears(self.model)
        step = DecodeStep(cache, positions_B, longest)
        arguments = {"input_ids": tokens_B[None], "position_ids": positions_B[None], "kv": step}
        if self._packed is None:
            return self._logits(self._hidden(**arguments))
        with self._packed.within():
            return self._packed.logits(self._hidden(**arguments)).float()

    def _hidden(self, **arguments: Any) -> Tensor:
        if self.model.training:  # asked every time: whoever takes the samples may train in between
            self.model.eval()
        return self.model.get_decoder()(**arguments, use_cache=False).last_hidden_state[0]  # pyright: ignore

    def _logits(self, hidden_BD: Tensor) -> Tensor:
        return (hidden_BD @ self.model.get_output_embeddings().weight.T).float()  # pyright: ignore


def _cache_shape(model: PreTrainedModel) -> CacheShape:
    config: Any = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    if not heads:
        raise RecipeError(
            f"{model.name_or_path}: the native engine cannot sample {type(model).__name__}: it has no attention heads"
        )
    return CacheShape(
        layers=config.num_hidden_layers,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
        dtype=model.dtype,
        device=model.device,
    )
