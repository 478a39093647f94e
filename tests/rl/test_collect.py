"""What is checked before prompts are sampled."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from plaudit.data.prompts import EncodedPrompt
from plaudit.errors import RecipeError
from plaudit.rl.collect import require_context
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
