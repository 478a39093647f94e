"""Memory needed on each device, phase by phase, from the recipe alone: policy, critic, reference and reward models.

The doctor prints it; training decides by it what `auto` stands for (auto.py).
"""

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from heapq import nlargest
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import torch

from plaudit.data.pack import KEYS_PER_TOKEN
from plaudit.errors import PlauditError
from plaudit.models.folder import context_tokens, read_config
from plaudit.models.memory import (
    COPIES_SHARE,
    PHASES,
    RUNTIME,
    Budget,
    MemoryPlan,
    Need,
    Phase,
    plan_cache,
    plan_memory,
    plan_reward_model,
    plan_sampling,
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
from plaudit.recipe.reward_models import EmbeddingModel
from plaudit.recipe.rollout import SERVED_ENGINES, EngineServerSettings
from plaudit.recipe.training import micro_batch_tokens
from plaudit.rewards.judges.model_rewards import ModelReward, find_all_model_rewards
from plaudit.rollout.engine import MAX_SEQUENCES, PREFILL_TOKENS
from plaudit.rollout.native.cpu_ops import multiplies_bf16
from plaudit.rollout.native.drafts import STEP_ROWS
from plaudit.train.processes import ALONE, Processes

RESIDENT, SERVER, COPY = ": weights, resident", ": server", "engine: whole weights"
SERVER_SHARES = {"vllm": 0.9, "sglang": 0.88}
"""Share of a GPU's memory that a launched server takes by default."""
ASLEEP = 1.5e9
"""What a server that sleeps keeps of a GPU: CUDA's context and graphs."""
Needs = dict[str, list[Need]]
"""By device type."""
Trained = TypeVar("Trained", bound=TrainingRecipe)
Lengths = Sequence[int] | None
"""Tokens of each training row (a pair: of both sides; RL: of each prompt). None: unknown, so all may be as long as allowed."""


def plan_devices(recipe: Recipe, lengths: Lengths = None, processes: Processes = ALONE) -> dict[str, Budget]:
    """The memory budget of each device, for each process. Reward models that cannot be read are left out: their own check reports
    them."""
    needs: Needs = defaultdict(list)
    trains_on = ""
    if not isinstance(recipe, ScoreRecipe):
        device = processes.device(recipe.run.device)
        trains_on = device.type
        needs[device.type].append(Need("torch and other libraries", PHASES, RUNTIME[device.type]))
        _policy(recipe, lengths, device, processes, needs)
    for name, reward in local_reward_models(recipe):
        with suppress(PlauditError, OSError, ValueError, AttributeError):
            if reward.model.gpus is not None:  # alongside the processes that train
                continue
            if reward.model.placement in ("resident", "offload"):
                _place(recipe, name, reward, processes, needs)
            elif reward.model.sleep and trains_on == "cuda":
                _place_server(name, reward, processes, needs)
    return {kind: Budget(tuple(some), processes.available(kind, trains_on)) for kind, some in needs.items() if some}


def plan_policy(recipe: TrainingRecipe, lengths: Lengths = None, processes: Processes = ALONE) -> MemoryPlan:
    """The trained model alone."""
    return plan_memory(
        recipe.model,
        processes.device(recipe.run.device),
        **update_size(recipe, lengths)._asdict(),
        keep_logits=not isinstance(recipe, RewardModelRecipe) and recipe.train.keep_logits is True,
        scalar=isinstance(recipe, RewardModelRecipe),
        offload=recipe.optim.placement == "offload",
        processes=processes.size,
        sharding=processes.sharding,
    )


def plan_critic(recipe: RLRecipe, lengths: Lengths = None, processes: Processes = ALONE) -> MemoryPlan:
    assert recipe.critic is not None
    return plan_memory(
        recipe.critic.model(recipe.model),
        processes.device(recipe.run.device),
        **update_size(recipe, lengths)._asdict(),
        scalar=True,
        offload=recipe.critic.optim.placement == "offload",
        processes=processes.size,
        sharding=processes.sharding,
    )


def plan_checkpoint_copy(recipe: TrainingRecipe, processes: Processes = ALONE) -> float:
    """Each process's share of the host memory in which a checkpoint is copied before it is written (saving.py):

    P' · 12 + P · b        masters and moments in fp32, and the model; not the latter where the masters are its own weights
    """
    device, models = processes.device(recipe.run.device), [(recipe.model, plan_policy(recipe, processes=processes))]
    if isinstance(recipe, RLRecipe) and recipe.critic is not None and not recipe.critic.shared:
        with suppress(PlauditError, OSError, ValueError):  # reported by its own check
            models.append((recipe.critic.model(recipe.model), plan_critic(recipe, processes=processes)))
    total = 0.0
    for model, plan in models:
        size = resolve_dtype(model.dtype, device).itemsize
        only_adapters = model.lora is not None and not model.lora.merge_on_save
        own_masters = model.lora is None and size == 4 and processes.size == 1
        total += 12 * plan.trainable + (0 if only_adapters or own_masters else plan.parameters * size)
    return total / processes.size


class UpdateSize(NamedTuple):
    micro_batch: int
    """Tokens of the largest micro-batch."""
    one_micro_batch: bool
    """Whether it holds an entire update."""
    keys: int
    """Of its sequences at most, if they share prompts: those of shared tokens are copied for each of them. 0 if they do not."""


def update_size(recipe: TrainingRecipe, lengths: Lengths = None) -> UpdateSize:
    """A micro-batch is a full one, or a sequence that is longer and gets its own, but never more than an update."""
    update, budget, keys = update_tokens(recipe, lengths), micro_batch_tokens(recipe.train.tokens_per_micro_batch), 0
    limit = max(budget, update.longest)
    if not isinstance(recipe, SFTRecipe) and recipe.train.share_prompts:
        is_rl = isinstance(recipe, RLRecipe)
        most = min(recipe.rollout.n, KEYS_PER_TOKEN) * budget if is_rl else max(2 * budget, update.longest)
        keys = min(most, update.together)
    return UpdateSize(min(limit, update.computed), update.packed <= limit, keys)


class UpdateTokens(NamedTuple):
    together: int
    """Of the longest sequences that an update may have."""
    longest: int
    """Of one sequence, or pair."""
    computed: int
    """The same as `together`, with prompts that are shared once."""

    @property
    def packed(self) -> int:
        """What counts towards the budgets of micro-batches (data/pack.py)."""
        return max(self.computed, -(-self.together // KEYS_PER_TOKEN))


def update_tokens(recipe: TrainingRecipe, lengths: Lengths = None) -> UpdateTokens:
    if isinstance(recipe, RLRecipe):
        rows, new = recipe.train.prompts_per_update or recipe.train.prompts_per_step, recipe.rollout.max_new_tokens
        together, longest = _longest(lengths, rows, recipe.data.max_prompt_tokens)
        responses, repeats = recipe.rollout.n * rows * new, 1 if recipe.train.share_prompts else recipe.rollout.n
        return UpdateTokens(recipe.rollout.n * together + responses, longest + new, repeats * together + responses)
    if isinstance(recipe, PreferenceRecipe):
        rows, most = recipe.train.pairs_per_step, 2 * recipe.data.max_tokens
    else:
        assert isinstance(recipe, SFTRecipe)
        rows, most = recipe.train.rows_per_step, recipe.data.max_tokens
    together, longest = _longest(lengths, rows, most)
    return UpdateTokens(together, longest, together)


def _longest(lengths: Lengths, rows: int, limit: int) -> tuple[int, int]:
    """Tokens of the longest rows together, and of the longest one."""
    longest = nlargest(rows, lengths) if lengths else [limit]
    return sum(longest) + (rows - len(longest)) * longest[0], longest[0]


def local_reward_models(recipe: Recipe) -> list[tuple[str, ModelReward]]:
    """The first reward that uses each model, with the names of all rewards that share it."""
    rewards = recipe.rewards if isinstance(recipe, RewardedRecipe) else ()
    found: dict[Any, tuple[str, ModelReward]] = {}
    for name, reward in chain.from_iterable(map(find_all_model_rewards, rewards)):
        if isinstance(reward.model, EmbeddingModel) and not reward.model.is_served:
            continue  # small, and of an architecture that need not be a causal model's
        key = reward.model, reward.scalar
        found[key] = (f"{found[key][0]}, {name}", found[key][1]) if key in found else (name, reward)
    return list(found.values())


def launched_models(recipe: Recipe) -> list[ModelReward]:
    """Those whose servers this process starts, on its own device."""
    rewards = [reward for _, reward in local_reward_models(recipe)]
    return [reward for reward in rewards if reward.model.placement == "launch" and reward.model.gpus is None]


# Components and their needs -------------------------------------------------------------------------------------------


def _policy(recipe: TrainingRecipe, lengths: Lengths, device: torch.device, processes: Processes, needs: Needs) -> None:
    plan, always = plan_policy(recipe, lengths, processes), PHASES if isinstance(recipe, RLRecipe) else PHASES[-1:]
    here = needs[device.type]
    here += _weights("policy", plan, always)
    if isinstance(recipe, RLRecipe):
        _reference(recipe, device, plan, processes, needs)
    _state("policy", plan, always, needs, device)
    here.append(Need("policy: activations, logits, gradients", ("training",), plan.passes, part="passes"))
    if isinstance(recipe, RLRecipe):
        _engine(recipe, lengths, device, plan, processes, here)
        _critic(recipe, lengths, device, processes, needs, policy_work=plan.work)
        _copied_weights(recipe, device, plan, processes, here)
    if recipe.run.save_in_background:
        # Elastic: without it, training waits for a save. So this setting cannot change how many layers are checkpointed.
        needs["cpu"].append(Need("checkpoint: copy while it is written", always, 0.0, plan_checkpoint_copy(recipe, processes)))


def _weights(whose: str, plan: MemoryPlan, phases: tuple[Phase, ...]) -> list[Need]:
    bits = plan.base_bits
    own = Need(f"{whose}: weights{f', base in {bits} bits' if bits else ''}", phases, plan.weights - plan.merged, part="weights")
    merged = f"{whose}: {'a matrix' if bits else 'weights'} merged with LoRA"
    return [own, Need(merged, phases, plan.merged, part="weights")] if plan.merged else [own]


def _engine(
    recipe: RLRecipe, lengths: Lengths, device: torch.device, policy: MemoryPlan, processes: Processes, here: list[Need]
) -> None:
    size = resolve_dtype(recipe.model.dtype, device).itemsize
    served = recipe.rollout.engine in SERVED_ENGINES
    if recipe.rollout.lag or (processes.sharding == "full" and not served):
        adapters = 4 * policy.trainable if recipe.model.lora is not None else 0
        phases = PHASES if recipe.rollout.lag else ("sampling",)
        here.append(Need(COPY, phases, policy.parameters * size + adapters, part="sampling"))
    if served:
        _server(recipe.rollout.server, policy.parameters * size, device, processes, here)
        return
    config = read_config(recipe.model.path, trust_remote_code=recipe.model.trust_remote_code)
    sequences = _concurrent_sequences(recipe, device, processes)
    longest = max(lengths) if lengths else recipe.data.max_prompt_tokens
    length = longest + recipe.rollout.max_new_tokens
    cache = plan_cache(config, size, sequences=sequences, tokens=length)
    here.append(Need(f"cache: {sequences:,} × {length:,} tokens", ("sampling",), 0.0, cache, part="sampling"))
    prefill = min(PREFILL_TOKENS[device.type], _prompts_of_a_process(recipe, processes) * longest)
    adapters = recipe.model.lora is not None and not policy.merged
    working = plan_sampling(config, size, sequences=sequences, prefill_tokens=prefill, adapters=adapters)
    here.append(Need("engine: logits, prompts", ("sampling",), working, part="sampling"))


def _copied_weights(recipe: RLRecipe, device: torch.device, policy: MemoryPlan, processes: Processes, here: list[Need]) -> None:
    """The engine keeps weights that it has dequantised, and packs weights on a CPU, if they are a small part of what it knows to be
    left while it samples."""
    if recipe.rollout.engine in SERVED_ENGINES:
        return
    held = [need for need in here if need.part in ("weights", "optimiser") or need.name == COPY]
    left = processes.available(device.type, device.type) - sum(need.fixed for need in held if "sampling" in need.phases)
    room = max(0.0, COPIES_SHARE * left)
    phases: tuple[Phase, ...] = PHASES if recipe.rollout.lag else ("sampling",)
    if dequantised := 0.0 if recipe.rollout.lag else min(policy.dequantised, room):  # with lag it samples a copy that is not
        fixed, elastic = (0.0, dequantised) if device.type == "cuda" else (dequantised, 0.0)  # of a GPU only what is free
        here.append(Need("engine: dequantised weights", phases, fixed, elastic, part="sampling"))
        room -= dequantised
    by_onednn = resolve_dtype(recipe.model.dtype, device) == torch.bfloat16 and multiplies_bf16()  # for any number of rows
    packs = device.type == "cpu" and (by_onednn or _concurrent_sequences(recipe, device, processes) > STEP_ROWS)
    if packs and policy.packed <= room:
        here.append(Need("engine: packed weights", phases, policy.packed, part="sampling"))


def _server(server: EngineServerSettings, weights: float, device: torch.device, processes: Processes, here: list[Need]) -> None:
    """What a server takes of the trainer's device: of a GPU its share; in host memory, we only know of its weights."""
    if server.url or server.gpus:
        return
    if device.type == "cpu":
        here.append(Need("server: weights", PHASES, weights, part="sampling"))
        return
    share = server.resolved_memory_share
    phases = ("sampling",) if server.sleep else PHASES
    size = share * processes.available(device.type, device.type)
    here.append(Need(f"server: {share:g} of the GPU", phases, size, part="sampling"))


def _state(whose: str, plan: MemoryPlan, always: tuple[Any, ...], needs: Needs, device: torch.device) -> None:
    if not plan.streamed:
        needs[device.type].append(Need(f"{whose}: moments, masters", always, plan.state, part="optimiser"))
        return
    streamed = Need(f"{whose}: moments, masters, streamed", ("training",), plan.streamed, part="optimiser")
    needs[device.type].append(streamed)
    needs["cpu"].append(Need(f"{whose}: moments, masters", always, plan.state))


def _reference(recipe: RLRecipe, device: torch.device, policy: MemoryPlan, processes: Processes, needs: Needs) -> None:
    """A copy of the initial policy, or another model; if offloaded, it leaves the device before an update takes memory. It is
    sharded as the policy is, but in its own dtype: it needs no masters."""
    if not recipe.algorithm.needs_reference or (recipe.model.lora is not None and recipe.reference.path is None):
        return
    model = recipe.model.model_copy(update={"path": recipe.reference.path or recipe.model.path, "lora": None})
    try:
        weights = plan_memory(model, device, micro_batch=0).weights
    except (PlauditError, OSError, ValueError):
        return  # reported by its own check
    if processes.sharding == "full":
        weights /= processes.size
    if recipe.reference.placement == "resident":
        needs[device.type].append(Need("reference: weights", PHASES, weights, part="weights"))
        return
    if weights > policy.work:
        needs[device.type].append(Need("reference: weights (more)", ("training",), weights - policy.work))
    if has_device_memory(device):
        needs["cpu"].append(Need("reference: weights", PHASES, weights))


def _critic(
    recipe: RLRecipe, lengths: Lengths, device: torch.device, processes: Processes, needs: Needs, *, policy_work: float
) -> None:
    """`policy_work`: memory that an update of the policy takes, and frees before the critic's begins."""
    if recipe.critic is None or recipe.critic.shared:
        return  # a head on the policy's layers takes next to nothing
    try:
        plan = plan_critic(recipe, lengths, processes)
    except (PlauditError, OSError, ValueError):
        return  # reported by its own check
    offloaded = recipe.critic.placement == "offload" and has_device_memory(device)
    needs[device.type] += _weights("critic", plan, PHASES[-1:] if offloaded else PHASES)
    if offloaded:
        needs["cpu"].append(Need("critic: weights", PHASES, plan.weights))
    _state("critic", plan, PHASES, needs, device)
    if plan.work > policy_work:
        needs[device.type].append(Need("critic: activations, gradients (more)", ("training",), plan.work - policy_work))


def _prompts_of_a_process(recipe: RLRecipe, processes: Processes) -> int:
    return math.ceil(recipe.train.prompts_per_step / processes.size)


def _concurrent_sequences(recipe: Recipe, device: torch.device, processes: Processes) -> int:
    """Sequences that are sampled or judged concurrently."""
    if not isinstance(recipe, RLRecipe):
        return MAX_SEQUENCES[device.type]
    most = recipe.rollout.max_sequences or MAX_SEQUENCES[device.type]
    return min(most, _prompts_of_a_process(recipe, processes) * recipe.rollout.n)


def _place(recipe: Recipe, name: str, reward: ModelReward, processes: Processes, needs: Needs) -> None:
    """Among several processes one has the model and scores for all: this is the plan of that one. If several have a block of its
    layers, of the one with the largest."""
    model, device = reward.model, processes.device(reward.model.device, "model.device")
    assert model.path is not None
    tokens = 0 if reward.scalar else _judged_tokens(recipe, reward)
    sequences = _concurrent_sequences(recipe, device, ALONE)
    plan = plan_reward_model(model, device, scalar=reward.scalar, sequences=sequences, tokens=tokens)
    fixed, elastic = (0.0, plan.working) if plan.elastic else (plan.working, 0.0)
    if isinstance(model.rank, tuple):
        name = f"{name}, the largest of {len(model.rank)} blocks"
    # Resident models score while other groups are still being sampled; the last groups are scored after sampling has ended.
    always, at_work = (PHASES, PHASES[:2]) if isinstance(recipe, RLRecipe) else (PHASES[1:2], PHASES[1:2])
    if model.placement == "resident":
        needs[device.type].append(Need(name + RESIDENT, always, plan.weights))
        needs[device.type].append(Need(f"{name}: while it scores", at_work, fixed, elastic))
        return
    needs[device.type].append(Need(f"{name}: offloaded", ("scoring",), plan.weights + fixed, elastic, in_turn=True))
    if device.type == "cuda":  # one copy in memory that all processes of the host share
        copies = plan.weights * (len(model.rank) if isinstance(model.rank, tuple) else 1)
        needs["cpu"].append(Need(f"{name}: pinned copy", always, copies / processes.size))


def _place_server(name: str, reward: ModelReward, processes: Processes, needs: Needs) -> None:
    """A launched server that leaves the trainer's GPU while it computes."""
    device = torch.device("cuda")
    available = processes.available(device.type, device.type)
    if math.isfinite(available):
        needs[device.type].append(Need(name + SERVER, PHASES[:2], server_share(reward) * available))
        needs[device.type].append(Need(f"{name + SERVER}, asleep", PHASES[2:], ASLEEP))
    weights = plan_reward_model(reward.model, device, scalar=True, sequences=0, tokens=0).weights
    needs["cpu"].append(Need(f"{name + SERVER}, weights while it sleeps", PHASES[2:], weights / processes.size))


def server_share(reward: ModelReward) -> float:
    """The share of a GPU's memory that its launched server takes."""
    names = r"gpu[-_]memory[-_]utilization|mem[-_]fraction[-_]static"
    given = re.search(rf"--(?:{names})[ =]+([\d.]+)", " ".join(reward.model.arguments))
    return float(given[1]) if given else SERVER_SHARES[reward.model.dialect]


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
