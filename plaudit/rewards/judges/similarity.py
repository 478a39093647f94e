"""Semantic similarity: the cosine of the embeddings of response and ground truth, from −1 to 1.

The embedding model is a sentence-transformers model in this process. With several accepted truths the nearest one counts. An empty
response is malformed: 0.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import PositiveInt

from plaudit.errors import RecipeError, install_extra
from plaudit.hub import find_problem
from plaudit.rewards.reward import LiveReward, Reward
from plaudit.rewards.rules.ground_truth import no_truth, read_texts
from plaudit.types import Group, Score

Encode = Callable[[list[str]], Any]
"""Texts → an array of one vector each."""


class Similarity(Reward):
    kind: Literal["similarity"]
    """Semantic similarity of response and ground truth (sentence-transformers)."""
    path: str
    """The embedding model: a folder, or a name on the hub."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device it runs on."""
    batch_size: PositiveInt = 32
    """Texts per batch."""

    @property
    def rounded_together(self) -> bool:
        return True

    @property
    def models(self) -> list[str]:
        return [self.path]

    def build(self) -> "LiveSimilarity":
        return LiveSimilarity(self)


class LiveSimilarity(LiveReward[Similarity]):
    def __init__(self, settings: Similarity):
        super().__init__(settings)
        self._encode: Encode | None = None
        self._lock = asyncio.Lock()

    async def open(self) -> None:
        self._encode = await asyncio.to_thread(self._load)

    async def close(self) -> None:
        self._encode = None

    def _load(self) -> Encode:
        try:
            from sentence_transformers import SentenceTransformer  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise RecipeError(
                f"reward '{self.settings.label}': kind: similarity needs sentence-transformers: {install_extra('similarity')}"
            ) from None
        path, device = self.settings.path, None if self.settings.device == "auto" else self.settings.device
        # A name without a slash is one of the sentence-transformers organisation.
        problem = None if Path(path).exists() else find_problem(path if "/" in path else f"sentence-transformers/{path}", "model")
        try:
            model = SentenceTransformer(path, device=device, local_files_only=problem is not None)
        except (OSError, ValueError, RuntimeError) as error:
            reason = f"there is no such folder, and {problem}" if problem else " ".join(str(error).split())[:300]
            raise RecipeError(
                f"reward '{self.settings.label}': cannot load an embedding model from {self.settings.path}: {reason}"
            ) from None
        return partial(model.encode, batch_size=self.settings.batch_size, show_progress_bar=False, convert_to_numpy=True)

    async def score(self, groups: Sequence[Group]) -> list[list[Score]]:
        return [await self._score(group) for group in groups]

    async def _score(self, group: Group) -> list[Score]:
        assert self._encode is not None, "a reward is opened before it scores"
        truths = list(dict.fromkeys(read_texts(group.prompt.ground_truth)))
        if not truths:
            return [no_truth(group.prompt, sample, "similarity", "a text or a list of them") for sample in group.samples]
        responses = [sample.text for sample in group.samples]
        async with self._lock:
            vectors = _unit(await asyncio.to_thread(self._encode, [*truths, *responses]))
        cosines = vectors[len(truths) :] @ vectors[: len(truths)].T
        scores = []
        for response, row in zip(responses, cosines, strict=True):
            if response.strip():
                trace = {"nearest": truths[int(row.argmax())]} if len(truths) > 1 else {}
                scores.append(Score(float(row.max()), view=response, trace=trace))
            else:
                scores.append(Score(0.0, malformed=True, view=response, trace={"malformed": "it is empty"}))
        return scores


def _unit(vectors: Any) -> np.ndarray:
    vectors = np.asarray(vectors, dtype=np.float64)
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
