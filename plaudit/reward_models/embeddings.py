"""A model that embeds texts: in this process (sentence-transformers), or on a server (/v1/embeddings, as OpenAI's).

As a backend it scores: the score of a conversation is the cosine of the embeddings of its last two messages, from −1 to 1. Within a
call every text is embedded once. A text that is longer than the model reads is not truncated: what follows could be anything.

    cos(a, b) = a · b / (|a| |b|)
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from plaudit.errors import RecipeError, install_extra
from plaudit.hub import find_problem
from plaudit.recipe.reward_models import RewardModel
from plaudit.reward_models.backend import Answer, Backend, GenerationRequest, ModelInfo, SamplingParams, ScalarScore, Usage
from plaudit.reward_models.connection import Garbage, TooLong
from plaudit.reward_models.server_client import ServerClient, read_token_count
from plaudit.types import Failure, Message

if TYPE_CHECKING:
    import torch

BATCH_SIZE = 32
"""Texts that a model in this process embeds at once."""
PATH = "/v1/embeddings"


@dataclass(frozen=True)
class Embedding:
    """Of one text, or why there is none."""

    vector: np.ndarray | None = None
    failure: Failure | None = None
    tokens: int = 0
    too_long: bool = False
    refused: bool = False
    """Too long by the server's own limit, which may change."""


def texts_of(conversations: Sequence[list[Message]]) -> list[str]:
    """The texts whose embeddings are compared, each once."""
    return list(dict.fromkeys(str(message["content"]) for messages in conversations for message in messages[-2:]))


def similarity(messages: list[Message], embeddings: Mapping[str, Embedding]) -> ScalarScore:
    """The cosine of the last two messages. If the first of them, a reference, is too long, that is no fault of the response."""
    reference, response = (embeddings[str(message["content"])] for message in messages[-2:])
    if response.too_long:
        return ScalarScore(None, prompt_tokens=response.tokens, too_long=True, refused=response.refused)
    if reference.too_long:
        return ScalarScore(None, Failure("context", "the ground truth is longer than the embedding model reads"))
    if reference.vector is None or response.vector is None:
        return ScalarScore(None, reference.failure or response.failure)
    norms = float(np.linalg.norm(reference.vector) * np.linalg.norm(response.vector))
    cosine = float(reference.vector @ response.vector) / norms if norms > 0 else 0.0
    return ScalarScore(min(max(cosine, -1.0), 1.0), prompt_tokens=response.tokens)


# On a server ---------------------------------------------------------------------------------------------------------


class EmbeddingClient(ServerClient):
    """placement: server, and of a launched one."""

    async def open(self) -> None:
        await super().open()
        try:
            await self._probe()
        except BaseException:
            await self.close()
            raise

    def _shortest_call(self) -> tuple[str, dict[str, Any]]:
        return PATH, _request("1")

    async def score(self, conversations: Sequence[list[Message]]) -> list[ScalarScore]:
        texts = texts_of(conversations)
        embeddings = dict(zip(texts, await self._each(texts, self._embed), strict=True))
        return [similarity(messages, embeddings) for messages in conversations]

    async def _embed(self, text: str) -> Embedding:
        try:
            result = await self._connection.call(PATH, _request(text), _read_embedding)
        except TooLong:
            return Embedding(too_long=True, refused=True)
        if isinstance(result, Failure):
            return Embedding(failure=result)
        self._count(result.tokens)
        limit = self.model.max_prompt_tokens
        return result if limit is None or result.tokens <= limit else Embedding(tokens=result.tokens, too_long=True)


def _request(text: str) -> dict[str, Any]:
    return {"input": text, "encoding_format": "float"}


def _read_embedding(answer: Any) -> Embedding:
    vector = np.asarray(answer["data"][0]["embedding"], dtype=np.float64)
    if vector.ndim != 1 or not vector.size or not np.isfinite(vector).all():
        raise Garbage("no embedding, or one with something other than finite numbers")
    return Embedding(vector, tokens=read_token_count(answer.get("usage") or {}, "prompt_tokens"))


