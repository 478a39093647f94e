"""The longest sequences and the largest models that fit, by the memory plan."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from plaudit.models.folder import read_config
from plaudit.models.memory import PHASES, SAFE_SHARE, Sharding, plan_cache
from plaudit.models.shapes import QWEN, write_shape
from plaudit.models.trainable import resolve_dtype
from plaudit.recipe import PreferenceRecipe, RLRecipe, TrainingRecipe
from plaudit.train.auto import fits, resolve_sharding
from plaudit.train.memory_plan import Lengths, plan_critic, plan_devices, plan_policy
from plaudit.train.processes import Processes

MOST_TOKENS = 2**24


def longest_sequence(recipe: TrainingRecipe, lengths: Lengths, processes: Processes) -> int:
    """Tokens of the longest sequence (RL: prompt and response; pairs: each of the two sides) that training has memory for, when it
    has a micro-batch to itself. RL also samples it, at least one at a time. 0 if none fits."""
    recipe = _checkpoint_most(recipe, processes)
    device = processes.device(recipe.run.device)
    prompt = max(lengths) if lengths else recipe.data.max_prompt_tokens if isinstance(recipe, RLRecipe) else 0
    config = read_config(recipe.model.path, trust_remote_code=recipe.model.trust_remote_code)

    def has_memory_for(tokens: int) -> bool:
        changed, rows = _with_sequence(recipe, tokens, prompt)
        budget = plan_devices(changed, rows, processes)[device.type]
        needed = {phase: budget.at(phase, fixed_only=True) for phase in PHASES}
        if isinstance(recipe, RLRecipe):
            size = resolve_dtype(recipe.model.dtype, device).itemsize
            needed["sampling"] += plan_cache(config, size, sequences=1, tokens=tokens)
        return max(needed.values()) <= SAFE_SHARE * budget.available

    enough, too_many = 0, 1
    while too_many <= MOST_TOKENS and has_memory_for(too_many):
        enough, too_many = too_many, 2 * too_many
    while too_many - enough > max(1, enough // 1000):
        middle = (enough + too_many) // 2
        enough, too_many = (middle, too_many) if has_memory_for(middle) else (enough, middle)
    return enough


def _with_sequence(recipe: TrainingRecipe, tokens: int, prompt: int) -> tuple[TrainingRecipe, list[int]]:
    """The recipe, and lengths of its rows, with sequences of `tokens` tokens, each a micro-batch."""
    sections: dict[str, Any] = {"train": recipe.train.model_copy(update={"tokens_per_micro_batch": 1})}
    if isinstance(recipe, RLRecipe):
        prompt = min(prompt, tokens - 1)
        sections["rollout"] = recipe.rollout.model_copy(update={"max_new_tokens": tokens - prompt})
        return recipe.model_copy(update=sections), [max(prompt, 1)]
    return recipe.model_copy(update=sections), [2 * tokens if isinstance(recipe, PreferenceRecipe) else tokens]


def _checkpoint_most(recipe: TrainingRecipe, processes: Processes) -> TrainingRecipe:
    """`auto` as it is resolved when memory is short: all layers but one, which would be live in full anyway."""
    sections: dict[str, Any] = {}
    if recipe.model.gradient_checkpointing == "auto":
        layers = plan_policy(recipe, processes=processes).layers
        sections["model"] = recipe.model.model_copy(update={"gradient_checkpointing": max(layers - 1, 1)})
    if isinstance(recipe, RLRecipe) and recipe.critic is not None and recipe.critic.gradient_checkpointing == "auto":
        layers = plan_critic(recipe, processes=processes).layers
        sections["critic"] = recipe.critic.model_copy(update={"gradient_checkpointing": max(layers - 1, 1)})
    return recipe.model_copy(update=sections)


def largest_model(
    recipe: TrainingRecipe, lengths: Lengths, processes: Processes, names: Sequence[str] = tuple(QWEN)
) -> tuple[str, Sharding] | None:
    """The largest of Qwen2.5's shapes with which the recipe fits, and its sharding (`auto` is resolved for each); None if none
    does."""
    with TemporaryDirectory(prefix="plaudit-shapes-") as folder:
        for name in reversed(names):
            model = recipe.model.model_copy(update={"path": str(write_shape(name, Path(folder)))})
            changed = recipe.model_copy(update={"model": model})
            chosen = resolve_sharding(changed, lengths, processes)
            if fits(changed, lengths, replace(processes, sharding=chosen)):
                return name, chosen
    return None
