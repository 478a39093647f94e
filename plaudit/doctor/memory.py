"""Whether everything fits: the policy with its training and sampling, and the reward models beside it, by device."""

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig

from plaudit.doctor.findings import Finding
from plaudit.doctor.reward_models import all_models_of
from plaudit.errors import PlauditError
from plaudit.models.folder import context_tokens, read_config
from plaudit.models.memory import (
    PHASES,
    Budget,
    MemoryPlan,
    Need,
    gigabytes,
    plan_cache,
    plan_memory,
    plan_reward_model,
    total_memory,
)
from plaudit.models.policy import resolve_device, resolve_dtype
from plaudit.recipe import Recipe, RewardedRecipe, RewardModelRecipe, RLRecipe, ScoreRecipe, TrainingRecipe
from plaudit.rewards.asking_models import ModelReward
from plaudit.rollout.engine import MAX_SEQUENCES

RESIDENT = ": weights, resident"
VLLM_SHARE = 0.9
"""Of a GPU's memory, which vLLM takes unless it is told otherwise."""


def check_weights(model: Path) -> Iterator[Finding]:
    """Whether the weights of a folder are all there; their headers tell, so nothing large is read."""
    if not model.is_dir():
        return  # on the hub
    index = model / "model.safetensors.index.json"
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values()) if index.exists() else {"model.safetensors"}
        tensors = sum(len(safe_open(model / name, "pt").keys()) for name in sorted(names))
    except (OSError, ValueError, LookupError, SafetensorError) as error:
        yield "✗", f"{model}: its weights cannot be read (safetensors only, never pickled ones): {error}"
        return
    yield "✓", f"{model}: {tensors:,} tensors, none of them cut short"


def check_training(recipe: TrainingRecipe) -> Iterator[Finding]:
    device = resolve_device(recipe.run.device)
    try:
        scalar = isinstance(recipe, RewardModelRecipe)
        plan = plan_memory(recipe.model, device, tokens_per_micro_batch=recipe.train.tokens_per_micro_batch, scalar=scalar)
    except PlauditError:
        raise
    except (OSError, ValueError) as error:
        yield "✗", f"{recipe.model.path}: its config cannot be read: {str(error).splitlines()[0]}"
        return
    if not plan.trainable:
        yield "✗", f"model.lora.targets: {recipe.model.path} has no linear layer of that name"
        return
    if isinstance(recipe, RLRecipe):
        yield "✓", f"{plan}"  # whether it fits beside what RL needs besides is said of all of it
        return
    there = total_memory(device)
    dtype = str(resolve_dtype(recipe.model.dtype, device)).removeprefix("torch.")
    text = f"{plan}; {device.type} in {dtype} has {there / 1e9:.0f} GB"
    if plan.total > there:
        text += ". Lower train.tokens_per_micro_batch, set model.gradient_checkpointing=true, or use model.lora"
    yield ("✓" if plan.total < 0.9 * there else "!"), text


# Everything together -------------------------------------------------------------------------------------------------


def plan_devices(recipe: Recipe) -> dict[str, Budget]:
    """What each device has to hold. Reward models that cannot be read are left out: their own check says so."""
    needs: dict[str, list[Need]] = defaultdict(list)
    if isinstance(recipe, RLRecipe):
        device = resolve_device(recipe.run.device)
        needs[device.type] += _policy(recipe, device)
    for name, reward in _models(recipe):
        if reward.model.placement in ("resident", "offload"):
            try:
                _place(recipe, name, reward, needs)
            except (PlauditError, OSError, ValueError, AttributeError):
                continue
    return {kind: Budget(tuple(some), total_memory(torch.device(kind))) for kind, some in needs.items() if some}


def _models(recipe: Recipe) -> list[tuple[str, ModelReward]]:
    """Each with the names of all rewards that share it, and the first of those rewards."""
    rewards = recipe.rewards if isinstance(recipe, RewardedRecipe) else ()
    found: dict[Any, tuple[str, ModelReward]] = {}
    for name, reward in (model for asked in rewards for model in all_models_of(asked)):
        key = reward.model, reward.scalar
        found[key] = (f"{found[key][0]}, {name}", found[key][1]) if key in found else (name, reward)
    return list(found.values())


