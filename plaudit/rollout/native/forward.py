"""The model's passes while sampling: over pieces of prompts, and one token further for every running sequence."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from plaudit.errors import PlauditError, RecipeError
from plaudit.models.fused import can_fuse
from plaudit.models.heads import Heads
from plaudit.models.logprobs import logits_of
from plaudit.rollout.native.attention import DecodeStep, ReadStep
from plaudit.rollout.native.cache import CacheShape, CacheView
from plaudit.rollout.native.decoder import FusedDecoder, ModuleDecoder
from plaudit.rollout.native.graphs import Graphs, rounded_length
from plaudit.rollout.native.packed import PAYS_AFTER_STEPS, packed, packing_pays
from plaudit.rollout.native.rows import Draw, Rows
from plaudit.rollout.native.scheduler import Piece

LOGIT_ROWS = 256  # whose logits are held at a time, on a GPU: 150 MB for a vocabulary of 152k


class Forward:
    def __init__(self, model: PreTrainedModel):
        self.model, self.shape = model, cache_shape(model)
        self.ops = operations_on(self.shape.device)
        self.decoder = FusedDecoder(model, self.shape.heads) if can_fuse(model) else ModuleDecoder(model)
        self.graphs = Graphs(self.shape.device, trusted=isinstance(self.decoder, FusedDecoder))
        self._packed_head: Callable[[Tensor], Tensor] | None = None
        self._steps = 0

    @property
    def head(self) -> Tensor:
        return self.model.get_output_embeddings().weight  # pyright: ignore

    def begin(self, longest: int) -> None:
        """A call of the engine: since the last one the weights may have changed, or lie elsewhere."""
        if self.model.device != self.shape.device:
            raise PlauditError(f"the model was moved to {self.model.device} after its engine was made: make another")
        if self.model.dtype != self.shape.dtype:
            self.shape = cache_shape(self.model)
        if self.decoder.refresh(longest):
            self.graphs.forget()

    def end(self) -> None:
        self._packed_head, self._steps = None, 0
        self.decoder.unpack()

    @torch.inference_mode()
    def read(self, pieces: Sequence[Piece], cache: CacheView) -> None:
        """Keys and values of pieces of prompts, in one packed pass."""
        self._for_sampling()
        self.decoder.hidden(ReadStep(pieces, cache, self.ops))

    @torch.inference_mode()
    def step(self, rows: Rows, count: int, cache: CacheView, longest: int, draw: Draw) -> None:
        """One token for each of the first rows that has a sequence: from its embedding to the next token, drawn."""
        self._for_sampling()
        self._steps += 1
        if self._steps == PAYS_AFTER_STEPS and packing_pays(self.shape.device, self.shape.dtype):
            self.decoder.pack()
            self._packed_head = packed(self.head, None)
        on_gpu = self.shape.device.type == "cuda"
        longest = rounded_length(longest) if on_gpu else longest
        chunk = LOGIT_ROWS if on_gpu else count

        def run() -> None:
            hidden_BD = self.decoder.hidden(DecodeStep(rows, count, cache, longest, self.ops))
            for start in range(0, count, chunk):
                at = slice(start, min(start + chunk, count))
                self.ops.draw_and_advance(self._logits(hidden_BD[at]), rows.state_RC[at], rows.results_R4[at], draw)

        self.graphs.run((count, longest, draw.kind), run)

    @torch.inference_mode()
    def logits(self, rows: Rows, count: int, cache: CacheView, longest: int) -> Tensor:
        """Of the next tokens, without drawing any."""
        self._for_sampling()
        longest = rounded_length(longest) if self.shape.device.type == "cuda" else longest
        return self._logits(self.decoder.hidden(DecodeStep(rows, count, cache, longest, self.ops)))

    def _logits(self, hidden_BD: Tensor) -> Tensor:
        return logits_of(hidden_BD, self.head) if self._packed_head is None else self._packed_head(hidden_BD).float()

    def _for_sampling(self) -> None:
        if self.model.training:  # asked every time: whoever takes the samples may train in between
            self.model.eval()


def operations_on(device: torch.device) -> Any:
    if device.type == "cuda":
        from plaudit.rollout.native import kernels

        return kernels
    from plaudit.rollout.native import plain

    return plain


def cache_shape(model: PreTrainedModel) -> CacheShape:
    config: Any = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    if not heads:
        raise RecipeError(
            f"{model.name_or_path}: the native engine cannot sample {type(model).__name__}: it has no attention heads"
        )
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return CacheShape(config.num_hidden_layers, Heads(heads, kv_heads, size), dtype=model.dtype, device=model.device)
