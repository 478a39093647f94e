"""Which backend a model's placement means. Each is imported only where it is used: a judge behind a URL needs no torch."""

from plaudit.recipe.reward_models import RewardModel
from plaudit.reward_models.backend import Backend


def backend_for(settings: RewardModel, *, scalar: bool, apart: bool = False) -> Backend:
    """The model, not opened yet. `scalar`: it gives numbers, and does not write. `apart`: in this process, it computes the numbers
    of each call by themselves, so that they are the same to the bit whoever else asks."""
    match settings.placement:
        case "server":
            from plaudit.reward_models.client import Client as Chosen
        case "launch":
            from plaudit.reward_models.launch import Launched as Chosen
        case _:
            from plaudit.reward_models.local import Local

            return Local(settings, scalar=scalar, apart=apart)
    return Chosen(settings, scalar=scalar)
