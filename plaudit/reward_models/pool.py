"""One model for all rewards of a run that ask it.

Rewards whose `model:` sections are equal, and that use it alike (for numbers, or to write), share one backend: weights that are
read once, one server, one set of connections with their limits. It is opened with the first reward and closed with the last. What
it does is counted once, in its own usage; what each reward asked of it is counted again for that reward.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from weakref import WeakKeyDictionary

from plaudit.recipe.reward_models import RewardModel
from plaudit.reward_models.backend import Answer, Backend, Question, Reading, Usage, Verdict, Writing
from plaudit.reward_models.choose import backend_for
from plaudit.types import Message

COMMON = ("model", "best", "final", "latest", "last", "hf")
"""Names of folders that say nothing without the one around them."""


class SharedModel:
    """A model with those who ask it."""

    def __init__(self, settings: RewardModel, *, scalar: bool, apart: bool):
        self.settings, self.scalar = settings, scalar
        self.backend = backend_for(settings, scalar=scalar, apart=apart)
        self.shares: list[Share] = []
        self._one_at_a_time = asyncio.Lock()
        self._opened = False
        self._problem: Exception | None = None

    async def open(self) -> None:
        """The first to come opens it; what went wrong then, all others hear too."""
        async with self._one_at_a_time:
            if self._problem is not None:
                raise self._problem
            if not self._opened:
                try:
                    await self.backend.open()
                except Exception as problem:
                    self._problem = problem
                    raise
                self._opened = True

    async def leave(self, share: "Share") -> None:
        """The last to go closes it."""
        if share in self.shares:
            self.shares.remove(share)
            if not self.shares:
                _here().models.pop((self.settings, self.scalar), None)
                await self.backend.close()

    @property
    def name(self) -> str:
        """Short, for metrics: the folder's, or what it is served as."""
        *before, last = PurePath(self.backend.name).parts or ("model",)
        common = last in COMMON or last.startswith(("step_", "checkpoint", "global_step"))
        return f"{before[-1]}-{last}" if common and before and before[-1] != "/" else last


class Share(Backend):
    """A model as one reward sees it. `usage` has what this one asked: calls are its questions, however often they were tried."""

    def __init__(self, model: SharedModel, label: str):
        self.model, self.label, self.usage = model, label, Usage()
        model.shares.append(self)

    @property
    def name(self) -> str:
        return self.model.backend.name

    @property
    def weights(self) -> Backend:
        return self.model.backend

    async def open(self) -> None:
        await self.model.open()

    async def close(self) -> None:
        await self.model.leave(self)

    async def write(self, questions: Sequence[Question], writing: Writing) -> list[Answer]:
        answers = await self.model.backend.write(questions, writing)
        self.usage.new_tokens += sum(answer.new_tokens for answer in answers)
        self._count(answers)
        return answers

    async def judge(self, conversations: Sequence[list[Message]]) -> list[Verdict]:
        verdicts = await self.model.backend.judge(conversations)
        self._count(verdicts)
        return verdicts

    def _count(self, results: Sequence[Answer | Verdict]) -> None:
        self.usage.calls += sum(not result.too_long for result in results)
        self.usage.prompt_tokens += sum(result.prompt_tokens for result in results if not result.too_long)
        for failure in (result.failure for result in results if result.failure is not None):
            self.usage.failures[failure.cause] = self.usage.failures.get(failure.cause, 0) + 1

    async def load(self) -> None:
        await self.model.backend.load()

    async def unload(self) -> None:
        await self.model.backend.unload()

    def reading(self) -> Reading:
        return self.model.backend.reading()


# All of an event loop ------------------------------------------------------------------------------------------------


@dataclass
class Models:
    models: dict[tuple[RewardModel, bool], SharedModel] = field(default_factory=dict)
    apart: bool = False


# A runner of rewards has an event loop of its own: what lives on one loop belongs to one recipe.
_MODELS: WeakKeyDictionary[asyncio.AbstractEventLoop, Models] = WeakKeyDictionary()


def compute_apart() -> None:
    """Models that are shared on this event loop from now on give the same numbers to the bit, whoever else asks meanwhile."""
    _here().apart = True


def share(settings: RewardModel, *, scalar: bool, label: str) -> Share:
    """The model, which another reward may have opened already, for the reward called `label`."""
    here, key = _here(), (settings, scalar)
    if key not in here.models:
        here.models[key] = SharedModel(settings, scalar=scalar, apart=here.apart)
    return Share(here.models[key], label)


def _here() -> Models:
    return _MODELS.setdefault(asyncio.get_running_loop(), Models())


# What they were asked ------------------------------------------------------------------------------------------------

Amounts = dict[str, float]
"""calls, retries, prompt_tokens, new_tokens; cost, if the model has prices."""


def amounts(loop: asyncio.AbstractEventLoop) -> dict[str, Amounts]:
    """What was asked of each model since it was opened, by the model's name; of one that several rewards ask, also by
    `model/reward`."""
    found: dict[str, Amounts] = {}
    twins: Counter[str] = Counter()
    # By what they are, not by who came first: names must be the same when a run goes on.
    models = _MODELS.get(loop, Models()).models.values()
    for model in sorted(models, key=lambda one: (one.name, one.scalar, one.settings.model_dump_json())):
        twins[model.name] += 1
        name = f"{model.name}-{twins[model.name]}" if twins[model.name] > 1 else model.name
        found[name] = _amounts(model.backend.usage, model.settings)
        if len(model.shares) > 1:
            for share in sorted(model.shares, key=lambda one: one.label):
                found[f"{name}/{share.label}"] = _amounts(share.usage, model.settings)
    return found


def _amounts(usage: Usage, settings: RewardModel) -> Amounts:
    counted = {"calls": usage.calls, "retries": usage.retries, "prompt_tokens": usage.prompt_tokens, "new_tokens": usage.new_tokens}
    cost = settings.cost(usage.prompt_tokens, usage.new_tokens)
    return {name: float(count) for name, count in counted.items()} | ({} if cost is None else {"cost": cost})


def said(amounts: Amounts) -> str:
    """'120 calls (3 retries), 12,345 + 678 tokens, cost 0.02': for a line in the terminal."""
    retries = f" ({amounts['retries']:,.0f} retries)" if amounts["retries"] else ""
    cost = f", cost {amounts['cost']:.4g}" if "cost" in amounts else ""
    return f"{amounts['calls']:,.0f} calls{retries}, {amounts['prompt_tokens']:,.0f} + {amounts['new_tokens']:,.0f} tokens{cost}"
