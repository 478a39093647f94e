"""The client of one reward: calls it for one group after another, within its limits, with retries and a cache.

For each group, in this order: which samples the reward applies to (`when`, gate), what it sees of them (view), which scores are
cached, then the call itself (concurrency, rate, time limit, retries) and a check of the result. A reward that needs several passes
over a step's groups is called like this in each pass; samples that failed in one pass are left out of the next.

A group takes its turn on the event loop (`turns.py`), a large one in slices: a call is then short, whatever the reward computes
before it first waits for something.
"""

import asyncio
import dataclasses
import math
import operator
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from plaudit.errors import PeerLost
from plaudit.files import text_digest
from plaudit.redaction import redact_all
from plaudit.reward_models.backend import may_be_retried
from plaudit.rewards.cache import ScoreCache, keys, reward_digest
from plaudit.rewards.reward import LONG_TEXT, LiveReward, failed, last_line
from plaudit.rewards.view import see_saved, with_view
from plaudit.turns import turns
from plaudit.types import DECLINED, LARGEST_REWARD, Failure, Group, Sample, Score

NOT_SCORED = Score(None)
"""The reward does not apply to the sample."""
GIVEN_UP = "given_up"
SLICE_SAMPLES, SLICE_CHARACTERS = 64, 4 * LONG_TEXT
"""Larger groups are scored in slices of at most this size (or of one response) by rewards that score each sample alone."""
ROW_FAULTS = ("no_ground_truth", "no_tokens", "no_field")
"""Causes due to the row, which lacks what the reward needs: they say nothing about the reward."""
EarlierFailures = Sequence[Score | None]
"""For each sample: its failure in an earlier pass, if there was one."""
Work = Callable[[Sequence[Group]], Awaitable[list[list[Score]]]]
"""A reward's `score`, or one of its earlier passes."""


