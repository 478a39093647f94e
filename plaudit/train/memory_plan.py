"""Memory needed on each device, phase by phase, from the recipe alone: policy, critic, reference and reward models.

The doctor prints it; training uses it to decide how many layers to checkpoint.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from heapq import nlargest
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import torch

from plaudit.errors import PlauditError
from plaudit.models.devices import resolve_device
from plaudit.models.folder import context_tokens, read_config
from plaudit.models.memory import (
    PHASES,
    RUNTIME,
    SAFE_SHARE,
    Budget,
    MemoryPlan,
    Need,
    gigabytes,
    plan_cache,
    plan_memory,
    plan_reward_model,
    plan_sampling,
    total_memory,
)
from plaudit.models.trainable import resolve_dtype
from plaudit.models.weights import has_device_memory
from plaudit.recipe import (
    PreferenceRecipe,
    Recipe,
    RewardedRecipe,
    RewardModelRecipe,
    RLRecipe,
    ScoreRecipe,
    SFTRecipe,
    TrainingRecipe,
)
from plaudit.report.progress import print_line
from plaudit.rewards.judges.model_rewards import ModelReward, find_all_model_rewards
from plaudit.rollout.engine import MAX_SEQUENCES, PREFILL_TOKENS

RESIDENT = ": weights, resident"
Needs = dict[str, list[Need]]
"""By device type."""
Trained = TypeVar("Trained", bound=TrainingRecipe)


Lengths = Sequence[int] | None
"""Tokens of each training row (a pair: of both sides; RL: of each prompt). None: unknown, so all may be as long as allowed."""


def plan_devices(recipe: Recipe, lengths: Lengths = None) -> dict[str, Budget]:
    """The memory budget of each device. Reward models that cannot be read are left out: their own check reports them."""
    needs: Needs = defaultdict(list)
    if not isinstance(recipe, ScoreRecipe):
        device = resolve_device(recipe.run.device)
        needs[device.type].append(Need("torch and other libraries", PHASES, RUNTIME[device.type]))
        _policy(recipe, lengths, device, needs)
    for name, reward in local_reward_models(recipe):
        if reward.model.placement in ("resident", "offload"):
            try:
                _place(recipe, name, reward, needs)
            except (PlauditError, OSError, ValueError, AttributeError):
                continue
    return {kind: Budget(tuple(some), total_memory(torch.device(kind))) for kind, some in needs.items() if some}


def plan_policy(recipe: TrainingRecipe, lengths: Lengths = None) -> MemoryPlan:
    """The trained model alone."""
    return plan_memory(
        recipe.model,
        resolve_device(recipe.run.device),
        **update_size(recipe, lengths)._asdict(),
        scalar=isinstance(recipe, RewardModelRecipe),
        offload=recipe.optim.placement == "offload",
    )


def plan_critic(recipe: RLRecipe, lengths: Lengths = None) -> MemoryPlan:
    assert recipe.critic is not None
    return plan_memory(
        recipe.critic.model(recipe.model),
        resolve_device(recipe.run.device),
        **update_size(recipe, lengths)._asdict(),
        scalar=True,
        offload=recipe.critic.optim.placement == "offload",
    )


class UpdateSize(NamedTuple):
    micro_batch: int
    """Tokens of the largest micro-batch."""
    one_micro_batch: bool
    """Whether it holds an entire update."""


def update_size(recipe: TrainingRecipe, lengths: Lengths = None) -> UpdateSize:
    """A micro-batch is a full one, or a sequence that is longer and gets its own, but never more than an update."""
    if isinstance(recipe, RLRecipe):
        rows, new = recipe.train.prompts_per_update or recipe.train.prompts_per_step, recipe.rollout.max_new_tokens
        together, longest = _longest(lengths, rows, recipe.data.max_prompt_tokens)
        together, longest = recipe.rollout.n * (together + rows * new), longest + new
    elif isinstance(recipe, PreferenceRecipe):
        together, longest = _longest(lengths, recipe.train.pairs_per_step, 2 * recipe.data.max_tokens)
    else:
        assert isinstance(recipe, SFTRecipe)
        together, longest = _longest(lengths, recipe.train.rows_per_step, recipe.data.max_tokens)
    limit = max(recipe.train.tokens_per_micro_batch, longest)
    return UpdateSize(min(limit, together), together <= limit)


def _longest(lengths: Lengths, rows: int, limit: int) -> tuple[int, int]:
    """Tokens of the longest rows together, and of the longest one."""
    longest = nlargest(rows, lengths) if lengths else [limit]
    return sum(longest) + (rows - len(longest)) * longest[0], longest[0]


def local_reward_models(recipe: Recipe) -> list[tuple[str, ModelReward]]:
    """The first reward that uses each model, with the names of all rewards that share it."""
    rewards = recipe.rewards if isinstance(recipe, RewardedRecipe) else ()
    found: dict[Any, tuple[str, ModelReward]] = {}
    for name, reward in chain.from_iterable(map(find_all_model_rewards, rewards)):
        key = reward.model, reward.scalar
        found[key] = (f"{found[key][0]}, {name}", found[key][1]) if key in found else (name, reward)
    return list(found.values())


# Gradient checkpointing -----------------------------------------------------------------------------------------------


def resolve_checkpointing(recipe: Trained, lengths: Lengths = None, report: Callable[[str], object] = print_line) -> Trained:
    """Replace `auto` in the recipe by the fewest layers with which training fits; `report` receives a line with the reason."""
    critic = recipe.critic if isinstance(recipe, RLRecipe) else None
    if critic is not None and critic.gradient_checkpointing == "auto":
        assert isinstance(recipe, RLRecipe)
        model = critic.model(recipe.model)
        read_config(model.path, trust_remote_code=model.trust_remote_code)  # reports what is wrong with the folder
        layers = plan_critic(recipe).layers
        # Each is resolved while the other takes as little as it can: their updates alternate.
        with_critic = _resolve_model(_checkpointing(recipe, "critic", layers), lengths, report)
        resolved = _checkpointing(recipe, "model", with_critic.model.gradient_checkpointing)
        return _resolve(resolved, "critic", layers, lengths, report)
    return _resolve_model(recipe, lengths, report)


def _resolve_model(recipe: Trained, lengths: Lengths, report: Callable[[str], object]) -> Trained:
    if recipe.model.gradient_checkpointing != "auto":
        return recipe
    return _resolve(recipe, "model", plan_policy(recipe).layers, lengths, report)


def _resolve(recipe: Trained, section: str, layers: int, lengths: Lengths, report: Callable[[str], object]) -> Trained:
    device = resolve_device(recipe.run.device).type

    def budget(count: int) -> Budget:
        return plan_devices(_checkpointing(recipe, section, count), lengths)[device]

    def fits(count: int) -> bool:
        planned = budget(count)
        return planned.at("training", fixed_only=True) <= SAFE_SHARE * planned.available

    count = bisect_left(range(layers), True, key=fits)
    resolved = budget(count)
    offload = ", or set optim.placement=offload" if device != "cpu" and recipe.optim.placement == "resident" else ""
    but = "" if count < layers or fits(count) else f", which may be too much: lower train.tokens_per_micro_batch{offload}"
    report(
        f"{section}.gradient_checkpointing: {count or 'none'} of {layers} layers, with which training takes about "
        f"{gigabytes(resolved.at('training', fixed_only=True))} of {gigabytes(resolved.available)}{but}"
    )
    return _checkpointing(recipe, section, count)


def _checkpointing(recipe: Trained, section: str, layers: int | str) -> Trained:
    settings = getattr(recipe, section).model_copy(update={"gradient_checkpointing": layers or False})
    return recipe.model_copy(update={section: settings})


# Components and their needs -------------------------------------------------------------------------------------------


def _policy(recipe: TrainingRecipe, lengths: Lengths, device: torch.device, needs: Needs) -> None:
    plan, always = plan_policy(recipe, lengths), PHASES if isinstance(recipe, RLRecipe) else PHASES[-1:]
    here = needs[device.type]
    here.append(Need("policy: weights", always, plan.weights))
    if isinstance(recipe, RLRecipe):
        _reference(recipe, device, plan, needs)
    _state("policy", plan, always, needs, device)
    here.append(Need("policy: activations, logits, gradients", ("training",), plan.passes))
    if isinstance(recipe, RLRecipe):
        config = read_config(recipe.model.path, trust_remote_code=recipe.model.trust_remote_code)
        size = resolve_dtype(recipe.model.dtype, device).itemsize
        sequences, longest = _concurrent_sequences(recipe, device), max(lengths) if lengths else recipe.data.max_prompt_tokens
        length = longest + recipe.rollout.max_new_tokens
        cache = plan_cache(config, size, sequences=sequences, tokens=length)
        here.append(Need(f"cache: {sequences:,} × {length:,} tokens", ("sampling",), 0.0, cache))
        prefill = min(PREFILL_TOKENS[device.type], recipe.train.prompts_per_step * longest)
        working = plan_sampling(config, size, sequences=sequences, prefill_tokens=prefill, lora=recipe.model.lora is not None)
        here.append(Need("engine: logits, prompts", ("sampling",), working))
        _critic(recipe, lengths, device, needs, policy_work=plan.work)


def _state(whose: str, plan: MemoryPlan, always: tuple[Any, ...], needs: Needs, device: torch.device) -> None:
    if not plan.streamed:
        needs[device.type].append(Need(f"{whose}: moments, masters", always, plan.state))
        return
    needs[device.type].append(Need(f"{whose}: moments, masters, streamed", ("training",), plan.streamed))
    needs["cpu"].append(Need(f"{whose}: moments, masters", always, plan.state))


def _reference(recipe: RLRecipe, device: torch.device, policy: MemoryPlan, needs: Needs) -> None:
    """A copy of the initial policy, or another model; if offloaded, it leaves the device before an update takes memory."""
    if not recipe.algorithm.needs_reference or (recipe.model.lora is not None and recipe.reference.path is None):
        return
    weights = policy.weights
    if recipe.reference.path is not None:
        model = recipe.model.model_copy(update={"path": recipe.reference.path, "lora": None})
        try:
            weights = plan_memory(model, device, micro_batch=0).weights
        except (PlauditError, OSError, ValueError):
            return  # reported by its own check
    if recipe.reference.placement == "resident":
        needs[device.type].append(Need("reference: weights", PHASES, weights))
        return
    if weights > policy.work:
        needs[device.type].append(Need("reference: weights (more)", ("training",), weights - policy.work))
    if has_device_memory(device):
        needs["cpu"].append(Need("reference: weights", PHASES, weights))


def _critic(recipe: RLRecipe, lengths: Lengths, device: torch.device, needs: Needs, *, policy_work: float) -> None:
    """`policy_work`: memory that an update of the policy takes, and frees before the critic's begins."""
    if recipe.critic is None or recipe.critic.shared:
        return  # a head on the policy's layers takes next to nothing
    try:
        plan = plan_critic(recipe, lengths)
    except (PlauditError, OSError, ValueError):
        return  # reported by its own check
    offloaded = recipe.critic.placement == "offload" and has_device_memory(device)
    needs[device.type].append(Need("critic: weights", PHASES[-1:] if offloaded else PHASES, plan.weights))
    if offloaded:
        needs["cpu"].append(Need("critic: weights", PHASES, plan.weights))
    _state("critic", plan, PHASES, needs, device)
    if plan.work > policy_work:
        needs[device.type].append(Need("critic: activations, gradients (more)", ("training",), plan.work - policy_work))


