"""Memory checks by device: weights, training, sampling and reward models together."""

import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors import SafetensorError, safe_open

from plaudit.doctor.findings import Finding
from plaudit.errors import PlauditError, RecipeError
from plaudit.lora_folder import read_lora_folder
from plaudit.model_files import require_weights
from plaudit.models.folder import read_config
from plaudit.models.liger import require_liger
from plaudit.models.memory import PHASES, SAFE_SHARE, Budget, gigabytes, total_memory
from plaudit.models.parameter_counts import count_for_training
from plaudit.models.quantisable import only_linear_layers
from plaudit.models.trainable import resolve_dtype
from plaudit.recipe import ModelSettings, Recipe, RewardModelRecipe, RLRecipe, ScoreRecipe, TrainingRecipe
from plaudit.rewards.judges.model_rewards import ModelReward
from plaudit.train.auto import resolve_auto
from plaudit.train.memory_plan import (
    ALONE,
    RESIDENT,
    SERVER,
    Lengths,
    Processes,
    local_reward_models,
    plan_checkpoint_copy,
    plan_critic,
    plan_policy,
    server_share,
    update_tokens,
)
from plaudit.train.memory_savers import advise, memory_savers


def check_weights(model: Path) -> Iterator[Finding]:
    """Check that a folder's weights are complete, reading the safetensors headers only."""
    lora = read_lora_folder(model)
    if lora is not None:
        yield "✓", f"{model}: a LoRA adapter, merged into its base, {lora.base}"
        model = Path(lora.base)
    if not model.is_dir():
        return  # on the hub
    try:
        tensors = sum(len(safe_open(file, "pt").keys()) for file in require_weights(model))
    except (OSError, ValueError, SafetensorError) as error:
        yield "✗", f"{model}: cannot read the weights (safetensors only; pickled weights are never loaded): {error}"
        return
    yield "✓", f"{model}: {tensors:,} tensors, all complete"


def check_training(recipe: TrainingRecipe, lengths: Lengths, processes: Processes = ALONE) -> Iterator[Finding]:
    device = processes.device(recipe.run.device)
    messages: list[str] = []
    try:
        recipe = resolve_auto(recipe, lengths, messages.append, processes)
        plan = plan_policy(recipe, lengths, processes)
    except PlauditError:
        raise
    except (OSError, ValueError) as error:
        yield "✗", f"{recipe.model.path}: cannot read its config: {str(error).splitlines()[0]}"
        return
    if not plan.trainable:
        yield "✗", f"model.lora.targets: {recipe.model.path} has no linear layer of that name"
        return
    yield from (("✓", line) for line in messages)
    yield from _check_settings("model", recipe.model, plan.layers, device, scalar=isinstance(recipe, RewardModelRecipe))
    if isinstance(recipe, RLRecipe) and recipe.critic is not None and not recipe.critic.shared:
        critic = recipe.critic.model(recipe.model)
        with suppress(PlauditError, OSError, ValueError):  # an unreadable config is reported by check_critic
            layers = plan_critic(recipe, processes=processes).layers
            yield from _check_settings("critic", critic, layers, device, scalar=True)
    if isinstance(recipe, RLRecipe):
        yield "✓", f"the policy while training: {plan}"  # check_budgets compares the total with the device's memory
        return
    available = processes.available(device.type, device.type)
    dtype = str(resolve_dtype(recipe.model.dtype, device)).removeprefix("torch.")
    text = f"{plan}; {device.type} in {dtype} has {available / 1e9:.0f} GB"
    if plan.total > available:
        longest = update_tokens(recipe, lengths).longest
        text += f". {advise(memory_savers(recipe, longest=longest, on_gpu=device.type == 'cuda'))}"
    yield ("✓" if plan.total < SAFE_SHARE * available else "!"), text
    if plan.streamed:
        host = processes.available("cpu", device.type)
        text = f"moments and master weights take {gigabytes(plan.state)}{_of(host)} host memory"
        yield ("✓" if plan.state < SAFE_SHARE * host else "!"), text
    if recipe.run.save_in_background:
        yield _check_copy(recipe, plan.total if device.type == "cpu" else plan.state if plan.streamed else 0.0, processes)


def _check_copy(recipe: TrainingRecipe, others: float, processes: Processes) -> Finding:
    """`others`: what training takes of the host's memory besides."""
    trains_on = processes.device(recipe.run.device).type
    copy, host = plan_checkpoint_copy(recipe, processes), processes.available("cpu", trains_on)
    text = f"run.save_in_background: a checkpoint is written from a copy, which takes {gigabytes(copy)}{_of(host)} host memory"
    if others + copy < SAFE_SHARE * host:
        return "✓", text
    return "!", f"{text}; if there is no room for it, training waits while checkpoints are written"


