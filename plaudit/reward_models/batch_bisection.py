"""A batch in which one thing may spoil all: what fails is tried again in halves, until the culprit is alone."""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch

from plaudit.errors import redact
from plaudit.models.weights import release_memory
from plaudit.reward_models.model_thread import Closed
from plaudit.types import Failure

Item = TypeVar("Item")
Result = TypeVar("Result")
MOST_FAILURES = 32
"""Of one batch, after which nothing is halved any more: enough to find one culprit among any number, or a few."""


def bisect_failures(
    items: Sequence[Item],
    compute: Callable[[Sequence[Item]], Iterable[tuple[int, Result]]],
    fail: Callable[[Failure], Result],
) -> list[Result]:
    """A result for each item. `compute` gives (index among what it was given, result) as they are done, and may raise."""
    results: list[Result | None] = [None] * len(items)
    parts, failures = [list(range(len(items)))], 0
    while parts:
        part, failure = parts.pop(), None
        try:
            for i, result in compute([items[i] for i in part]):
                results[part[i]] = result
        except Exception as error:
            failure = failure_of(error)
        left = [i for i in part if results[i] is None]
        if not left:
            continue
        failures += 1
        failure = failure or Failure("no_answer", "the model gave no answer to this question")
        if failure.cause == "out_of_memory":
            release_memory()
        if len(left) == 1 or failures >= MOST_FAILURES or failure.cause == "closed":
            for i in left:
                results[i] = fail(failure)
        else:
            parts += [left[len(left) // 2 :], left[: len(left) // 2]]
    return [result for result in results if result is not None]


def failure_of(error: BaseException) -> Failure:
    """What was raised, as a failure with its cause."""
    message = redact(" ".join(f"{type(error).__name__}: {error}".split()))[:500]
    if isinstance(error, Closed):
        return Failure("closed", str(error))
    if is_out_of_memory(error):
        return Failure("out_of_memory", message)
    return Failure("exception", message)


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and ("not enough memory" in str(error) or "can't allocate memory" in str(error))