def _concurrent_sequences(recipe: Recipe, device: torch.device) -> int:
    """Sequences that are sampled or judged concurrently."""
    if not isinstance(recipe, RLRecipe):
        return MAX_SEQUENCES[device.type]
    most = recipe.rollout.max_sequences or MAX_SEQUENCES[device.type]
    return min(most, recipe.train.prompts_per_step * recipe.rollout.n)


def _place(recipe: Recipe, name: str, reward: ModelReward, needs: Needs) -> None:
    model, device = reward.model, resolve_device(reward.model.device, "model.device")
    assert model.path is not None
    tokens = 0 if reward.scalar else _judged_tokens(recipe, reward)
    plan = plan_reward_model(model, device, scalar=reward.scalar, sequences=_concurrent_sequences(recipe, device), tokens=tokens)
    fixed, elastic = (0.0, plan.working) if plan.elastic else (plan.working, 0.0)
    # Resident models score while other groups are still being sampled; the last groups are scored after sampling has ended.
    always, at_work = (PHASES, PHASES[:2]) if isinstance(recipe, RLRecipe) else (PHASES[1:2], PHASES[1:2])
    if model.placement == "resident":
        needs[device.type].append(Need(name + RESIDENT, always, plan.weights))
        needs[device.type].append(Need(f"{name}: while it scores", at_work, fixed, elastic))
        return
    needs[device.type].append(Need(f"{name}: offloaded", ("scoring",), plan.weights + fixed, elastic, in_turn=True))
    if device.type == "cuda":
        needs["cpu"].append(Need(f"{name}: pinned copy", always, plan.weights))


def _judged_tokens(recipe: Recipe, reward: ModelReward) -> int:
    """Upper bound on a judge's prompt and answer tokens."""
    new = getattr(reward, "sampling").max_new_tokens  # noqa: B009 (judges and plugins have it)
    config = read_config(str(reward.model.path), trust_remote_code=reward.model.trust_remote_code)
    context = context_tokens(config) or 32768
    if reward.model.max_prompt_tokens is not None:
        return min(context, reward.model.max_prompt_tokens + new)
    if not isinstance(recipe, RLRecipe):
        return context
    shown = 1 if reward.scores_alone else recipe.rollout.n
    return min(context, recipe.data.max_prompt_tokens + shown * recipe.rollout.max_new_tokens + new)
