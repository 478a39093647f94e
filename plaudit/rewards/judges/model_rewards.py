"""What rewards with a model have in common: opening and closing it, rendering prompts, retries of unreadable answers, traces.

If an answer cannot be parsed, was truncated (its end may be anything), or its call failed, another one is requested at
`retry_temperature`, up to `unreadable_retries` times. If there is still no value the judge is at fault: failure `unparsable`, or
the call's own cause. A prompt that is too long for the judge is the policy's fault: malformed.

The sampling noise is keyed by the prompt: the same prompt gets the same answer, whatever its row is called and whatever else is
scored at the same time.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

from pydantic import model_validator

from plaudit.data.control_tokens import Marked
from plaudit.files import text_digest
from plaudit.recipe import RewardSettings
from plaudit.recipe.limits import JudgeLimits, ModelLimits
from plaudit.recipe.reward_models import DIVIDED_BY_SERVER, JudgeSampling, RewardModel
from plaudit.reward_models.backend import Answer, Backend, GenerationRequest, SamplingParams, may_be_retried
from plaudit.reward_models.model_registry import acquire_model
from plaudit.rewards.judges.parsing import strip_thoughts
from plaudit.rewards.judges.templates import BUILT_IN, JudgeTemplate, Unrenderable, quoted_strings, with_prompt_of
from plaudit.rewards.reward import LiveReward, Loadable, Reward
from plaudit.turns import turns
from plaudit.types import Failure, Group, Message, Prompt, Sample, Score

MAX_TRACE_CHARS = 4000
"""Characters of a prompt or an answer that are kept in a trace."""
T = TypeVar("T")
Item = TypeVar("Item")


class ModelReward(Reward):
    """A reward with a model behind it."""

    model: RewardModel
    """Which model, where it runs, and how it is reached."""
    limits: ModelLimits = ModelLimits()  # pyright: ignore[reportIncompatibleVariableOverride]
    """Concurrency, rates, time limits, retries, and when it is given up."""

    scalar: ClassVar[bool] = False
    """The model scores and does not generate."""

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        limits, placement = self.limits, self.model.placement
        changed = {name for name in ModelLimits.server_only if getattr(limits, name) != type(limits).model_fields[name].default}
        for name in {"launch": (), "server": ModelLimits.launch_only}.get(placement, ModelLimits.server_only):
            if name in changed:
                only = "launch" if name in ModelLimits.launch_only else "server and launch"
                raise ValueError(f"limits.{name} belongs to placement: {only}, and model.placement is {placement}")
        if "sleep_timeout_s" in changed and not self.model.sleep:
            raise ValueError("limits.sleep_timeout_s has no effect without model.sleep")
        return self

    @model_validator(mode="after")
    def _check_ranks(self) -> Self:
        if isinstance(self.model.rank, tuple) and not self.scalar:
            raise ValueError(
                f"model.rank: a list divides scalar models only. For a generative model that is too large for one GPU: placement: "
                f"launch, with arguments: {DIVIDED_BY_SERVER} {len(self.model.rank)}"
            )
        return self

    @property
    def waits_for_all(self) -> bool:
        return self.model.on_device == "scoring"

    @property
    def models(self) -> list[str]:
        return [*self.model.local_paths, *super().models]


class PromptedReward(ModelReward):
    """A reward whose model reads the prompt too, the policy's or its own."""

    prompt_column: str | None = None
    """The row's column with this model's prompt (text or messages), where it differs from the policy's: such as rm_prompt_0 for one
    reward model and rm_prompt_1 for another."""

    def own_prompt(self, prompt: Prompt) -> Prompt:
        """The row as its model reads it: with the prompt of `prompt_column`. Raises Unrenderable if the row lacks that."""
        return prompt if self.prompt_column is None else with_prompt_of(prompt, self.prompt_column)


M = TypeVar("M", bound=ModelReward)


class LiveModelReward(LiveReward[M]):
    """Its backend is shared with other rewards that use the same model, unless `use` gives it another."""

    def __init__(self, settings: M):
        super().__init__(settings)
        self._backend: Backend | None = None
        self._injected = False

    @property
    def backend(self) -> Backend:
        assert self._backend is not None, "a reward is opened before it scores"
        return self._backend

    def use(self, backend: Backend) -> None:
        """Use this backend, which is not open yet, instead of the one the settings describe."""
        self._backend = backend

    async def open(self) -> None:
        self._injected = self._backend is not None
        if self._backend is None:
            self._backend = acquire_model(
                self.settings.model, self.settings.limits, scalar=self.settings.scalar, label=self.settings.label
            )
        await self._backend.open()

    async def close(self) -> None:
        if self._backend is not None:
            await self._backend.close()
            self._backend = self._backend if self._injected else None

    @property
    def phases(self) -> list[Loadable | None]:
        return [self.backend.weights if self.settings.model.on_device == "scoring" else None]

    @property
    def served_names(self) -> list[str]:
        model = self.settings.model
        return [self.backend.name] if model.placement == "server" and model.path is None else []


