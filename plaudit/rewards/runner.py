"""Scores groups while others are still being sampled.

The rewards live on an event loop with a thread of its own. `collect` pulls groups on the caller's thread, where sampling goes on,
and hands each one to all rewards as it comes; what it returns has the order in which the groups came.
"""

import asyncio
import dataclasses
import math
import threading
import time
from collections import Counter
from collections.abc import Coroutine, Generator, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any, Self

from plaudit.errors import TrainingStopped
from plaudit.recipe import RewardSettings
from plaudit.rewards.combine import combine
from plaudit.rewards.reward import Reward, failed, last_line
from plaudit.types import Failure, Group, Score, ScoredGroup


class RewardRunner:
    """`with RewardRunner(recipe.rewards) as rewards: scored = rewards.collect(groups)`."""

    def __init__(self, rewards: Sequence[RewardSettings]):
        self.rewards = [reward for reward in rewards if isinstance(reward, Reward)]
        assert len(self.rewards) == len(rewards), "settings become rewards when a recipe is read"
        self.waited_s = 0.0
        """How long the last `collect` waited for scores after the last group was sampled."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rewards", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self._submit(_all(reward.open() for reward in self.rewards)).result()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._submit(self._close()).result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def collect(self, groups: Iterable[Group], expected: int | None = None) -> list[ScoredGroup]:
        """All groups with their scores. Raises TrainingStopped when a reward fails more than its settings allow: as soon as that
        is certain, if it is told how many samples to expect."""
        step = _Step(self.rewards, expected)
        pending: list[Future[ScoredGroup]] = []
        try:
            for group in groups:
                step.samples += len(group.samples)
                pending.append(self._submit(self._score(group, step)))
                step.check()
            step.all_sampled = True
            step.check()
            sampled = time.monotonic()
            wait(pending, return_when=FIRST_EXCEPTION)
            step.check()
            self.waited_s = time.monotonic() - sampled
            return [future.result() for future in pending]
        except BaseException:
            for future in pending:
                future.cancel()
            if isinstance(groups, Generator):
                groups.close()  # sampling ends now, not when somebody lets go of the traceback
            raise

    async def _score(self, group: Group, step: "_Step") -> ScoredGroup:
        by_reward = await asyncio.gather(*(_ask(reward, group) for reward in self.rewards))
        step.count(group, by_reward)
        step.check()  # raised here, it ends the wait for the others
        scores = tuple(combine(self.rewards, scores) for scores in zip(*by_reward, strict=True))
        return ScoredGroup(group, scores, dict(zip((reward.label for reward in self.rewards), by_reward, strict=True)))

    async def _close(self) -> None:
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        if rest:
            await asyncio.wait(rest, timeout=5.0)  # rewards are closed when nothing uses them any more
        await _all(reward.close() for reward in self.rewards)
        await self._loop.shutdown_default_executor()

    def _submit(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)


async def _all(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Do them side by side, all to their end; then raise what the first one raised."""
    for error in await asyncio.gather(*works, return_exceptions=True):
        if error is not None:
            raise error


# One reward, one group -----------------------------------------------------------------------------------------------


async def _ask(reward: Reward, group: Group) -> tuple[Score, ...]:
    """A reward's scores of a group. A bug in the reward is a failure of these samples, not the end of the run."""
    try:
        given = await reward.score([group])
        shape = [len(scores) for scores in given]
        if shape != [len(group.samples)]:
            raise TypeError(f"score() gave {shape} scores for one group of {len(group.samples)}")
        return tuple(_checked(score, sample.text) for score, sample in zip(given[0], group.samples, strict=True))
    except Exception as error:
        return tuple(failed("exception", last_line(error), sample.text) for sample in group.samples)


def _checked(score: Score, text: str) -> Score:
    """Either a finite value or a failure; finite parts only."""
    if not isinstance(score, Score):
        return failed("bad_result", f"score() gave a {type(score).__name__}, not a Score", text)
    if score.failure is not None:
        return dataclasses.replace(score, value=None)
    try:
        value = math.nan if score.value is None or isinstance(score.value, str) else float(score.value)
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        return dataclasses.replace(score, value=None, failure=Failure("not_a_number", f"the value is {score.value!r:.100}"))
    parts = {name: float(part) for name, part in score.parts.items() if math.isfinite(part)}
    return dataclasses.replace(score, value=value, parts=parts)


# One step's failures -------------------------------------------------------------------------------------------------


class _Step:
    """Counts each reward's failures during one `collect`, and knows when they are too many."""

    def __init__(self, rewards: Sequence[Reward], expected: int | None):
        self.samples = 0
        self.all_sampled = False
        self._expected = expected
        self._failures: list[tuple[Reward, list[Failure]]] = [(reward, []) for reward in rewards]
        self._failed: list[dict[str, Any]] = []

    def count(self, group: Group, by_reward: Sequence[Sequence[Score]]) -> None:
        for (reward, failures), scores in zip(self._failures, by_reward, strict=True):
            for sample, score in zip(group.samples, scores, strict=True):
                if score.failure is not None:
                    failures.append(score.failure)
                    prompt = {"prompt_id": group.prompt.id, "prompt": group.prompt.messages, "response": sample.text}
                    why = {"reward": reward.label, "cause": score.failure.cause, "message": score.failure.message}
                    self._failed.append({**prompt, **why})

    def check(self) -> None:
        """Raise as soon as it is certain: at the first failure if that is to stop the run; a share when all samples are known."""
        for reward, failures in self._failures:
            if failures and reward.on_failure == "stop":
                raise TrainingStopped(f"{self._told(reward, failures)}; on_failure is stop. {_GO_ON}", self._failed)
            samples = self.samples if self.all_sampled else self._expected
            if samples and reward.weight and len(failures) > reward.max_failure_rate * samples:
                told = f"{self._told(reward, failures)}; max_failure_rate is {reward.max_failure_rate:g}. {_GO_ON}"
                raise TrainingStopped(told, self._failed)

    def _told(self, reward: Reward, failures: Sequence[Failure]) -> str:
        """37 of 64 samples (33 timeout: after 10 s, 4 exception: …): each cause with its commonest message."""
        causes = []
        for cause, count in Counter(failure.cause for failure in failures).most_common():
            [(message, _)] = Counter(failure.message for failure in failures if failure.cause == cause).most_common(1)
            causes.append(f"{count} {cause}: {' '.join(message.split())[:300]}")
        samples = self._expected or self.samples
        return f"reward '{reward.label}' failed on at least {len(failures)} of {samples} samples ({', '.join(causes)})"


_GO_ON = "Mend it, then go on with the same command."
