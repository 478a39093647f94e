"""A decoder's layers, divided into contiguous blocks for several processes, each of which loads one block only.

    first block     embeddings → layers → hidden states
    others          hidden states → layers → hidden states
    last block      hidden states → layers → final norm, head

A block is transformers' own model without the modules of the other blocks: their layers pass hidden states on, and the embeddings
are replaced by the hidden states of the block before (`ReceivedStates`). Its layers get the arguments they get in the undivided
model, so blocks one after the other compute what it computes, to the bit.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from plaudit.errors import RecipeError

LAYER_ARGUMENTS = {
    "hidden_states", "attention_mask", "position_ids", "position_embeddings", "cache_position", "cu_seq_lens_q", "cu_seq_lens_k",
}  # fmt: skip
"""Tensors that a layer may be called with. Any other could come from another block's layers or embeddings."""
HEAD = "score"


@dataclass(frozen=True)
class LayerBlock:
    """One block of several."""

    number: int
    count: int
    layers: range
    parameters: int

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def is_last(self) -> bool:
        return self.number == self.count - 1

    def __str__(self) -> str:
        return f"layers {self.layers[0] + 1} to {self.layers[-1] + 1} with {self.parameters:,} parameters"


# The division --------------------------------------------------------------------------------------------------------


def divide_layers(layers: Sequence[int], count: int, *, before: int = 0, after: int = 0) -> list[range]:
    """Contiguous blocks of at least one layer each, the largest of which is as small as possible. `layers`: the size of each
    layer. `before`, `after`: of what belongs to the first and the last block besides (embeddings; norm and head)."""
    assert 1 <= count <= len(layers)
    total = [*accumulate(layers, initial=0)]

    @cache
    def best(blocks: int, end: int) -> tuple[int, tuple[int, ...]]:
        """Of the first `end` layers in that many blocks: the size of the largest block, and where each begins."""
        extra = after if blocks == count else 0
        if blocks == 1:
            return before + total[end] + extra, (0,)
        options = []
        for begin in range(blocks - 1, end):
            largest, begins = best(blocks - 1, begin)
            options.append((max(largest, total[end] - total[begin] + extra), (*begins, begin)))
        return min(options)

    begins = best(count, len(layers))[1]
    return [range(begin, end) for begin, end in zip(begins, (*begins[1:], len(layers)), strict=True)]


def divide_model(model: PreTrainedModel, count: int) -> list[LayerBlock]:
    """The blocks of a model that scores, by parameters: all are loaded in one dtype. `model`: as created on the meta device."""
    decoder: Any = _require_divisible(model, count)
    before, after = _parameters(decoder.embed_tokens), _parameters(decoder.norm) + _parameters(getattr(model, HEAD, nn.Identity()))
    layers = [_parameters(layer) for layer in decoder.layers]
    ranges, blocks = divide_layers(layers, count, before=before, after=after), []
    for number, block in enumerate(ranges):
        parameters = sum(layers[i] for i in block) + before * (number == 0) + after * (number == count - 1)
        blocks.append(LayerBlock(number, count, block, parameters))
    return blocks


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _require_divisible(model: PreTrainedModel, count: int) -> PreTrainedModel:
    """The model's decoder."""
    decoder, path = model.get_decoder(), model.name_or_path
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not all(hasattr(decoder, name) for name in ("embed_tokens", "norm")):
        raise RecipeError(
            f"{path}: {type(model).__name__} cannot be divided: its decoder is not embed_tokens, layers and norm. Choose one rank "
            "for it (model.rank: 0), or serve it (placement: launch)"
        )
    if count > len(layers):
        raise RecipeError(f"{path}: model.rank has {count} ranks, but the model has only {len(layers)} layers to divide")
    return decoder


# One block -----------------------------------------------------------------------------------------------------------


def class_of_block(kind: type[PreTrainedModel], block: LayerBlock) -> type[PreTrainedModel]:
    """The model's class without the modules of other blocks. `from_pretrained` creates it without weights and reads those that it
    has modules for: never the whole model's."""

    def create(self: Any, config: Any, *arguments: Any, **more: Any) -> None:
        kind.__init__(self, config, *arguments, **more)
        _keep_block(self, block)

    return type(kind.__name__, (kind,), {"__init__": create, "__module__": kind.__module__})


