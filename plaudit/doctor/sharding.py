"""What several processes take of each GPU's memory, by what they divide among themselves, and the most that fits."""

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from rich.console import Console

from plaudit.cluster.ranks import process_count
from plaudit.doctor.findings import Finding
from plaudit.errors import PlauditError, RecipeError
from plaudit.models.folder import context_tokens, read_config
from plaudit.models.memory import PHASES, SAFE_SHARE, Budget, MemoryPlan, Phase, Sharding, gigabytes
from plaudit.recipe import Recipe, ScoreRecipe, TrainingRecipe, quantised_bases
from plaudit.train.auto import resolve_auto, resolve_sharding, why_not_full
from plaudit.train.limits import MOST_TOKENS, largest_model, longest_sequence
from plaudit.train.memory_plan import Lengths, plan_devices, plan_policy, update_tokens
from plaudit.train.memory_savers import advise, memory_savers
from plaudit.train.processes import Processes


def processes_of(recipe: Recipe, gpu_memory: float | None) -> Processes:
    """Before a sharding is chosen. `gpu_memory`: bytes of a GPU that need not be here."""
    memory, kind = (None, None) if gpu_memory is None else (gpu_memory, "cuda")
    if isinstance(recipe, ScoreRecipe):
        return Processes(memory=memory, kind=kind)
    per_node = torch.cuda.device_count() if recipe.cluster.gpus == "all" else recipe.cluster.gpus
    nodes = recipe.cluster.nodes
    return Processes(max(per_node, 1) * nodes, memory=memory, kind=kind, machines=nodes)


def check_gpus(recipe: TrainingRecipe, processes: Processes) -> Iterator[Finding]:
    """Compares cluster.gpus with the GPUs of this machine, unless the plan is for another one's."""
    here, wanted = torch.cuda.device_count(), recipe.cluster.gpus
    elsewhere = processes.kind is not None or recipe.cluster.nodes > 1
    if wanted == "all" and not here and recipe.run.device != "cpu":
        yield (
            "!",
            "cluster.gpus is all, but this machine has no GPUs to count: planned for one process. Give their number, for example "
            "cluster.gpus=8",
        )
    elif wanted == 1 and here > 1 and not elsewhere and recipe.run.device != "cpu":
        yield "!", f"{here} GPUs here, cluster.gpus is 1: set cluster.gpus=all to train on all of them"
    elif not elsewhere:
        try:
            process_count(recipe, here)
        except RecipeError as error:
            yield "✗", str(error)


@dataclass(frozen=True)
class Row:
    """A sharding, and what each GPU holds with it."""

    sharding: Sharding
    plan: MemoryPlan
    budget: Budget
    longest: int

    def size(self, part: str) -> float:
        needs = [need for need in self.budget.needs if need.part == part]
        return sum(need.fixed + need.elastic for need in needs)

    @property
    def least(self) -> float:
        """In the phase that takes the most; of the cache, nothing."""
        return self.budget.at(self.heaviest, fixed_only=True)

    @property
    def heaviest(self) -> Phase:
        return max(PHASES, key=lambda phase: self.budget.at(phase, fixed_only=True))

    @property
    def verdict(self) -> Literal["yes", "tight", "no"]:
        if self.least > self.budget.available:
            return "no"
        return "yes" if self.least <= SAFE_SHARE * self.budget.available else "tight"

    @property
    def cells(self) -> list[str]:
        passes = self.plan.passes - self.plan.gradients
        sizes = [
            self.size("weights"),
            self.size("optimiser"),
            self.plan.gradients,
            passes,
            self.size("sampling"),
            self.size("other"),
        ]
        longest = f"{self.longest:,}" if self.longest < MOST_TOKENS else f"over {MOST_TOKENS:,}"
        return [self.sharding, *(gigabytes(size) if size else "–" for size in sizes), gigabytes(self.least), self.verdict, longest]

    def as_dict(self) -> dict[str, Any]:
        """With the parts of what it takes at least, in bytes."""
        needs = [need for need in self.budget.needs if self.heaviest in need.phases]
        largest_in_turn = max((need.fixed for need in needs if need.in_turn), default=0.0)
        parts = {
            {"passes": "gradients, activations", "sampling": "engine"}.get(part, part): sum(
                need.fixed for need in needs if need.part == part and not need.in_turn
            )
            for part in dict.fromkeys(need.part for need in needs)
        }
        parts |= {"one offloaded model": largest_in_turn} if largest_in_turn else {}
        available = self.budget.available if math.isfinite(self.budget.available) else None
        cells = dict(zip(HEADER, self.cells, strict=True))
        return {"parts": parts, "phase": self.heaviest, "available": available, "cells": cells}