def find_model_rewards(reward: RewardSettings, name: str = "") -> list[tuple[str, ModelReward]]:
    """The reward itself or the rewards inside it that have a model, by name; without the scorers of critiques."""
    name = name or reward.label
    if isinstance(reward, ModelReward):
        return [(name, reward)]
    return [pair for field, inner in inner_rewards(reward) for pair in find_model_rewards(inner, f"{name}/{field}")]


def find_all_model_rewards(reward: RewardSettings) -> list[tuple[str, ModelReward]]:
    """The same, with the scorers of critiques."""
    outer = find_model_rewards(reward)
    nested = ((f"{name}/{field}", inner) for name, one in outer for field, inner in inner_rewards(one))
    return [*outer, *((name, inner) for name, inner in nested if isinstance(inner, ModelReward))]


def inner_rewards(reward: RewardSettings) -> list[tuple[str, Reward]]:
    fields = [(field, getattr(reward, field)) for field in type(reward).model_fields]
    return [(field, inner) for field, inner in fields if isinstance(inner, Reward)]


def find_live_model_rewards(live: LiveReward, name: str = "") -> "list[tuple[str, LiveModelReward]]":
    """The live rewards with a model, with the scorers of critiques, by the same names."""
    name = name or live.settings.label
    outer = [(name, live)] if isinstance(live, LiveModelReward) else []
    return outer + [pair for field, inner in live.inner.items() for pair in find_live_model_rewards(inner, f"{name}/{field}")]


@dataclass(frozen=True)
class Reply(Generic[T]):
    """The outcome of one request: the parsed value, or why there is none."""

    prompt: str
    value: T | None = None
    text: str | None = None
    """The last answer, parsed or not."""
    failure: Failure | None = None
    too_long: bool = False
    refused: bool = False
    """Too long by the server's own limit, which may change."""
    tries: int = 0

    @property
    def trace(self) -> dict[str, Any]:
        return {"prompt": shortened(self.prompt), "answer": shortened(self.text or ""), "tries": self.tries}

    def failed_score(self, view: str) -> Score:
        """The score of a sample for which there is no value."""
        if self.too_long:
            trace = {**self.trace, "malformed": "too long for the judge's prompt"}
            return Score(0.0, malformed=True, view=view, trace=trace, transient=self.refused)
        assert self.failure is not None
        return Score(None, failure=self.failure, view=view, trace=self.trace)


class JudgeReward(PromptedReward):
    """A reward whose model generates an answer."""

    sampling: JudgeSampling = JudgeSampling()
    """How its answers are sampled."""
    limits: JudgeLimits = JudgeLimits()  # pyright: ignore[reportIncompatibleVariableOverride]
    """Concurrency, rates, time limits, retries, and when it is given up."""
    template: str | None = None
    """Its prompt: your own Jinja2 file; default: the built-in one. Variables: docs/reward_models/README.md."""
    system: str | None = None
    """System message before the prompt."""
    raw: bool = False
    """The template renders the complete prompt, special tokens included; the model's chat template is not used."""
    answer_after: str | None = None
    """Marker before the judge's answer, such as `Answer:`; its last occurrence counts. Thoughts up to `</think>` are always
    skipped."""

    variables: ClassVar[frozenset[str]] = frozenset({"response"})
    """Variables of its template, besides those of every template."""

    @property
    def default_template(self) -> str:
        """The name of the built-in template."""
        raise NotImplementedError

    @property
    def template_file(self) -> Path:
        return BUILT_IN / f"{self.default_template}.jinja" if self.template is None else Path(self.template).expanduser()

    @property
    def files(self) -> list[Path]:
        return ([] if self.template is None else [self.template_file]) + super().files

    @property
    def own_files(self) -> list[Path]:
        return [self.template_file] if self.template is None else []


J = TypeVar("J", bound=JudgeReward)


