"""Reinforcement learning against rewards.

Each step samples n responses to each of the next prompts, scores every group while others are still sampled, turns scores into
advantages, and moves the policy towards what was better than its group:

    L = Σ_t w_t · ( loss(π, π_old, A)_t + β · kl(π, ref)_t − c · H_t )

How rewards become A, and which loss it is, the recipe's `algorithm` says (docs/algorithms.md). With a critic (PPO), A is against
what the critic expected of each token; it learns in the same updates, and in the first steps alone if it is to be warmed up. It is
a model of its own, or a head on the policy's layers: then one pass gives log-probs and values, and one update moves both.

Differs from the textbook: the policy is sampled with the trainer's own weights, and how far the sampler's log-probs are from the
trainer's is measured in every step; a sample whose reward failed leaves every mean, it does not become a zero; groups enter batches
in the order of prompts, never of arrival, so that a run can be repeated to the bit.
"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel

from plaudit.audit.certificate import require_passed
from plaudit.config import LoadedRecipe
from plaudit.data.conversations import Source
from plaudit.data.order import RowOrder, RowStream
from plaudit.data.pack import micro_batches
from plaudit.data.prompts import EncodedPrompt, load_prompts, with_unique_ids
from plaudit.data.templates import ChatTemplate, load_model_template
from plaudit.errors import RecipeError, TrainingStopped
from plaudit.files import weights_fingerprint
from plaudit.models.critic import SharedCritic, load_critic, target_values
from plaudit.models.logprobs import state_logprobs, target_states
from plaudit.models.reference import Reference
from plaudit.models.trainable import load_policy, resolve_device
from plaudit.models.weights import OffloadedModule, has_device_memory
from plaudit.recipe import RLDataSettings, RLRecipe
from plaudit.report.progress import StepProgress, print_line, show_progress
from plaudit.report.samples import length_metrics
from plaudit.rewards.metrics import has_signal
from plaudit.rewards.metrics import metrics as reward_metrics
from plaudit.rewards.runner import RewardRunner
from plaudit.rl.estimators import with_advantages
from plaudit.rl.experience import Prediction, baseline_apart, experiences, updates, with_predictions
from plaudit.rl.kl_penalty import KLPenalty
from plaudit.rl.policy_loss import policy_loss
from plaudit.rl.value_loss import shared_loss, value_loss, value_metrics
from plaudit.rollout.engine import Engine, Sampling
from plaudit.rollout.groups import sample_groups, sample_groups_and_greedy
from plaudit.rollout.native.engine import NativeEngine
from plaudit.run import Run
from plaudit.train.memory_plan import settle_checkpointing
from plaudit.train.schedule import lr_at
from plaudit.train.trainer import Loss, Trainer, compute_repeatably
from plaudit.types import Batch, Experience, ScoredGroup

Check = Callable[..., tuple[list[ScoredGroup], dict[str, float]]]
"""A validation: of a step, its groups and what they come to."""


def train(loaded: LoadedRecipe, sources: dict[str, list[Source]]) -> Path:
    """Train the recipe's model on the prompts of `sources['train']`; returns the trained model's folder."""
    recipe = loaded.recipe
    assert isinstance(recipe, RLRecipe)
    if recipe.audit.require is not None:
        require_passed(recipe.audit, recipe.rewards)
    device = resolve_device(recipe.run.device)
    if recipe.run.deterministic:
        compute_repeatably(device)
    template = load_model_template(recipe.model)
    files = [source.path for part in sources.values() for source in part]
    scorers = [file for reward in recipe.rewards for file in reward.files]
    with (
        Run(loaded, files, template, _inputs(recipe), scorers=scorers, best="val/reward", higher_is_better=True) as run,
        RewardRunner(recipe.rewards, cache=Path(recipe.run.dir) / "scores.sqlite", repeatable=recipe.run.deterministic) as rewards,
    ):
        prompts = _prompts("train", sources["train"], template, recipe.data)
        validation = _prompts("val", sources["val"], template, recipe.data) if sources["val"] else []
        validation = validation[: recipe.validation.max_prompts]
        rewards.require_rewards(encoded.prompt for encoded in [*prompts, *validation])

        order = RowOrder(len(prompts), per_step=recipe.train.prompts_per_step, epochs=recipe.run.epochs, seed=recipe.seed)
        total_steps = min(order.num_steps, recipe.run.max_steps or order.num_steps)
        settled = settle_checkpointing(recipe)
        policy = load_policy(settled.model, template, device, seed=recipe.seed)
        require_room(policy.model, prompts, recipe.rollout.max_new_tokens)
        require_room(policy.model, validation, recipe.validation.max_new_tokens or recipe.rollout.max_new_tokens)
        offload = recipe.algorithm.reference_placement == "offload"
        reference = Reference(recipe.model, policy, offload=offload) if recipe.algorithm.needs_reference else None
        penalty = KLPenalty(recipe.algorithm.kl_reward) if recipe.algorithm.kl_reward is not None else None
        trainer = Trainer(policy, recipe.optim, seed=recipe.seed, max_skipped_steps=recipe.train.max_skipped_steps)
        others = trainer.optimiser.resident_bytes + (reference.bytes if reference is not None else 0)
        critic_leaves = recipe.critic is not None and recipe.critic.placement == "offload" and has_device_memory(device)
        if recipe.critic is not None and settled.critic is not None:
            if recipe.critic.shared:
                critic = SharedCritic(policy, recipe.model.path)
            else:
                critic = load_critic(settled.critic.model(recipe.model), template, device, seed=recipe.seed)
                require_room(critic.model, prompts, recipe.rollout.max_new_tokens, "the critic")
            learner = trainer.beside["critic"] = trainer.like_it(critic, recipe.critic.optim)
            others += learner.optimiser.resident_bytes
            others += 0 if critic_leaves else sum(p.numel() * p.element_size() for p in critic.model.parameters())
        engine = NativeEngine(policy.model, template.tokenizer, max_sequences=recipe.rollout.max_sequences, reserved_bytes=others)
        run.companions["rewards"] = rewards
        if penalty is not None:
            run.companions["kl_penalty"] = penalty
        stream = RowStream(order) if recipe.algorithm.dynamic_sampling is not None else None
        if stream is not None:
            run.companions["prompts"] = stream
        done = run.resume(trainer)
        critic_present = OffloadedModule(trainer.beside["critic"].policy.model, device).on_device if critic_leaves else nullcontext
        engine.sync(done)
        if done == total_steps:
            print_line(f"this run is finished: all {total_steps} steps are done")

        check = partial(validate, engine, rewards, validation, recipe) if validation else None
        greedy = recipe.algorithm.kind == "remax"
        with StepProgress("rl", total_steps, done) as progress:
            if check is not None and (done == 0 or run.unvalidated is not None):
                # Validation before training, or the one that the last start could not make.
                progress.update(done, conclude(run, trainer, check, done, total_steps, run.unvalidated or {}))
            for step in range(done + 1, total_steps + 1):
                rows = order.rows(step - 1)
                with run.nothing_lost(f"step {step}", step - 1, trainer):
                    if stream is None:
                        asked = with_unique_ids(prompts[row] for row in rows)
                        groups, metrics = sample(engine, rewards, asked, recipe.rollout.n, sampling_of(recipe, step), greedy)
                    else:
                        groups, metrics = sample_until_full(engine, rewards, prompts, stream, len(rows), recipe, step)
                run.write_samples("train", step, groups)
                if stream is not None:
                    groups = [group for group in groups if has_signal(group)][: len(rows)]

                lr, critic_lr = (lr_at(step - 1, total_steps, s.optim) if s is not None else 0.0 for s in (recipe, recipe.critic))
                with critic_present():
                    metrics |= learn(trainer, reference, groups, recipe, step, lr, penalty, critic_lr)
                engine.sync(step)
                taken = min(step * order.per_step, order.total_rows) if stream is None else stream.taken
                metrics["epoch"] = taken / order.num_rows
                progress.update(step, conclude(run, trainer, check, step, total_steps, metrics))
                run.stop_if_interrupted(step, total_steps, trainer)

        return run.finish(trainer)


def conclude(
    run: Run, trainer: Trainer, check: Check | None, step: int, total_steps: int, metrics: dict[str, float]
) -> dict[str, float]:  # fmt: skip
    """Validate if it is time, record the step, save if it is time; returns what was recorded."""
    settings, improved = run.recipe.run, False
    algorithm = run.recipe.algorithm if isinstance(run.recipe, RLRecipe) else None
    compared = algorithm is not None and algorithm.compares_groups and algorithm.kl_reward is None  # which differs on its own
    if compared and metrics.get("groups_without_signal") == 1.0:
        run.say_once(f"step {step}: in no group do the rewards of samples differ, so there was nothing to learn from")
    if missing := metrics.get("groups_missing"):
        run.say_once(f"step {step}: after algorithm.dynamic_sampling.max_rounds, {missing:.0f} groups with a signal are missing")
    if check is not None and (step == 0 or run.due(settings.validate_every, step, total_steps)):
        with run.nothing_lost(f"validation after step {step}", step, trainer, metrics):
            groups, validated = check(step=step)
        run.write_samples("val", step, groups)
        metrics = metrics | validated
        improved = step > 0 and run.note_validation(step, metrics)
    row = run.log(step, metrics)
    if step > 0 and (run.due_to_save(step, total_steps) or (improved and settings.keep_best)):
        run.save(step, trainer)
    return row


def evaluate(loaded: LoadedRecipe, sources: dict[str, list[Source]]) -> dict[str, float]:
    """The recipe's model, as it is, on the validation prompts."""
    recipe = loaded.recipe
    assert isinstance(recipe, RLRecipe)
    template = load_model_template(recipe.model)
    prompts = _prompts("val", sources["val"], template, recipe.data)[: recipe.validation.max_prompts]
    policy = load_policy(recipe.model, template, resolve_device(recipe.run.device))
    engine = NativeEngine(policy.model, template.tokenizer, max_sequences=recipe.rollout.max_sequences)
    with RewardRunner(recipe.rewards) as rewards:
        return validate(engine, rewards, prompts, recipe, step=0)[1]


