"""A plugin file of VeRL-with-RMs, unchanged: `rm_preprocess` writes the reward model's inputs, `rm_postprocess` parses its answers.

    inputs = rm_preprocess(text_prompts, text_responses, tgt_tokenizer)       lists of texts → list of texts
    scores = rm_postprocess(results)                                          list of the model's answers → list of numbers

text_prompts are the rows' `prompt_column` (which may be empty); by default `rm_prompt`, or the last user message where a row has
none. text_responses are the responses as the reward's view leaves them; tgt_tokenizer is the reward model's. An input is the
model's complete prompt, special tokens included; messages are rendered with its chat template. Both functions get the samples of
one group at a time.

Differs from the original: the functions run in worker processes with a time limit, like every user function. If a call for several
samples raises or hangs, each sample is tried alone, so that one bad response fails by itself. A sample whose score is not a number
is retried at `retry_temperature`. A file that keeps state between the two functions needs
`limits: {max_concurrent_groups: 1}`.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import PositiveFloat, PositiveInt

from plaudit.data.control_tokens import Marked
from plaudit.files import text_digest
from plaudit.lora_folder import with_tokenizer
from plaudit.recipe.limits import JudgeLimits
from plaudit.recipe.reward_models import JudgeSampling, RewardModel
from plaudit.reward_models.backend import GenerationRequest, may_be_retried
from plaudit.rewards.functions.worker_pool import UserCode, WorkerPool
from plaudit.rewards.judges.model_rewards import LiveModelReward, PromptedReward, Reply, prompt_text, sampling_params
from plaudit.rewards.judges.templates import Unrenderable, given_prompt, question_of
from plaudit.rewards.reward import failed
from plaudit.types import Failure, Group, Prompt, Score

FUNCTIONS = ("rm_preprocess", "rm_postprocess")
Entry = dict[str, Any]
"""One entry of a returned list: `text`, `messages` or `value`; or `cause` and `message`."""


class PluginLimits(JudgeLimits):
    function_timeout_s: PositiveFloat = 60.0
    """Time limit for one call of a function; then its process is killed."""
    worker_memory_gb: PositiveFloat | None = 4.0
    """Memory of one worker process with its children (GB in RAM); when it is exceeded, they are killed and the call has failed.
    null for no limit."""


class Plugin(PromptedReward):
    kind: Literal["plugin"]
    """A file with rm_preprocess and rm_postprocess, around a generating reward model."""
    path: str
    """The Python file. It can import modules from its folder."""
    sampling: JudgeSampling = JudgeSampling()
    """How the model writes."""
    limits: PluginLimits = PluginLimits()  # pyright: ignore[reportIncompatibleVariableOverride]
    """Concurrency, rates, time limits, retries, and when it is given up."""
    workers: PositiveInt = 1
    """Processes that call the functions in parallel."""

    @property
    def files(self) -> list[Path]:
        return [Path(self.path).expanduser(), *super().files]

    def build(self) -> "LivePlugin":
        return LivePlugin(self)


class LivePlugin(LiveModelReward[Plugin]):
    def __init__(self, settings: Plugin):
        super().__init__(settings)
        trusted = settings.model.trust_remote_code
        code = UserCode(settings.path, FUNCTIONS, returns="list", tokenizer=_tokenizer(settings.model), trust_remote_code=trusted)
        limits = settings.limits
        self._workers = WorkerPool(
            code, settings.label, count=settings.workers, timeout_s=limits.function_timeout_s, memory_gb=limits.worker_memory_gb
        )

    async def open(self) -> None:
        await self._workers.open()
        await super().open()

    async def close(self) -> None:
        await self._workers.close()
        await super().close()

    async def score(self, groups: Sequence[Group]) -> list[list[Score]]:
        return list(await asyncio.gather(*map(self._score, groups)))

    async def _score(self, group: Group) -> list[Score]:
        try:
            prompt = _rm_prompt(group.prompt, self.settings.prompt_column)
        except Unrenderable as error:
            return [Score(None, failure=error.failure, view=sample.text) for sample in group.samples]
        responses = [sample.text for sample in group.samples]
        # A complete prompt comes back as text, in which only marks show what it quotes; honest responses contain no control tokens.
        control_tokens = self.backend.control_tokens
        quoting = control_tokens and control_tokens.quoting([prompt, *responses])
        if quoting is not None:
            prompt, responses = quoting(prompt), list(map(quoting, responses))
        inputs = await self._call("rm_preprocess", [prompt] * len(responses), responses, pass_tokenizer=True)
        scores: dict[int, Score] = {}
        requests: dict[int, GenerationRequest] = {}
        for i, (entry, sample) in enumerate(zip(inputs, group.samples, strict=True)):
            request = _request(entry, group.prompt, self.settings.sampling.seed, quoting.mark if quoting else "")
            if isinstance(request, Failure):
                scores[i] = failed(request.cause, f"rm_preprocess: {request.message}", sample.text)
            else:
                requests[i] = request
        for attempt in range(self.settings.limits.unreadable_retries + 1):
            left = {i: request for i, request in requests.items() if i not in scores or may_be_retried(scores[i].failure)}
            if not left:
                break
            scores |= await self._query(group, left, attempt)
        return [scores[i] for i in range(len(group.samples))]

    async def _query(self, group: Group, requests: dict[int, GenerationRequest], attempt: int) -> dict[int, Score]:
        queries = [replace(request, key=f"{request.key}/{attempt}") for request in requests.values()]
        answers = dict(
            zip(
                requests,
                await self.backend.generate(queries, sampling_params(self.settings.sampling, self.settings.limits, attempt)),
                strict=True,
            )
        )
        readable = {i: answer.text for i, answer in answers.items() if answer.text is not None and answer.failure is None}
        entries = dict(zip(readable, await self._call("rm_postprocess", list(readable.values())), strict=True))
        scores: dict[int, Score] = {}
        for i, answer in answers.items():
            reply: Reply[Any] = Reply(
                prompt_text(requests[i]), None, answer.text, answer.failure, answer.too_long, answer.refused, attempt + 1
            )
            view = group.samples[i].text
            if i not in entries:
                scores[i] = reply.failed_score(view)
            elif "value" in (entry := entries[i]):
                scores[i] = Score(entry["value"], entry.get("parts", {}), entry.get("malformed", False), None, view, reply.trace)
            else:
                cause, message = entry.get("cause", "not_a_number"), entry.get("message", f"it gave {entry.get('text')!r:.100}")
                failure = Failure(cause, f"rm_postprocess: {message}")
                scores[i] = Score(None, failure=failure, view=view, trace=reply.trace)
        return scores

    async def _call(self, function: str, *lists: Sequence[Any], pass_tokenizer: bool = False) -> list[Entry]:
        """One entry per sample; if the call for all of them fails, each sample is tried alone."""
        if not lists[0]:
            return []
        answer = await self._workers.call(function, *map(list, lists), pass_tokenizer=pass_tokenizer)
        entries: list[Entry] | None = answer.get("entries")
        if entries is not None and len(entries) == len(lists[0]):
            return entries
        if entries is not None:
            answer = {"cause": "bad_result", "message": f"it gave {len(entries)} entries for {len(lists[0])}"}
        if len(lists[0]) == 1:
            return [answer]
        alone = [
            self._call(function, *([item] for item in items), pass_tokenizer=pass_tokenizer) for items in zip(*lists, strict=True)
        ]
        return [entry for entries in await asyncio.gather(*alone) for entry in entries]


def _tokenizer(model: RewardModel) -> str | None:
    """The reward model's tokenizer; None for a server's model, unless the recipe says where to find it."""
    if model.tokenizer is not None or model.placement != "server":
        name = model.tokenizer or model.path
        return None if name is None else with_tokenizer(name)
    return model.path if model.path is not None and Path(model.path).is_dir() else None


def _rm_prompt(prompt: Prompt, column: str | None) -> str:
    """The prompt for the model's inputs, which the file may ignore. Raises Unrenderable if the row lacks the column."""
    given = prompt.extra_info.get("rm_prompt") if column is None else given_prompt(prompt, column)
    if isinstance(given, list):
        return "\n".join(str(message.get("content", "")) if isinstance(message, dict) else str(message) for message in given)
    return question_of(prompt) if given is None else str(given)


def _request(entry: Entry, prompt: Prompt, seed: int, mark: str) -> GenerationRequest | Failure:
    """`mark`: in the control tokens that the entry quotes, if there are any."""
    if "cause" in entry:
        return Failure(entry["cause"], entry["message"])
    text, messages = entry.get("text"), entry.get("messages")
    if text is None and messages is None:
        return Failure("bad_result", f"it gave {entry.get('value')!r}, not a text")
    marked = Marked(text, mark) if text is not None and mark else None
    text = marked.unmarked if marked is not None else text
    messages = (
        [{**message, "content": str(message["content"]).replace(mark, "")} for message in messages or []] if mark else messages
    )
    key = text_digest(f"{seed}/{text}/{messages}")
    return GenerationRequest(messages or [], text, marked=marked, key=key, affinity=text_digest(prompt.id))
