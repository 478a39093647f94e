"""Scores groups while others are still being sampled.

Rewards live on an event loop in their own thread. `collect` pulls groups on the caller's thread, where sampling runs, and passes
each one to all rewards as it arrives; results keep the order of the groups. Scores are combined when the whole step is scored, in
the order of the groups: running means must not depend on which reward was fast.

Two kinds of models give the device back (`RewardModel.on_device`). Servers that sleep have it while a step's groups are collected,
until `rest`. Offloaded models have it in turn: their rewards are deferred until all groups are sampled; then one model after the
other is loaded, used by all rewards that share it, and unloaded, so that at most one is on the device.

`score` is for callers without steps: a service, whose groups arrive at any time and which lives on the same event loop.

Calls to models wait for nothing but the network: whatever computes on the loop takes turns (`turns.py`).
"""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from plaudit.errors import RecipeError
from plaudit.recipe import RewardSettings
from plaudit.reward_models.backend import Backend
from plaudit.reward_models.model_registry import (
    UsageTotals,
    collecting_models,
    usage_by_model,
    use_independent_batches,
    use_peers,
)
from plaudit.reward_models.peers import ModelPeers, open_together
from plaudit.rewards.cache import ScoreCache
from plaudit.rewards.client import SLICE_SAMPLES, RewardClient, subgroup
from plaudit.rewards.combine import (
    RunningMoments,
    any_reward_applies,
    blocking_failures,
    combine,
    effective_value,
    effective_values,
)
from plaudit.rewards.device_passes import Passes, deferred_clients, next_to_load, ready
from plaudit.rewards.device_queue import DeviceQueue
from plaudit.rewards.handover import Handover
from plaudit.rewards.reward import LiveReward, Reward, build
from plaudit.rewards.step_counts import StepCounts
from plaudit.turns import turns
from plaudit.types import Group, Prompt, Score, ScoredGroup

if TYPE_CHECKING:  # it imports torch
    from plaudit.world import World

ByReward = list[tuple[Score, ...]]
ByLabel = dict[str, tuple[Score, ...]]
T = TypeVar("T")
REPORT_EVERY_S = 0.2


def _ignore(sampled: int, scored: int) -> None:
    pass


@dataclass(frozen=True)
class Rewarded:
    """A group with each reward's scores, by label."""

    group: Group
    scores: ByLabel


