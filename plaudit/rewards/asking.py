"""One reward, asked about one group after another: within its limits, again where it failed, and never twice for the same thing.

For each group, in this order: which samples it is asked about at all (`when`, gate), what it sees of them (view), what is known
already (cache), then the call itself (concurrency, rate, time limit, retries), and a look at what came back.
"""

import asyncio
import dataclasses
import math
import time
from collections import Counter
from collections.abc import Sequence

from plaudit.rewards.cache import ScoreCache, keys, reward_digest
from plaudit.rewards.reward import Reward, failed, last_line
from plaudit.rewards.view import see
from plaudit.types import Failure, Group, Sample, Score

NOT_ASKED = Score(None)
GIVEN_UP = "given_up"
ROWS_FAULTS = ("no_ground_truth", "no_tokens", "no_field")
"""Causes that say nothing about the reward: the row lacks what it needs."""


class Asker:
    """A reward with its limits, its cache, and counts of what became of its calls. Lives on one event loop."""

    def __init__(self, reward: Reward, cache: ScoreCache | None = None):
        self.reward, self.limits = reward, reward.limits
        self.counts: Counter[str] = Counter()
        """calls, retries (of samples), cached, scored, malformed, and failures by cause."""
        self.seconds = 0.0
        """Spent in calls, side by side or not."""
        wanted = reward.cached if reward.cache is None else reward.cache
        self._cache = cache if wanted else None
        self._digest: str | None = None
        self._places = asyncio.Semaphore(self.limits.at_once) if self.limits.at_once else None
        self._next_start = 0.0
        self._failed_calls, self._given_up_until = 0, 0.0
        self._last_failure: Failure | None = None

    @property
    def given_up(self) -> Failure | None:
        """Why it is not asked any more, if it is not."""
        most = self.limits.give_up_after
        return self._last_failure if most is not None and self._failed_calls >= most else None

    async def ask(self, group: Group, wanted: Sequence[bool] | None = None) -> tuple[Score, ...]:
        """A score for each sample; NOT_ASKED where `when` does not apply or it is not `wanted`. Never raises for a sample."""
        if not self.reward.applies_to(group.prompt):
            return (NOT_ASKED,) * len(group.samples)
        scores: list[Score | None] = [None] * len(group.samples)
        seen: list[tuple[int, Sample, str | None]] = []
        for i, sample in enumerate(group.samples):
            if wanted is not None and not wanted[i]:
                scores[i] = NOT_ASKED
                continue
            view = see(self.reward.view, sample.text)
            if view.scorable:
                seen.append((i, dataclasses.replace(sample, text=view.text), view.problem))
            else:
                scores[i] = Score(0.0, malformed=True, view=view.text, trace={"malformed": view.problem})
        if seen:
            answers = await self._known_or_asked(dataclasses.replace(group, samples=tuple(sample for _, sample, _ in seen)))
            for (i, _, problem), score in zip(seen, answers, strict=True):
                scores[i] = score if problem is None else dataclasses.replace(score, malformed=True)
        done = [score for score in scores if score is not None]
        assert len(done) == len(group.samples)
        for score in done:
            self._count(score)
        return tuple(done)

    def _count(self, score: Score) -> None:
        if score.failure is not None:
            self.counts[f"failed: {score.failure.cause}"] += 1
        elif score.asked:
            self.counts["malformed" if score.malformed else "scored"] += 1

    # What is known, and what has to be asked --------------------------------------------------------------------------

    async def _known_or_asked(self, group: Group) -> list[Score]:
        if self._cache is None:
            return await self._with_retries(group)
        self._digest = self._digest or reward_digest(self.reward)
        names = keys(self._digest, group, scores_alone=self.reward.scores_alone)
        known = self._cache.get(names)
        if not self.reward.scores_alone and len(known) < len(names):
            known = {}
        self.counts["cached"] += len(known)
        left = {name: i for i, name in enumerate(names) if name not in known}  # the same answer twice is asked for once
        if left:
            rest = dataclasses.replace(group, samples=tuple(group.samples[i] for i in left.values()))
            asked = dict(zip(left, await self._with_retries(rest), strict=True))
            self._cache.put(asked)
            known |= asked
        return [known[name] for name in names]

    async def _with_retries(self, group: Group) -> list[Score]:
        scores = await self._call(group)
        for retry in range(self.limits.retries):
            again = [i for i, score in enumerate(scores) if score.failure is not None]
            if not again or self.given_up is not None:
                break
            await asyncio.sleep(self.limits.backoff_s * 2**retry)
            if not self.reward.scores_alone:
                again = list(range(len(scores)))
            self.counts["retries"] += len(again)
            part = dataclasses.replace(group, samples=tuple(group.samples[i] for i in again))
            for i, score in zip(again, await self._call(part), strict=True):
                scores[i] = score
        return scores

    # One call ---------------------------------------------------------------------------------------------------------

    async def _call(self, group: Group) -> list[Score]:
        if self._places is None:
            return await self._in_turn(group)
        async with self._places:
            return await self._in_turn(group)

    async def _in_turn(self, group: Group) -> list[Score]:
        if self.limits.per_s and self.given_up is None:
            now = time.monotonic()
            start = max(now, self._next_start)
            self._next_start = start + 1.0 / self.limits.per_s
            await asyncio.sleep(start - now)
        if (why := self.given_up) is not None:
            if time.monotonic() < self._given_up_until:
                message = f"not asked: {self._failed_calls} calls in a row had failed, the last with {why.cause}: {why.message}"
                return [failed(GIVEN_UP, message, sample.text) for sample in group.samples]
            self._given_up_until = time.monotonic() + self.limits.pause_s  # one call tries; the others still fail at once
        self.counts["calls"] += 1
        began = time.monotonic()
        scores = await self._asked(group)
        self.seconds += time.monotonic() - began
        failures = [score.failure for score in scores if score.failure is not None and score.failure.cause not in ROWS_FAULTS]
        if len(failures) < len(scores):
            self._failed_calls = 0
        else:
            self._failed_calls, self._last_failure = self._failed_calls + 1, failures[-1]
            if self.given_up is not None:
                self._given_up_until = time.monotonic() + self.limits.pause_s
        return scores

    async def _asked(self, group: Group) -> list[Score]:
        """A bug in the reward is a failure of these samples, not the end of the run."""
        limit: asyncio.Timeout | None = None
        try:
            async with asyncio.timeout(self.limits.timeout_s) as limit:
                given = await self.reward.score([group])
            shape = [len(scores) for scores in given]
            if shape != [len(group.samples)]:
                raise TypeError(f"score() gave {shape} scores for one group of {len(group.samples)}")
            return [_checked(score, sample.text) for score, sample in zip(given[0], group.samples, strict=True)]
        except Exception as error:
            cause, message = "exception", last_line(error)
            if limit is not None and limit.expired():  # a TimeoutError may be the reward's own
                cause, message = "timeout", f"the group took longer than {self.limits.timeout_s} s"
        return [failed(cause, message, sample.text) for sample in group.samples]


def _checked(score: Score, text: str) -> Score:
    """Either a finite value or a failure; finite parts only; and what was scored, if the reward does not say."""
    if not isinstance(score, Score):
        return failed("bad_result", f"score() gave a {type(score).__name__}, not a Score", text)
    view = text if score.view is None else score.view
    if score.failure is not None:
        return dataclasses.replace(score, value=None, view=view)
    try:
        value = math.nan if score.value is None or isinstance(score.value, str) else float(score.value)
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        failure = Failure("not_a_number", f"the value is {score.value!r:.100}")
        return dataclasses.replace(score, value=None, failure=failure, view=view)
    parts = {name: float(part) for name, part in score.parts.items() if math.isfinite(part)}
    return dataclasses.replace(score, value=value, parts=parts, view=view)
