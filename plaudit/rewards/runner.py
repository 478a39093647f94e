"""Scores groups while others are still being sampled.

The rewards live on an event loop with a thread of its own. `collect` pulls groups on the caller's thread, where sampling goes on,
and hands each one to all rewards as it comes; what it returns has the order in which the groups came. Rewards whose models share
the device wait until all groups are sampled; then one model after the other is loaded, asked about all of them by all rewards that
share it, and unloaded, so that never more than one is there. What rewards say together is worked out when all of a step is there,
in that order: means of all values so far must not depend on who was fast.

`score` is for those who have no steps: a service, whose groups come when they come, and which lives on the same event loop.
"""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Coroutine, Generator, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import InitVar, asdict, dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from plaudit.errors import RecipeError, TrainingStopped
from plaudit.recipe import RewardSettings
from plaudit.reward_models.model_registry import UsageTotals, usage_by_model, use_independent_batches
from plaudit.rewards.cache import ScoreCache
from plaudit.rewards.client import Asker
from plaudit.rewards.combine import Running, combine, counted_value, counted_values, has_reward, missing_values
from plaudit.rewards.reward import LiveReward, Loadable, Reward, build
from plaudit.types import Failure, Group, Prompt, Score, ScoredGroup

ByReward = list[tuple[Score, ...]]
ByLabel = dict[str, tuple[Score, ...]]
T = TypeVar("T")