class RewardClient:
    """A reward with its limits, its cache, and counts of its calls. Lives on one event loop."""

    def __init__(self, live: LiveReward, cache: ScoreCache | None = None, *, repeatable: bool = False):
        """`repeatable`: cached scores of other groups do not change the last bits of this group's."""
        self.live, self.reward = live, live.settings
        self.limits = self.reward.limits
        self.counts: Counter[str] = Counter()
        """calls, retries (of samples), cached, scored, malformed, and failures by cause."""
        self.seconds = 0.0
        """Time spent in calls, summed over concurrent ones."""
        use_cache = self.reward.cached if self.reward.cache is None else self.reward.cache
        self._cache = cache if use_cache else None
        self._by_group = repeatable and self.reward.rounded_together
        self._digest: str | None = None
        self._slots = asyncio.Semaphore(self.limits.max_concurrent_groups) if self.limits.max_concurrent_groups else None
        self._next_start = 0.0
        self._failed_calls, self._given_up_until = 0, 0.0
        self._last_failure: Failure | None = None

    @property
    def given_up(self) -> Failure | None:
        """The last failure, if the reward has failed so often that it is not called for now."""
        limit = self.limits.give_up_after
        return self._last_failure if limit is not None and self._failed_calls >= limit else None

    async def score(self, group: Group, selected: Sequence[bool] | None = None, earlier: EarlierFailures = ()) -> tuple[Score, ...]:
        """A score for each sample: NOT_SCORED where `when` does not match or it is not `selected`, the earlier failure where there
        is one. Never raises for a sample."""
        scores, views = await self._seen(group, selected, earlier)
        if views:
            results = await self._cached_or_scored(subgroup(group, [sample for _, sample, _ in views]))
            for (i, _, problem), score in zip(views, results, strict=True):
                scores[i] = score if problem is None else dataclasses.replace(score, malformed=True)
        complete = [score for score in scores if score is not None]
        assert len(complete) == len(group.samples)
        for score in complete:
            self._count(score)
        return tuple(complete)

    async def prepare(
        self, group: Group, selected: Sequence[bool] | None, phase: int, earlier: EarlierFailures = ()
    ) -> tuple[Score | None, ...]:  # fmt: skip
        """A pass before the last, over the samples that `score` will score: each one's failure, in this pass or an earlier one."""
        _, views = await self._seen(group, selected, earlier)
        failures = list(earlier) or [None] * len(group.samples)
        if views:
            seen = subgroup(group, [sample for _, sample, _ in views])
            names, cached = await self._lookup(seen)
            left = {name: i for i, name in enumerate(names) if name not in cached}
            if left:
                rest = subgroup(seen, [seen.samples[i] for i in left.values()])
                scores = await self._with_retries(rest, partial(self.live.prepare, phase=phase))
                failed = {name: score for name, score in zip(left, scores, strict=True) if score.failure is not None}
                for (i, _, _), name in zip(views, names, strict=True):
                    failures[i] = failed.get(name)
        return tuple(failures)

    async def _seen(
        self, group: Group, selected: Sequence[bool] | None, earlier: EarlierFailures
    ) -> tuple[list[Score | None], list[tuple[int, Sample, str | None]]]:  # fmt: skip
        """Scores that need no call; and the remaining samples as the reward sees them, each with its index and format problem."""
        turn = turns()
        await turn.take()
        if not self.reward.applies_to(group.prompt):
            return [NOT_SCORED] * len(group.samples), []
        scores: list[Score | None] = list(earlier) or [None] * len(group.samples)
        views: list[tuple[int, Sample, str | None]] = []
        for start in range(0, len(group.samples), SLICE_SAMPLES):
            await turn.take()
            part = range(start, min(start + SLICE_SAMPLES, len(group.samples)))
            if any(len(group.samples[i].text) > LONG_TEXT for i in part):
                views += await turn.in_thread(self._views, group, part, selected, scores)
            else:
                views += self._views(group, part, selected, scores)
        return scores, views

    def _views(
        self, group: Group, part: range, selected: Sequence[bool] | None, scores: list[Score | None]
    ) -> list[tuple[int, Sample, str | None]]:  # fmt: skip
        """`_seen` for a part of the samples; adds to `scores`."""
        views: list[tuple[int, Sample, str | None]] = []
        for i in part:
            sample = group.samples[i]
            if selected is not None and not selected[i]:
                scores[i] = NOT_SCORED
            elif scores[i] is None:
                view = see_saved(self.reward.view, sample)
                if view.scorable:
                    seen = sample if view.text is sample.text else with_view(sample, view.text)
                    views.append((i, seen, view.problem))
                else:
                    scores[i] = Score(0.0, malformed=True, view=view.text, trace={"malformed": view.problem})
        return views

    def _count(self, score: Score) -> None:
        if score.failure is not None:
            self.counts[f"failed: {score.failure.cause}"] += 1
        elif score.applies:
            self.counts["malformed" if score.malformed else "scored"] += 1

    # Cache and retries ------------------------------------------------------------------------------------------------

    async def _lookup(self, group: Group) -> tuple[list[str], dict[str, Score]]:
        """Each sample's key in the cache, and the scores found there."""
        if self._cache is None:
            return [str(i) for i in range(len(group.samples))], {}
        names: list[str] = []
        scores: dict[str, Score] = {}
        for part in self._slices(group):
            await turns().take()
            if any(len(sample.text) > LONG_TEXT for sample in part.samples):
                part_names = await turns().in_thread(self._keys, part)
            else:
                part_names = self._keys(part)
            found = self._cache.get(part_names)
            alone = self.reward.scores_alone and not self._by_group
            names += part_names
            scores |= found if alone or len(found) == len(set(part_names)) else {}
        return names, scores

    def _keys(self, group: Group) -> list[str]:
        self._digest = self._digest or text_digest(reward_digest(self.reward) + "".join(self.live.served_names))
        names = keys(self._digest, group, scores_alone=self.reward.scores_alone)
        if self._by_group:
            of_group = "".join(names)
            names = [text_digest(of_group + name) for name in names]
        return names

    async def _cached_or_scored(self, group: Group) -> list[Score]:
        if self._cache is None:
            return await self._with_retries(group, self.live.score)
        names, scores = await self._lookup(group)
        self.counts["cached"] += len(scores)
        left = {name: i for i, name in enumerate(names) if name not in scores}  # identical responses are scored once
        if left:
            rest = subgroup(group, [group.samples[i] for i in left.values()])
            new = dict(zip(left, await self._with_retries(rest, self.live.score, rest_of_group=bool(scores)), strict=True))
            for part in _parts(rest.samples):
                await turns().take()
                self._cache.put({name: new[name] for name in list(left)[part]})
            scores |= new
        return [scores[name] for name in names]

    async def _with_retries(self, group: Group, work: Work, *, rest_of_group: bool = False) -> list[Score]:
        """`rest_of_group`: the group's other samples have a score already."""
        scores = await self._call(group, work, rest_of_group)
        for retry in range(self.limits.group_retries):
            again = [i for i, score in enumerate(scores) if may_be_retried(score.failure)]
            if not again or self.given_up is not None:
                break
            await asyncio.sleep(self.limits.group_backoff_s * 2**retry)
            if not self.reward.scores_alone:
                again = list(range(len(scores)))
            self.counts["retries"] += len(again)
            rest_of_group |= len(again) < len(scores)
            retried = subgroup(group, [group.samples[i] for i in again])
            for i, score in zip(again, await self._call(retried, work, rest_of_group), strict=True):
                scores[i] = score
        return scores

    # One call ---------------------------------------------------------------------------------------------------------

    async def _call(self, group: Group, work: Work, rest_of_group: bool) -> list[Score]:
        if self._slots is None:
            return await self._rate_limited(group, work, rest_of_group)
        async with self._slots:
            return await self._rate_limited(group, work, rest_of_group)

    async def _rate_limited(self, group: Group, work: Work, rest_of_group: bool) -> list[Score]:
        if self.limits.groups_per_s and self.given_up is None:
            now = time.monotonic()
            start = max(now, self._next_start)
            self._next_start = start + 1.0 / self.limits.groups_per_s
            await asyncio.sleep(start - now)
        if (why := self.given_up) is not None:
            if time.monotonic() < self._given_up_until:
                message = f"not called: {self._failed_calls} calls in a row had failed, the last with {why.cause}: {why.message}"
                return [failed(GIVEN_UP, message, sample.text) for sample in group.samples]
            self._given_up_until = time.monotonic() + self.limits.pause_s  # one call tries again; the others still fail at once
        self.counts["calls"] += 1
        began = time.monotonic()
        scores = await self._call_slices(group, work)
        self.seconds += time.monotonic() - began
        failures = [score.failure for score in scores if score.failure is not None and score.failure.cause not in ROW_FAULTS]
        if len(failures) < len(scores):
            self._failed_calls = 0
        elif not rest_of_group:  # it is no wonder that the failures of an earlier attempt fail again
            self._failed_calls, self._last_failure = self._failed_calls + 1, failures[-1]
            if self.given_up is not None:
                self._given_up_until = time.monotonic() + self.limits.pause_s
        return scores

    async def _call_slices(self, group: Group, work: Work) -> list[Score]:
        """The slices of a large group are scored concurrently; they are one call for the limits and the counts."""
        slices = self._slices(group)
        if len(slices) == 1:
            return await self._checked_call(group, work)

        async def score_slice(part: Group) -> list[Score]:
            await turns().take()
            return await self._checked_call(part, work)

        return [score for scores in await asyncio.gather(*map(score_slice, slices)) for score in scores]

    def _slices(self, group: Group) -> list[Group]:
        """The group in slices of `SLICE_SAMPLES`, if a slice gets the scores and the keys that it gets within the group."""
        divisible = self.reward.scores_alone and not self.reward.rounded_together
        return [subgroup(group, group.samples[part]) for part in _parts(group.samples)] if divisible else [group]

    async def _checked_call(self, group: Group, work: Work) -> list[Score]:
        """A bug in the reward is a failure of these samples, not the end of the run; a process that is gone is its end."""
        limit: asyncio.Timeout | None = None
        try:
            async with asyncio.timeout(self.limits.group_timeout_s) as limit:
                results = await work([group])
            shape = [len(scores) for scores in results]
            if shape != [len(group.samples)]:
                raise TypeError(f"score() returned {shape} scores for one group of {len(group.samples)}")
            return [await _checked_in_turn(score, sample.text) for score, sample in zip(results[0], group.samples, strict=True)]
        except PeerLost:
            raise
        except Exception as error:
            cause, message = "exception", last_line(error)
            if limit is not None and limit.expired():  # a TimeoutError may also come from the reward itself
                cause, message = "timeout", f"the group took longer than {self.limits.group_timeout_s} s"
        return [failed(cause, message, sample.text) for sample in group.samples]