HEADER = [
    "sharding", "weights", "optimiser", "gradients", "activations", "engine", "other", "at least", "fits", "longest sequence",
]  # fmt: skip


def plan_shardings(recipe: TrainingRecipe, lengths: Lengths, processes: Processes) -> list[Row]:
    kind, rows = processes.device(recipe.run.device).type, []
    for sharding in get_args(Sharding):
        if sharding == "full" and quantised_bases(recipe):
            continue
        here = replace(processes, sharding=sharding)
        resolved = resolve_auto(recipe, lengths, lambda line: None, here)
        plan, budget = plan_policy(resolved, lengths, here), plan_devices(resolved, lengths, here)[kind]
        rows.append(Row(sharding, plan, budget, longest_sequence(recipe, lengths, here)))
    return rows


def check_sharding(recipe: TrainingRecipe, lengths: Lengths, processes: Processes, rows: list[Row]) -> Iterator[Finding]:
    """Compares what the recipe's sharding takes with a GPU's memory; says what would fit."""
    chosen = resolve_sharding(recipe, lengths, processes)
    row = next(row for row in rows if row.sharding == chosen)
    how = f"{'auto chooses ' if recipe.cluster.sharding == 'auto' else ''}{chosen}"
    text = (
        f"cluster.sharding: {how}, with which each of {processes.size} processes takes at least {gigabytes(row.least)} of "
        f"{gigabytes(row.budget.available)}"
    )
    fitting = [other.sharding for other in rows if other.verdict == "yes"]
    if row.verdict == "yes":
        yield "✓", text
    elif fitting:
        yield "✗" if row.verdict == "no" else "!", f"{text}. It fits with cluster.sharding={fitting[0]}"
    else:
        mark, text = "✗" if row.verdict == "no" else "!", text + why_not_full(recipe)
        resolved = resolve_auto(recipe, lengths, lambda line: None, replace(processes, sharding=chosen))
        on_gpu = processes.device(recipe.run.device).type == "cuda"
        savers = memory_savers(resolved, longest=update_tokens(recipe, lengths).longest, on_gpu=on_gpu)
        if recipe.model.lora is None or recipe.model.lora.base_bits is None:  # of such a model next to nothing is divided
            savers = [*savers, "use more GPUs"]
        yield mark, f"{text}. {advise(savers)}"
    limit = context_tokens(read_config(recipe.model.path, trust_remote_code=recipe.model.trust_remote_code))
    own_limit = f" (the model's own limit is {limit:,})" if limit and limit < row.longest else ""
    yield "✓", f"the longest sequence that fits, with a micro-batch to itself: {row.longest:,} tokens{own_limit}"
    with suppress(PlauditError, OSError, ValueError):  # adapters of other names, code of the model's own
        found = largest_model(recipe, lengths, processes)
        largest = f"{found[0]} (sharding {found[1]})" if found else "none"
        yield "✓", f"the largest of Qwen2.5's shapes from 0.5B to 72B that fits with these settings: {largest}"


def print_shardings(console: Console, processes: Processes, rows: list[Row]) -> None:
    if not rows:
        return
    available = gigabytes(rows[0].budget.available)
    console.print(f"\nMemory of each of {processes.size} processes by cluster.sharding, {available}:", style="bold", markup=False)
    table = [HEADER, *(row.cells for row in rows)]
    widths = [max(map(len, column)) + 2 for column in zip(*table, strict=True)]
    for cells in table:
        first, *others = [f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)]
        console.print(f"  {first.strip():<{widths[0]}}" + "".join(others), markup=False, soft_wrap=True)
    console.print(
        "  activations: with logits and gathered layers; engine: with all of the cache that it can use; "
        "at least: in the phase that takes the most, without a cache",
        style="dim", markup=False, soft_wrap=True,
    )  # fmt: skip