def _of(available: float) -> str:
    """Another machine's host memory is not known."""
    return f" of {gigabytes(available)}" if math.isfinite(available) else " of"


def check_disk(recipe: TrainingRecipe, steps: int, processes: Processes = ALONE) -> Iterator[Finding]:
    """Space for the checkpoints that are kept, one that is being written, and the trained model. `steps`: of the run."""
    together = Processes(kind=processes.kind)
    try:
        plans = [plan_policy(recipe, processes=together)]
        if isinstance(recipe, RLRecipe) and recipe.critic is not None and not recipe.critic.shared:
            plans.append(plan_critic(recipe, processes=together))
    except (PlauditError, OSError, ValueError):
        return  # reported by other checks
    lora = recipe.model.lora
    model = 4.0 * plans[0].trainable if lora is not None and not lora.merge_on_save else plans[0].saved
    checkpoint = model + sum(plan.state for plan in plans) + sum(plan.saved for plan in plans[1:])
    run = recipe.run
    keeps_best = run.keep_best and bool(recipe.data.val)
    if run.keep_last == "all":
        intervals = (run.save_every, run.validate_every if keeps_best else None)
        kept = len({steps, *(step for every in intervals if every is not None for step in range(every, steps + 1, every))})
        needed = kept * checkpoint + model
        what, advice = (
            f"{kept:,} checkpoint{'s' * (kept > 1)} of {gigabytes(checkpoint)} and the trained model",
            "set run.keep_last to a number",
        )
        more = f" and {gigabytes(checkpoint)} more every {run.save_every_minutes:g} minutes" if run.save_every_minutes else ""
    else:
        kept = run.keep_last + keeps_best
        needed = (kept + 1) * checkpoint + model
        what, advice = (
            f"{kept} checkpoints of {gigabytes(checkpoint)}, one being written and the trained model",
            "lower run.keep_last",
        )
        more = ""
    folder = Path(run.dir).absolute()
    free = shutil.disk_usage(next(parent for parent in (folder, *folder.parents) if parent.exists())).free
    text = f"{run.dir}: {what} take up to {gigabytes(needed)}{more}; {gigabytes(free)} are free"
    yield ("✓", text) if needed < free else ("!", f"{text}. Free some, {advice}, or choose another run.dir")


def _check_settings(
    section: str, model: ModelSettings, layers: int, device: torch.device, *, scalar: bool
) -> Iterator[Finding]:  # fmt: skip
    checkpointed = model.gradient_checkpointing
    if checkpointed is not True and isinstance(checkpointed, int) and checkpointed > layers:
        yield "✗", f"{section}.gradient_checkpointing is {checkpointed}, but {model.path} has only {layers} layers"
    if model.liger:
        try:
            require_liger(model.path, device)
        except RecipeError as error:
            yield "✗", f"{section}.liger: {error}"
    if model.lora is not None and model.lora.base_bits is not None:
        config = read_config(model.path, trust_remote_code=model.trust_remote_code)
        if not count_for_training(config, model, scalar=scalar).merged:
            yield "✗", only_linear_layers(section)


# The total per device ------------------------------------------------------------------------------------------------


def check_budgets(recipe: Recipe, budgets: dict[str, Budget], processes: Processes = ALONE) -> Iterator[Finding]:
    for kind, budget in budgets.items():
        if not math.isfinite(budget.available):
            yield "✓", f"{kind}: at most {gigabytes(budget.at(budget.peak))} for each process"
            continue
        peak = budget.peak
        required = max(budget.at(phase, fixed_only=True) for phase in PHASES)
        most = f"at most {gigabytes(budget.at(peak))} of {gigabytes(budget.available)}"
        text = f"{kind}: {most}, while {peak} (the largest total of the table below)"
        advice = _advice(recipe, kind, budget, processes)
        match budget.verdict:
            case "too much":
                yield "✗", f"{text}; {gigabytes(required)} is the minimum. {advice}"
            case "tight":
                yield (
                    "!",
                    f"{text}: tight; when memory runs short, sequences queue for cache space and saves are waited for. {advice}",
                )
            case _:
                yield "✓", text
    for name, reward in local_reward_models(recipe):
        in_table = any(need.name == name + SERVER for budget in budgets.values() for need in budget.needs)
        if reward.model.placement == "launch" and not in_table:
            yield _launched(name, reward, budgets)


