"""Reinforcement learning against rewards.

Each step samples n responses to each of the next prompts, scores every group while others are still sampled, turns scores into
advantages, and moves the policy towards what was better than expected:

    L = Σ_t w_t · ( loss(π, π_old, A)_t + β · kl(π, ref)_t − c · H_t )

How rewards become A, and which loss it is, is set by the recipe's `algorithm` (docs/algorithms.md). With a critic (PPO), A is
relative to the critic's value of each token; it is trained in the same updates, and alone in the first steps if it has a warm-up.
It is a separate model, or a head on the policy's layers: then one pass gives log-probs and values, and one update moves both.

Differs from the textbook: the policy is sampled with the trainer's own weights, and the distance between the sampler's log-probs
and the trainer's is measured in every step; a sample whose reward failed is excluded from all means instead of counting as 0;
groups enter batches in the order of prompts, never of arrival, so that a run repeats to the bit. With `rollout.lag`, the next step
is sampled and scored while this one is trained (rl/pipeline.py).
"""

import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

from plaudit.audit.certificate import require_passed
from plaudit.audit.evaluated import require_evaluated
from plaudit.config import LoadedRecipe
from plaudit.data.conversations import Source
from plaudit.data.order import RowOrder
from plaudit.data.prompts import EncodedPrompt, load_prompts
from plaudit.data.templates import ChatTemplate, load_model_template
from plaudit.errors import StopRequested
from plaudit.files import text_digest, weights_fingerprint
from plaudit.hub import model_folder
from plaudit.models.devices import resolve_device
from plaudit.models.memory import total_memory
from plaudit.models.trainable import load_policy, load_sampled
from plaudit.recipe import RLDataSettings, RLRecipe
from plaudit.report.activity import Activity
from plaudit.report.progress import StepProgress, console, print_line, show_progress
from plaudit.report.samples import best_and_worst, source_line
from plaudit.response_files import stop_strings
from plaudit.rewards.cache import own_cache
from plaudit.rewards.metrics import rewards_by_source
from plaudit.rewards.runner import RewardRunner
from plaudit.rl.collect import (
    Collector,
    check_capabilities,
    require_context,
    require_lag_possible,
    validate,
    validation_sampling,
)
from plaudit.rl.experience import experiences_by_sample
from plaudit.rl.learner import Learner
from plaudit.rl.pipeline import Pipeline
from plaudit.rl.shares import PromptShares
from plaudit.rollout.build import build_engine, engine_class
from plaudit.rollout.engine import EngineSetup, Weights
from plaudit.run import Run
from plaudit.train.build import plan_training
from plaudit.train.memory_plan import launched_models
from plaudit.train.trainer import compute_repeatably
from plaudit.types import ScoredGroup
from plaudit.world import World

Validate = Callable[..., tuple[list[ScoredGroup], dict[str, float]]]
"""Given a step: the scored validation groups and their metrics."""


