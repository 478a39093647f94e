"""The contract of rollout engines: prompts go in, samples come out as they finish, so that scoring overlaps sampling.

Everything random is keyed by (seed, step, prompt id, sample index, token position): the same key draws the same noise, whatever
else is in the batch and however often a run was resumed. An engine that cannot do this says so (`Capabilities`).

A recipe names its engine as `rollout.engine`: `native`, `vllm`, `sglang`, or a class of yours as `file.py:Class` (docs/engine.md).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from plaudit.errors import PlauditError
from plaudit.types import Sample

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from plaudit.models.lora import Adapters
    from plaudit.recipe import RolloutSettings
    from plaudit.world import World

# Sequences sampled in parallel by default, by device.
MAX_SEQUENCES = {"cpu": 256, "cuda": 1024}
# Prompt tokens prefilled in one pass: enough to keep the device busy, few enough not to stall running sequences for long.
PREFILL_TOKENS = {"cpu": 1024, "cuda": 16384}


@dataclass(frozen=True)
class Request:
    """A prompt to continue `n` times."""

    prompt_id: str
    tokens: np.ndarray
    n: int = 1
    max_new_tokens: int | None = None
    """Overrides the sampling's limit for this prompt."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 is greedy; log-probs are then those of the untempered logits."""
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    """Strings that end a response, besides the end token; they stay in it."""
    seed: int = 0
    step: int = 0

    @property
    def truncates(self) -> bool:
        """Whether unlikely tokens are left out."""
        return self.top_p < 1.0 or self.top_k is not None or self.min_p > 0.0


@dataclass(frozen=True)
class Capabilities:
    """What an engine can do. What it cannot do is refused or reported before training starts."""

    keyed_noise: bool = True
    """The same keys draw the same tokens, in any batch: runs repeat and resume to the bit."""
    truncated_logprobs: bool = True
    """Under top-p, top-k or min-p, `sampler_logprobs` are still of the full tempered distribution."""


class Weights:
    """The policy's weights after a step. Iterating yields (name, tensor) in layer order, LoRA merged in. Every process that trains
    must iterate over all of them, and use each tensor before it takes the next: they may be gathered from several processes."""

    def __init__(self, model: "nn.Module"):
        self._model = model

    def are_of(self, model: "nn.Module") -> bool:
        """Whether an engine that samples `model` shares their storage, so that there is nothing to copy."""
        return model is self._model

    @property
    def gathered(self) -> bool:
        """Whether they are gathered from several processes, so that each of these must iterate over all of them."""
        from plaudit.models.sharded import is_sharded

        return is_sharded(self._model)

    @property
    def adapters(self) -> "Adapters | None":
        """All that changes from step to step, if that is LoRA. For an engine that adds it to the `base` weights itself."""
        from plaudit.models.lora import Adapters

        return Adapters.of(self._model)

    @property
    def base(self) -> "Iterator[tuple[str, Tensor]]":
        """As iterating over the weights, without LoRA."""
        from plaudit.models.lora import iter_base_weights

        return iter_base_weights(self._model)

    def __iter__(self) -> "Iterator[tuple[str, Tensor]]":
        from plaudit.models.lora import iter_merged_weights

        return iter_merged_weights(self._model)

    def copy_to(self, model: "nn.Module") -> None:
        """Into a model's own tensors, in place, so that CUDA graphs stay valid."""
        import torch

        own = model.state_dict()
        missing = set(own)
        with torch.no_grad():
            for name, tensor in self:
                if name not in own or own[name].shape != tensor.shape:
                    raise PlauditError(
                        f"the engine's model has no weight {name} of shape {tuple(tensor.shape)}: it is another model"
                    )
                own[name].copy_(tensor)
                missing.discard(name)
        if missing:
            raise PlauditError(f"the trainer's weights lack {min(missing)}, which the engine's model has")


@dataclass(frozen=True)
class EngineSetup:
    """What an engine is built from."""

    rollout: "RolloutSettings"
    """The recipe's section."""
    model: "PreTrainedModel"
    """The policy; or a whole copy of it, if the policy is trained meanwhile (rollout.lag), or is sharded and the engine has no
    `own_weights`. An engine may sample this very model, and so share its storage, or load its own copy and `sync` it."""
    tokenizer: "PreTrainedTokenizerBase"
    world: "World"
    reserved_bytes: int = 0
    """Device memory that the trainer keeps while the engine samples, besides the policy's weights."""
    folder: "Path | None" = None
    """The run's, for logs."""
    returns_memory: bool = True
    """Whether another process needs the device memory that is unused after sampling. If not, this one keeps it for its next update:
    to get 100 GB from the driver takes a quarter of a second."""


def _ignore(new_tokens: int) -> None:
    pass


class Engine(ABC):
    """Samples from one policy, with the weights of the last `sync`."""

    capabilities: ClassVar[Capabilities] = Capabilities()
    own_weights: ClassVar[bool] = False
    """It never samples `EngineSetup.model` itself, and only reads its config, dtype and generation config."""
    version: int = 0
    """Training steps behind the weights; samples carry it."""
    on_step: Callable[[int], None] = staticmethod(_ignore)
    """To be called in `generate` with the number of new tokens, as soon as they are known. It shows progress, and raises an
    exception to leave an engine whose run is asked to stop; one that never calls it is left at its next sample."""

    @abstractmethod
    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Sample]:
        """Samples in the order they finish. Closing the iterator early cancels the rest."""

    @abstractmethod
    def sync(self, version: int, weights: Weights) -> None:
        """From here on, sample with these weights, and give samples this version."""

    def rest(self) -> None:  # noqa: B027 (optional)
        """The trainer is about to use the device; nothing is sampled before the next `sync`."""

    def close(self) -> None:  # noqa: B027 (optional)
        """Release what outlives a call: servers, processes, connections."""
