"""The KL reference: a frozen copy of the model that training starts from, with LoRA the policy without its adapters, or another
model that the recipe names.

An offloaded copy is on its device only inside `on_device()`.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from plaudit.models.folder import require_same_tokens
from plaudit.models.logprobs import target_logprobs
from plaudit.models.sharded import bytes_on_device, shard_model
from plaudit.models.trainable import TrainableModel, load_model
from plaudit.models.weights import OffloadableWeights
from plaudit.recipe import ModelSettings
from plaudit.types import Batch
from plaudit.world import World


class Reference:
    def __init__(
        self,
        recipe: ModelSettings,
        policy: TrainableModel,
        *,
        path: str | None = None,
        offload: bool = False,
        shard_among: World | None = None,
    ):
        """`path`: another model than the policy's, with the same tokenizer. `shard_among`: the world that its weights are
        divided among."""
        self.policy = policy
        self.copy: PreTrainedModel | None = None
        self._weights: OffloadableWeights[PreTrainedModel] | None = None

        def read() -> PreTrainedModel:
            return load_model(settings, policy.device).eval().requires_grad_(False)

        settings = recipe.model_copy(update={"path": path or recipe.path, "lora": None})
        if path is not None:
            require_same_tokens(path, policy.template.tokenizer, "reference", trust_remote_code=recipe.trust_remote_code)
        if policy.peft is not None and path is None:
            assert not offload
        elif shard_among is not None:
            self.copy = read()
            shard_model(self.copy, shard_among, offload=offload)
        elif offload:
            self._weights = OffloadableWeights("the reference", read, policy.device, offload=True)
            with self.on_device():  # so that a broken model fails now
                pass
        else:
            self.copy = read()

    @property
    def bytes(self) -> int:
        """Device memory it keeps between uses."""
        return 0 if self.copy is None else bytes_on_device(self.copy)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """`logprobs` works inside this context."""
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
        """Log-probs of the batch's target tokens."""
        if self.copy is not None:
            return target_logprobs(self.copy, batch, temperature=temperature).logprobs_N
        assert self.policy.peft is not None
        self.policy.model.eval()
        with self.policy.peft.disable_adapter():
            return target_logprobs(self.policy.model, batch, temperature=temperature).logprobs_N
