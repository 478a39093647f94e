"""The nouns that cross rooms, and nothing else.

Shape suffixes, here and everywhere: T tokens of a packed batch, S sequences, D hidden size, V vocabulary, G samples of a group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

Message = dict[str, Any]
"""`role` and `content`, and whatever else the chat template reads (`tool_calls`, `reasoning_content`, `name`)."""


@dataclass(frozen=True)
class Conversation:
    """Messages in order, with the tools the template may show."""

    messages: list[Message]
    tools: list[Any] | None = None


@dataclass(frozen=True)
class Prompt:
    """One row to sample from: what the policy is asked, and what its reward needs to know."""

    id: str
    messages: list[Message]
    data_source: str = ""
    ground_truth: Any = None
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    tools: list[Any] | None = None


@dataclass(frozen=True)
class Example:
    """One tokenised sequence to train on. `loss_mask[t]` says whether token t is learnt; never the first one."""

    tokens: np.ndarray
    loss_mask: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_targets(self) -> int:
        return int(self.loss_mask.sum())


@dataclass(frozen=True)
class Batch:
    """Sequences laid end to end without padding: one micro-batch, as the model sees it."""

    tokens_T: torch.Tensor
    positions_T: torch.Tensor
    """Position of each token in its own sequence."""
    loss_mask_T: torch.Tensor
    starts_S1: torch.Tensor
    """Where each sequence starts, and behind the last one the total: int32, one entry more than sequences."""
    longest: int

    @property
    def num_tokens(self) -> int:
        return self.tokens_T.shape[0]

    @property
    def num_targets(self) -> int:
        return int(self.loss_mask_T.sum())