# In this process -----------------------------------------------------------------------------------------------------


class LocalEmbeddings(Backend):
    """placement: resident. One call at a time, so that the last bits of an embedding do not depend on what else is scored."""

    def __init__(self, settings: RewardModel, device: "torch.device | None" = None):
        """`device`: this process's own, if it is one of several."""
        self.settings, self.usage = settings, Usage()
        own = device is not None and settings.device in ("auto", device.type)
        self._device = str(device) if own else None if settings.device == "auto" else settings.device
        self._model: Any = None
        self._lock = asyncio.Lock()

    @property
    def name(self) -> str:
        return str(self.settings.path)

    async def open(self) -> None:
        self._model = await asyncio.to_thread(self._load)

    async def close(self) -> None:
        self._model = None

    def _load(self) -> Any:
        try:
            from sentence_transformers import SentenceTransformer  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise RecipeError(
                f"{self.name}: an embedding model in this process needs sentence-transformers: {install_extra('similarity')}; or "
                "set model.placement to server or launch"
            ) from None
        # A name without a slash is one of the sentence-transformers organisation.
        name = self.name if "/" in self.name else f"sentence-transformers/{self.name}"
        problem = None if Path(self.name).exists() else find_problem(name, "model")
        try:
            return SentenceTransformer(
                self.name,
                device=self._device,
                trust_remote_code=self.settings.trust_remote_code,
                local_files_only=problem is not None,
                model_kwargs=None if self.settings.dtype == "auto" else {"dtype": self.settings.dtype},
            )
        except (OSError, ValueError, RuntimeError) as error:
            reason = f"there is no such folder, and {problem}" if problem else " ".join(str(error).split())[:300]
            raise RecipeError(f"cannot load an embedding model from {self.name}: {reason}") from None

    def info(self) -> ModelInfo:
        return ModelInfo(context=self._longest)

    @property
    def _longest(self) -> int | None:
        """Tokens of the longest text it reads."""
        longest = [self.settings.max_prompt_tokens, getattr(self._model, "max_seq_length", None)]
        return min((limit for limit in longest if limit is not None), default=None)

    async def generate(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> list[Answer]:
        raise NotImplementedError("an embedding model writes nothing")

    async def score(self, conversations: Sequence[list[Message]]) -> list[ScalarScore]:
        began = time.monotonic()
        texts = texts_of(conversations)
        async with self._lock:
            embeddings = dict(zip(texts, await asyncio.to_thread(self._embed, texts), strict=True))
        self.usage.calls += len(texts)
        self.usage.seconds += len(texts) * (time.monotonic() - began)
        self.usage.prompt_tokens += sum(one.tokens for one in embeddings.values() if not one.too_long)
        for failure in (one.failure for one in embeddings.values() if one.failure is not None):
            for counts in (self.usage.failures, self.usage.faults):
                counts[failure.cause] = counts.get(failure.cause, 0) + 1
        return [similarity(messages, embeddings) for messages in conversations]

    def _embed(self, texts: list[str]) -> list[Embedding]:
        from plaudit.reward_models.batch_bisection import failure_of

        longest = self._longest
        try:
            tokens = [len(ids) for ids in self._model.tokenizer(texts, truncation=False, verbose=False)["input_ids"]]
            fits = [longest is None or count <= longest for count in tokens]
            given = [text for text, fit in zip(texts, fits, strict=True) if fit]
            encoded = self._model.encode(given, batch_size=BATCH_SIZE, show_progress_bar=False, convert_to_numpy=True)
            vectors = iter(np.asarray(encoded, dtype=np.float64))
            return [
                Embedding(next(vectors) if fit else None, tokens=count, too_long=not fit)
                for count, fit in zip(tokens, fits, strict=True)
            ]
        except Exception as error:
            return [Embedding(failure=failure_of(error)) for _ in texts]