def train(loaded: LoadedRecipe, sources: dict[str, list[Source]], world: World) -> Path:
    """Train the recipe's model on the prompts of `sources['train']`; returns the trained model's folder."""
    recipe = loaded.recipe
    assert isinstance(recipe, RLRecipe)
    if recipe.audit.require is not None:
        require_passed(recipe.audit, recipe.rewards)
    if recipe.eval.require is not None:
        require_evaluated(recipe.eval, recipe.rewards)
    engine_kind = engine_class(recipe.rollout.engine)
    for warning in check_capabilities(engine_kind.capabilities, recipe):
        print_line(warning, "yellow")
    require_lag_possible(recipe, world.device)
    lag = recipe.rollout.lag > 0
    sampling_world = world.for_second_thread() if lag else world
    if recipe.run.deterministic:
        compute_repeatably(world.device)
    template = load_model_template(recipe.model, recipe.data.special_tokens)
    files = [source for part in sources.values() for source in part]
    code = [file for reward in recipe.rewards for file in reward.files] + recipe.rollout.files
    with (
        Run(loaded, files, template, _inputs(recipe), world=world, code=code, best="val/reward", higher_is_better=True) as run,
        RewardRunner(
            recipe.rewards,
            cache=own_cache(run.folder, world),
            repeatable=recipe.run.deterministic,
            seed=recipe.seed,
            world=sampling_world,
        ) as rewards,
        ExitStack() as stack,
    ):
        # Build
        prompts = _prompts("train", sources, template, recipe.data)
        val_prompts = _val_prompts(sources, template, recipe) if sources["val"] else []
        rewards.require_rewards(encoded.prompt for encoded in [*prompts, *val_prompts])
        per_step, last_batch = recipe.train.prompts_per_step, recipe.train.last_batch
        order = RowOrder(len(prompts), per_step=per_step, epochs=recipe.run.epochs, seed=recipe.seed, last_batch=last_batch)
        total_steps = order.steps(recipe.run.max_steps)
        for note in (order.repeats("train.prompts_per_step", "prompts"), order.ends_early(recipe.run.max_steps)):
            if note is not None:
                print_line(note, "yellow")
        lengths = [len(prompt.tokens) for prompt in prompts]
        recipe, sharding, run.micro_batch = plan_training(recipe, lengths, world, run.micro_batch)
        run.resolved, run.sharding = recipe, sharding
        learner = Learner.build(recipe, template, total_steps=total_steps, world=world, sharding=sharding)
        for name, config in learner.configs.items():
            require_context(config, prompts, recipe.rollout.max_new_tokens, name)
        setting = "rollout.max_new_tokens" if recipe.validation.max_new_tokens is None else "validation.max_new_tokens"
        longest_response = validation_sampling(recipe, 0).max_new_tokens
        require_context(learner.configs["the model"], val_prompts, longest_response, setting=setting)
        own_weights = engine_kind.own_weights and not lag
        sampled = learner.policy.model if own_weights else load_sampled(recipe.model, learner.policy, copy=lag)
        reserved = learner.resident_bytes(sampled)
        if world.device.type == "cpu" and world.local_size:  # the other processes' shares of the machine's memory
            reserved += int(total_memory(world.device) * (1 - 1 / world.local_size))
        # A judge's server, even one that never sleeps, may be started again; a device may be several processes'.
        shares_device = bool(launched_models(recipe)) or (world.is_joined and world.through_host)
        setup = EngineSetup(recipe.rollout, sampled, template.tokenizer, sampling_world, reserved, run.folder, shares_device)
        engine = stack.enter_context(closing(build_engine(setup)))
        ends = threading.Event()
        activity = Activity(partial(_check, run, sampling_world, ends))
        shares = PromptShares(sampling_world, [*(prompts if recipe.run.epochs > 1 else ()), *val_prompts])
        collector = Collector(engine, rewards, recipe, prompts, order, activity, shares)
        pipeline = Pipeline(engine, collector, learner, total_steps=total_steps, held=sampled if lag else None, ends=ends)
        stack.enter_context(closing(pipeline))
        check = partial(validate, engine, rewards, recipe, val_prompts, activity, shares) if val_prompts else None

        # Resume
        done = run.resume(pipeline, rewards=rewards, prompts=collector.stream, shares=shares)
        with run.save_before_stopping(f"step {done + 1}", done, run.unvalidated):
            pipeline.catch_up(done + 1)
        pipeline.sync(done)
        if done == total_steps:
            print_line(f"this run is finished: all {total_steps} steps are done")

        with StepProgress("rl", total_steps, done, validate_every=recipe.run.validate_every, activity=activity) as progress:
            if run.unvalidated is not None or (check is not None and done == 0 and recipe.run.validate_first):
                # The step whose validation or sync stopped the last start, or the validation before training.
                progress.update(done, record(run, recipe, check, done, total_steps, run.unvalidated or {}))
            for step in range(done + 1, total_steps + 1):
                with run.save_before_stopping(f"step {step}", step - 1):
                    collected = pipeline.take(step)
                with run.save_before_stopping(f"step {step}", step - 1):
                    metrics = collected.metrics | pipeline.begin_training(step)
                try:
                    metrics |= learner.learn(collected.groups, step)
                finally:
                    trained = experiences_by_sample(collected.groups, learner.experiences)
                    run.write_samples("train", step, collected.sampled, trained)
                with run.save_before_stopping(f"step {step + 1}", step, metrics):
                    metrics |= pipeline.wait()
                with run.save_before_stopping(f"sync after step {step}", step, metrics):
                    pipeline.sync(step)
                progress.update(step, record(run, recipe, check, step, total_steps, metrics))
                run.stop_if_interrupted(step, total_steps)

        return run.finish()


