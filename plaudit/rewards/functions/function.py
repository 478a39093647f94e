"""A user's Python function as a reward: for one response, as verl calls it, or for all responses to a prompt at once.

    scores: sample   compute_score(data_source, solution_str, ground_truth, extra_info) -> score
    scores: group    compute_scores(prompts, responses, ground_truths, extra_infos, data_sources) -> [score, …]
    scores: trl      compute_scores(prompts, completions, completion_ids, **columns) -> [score or None, …]

A score is a number, or a dict with `score`: its other numbers become parts, `malformed: True` marks an answer that cannot be read,
and the rest is kept as the trace. A function may leave out arguments it does not need, and it may be `async`.

A group function is called once per group, with one entry per response in every list, and returns one score per response, in that
order. It gets only the responses it is to score: `when`, a gate and `view` may leave some out, down to a single one. If a
call fails (an exception, a timeout, a result that is not a list or has the wrong length), the complete group fails; a single entry
that is not a number fails its sample alone.

A TRL function is a group function with TRL's arguments: prompts and completions are text where the row's prompt is text, else
messages; each field of the row is a list (`ground_truth`, also as `answer` and `solution`; `data_source`; all of extra_info).
None means, as in TRL, that the reward does not apply to that response.

Differs from verl: it runs in worker processes with a time limit (`worker_pool.py`), and a mistake in it never becomes a score.
Causes of failure: timeout, exception, not_a_number (NaN, None, text), bad_result (a dict without score, not a list, a list of the
wrong length), memory (its process used too much), died (its process), tampered (something else came in place of its answer).
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import PositiveFloat, PositiveInt

from plaudit.recipe.limits import Limits
from plaudit.rewards.functions.process import Answer
from plaudit.rewards.functions.worker_pool import UserCode, WorkerPool
from plaudit.rewards.reward import LiveReward, Reward, failed
from plaudit.types import DECLINED, Group, Prompt, Sample, SavedSample, Score

SAMPLE_PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")
GROUP_PARAMETERS = ("prompts", "responses", "ground_truths", "extra_infos", "data_sources")
TRL_PARAMETERS = ("prompts", "completions", "completion_ids")


class FunctionLimits(Limits):
    timeout_s: PositiveFloat = 10.0
    """Time limit for one call; when it is exceeded, the process is killed and the samples of the call have failed."""
    worker_memory_gb: PositiveFloat | None = 4.0
    """Memory of one worker process with its children (GB in RAM); when it is exceeded, they are killed and the samples of the call
    have failed. null for no limit."""


class Function(Reward):
    kind: Literal["function"]
    """Your own function."""
    path: str
    """The Python file that defines it. It can import modules from its folder."""
    scores: Literal["sample", "group", "trl"] = "sample"
    """What one call scores: a response; or all responses to a prompt, with plaudit's arguments or with TRL's."""
    function: str | None = None
    """Its name; default: compute_score, or compute_scores if it scores several responses."""
    arguments: dict[str, Any] = {}  # noqa: RUF012 (pydantic copies it)
    """Further keyword arguments of every call."""
    limits: FunctionLimits = FunctionLimits()  # pyright: ignore[reportIncompatibleVariableOverride]
    """Concurrency, rates, time limits, retries, and when it is given up."""
    workers: PositiveInt = 2
    """Processes that score in parallel."""

    @property
    def function_name(self) -> str:
        return self.function or ("compute_score" if self.scores == "sample" else "compute_scores")

    @property
    def scores_alone(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.scores == "sample"

    @property
    def files(self) -> list[Path]:
        return [Path(self.path).expanduser(), *super().files]

    def build(self) -> "LiveFunction":
        return {"sample": LiveFunction, "group": LiveGroupFunction, "trl": LiveTRLFunction}[self.scores](self)


class LiveFunction(LiveReward[Function]):
    """Calls the function for each sample."""

    def __init__(self, settings: Function):
        super().__init__(settings)
        limits = settings.limits
        self._workers = WorkerPool(
            self._code(), settings.label, count=settings.workers, timeout_s=limits.timeout_s, memory_gb=limits.worker_memory_gb
        )

    def _code(self) -> UserCode:
        functions, arguments = (self.settings.function_name,), self.settings.arguments
        return UserCode(self.settings.path, functions, SAMPLE_PARAMETERS, "solution_str", arguments, setting="function")

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
            self.settings.function_name,
            data_source=prompt.data_source,
            solution_str=sample.text,
            ground_truth=prompt.ground_truth,
            extra_info=dict(prompt.extra_info),
        )


class LiveGroupFunction(LiveFunction):
    """Calls the function once for each group."""

    def _code(self) -> UserCode:
        functions, arguments = (self.settings.function_name,), self.settings.arguments
        return UserCode(
            self.settings.path, functions, GROUP_PARAMETERS, "responses", arguments, returns="scores", setting="function"
        )

    async def score(self, groups: Sequence[Group]) -> list[list[Score]]:
        return list(await asyncio.gather(*map(self._score_group, groups)))

    def _call_for(self, group: Group) -> asyncio.Future[Answer]:
        prompt, count = group.prompt, len(group.samples)
        return self._workers.call(
            self.settings.function_name,
            prompts=[prompt.messages] * count,
            responses=[sample.text for sample in group.samples],
            ground_truths=[prompt.ground_truth] * count,
            extra_infos=[dict(prompt.extra_info) for _ in group.samples],
            data_sources=[prompt.data_source] * count,
        )

    async def _score_group(self, group: Group) -> list[Score]:
        answer, count = await self._call_for(group), len(group.samples)
        entries = answer.get("entries")
        if entries is not None and len(entries) != count:
            answer = {"cause": "bad_result", "message": f"it returned {len(entries)} scores for {count} responses"}
            entries = None
        if entries is None:
            return [_as_score(answer, sample.text) for sample in group.samples]
        return [_as_score(entry, sample.text) for entry, sample in zip(entries, group.samples, strict=True)]


class LiveTRLFunction(LiveGroupFunction):
    """Calls the function once for each group, as TRL does."""

    def _code(self) -> UserCode:
        functions, arguments = (self.settings.function_name,), self.settings.arguments
        return UserCode(
            self.settings.path, functions, TRL_PARAMETERS, "", arguments,
            returns="optional scores", columns=True, setting="function",
        )  # fmt: skip

    def _call_for(self, group: Group) -> asyncio.Future[Answer]:
        prompt, samples = group.prompt, group.samples
        given, texts = prompt.messages[0]["content"] if prompt.is_text else prompt.messages, [sample.text for sample in samples]
        truth, extra = prompt.ground_truth, prompt.extra_info
        row = {"data_source": prompt.data_source, **dict.fromkeys(("ground_truth", "answer", "solution"), truth), **extra}
        tokens = (
            {} if any(isinstance(s, SavedSample) for s in samples) else {"completion_ids": [s.tokens.tolist() for s in samples]}
        )
        return self._workers.call(
            self.settings.function_name,
            columns={name: [value] * len(samples) for name, value in row.items()} | tokens,
            prompts=[given] * len(samples),
            completions=texts if prompt.is_text else [[{"role": "assistant", "content": text}] for text in texts],
        )


def _as_score(answer: Answer, text: str) -> Score:
    if "cause" in answer:
        return failed(answer["cause"], answer["message"], view=text)
    if answer["value"] is None:
        return DECLINED
    return Score(
        answer["value"],
        parts=answer.get("parts", {}),
        malformed=answer.get("malformed", False),
        view=text,
        trace=answer.get("trace", {}),
    )
