"""The model that training starts from, as KL's reference: a frozen copy, or under LoRA the policy without its adapters.

A copy that is offloaded is on its device only while it is asked.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from plaudit.models.logprobs import target_logprobs
from plaudit.models.trainable import TrainableModel, load_model
from plaudit.models.weights import Weights
from plaudit.recipe import Model
from plaudit.types import Batch


class Reference:
    def __init__(self, recipe: Model, policy: TrainableModel, *, offload: bool = False):
        self.policy = policy
        self.copy: PreTrainedModel | None = None
        self._weights: Weights[PreTrainedModel] | None = None

        def read() -> PreTrainedModel:
            return load_model(recipe, policy.device).eval().requires_grad_(False)

        if policy.peft is not None:
            assert not offload
        elif offload:
            self._weights = Weights("the reference", read, policy.device, offload=True)
            with self.at_hand():  # so that what is wrong with it is told now
                pass
        else:
            self.copy = read()

    @property
    def bytes(self) -> int:
        """What it keeps on its device while it is not asked."""
        return 0 if self.copy is None else sum(p.numel() * p.element_size() for p in self.copy.parameters())

    @contextmanager
    def at_hand(self) -> Iterator[None]:
        """In here it can be asked."""
        if self._weights is None:
            yield
            return
        self._weights.load()
        self.copy = self._weights.model
        try:
            yield
        finally:
            self.copy = None
            self._weights.unload()

    @torch.no_grad()
    def logprobs(self, batch: Batch, temperature: float) -> Tensor:
        """Of the tokens that the batch learns."""
        if self.copy is not None:
            return target_logprobs(self.copy, batch, temperature=temperature).logprobs_N
        assert self.policy.peft is not None
        self.policy.model.eval()
        with self.policy.peft.disable_adapter():
            return target_logprobs(self.policy.model, batch, temperature=temperature).logprobs_N