def _check(run: Run, world: World, ends: threading.Event) -> None:
    """Many times per second, while prompts are sampled and scored."""
    run.check_for_stop()
    if ends.is_set():
        raise StopRequested
    world.heartbeat.beat_while_waiting()


def record(
    run: Run, recipe: RLRecipe, check: Validate | None, step: int, total_steps: int, metrics: dict[str, float]
) -> dict[str, float]:
    """Validate if due, log the step, save if due; returns what was logged."""
    improved = False
    if recipe.algorithm.compares_groups and recipe.algorithm.kl_reward is None and metrics.get("groups_without_signal") == 1.0:
        run.warn_once("no signal", f"step {step}: all samples of each group have equal rewards, so there was nothing to train on")
    if missing := metrics.get("groups_missing"):
        after = f"step {step}: after algorithm.dynamic_sampling.max_rounds"
        run.warn_once("groups missing", f"{after}, {missing:.0f} groups with a signal are missing")
    if check is not None and (step == 0 or run.due(recipe.run.validate_every, step, total_steps)):
        moment = f"after step {step}" if step else "before training"
        with run.save_before_stopping(f"validation {moment}", step, metrics):
            groups, val_metrics = check(step=step)
        run.write_samples("val", step, groups)
        for sample in best_and_worst(groups):
            for line in sample.lines(console.width):
                print_line(line)
        if len(by_source := rewards_by_source(groups)) > 1:
            print_line(source_line(by_source, console.width))
        metrics = metrics | val_metrics
        improved = step > 0 and run.note_validation(step, metrics)
    row = run.log(step, metrics)
    if step > 0 and (run.due_to_save(step, total_steps) or (improved and recipe.run.keep_best)):
        run.save(step)
    return row


def evaluate(loaded: LoadedRecipe, sources: dict[str, list[Source]]) -> dict[str, float]:
    """The recipe's model, untrained, on the validation prompts."""
    recipe = loaded.recipe
    assert isinstance(recipe, RLRecipe)
    world = World.alone(resolve_device(recipe.run.device))
    template = load_model_template(recipe.model, recipe.data.special_tokens)
    prompts = _val_prompts(sources, template, recipe)
    policy = load_policy(recipe.model, template, world.device)
    setup = EngineSetup(recipe.rollout, policy.model, template.tokenizer, world)
    with RewardRunner(recipe.rewards, seed=recipe.seed) as rewards, closing(build_engine(setup)) as engine:
        engine.sync(0, Weights(policy.model))
        return validate(engine, rewards, recipe, prompts, Activity(), PromptShares(world), step=0)[1]


def _inputs(recipe: RLRecipe) -> dict[str, str]:
    """What the result depends on besides the policy and its data."""
    paths = {"the critic": recipe.critic and recipe.critic.path, "the reference": recipe.reference.path}
    digests = {name: weights_fingerprint(model_folder(path)) for name, path in paths.items() if path is not None}
    stop = stop_strings(recipe.model.path, None) if recipe.rollout.stop is None else ()
    return digests | ({"the model's stop.txt": text_digest("\n".join(stop))} if stop else {})


def _val_prompts(sources: dict[str, list[Source]], template: ChatTemplate, recipe: RLRecipe) -> list[EncodedPrompt]:
    return _prompts("val", sources, template, recipe.data, recipe.validation.max_prompts)


def _prompts(
    part: str, sources: dict[str, list[Source]], template: ChatTemplate, data: RLDataSettings, max_prompts: int | None = None
) -> list[EncodedPrompt]:
    result = load_prompts(
        sources[part],
        template,
        others=[source for files in sources.values() for source in files],
        max_prompt_tokens=data.max_prompt_tokens,
        too_long=data.too_long,
        progress=lambda rows: show_progress(rows, f"reading {part} prompts"),
    )
    result.use_first(max_prompts, "validation.max_prompts")
    print_line(f"{part}: {result.summary(data.too_long, data.max_prompt_tokens)}")
    return result.prompts