class RewardRunner:
    """`with RewardRunner(recipe.rewards) as rewards: scored = rewards.collect(groups)`."""

    def __init__(
        self,
        rewards: Sequence[RewardSettings | LiveReward],
        *,
        cache: Path | None = None,
        tolerant: bool = False,
        repeatable: bool = False,
        seed: int | None = None,
        world: "World | None" = None,
    ):
        """`rewards`: settings, or live rewards that the caller built. `cache`: a file to cache scores in. `tolerant`: no failure
        rate is too high; only `on_failure: stop` and a rejected key stop.
        `repeatable`: a group's scores have the same bits, whatever else is scored. `seed`: the run's, for rewards that draw
        something at random. `world`: processes that score together, each its own groups; a model is loaded by one of them."""
        self.live = [reward if isinstance(reward, LiveReward) else build(reward) for reward in rewards]
        if seed is not None:
            for live in self.live:
                live.use_seed(seed)
        self.rewards: list[Reward] = [live.settings for live in self.live]
        self.waited_s = self.loaded_s = 0.0
        """How long the last `collect` waited for scores after the last group was sampled; and at first, for models to be loaded."""
        self.cache = ScoreCache(cache) if cache is not None else None
        self.clients = [RewardClient(live, self.cache, repeatable=repeatable) for live in self.live]
        self._deferred = deferred_clients(self.clients)
        self._device = asyncio.Lock()
        """Held while models that share the device are loaded."""
        self._queue = DeviceQueue(self._device, self._score_deferred)
        self._step: StepCounts | None = None
        """Of the last `collect`."""
        self.tolerant, self._repeatable = tolerant, repeatable
        self._world = world
        self._peers: ModelPeers | None = None
        self._last_usage: dict[str, UsageTotals] = {}
        self._running = {reward.label: RunningMoments() for reward in self.rewards if reward.normalise == "running"}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rewards", daemon=True)

    def __enter__(self) -> Self:
        self.start()
        try:
            if self._world is None or self._world.size == 1:
                self.run(self.open()).result()
            else:
                self._peers = ModelPeers.join(self._world, self.rewards, self.run)
                open_together(self._world, lambda: self.run(self.open()).result())
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
        """Run a coroutine on the rewards' event loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def open(self) -> None:
        """Open the rewards concurrently. On their event loop."""
        if self._repeatable:
            use_independent_batches()
        if self._peers is not None:
            use_peers(self._peers)
        await _all(live.open() for live in self.live)

    def close(self) -> None:
        """Cancel calls in flight, and close the rewards."""
        try:
            self.run(self._close()).result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            if self.cache is not None:
                self.cache.close()

    def collect(
        self,
        groups: Iterable[Group],
        expected: int | None = None,
        *,
        training: bool = True,
        report: Callable[[int, int], None] = _ignore,
    ) -> list[ScoredGroup]:
        """All groups with their scores combined. Raises TrainingStopped when a reward fails more often than its settings allow, as
        soon as that is certain given the number of `expected` samples. Without `training` (validation) nothing is normalised, and
        running means stay as they are. `report` is called with the numbers of groups sampled and scored so far, after every group
        and then several times per second; what it raises cancels the calls in flight."""
        return self.combine(self.score_all(groups, expected, report=report), training=training)

    def score_all(
        self, groups: Iterable[Group], expected: int | None = None, *, report: Callable[[int, int], None] = _ignore
    ) -> "list[Rewarded]":
        """As `collect`, with each reward's scores of each group, to be combined when those of the whole step are there."""
        self._step = step = StepCounts(self.rewards, expected, self.tolerant)
        sampled: list[Group] = []
        scoring: Handover[Group, ByLabel] = Handover(self._loop, lambda group: self._score(group, step))
        deferred: Handover[list[ByLabel], None] = Handover(self._loop, lambda found: self._score_deferred_in(step, sampled, found))
        try:
            # Before anything is sampled: an engine takes the memory that is free.
            self.loaded_s = self._each_collecting_model(lambda model: model.load(), lambda: report(0, 0))
            for group in groups:
                sampled.append(group)
                step.samples += len(group.samples)
                scoring.add(group)
                step.check()
                report(len(sampled), step.scored)
            step.all_sampled = True
            step.check()
            sampled_at = time.monotonic()
            scores = self._wait(scoring, step, lambda: report(len(sampled), step.scored))
            if self._deferred:
                deferred.add(scores)
                self._wait(deferred, step, lambda: report(len(sampled), step.scored))
            self.waited_s = time.monotonic() - sampled_at
            return [Rewarded(group, by_label) for group, by_label in zip(sampled, scores, strict=True)]
        except BaseException:
            scoring.cancel()
            deferred.cancel()
            if self._peers is not None:
                self.run(self._peers.leave())
            if isinstance(groups, Generator):
                groups.close()  # sampling ends now, not when the traceback is released
            raise

    def rest(self) -> float:
        """The trainer is about to compute: servers that sleep meanwhile give its device back. Returns how long that took."""
        return self._each_collecting_model(lambda model: model.unload(), self._beat)

    @property
    def rests(self) -> bool:
        """Whether `rest` gives anything back."""
        return bool(collecting_models(self._loop))

    def require_few_failures(self, step: "Sequence[Rewarded]") -> None:
        """Raise TrainingStopped if a reward has failed too often in a step that several processes have scored."""
        counts = StepCounts(self.rewards, sum(len(one.group.samples) for one in step), self.tolerant)
        for one in step:
            counts.count(one.group, one.scores)
        counts.check()

    def combine(self, step: "Sequence[Rewarded]", *, training: bool) -> list[ScoredGroup]:
        """The groups of a step with their scores combined, in this order: that of prompts, if running means are to be the same
        however the groups were scored."""
        scores: list[ByReward] = [[one.scores[reward.label] for reward in self.rewards] for one in step]
        groups = [one.group for one in step]
        if training and self._running:
            self._update_running(groups, scores)
        labels, running = [reward.label for reward in self.rewards], self._running if training else None
        return [
            ScoredGroup(group, combine(self.rewards, group, by_reward, running), dict(zip(labels, by_reward, strict=True)))
            for group, by_reward in zip(groups, scores, strict=True)
        ]

    def check(self) -> None:
        """Within `collect`, while the next group is still being sampled: raise what ends it. Cheap until there is something."""
        if self._step is not None and self._step.stopped:
            self._step.check()

    @property
    def in_passes(self) -> bool:
        """Whether models share the device, so that many groups should be scored together."""
        return bool(self._deferred) or self.rests

    async def score(self, group: Group, step: StepCounts | None = None) -> ScoredGroup:
        """One group, as soon as it can be scored; on the rewards' event loop. As in validation nothing is normalised, and a failure
        stops nothing unless there is a `step`: it is in the scores. Cancelling it cancels its calls."""
        scores = await self._score(group, step)
        if self._deferred:
            await self._queue.score(group, scores)
        return await self._combine_in_turns(group, scores)

    def require_rewards(self, prompts: Iterable[Prompt]) -> None:
        """Raise a RecipeError if there are prompts to which no reward applies."""
        unmatched = [prompt for prompt in prompts if not any_reward_applies(self.rewards, prompt)]
        if unmatched:
            sources = ", ".join(dict.fromkeys(repr(prompt.data_source) for prompt in unmatched[:100]))
            raise RecipeError(
                f"rewards: for {len(unmatched):,} rows no reward's `when` matches (the first is {unmatched[0].id}; data_source: "
                f"{sources[:300]}). Add a reward for them (`when: otherwise` is for all the rest), or remove them from the data."
            )

    def counts(self) -> dict[str, float]:
        """Since the last call: retried samples by reward, and the usage of each model, which is less where scores were cached."""
        retries = {client.reward.label: client.counts.pop("retries", 0) for client in self.clients}
        counts = {f"retries/{label}": float(count) for label, count in retries.items() if count}
        amounts, before = self.amounts(), self._last_usage
        self._last_usage = amounts
        totals: Counter[str] = Counter()
        for name, amount in amounts.items():
            for what, count in amount.items():
                counts[f"judge/{name}/{what}"] = since = count - before.get(name, {}).get(what, 0.0)
                totals[f"judge/{what}"] += since if "/" not in name else 0.0  # pyright: ignore[reportArgumentType]
        return counts | totals

    def amounts(self) -> dict[str, UsageTotals]:
        """Usage of each model since it was opened: calls, retries, tokens, cost."""
        if self._peers is not None:
            self.run(self._peers.refresh_usage()).result()
        return usage_by_model(self._loop)

    # State in a checkpoint -------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, dict[str, float]]:
        """Running means, for a checkpoint."""
        return {label: asdict(running) for label, running in self._running.items()}

    def load_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        self._running = {label: RunningMoments(**state[label]) if label in state else RunningMoments() for label in self._running}

    def saving(self) -> Callable[[], None] | None:
        """Once the checkpoint is on disk, scores from before it will not be needed again; those of the steps after it will."""
        if self.cache is None:
            return None
        self.cache.begin_clear()
        return self.cache.clear

    def model_calls(self) -> int:
        """Calls of all models since they were opened."""
        return round(sum(amount["calls"] for name, amount in self.amounts().items() if "/" not in name))

    # Inside -----------------------------------------------------------------------------------------------------------

    def _wait(self, handed: Handover[Any, T], step: StepCounts, report: Callable[[], None]) -> list[T]:
        handed.wait(REPORT_EVERY_S, report)
        step.check()
        return handed.results()

    def _each_collecting_model(self, change: Callable[[Backend], Coroutine[Any, Any, None]], report: Callable[[], None]) -> float:
        """Load or unload the models that are on the device while groups are collected; returns how long that took."""
        models = collecting_models(self._loop)
        if not models:
            return 0.0
        began, changing = time.monotonic(), Handover(self._loop, change)
        for model in models:
            changing.add(model)
        try:
            changing.wait(REPORT_EVERY_S, report)
            changing.results()
        except BaseException:
            changing.cancel()
            raise
        return time.monotonic() - began

    def _beat(self) -> None:
        if self._world is not None:
            self._world.heartbeat.beat()

    async def _score_deferred_in(self, step: StepCounts, groups: Sequence[Group], found: Sequence[ByLabel]) -> None:
        async with self._device:
            await self._score_deferred(list(zip(groups, found, strict=True)), step)

    async def _score(self, group: Group, step: StepCounts | None = None) -> ByLabel:
        """Scores by the rewards that need not wait for the other groups. A reward that ends the step does so at once, whatever the
        other rewards of the group are waiting for."""
        at_once = [client for client in self.clients if client not in self._deferred]
        if len(at_once) == 1:  # no need for another task
            return {at_once[0].reward.label: await self._score_gated(at_once[0], group, {}, step)}
        tasks: dict[str, asyncio.Task[tuple[Score, ...]]] = {}
        for client in at_once:
            tasks[client.reward.label] = asyncio.create_task(self._score_gated(client, group, tasks, step))
        try:
            return dict(zip(tasks, await asyncio.gather(*tasks.values()), strict=True))
        finally:
            for task in tasks.values():
                task.cancel()

    async def _score_deferred(self, groups: Sequence[tuple[Group, ByLabel]], step: StepCounts | None = None) -> None:
        """One model after the other; their scores are added to those of the other rewards."""
        left = [Passes(client, client.live.phases, len(groups)) for client in self._deferred]
        try:
            while left:
                needed = next_to_load(left)
                try:  # cancelled while it is loaded, it is unloaded all the same
                    if needed is not None:
                        await needed.load()
                    while usable := [one for one in ready(left) if one.needed is needed]:
                        await asyncio.gather(*(self._pass(one, groups, step) for one in usable))
                        left = [one for one in left if not one.done]
                        if step is not None:
                            step.check()
                finally:
                    if needed is not None:
                        await needed.unload()
        finally:
            for client in self._deferred:
                client.live.forget()

    async def _pass(self, one: Passes, groups: Sequence[tuple[Group, ByLabel]], step: StepCounts | None) -> None:
        """One reward's next pass over all groups."""
        client, label = one.client, one.client.reward.label
        before = zip(groups, one.failed, strict=True)
        every = [(group, self._selected(client, by_label), failed) for (group, by_label), failed in before]
        if one.is_last:
            scores = await asyncio.gather(*(client.score(*each) for each in every))
            for (group, by_label), of_group in zip(groups, scores, strict=True):
                by_label[label] = of_group
                if step is not None:
                    step.count(group, {label: of_group})
        else:
            one.failed = await asyncio.gather(*(client.prepare(group, wanted, one.phase, past) for group, wanted, past in every))
        one.phase += 1

    async def _score_gated(
        self, client: RewardClient, group: Group, tasks: Mapping[str, asyncio.Task[tuple[Score, ...]]], step: StepCounts | None
    ) -> tuple[Score, ...]:
        gate = client.reward.gate
        known = {} if gate is None else {gate.reward: await tasks[gate.reward]}
        scores = await client.score(group, self._selected(client, known))
        if step is not None:
            step.count(group, {client.reward.label: scores})
            step.check()  # raised here, it ends the wait for the others
        return scores

    def _selected(self, client: RewardClient, known: Mapping[str, Sequence[Score]]) -> list[bool] | None:
        """The samples for which its gate is open; None without a gate."""
        gate = client.reward.gate
        if gate is None:
            return None
        gating = next(reward for reward in self.rewards if reward.label == gate.reward)
        values = [effective_value(gating, score) for score in known[gate.reward]]
        return [value is not None and value > gate.above for value in values]

    async def _combine_in_turns(self, group: Group, found: ByLabel) -> ScoredGroup:
        """A group's scores combined without normalisation: each sample's alone, so a large group is combined in slices."""
        scores: list[Score] = []
        for start in range(0, len(group.samples), SLICE_SAMPLES):
            await turns().take()
            part = slice(start, start + SLICE_SAMPLES)
            scores += combine(
                self.rewards, subgroup(group, group.samples[part]), [found[r.label][part] for r in self.rewards], None
            )
        return ScoredGroup(group, tuple(scores), {reward.label: found[reward.label] for reward in self.rewards})

    def _update_running(self, groups: Sequence[Group], scores: Sequence[ByReward]) -> None:
        """Running means cover what is trained on, so not dropped samples."""
        for group, by_reward in zip(groups, scores, strict=True):
            counted = effective_values(self.rewards, by_reward)
            kept = [why is None for why in blocking_failures(self.rewards, group.prompt, by_reward, counted)]
            for reward, values in zip(self.rewards, counted, strict=True):
                if reward.label in self._running:
                    self._running[reward.label].add([x for x, ok in zip(values, kept, strict=True) if ok and x is not None])

    async def _close(self) -> None:
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        if rest:
            await asyncio.wait(rest, timeout=5.0)  # rewards are closed once nothing uses them
        await _all(live.close() for live in self.live)
        if self._peers is not None:
            self._peers.close()
        turns().close()
        await self._loop.shutdown_default_executor()


async def _all(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all of them concurrently to completion; then raise the first exception."""
    for error in await asyncio.gather(*works, return_exceptions=True):
        if error is not None:
            raise error
