"""What `auto` stands for, by the memory plan: what processes divide, tokens per micro-batch, checkpointed layers, kept logits.

Decided in this order, each with the ones before it; the number of tokens with an eye to logits that could be kept. What a run uses
is printed when it starts and recorded in its run.json.
"""

import math
from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from plaudit.errors import RecipeError
from plaudit.models.devices import resolve_device
from plaudit.models.folder import read_config
from plaudit.models.memory import PHASES, SAFE_SHARE, Budget, Sharding, gigabytes, widest_activation
from plaudit.models.quantisable import undivided
from plaudit.recipe import RewardModelRecipe, RLRecipe, TrainingRecipe, quantised_bases
from plaudit.recipe.training import USUAL_MICRO_BATCH
from plaudit.report.progress import print_line
from plaudit.train.memory_plan import (
    Lengths,
    Trained,
    launched_models,
    plan_critic,
    plan_devices,
    plan_policy,
    server_share,
    update_tokens,
)
from plaudit.train.memory_savers import SMALLEST_MICRO_BATCH, memory_savers
from plaudit.train.processes import ALONE, Processes
from plaudit.world import World

Report = Callable[[str], object]
"""Receives a line with a decision and its reason."""

LARGEST_MICRO_BATCH = 32_768
"""Tokens. Twice the work of 16,384 for as many launches: with those, a GPU waits for Python at 0.5B, the smallest common size
(bench/README.md). Larger ones have not been measured; beyond 65,535 there could be more sequences than a kernel's grid has room for
in its second dimension."""
SMALLEST_BEFORE_RECOMPUTING = 4_096
"""Down to here, smaller micro-batches cost less than recomputing, which takes up to a third more time: by `seconds_per_token` from
1.5B on, and for smaller models on slower GPUs. Below, passes are too short to keep a GPU busy."""
FLOPS, BANDWIDTH, INTERCONNECT = 450e12, 4.8e12, 3e11
"""Of an H200, per second: what products of training reach, and bytes in its memory and between GPUs. They decide only what is tried
first; on a GPU that is slower in all of them the order is about the same."""
MICRO_BATCH_S = 0.015
"""What a micro-batch takes besides its kernels: 17 of them took 0.26 s of an update (0.5B, bench/README.md)."""
MICRO_BATCHES = [LARGEST_MICRO_BATCH >> halved for halved in range(5)]
ROOMY_SHARE = 0.75
"""Share of a GPU's memory that may be filled for speed alone, with larger micro-batches than usual or with kept logits. Torch
reserves up to 1/0.84 of what was planned (bench/README.md), and so stays within SAFE_SHARE."""
MOST_ELEMENTS = 2**31 - 1
"""Of a tensor: libraries compute offsets in 32 bits here and there."""


def resolve_auto(
    recipe: Trained,
    lengths: Lengths = None,
    report: Report = print_line,
    processes: Processes = ALONE,
    *,
    micro_batch: int | None = None,
) -> Trained:
    """The recipe with tokens per micro-batch, layers to checkpoint and whether to keep logits instead of `auto`. `micro_batch`:
    what to use if the recipe gives no number, since the run or another process has decided; None: what fits here."""
    resolved = resolve_micro_batch(recipe, lengths, report, processes, micro_batch)
    resolved = resolve_checkpointing(resolved, lengths, report, processes)
    return resolve_kept_logits(resolved, lengths, report, processes)


def _in_silence(line: str) -> None:
    pass


# Sharding -------------------------------------------------------------------------------------------------------------


def choose_sharding(recipe: TrainingRecipe, lengths: Lengths, size: int, memory: float | None = None) -> Sharding:
    """What `size` processes divide among themselves. `memory`: of a GPU, or of all processes of a CPU together; None: what this
    machine has."""
    if memory is not None and resolve_device(recipe.run.device).type == "cpu":
        memory /= size
    return resolve_sharding(recipe, lengths, Processes(size, memory=memory))


def agreed_sharding(recipe: TrainingRecipe, lengths: Lengths, world: World, report: Report = print_line) -> Sharding:
    """What the processes of a world divide: the same in all of them, even if their devices differ."""
    if not world.is_joined:
        return "none"
    sharding: Sharding = world.agree(choose_sharding(recipe, lengths, world.size), "what to divide")
    reason = why_not_full(recipe) if recipe.cluster.sharding == "auto" else ""
    with suppress(Exception):  # as below
        if reason and not fits(recipe, lengths, Processes(world.size, sharding)):
            report(f"cluster.sharding: {sharding}, with which training may take too much memory{reason}")
    return sharding


