"""Hidden states of packed sequences, without gradients, from the engine's fused layers: for models that score texts."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from plaudit.models.fused import can_fuse
from plaudit.models.verify import verify_packed_states
from plaudit.rollout.native.attention import ScoringStep
from plaudit.rollout.native.decoder import FusedDecoder
from plaudit.rollout.native.forward import cache_shape, ops_for
from plaudit.types import Batch


class ScoringPass:
    """Refers to the model's weights: drop it before they are unloaded."""

    def __init__(self, model: PreTrainedModel, *, verify: bool = True):
        """`verify`: raise a RecipeError unless the result matches the model's own modules."""
        assert can_fuse(model)
        shape = cache_shape(model)
        self._ops, self._decoder = ops_for(shape.device), FusedDecoder(model, shape.heads)
        if verify:
            verify_packed_states(model, self)

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Tensor:
        """[token, hidden size]."""
        self._decoder.refresh(batch.longest)
        return self._decoder.hidden(ScoringStep(batch, self._ops))