class RewardRunner:
    """`with RewardRunner(recipe.rewards) as rewards: scored = rewards.collect(groups)`."""

    def __init__(
        self,
        rewards: Sequence[RewardSettings | LiveReward],
        *,
        cache: Path | None = None,
        tolerant: bool = False,
        repeatable: bool = False,
    ):
        """`rewards`: settings, or live rewards that the caller built. `cache`: a file to cache scores in. `tolerant`: no failure
        rate is too high; only `on_failure: stop` stops.
        `repeatable`: a group's scores have the same bits, whatever else is scored."""
        self.live = [reward if isinstance(reward, LiveReward) else build(reward) for reward in rewards]
        self.rewards: list[Reward] = [live.settings for live in self.live]
        self.waited_s = 0.0
        """How long the last `collect` waited for scores after the last group was sampled."""
        self.cache = ScoreCache(cache) if cache is not None else None
        self.askers = [Asker(live, self.cache, repeatable=repeatable) for live in self.live]
        self._waiting = self._those_that_wait()
        self._device = asyncio.Lock()
        """Whoever has it may load models that share the device."""
        self._in_line: list[tuple[Group, ByLabel, asyncio.Future[None]]] = []
        """Groups by themselves that wait for such models."""
        self._line: asyncio.Task[None] | None = None
        self._tolerant, self._repeatable = tolerant, repeatable
        self._told: dict[str, UsageTotals] = {}
        self._running = {reward.label: Running() for reward in self.rewards if reward.normalise == "running"}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rewards", daemon=True)

    def __enter__(self) -> Self:
        self.start()
        try:
            self.run(self.open()).result()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the event loop; `close` has to follow."""
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Whatever should happen on the rewards' event loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def open(self) -> None:
        """Open the rewards, side by side. On their event loop."""
        if self._repeatable:
            use_independent_batches()
        await _all(live.open() for live in self.live)

    def close(self) -> None:
        """End what is under way, and close the rewards."""
        try:
            self.run(self._close()).result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            if self.cache is not None:
                self.cache.close()

    def collect(self, groups: Iterable[Group], expected: int | None = None, *, learn: bool = True) -> list[ScoredGroup]:
        """All groups with their scores. Raises TrainingStopped when a reward fails more than its settings allow: as soon as that
        is certain, if it is told how many samples to expect. Without `learn` (a validation) nothing
        is normalised, and running means stay as they are."""
        step = _Step(self.rewards, expected, self._tolerant)
        given: list[Group] = []
        pending: list[Future[ByLabel]] = []
        try:
            for group in groups:
                given.append(group)
                step.samples += len(group.samples)
                pending.append(self.run(self._score_in(step, group)))
                step.check()
            step.all_sampled = True
            step.check()
            sampled = time.monotonic()
            wait(pending, return_when=FIRST_EXCEPTION)
            step.check()
            found = [future.result() for future in pending]
            self.run(self._score_waiting_in(step, given, found)).result()
            self.waited_s = time.monotonic() - sampled
            return self._together(given, found, learn=learn)
        except BaseException:
            for future in pending:
                future.cancel()
            if isinstance(groups, Generator):
                groups.close()  # sampling ends now, not when somebody lets go of the traceback
            raise

    async def score(self, group: Group) -> ScoredGroup:
        """One group by itself, as soon as it can be scored; on the rewards' event loop. As in a validation nothing is normalised;
        and nothing is stopped: what failed says so in its scores. Cancelled, nobody is asked about it any further."""
        found = await self._score(group)
        if self._waiting:
            await self._score_in_line(group, found)
        [scored] = self._together([group], [found], learn=False)
        return scored

    def require_rewards(self, prompts: Iterable[Prompt]) -> None:
        """Raise a RecipeError if there are prompts for which no reward has anything to say."""
        untold = [prompt for prompt in prompts if not has_reward(self.rewards, prompt)]
        if untold:
            sources = ", ".join(dict.fromkeys(repr(prompt.data_source) for prompt in untold[:100]))
            raise RecipeError(
                f"rewards: for {len(untold):,} rows no reward's `when` matches (the first is {untold[0].id}; data_source: "
                f"{sources[:300]}). Add a reward for them, or take them out of the data."
            )

    def counts(self) -> dict[str, float]:
        """Since the last time: samples asked for again, by reward; and what was asked of each model, which is less where the cache
        had the score already."""
        asked_again = {asker.reward.label: asker.counts.pop("retries", 0) for asker in self.askers}
        counts = {f"retries/{label}": float(count) for label, count in asked_again.items() if count}
        amounts, before = self.amounts(), self._told
        self._told = amounts
        totals: Counter[str] = Counter()
        for name, amount in amounts.items():
            for what, count in amount.items():
                counts[f"judge/{name}/{what}"] = since = count - before.get(name, {}).get(what, 0.0)
                totals[f"judge/{what}"] += since if "/" not in name else 0.0  # pyright: ignore[reportArgumentType]
        return counts | totals

    def amounts(self) -> dict[str, UsageTotals]:
        """What was asked of each model since it was opened: calls, retries, tokens, cost."""
        return usage_by_model(self._loop)

    # What a run saves -------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, dict[str, float]]:
        """Of running means, for a checkpoint."""
        return {label: asdict(running) for label, running in self._running.items()}

    def load_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        self._running = {label: Running(**state[label]) if label in state else Running() for label in self._running}

    def saved(self) -> None:
        """A checkpoint is safe: what was scored before it will not be asked for again."""
        if self.cache is not None:
            self.cache.clear()

    # Inside -----------------------------------------------------------------------------------------------------------

    async def _score_in(self, step: "_Step", group: Group) -> ByLabel:
        found = await self._score(group)
        step.count(group, found)
        step.check()  # raised here, it ends the wait for the others
        return found

    async def _score_waiting_in(self, step: "_Step", groups: Sequence[Group], found: Sequence[ByLabel]) -> None:
        async with self._device:
            await self._score_waiting(list(zip(groups, found, strict=True)), step)

    async def _score_in_line(self, group: Group, found: ByLabel) -> None:
        """Loading a model is what takes long: it is asked for all who wait by then. Whoever goes away leaves the others in line."""
        waiting = (group, found, self._loop.create_future())
        self._in_line.append(waiting)
        if self._line is None:
            self._line = asyncio.create_task(self._serve_line())
        try:
            await waiting[2]
        finally:
            self._in_line = [one for one in self._in_line if one is not waiting]

    async def _serve_line(self) -> None:
        try:
            while self._in_line:
                async with self._device:
                    together, self._in_line = self._in_line, []
                    await self._settle(together)
        finally:
            self._line = None

    async def _settle(self, together: "Sequence[tuple[Group, ByLabel, asyncio.Future[None]]]") -> None:
        error: BaseException | None = None
        try:
            await self._score_waiting([(group, found) for group, found, _ in together])
        except BaseException as problem:  # whoever waits must hear of it, whatever it is
            error = problem
            if not isinstance(problem, Exception):
                raise
        finally:
            for *_, future in together:
                if not future.done():  # it is, for one who has gone away
                    future.set_result(None) if error is None else future.set_exception(error)

    async def _score(self, group: Group) -> ByLabel:
        """What can be said while others are still sampled."""
        asked: dict[str, asyncio.Task[tuple[Score, ...]]] = {}
        for asker in self.askers:
            if asker not in self._waiting:
                asked[asker.reward.label] = asyncio.create_task(self._ask(asker, group, asked))
        return dict(zip(asked, await asyncio.gather(*asked.values()), strict=True))

    async def _score_waiting(self, groups: Sequence[tuple[Group, ByLabel]], step: "_Step | None" = None) -> None:
        """One model after the other; what they say is added to what was found."""
        left = [_Passes(asker, asker.live.phases, len(groups)) for asker in self._waiting]
        try:
            while left:
                needed = _next(left)
                try:  # cancelled while it is loaded, it is unloaded all the same
                    if needed is not None:
                        await needed.load()
                    while ready := [one for one in _ready(left) if one.needed is needed]:
                        await asyncio.gather(*(self._pass(one, groups, step) for one in ready))
                        left = [one for one in left if not one.done]
                        if step is not None:
                            step.check()
                finally:
                    if needed is not None:
                        await needed.unload()
        finally:
            for asker in self._waiting:
                asker.live.forget()

    async def _pass(self, one: "_Passes", groups: Sequence[tuple[Group, ByLabel]], step: "_Step | None") -> None:
        """One reward's next pass over all groups."""
        asker, label = one.asker, one.asker.reward.label
        every = [
            (group, self._wanted(asker, by_label), failed)
            for (group, by_label), failed in zip(groups, one.failed, strict=True)
        ]  # fmt: skip
        if one.is_last:
            scores = await asyncio.gather(*(asker.ask(*each) for each in every))
            for (group, by_label), of_group in zip(groups, scores, strict=True):
                by_label[label] = of_group
                if step is not None:
                    step.count(group, {label: of_group})
        else:
            one.failed = await asyncio.gather(
                *(asker.prepare(group, wanted, one.phase, failed) for group, wanted, failed in every)
            )  # fmt: skip
        one.phase += 1

    async def _ask(self, asker: Asker, group: Group, asked: Mapping[str, asyncio.Task[tuple[Score, ...]]]) -> tuple[Score, ...]:
        gate = asker.reward.gate
        known = {} if gate is None else {gate.reward: await asked[gate.reward]}
        return await asker.ask(group, self._wanted(asker, known))

    def _wanted(self, asker: Asker, known: Mapping[str, Sequence[Score]]) -> list[bool] | None:
        """For which samples its gate is open."""
        gate = asker.reward.gate
        if gate is None:
            return None
        keeper = next(reward for reward in self.rewards if reward.label == gate.reward)
        values = [counted_value(keeper, score) for score in known[gate.reward]]
        return [value is not None and value > gate.above for value in values]

    def _those_that_wait(self) -> list[Asker]:
        """Rewards that wait for all groups, and those whose gate does."""
        waiting: list[Asker] = []
        for asker in self.askers:
            gate = asker.reward.gate
            if asker.reward.waits_for_all or (gate is not None and gate.reward in {one.reward.label for one in waiting}):
                waiting.append(asker)
        return waiting

    def _together(self, groups: Sequence[Group], found: Sequence[ByLabel], *, learn: bool) -> list[ScoredGroup]:
        scores: list[ByReward] = [[by_label[reward.label] for reward in self.rewards] for by_label in found]
        if learn and self._running:
            self._take_in(groups, scores)
        labels, running = [reward.label for reward in self.rewards], self._running if learn else None
        return [
            ScoredGroup(group, combine(self.rewards, group, by_reward, running), dict(zip(labels, by_reward, strict=True)))
            for group, by_reward in zip(groups, scores, strict=True)
        ]

    def _take_in(self, groups: Sequence[Group], scores: Sequence[ByReward]) -> None:
        """Running means see what is trained on: a dropped sample is not."""
        for group, by_reward in zip(groups, scores, strict=True):
            counted = counted_values(self.rewards, by_reward)
            kept = [why is None for why in missing_values(self.rewards, group.prompt, by_reward, counted)]
            for reward, values in zip(self.rewards, counted, strict=True):
                if reward.label in self._running:
                    self._running[reward.label].add([x for x, ok in zip(values, kept, strict=True) if ok and x is not None])

    async def _close(self) -> None:
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        if rest:
            await asyncio.wait(rest, timeout=5.0)  # rewards are closed when nothing uses them any more
        await _all(live.close() for live in self.live)
        await self._loop.shutdown_default_executor()