def resolve_sharding(recipe: TrainingRecipe, lengths: Lengths, processes: Processes) -> Sharding:
    """`auto`: the optimiser's state if that is enough, else the weights too, which costs time in every pass."""
    if processes.size == 1:
        return "none"
    if (quantised := next(iter(quantised_bases(recipe)), None)) and recipe.cluster.sharding in ("auto", "full"):
        if recipe.cluster.sharding == "full":
            raise RecipeError(undivided(quantised))
        return "optimiser"
    if recipe.cluster.sharding != "auto":
        return recipe.cluster.sharding
    return "optimiser" if fits(recipe, lengths, replace(processes, sharding="optimiser")) else "full"


def why_not_full(recipe: TrainingRecipe) -> str:
    """What keeps weights from being divided, to append to a sentence; empty if nothing does."""
    settings = " and ".join(f"{section}.lora.base_bits" for section in quantised_bases(recipe))
    return f"; full, which divides all weights, cannot divide a base with {settings}" if settings else ""


def fits(recipe: TrainingRecipe, lengths: Lengths, processes: Processes) -> bool:
    """Whether all that a process needs at least is safely within its device's memory, in every phase."""
    resolved = resolve_auto(recipe, lengths, _in_silence, processes)
    budget = plan_devices(resolved, lengths, processes)[processes.device(recipe.run.device).type]
    return max(budget.at(phase, fixed_only=True) for phase in PHASES) <= SAFE_SHARE * budget.available


# Tokens per micro-batch -----------------------------------------------------------------------------------------------


def agreed_micro_batch(
    recipe: TrainingRecipe,
    lengths: Lengths,
    world: World,
    sharding: Sharding,
    recorded: int | None,
    report: Report = print_line,
) -> int:
    """What `auto` stands for in all processes of a world: the number that the run has `recorded`, which its leading process knows;
    or the smallest of theirs, should their devices differ."""
    known = world.agree(recorded, "tokens per micro-batch of this run")
    chosen = min(world.gather(choose_micro_batch(recipe, lengths, Processes(world.size, sharding)), "tokens per micro-batch"))
    if known is None:
        return chosen
    if known != chosen:
        report(f"this run keeps the {known:,} tokens per micro-batch that it was last trained with; auto would now be {chosen:,}")
    return known


def resolve_micro_batch(
    recipe: Trained, lengths: Lengths, report: Report, processes: Processes, chosen: int | None = None
) -> Trained:
    if recipe.train.tokens_per_micro_batch != "auto":
        return recipe
    tokens = choose_micro_batch(recipe, lengths, processes) if chosen is None else chosen
    resolved = _with_micro_batch(recipe, tokens)
    if processes.device(recipe.run.device).type == "cuda":  # a CPU has no choice to report
        with suppress(Exception):
            report(f"train.tokens_per_micro_batch: {tokens:,}{_describe_fit(resolved, lengths, processes)}")
    return resolved


def choose_micro_batch(recipe: TrainingRecipe, lengths: Lengths, processes: Processes) -> int:
    """On a GPU the fastest number with which training fits without recomputing layers: with room to spare for kept logits and for
    more tokens than usual, down to SMALLEST_BEFORE_RECOMPUTING if it is less. Only then layers are checkpointed, if the recipe
    leaves that open too. Sharded weights are gathered for every micro-batch: there, layers are checkpointed before micro-batches
    get smaller than usual. On a CPU, or if the memory is not known: as usual."""
    device = processes.device(recipe.run.device).type
    available = processes.available(device, device)
    if device != "cuda" or not math.isfinite(available):
        return USUAL_MICRO_BATCH
    with suppress(Exception):  # a model that cannot be planned may still be trained, or has a better message when it is loaded
        sizes = _possible_sizes(recipe, lengths, processes)
        critic = recipe.critic if isinstance(recipe, RLRecipe) else None
        recomputes = "auto" in (recipe.model.gradient_checkpointing, critic and critic.gradient_checkpointing)
        least = USUAL_MICRO_BATCH if processes.sharding == "full" else SMALLEST_BEFORE_RECOMPUTING
        least = max(least if recomputes else SMALLEST_MICRO_BATCH, sizes[-1])
        roomy = ROOMY_SHARE * (available - _unplanned(recipe, available, processes))
        for size, keeps in _fastest_first(recipe, [size for size in sizes if size >= least], processes):
            candidate = _with_micro_batch(recipe, size)
            limit = roomy if keeps or size > USUAL_MICRO_BATCH else SAFE_SHARE * available
            if _training(_with_logits(candidate, keep=True) if keeps else candidate, lengths, processes) <= limit:
                return size
        for size in (size for size in sizes if size <= least):
            candidate = resolve_checkpointing(_with_micro_batch(recipe, size), lengths, _in_silence, processes)
            if _training(candidate, lengths, processes) <= SAFE_SHARE * available:
                return size
        return sizes[-1]
    return USUAL_MICRO_BATCH


