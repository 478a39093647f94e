"""How one kind of server is spoken to: the dialect of `rollout.engine`.

`engine.py` has the contract of engines, `server.py` one server's life and its requests; what differs between vLLM and SGLang is
here: command line, requests, answers, how weights are sent, sleep.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from plaudit.rollout.engine import Capabilities, Sampling, Weights
from plaudit.servers.process import HOST
from plaudit.servers.server_command import ServerCommand

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from plaudit.recipe.rollout import EngineServerSettings


SILENCE_S, SILENCE_OF_TOKENS_S = 1800.0, 300.0
"""Without a complete sample; without a token."""


class ServerLost(Exception):
    """The server is gone, or does not answer any more; a new one may do better."""


class BadAnswer(Exception):
    """What the server answered cannot be used, and another one would answer the same: it ends the run."""


@dataclass(frozen=True)
class Launch:
    """What a server is started with."""

    folder: Path
    """The model without weights: its config and tokenizer."""
    dtype: str
    context: int | None
    """The longest sequence that the model can have."""
    on_gpu: bool
    sleeps: bool
    """It will give its GPU memory back and take it again."""
    lora_rank: int | None = None
    """Of adapters that it will be given."""
    host: str = HOST
    """The address that it listens at."""


class Server(Protocol):
    """A running server, as a dialect sees it. Calls raise ServerLost."""

    settings: "EngineServerSettings"
    folder: Path
    """For files that the server reads."""
    listen_on: str
    """Where its workers reach this process."""
    shares_gpu: bool
    """Its GPU is the one that we train on."""

    def call(self, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Any:
        """The answer to a POST request."""
        ...

    def until_done(self, path: str) -> None:
        """The same, again and again while the server says that it cannot do it yet (HTTP 400)."""
        ...

    def refusal(self, path: str, body: Any) -> str | None:
        """What the server says if it does not do what a POST request says."""
        ...

    def begin(self, path: str, body: Any = None) -> "Future[Any]":
        """The same, without waiting."""
        ...

    def wait(self, answer: "Future[Any]", what: str) -> Any:
        """For what was begun."""
        ...

    @property
    def check(self) -> Callable[[], None]:
        """To be called several times per second while we wait; it may raise."""
        ...


class Dialect(ABC):
    """One for each server. Its methods raise ServerLost and BadAnswer."""

    name: ClassVar[str]
    """As in `rollout.engine`."""
    command: ClassVar[ServerCommand]
    capabilities: ClassVar[Capabilities]
    sample_path: ClassVar[str]
    health_path: ClassVar[str] = "/health"
    metrics_path: ClassVar[str | None] = None
    """Where the server reports what `tokens_computed` reads; None: it is judged by its samples alone."""
    takes_adapters: ClassVar[bool] = False
    """Whether it can be given LoRA adapters instead of merged weights."""
    own_calls: ClassVar[tuple[tuple[str, Any], ...]] = ()
    """Paths and bodies of POST requests that only a server started for plaudit answers. None: rollout.server.url is refused."""

    def __init__(self, settings: "EngineServerSettings"):
        self.settings = settings
        self.run_key = ""
        """The same in all processes of a run, and in no other: a server that outlives a run must not be taken for one that has
        this run's weights."""
        self.syncs = 0
        """How often there were new weights, which need not have a new version."""

    @property
    def silence_s(self) -> float:
        """After so long without a sign of life it is taken for dead."""
        return self.settings.silence_s or (SILENCE_S if self.metrics_path is None else SILENCE_OF_TOKENS_S)

    def label(self, version: int) -> str:
        """The name by which servers know the weights of the last sync."""
        return f"{self.run_key}{version}.{self.syncs}"

    def tokens_computed(self, metrics: str) -> float:
        """Prompt and response tokens since its start, of all requests: as long as they grow, the server is alive."""
        raise NotImplementedError

    def save_model(self, folder: Path, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase") -> None:
        """The model without weights, as the server reads it."""
        model.config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    @abstractmethod
    def arguments(self, launch: Launch, port: int, token: str) -> list[str]:
        """What follows the command. `token`: the key without which the server must answer nothing."""

    @abstractmethod
    def environment(self, token: str, inherited: Mapping[str, str]) -> dict[str, str]:
        """Variables that are added to those inherited."""

    @abstractmethod
    def request(
        self, tokens: np.ndarray, sampling: Sampling, max_new_tokens: int, seed: int, end_tokens: Sequence[int]
    ) -> dict[str, Any]:
        """The body for one sample of a prompt."""

    def request_headers(self, version: int) -> dict[str, str]:
        """Those of a sample by this version of the weights."""
        return {}

    @abstractmethod
    def read(self, answer: Any, version: int) -> tuple[list[int], list[float]]:
        """The sampled tokens, with the end token, and the log-prob of each, under the temperature. Raises ServerLost if they are
        not by this version of the weights, BadAnswer if they are missing."""

    @abstractmethod
    def load(self, server: Server, weights: Weights, version: int, *, first: bool) -> None:
        """Give the server these weights; until they are complete, it must sample nothing that counts. `first`: since it was
        started."""

    @abstractmethod
    def sleep(self, server: Server) -> None:
        """Give its GPU memory back: weights too, which the next sync sends again."""

    @abstractmethod
    def wake(self, server: Server, what: str) -> None:
        """Take GPU memory again, for `weights` or `kv_cache`."""


def require_logprobs(tokens: Any, logprobs: Any) -> None:
    """Raises BadAnswer unless these are tokens with a log-prob each."""
    if not isinstance(tokens, list) or not isinstance(logprobs, list):
        raise BadAnswer(f"no lists of tokens and log-probs in its answer: {str(tokens)[:100]}, {str(logprobs)[:100]}")
    if not tokens or len(tokens) != len(logprobs):
        raise BadAnswer(f"{len(tokens)} tokens with {len(logprobs)} log-probs")
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in tokens):
        raise BadAnswer("a token that is no id")
    if not all(isinstance(one, int | float) and np.isfinite(one) for one in logprobs):
        raise BadAnswer("a log-prob that is no finite number")