def sample(
    engine: Engine, rewards: RewardRunner, prompts: Sequence[EncodedPrompt], n: int, sampling: Sampling,
    baseline: bool = False, *, learn: bool = True,
) -> tuple[list[ScoredGroup], dict[str, float]]:  # fmt: skip
    """Scored groups of the prompts, in their order, and what they come to. `baseline`: each group is scored with a
    greedy sample besides. `learn`: running means take the values in."""
    groups, spent, waited = draw(engine, rewards, prompts, n, sampling, baseline, learn=learn)
    return groups, measured(groups, rewards, spent, waited)


def sample_until_full(
    engine: Engine, rewards: RewardRunner, prompts: Sequence[EncodedPrompt], stream: RowStream, wanted: int, recipe: RLRecipe,
    step: int,
) -> tuple[list[ScoredGroup], dict[str, float]]:  # fmt: skip
    """Groups of the stream's next prompts, in their order, until so many have a signal or the rounds are over.

    A further round asks as many prompts as are likely to do, by the share of groups with a signal so far: never more than a step
    wants, and no fewer than a quarter of that, or one failed reward would be a large share of its round.
    """
    assert recipe.algorithm.dynamic_sampling is not None
    asked: list[EncodedPrompt] = []
    groups: list[ScoredGroup] = []
    spent = waited = 0.0
    rounds = full = 0
    means = rewards.state()
    while full < wanted and rounds < recipe.algorithm.dynamic_sampling.max_rounds:
        likely = math.ceil((wanted - full) * (len(groups) + 1) / (full + 1))
        count = wanted if not groups else min(wanted, max(likely, math.ceil(wanted / 4)))
        asked += [prompts[row] for row in stream.ahead(len(asked), count)]
        try:
            more, a_round_s, waited_s = draw(
                engine, rewards, with_unique_ids(asked)[-count:], recipe.rollout.n, sampling_of(recipe, step)
            )
        except TrainingStopped:
            rewards.load_state(means)  # the step is not done, so its first rounds have left no trace
            raise
        groups, spent, waited, rounds = groups + more, spent + a_round_s, waited + waited_s, rounds + 1
        full = sum(map(has_signal, groups))
    stream.taken += len(asked)
    metrics = measured(groups, rewards, spent, waited)
    return groups, metrics | {"rounds": float(rounds), "groups": float(len(groups)), "groups_missing": float(max(0, wanted - full))}


