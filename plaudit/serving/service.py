"""Rewards that are asked by whoever comes: groups in, scores out as they are ready, each within the request's time.

All of it happens on the rewards' event loop: with the HTTP server on a thread of its own, much of the time went to waking the other
one up. Whatever becomes of a group, it has an answer: scores, or a failure with its cause.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Sequence
from typing import Any, Literal

from plaudit.errors import redact
from plaudit.recipe import RewardSettings
from plaudit.rewards.cache import HARMLESS, settings_without
from plaudit.rewards.reward import last_line
from plaudit.rewards.runner import RewardRunner
from plaudit.scoring import result_of
from plaudit.serving.metrics import Metrics
from plaudit.serving.wire import finite, plain
from plaudit.types import Failure, Group, Score, ScoredGroup

Arrival = int | Failure | None
"""A group that is done, by number; why none will be any more; or that nobody waits for them."""


class Gone(Exception):
    """Whoever asked does not wait for the answer any more."""


class Service:
    def __init__(self, runner: RewardRunner, timeout_s: float):
        """`timeout_s`: the longest that a request may take; groups that have no scores by then have failed."""
        self.metrics = Metrics(runner.askers, runner.amounts)
        self._runner = runner
        self.state: Literal["starting", "ready", "stopping"] = "starting"
        self._timeout_s = timeout_s
        self._waiting: set[asyncio.Queue[Arrival]] = set()

    async def open(self) -> None:
        """Raises what a reward raises that cannot be opened."""
        await self._runner.open()
        self.state = "ready"

    def cut_short(self) -> None:
        """What is under way ends now."""
        for arrivals in self._waiting:
            arrivals.put_nowait(Failure("stopping", "the service was stopped before this was scored"))

    async def score(
        self, groups: Sequence[Group], gone: Awaitable[object]
    ) -> AsyncGenerator[tuple[int, ScoredGroup | Failure], None]:
        """Each group with its number as soon as it is scored. Raises Gone when `gone` is done: then nothing goes on."""
        loop, arrivals = asyncio.get_running_loop(), asyncio.Queue[Arrival]()
        late = Failure("timeout", f"not scored within the {self._timeout_s:g} s that a request may take")
        alarm = loop.call_later(self._timeout_s, arrivals.put_nowait, late)
        watch = asyncio.ensure_future(gone)
        watch.add_done_callback(lambda _: arrivals.put_nowait(None))
        self._waiting.add(arrivals)
        under_way: dict[int, asyncio.Task[ScoredGroup]] = {}
        try:
            for i, group in enumerate(groups):
                under_way[i] = asyncio.create_task(self._runner.score(group))
                under_way[i].add_done_callback(lambda _, i=i: arrivals.put_nowait(i))
            while under_way:
                arrived = await arrivals.get()
                if arrived is None:
                    raise Gone
                if isinstance(arrived, Failure):
                    left, under_way = under_way, {}
                    for task in left.values():
                        task.cancel()
                    for i in left:
                        yield i, self._counted(groups[i], arrived)
                else:
                    yield arrived, self._counted(groups[arrived], _outcome(under_way.pop(arrived)))
        finally:
            self._waiting.discard(arrivals)
            alarm.cancel()
            watch.cancel()
            for task in under_way.values():
                task.cancel()

    def _counted(self, group: Group, outcome: ScoredGroup | Failure) -> ScoredGroup | Failure:
        scores = outcome.scores if isinstance(outcome, ScoredGroup) else [Score(None, failure=outcome)] * len(group.samples)
        self.metrics.count_scores(scores)
        return outcome

    def about(self) -> list[dict[str, Any]]:
        """The rewards, without anything secret."""
        return [
            {
                "name": reward.label,
                "kind": reward.kind,
                "weight": reward.weight,
                "compares_responses": not reward.scores_alone,
                "settings": _redacted({name: value for name, value in _settings(reward).items() if name != "kind"}),
            }
            for reward in self._runner.rewards
        ]


def _outcome(task: asyncio.Task[ScoredGroup]) -> ScoredGroup | Failure:
    if task.cancelled():
        return Failure("stopping", "the service was stopped before this was scored")
    error = task.exception()
    return task.result() if error is None else Failure("exception", last_line(error))


def _settings(reward: RewardSettings) -> dict[str, Any]:
    """What the recipe sets."""
    return _in_both(settings_without(reward, HARMLESS), reward.model_dump(mode="json", exclude_defaults=True))


def _in_both(these: dict[str, Any], those: dict[str, Any]) -> dict[str, Any]:
    both = {name: (these[name], those[name]) for name in these if name in those}
    return {name: _in_both(*pair) if all(isinstance(one, dict) for one in pair) else pair[0] for name, pair in both.items()}


def _redacted(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _redacted(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_redacted(inner) for inner in value]
    return redact(value) if isinstance(value, str) else plain(value)


# Answers -------------------------------------------------------------------------------------------------------------


def answer_of(group: Group, outcome: ScoredGroup | Failure, index: int, id: str | None, *, details: bool) -> dict[str, Any]:
    """A group's scores as they go over the wire: of each response what `plaudit score` writes."""
    if isinstance(outcome, Failure):
        why = {"reward": None, "cause": outcome.cause, "message": redact(outcome.message)}
        nothing = {"reward": None, "parts": {}, "malformed": False, "failure": why, "by_reward": {} if details else None}
        return {"index": index, "id": id, "responses": [nothing] * len(group.samples)}
    columns = result_of(outcome, many=True)
    del columns["view"]  # by reward, if asked for: it is mostly what the asker has sent
    responses = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    for i, response in enumerate(responses):
        response["parts"] = finite(response["parts"])
        if response["failure"] is not None:
            response["failure"]["message"] = redact(response["failure"]["message"])
        response["by_reward"] = {name: _one(name, scores[i]) for name, scores in outcome.by_reward.items()} if details else None
    return {"index": index, "id": id, "responses": responses}


def _one(name: str, score: Score) -> dict[str, Any]:
    failure = score.failure and {"reward": name, "cause": score.failure.cause, "message": redact(score.failure.message)}
    return {
        "value": score.value,
        "parts": finite(score.parts),
        "malformed": score.malformed,
        "failure": failure,
        "view": score.view,
        "trace": plain(score.trace),
    }
