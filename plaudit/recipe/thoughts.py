"""Thoughts and answers that a strong model writes: `plaudit prepare thoughts`."""

from pydantic import NonNegativeFloat, PositiveInt

from plaudit.recipe.limits import ModelLimits
from plaudit.recipe.reward_models import JudgeSampling, RewardModel
from plaudit.recipe.section import Section


class WriterSampling(JudgeSampling):
    """How the strong model writes."""

    max_new_tokens: PositiveInt = 8192
    """Longest answer, thoughts included; one that is cut there is not used."""
    temperature: NonNegativeFloat = 1.0
    """0 for greedy decoding; a second try would then repeat the first."""


class ThoughtsSettings(Section):
    model: RewardModel
    """The strong model: usually behind a URL."""
    sampling: WriterSampling = WriterSampling()
    """How it writes."""
    limits: ModelLimits = ModelLimits(max_concurrent_calls=20)
    """Concurrency, rates, time limits and retries of the calls."""
