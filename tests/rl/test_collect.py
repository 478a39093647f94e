"""What is checked before prompts are sampled, and how a process's failure reaches the others."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from plaudit.data.prompts import EncodedPrompt
from plaudit.errors import RecipeError, ServerGone, TrainingStopped
from plaudit.rl.collect import exchange, require_context
from plaudit.types import Prompt


@pytest.mark.parametrize(
    ("length", "max_new_tokens", "advice"),
    [
        (90, 20, r"Lower rollout\.max_new_tokens to 10, or leave out longer prompts: data\.max_prompt_tokens=80\."),
        (300, 20, r"100 tokens\. Leave out longer prompts: data\.max_prompt_tokens=80\."),
        (60, 100, r"100 tokens\. Lower rollout\.max_new_tokens to 40\."),
        (300, 100, r"100 tokens\. Lower rollout\.max_new_tokens\."),
    ],
)
def test_what_exceeds_the_context_is_reported_with_a_setting_that_helps(length, max_new_tokens, advice):
    config: Any = SimpleNamespace(max_position_embeddings=100)
    prompt = EncodedPrompt(Prompt("p", [{"role": "user", "content": "?"}]), np.zeros(length, dtype=np.int32))
    with pytest.raises(RecipeError, match=advice):
        require_context(config, [prompt], max_new_tokens)


@pytest.mark.parametrize("kind", [TrainingStopped, ServerGone])
def test_what_stops_one_process_stops_all_with_its_class(kind):
    """It decides whether all of them are restarted."""
    world: Any = SimpleNamespace(size=2, gather=lambda value, what: [value, kind("its server is lost")])
    with pytest.raises(TrainingStopped, match="rank 1: its server is lost") as raised:
        exchange(world, list, "groups")
    assert type(raised.value) is kind