def draw(
    engine: Engine, rewards: RewardRunner, prompts: Sequence[EncodedPrompt], n: int, sampling: Sampling,
    baseline: bool = False, *, learn: bool = True,
) -> tuple[list[ScoredGroup], float, float]:  # fmt: skip
    """Scored groups of the prompts, in their order; the seconds it took, and those of them that only scoring took."""
    began = time.perf_counter()
    sampled = (sample_groups_and_greedy if baseline else sample_groups)(engine, prompts, n, sampling)
    scored = rewards.collect(sampled, expected=len(prompts) * (n + baseline), learn=learn)
    by_id = {group.group.prompt.id: baseline_apart(group) if baseline else group for group in scored}
    return [by_id[encoded.prompt.id] for encoded in prompts], time.perf_counter() - began, rewards.waited_s


def measured(groups: Sequence[ScoredGroup], rewards: RewardRunner, spent: float, waited: float) -> dict[str, float]:
    """What sampled groups come to."""
    metrics = reward_metrics(groups) | rewards.counts() | length_metrics(groups)
    if greedy := [group.baseline.value for group in groups if group.baseline is not None and group.baseline.value is not None]:
        metrics["baseline_reward"] = sum(greedy) / len(greedy)
    metrics |= {"time/sample_s": spent - waited, "time/score_s": waited}
    metrics["time/tokens_per_s"] = metrics["sampled_tokens"] / max(metrics["time/sample_s"], 1e-9)
    return metrics


