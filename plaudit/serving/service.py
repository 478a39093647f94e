"""The scoring service: groups in, scores out as they finish, within the request's time limit.

The HTTP server runs on the rewards' event loop: on a separate thread, much of the time went into waking up the other one. So that
`/health` and small requests never wait long, requests take turns: the groups of a large one start as far as time is left in an
iteration of the loop (`plaudit/turns.py`). Every group gets a result: scores, or a failure with its cause.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Sequence
from typing import Any, Literal

from plaudit.recipe import RewardSettings
from plaudit.redaction import redact
from plaudit.rewards.cache import HARMLESS, settings_without
from plaudit.rewards.reward import last_line
from plaudit.rewards.runner import RewardRunner
from plaudit.scoring import result_of_sample, reward_scores
from plaudit.serving.metrics import Metrics
from plaudit.serving.schemas import finite_only, to_jsonable
from plaudit.turns import turns
from plaudit.types import Failure, Group, Score, ScoredGroup

Arrival = int | Failure | None
"""Index of a finished group; a failure that ends all remaining groups; or None if the client disconnected."""


class ClientDisconnected(Exception):
    """The client disconnected before its request was finished."""


class Service:
    def __init__(self, runner: RewardRunner, timeout_s: float):
        """`timeout_s`: time limit per request; groups not scored by then fail."""
        self.metrics = Metrics(runner.clients, runner.amounts)
        self._runner = runner
        self.state: Literal["starting", "ready", "stopping"] = "starting"
        self.responses_in_flight = 0
        self._timeout_s = timeout_s
        self._waiting: set[asyncio.Queue[Arrival]] = set()

    async def open(self) -> None:
        """Open the rewards; raises the error of one that cannot be opened."""
        await self._runner.open()
        self.state = "ready"

    def abort(self) -> None:
        """End all requests in flight with failure `stopping`."""
        for arrivals in self._waiting:
            arrivals.put_nowait(Failure("stopping", "the service was stopped before this was scored"))

    async def score(
        self, groups: Sequence[Group], disconnected: Awaitable[object]
    ) -> AsyncGenerator[tuple[int, ScoredGroup | Failure], None]:
        """Yield each group's index and outcome as it is scored. Cancels the rest and raises once the client has `disconnected`."""
        loop, arrivals = asyncio.get_running_loop(), asyncio.Queue[Arrival]()
        timeout = Failure("timeout", f"not scored within the request's time limit of {self._timeout_s:g} s")
        timer = loop.call_later(self._timeout_s, arrivals.put_nowait, timeout)
        watch = asyncio.ensure_future(disconnected)
        watch.add_done_callback(lambda _: arrivals.put_nowait(None))
        self._waiting.add(arrivals)
        started: dict[int, asyncio.Task[ScoredGroup]] = {}
        unfinished = dict.fromkeys(range(len(groups)))
        starting = self._start(groups, started, arrivals)
        responses = sum(len(group.samples) for group in groups)
        self.responses_in_flight += responses
        try:
            while unfinished:
                arrival = await arrivals.get()
                if arrival is None:
                    raise ClientDisconnected
                if isinstance(arrival, Failure):
                    if starting is not None:
                        starting.cancel()
                    for task in started.values():
                        task.cancel()
                    failed, unfinished = unfinished, {}
                    for i in failed:
                        yield i, self._count(groups[i], arrival)
                else:
                    del unfinished[arrival]
                    yield arrival, self._count(groups[arrival], _outcome(started.pop(arrival)))
        finally:
            self.responses_in_flight -= responses
            self._waiting.discard(arrivals)
            timer.cancel()
            watch.cancel()
            if starting is not None:
                starting.cancel()
            for task in started.values():
                task.cancel()

    def _start(
        self, groups: Sequence[Group], started: dict[int, asyncio.Task[ScoredGroup]], arrivals: asyncio.Queue[Arrival]
    ) -> asyncio.Task[None] | None:
        """Start as many groups as there is time for, and return the task that starts the others."""
        turn = turns()

        def start(i: int) -> None:
            started[i] = asyncio.create_task(self._runner.score(groups[i]))
            started[i].add_done_callback(lambda _: arrivals.put_nowait(i))

        async def start_others(first: int) -> None:
            for i in range(first, len(groups)):
                await turn.take()
                start(i)

        for i in range(len(groups)):
            if turn.over:
                return asyncio.create_task(start_others(i))
            start(i)
        return None

    def _count(self, group: Group, outcome: ScoredGroup | Failure) -> ScoredGroup | Failure:
        scores = outcome.scores if isinstance(outcome, ScoredGroup) else [Score(None, failure=outcome)] * len(group.samples)
        self.metrics.count_scores(scores)
        return outcome

    def describe_rewards(self) -> list[dict[str, Any]]:
        """Names and settings of the rewards, with secrets redacted."""
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
    """Settings that affect scores and differ from the defaults."""
    return _intersection(settings_without(reward, HARMLESS), reward.model_dump(mode="json", exclude_defaults=True))


def _intersection(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """`a` restricted, recursively, to the keys of `b`."""
    both = {name: (a[name], b[name]) for name in a if name in b}
    return {
        name: _intersection(*pair) if all(isinstance(value, dict) for value in pair) else pair[0] for name, pair in both.items()
    }


def _redacted(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _redacted(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_redacted(inner) for inner in value]
    return redact(value) if isinstance(value, str) else to_jsonable(value)


# Responses -----------------------------------------------------------------------------------------------------------


def scored_responses(outcome: ScoredGroup | Failure, part: range, *, details: bool) -> list[dict[str, Any]]:
    """Some of a group's scores as ScoredResponses: the columns that `plaudit score` writes."""
    if isinstance(outcome, Failure):
        failure = {"reward": None, "cause": outcome.cause, "message": redact(outcome.message)}
        unscored = {"reward": None, "parts": {}, "malformed": False, "failure": failure, "by_reward": {} if details else None}
        return [unscored] * len(part)
    return [_scored_response(outcome, i, details=details) for i in part]


def _scored_response(scored: ScoredGroup, i: int, *, details: bool) -> dict[str, Any]:
    response = result_of_sample(scored, i)
    del response["view"]  # returned per reward with `details`: it mostly repeats the request
    response["parts"] = finite_only(response["parts"])
    if response["failure"] is not None:
        response["failure"]["message"] = redact(response["failure"]["message"])
    response["by_reward"] = _jsonable(reward_scores(scored, i)) if details else None
    return response


def _jsonable(by_reward: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    for score in by_reward.values():
        score["parts"], score["trace"] = finite_only(score["parts"]), to_jsonable(score["trace"])
        if score["failure"] is not None:
            score["failure"]["message"] = redact(score["failure"]["message"])
    return by_reward