def _fastest_first(recipe: TrainingRecipe, sizes: list[int], processes: Processes) -> list[tuple[int, bool]]:
    """Numbers of tokens, each with and without kept logits if `auto` may keep them."""
    kept = [(size, True) for size in sizes if size >= SMALLEST_BEFORE_RECOMPUTING] if _may_keep_logits(recipe) else []
    config = read_config(recipe.model.path, trust_remote_code=recipe.model.trust_remote_code).get_text_config()
    parameters, head = plan_policy(recipe, processes=processes).parameters, config.vocab_size * config.hidden_size
    products = 2 if recipe.model.lora is None else 1  # of the backward pass

    def seconds(candidate: tuple[int, bool]) -> float:
        size, keeps = candidate
        return seconds_per_token(size, parameters, 0 if keeps else head, backward=products, gathered=processes.sharding == "full")

    return sorted([*kept, *((size, False) for size in sizes)], key=seconds)


def seconds_per_token(micro_batch: int, parameters: int, head_again: int, *, backward: int, gathered: bool) -> float:
    """An estimate for a token in a micro-batch of T, with P parameters in the model, H of them in a head that is computed again,
    and one or two backward products for each forward product.

        (2 P (1 + backward) + 2 H) / flops  +  (s + 12 P / bandwidth + 8 P / interconnect) / T

    Each micro-batch reads all weights twice and adds to all gradients, in fp32; sharded weights are gathered twice, and gradients
    are reduced."""
    work = 2 * parameters * (1 + backward) + 2 * head_again
    once = MICRO_BATCH_S + 12 * parameters / BANDWIDTH + (8 * parameters / INTERCONNECT if gathered else 0)
    return work / FLOPS + once / micro_batch


def _possible_sizes(recipe: TrainingRecipe, lengths: Lengths, processes: Processes) -> list[int]:
    """The largest first. None that is more than twice what an update has (for each process), nor less than half of the longest
    sequence, which takes the memory of a micro-batch in any case."""
    config = read_config(recipe.model.path, trust_remote_code=recipe.model.trust_remote_code)
    most = MOST_ELEMENTS // widest_activation(config)
    update = update_tokens(recipe, lengths)
    needed = max(USUAL_MICRO_BATCH, math.ceil(update.packed / processes.size))
    if isinstance(recipe, RLRecipe) and recipe.rollout.lag:
        most = min(most, USUAL_MICRO_BATCH)  # the next step is sampled and scored meanwhile
    sizes = [size for size in MICRO_BATCHES if size <= most and size < 2 * needed] or [SMALLEST_MICRO_BATCH]
    return [size for size in sizes if 2 * size > update.longest] or sizes[:1]


def _with_micro_batch(recipe: Trained, tokens: int) -> Trained:
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"tokens_per_micro_batch": tokens})})


def _unplanned(recipe: TrainingRecipe, available: float, processes: Processes) -> float:
    """Memory of the GPU that no plan counts: that of launched servers that never sleep; without any, that of other processes. Not
    both: a server that is starting would be counted twice."""
    if launched := launched_models(recipe):
        return sum(server_share(reward) * available for reward in launched if not reward.model.sleep)
    return processes.taken_by_others()


def _training(recipe: TrainingRecipe, lengths: Lengths, processes: Processes) -> float:
    budget = plan_devices(recipe, lengths, processes)[processes.device(recipe.run.device).type]
    return budget.at("training", fixed_only=True)


def _describe_fit(recipe: TrainingRecipe, lengths: Lengths, processes: Processes) -> str:
    resolved = resolve_checkpointing(recipe, lengths, _in_silence, processes)
    device, needed = processes.device(recipe.run.device).type, _training(resolved, lengths, processes)
    available = processes.available(device, device)
    text = f", with which training takes about {gigabytes(needed)} of {gigabytes(available)}"
    if needed <= SAFE_SHARE * available:
        return text
    return f"{text}{_suggest_savers(resolved, lengths, device)}"


