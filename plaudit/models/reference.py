"""The model that training starts from, as KL's reference: a frozen copy, or under LoRA the policy without its adapters."""

import torch
from torch import Tensor

from plaudit.models.logprobs import target_logprobs
from plaudit.models.policy import Policy, load_model
from plaudit.recipe import Model
from plaudit.types import Batch


class Reference:
    def __init__(self, recipe: Model, policy: Policy):
        self.policy = policy
        self.copy = None if policy.peft is not None else load_model(recipe, policy.device).eval().requires_grad_(False)

    @property
    def bytes(self) -> int:
        return 0 if self.copy is None else sum(p.numel() * p.element_size() for p in self.copy.parameters())

    @torch.no_grad()
    def logprobs(self, batch: Batch, temperature: float) -> Tensor:
        """Of the tokens that the batch learns."""
        if self.copy is not None:
            return target_logprobs(self.copy, batch, temperature=temperature).logprobs_N
        assert self.policy.peft is not None
        self.policy.model.eval()
        with self.policy.peft.disable_adapter():
            return target_logprobs(self.policy.model, batch, temperature=temperature).logprobs_N
