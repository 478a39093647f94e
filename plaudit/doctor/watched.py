"""Stand-ins for the model behind a reward: one that notes what is asked of the real one, and one that only notes."""

import asyncio
import time
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from typing import TypeVar

from plaudit.errors import RecipeError
from plaudit.recipe.reward_models import RewardModel
from plaudit.reward_models.backend import Answer, Backend, GenerationRequest, ModelInfo, SamplingParams, ScalarScore, Usage
from plaudit.types import Failure, Message

T = TypeVar("T")
Asked = GenerationRequest | list[Message]
"""A judge's prompt, or the conversation that a scalar model scores."""
OPEN_S = 60.0
"""How long a server may take to be met …"""
ANSWER_S = 120.0
"""… and to answer; one that has not is not asked again."""
WRITING_S = 60.0
"""How long a model in this process may write."""
TRIAL_TOKENS = 16
SLOW = "slow"
"""The cause where an answer was not waited for: that says nothing about what it would have been."""


class Watched(Backend):
    """The real model, with notes; it is not waited for longer than a person waits."""

    def __init__(self, inner: Backend, settings: RewardModel):
        self.inner, self.usage, self._settings = inner, inner.usage, settings
        self._here = settings.placement in ("resident", "offload")
        self.reads = ModelInfo()
        self.opened = self._hangs = False
        self.seconds = 0.0
        """To open it, and to load it if it is offloaded."""
        self.asked: list[Asked] = []
        self.cut_at: int | None = None
        """Tokens of an answer that could be waited for, if fewer than the recipe's."""

    async def open(self) -> None:
        patience = {"server": OPEN_S, "launch": self._settings.start_timeout_s + OPEN_S}.get(self._settings.placement)
        began = time.monotonic()
        try:
            async with asyncio.timeout(patience):
                await self.inner.open()
        except TimeoutError:
            raise RecipeError(f"{', '.join(self._settings.url) or self._settings.path}: not open after {patience:g} s") from None
        self.seconds += time.monotonic() - began
        self.opened, self.reads = True, self.inner.info()

    async def close(self) -> None:
        await self.inner.close()

    async def load(self) -> None:
        began = time.monotonic()
        await self.inner.load()
        self.seconds += time.monotonic() - began

    async def unload(self) -> None:
        await self.inner.unload()

    async def generate(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> list[Answer]:
        self.asked += requests
        if self._here:
            answers = await self.inner.generate(requests, await self._bounded(requests, params))
            return [self._waited_for(answer) for answer in answers]
        params = replace(params, timeout_s=min(params.timeout_s, ANSWER_S))
        late = Answer(None, Failure("timeout", f"no answer within {params.timeout_s:g} s"))
        if self._hangs:
            return [late] * len(requests)
        # Its own limit comes first, and has more to say.
        answers = await _within(params.timeout_s + 5.0, self.inner.generate(requests, params), [late] * len(requests))
        self._hangs = any(answer.failure is not None and answer.failure.cause == "timeout" for answer in answers)
        return answers

    async def score(self, conversations: Sequence[list[Message]]) -> list[ScalarScore]:
        self.asked += conversations
        late = ScalarScore(None, Failure("timeout", f"no number within {ANSWER_S:g} s"))
        return await _within(ANSWER_S, self.inner.score(conversations), [late] * len(conversations))

    async def _bounded(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> SamplingParams:
        """In this process an answer cannot be interrupted. So it is as long as the patience lasts, at the speed of a trial."""
        if self.cut_at is None and params.max_new_tokens > 4 * TRIAL_TOKENS:
            began = 0.0
            for _ in range(2):  # the first one also warms up
                began = time.monotonic()
                await self.inner.generate(requests, replace(params, max_new_tokens=TRIAL_TOKENS))
            fits = int(WRITING_S * TRIAL_TOKENS / (time.monotonic() - began))
            self.cut_at = max(TRIAL_TOKENS, fits) if fits < params.max_new_tokens else None
        return params if self.cut_at is None else replace(params, max_new_tokens=self.cut_at)

    def _waited_for(self, answer: Answer) -> Answer:
        if self.cut_at is None or not answer.truncated:
            return answer
        message = f"only {self.cut_at:,} tokens of its answer were waited for: it is slow here"
        return replace(answer, failure=Failure(SLOW, message))


async def _within(seconds: float, work: Awaitable[T], otherwise: T) -> T:
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError:
        return otherwise


class Notes(Backend):
    """Nobody: what would be asked is noted, and answered with a text that means nothing."""

    def __init__(self, answer: str):
        self.answer, self.usage = answer, Usage()
        self.asked: list[Asked] = []

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def generate(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> list[Answer]:
        self.asked += requests
        return [Answer(self.answer)] * len(requests)

    async def score(self, conversations: Sequence[list[Message]]) -> list[ScalarScore]:
        self.asked += conversations
        return [ScalarScore(0.0)] * len(conversations)