async def _all(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Do them side by side, all to their end; then raise what the first one raised."""
    for error in await asyncio.gather(*works, return_exceptions=True):
        if error is not None:
            raise error


# Models that share the device ----------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Passes:
    """Where a reward stands with its passes over a step's groups."""

    asker: Asker
    phases: Sequence[Loadable | None]
    groups: InitVar[int]
    phase: int = 0
    failed: Sequence[Sequence[Score | None]] = ()
    """By group: what passes so far could not do."""

    def __post_init__(self, groups: int) -> None:
        self.failed = [()] * groups

    @property
    def needed(self) -> Loadable | None:
        return self.phases[self.phase]

    @property
    def is_last(self) -> bool:
        return self.phase == len(self.phases) - 1

    @property
    def done(self) -> bool:
        return self.phase == len(self.phases)


def _ready(left: Sequence[_Passes]) -> list[_Passes]:
    """Those whose gate is known."""
    waited_for = {one.asker.reward.label for one in left}
    return [one for one in left if (gate := one.asker.reward.gate) is None or gate.reward not in waited_for]


def _next(left: Sequence[_Passes]) -> Loadable | None:
    """What comes to the device next: nothing, while something can be done without; else what need not come a second time."""
    wanted = [one.needed for one in _ready(left)]
    later = [needed for one in left for needed in one.phases[one.phase + 1 :]]
    later += [one.needed for one in left if one not in _ready(left)]
    return min(wanted, key=lambda needed: (needed is not None, any(needed is other for other in later)))


# One step's failures -------------------------------------------------------------------------------------------------


class _Step:
    """Counts each reward's failures during one `collect`, and knows when they are too many."""

    def __init__(self, rewards: Sequence[Reward], expected: int | None, tolerant: bool):
        self.samples = 0
        self._tolerant = tolerant
        self.all_sampled = False
        self._expected = expected
        self._failures: list[tuple[Reward, list[Failure]]] = [(reward, []) for reward in rewards]
        self._failed: list[dict[str, Any]] = []

    def count(self, group: Group, by_label: Mapping[str, Sequence[Score]]) -> None:
        said = [(reward, failures) for reward, failures in self._failures if reward.label in by_label]
        for reward, failures in said:
            for sample, score in zip(group.samples, by_label[reward.label], strict=True):
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
            if samples and reward.weight and not self._tolerant and len(failures) > reward.max_failure_rate * samples:
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
