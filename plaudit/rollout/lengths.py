"""Prompts that an engine can sample: not empty, and not too long."""

from collections.abc import Sequence
from typing import Any

from plaudit.errors import PlauditError
from plaudit.rollout.engine import Request, Sampling


def context_of(config: Any) -> int | None:
    """The most tokens of a sequence, if the model has a limit."""
    return getattr(config, "max_position_embeddings", None)


def require_lengths(requests: Sequence[Request], sampling: Sampling, config: Any) -> int:
    """The longest sequence that may come of these requests, prompt and response. Raises a PlauditError that names the first prompt
    which is empty, or too long for the model of this config."""
    context, longest = context_of(config), 0
    for request in requests:
        if not len(request.tokens):
            raise PlauditError(f"prompt {request.prompt_id} is empty")
        needed = len(request.tokens) + (request.max_new_tokens or sampling.max_new_tokens)
        if context is not None and needed > context:
            raise PlauditError(
                f"prompt {request.prompt_id}: {len(request.tokens):,} tokens and up to {needed - len(request.tokens):,} new "
                f"ones exceed the model's context of {context:,}. Lower max_new_tokens, or leave out longer prompts."
            )
        longest = max(longest, needed)
    return longest
