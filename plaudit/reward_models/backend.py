"""The interface of the model behind a reward: it generates answers, or scores conversations. Where it runs does not matter.

Neither method raises because of a single request: a request that could not be answered comes back as a failure with its cause
(`timeout`, `http`, `rejected`, `unauthorised`, `refused`, `reset`, `garbage`, `died`, …), next to the results of the others.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from plaudit.types import Failure, Message

if TYPE_CHECKING:
    from plaudit.data.control_tokens import ControlTokens, Marked

UNAUTHORISED = "unauthorised"
"""The cause of a failure that every further call would repeat: the server does not accept the key."""
REJECTED = "rejected"
"""The cause of a failure that the same request would repeat: the server does not accept it."""
CONTEXT = "context"
"""The cause of a failure that the same request would repeat: with max_new_tokens, it does not fit into the server's context."""
SERVER_DIED = "server_died"
"""The cause of a failure that every further call would repeat: the server that was started for the model was lost too often."""


def may_be_retried(failure: Failure | None) -> bool:
    """Whether it failed, and another call may succeed."""
    return failure is not None and failure.cause not in (UNAUTHORISED, REJECTED, SERVER_DIED)


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt for a generative model."""

    messages: list[Message]
    """Rendered with the judge's own chat template."""
    text: str | None = None
    """Instead of messages: the complete prompt, special tokens included (plugins produce these)."""
    marked: "Marked | None" = field(default=None, repr=False)
    """`text` with the control tokens of the strings that it quotes marked: these are text. None if it quotes none."""
    key: str = ""
    """Key of the sampling noise, together with the seed: the same key gives the same answer."""
    affinity: str = ""
    """Requests with the same affinity go to the same replica, which may then share their prefix."""
    tokens: list[int] | None = None
    """Instead of messages, for a model on a server: the complete prompt as tokens."""


@dataclass(frozen=True)
class Answer:
    text: str | None
    failure: Failure | None = None
    prompt_tokens: int = 0
    new_tokens: int = 0
    truncated: bool = False
    """It was truncated at max_new_tokens."""
    too_long: bool = False
    """The prompt is longer than max_prompt_tokens or the server's limit. (The policy's fault, so not a failure.)"""
    refused: bool = False
    """Too long by the server's own limit, which may change."""


@dataclass(frozen=True)
class ScalarScore:
    """A scalar model's score of one conversation."""

    value: float | None
    failure: Failure | None = None
    prompt_tokens: int = 0
    too_long: bool = False
    """The conversation is longer than max_prompt_tokens or the server's limit. (The policy's fault, so not a failure.)"""
    refused: bool = False
    """Too long by the server's own limit, which may change."""


@dataclass(frozen=True)
class SamplingParams:
    """How answers are sampled."""

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    """Strings that end an answer, and are not part of it (as with servers)."""
    keep_stop: bool = False
    """For a server: the string that ends an answer is part of it."""
    timeout_s: float = 120.0
    """Time limit for one answer, all attempts of its call included."""


@dataclass
class Usage:
    """Totals since the model was opened. calls = requests + retries, and faults = retries + failures."""

    calls: int = 0
    """Attempts, retries included."""
    retries: int = 0
    """Attempts that repeat a failed one."""
    prompt_tokens: int = 0
    new_tokens: int = 0
    seconds: float = 0.0
    """From request to answer, summed over all requests, concurrent or not."""
    failures: dict[str, int] = field(default_factory=dict)
    """Requests without an answer, by cause."""
    faults: dict[str, int] = field(default_factory=dict)
    """Failed attempts, by cause."""


@dataclass(frozen=True)
class ModelInfo:
    """What is known about an open model."""

    template: Any = None
    """The ChatTemplate or Transcript that renders messages; None if the server does."""
    context: int | None = None
    """Its context length in tokens."""
    name: str = ""
    """Its served name."""
    weights: str = ""
    """The folder or hub name its server has loaded, if the server reports it."""


class Backend(ABC):
    """A model behind rewards. All methods run on the rewards' event loop, so they must not block."""

    usage: Usage

    @property
    def name(self) -> str:
        """Its folder, or its served name."""
        return ""

    @abstractmethod
    async def open(self) -> None:
        """Load, connect to or start the model; raises a RecipeError with the remedy if that fails."""

    @abstractmethod
    async def close(self) -> None:
        """Release it. Called also when `open` failed or was never called."""

    @abstractmethod
    async def generate(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> list[Answer]:
        """An answer to each request, in order."""

    @abstractmethod
    async def score(self, conversations: Sequence[list[Message]]) -> list[ScalarScore]:
        """A scalar model's score of each conversation, which ends with the assistant's message."""

    @property
    def weights(self) -> "Backend":
        """The object whose `load` and `unload` move the weights: the same one for all rewards that share a model."""
        return self

    async def load(self) -> None:  # noqa: B027 (optional)
        """For a model that is not always on the device (`RewardModel.on_device`): take memory there, unless it has. If that fails,
        so do the requests that follow."""

    async def unload(self) -> None:  # noqa: B027
        """For the same: give that memory back."""

    def info(self) -> ModelInfo:
        """Known once it is open."""
        return ModelInfo()

    @property
    def control_tokens(self) -> "ControlTokens | None":
        """Those of its tokenizer; None if only a server knows them."""
        return getattr(self.info().template, "control_tokens", None)
