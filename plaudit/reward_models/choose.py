"""Which backend a model's placement means. Each is imported only where it is used: a judge behind a URL needs no torch."""

from plaudit.recipe.reward_models import RewardModel
from plaudit.reward_models.backend import Backend


def backend_for(settings: RewardModel, *, scalar: bool) -> Backend:
    """The model, not opened yet. `scalar`: it gives numbers, and does not write."""
    match settings.placement:
        case "server":
            from plaudit.reward_models.client import Client as Chosen
        case "launch":
            from plaudit.reward_models.launch import Launched as Chosen
        case _:
            from plaudit.reward_models.local import Local as Chosen
    return Chosen(settings, scalar=scalar)
