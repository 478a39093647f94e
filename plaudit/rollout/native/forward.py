"""The model's forward passes while sampling: prefill, and one decode step for every running sequence."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from plaudit.errors import PlauditError, RecipeError
from plaudit.models.fused import can_fuse
from plaudit.models.heads import Heads
from plaudit.models.logprobs import logits_of
from plaudit.models.residual import has_fp32_residual
from plaudit.rollout.native import cpu_ops, torch_ops
from plaudit.rollout.native.attention import DecodeStep, PrefillStep
from plaudit.rollout.native.batch import BatchRows, DeviceSampling
from plaudit.rollout.native.cache import CacheShape, KVCache
from plaudit.rollout.native.cpu_linear import PREPACK_AFTER_STEPS, prepack_head, prepacking_helps
from plaudit.rollout.native.decoder import FusedDecoder, ModuleDecoder
from plaudit.rollout.native.graphs import DecodeGraphs, rounded_length
from plaudit.rollout.native.prefixes import SharedPrefixes, fits_tiles
from plaudit.rollout.native.scheduler import PrefillChunk

LOGIT_ROWS = 256  # rows whose logits are held at a time, on a GPU: 150 MB for a vocabulary of 152k


class Forward:
    def __init__(self, model: PreTrainedModel):
        self.model, self.shape = model, cache_shape(model)
        self.ops = ops_for(self.shape.device)
        # Prefill computes what the trainer computes, to the bit where it can; a decode step sums in another order anyway.
        self.decode_ops = cpu_ops if self.ops is torch_ops else self.ops
        self.decoder = FusedDecoder(model, self.shape.heads) if can_fuse(model) else ModuleDecoder(model)
        self.graphs = DecodeGraphs(self.shape.device, never_syncs=isinstance(self.decoder, FusedDecoder))
        self._prepacked_head: Callable[[Tensor], Tensor] | None = None
        self._steps, self._room_to_pack = 0, 0.0  # steps that would have been faster with packed weights; bytes that these may take

    @property
    def head(self) -> Tensor:
        return self.model.get_output_embeddings().weight  # pyright: ignore

    def begin(self, longest: int, room: float = 0.0, *, packs: bool = True) -> None:
        """Start a call of the engine: since the last one the weights may have changed or moved. `room`: bytes that copies of
        weights may take; `packs`: whether packed ones may be among them. What is free just now must not decide about these:
        they change the last bits of results."""
        if self.model.device != self.shape.device:
            raise PlauditError(f"the model was moved to {self.model.device} after its engine was built: build a new one")
        if self.model.dtype != self.shape.dtype:
            self.shape = cache_shape(self.model)
        moved = self.decoder.refresh(longest)
        if self.decoder.keep_dequantised(room) or moved:
            self.graphs.clear()
        self._room_to_pack = room - self.decoder.kept_bytes if packs else 0.0

    def end(self) -> None:
        self._prepacked_head, self._steps = None, 0
        self.decoder.drop_copies()

    @property
    def kept_bytes(self) -> int:
        """What the weights of a quantised base take that were made for this call."""
        return self.decoder.kept_bytes

    @property
    def reads_shared_prefixes(self) -> bool:
        """Whether attention can read what rows share for several at once."""
        return self.decode_ops not in (cpu_ops, torch_ops) and fits_tiles(self.shape.heads, self.shape.dtype)

    @property
    def rows_are_independent(self) -> bool:
        """Whether drafts may be rows of a step: every row gets the same bits whatever the others are, as long as they are few, and
        sees the keys of all. Not on a GPU, where attention writes a row's key while other rows read."""
        if self.shape.device.type != "cpu" or not isinstance(self.decoder, FusedDecoder):
            return False
        if self.shape.dtype != torch.float32 and not has_fp32_residual(self.model):
            return False
        return cpu_ops.rows_are_independent(self.shape.dtype, [self.head, *self.decoder.weights_OI], self.decoder.norms)

    @torch.inference_mode()
    def prefill(self, chunks: Sequence[PrefillChunk], cache: KVCache) -> None:
        """Write keys and values of prompt chunks to the cache, in one packed pass."""
        self._set_eval_mode()
        self.decoder.hidden(PrefillStep(chunks, cache, self.ops))

    @torch.inference_mode()
    def step(
        self, rows: BatchRows, count: int, cache: KVCache, longest: int, sampling: DeviceSampling,
        prefixes: SharedPrefixes | None = None,
    ) -> None:  # fmt: skip
        """One token for each sequence in the first `count` rows: from its embedding to the next token, sampled. `prefixes`: what
        rows share is read for several at once."""
        self._set_eval_mode()
        if self._steps < PREPACK_AFTER_STEPS and prepacking_helps(count, self.shape.device, self.shape.dtype):
            self._steps += 1
            if self._steps == PREPACK_AFTER_STEPS and self.decoder.bytes_to_pack + self.head.nbytes <= self._room_to_pack:
                self.decoder.prepack()
                self._prepacked_head = prepack_head(self.head)
        on_gpu = self.shape.device.type == "cuda"
        longest = rounded_length(longest) if on_gpu else longest
        chunk = LOGIT_ROWS if on_gpu else count

        def run() -> None:
            hidden_BD = self.decoder.hidden(DecodeStep(rows, count, cache, longest, self.decode_ops, prefixes))
            for start in range(0, count, chunk):
                at = slice(start, min(start + chunk, count))
                self.decode_ops.draw_and_advance(self._logits(hidden_BD[at]), rows.state_RC[at], rows.results_R4[at], sampling)

        self.graphs.run((count, longest, sampling.kind, prefixes and prefixes.tile_count), run)

    @torch.inference_mode()
    def logits(self, rows: BatchRows, count: int, cache: KVCache, longest: int) -> Tensor:
        """Logits of the next tokens, without sampling any."""
        return self._logits(self.hidden(rows, count, cache, longest))

    @torch.inference_mode()
    def hidden(self, rows: BatchRows, count: int, cache: KVCache, longest: int, prefixes: SharedPrefixes | None = None) -> Tensor:
        """The states that a step computes, without a graph."""
        self._set_eval_mode()
        longest = rounded_length(longest) if self.shape.device.type == "cuda" else longest
        return self.decoder.hidden(DecodeStep(rows, count, cache, longest, self.decode_ops, prefixes))

    def _logits(self, hidden_BD: Tensor) -> Tensor:
        if self._prepacked_head is not None:
            return self._prepacked_head(hidden_BD)
        return logits_of(hidden_BD, self.head) if hidden_BD.is_cuda else cpu_ops.logits(hidden_BD, self.head)

    def _set_eval_mode(self) -> None:
        if self.model.training:  # checked every time: the caller may train between two samples
            self.model.eval()


def ops_for(device: torch.device) -> Any:
    if device.type == "cuda":
        from plaudit.rollout.native import kernels

        return kernels
    return torch_ops


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
