"""Prompts → scored groups: sampling and scoring of training steps and validations.

Groups are scored while others are still sampled, and returned in prompt order, never in order of arrival, so that a run repeats
to the bit.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from plaudit.data.order import RowOrder, RowStream
from plaudit.data.prompts import EncodedPrompt, with_unique_ids
from plaudit.errors import RecipeError, StopRequested, TrainingStopped
from plaudit.models.weights import release_memory
from plaudit.objectives.registry import ESTIMATORS
from plaudit.recipe import RLRecipe
from plaudit.report.activity import Activity
from plaudit.report.samples import length_metrics
from plaudit.response_files import stop_strings
from plaudit.rewards.metrics import has_signal, metrics_by_source, metrics_of_k
from plaudit.rewards.metrics import metrics as reward_metrics
from plaudit.rewards.runner import Rewarded, RewardRunner
from plaudit.rl.shares import PromptShares
from plaudit.rollout.engine import Capabilities, Engine, Sampling
from plaudit.rollout.groups import sample_groups, sample_groups_with_greedy
from plaudit.types import ScoredGroup
from plaudit.world import World

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

    from plaudit.recipe import RolloutSettings, ValidationSettings

T = TypeVar("T")


@dataclass(frozen=True)
class Collected:
    """The scored groups of a step."""

    groups: list[ScoredGroup]
    """To train on."""
    sampled: list[ScoredGroup]
    """All of them: dynamic sampling leaves out groups without a signal."""
    rows: list[int]
    """Of the prompts that were sampled."""
    metrics: dict[str, float]


@dataclass(frozen=True)
class Seconds:
    total: float = 0.0
    scoring: float = 0.0
    """Of these: waiting for scores after the last sample."""
    waking: float = 0.0
    """Of these: waiting for reward models that left the device to the trainer."""
    waiting: float = 0.0
    """Of processes for the slowest one, on average."""
    own_total: float = 0.0
    own_scoring: float = 0.0
    """The same of this process alone."""

    @classmethod
    def of_step(cls, by_process: "Sequence[Seconds]", rank: int) -> "Seconds":
        slowest, own = max(by_process, key=lambda seconds: seconds.total), by_process[rank]
        waiting = sum(slowest.total - one.total for one in by_process) / len(by_process)
        return cls(slowest.total, slowest.scoring, slowest.waking, waiting, own.total, own.scoring)

    def __add__(self, other: "Seconds") -> "Seconds":
        both = zip(astuple(self), astuple(other), strict=True)
        return Seconds(*(one + another for one, another in both))


class Collector:
    """Samples and scores the prompts of each step."""

    def __init__(
        self,
        engine: Engine,
        rewards: RewardRunner,
        recipe: RLRecipe,
        prompts: Sequence[EncodedPrompt],
        order: RowOrder,
        activity: Activity,
        shares: PromptShares,
    ):
        self.engine, self.rewards, self.recipe, self.activity, self.shares = engine, rewards, recipe, activity, shares
        self.prompts, self.order = prompts, order
        self.stream = RowStream(order) if recipe.algorithm.dynamic_sampling is not None else None
        """With dynamic sampling: how far the prompts have been used, which a checkpoint keeps."""

    def collect(self, step: int, version: int) -> Collected:
        """The groups of a step, from 1, sampled with the weights of this version, which the engine has."""
        rows = self.order.rows(step - 1)
        if self.stream is not None:
            collected = self._collect_with_signal(self.stream, len(rows), step, version)
        else:
            greedy = "greedy" in ESTIMATORS[self.recipe.algorithm.kind].needs
            groups, seconds = self._sample_and_score(f"step {step}", self.prompts_of(rows), step, version, greedy=greedy)
            collected = Collected(groups, groups, rows, _metrics(groups, self.rewards, seconds, self.shares.world))
        self.shares.observe(collected.sampled, training=True)
        collected.metrics["epoch"] = self._rows_used(step) / self.order.rows_per_epoch
        if self.recipe.rollout.lag:
            collected.metrics["lag"] = float(step - 1 - version)
        return collected

    def prompts_of(self, rows: Sequence[int]) -> list[EncodedPrompt]:
        """As they are sampled in one step."""
        return with_unique_ids(self.prompts[row] for row in rows)

    def _sample_and_score(
        self, label: str, prompts: Sequence[EncodedPrompt], step: int, version: int, *, greedy: bool = False
    ) -> tuple[list[ScoredGroup], Seconds]:
        return _sample_and_score(
            self.engine, self.rewards, prompts, self.recipe.rollout.n, training_sampling(self.recipe, step), version=version,
            activity=self.activity, shares=self.shares, label=label, greedy=greedy,
        )  # fmt: skip

    def _rows_used(self, step: int) -> int:
        return self.stream.taken if self.stream is not None else min(step * self.order.per_step, self.order.total_rows)

    def _collect_with_signal(self, stream: RowStream, target: int, step: int, version: int) -> Collected:
        """Groups of the stream's next prompts until `target` of them have a signal, or the rounds are used up (DAPO).

        A further round samples as many prompts as are likely to be enough, by the share of groups with a signal so far: never more
        than a step needs, and no fewer than a quarter of that, or one failed reward would be a large share of its round.
        """
        settings = self.recipe.algorithm.dynamic_sampling
        assert settings is not None
        rows: list[int] = []
        groups: list[ScoredGroup] = []
        seconds = Seconds()
        rounds = with_signal = 0
        running_means = self.rewards.state()
        while with_signal < target and rounds < settings.max_rounds:
            likely = math.ceil((target - with_signal) * (len(groups) + 1) / (with_signal + 1))
            count = target if not groups else min(target, max(likely, math.ceil(target / 4)))
            rows += stream.ahead(len(rows), count)
            try:
                label = f"step {step}, round {rounds + 1}"
                more, round_seconds = self._sample_and_score(label, self.prompts_of(rows)[-count:], step, version)
            except (TrainingStopped, StopRequested):
                self.rewards.load_state(running_means)  # the step is not done, so its first rounds leave no trace
                raise
            groups, seconds, rounds = groups + more, seconds + round_seconds, rounds + 1
            with_signal = sum(map(has_signal, groups))
        stream.taken += len(rows)
        metrics = _metrics(groups, self.rewards, seconds, self.shares.world)
        metrics |= {
            "rounds": float(rounds),
            "groups": float(len(groups)),
            "groups_missing": float(max(0, target - with_signal)),
        }
        return Collected([group for group in groups if has_signal(group)][:target], groups, rows, metrics)


def validate(
    engine: Engine, rewards: RewardRunner, recipe: RLRecipe, prompts: Sequence[EncodedPrompt], activity: Activity,
    shares: PromptShares, step: int,
) -> tuple[list[ScoredGroup], dict[str, float]]:  # fmt: skip
    """The validation prompts, sampled as `validation` says and scored; and metrics under `val/`."""
    began = time.perf_counter()
    groups, seconds = _sample_and_score(
        engine, rewards, prompts, recipe.validation.n, validation_sampling(recipe, step), version=step,
        activity=activity, shares=shares, label="validation", training=False,
    )  # fmt: skip
    shares.observe(groups, training=False)
    metrics = metrics_by_source(groups) | metrics_of_k(groups, recipe) | _metrics(groups, rewards, seconds, shares.world)
    metrics = {f"val/{name}": value for name, value in metrics.items() if not name.startswith(("time/", "rank/"))}
    metrics.setdefault("val/reward", float("nan"))  # every sample was dropped
    return groups, metrics | {"time/validate_s": time.perf_counter() - began}


def rest(rewards: RewardRunner) -> dict[str, float]:
    """The trainer is about to compute: reward models give its device back. How long that took, as a metric."""
    return {"time/judge_sleep_s": rewards.rest()} if rewards.rests else {}


def _sample_and_score(
    engine: Engine, rewards: RewardRunner, prompts: Sequence[EncodedPrompt], n: int, sampling: Sampling, *, version: int,
    activity: Activity, shares: PromptShares, label: str, greedy: bool = False, training: bool = True,
) -> tuple[list[ScoredGroup], Seconds]:  # fmt: skip
    """Scored groups in prompt order. `greedy`: each with a greedy baseline. `training`: running means are updated.

    Each process samples and scores its share of the prompts; all of them get all groups, and combine the same scores."""
    world, own = shares.world, shares.own(prompts, n)
    expected, calls_before = len(prompts) * (n + greedy), rewards.model_calls()
    sample = sample_groups_with_greedy if greedy else sample_groups

    def sample_and_score() -> tuple[list[Rewarded], Seconds]:
        began = time.perf_counter()
        if rewards.rests:
            release_memory()  # what the trainer has cached: reward models take it now
        world.heartbeat.beat(f"{label}, sampling")
        with activity.phase(label, prompts=len(own), samples=len(own) * (n + greedy)) as phase:

            def on_step(new_tokens: int) -> None:
                rewards.check()
                world.heartbeat.beat()
                phase.engine_step(new_tokens)

            def report(sampled: int, scored: int) -> None:
                calls = rewards.model_calls() - calls_before
                if (sampled, scored, calls) != (phase.sampled, phase.scored, phase.judge_calls):
                    world.heartbeat.beat()
                phase.update(sampled, scored, calls)

            engine.on_step = on_step
            groups = sample(engine, own, n, sampling, version=version, on_sample=phase.sample_done)
            scored = rewards.score_all(groups, expected, report=report)
        return scored, Seconds(time.perf_counter() - began, rewards.waited_s, rewards.loaded_s)

    parts = exchange(world, sample_and_score, f"groups of {label}")
    by_id = {one.group.prompt.id: one for scored, _ in parts for one in scored}
    step = [by_id[encoded.prompt.id] for encoded in prompts]
    if world.size > 1:
        rewards.require_few_failures(step)
    groups = rewards.combine(step, training=training)
    seconds = Seconds.of_step([seconds for _, seconds in parts], world.rank)
    return [split_baseline(group) if greedy else group for group in groups], seconds


def exchange(world: World, work: Callable[[], T], what: str) -> list[T]:
    """Every process's result. If one of them is stopped, all are, with its message and, if that is not everyone's, its rank."""
    result: T | TrainingStopped | StopRequested
    try:
        result = work()
    except (TrainingStopped, StopRequested) as error:
        result = error
    results = world.gather(result, what)
    stopped = {rank: one for rank, one in enumerate(results) if isinstance(one, TrainingStopped)}
    for rank, one in stopped.items():
        raise one if len(stopped) == world.size else type(one)(f"rank {rank}: {one}", one.failed)
    if any(isinstance(one, StopRequested) for one in results):
        raise StopRequested
    return results  # pyright: ignore


def split_baseline(group: ScoredGroup) -> ScoredGroup:
    """The group without its last sample, the greedy one, whose score becomes the baseline of the others."""
    *scores, baseline = group.scores
    samples = replace(group.group, samples=group.group.samples[:-1])
    by_reward = {name: reward_scores[:-1] for name, reward_scores in group.by_reward.items()}
    return ScoredGroup(samples, tuple(scores), by_reward, baseline)


def _metrics(groups: Sequence[ScoredGroup], rewards: RewardRunner, seconds: Seconds, world: World) -> dict[str, float]:
    metrics = reward_metrics(groups) | world.sum_metrics(rewards.counts()) | length_metrics(groups)
    if greedy := [group.baseline.value for group in groups if group.baseline is not None and group.baseline.value is not None]:
        metrics["baseline_reward"] = sum(greedy) / len(greedy)
    metrics |= {"time/sample_s": seconds.total - seconds.scoring - seconds.waking, "time/score_s": seconds.scoring}
    if rewards.rests:
        metrics["time/judge_wake_s"] = seconds.waking
    if world.size > 1:
        metrics["time/waiting_s"] = seconds.waiting
        metrics |= {
            "rank/sample_s": seconds.own_total - seconds.own_scoring,
            "rank/score_s": seconds.own_scoring,
            "rank/waiting_s": seconds.total - seconds.own_total,
        }
    metrics["time/tokens_per_s"] = metrics["sampled_tokens"] / max(metrics["time/sample_s"], 1e-9)
    return metrics


# Settings ------------------------------------------------------------------------------------------------------------


def training_sampling(recipe: RLRecipe, step: int) -> Sampling:
    """The recipe's rollout, with the randomness of a step."""
    return _sampling(recipe, recipe.rollout, recipe.rollout.max_new_tokens, step)