def subgroup(group: Group, samples: Sequence[Sample]) -> Group:
    """The group with these samples; the group itself if they are all it has."""
    same = len(samples) == len(group.samples) and all(map(operator.is_, samples, group.samples))
    return group if same else dataclasses.replace(group, samples=tuple(samples))


def _parts(samples: Sequence[Sample]) -> list[slice]:
    """Samples in slices of at most `SLICE_SAMPLES` and `SLICE_CHARACTERS`."""
    starts, characters = [0], 0
    for i, sample in enumerate(samples):
        characters += len(sample.text)
        if i > starts[-1] and (i - starts[-1] == SLICE_SAMPLES or characters > SLICE_CHARACTERS):
            starts.append(i)
            characters = len(sample.text)
    return [slice(start, end) for start, end in zip(starts, [*starts[1:], len(samples)], strict=True)]


async def _checked_in_turn(score: Score, text: str) -> Score:
    if (turn := turns()).over:
        await turn.take()
    return _checked(score, text)


def _checked(score: Score, text: str) -> Score:
    """Either a finite value or a failure; finite parts only; and the scored text, if the reward does not set it."""
    if not isinstance(score, Score):
        return failed("bad_result", f"score() returned a {type(score).__name__}, not a Score", text)
    if score is DECLINED or (score.failure is None and score.view is not None and _is_plain(score)):
        return score
    view = text if score.view is None else score.view
    try:  # both may hold what a judge wrote, and judges repeat keys
        parts, trace = redact_all(score.parts), redact_all(score.trace)
    except RecursionError:
        return failed("bad_result", "what the reward returned besides its value is nested too deeply", text)
    if score.failure is not None:
        return dataclasses.replace(score, value=None, parts=parts, trace=trace, view=view)
    value = math.nan if score.value is None or isinstance(score.value, str) else _as_float(score.value)
    if not abs(value) <= LARGEST_REWARD:
        failure = Failure("not_a_number", f"the value is {score.value!r:.100}")
        if math.isfinite(value):
            failure = Failure("too_large", f"the value is {value:g}; rewards are within ±{LARGEST_REWARD:g}")
        return dataclasses.replace(score, value=None, failure=failure, parts=parts, trace=trace, view=view)
    parts = {name: number for name, part in parts.items() if abs(number := _as_float(part)) <= LARGEST_REWARD}
    return dataclasses.replace(score, value=value + 0.0, parts=parts, trace=trace, view=view)  # −0.0 becomes 0.0


def _is_plain(score: Score) -> bool:
    """A float within bounds, not −0.0, and nothing besides it: nothing to convert, and nothing to redact."""
    value = score.value
    plain_value = type(value) is float and abs(value) <= LARGEST_REWARD and (value != 0.0 or math.copysign(1.0, value) > 0.0)
    return plain_value and not score.parts and not score.trace


def _as_float(value: Any) -> float:
    """NaN for what is no number, and for an integer beyond all floats."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