class LiveJudgeReward(LiveModelReward[J]):
    """Renders prompts, requests answers and parses them, with retries."""

    def __init__(self, settings: J):
        super().__init__(settings)
        self._template: JudgeTemplate | None = None

    async def open(self) -> None:
        self._template = JudgeTemplate(self.settings.template_file, self.settings.variables, f"reward '{self.settings.label}'")
        await super().open()

    async def build_request(self, prompt: Prompt, vote: int = 0, **variables: Any) -> GenerationRequest:
        """The rendered prompt. Raises Unrenderable if the row lacks something the template needs."""
        assert self._template is not None, "a reward is opened before it scores"
        if (turn := turns()).over:
            await turn.take()
        prompt = self.settings.own_prompt(prompt)
        text = self._template.render(prompt, variables)
        system: list[Message] = [] if self.settings.system is None else [{"role": "system", "content": self.settings.system}]
        key = text_digest(f"{self.settings.sampling.seed}/{vote}/{self.settings.system}/{text}")
        if self.settings.raw:
            return GenerationRequest([], text, marked=self._marked(prompt, variables), key=key, affinity=text_digest(prompt.id))
        return GenerationRequest([*system, {"role": "user", "content": text}], key=key, affinity=text_digest(prompt.id))

    def _marked(self, prompt: Prompt, variables: dict[str, Any]) -> Marked | None:
        """A raw prompt in which only the template's own control tokens are any, not those of the row or the responses."""
        assert self._template is not None
        control_tokens = self.backend.control_tokens
        quoting = control_tokens and control_tokens.quoting(quoted_strings(prompt, variables))
        return None if quoting is None else Marked(self._template.render(prompt, variables, quoting), quoting.mark)

    async def query(
        self, requests: Sequence[GenerationRequest], parse: Callable[[int, str], T | None], *, complete: bool = True
    ) -> list[Reply[T]]:
        """A reply to each request; `parse(i, answer)` parses the i-th answer. `complete`: truncated answers are not parsed."""
        turn = turns()
        replies: list[Reply[T]] = [Reply(prompt_text(request)) for request in requests]
        left = list(range(len(requests)))
        for attempt in range(self.settings.limits.unreadable_retries + 1):
            if not left:
                break
            batch = [replace(requests[i], key=f"{requests[i].key}/{attempt}") for i in left]
            answers = await self.backend.generate(batch, sampling_params(self.settings.sampling, self.settings.limits, attempt))
            for i, answer in zip(left, answers, strict=True):
                if turn.over:
                    await turn.take()
                replies[i] = self._reply(replies[i], answer, lambda text, i=i: parse(i, text), complete=complete)
            left = [i for i in left if may_be_retried(replies[i].failure)]
        return replies

    async def score_each(
        self,
        groups: Sequence[Group],
        items: Sequence[Item],
        request: Callable[[Prompt, Sample, Item], Awaitable[GenerationRequest]],
        parse: Callable[[Item, str], T | None],
        score: Callable[[list[Reply[T]], str], Score],
    ) -> list[list[Score]]:
        """Scores each sample independently, from the replies to one request per item (a vote, a criterion)."""
        scores: dict[tuple[int, int], Score] = {}
        rendered, requests = [], []
        for g, group in enumerate(groups):
            for s, sample in enumerate(group.samples):
                try:
                    requests += [await request(group.prompt, sample, item) for item in items]
                    rendered.append((g, s))
                except Unrenderable as error:
                    scores[g, s] = Score(None, failure=error.failure, view=sample.text)
        replies = iter(await self.query(requests, lambda i, text: parse(items[i % len(items)], text)))
        for g, s in rendered:
            scores[g, s] = score([next(replies) for _ in items], groups[g].samples[s].text)
        return [[scores[g, s] for s in range(len(group.samples))] for g, group in enumerate(groups)]

    def _reply(self, previous: Reply[T], answer: Answer, parse: Callable[[str], T | None], *, complete: bool) -> Reply[T]:
        reply = replace(previous, text=answer.text, tries=previous.tries + 1, failure=None)
        if answer.too_long:
            return replace(reply, too_long=True, refused=answer.refused)
        if answer.failure is not None:
            return replace(reply, failure=answer.failure)
        if answer.truncated and complete:
            problem = f"it was truncated at {self.settings.sampling.max_new_tokens} tokens (sampling.max_new_tokens)"
        else:
            text = strip_thoughts(answer.text or "", self.settings.answer_after)
            value = None if text is None else parse(text)
            if value is not None:
                return replace(reply, value=value)
            problem = f"it ends with {shortened(answer.text or '', 120)!r}"
        message = f"the judge's answer cannot be parsed ({reply.tries} attempts): {problem}"
        return replace(reply, failure=Failure("unparsable", message))


def sampling_params(sampling: JudgeSampling, limits: JudgeLimits, attempt: int) -> SamplingParams:
    """How an answer is sampled, at first or in a retry."""
    temperature = sampling.temperature if attempt == 0 else limits.retry_temperature
    timeout_s = limits.call_timeout_s(sampling.max_new_tokens)
    return SamplingParams(sampling.max_new_tokens, temperature, sampling.top_p, sampling.seed, timeout_s=timeout_s)


def prompt_text(request: GenerationRequest) -> str:
    if request.text is not None:
        return request.text
    return "\n\n".join(str(message["content"]) for message in request.messages)


def shortened(text: str, max_chars: int = MAX_TRACE_CHARS) -> str:
    """The text without its middle if it is long: the task is at the start, the verdict at the end."""
    if len(text) <= max_chars:
        return text
    start = max_chars // 4
    return f"{text[:start]} […] {text[len(text) - (max_chars - start) :]}"