def validation_sampling(recipe: RLRecipe, step: int) -> Sampling:
    return _sampling(recipe, recipe.validation, recipe.validation.max_new_tokens or recipe.rollout.max_new_tokens, step)


def _sampling(recipe: RLRecipe, settings: "RolloutSettings | ValidationSettings", max_new_tokens: int, step: int) -> Sampling:
    return Sampling(
        max_new_tokens=max_new_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        min_p=settings.min_p,
        stop=stop_strings(recipe.model.path, recipe.rollout.stop),
        seed=recipe.seed,
        step=step,
    )


def require_context(
    config: "PretrainedConfig",
    prompts: Sequence[EncodedPrompt],
    max_new_tokens: int,
    name: str = "the model",
    *,
    setting: str = "rollout.max_new_tokens",
) -> None:
    """The longest prompt and response fit into the model's context. (The engine checks too, but only when it gets that prompt.)"""
    context = getattr(config, "max_position_embeddings", None)
    longest = max(prompts, key=lambda encoded: len(encoded.tokens), default=None)
    if context is not None and longest is not None and len(longest.tokens) + max_new_tokens > context:
        shorter_responses = [f"lower {setting} to {context - len(longest.tokens)}"] if len(longest.tokens) < context else []
        fewer_prompts = [f"leave out longer prompts: data.max_prompt_tokens={max(1, context - max_new_tokens)}"]
        if max_new_tokens >= context:  # no prompt fits
            shorter_responses, fewer_prompts = shorter_responses or [f"lower {setting}"], []
        advice = ", or ".join(shorter_responses + fewer_prompts)
        raise RecipeError(
            f"prompt {longest.prompt.id}: {len(longest.tokens):,} tokens plus up to {max_new_tokens:,} new ones exceed the context "
            f"of {name}, {context:,} tokens. {advice[0].upper()}{advice[1:]}."
        )


