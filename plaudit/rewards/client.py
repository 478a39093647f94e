"""One reward, asked about one group after another: within its limits, again where it failed, and never twice for the same thing.

For each group, in this order: which samples it is asked about at all (`when`, gate), what it sees of them (view), what is known
already (cache), then the call itself (concurrency, rate, time limit, retries), and a look at what came back. A reward that needs
several passes over a step's groups is asked like that in each of them; what failed in one is not asked about in the next.
"""

import asyncio
import dataclasses
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from plaudit.files import text_digest
from plaudit.rewards.cache import ScoreCache, keys, reward_digest
from plaudit.rewards.reward import LiveReward, failed, last_line
from plaudit.rewards.view import see
from plaudit.types import Failure, Group, Sample, Score

NOT_ASKED = Score(None)
GIVEN_UP = "given_up"
ROWS_FAULTS = ("no_ground_truth", "no_tokens", "no_field")
"""Causes that say nothing about the reward: the row lacks what it needs."""
Failed = Sequence[Score | None]
"""For each sample: the failure that a pass before this one came to, if it did."""
Work = Callable[[Sequence[Group]], Awaitable[list[list[Score]]]]
"""A reward's `score`, or one of its passes before that."""


class Asker:
    """A reward with its limits, its cache, and counts of what became of its calls. Lives on one event loop."""

    def __init__(self, live: LiveReward, cache: ScoreCache | None = None, *, repeatable: bool = False):
        """`repeatable`: what is known of other groups does not change, in the last bits, what this one's samples are worth."""
        self.live, self.reward = live, live.settings
        reward, self.limits = live.settings, live.settings.limits
        self.counts: Counter[str] = Counter()
        """calls, retries (of samples), cached, scored, malformed, and failures by cause."""
        self.seconds = 0.0
        """Spent in calls, side by side or not."""
        wanted = reward.cached if reward.cache is None else reward.cache
        self._cache = cache if wanted else None
        self._by_group = repeatable and reward.rounded_together
        self._digest: str | None = None
        self._places = asyncio.Semaphore(self.limits.max_concurrent_groups) if self.limits.max_concurrent_groups else None
        self._next_start = 0.0
        self._failed_calls, self._given_up_until = 0, 0.0
        self._last_failure: Failure | None = None

    @property
    def given_up(self) -> Failure | None:
        """Why it is not asked any more, if it is not."""
        most = self.limits.give_up_after
        return self._last_failure if most is not None and self._failed_calls >= most else None

    async def ask(self, group: Group, wanted: Sequence[bool] | None = None, before: Failed = ()) -> tuple[Score, ...]:
        """A score for each sample; NOT_ASKED where `when` does not apply or it is not `wanted`; what failed `before` stays so.
        Never raises for a sample."""
        scores, seen = self._seen(group, wanted, before)
        if seen:
            answers = await self._known_or_asked(dataclasses.replace(group, samples=tuple(sample for _, sample, _ in seen)))
            for (i, _, problem), score in zip(seen, answers, strict=True):
                scores[i] = score if problem is None else dataclasses.replace(score, malformed=True)
        done = [score for score in scores if score is not None]
        assert len(done) == len(group.samples)
        for score in done:
            self._count(score)
        return tuple(done)

    async def prepare(
        self, group: Group, wanted: Sequence[bool] | None, phase: int, before: Failed = ()
    ) -> tuple[Score | None, ...]:  # fmt: skip
        """A pass before the last, about the samples that `ask` will ask about: for each its failure, in this pass or before it."""
        _, seen = self._seen(group, wanted, before)
        failures = list(before) or [None] * len(group.samples)
        if seen:
            part = dataclasses.replace(group, samples=tuple(sample for _, sample, _ in seen))
            names, known = self._known(part)
            left = {name: i for i, name in enumerate(names) if name not in known}
            if left:
                rest = dataclasses.replace(part, samples=tuple(part.samples[i] for i in left.values()))
                scores = await self._with_retries(rest, partial(self.live.prepare, phase=phase))
                failed = {name: score for name, score in zip(left, scores, strict=True) if score.failure is not None}
                for (i, _, _), name in zip(seen, names, strict=True):
                    failures[i] = failed.get(name)
        return tuple(failures)

    def _seen(
        self, group: Group, wanted: Sequence[bool] | None, before: Failed
    ) -> tuple[list[Score | None], list[tuple[int, Sample, str | None]]]:  # fmt: skip
        """Scores of samples that it need not be asked about; and the others as it sees them, with what is wrong with them."""
        if not self.reward.applies_to(group.prompt):
            return [NOT_ASKED] * len(group.samples), []
        scores: list[Score | None] = list(before) or [None] * len(group.samples)
        seen: list[tuple[int, Sample, str | None]] = []
        for i, sample in enumerate(group.samples):
            if wanted is not None and not wanted[i]:
                scores[i] = NOT_ASKED
            elif scores[i] is None:
                view = see(self.reward.view, sample.text)
                if view.scorable:
                    seen.append((i, dataclasses.replace(sample, text=view.text), view.problem))
                else:
                    scores[i] = Score(0.0, malformed=True, view=view.text, trace={"malformed": view.problem})
        return scores, seen

    def _count(self, score: Score) -> None:
        if score.failure is not None:
            self.counts[f"failed: {score.failure.cause}"] += 1
        elif score.asked:
            self.counts["malformed" if score.malformed else "scored"] += 1

    # What is known, and what has to be asked --------------------------------------------------------------------------

    def _known(self, group: Group) -> tuple[list[str], dict[str, Score]]:
        """Each sample's name in the cache, and the scores that are there."""
        if self._cache is None:
            return [str(i) for i in range(len(group.samples))], {}
        self._digest = self._digest or text_digest(reward_digest(self.reward) + "".join(self.live.served_names))
        names = keys(self._digest, group, scores_alone=self.reward.scores_alone)
        if self._by_group:
            of_group = "".join(names)
            names = [text_digest(of_group + name) for name in names]
        known = self._cache.get(names)
        alone = self.reward.scores_alone and not self._by_group
        return names, known if alone or len(known) == len(set(names)) else {}

    async def _known_or_asked(self, group: Group) -> list[Score]:
        if self._cache is None:
            return await self._with_retries(group, self.live.score)
        names, known = self._known(group)
        self.counts["cached"] += len(known)
        left = {name: i for i, name in enumerate(names) if name not in known}  # the same answer twice is asked for once
        if left:
            rest = dataclasses.replace(group, samples=tuple(group.samples[i] for i in left.values()))
            asked = dict(zip(left, await self._with_retries(rest, self.live.score), strict=True))
            self._cache.put(asked)
            known |= asked
        return [known[name] for name in names]

    async def _with_retries(self, group: Group, work: Work) -> list[Score]:
        scores = await self._call(group, work)
        for retry in range(self.limits.group_retries):
            again = [i for i, score in enumerate(scores) if score.failure is not None]
            if not again or self.given_up is not None:
                break
            await asyncio.sleep(self.limits.backoff_s * 2**retry)
            if not self.reward.scores_alone:
                again = list(range(len(scores)))
            self.counts["retries"] += len(again)
            part = dataclasses.replace(group, samples=tuple(group.samples[i] for i in again))
            for i, score in zip(again, await self._call(part, work), strict=True):
                scores[i] = score
        return scores

    # One call ---------------------------------------------------------------------------------------------------------

    async def _call(self, group: Group, work: Work) -> list[Score]:
        if self._places is None:
            return await self._in_turn(group, work)
        async with self._places:
            return await self._in_turn(group, work)

    async def _in_turn(self, group: Group, work: Work) -> list[Score]:
        if self.limits.groups_per_s and self.given_up is None:
            now = time.monotonic()
            start = max(now, self._next_start)
            self._next_start = start + 1.0 / self.limits.groups_per_s
            await asyncio.sleep(start - now)
        if (why := self.given_up) is not None:
            if time.monotonic() < self._given_up_until:
                message = f"not asked: {self._failed_calls} calls in a row had failed, the last with {why.cause}: {why.message}"
                return [failed(GIVEN_UP, message, sample.text) for sample in group.samples]
            self._given_up_until = time.monotonic() + self.limits.pause_s  # one call tries; the others still fail at once
        self.counts["calls"] += 1
        began = time.monotonic()
        scores = await self._asked(group, work)
        self.seconds += time.monotonic() - began
        failures = [score.failure for score in scores if score.failure is not None and score.failure.cause not in ROWS_FAULTS]
        if len(failures) < len(scores):
            self._failed_calls = 0
        else:
            self._failed_calls, self._last_failure = self._failed_calls + 1, failures[-1]
            if self.given_up is not None:
                self._given_up_until = time.monotonic() + self.limits.pause_s
        return scores

    async def _asked(self, group: Group, work: Work) -> list[Score]:
        """A bug in the reward is a failure of these samples, not the end of the run."""
        limit: asyncio.Timeout | None = None
        try:
            async with asyncio.timeout(self.limits.group_timeout_s) as limit:
                given = await work([group])
            shape = [len(scores) for scores in given]
            if shape != [len(group.samples)]:
                raise TypeError(f"score() gave {shape} scores for one group of {len(group.samples)}")
            return [_checked(score, sample.text) for score, sample in zip(given[0], group.samples, strict=True)]
        except Exception as error:
            cause, message = "exception", last_line(error)
            if limit is not None and limit.expired():  # a TimeoutError may be the reward's own
                cause, message = "timeout", f"the group took longer than {self.limits.group_timeout_s} s"
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
