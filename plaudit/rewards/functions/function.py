"""A user's Python function as a reward, as verl calls it: `compute_score(data_source, solution_str, ground_truth, extra_info)`.

It returns a number, or a dict with `score`: its other numbers become parts, `malformed: True` says that the answer could not be
read, and the rest is kept as the trace. It may leave out arguments that it does not need, and it may be `async`.

Differs from verl: it runs in worker processes with a time limit (`worker_pool.py`), and what it does wrong is never a score.
Causes of failure: timeout, exception, not_a_number (NaN, None, text), bad_result (a dict without score), died (its process).
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import PositiveFloat, PositiveInt

from plaudit.rewards.functions.process import Answer
from plaudit.rewards.functions.worker_pool import UserCode, WorkerPool
from plaudit.rewards.reward import LiveReward, Reward, failed
from plaudit.types import Group, Prompt, Sample, Score

PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""What verl passes; a function that takes fewer of them gets fewer."""


class Function(Reward):
    kind: Literal["function"]
    """A function of your own."""
    path: str
    """The Python file it is in. What lies beside the file can be imported from it."""
    function: str = "compute_score"
    """Its name there."""
    arguments: dict[str, Any] = {}  # noqa: RUF012 (pydantic copies it)
    """Keyword arguments that every call gets besides."""
    timeout_s: PositiveFloat = 10.0
    """The longest that one sample may take; then the process is killed, and the sample has failed."""
    workers: PositiveInt = 2
    """Processes that score side by side."""

    @property
    def files(self) -> list[Path]:
        return [Path(self.path).expanduser(), *super().files]

    def build(self) -> "LiveFunction":
        return LiveFunction(self)


class LiveFunction(LiveReward[Function]):
    def __init__(self, settings: Function):
        super().__init__(settings)
        code = UserCode(settings.path, (settings.function,), PARAMETERS, "solution_str", settings.arguments)
        self._workers = WorkerPool(code, settings.label, count=settings.workers, timeout_s=settings.timeout_s)

    async def open(self) -> None:
        await self._workers.open()

    async def close(self) -> None:
        await self._workers.close()

    async def score(self, groups: Sequence[Group]) -> list[list[Score]]:
        calls = [self._call(group.prompt, sample) for group in groups for sample in group.samples]
        answers = iter(await asyncio.gather(*calls))
        return [[_as_score(next(answers), sample.text) for sample in group.samples] for group in groups]

    def _call(self, prompt: Prompt, sample: Sample) -> asyncio.Future[Answer]:
        return self._workers.call(
            self.settings.function,
            data_source=prompt.data_source,
            solution_str=sample.text,
            ground_truth=prompt.ground_truth,
            extra_info=dict(prompt.extra_info),
        )


def _as_score(answer: Answer, text: str) -> Score:
    if "cause" in answer:
        return failed(answer["cause"], answer["message"], view=text)
    return Score(
        answer["value"],
        parts=answer.get("parts", {}),
        malformed=answer.get("malformed", False),
        view=text,
        trace=answer.get("trace", {}),
    )
