"""What a model in this process can do: score conversations, or write. Everything here runs in the model's own thread."""

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
    """How long the first of several questions waits for the others."""

    def __init__(self, settings: RewardModel, device: torch.device, closing: Callable[[], bool]):
        """`closing`: nobody wants to know any more."""
        assert settings.path is not None
        self.settings, self.path, self.device, self.closing = settings, settings.path, device, closing
        self.context: int | None = None

    def open(self) -> None:
        """Everything but the weights: config and tokenizer are read and checked."""
        config = read_config(self.path, trust_remote_code=self.settings.trust_remote_code)
        self.context = context_tokens(config)
        longest = self.settings.max_prompt_tokens
        if longest is not None and self.context is not None and longest > self.context:
            raise RecipeError(f"max_prompt_tokens is {longest:,}, and {self.path} takes {self.context:,} tokens at most: lower it")
        self.check(config)

    @abstractmethod
    def check(self, config: PretrainedConfig) -> None:
        """Is it the right kind of model, and has it what it needs?"""

    @abstractmethod
    def read(self) -> nn.Module:
        """The model with its weights, on the device."""

    @abstractmethod
    def take(self, model: Any) -> None:
        """The weights are on the device."""

    @abstractmethod
    def release(self) -> None:
        """They are about to go: hold on to nothing. Also when there were none."""

    @abstractmethod
    def compute(self, items: list[Item]) -> list[Result]:
        """A result for each, in order. Never raises for one of them."""

    @abstractmethod
    def failed(self, failure: Failure) -> Result: ...
