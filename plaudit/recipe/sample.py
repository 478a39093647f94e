"""Sampling from a model without training it: `plaudit.sample` and `plaudit ask`."""

from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from plaudit.recipe.rollout import RolloutSettings


class SampleSettings(RolloutSettings):
    """How a model is sampled."""

    n: PositiveInt = 1
    """Responses per prompt."""
    temperature: NonNegativeFloat = 1.0
    """Sampling temperature; 0 is greedy."""
    seed: NonNegativeInt = 0
    """Sampling seed."""
    max_prompt_tokens: PositiveInt = 4096
    """Longest prompt, rendered with the chat template."""
    too_long: Literal["filter", "error", "cut_left"] = "filter"
    """What to do with longer prompts. filter: skip them; cut_left: truncate the left side."""
    special_tokens: Literal["text", "control"] = "text"
    """What control tokens (`<|im_end|>`) inside messages are. text: characters like any other, so that no message can end its turn
    or speak for another role. control: control tokens."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: the GPU if there is one."""
