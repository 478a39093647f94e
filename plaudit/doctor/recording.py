"""Backends for the doctor: one records the inputs of a real model and bounds its time, the other records without a model."""

import asyncio
import time
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from typing import TypeVar

from plaudit.errors import RecipeError
from plaudit.recipe.limits import ModelLimits
from plaudit.recipe.reward_models import RewardModel
from plaudit.reward_models.backend import Answer, Backend, GenerationRequest, ModelInfo, SamplingParams, ScalarScore, Usage
from plaudit.types import Failure, Message

T = TypeVar("T")
ModelInput = GenerationRequest | list[Message]
"""A judge's prompt, or the conversation that a scalar model scores."""
OPEN_TIMEOUT_S = 60.0
"""Time limit for connecting to a server."""
ANSWER_TIMEOUT_S = 120.0
"""Time limit for a server's answer; after one timeout it is not queried again."""
GENERATION_BUDGET_S = 60.0
"""Time that a model in this process may spend on an answer."""
TRIAL_TOKENS = 16
SLOW = "slow"
"""Failure cause for an answer cut short by the time budget: it says nothing about the judge's quality."""


class RecordingBackend(Backend):
    """The real model; records its inputs and keeps it within an interactive user's patience."""

    def __init__(self, inner: Backend, settings: RewardModel, limits: ModelLimits):
        self.inner, self.usage, self._settings, self._limits = inner, inner.usage, settings, limits
        self._in_process = settings.placement in ("resident", "offload")
        self.model_info = ModelInfo()
        self.opened = self._timed_out = False
        self.load_s = 0.0
        """Seconds to open it, and to load it if it is offloaded."""
        self.inputs: list[ModelInput] = []
        self.max_answer_tokens: int | None = None
        """Answer length that fits the time budget, if shorter than the recipe's."""

    async def open(self) -> None:
        timeouts = {"server": OPEN_TIMEOUT_S, "launch": self._limits.start_timeout_s + OPEN_TIMEOUT_S}
        timeout = timeouts.get(self._settings.placement)
        start = time.monotonic()
        try:
            async with asyncio.timeout(timeout):
                await self.inner.open()
        except TimeoutError:
            raise RecipeError(f"{', '.join(self._settings.url) or self._settings.path}: not ready after {timeout:g} s") from None
        self.load_s += time.monotonic() - start
        self.opened, self.model_info = True, self.inner.info()

    async def close(self) -> None:
        await self.inner.close()

    async def load(self) -> None:
        start = time.monotonic()
        await self.inner.load()
        self.load_s += time.monotonic() - start

    async def unload(self) -> None:
        await self.inner.unload()

    async def generate(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> list[Answer]:
        self.inputs += requests
        if self._in_process:
            answers = await self.inner.generate(requests, await self._fit_to_budget(requests, params))
            return [self._mark_slow(answer) for answer in answers]
        params = replace(params, timeout_s=min(params.timeout_s, ANSWER_TIMEOUT_S))
        late = Answer(None, Failure("timeout", f"no answer within {params.timeout_s:g} s"))
        if self._timed_out:
            return [late] * len(requests)
        # The backend's own time limit fires first and gives a more precise message.
        answers = await _with_timeout(params.timeout_s + 5.0, self.inner.generate(requests, params), [late] * len(requests))
        self._timed_out = any(answer.failure is not None and answer.failure.cause == "timeout" for answer in answers)
        return answers

    async def score(self, conversations: Sequence[list[Message]]) -> list[ScalarScore]:
        self.inputs += conversations
        # A divided model is loaded meanwhile, block by block.
        limit = None if isinstance(self._settings.rank, tuple) else ANSWER_TIMEOUT_S
        late = ScalarScore(None, Failure("timeout", f"no score within {ANSWER_TIMEOUT_S:g} s"))
        return await _with_timeout(limit, self.inner.score(conversations), [late] * len(conversations))

    async def _fit_to_budget(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> SamplingParams:
        """Shorten the answer to the time budget, at the speed of a trial: generation in this process cannot be interrupted."""
        if self.max_answer_tokens is None and params.max_new_tokens > 4 * TRIAL_TOKENS:
            start = 0.0
            for _ in range(2):  # the first one is a warm-up
                start = time.monotonic()
                await self.inner.generate(requests, replace(params, max_new_tokens=TRIAL_TOKENS))
            fits = int(GENERATION_BUDGET_S * TRIAL_TOKENS / (time.monotonic() - start))
            self.max_answer_tokens = max(TRIAL_TOKENS, fits) if fits < params.max_new_tokens else None
        return params if self.max_answer_tokens is None else replace(params, max_new_tokens=self.max_answer_tokens)

    def _mark_slow(self, answer: Answer) -> Answer:
        if self.max_answer_tokens is None or not answer.truncated:
            return answer
        message = f"its answer was cut after {self.max_answer_tokens:,} tokens: generation is slow on this machine"
        return replace(answer, failure=Failure(SLOW, message))


async def _with_timeout(seconds: float | None, work: Awaitable[T], default: T) -> T:
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError:
        return default


class DryRunBackend(Backend):
    """No model: records the inputs and returns a fixed answer."""

    def __init__(self, answer: str):
        self.answer, self.usage = answer, Usage()
        self.inputs: list[ModelInput] = []

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def generate(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> list[Answer]:
        self.inputs += requests
        return [Answer(self.answer)] * len(requests)

    async def score(self, conversations: Sequence[list[Message]]) -> list[ScalarScore]:
        self.inputs += conversations
        return [ScalarScore(0.0)] * len(conversations)