def _policy(recipe: RLRecipe, device: torch.device) -> list[Need]:
    plan: MemoryPlan = plan_memory(recipe.model, device, tokens_per_micro_batch=recipe.train.tokens_per_micro_batch)
    config = AutoConfig.from_pretrained(recipe.model.path, trust_remote_code=recipe.model.trust_remote_code)
    size = resolve_dtype(recipe.model.dtype, device).itemsize
    sequences, length = _under_way(recipe, device), recipe.data.max_prompt_tokens + recipe.rollout.max_new_tokens
    cache = plan_cache(config, size, sequences=sequences, tokens=length)
    gradients = 4.0 * plan.trainable
    needs = [
        Need("policy: weights", PHASES, plan.weights),
        Need("policy: moments, masters", PHASES, plan.training - gradients),
        Need("policy: gradients", ("training",), gradients),
        Need("policy: activations, logits", ("training",), plan.activations + plan.logits),
        Need(f"cache: {sequences:,} × {length:,} tokens", ("sampling",), 0.0, cache),
    ]
    if recipe.algorithm.needs_reference and recipe.model.lora is None:
        needs.insert(1, Need("reference: weights", PHASES, plan.weights))
    return needs + _critic(recipe, device, beside=gradients + plan.activations + plan.logits)


def _critic(recipe: RLRecipe, device: torch.device, *, beside: float) -> list[Need]:
    """`beside`: what an update of the policy takes, and gives back before the critic's begins."""
    if recipe.critic is None or recipe.critic.shared:
        return []  # a head on the policy's layers is a row of numbers
    model, budget = recipe.critic.model(recipe.model), recipe.train.tokens_per_micro_batch
    try:
        plan = plan_memory(model, device, tokens_per_micro_batch=budget, scalar=True)
    except (PlauditError, OSError, ValueError):
        return []  # its own check says so
    gradients = 4.0 * plan.trainable
    more = gradients + plan.activations - beside
    needs = [
        Need("critic: weights", PHASES, plan.weights),
        Need("critic: moments, masters", PHASES, plan.training - gradients),
    ]
    return needs + ([Need("critic: gradients, activations (more)", ("training",), more)] if more > 0 else [])


def _under_way(recipe: Recipe, device: torch.device) -> int:
    """Sequences that are sampled, or judged, side by side."""
    if not isinstance(recipe, RLRecipe):
        return MAX_SEQUENCES[device.type]
    most = recipe.rollout.max_sequences or MAX_SEQUENCES[device.type]
    return min(most, recipe.train.prompts_per_step * recipe.rollout.n)


def _place(recipe: Recipe, name: str, reward: ModelReward, needs: dict[str, list[Need]]) -> None:
    model, device = reward.model, resolve_device(reward.model.device, "model.device")
    assert model.path is not None
    tokens = 0 if reward.scalar else _judged_tokens(recipe, reward)
    plan = plan_reward_model(model, device, scalar=reward.scalar, sequences=_under_way(recipe, device), tokens=tokens)
    fixed, elastic = (0.0, plan.working) if plan.elastic else (plan.working, 0.0)
    # Resident ones score while others are sampled; what was sampled last is scored when sampling has ended.
    always, at_work = (PHASES, PHASES[:2]) if isinstance(recipe, RLRecipe) else (PHASES[1:2], PHASES[1:2])
    if model.placement == "resident":
        needs[device.type].append(Need(name + RESIDENT, always, plan.weights))
        needs[device.type].append(Need(f"{name}: while it scores", at_work, fixed, elastic))
        return
    needs[device.type].append(Need(f"{name}: offloaded", ("scoring",), plan.weights + fixed, elastic, in_turn=True))
    if device.type == "cuda":
        needs["cpu"].append(Need(f"{name}: pinned copy", always, plan.weights))


