"""Rewards with a scripted model behind them."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from plaudit.recipe import RewardSettings, ScoreRecipe
from plaudit.reward_models.backend import Answer, Backend, GenerationRequest, SamplingParams, ScalarScore, Usage
from plaudit.rewards.judges.model_rewards import LiveModelReward
from plaudit.rewards.reward import LiveReward, build
from plaudit.rewards.runner import RewardRunner
from plaudit.types import Failure, Group, Message, Score, ScoredGroup
from support.rewards import group

MODEL = {"path": "models/none"}


class Scripted(Backend):
    """Answers with what `say` returns for a prompt: text, an Answer or a Failure."""

    def __init__(self, say: Callable[..., Any] | str | list[str]):
        self.say, self.usage = say, Usage()
        self.calls: list[tuple[str, SamplingParams]] = []
        self.keys: list[str] = []
        self.questions: list[GenerationRequest] = []
        self.opened = self.closed = self.loaded = 0

    async def open(self) -> None:
        self.opened += 1

    async def close(self) -> None:
        self.closed += 1

    async def load(self) -> None:
        self.loaded += 1

    async def generate(self, questions: Sequence[GenerationRequest], writing: SamplingParams) -> list[Answer]:
        await asyncio.sleep(0)
        return [self._answer(question, writing) for question in questions]

    def _answer(self, question: GenerationRequest, writing: SamplingParams) -> Answer:
        text = question.text if question.text is not None else question.messages[-1]["content"]
        self.calls.append((text, writing))
        self.keys.append(question.key)
        self.questions.append(question)
        if isinstance(self.say, list):
            given = self.say[min(len(self.calls), len(self.say)) - 1]
        else:
            given = self.say if isinstance(self.say, str) else self.say(text)
        if isinstance(given, Failure):
            return Answer(None, given)
        return given if isinstance(given, Answer) else Answer(given, new_tokens=1)

    async def score(self, conversations: Sequence[list[Message]]) -> list[ScalarScore]:
        assert callable(self.say)
        given = [self.say(conversation) for conversation in conversations]
        return [one if isinstance(one, ScalarScore) else ScalarScore(one) for one in given]


def make(kind: str, say: Any = None, **given: Any) -> Any:
    """A reward of a recipe; with `say`, live and with a scripted model behind it."""
    given = {"kind": kind, "model": MODEL, "max_failure_rate": 1.0, **given}
    [reward] = ScoreRecipe.model_validate({"rewards": [given]}).rewards
    return reward if say is None else with_backend(reward, Scripted(say))


def with_backend(reward: RewardSettings, backend: Backend) -> LiveModelReward:
    live = build(reward)
    assert isinstance(live, LiveModelReward)
    live.use(backend)
    return live


def collect(reward: RewardSettings | LiveReward, *groups: Group) -> list[ScoredGroup]:
    with RewardRunner([reward], tolerant=True) as runner:
        return runner.collect(groups)


def scores_of(reward: RewardSettings | LiveReward, *texts: str, **prompt: Any) -> list[Score]:
    [got] = collect(reward, group(*texts, **prompt))
    [scores] = got.by_reward.values()
    return list(scores)


def backend_of(reward: LiveReward) -> Scripted:
    assert isinstance(reward, LiveModelReward)
    assert isinstance(reward.backend, Scripted)
    return reward.backend


def causes(scores: Sequence[Score]) -> list[str | None]:
    return [None if score.failure is None else score.failure.cause for score in scores]