def _keep_block(model: PreTrainedModel, block: LayerBlock) -> None:
    decoder: Any = _require_divisible(model, block.count)
    _drop_siblings(model, decoder, kept=HEAD if block.is_last else None)
    model.all_tied_weights_keys = {}  # an output head, tied to the embeddings, is not part of a model that scores
    for i, layer in enumerate(decoder.layers):
        if i not in block.layers:
            _skip(layer)
    if not block.is_first:
        decoder.embed_tokens = received = ReceivedStates(decoder.config.get_text_config().hidden_size)
        decoder.layers[block.layers[0]].register_forward_pre_hook(received.enter_layer, with_kwargs=True)
    if not block.is_last:
        decoder.norm = nn.Identity()
    for i in block.layers:
        decoder.layers[i].register_forward_hook(_require_states)


def _drop_siblings(model: nn.Module, decoder: nn.Module, kept: str | None) -> None:
    """Leaves nothing but the decoder, and the child `kept` of the model."""
    path = next(name for name, module in model.named_modules() if module is decoder)
    owner = model
    for name in path.split("."):
        for sibling in [child for child, _ in owner.named_children() if child != name]:
            if owner is not model or sibling != kept:
                setattr(owner, sibling, nn.Identity())
        owner = getattr(owner, name)


class _Skipped(nn.Module):
    """A layer that another process has: without modules and weights, but with the attributes that a decoder may look at."""

    def forward(self, hidden_states: Tensor, *arguments: Any, **more: Any) -> Tensor:
        return hidden_states


def _skip(layer: nn.Module) -> None:
    layer._modules.clear()
    layer._parameters.clear()
    layer._buffers.clear()
    layer.__class__ = _skipping(type(layer))


@cache
def _skipping(kind: type) -> type:
    return type(kind.__name__, (_Skipped, kind), {})


def own_layers(decoder: Any) -> list[Any]:
    """The layers that this process has: all of them, unless the decoder is a block."""
    return [layer for layer in decoder.layers if not isinstance(layer, _Skipped)]


class ReceivedStates(nn.Module):
    """Stands for the embeddings in a block that is not the first: the hidden states of the block before."""

    def __init__(self, size: int):
        super().__init__()
        self.size, self.dtype = size, torch.float32
        self._states_TD: Tensor | None = None
        """Of the batch that is computed next. None: states that depend on the token only, to check the block by itself."""
        self._given: Tensor | None = None

    @contextmanager
    def holding(self, states_TD: Tensor) -> Iterator[None]:
        """For one batch."""
        self._states_TD = states_TD
        try:
            yield
        finally:
            self._states_TD = self._given = None

    def forward(self, tokens: Tensor) -> Tensor:
        """[…, T] → […, T, D]."""
        if self._states_TD is None:
            waves = torch.arange(1, self.size + 1, device=tokens.device, dtype=torch.float32)
            given = torch.cos(tokens[..., None].float() * waves).to(self.dtype)
        else:
            given = self._states_TD.view(*tokens.shape, self.size)
        self._given = given
        return given

    def enter_layer(self, layer: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Before the first layer: the states as they came, whatever the decoder does to its embeddings."""
        computed = {name for name, value in named.items() if not isinstance(value, bool | int | float | str | None)}
        unknown = sorted(computed - LAYER_ARGUMENTS)
        if unknown or len(arguments) > 1:
            raise RecipeError(
                f"{type(layer).__name__} cannot be divided among processes: it is called with {', '.join(unknown) or 'more'} "
                "besides hidden states. Choose one rank for the model (model.rank: 0)"
            )
        return (self._given,), {name: value for name, value in named.items() if name != "hidden_states"}


def _require_states(layer: nn.Module, arguments: Any, output: Any) -> None:
    if not isinstance(output, Tensor):
        raise RecipeError(
            f"{type(layer).__name__} cannot be divided among processes: it returns more than hidden states. Choose one rank for "
            "the model (model.rank: 0)"
        )