def _suggest_savers(recipe: TrainingRecipe, lengths: Lengths, device: str) -> str:
    savers = memory_savers(recipe, longest=update_tokens(recipe, lengths).longest, on_gpu=device == "cuda")
    return f", which may be too much: {' or '.join(savers)}"


# Gradient checkpointing -----------------------------------------------------------------------------------------------


def resolve_checkpointing(
    recipe: Trained, lengths: Lengths = None, report: Report = print_line, processes: Processes = ALONE
) -> Trained:
    """Replace `auto` in the recipe by the fewest layers with which training fits; `report` receives a line with the reason."""
    critic = recipe.critic if isinstance(recipe, RLRecipe) else None
    if critic is not None and critic.gradient_checkpointing == "auto":
        assert isinstance(recipe, RLRecipe)
        model = critic.model(recipe.model)
        read_config(model.path, trust_remote_code=model.trust_remote_code)  # reports what is wrong with the folder
        layers = plan_critic(recipe, processes=processes).layers
        # Each is resolved while the other takes as little as it can: their updates alternate.
        with_critic = _resolve_model(_checkpointing(recipe, "critic", layers), lengths, report, processes)
        resolved = _checkpointing(recipe, "model", with_critic.model.gradient_checkpointing)
        return _resolve(resolved, "critic", layers, lengths, report, processes)
    return _resolve_model(recipe, lengths, report, processes)


def _resolve_model(recipe: Trained, lengths: Lengths, report: Report, processes: Processes) -> Trained:
    if recipe.model.gradient_checkpointing != "auto":
        return recipe
    layers = plan_policy(recipe, processes=processes).layers
    return _resolve(recipe, "model", layers, lengths, report, processes)


def _resolve(recipe: Trained, section: str, layers: int, lengths: Lengths, report: Report, processes: Processes) -> Trained:
    device = processes.device(recipe.run.device).type

    def budget(count: int) -> Budget:
        return plan_devices(_checkpointing(recipe, section, count), lengths, processes)[device]

    def fits(count: int) -> bool:
        planned = budget(count)
        return planned.at("training", fixed_only=True) <= SAFE_SHARE * planned.available

    count = bisect_left(range(layers), True, key=fits)
    resolved = budget(count)
    but = "" if count < layers or fits(count) else _suggest_savers(_checkpointing(recipe, section, count), lengths, device)
    report(
        f"{section}.gradient_checkpointing: {count or 'none'} of {layers} layers, with which training takes about "
        f"{gigabytes(resolved.at('training', fixed_only=True))} of {gigabytes(resolved.available)}{but}"
    )
    return _checkpointing(recipe, section, count)


def _checkpointing(recipe: Trained, section: str, layers: int | str) -> Trained:
    settings = getattr(recipe, section).model_copy(update={"gradient_checkpointing": layers or False})
    return recipe.model_copy(update={section: settings})


# Logits ---------------------------------------------------------------------------------------------------------------


def resolve_kept_logits(recipe: Trained, lengths: Lengths, report: Report, processes: Processes) -> Trained:
    """On a GPU they are kept if that fits with room to spare, after everything else has been decided."""
    if isinstance(recipe, RewardModelRecipe) or recipe.train.keep_logits != "auto":
        return recipe
    device, kept = processes.device(recipe.run.device).type, _with_logits(recipe, keep=True)
    if device == "cuda" and _may_keep_logits(recipe):
        with suppress(Exception):  # as above
            available, needed = processes.available(device, device), _training(kept, lengths, processes)
            if math.isfinite(available) and needed <= ROOMY_SHARE * (available - _unplanned(recipe, available, processes)):
                report(f"train.keep_logits: true, with which training takes about {gigabytes(needed)} of {gigabytes(available)}")
                return kept
    return _with_logits(recipe, keep=False)


def _may_keep_logits(recipe: TrainingRecipe) -> bool:
    """If it is for `auto` to decide: not while the next step is sampled (`rollout.lag`). A reward model has none."""
    if isinstance(recipe, RewardModelRecipe) or recipe.train.keep_logits != "auto":
        return False
    return not (isinstance(recipe, RLRecipe) and recipe.rollout.lag > 0)


def _with_logits(recipe: Trained, *, keep: bool) -> Trained:
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"keep_logits": keep})})
