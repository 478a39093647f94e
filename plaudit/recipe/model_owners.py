"""Which process of a run has which reward model."""

from collections import Counter
from collections.abc import Iterable

from plaudit.errors import RecipeError
from plaudit.recipe.limits import ModelLimits
from plaudit.recipe.reward_models import RewardModel
from plaudit.recipe.rewards import RewardSettings, nested_rewards

ModelKey = tuple[RewardModel, bool]
"""A model's settings, and whether it scores (otherwise it generates)."""


def models_of(rewards: Iterable[RewardSettings]) -> dict[ModelKey, ModelLimits]:
    """The models of all rewards and of those inside them, each once, in the recipe's order, with the limits of its calls."""
    models: dict[ModelKey, ModelLimits] = {}
    for outer in rewards:
        for _, reward in nested_rewards(outer, outer.label):
            model, limits = getattr(reward, "model", None), reward.limits
            if isinstance(model, RewardModel) and isinstance(limits, ModelLimits):
                models.setdefault((model, bool(getattr(reward, "scalar", False))), limits)
    return models


def deal_models(models: dict[ModelKey, ModelLimits], size: int) -> dict[ModelKey, int]:
    """The process that has each model: a rank, or after those (from `size` on) the reward worker of a model with GPUs of its own.
    Models that every process has for itself are left out.

    A model without a rank goes to the process with the fewest models and blocks, the first of them if there are several.
    """
    shared = [key for key, limits in models.items() if key[0].rank != "all" and not _divides(key[0], limits, size)]
    owners = {key: ranks[0] for key in shared if (ranks := named_ranks(key[0]))}
    owners |= {key: size + i for i, key in enumerate(models_with_gpus(models))}
    for model, _ in owners:
        if max(named_ranks(model), default=0) >= size:
            given = list(model.rank) if isinstance(model.rank, tuple) else model.rank
            raise RecipeError(f"{model.path}: model.rank is {given}, but there are {size} processes, with ranks 0 to {size - 1}")
    held = Counter(rank for model, _ in owners for rank in named_ranks(model))
    for key in shared:
        if key not in owners:
            owners[key] = min(range(size), key=lambda rank: (held[rank], rank))
            held[owners[key]] += 1
    return {key: owners[key] for key in shared}


def models_with_gpus(models: Iterable[ModelKey]) -> list[ModelKey]:
    """Those that a reward worker has, in the order of these workers."""
    return [key for key in models if key[0].gpus is not None]


def named_ranks(model: RewardModel) -> tuple[int, ...]:
    """Those that `model.rank` names; the first owns the model."""
    rank = model.rank
    return rank if isinstance(rank, tuple) else (rank,) if isinstance(rank, int) else ()


def _divides(model: RewardModel, limits: ModelLimits, size: int) -> bool:
    """Whether every process can have its own share of a server's limits. If not, one of them makes the calls of all."""
    return model.placement == "server" and limits.max_concurrent_calls >= size


def divide_limits(limits: ModelLimits, size: int) -> ModelLimits:
    """One process's share: together they keep the limits of the recipe."""
    calls, tokens = limits.calls_per_s, limits.tokens_per_minute
    return limits.model_copy(
        update={
            "max_concurrent_calls": limits.max_concurrent_calls // size,
            "calls_per_s": None if calls is None else calls / size,
            "tokens_per_minute": None if tokens is None else max(1, tokens // size),
        }
    )
