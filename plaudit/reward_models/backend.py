"""What a reward asks of a model: to write an answer, or to give a number. Where the model lives does not matter here.

Both never raise for one request: what could not be answered comes back as a failure with its cause (`timeout`, `http`, `refused`,
`reset`, `garbage`, `died`, …), next to the answers of the others.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from plaudit.types import Failure, Message


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt for a generating judge."""

    messages: list[Message]
    """Rendered with the judge's own chat template."""
    text: str | None = None
    """Instead of messages: the prompt as it is, special tokens and all (plugins write such)."""
    key: str = ""
    """What randomness is keyed by, besides the seed: the same key, the same answer."""
    affinity: str = ""
    """Questions with the same affinity go to the same replica, which may then share their prefix."""


@dataclass(frozen=True)
class Answer:
    text: str | None
    failure: Failure | None = None
    prompt_tokens: int = 0
    new_tokens: int = 0
    truncated: bool = False
    """It was cut at max_new_tokens."""
    too_long: bool = False
    """The prompt is longer than max_prompt_tokens, or than the server takes. (The policy's fault, so no failure.)"""
    refused: bool = False
    """It is the server that said so, by a limit that it may have or not have tomorrow."""


@dataclass(frozen=True)
class ScalarScore:
    """A scalar model's number."""

    value: float | None
    failure: Failure | None = None
    prompt_tokens: int = 0
    too_long: bool = False
    """The conversation is longer than max_prompt_tokens, or than the server takes. (The policy's fault, so no failure.)"""
    refused: bool = False
    """It is the server that said so, by a limit that it may have or not have tomorrow."""


@dataclass(frozen=True)
class SamplingParams:
    """How an answer is written."""

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    """Strings that end an answer; as servers do it, they are not part of it."""
    timeout_s: float = 120.0
    """The longest that one answer may take, all retries of the connection included."""


@dataclass
class Usage:
    """Counts since the model was opened. calls = requests + retries, and faults = retries + failures."""

    calls: int = 0
    """Tries, the repeated ones included."""
    retries: int = 0
    """Tries that repeat one that went wrong."""
    prompt_tokens: int = 0
    new_tokens: int = 0
    seconds: float = 0.0
    """From asking to answer, added up over all requests, side by side or not."""
    failures: dict[str, int] = field(default_factory=dict)
    """Questions without an answer, by cause."""
    faults: dict[str, int] = field(default_factory=dict)
    """Tries that went wrong, by cause."""


@dataclass(frozen=True)
class ModelInfo:
    """How a model that is open reads what it is asked, as far as that is known here."""

    template: Any = None
    """The ChatTemplate or Transcript that messages are rendered with; None: its server renders them."""
    context: int | None = None
    """How many tokens it takes at most."""
    name: str = ""
    """What its server calls it."""
    weights: str = ""
    """The folder or hub name that its server has loaded, if it tells."""


class Backend(ABC):
    """A model that judges. All methods run on the rewards' event loop; what computes or waits long does so elsewhere."""

    usage: Usage

    @property
    def name(self) -> str:
        """Its folder, or what it is called where it is served."""
        return ""

    @abstractmethod
    async def open(self) -> None:
        """Load it, connect to it, or start it; raises a RecipeError that says what to do if that is impossible."""

    @abstractmethod
    async def close(self) -> None:
        """Also when `open` failed or was never called."""

    @abstractmethod
    async def generate(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> list[Answer]:
        """An answer to each, in order."""

    @abstractmethod
    async def score(self, conversations: Sequence[list[Message]]) -> list[ScalarScore]:
        """A scalar model's number for each conversation, which ends with the assistant's message."""

    @property
    def weights(self) -> "Backend":
        """Whose `load` and `unload` bring its weights to the device: the same for all who share a model."""
        return self

    async def load(self) -> None:  # noqa: B027 (nothing to do is a fine way to do it)
        """placement: offload. Onto the device, before a step's groups are scored. What goes wrong is a failure of those who ask."""

    async def unload(self) -> None:  # noqa: B027
        """placement: offload. Off it again; its memory is really returned."""

    def info(self) -> ModelInfo:
        """Once it is open."""
        return ModelInfo()
