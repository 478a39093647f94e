"""Responses from a model that a server has: `plaudit sample MODEL … --url`.

Prompts are rendered and tokenised here, with the model's own tokenizer and template, as for sampling in this process. Each response
is a call of its own, with its own seed; a prompt is complete when all of its responses are. Prompts that the server rejects though
it answers others, for their length or otherwise, are left out and counted.
"""

from collections.abc import Callable, Sequence

import numpy as np

from plaudit.data.prompts import EncodedPrompt
from plaudit.recipe.limits import ModelLimits
from plaudit.recipe.reward_models import RewardModel
from plaudit.reward_models.backend import CONTEXT, Answer, Backend, GenerationRequest, SamplingParams
from plaudit.reward_models.many_calls import CallReport, call_each
from plaudit.rollout.engine import Sampling
from plaudit.types import Failure, Group, SavedSample

NOTHING = np.zeros(0, dtype=np.float32)


def sample_from_server(
    model: RewardModel,
    limits: ModelLimits,
    prompts: Sequence[EncodedPrompt],
    n: int,
    sampling: Sampling,
    keep: Callable[[Group], None],
    leave_out: Callable[[EncodedPrompt, Failure], None],
    *,
    answered: bool,
) -> CallReport:
    """Call `keep` with each prompt's group as soon as its last response is complete, and `leave_out` with the prompts that the
    server rejects. `answered`: it has answered others in an earlier start."""
    params = SamplingParams(
        sampling.max_new_tokens, sampling.temperature, sampling.top_p, sampling.seed, sampling.stop, keep_stop=True,
        timeout_s=limits.call_timeout_s(sampling.max_new_tokens),
    )  # fmt: skip

    async def call(backend: Backend, encoded: EncodedPrompt) -> Failure | None:
        tokens: list[int] = encoded.tokens.tolist()
        keys = [f"{encoded.prompt.id}#{index}" for index in range(n)]
        requests = [GenerationRequest([], tokens=tokens, key=key, affinity=encoded.prompt.id) for key in keys]
        answers = await backend.generate(requests, params)
        failure = next((failure for answer in answers if (failure := _failure(answer, encoded)) is not None), None)
        if failure is None:
            keep(_group(encoded, answers))
        return failure

    at_once = -(-limits.max_concurrent_calls // n)
    return call_each(model, limits, prompts, call, leave_out, answered=answered, at_once=at_once)


def _failure(answer: Answer, encoded: EncodedPrompt) -> Failure | None:
    if answer.too_long or (answer.failure is not None and answer.failure.cause == CONTEXT):
        longer = f"prompt {encoded.prompt.id} has {len(encoded.tokens):,} tokens: with --max-new-tokens that is more than"
        remedy = "Start the server with a longer one, or lower --max-new-tokens (with another --out if this one has rows)."
        return Failure(CONTEXT, f"{longer} the server's context. {remedy}")
    return answer.failure


def _group(encoded: EncodedPrompt, answers: Sequence[Answer]) -> Group:
    samples = [
        SavedSample(
            encoded.prompt.id, index, NOTHING, answer.text or "", "truncated" if answer.truncated else "finished", NOTHING, None, 0,
            token_count=answer.new_tokens,
        )
        for index, answer in enumerate(answers)
    ]  # fmt: skip
    return Group(encoded.prompt, encoded.tokens, tuple(samples))
