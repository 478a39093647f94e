"""Bisection of failing batches: a batch that fails is split in halves until the item that causes it is alone."""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch

from plaudit.errors import PeerLost
from plaudit.models.weights import release_memory
from plaudit.redaction import redact
from plaudit.reward_models.model_thread import Closed
from plaudit.types import Failure

Item = TypeVar("Item")
Result = TypeVar("Result")
MAX_FAILURES = 32
"""Failed sub-batches after which nothing more is split: enough to isolate a few bad items in a batch of any size."""


def bisect_failures(
    items: Sequence[Item],
    compute: Callable[[Sequence[Item]], Iterable[tuple[int, Result]]],
    fail: Callable[[Failure], Result],
) -> list[Result]:
    """A result for each item. `compute` yields (index into its argument, result) as items are done, and may raise. PeerLost is not
    a failure of a batch."""
    results: list[Result | None] = [None] * len(items)
    batches, failures = [list(range(len(items)))], 0
    while batches:
        batch, failure = batches.pop(), None
        try:
            for i, result in compute([items[i] for i in batch]):
                results[batch[i]] = result
        except PeerLost:
            raise
        except Exception as error:
            failure = failure_of(error)
        left = [i for i in batch if results[i] is None]
        if not left:
            continue
        failures += 1
        failure = failure or Failure("no_answer", "the model returned no result for this request")
        if failure.cause == "out_of_memory":
            release_memory()
        if len(left) == 1 or failures >= MAX_FAILURES or failure.cause == "closed":
            for i in left:
                results[i] = fail(failure)
        else:
            batches += [left[len(left) // 2 :], left[: len(left) // 2]]
    return [result for result in results if result is not None]


def failure_of(error: BaseException) -> Failure:
    """An exception as a failure with its cause."""
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