def learn(
    trainer: Trainer, reference: Reference | None, groups: Sequence[ScoredGroup], recipe: RLRecipe, step: int, lr: float,
    penalty: KLPenalty | None = None, critic_lr: float = 0.0,
) -> dict[str, float]:  # fmt: skip
    """All updates of a step; returns their metrics, averaged."""
    critic = trainer.beside.get("critic")
    shared = shared_critic(trainer)
    frozen = recipe.critic is not None and step <= recipe.critic.pretrain_steps
    model, device, temperature = trainer.policy.model, trainer.policy.device, recipe.rollout.temperature
    budget, horizon = recipe.train.tokens_per_micro_batch, recipe.rollout.max_new_tokens
    began = time.perf_counter()
    learnt = foretold([experiences(group, recipe.algorithm) for group in groups], trainer, reference, recipe, frozen=frozen)
    baselines = [group.baseline.value for group in groups if group.baseline is not None]
    learnt, charged = with_advantages(learnt, recipe.algorithm, baselines=baselines, penalty=penalty)
    prepared = time.perf_counter()

    def loss_of(samples: Sequence[Experience]) -> Loss:
        if shared is None:
            return policy_loss(model, samples, recipe.algorithm, temperature)
        assert recipe.critic is not None
        return shared_loss(model, shared, samples, recipe.algorithm, recipe.critic, temperature)

    results, critic_results = [], []
    for samples in updates(learnt, recipe.train, recipe.algorithm, horizon=horizon, seed=recipe.seed, step=step):
        batches = micro_batches(samples, budget, device)
        if critic is not None and (shared is None or frozen):
            critic_results.append(update_critic(critic, model, samples, batches, recipe, critic_lr))
        if not frozen:
            results.append(trainer.update(batches, loss_of(samples), lr))
        if critic is not None and shared is not None and not frozen:
            # The head's gradients came with the policy's: no batch is left to learn from.
            critic_results.append(update_critic(critic, model, samples, (), recipe, critic_lr))
    metrics = charged | averaged(critic_results) | averaged(results)
    if critic is not None:
        metrics |= value_metrics([experience for group in learnt for experience in group])
    # Sampler and trainer share their weights only until the first update.
    metrics |= {name: results[0][name] for name in ("mismatch", "mismatch_kl") if results}
    metrics |= {"updates": float(trainer.updates), "skipped_steps": float(trainer.skipped_steps)}
    return metrics | {"time/logprobs_s": prepared - began, "time/update_s": time.perf_counter() - prepared}


def foretold(
    groups: Sequence[Sequence[Experience]], trainer: Trainer, reference: Reference | None, recipe: RLRecipe, *, frozen: bool
) -> list[list[Experience]]:
    """What a step's samples are compared with: log-probs and values of the models as they are before it. `frozen`: the policy
    stays as it is."""
    critic, model, temperature = trainer.beside.get("critic"), trainer.policy.model, recipe.rollout.temperature
    shared = shared_critic(trainer)
    charged = recipe.algorithm.kl_reward is not None
    ratios = recipe.train.updates_per_step > 1 and not frozen
    old = recipe.algorithm.old_logprobs == "recomputed" and (ratios or charged)

    @torch.no_grad()
    def of_policy(batch: Batch) -> dict[Prediction, torch.Tensor]:
        model.eval()
        hidden_ND = target_states(model, batch)
        told: dict[Prediction, torch.Tensor] = {}
        if old:
            told["old_logprobs"] = state_logprobs(model, hidden_ND, batch, temperature=temperature).logprobs_N
        if shared is not None:
            told["values"] = shared.values(hidden_ND)
        return told

    def of_reference(batch: Batch) -> dict[Prediction, torch.Tensor]:
        assert reference is not None
        return {"ref_logprobs": reference.logprobs(batch, temperature)}

    @torch.no_grad()
    def of_critic(batch: Batch) -> dict[Prediction, torch.Tensor]:
        assert critic is not None
        critic.policy.model.eval()
        return {"values": target_values(critic.policy.model, batch)}

    ask = partial(with_predictions, budget=recipe.train.tokens_per_micro_batch, device=trainer.policy.device)
    if old or shared is not None:
        groups = ask(groups, of_policy)
    if reference is not None and (charged or not frozen):
        with reference.on_device():
            groups = ask(groups, of_reference)
    if critic is not None and shared is None:
        groups = ask(groups, of_critic)
    return [list(group) for group in groups]


