"""What a model in this process computes: scores, or answers. Everything here but `prepare` runs in the model's own
thread."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import nn
from transformers import PretrainedConfig

from plaudit.errors import RecipeError
from plaudit.models.folder import context_tokens, read_config
from plaudit.recipe.reward_models import RewardModel
from plaudit.types import Failure

Item = TypeVar("Item")
Result = TypeVar("Result")


class Inference(ABC, Generic[Item, Result]):
    gather_s: ClassVar[float] = 0.0
    """How long the first request of a batch waits for others."""
    most_items: ClassVar[int | None] = None
    """A batch with this many items takes no further request: its results are known while the next one is computed."""

    def __init__(self, settings: RewardModel, device: torch.device, closing: Callable[[], bool]):
        """`closing`: whether the model is being closed, so results are no longer needed."""
        assert settings.path is not None
        self.settings, self.path, self.device, self.closing = settings, settings.path, device, closing
        self.context: int | None = None

    def open(self) -> None:
        """Load and check everything but the weights: config and tokenizer."""
        config = read_config(self.path, trust_remote_code=self.settings.trust_remote_code)
        self.context = context_tokens(config)
        longest = self.settings.max_prompt_tokens
        if longest is not None and self.context is not None and longest > self.context:
            raise RecipeError(
                f"max_prompt_tokens is {longest:,}, but the context of {self.path} is {self.context:,} tokens: lower it"
            )
        self.check(config)

    @abstractmethod
    def check(self, config: PretrainedConfig) -> None:
        """Raise a RecipeError if this is not the right kind of model, or something it needs is missing."""

    @abstractmethod
    def load(self) -> nn.Module:
        """The model with its weights, on the device."""

    @abstractmethod
    def attach(self, model: Any) -> None:
        """Use this model, whose weights are now on the device."""

    @abstractmethod
    def detach(self) -> None:
        """Drop every reference to the model, whose weights are about to be freed. Also called when there was none."""

    def prepare(self, item: Item) -> Any:
        """What `compute` gets of an item: whatever needs no device. In another thread, while the model computes."""
        return item

    @abstractmethod
    def compute(self, items: list[Any]) -> list[Result]:
        """A result for each item, in order. Never raises because of a single item."""

    @abstractmethod
    def failed(self, failure: Failure) -> Result: ...
