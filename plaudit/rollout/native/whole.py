"""Hidden states of whole packed sequences without gradients, by the engine's fused layers: for models that score, not sample."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from plaudit.models.fused import can_fuse
from plaudit.models.verify import verify_packed_states
from plaudit.rollout.native.attention import WholeStep
from plaudit.rollout.native.decoder import FusedDecoder
from plaudit.rollout.native.forward import cache_shape, operations_on
from plaudit.types import Batch


class WholePass:
    """Holds weights: drop it before they go."""

    def __init__(self, model: PreTrainedModel, *, verify: bool = True):
        """`verify`: raise a RecipeError unless it computes what the model's own modules compute."""
        assert can_fuse(model)
        shape = cache_shape(model)
        self._ops, self._decoder = operations_on(shape.device), FusedDecoder(model, shape.heads)
        if verify:
            verify_packed_states(model, self)

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Tensor:
        """[token, hidden size]."""
        self._decoder.refresh(batch.longest)
        return self._decoder.hidden(WholeStep(batch, self._ops))
