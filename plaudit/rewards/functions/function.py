"""A user's Python function as a reward, as verl calls it: `compute_score(data_source, solution_str, ground_truth, extra_info)`.

It returns a number, or a dict with `score`: its other numbers become parts, `malformed: True` says that the answer could not be
read, and the rest is kept as the trace. It may leave out arguments that it does not need, and it may be `async`.

Differs from verl: it runs in worker processes with a time limit (`workers.py`), and what it does wrong is never a score.
Causes of failure: timeout, exception, not_a_number (NaN, None, text), bad_result (a dict without score), died (its process).
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import PositiveFloat, PositiveInt

from plaudit.errors import RecipeError, did_you_mean, nearest_path
from plaudit.rewards.functions.process import Answer
from plaudit.rewards.functions.workers import CannotStart, Workers
from plaudit.rewards.reward import LiveReward, Reward, failed
from plaudit.types import Group, Sample, Score


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
        self._workers: Workers | None = None

    async def open(self) -> None:
        path = python_file(self.settings.path, self.settings.label)
        self._workers = Workers(
            path, self.settings.function, self.settings.arguments, count=self.settings.workers, timeout_s=self.settings.timeout_s
        )
        try:
            await self._workers.ready()
        except CannotStart as error:
            raise RecipeError(f"reward '{self.settings.label}': {self._explain(path, error.answer)}") from None

    def _explain(self, path: Path, answer: dict[str, Any]) -> str:
        match answer.get("problem"):
            case "import":
                return f"{path} cannot be imported: {answer['message']}"
            case "missing":
                near, here = did_you_mean(self.settings.function, answer["functions"]), ", ".join(answer["functions"]) or "none"
                return f"{path} has no function {self.settings.function} (it has: {here}).{near}"
            case "arguments":
                return (
                    f"{path}: {answer['signature']} cannot be called: {answer['message']}. It is given data_source, solution_str, "
                    f"ground_truth and extra_info, as far as it takes them, and what stands under arguments."
                )
            case _:
                return f"{answer.get('message')}"

    async def close(self) -> None:
        if self._workers is not None:
            await asyncio.to_thread(self._workers.close)
            self._workers = None

    async def score(self, groups: Sequence[Group]) -> list[list[Score]]:
        assert self._workers is not None, "a reward is opened before it scores"
        calls = [[self._call(group, sample) for sample in group.samples] for group in groups]
        answers = iter(await asyncio.gather(*(call for row in calls for call in row)))
        return [[_as_score(next(answers), sample.text) for sample in group.samples] for group in groups]

    def _call(self, group: Group, sample: Sample) -> asyncio.Future[Answer]:
        assert self._workers is not None
        prompt = group.prompt
        return asyncio.wrap_future(
            self._workers.call(
                data_source=prompt.data_source,
                solution_str=sample.text,
                ground_truth=prompt.ground_truth,
                extra_info=dict(prompt.extra_info),
            )
        )


def python_file(name: str, label: str) -> Path:
    """A user's file; a RecipeError if there is none."""
    path = Path(name).expanduser()
    if not path.is_file():
        problem = "is a folder; name a Python file in it." if path.is_dir() else f"does not exist.{nearest_path(path)}"
        raise RecipeError(f"reward '{label}': {path} {problem}")
    return path


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