def shared_critic(trainer: Trainer) -> SharedCritic | None:
    """The critic, if it is a head on the policy's layers."""
    critic = trainer.beside.get("critic")
    return critic.policy if critic is not None and isinstance(critic.policy, SharedCritic) else None


def update_critic(
    critic: Trainer, policy: torch.nn.Module, samples: Sequence[Experience], batches: Sequence[Batch], recipe: RLRecipe, lr: float
) -> dict[str, float]:  # fmt: skip
    """One update of the critic; its metrics, under `critic/`. The policy's layers, if it shares them, are left as they are."""
    assert recipe.critic is not None

    def values(batch: Batch) -> torch.Tensor:
        if not isinstance(critic.policy, SharedCritic):
            return target_values(critic.policy.model, batch)
        with torch.no_grad():
            hidden_ND = target_states(policy, batch)
        return critic.policy.values(hidden_ND)

    try:
        told = critic.update(batches, value_loss(values, samples, clip=recipe.critic.clip_value), lr)
    except TrainingStopped as error:
        dtype = "model.dtype" if recipe.critic.shared else "critic.dtype"
        raise TrainingStopped(f"the critic's {error} (Its settings are critic.optim and {dtype}.)") from None
    return {f"critic/{name}": value for name, value in told.items() if not name.startswith("time/")}


def averaged(results: Sequence[dict[str, float]]) -> dict[str, float]:
    """Over a step's updates."""
    return {name: sum(result[name] for result in results) / len(results) for name in (results[0] if results else ())}


def validate(
    engine: Engine, rewards: RewardRunner, prompts: Sequence[EncodedPrompt], recipe: RLRecipe, step: int
) -> tuple[list[ScoredGroup], dict[str, float]]:
    """The validation prompts, sampled as `validation` says and scored."""
    began = time.perf_counter()
    groups, metrics = sample(engine, rewards, prompts, recipe.validation.n, sampling_of(recipe, step, validation=True), learn=False)
    metrics = {f"val/{name}": value for name, value in metrics.items() if not name.startswith("time/")}
    metrics.setdefault("val/reward", float("nan"))  # every sample was dropped
    return groups, metrics | {"time/validate_s": time.perf_counter() - began}


def sampling_of(recipe: RLRecipe, step: int, *, validation: bool = False) -> Sampling:
    """The recipe's rollout, or validation's changes to it, with the randomness of a step."""
    settings = recipe.validation if validation else recipe.rollout
    return Sampling(
        max_new_tokens=settings.max_new_tokens or recipe.rollout.max_new_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        min_p=settings.min_p,
        stop=recipe.rollout.stop,
        seed=recipe.seed,
        step=step,
    )


def require_room(model: PreTrainedModel, prompts: Sequence[EncodedPrompt], max_new_tokens: int, who: str = "the model") -> None:
    """The engine would say so too, but not before the step that asks the longest prompt."""
    context = getattr(model.config, "max_position_embeddings", None)
    longest = max(prompts, key=lambda encoded: len(encoded.tokens), default=None)
    if context is not None and longest is not None and len(longest.tokens) + max_new_tokens > context:
        raise RecipeError(
            f"prompt {longest.prompt.id}: {len(longest.tokens):,} tokens and up to {max_new_tokens:,} new ones are more than the "
            f"{context:,} that {who} takes. Lower max_new_tokens, or leave out longer prompts with data.max_prompt_tokens."
        )


def _inputs(recipe: RLRecipe) -> dict[str, str]:
    """What the result depends on besides the policy and its data."""
    return (
        {} if recipe.critic is None or recipe.critic.path is None else {"the critic": weights_fingerprint(Path(recipe.critic.path))}
    )


def _prompts(part: str, sources: list[Source], template: ChatTemplate, data: RLDataSettings) -> list[EncodedPrompt]:
    result = load_prompts(
        sources,
        template,
        max_prompt_tokens=data.max_prompt_tokens,
        too_long=data.too_long,
        progress=lambda rows: show_progress(rows, f"reading {part} prompts"),
    )
    print_line(f"{part}: {result.summary(data.too_long, data.max_prompt_tokens)}")
    return result.prompts