def check_capabilities(able: Capabilities, recipe: RLRecipe) -> list[str]:
    """Refuses a recipe that needs what its engine cannot do; returns warnings about the rest."""
    warnings = []
    if not able.truncated_logprobs and training_sampling(recipe, 0).truncates:
        uses = [f"algorithm.{name}" for name, used in (
            ("old_logprobs: sampler", recipe.algorithm.old_logprobs == "sampler"),
            ("importance", recipe.importance is not None),
        ) if used]  # fmt: skip
        if uses:
            raise RecipeError(
                f"{' and '.join(uses)} needs the sampler's log-probs, and under rollout.top_p, top_k or min_p rollout.engine "
                f"{recipe.rollout.engine} may return those of the truncated distribution: remove these, or use the native engine"
            )
        lag = ", and no importance weights correct for rollout.lag" if recipe.rollout.lag else ""
        warnings.append(
            f"rollout.engine {recipe.rollout.engine}: under top_p, top_k or min_p `mismatch` includes the truncation{lag}"
        )
    if recipe.run.deterministic and not able.keyed_noise:
        warnings.append(f"rollout.engine {recipe.rollout.engine} draws its own random numbers: this run may not repeat to the bit")
    return warnings


def require_lag_possible(recipe: RLRecipe, device: "torch.device") -> None:
    """Refuses a lag where sampling and training would share a GPU in one process: neither would be faster."""
    if recipe.rollout.lag and recipe.rollout.engine == "native" and device.type != "cpu":
        raise RecipeError(
            "rollout.lag samples while the trainer computes, and rollout.engine native samples on the trainer's own GPU: use an "
            "engine that has another one (rollout.engine: vllm), or set rollout.lag to 0"
        )