def _advice(recipe: Recipe, kind: str, budget: Budget, processes: Processes) -> str:
    if isinstance(recipe, RLRecipe) and kind != processes.device(recipe.run.device).type:
        return "Offloaded models and optimiser state are kept there: offload less (placement: resident), or use model.lora."
    resident = [need for need in budget.needs if need.name.endswith(RESIDENT)]
    if resident:
        largest = max(resident, key=lambda need: need.fixed)
        divide = " model.rank: [0, 1] divides the layers of a scalar model among processes." if processes.size > 1 else ""
        return (
            f"placement: offload frees {largest.name.removesuffix(RESIDENT)} while other models run; "
            f"placement: server moves it to another process.{divide}"
        )
    if budget.peak != "training" and any(need.name.endswith(SERVER) for need in budget.needs):
        return "Lower the server's share in model.arguments: --gpu-memory-utilization (SGLang: --mem-fraction-static)."
    if isinstance(recipe, ScoreRecipe):
        return "Use placement: server on another machine, or dtype: bfloat16."
    savers = memory_savers(recipe, on_gpu=processes.device(recipe.run.device).type == "cuda")
    if any(need.in_turn for need in budget.needs):
        savers.insert(-1, "move the reward models to a server (placement: server)")
    return f"{advise(savers)}."


def _launched(name: str, reward: ModelReward, budgets: dict[str, Budget]) -> Finding:
    """A launched server, which takes a fixed share of the GPU."""
    share = server_share(reward)
    text = f"{name}: placement: launch starts a server on this machine, which is not in the table"
    if not torch.cuda.is_available():
        return "✓", text
    available = total_memory(torch.device("cuda"))
    text += f"; it takes {share:.0%} of a GPU, {gigabytes(share * available)}"
    ours = budgets["cuda"].at(budgets["cuda"].peak) if "cuda" in budgets else 0.0
    if ours + share * available <= available:
        return "✓", text
    return (
        "!",
        f"{text}, and this process needs {gigabytes(ours)}: lower --gpu-memory-utilization in model.arguments, set model.sleep, "
        "or give it a separate GPU",
    )


def print_budgets(console: Console, recipe: Recipe, budgets: dict[str, Budget], processes: Processes = ALONE) -> None:
    phases = _phases(recipe)
    for kind, budget in budgets.items():
        width = max(30, *(len(need.name) for need in budget.needs)) + 2
        available = f", {gigabytes(budget.available)}" if math.isfinite(budget.available) else ""
        console.print(f"\nMemory on {kind}{available}{_per_process(processes)}:", style="bold", markup=False)
        lines = [("", [f"{phase:>10}" for phase in phases])]
        for need in budget.needs:
            sizes = [gigabytes(need.fixed + need.elastic) if phase in need.phases else "–" for phase in phases]
            lines.append((need.name, sizes))
        lines.append(("total" + _in_turn(budget), [gigabytes(budget.at(phase)) for phase in phases]))
        for name, sizes in lines:
            console.print(f"  {name:<{width}}" + "".join(f"{size:>11}" for size in sizes), markup=False, soft_wrap=True)


def _in_turn(budget: Budget) -> str:
    return ", one offloaded at a time" if sum(need.in_turn for need in budget.needs) > 1 else ""


def tabulate(recipe: Recipe, budgets: dict[str, Budget], processes: Processes = ALONE) -> list[dict[str, Any]]:
    """The same as data, in bytes; None where a component takes nothing in a phase."""
    phases = _phases(recipe)
    return [
        {
            "device": kind + _per_process(processes),
            "available": budget.available if math.isfinite(budget.available) else None,
            "verdict": budget.verdict if math.isfinite(budget.available) else None,
            "phases": phases,
            "totals": [budget.at(phase) for phase in phases],
            "needs": [
                {
                    "name": need.name,
                    "sizes": [need.fixed + need.elastic if phase in need.phases else None for phase in phases],
                    "elastic": need.elastic,
                    "in_turn": need.in_turn,
                }
                for need in budget.needs
            ],
        }
        for kind, budget in budgets.items()
    ]


def _phases(recipe: Recipe) -> Sequence[Any]:
    return PHASES if isinstance(recipe, RLRecipe) else ("scoring",) if isinstance(recipe, ScoreRecipe) else ("training",)


def _per_process(processes: Processes) -> str:
    return f" for each of {processes.size} processes, sharding {processes.sharding}" if processes.size > 1 else ""