def _judged_tokens(recipe: Recipe, reward: ModelReward) -> int:
    """Prompt and answer of a judge, at most."""
    new = getattr(reward, "sampling").max_new_tokens  # noqa: B009 (judges and plugins have it)
    config = read_config(str(reward.model.path), trust_remote_code=reward.model.trust_remote_code)
    context = context_tokens(config) or 32768
    if reward.model.max_prompt_tokens is not None:
        return min(context, reward.model.max_prompt_tokens + new)
    if not isinstance(recipe, RLRecipe):
        return context
    shown = 1 if reward.scores_alone else recipe.rollout.n
    return min(context, recipe.data.max_prompt_tokens + shown * recipe.rollout.max_new_tokens + new)


def check_budgets(recipe: Recipe, budgets: dict[str, Budget]) -> Iterator[Finding]:
    for kind, budget in budgets.items():
        peak = budget.peak
        least = max(budget.at(phase, fixed_only=True) for phase in PHASES)
        text = f"{kind}: at most {gigabytes(budget.at(peak))} of {gigabytes(budget.there)}, while {peak}"
        advice = _advice(recipe, budget)
        match budget.verdict:
            case "too much":
                yield "✗", f"{text}; {gigabytes(least)} of it cannot be done without. {advice}"
            case "tight":
                yield "!", f"{text}: tight, and where memory is short, sequences wait for others. {advice}"
            case _:
                yield "✓", text
    for name, reward in _models(recipe):
        if reward.model.placement == "launch":
            yield _launched(name, reward, budgets)


def _advice(recipe: Recipe, budget: Budget) -> str:
    resident = [need for need in budget.needs if need.name.endswith(RESIDENT)]
    if resident:
        largest = max(resident, key=lambda need: need.fixed)
        return (
            f"placement: offload takes {largest.name.removesuffix(RESIDENT)} away while others work; placement: server, altogether."
        )
    if isinstance(recipe, ScoreRecipe):
        return "placement: server on another machine, or dtype: bfloat16, needs less."
    in_turn = " placement: server for the reward models," if any(need.in_turn for need in budget.needs) else ""
    return f"Lower train.tokens_per_micro_batch,{in_turn} set model.gradient_checkpointing=true, or use model.lora."


def _launched(name: str, reward: ModelReward, budgets: dict[str, Budget]) -> Finding:
    """A server of its own, which takes what it is told to take."""
    told = re.search(r"--gpu[-_]memory[-_]utilization[ =]+([\d.]+)", " ".join(reward.model.arguments))
    share = float(told[1]) if told else VLLM_SHARE
    text = f"{name}: placement: launch starts a server on this machine, which is not in the table"
    if not torch.cuda.is_available():
        return "✓", text
    there = total_memory(torch.device("cuda"))
    text += f"; it takes {share:.0%} of a GPU, {gigabytes(share * there)}"
    ours = budgets["cuda"].at(budgets["cuda"].peak) if "cuda" in budgets else 0.0
    if ours + share * there <= there:
        return "✓", text
    return (
        "!",
        f"{text}, and we need {gigabytes(ours)}: give it a lower --gpu-memory-utilization in model.arguments, or a GPU of its own",
    )


def print_budgets(console: Console, recipe: Recipe, budgets: dict[str, Budget]) -> None:
    phases: Sequence[Any] = PHASES if isinstance(recipe, RLRecipe) else ("scoring",)
    for kind, budget in budgets.items():
        width = max(30, *(len(need.name) for need in budget.needs)) + 2
        console.print(f"\nMemory on {kind}, {gigabytes(budget.there)}:", style="bold", markup=False)
        lines = [("", [f"{phase:>10}" for phase in phases])]
        for need in budget.needs:
            sizes = [gigabytes(need.fixed + need.elastic) if phase in need.phases else "–" for phase in phases]
            lines.append((need.name, sizes))
        lines.append(("together" + _in_turn(budget), [gigabytes(budget.at(phase)) for phase in phases]))
        for name, sizes in lines:
            console.print(f"  {name:<{width}}" + "".join(f"{size:>11}" for size in sizes), markup=False, soft_wrap=True)


def _in_turn(budget: Budget) -> str:
    return ", one offloaded at a time" if sum(need.in_turn for need in budget.needs) > 1 else ""
