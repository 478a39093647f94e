"""What all rewards have in common that ask a model: opening and closing it, filling in the prompt, asking again, keeping a trace.

An answer that cannot be read (or was cut at its length limit: its end may be anything), and a call that failed, are asked for again
at `retry_temperature`, up to `retry` times. Then it is the judge's fault: failure `unparsable`, or the call's own cause. A prompt
that is too long for the judge is the policy's fault: malformed.

Randomness is keyed by what is asked: the same prompt has the same answer, whatever its row is called and whoever asks beside it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from plaudit.files import text_digest
from plaudit.recipe import RewardSettings
from plaudit.recipe.reward_models import JudgeSampling, RewardModel
from plaudit.reward_models.backend import Answer, Backend, GenerationRequest, SamplingParams
from plaudit.reward_models.model_registry import acquire_model
from plaudit.rewards.judges.parsing import behind_thoughts
from plaudit.rewards.judges.templates import OURS, JudgeTemplate, Unrenderable
from plaudit.rewards.reward import LiveReward, Loadable, Reward
from plaudit.types import Failure, Group, Message, Prompt, Sample, Score

KEPT = 4000
"""Characters of a prompt or an answer that are kept in a trace."""
T = TypeVar("T")
What = TypeVar("What")


class ModelReward(Reward):
    """A reward with a model behind it."""

    model: RewardModel
    """Which model, where it lives, and how it is reached."""

    scalar: ClassVar[bool] = False
    """It gives numbers and does not write."""

    @property
    def waits_for_all(self) -> bool:
        return self.model.placement == "offload"

    @property
    def models(self) -> list[str]:
        return [*self.model.local_paths, *super().models]


M = TypeVar("M", bound=ModelReward)


class LiveModelReward(LiveReward[M]):
    """Its backend is shared with other rewards that use the same model, unless `use` gives it another."""

    def __init__(self, settings: M):
        super().__init__(settings)
        self._backend: Backend | None = None
        self._given = False

    @property
    def backend(self) -> Backend:
        assert self._backend is not None, "a reward is opened before it scores"
        return self._backend

    def use(self, backend: Backend) -> None:
        """Ask this one, which is not open yet, instead of the one that the settings mean."""
        self._backend = backend

    async def open(self) -> None:
        self._given = self._backend is not None
        if self._backend is None:
            self._backend = acquire_model(self.settings.model, scalar=self.settings.scalar, label=self.settings.label)
        await self._backend.open()

    async def close(self) -> None:
        if self._backend is not None:
            await self._backend.close()
            self._backend = self._backend if self._given else None

    @property
    def phases(self) -> list[Loadable | None]:
        return [self.backend.weights if self.settings.model.placement == "offload" else None]

    @property
    def served_names(self) -> list[str]:
        model = self.settings.model
        return [self.backend.name] if model.placement == "server" and model.path is None else []


def models_of(reward: RewardSettings, name: str = "") -> list[tuple[str, ModelReward]]:
    """The rewards with a model that it is, or is made of, by name; a critique's scorer goes with its critic."""
    name = name or reward.label
    if isinstance(reward, ModelReward):
        return [(name, reward)]
    return [found for field, inner in rewards_inside(reward) for found in models_of(inner, f"{name}/{field}")]


def all_models_of(reward: RewardSettings) -> list[tuple[str, ModelReward]]:
    """The same, with the scorers of critiques."""
    found = models_of(reward)
    inside = ((f"{name}/{field}", inner) for name, one in found for field, inner in rewards_inside(one))
    return [*found, *((name, inner) for name, inner in inside if isinstance(inner, ModelReward))]


def rewards_inside(reward: RewardSettings) -> list[tuple[str, Reward]]:
    fields = [(field, getattr(reward, field)) for field in type(reward).model_fields]
    return [(field, inner) for field, inner in fields if isinstance(inner, Reward)]


def live_models_of(live: LiveReward, name: str = "") -> "list[tuple[str, LiveModelReward]]":
    """The live rewards with a model that it is or is made of, with the scorers of critiques, by the same names."""
    name = name or live.settings.label
    own = [(name, live)] if isinstance(live, LiveModelReward) else []
    return own + [found for field, inner in live.inner.items() for found in live_models_of(inner, f"{name}/{field}")]


@dataclass(frozen=True)
class Reply(Generic[T]):
    """What became of one question: what was read, or why there is nothing."""

    prompt: str
    found: T | None = None
    text: str | None = None
    """The last answer, read or not."""
    failure: Failure | None = None
    too_long: bool = False
    refused: bool = False
    """Too long by a server's own word, which may be another one tomorrow."""
    tries: int = 0

    @property
    def trace(self) -> dict[str, Any]:
        return {"prompt": shortened(self.prompt), "answer": shortened(self.text or ""), "tries": self.tries}

    def unfit(self, view: str) -> Score:
        """The score of a sample when nothing was read."""
        if self.too_long:
            trace = {**self.trace, "malformed": "too long for the judge's prompt"}
            return Score(0.0, malformed=True, view=view, trace=trace, passing=self.refused)
        assert self.failure is not None
        return Score(None, failure=self.failure, view=view, trace=self.trace)


class JudgeReward(ModelReward):
    """A reward whose model writes an answer."""

    sampling: JudgeSampling = JudgeSampling()
    """How it writes."""
    template: str | None = None
    """Its prompt: a Jinja2 file of yours; default: ours. Its variables: docs/reward_models/README.md."""
    system: str | None = None
    """Text of a system message before it."""
    raw: bool = False
    """The template's text is the whole prompt, special tokens and all: the model's chat template is not used."""
    answer_after: str | None = None
    """What the judge's answer follows, such as `Answer:`; the last place counts. Thoughts up to `</think>` are always left out."""

    variables: ClassVar[frozenset[str]] = frozenset({"response"})
    """What its template may use, besides what every template may."""

    @property
    def own_template(self) -> str:
        """The name of our template for it."""
        raise NotImplementedError

    @property
    def template_file(self) -> Path:
        return OURS / f"{self.own_template}.jinja" if self.template is None else Path(self.template).expanduser()

    @property
    def files(self) -> list[Path]:
        return ([] if self.template is None else [self.template_file]) + super().files

    @property
    def own_files(self) -> list[Path]:
        return [self.template_file] if self.template is None else []


J = TypeVar("J", bound=JudgeReward)


class LiveJudgeReward(LiveModelReward[J]):
    """Renders prompts, asks its model, asks again, and reads the answers."""

    def __init__(self, settings: J):
        super().__init__(settings)
        self._template: JudgeTemplate | None = None

    async def open(self) -> None:
        self._template = JudgeTemplate(self.settings.template_file, self.settings.variables, f"reward '{self.settings.label}'")
        await super().open()

    def question(self, prompt: Prompt, vote: int = 0, **variables: Any) -> GenerationRequest:
        """The filled-in prompt. Raises Unrenderable if the row lacks what it needs."""
        assert self._template is not None, "a reward is opened before it scores"
        text = self._template.render(prompt, variables)
        system: list[Message] = [] if self.settings.system is None else [{"role": "system", "content": self.settings.system}]
        key = text_digest(f"{self.settings.sampling.seed}/{vote}/{self.settings.system}/{text}")
        messages = [] if self.settings.raw else [*system, {"role": "user", "content": text}]
        return GenerationRequest(messages, text if self.settings.raw else None, key, affinity=text_digest(prompt.id))

    async def ask(
        self, questions: Sequence[GenerationRequest], read: Callable[[int, str], T | None], *, whole: bool = True
    ) -> list[Reply[T]]:
        """A reply to each question; `read(i, answer)` says what the i-th answer means. `whole`: one that was cut is not read."""
        replies: list[Reply[T]] = [Reply(shown(question)) for question in questions]
        left = list(range(len(questions)))
        for attempt in range(self.settings.sampling.retry + 1):
            if not left:
                break
            asked = [replace(questions[i], key=f"{questions[i].key}/{attempt}") for i in left]
            answers = await self.backend.generate(asked, writing(self.settings.sampling, attempt))
            for i, answer in zip(left, answers, strict=True):
                replies[i] = self._reply(replies[i], answer, lambda text, i=i: read(i, text), whole=whole)
            left = [i for i in left if replies[i].failure is not None]
        return replies

    async def ask_each(
        self,
        groups: Sequence[Group],
        about: Sequence[What],
        question: Callable[[Prompt, Sample, What], GenerationRequest],
        read: Callable[[What, str], T | None],
        score: Callable[[list[Reply[T]], str], Score],
    ) -> list[list[Score]]:
        """A score for each sample by itself: from the replies to its questions, one about each of `about`."""
        scores: dict[tuple[int, int], Score] = {}
        asked, questions = [], []
        for g, group in enumerate(groups):
            for s, sample in enumerate(group.samples):
                try:
                    questions += [question(group.prompt, sample, what) for what in about]
                    asked.append((g, s))
                except Unrenderable as error:
                    scores[g, s] = Score(None, failure=error.failure, view=sample.text)
        replies = iter(await self.ask(questions, lambda i, text: read(about[i % len(about)], text)))
        for g, s in asked:
            scores[g, s] = score([next(replies) for _ in about], groups[g].samples[s].text)
        return [[scores[g, s] for s in range(len(group.samples))] for g, group in enumerate(groups)]

    def _reply(self, before: Reply[T], answer: Answer, read: Callable[[str], T | None], *, whole: bool) -> Reply[T]:
        reply = replace(before, text=answer.text, tries=before.tries + 1, failure=None)
        if answer.too_long:
            return replace(reply, too_long=True, refused=answer.refused)
        if answer.failure is not None:
            return replace(reply, failure=answer.failure)
        if answer.truncated and whole:
            problem = f"it was cut at {self.settings.sampling.max_new_tokens} tokens (sampling.max_new_tokens)"
        else:
            text = behind_thoughts(answer.text or "", self.settings.answer_after)
            found = None if text is None else read(text)
            if found is not None:
                return replace(reply, found=found)
            problem = f"it ends with {shortened(answer.text or '', 120)!r}"
        message = f"the judge's answer cannot be read ({reply.tries} tries): {problem}"
        return replace(reply, failure=Failure("unparsable", message))


def writing(how: JudgeSampling, attempt: int) -> SamplingParams:
    """How the answer is written, the first time or when it is asked for again."""
    temperature = how.temperature if attempt == 0 else how.retry_temperature
    return SamplingParams(how.max_new_tokens, temperature, how.top_p, how.seed, timeout_s=how.longest_s)


def shown(question: GenerationRequest) -> str:
    if question.text is not None:
        return question.text
    return "\n\n".join(str(message["content"]) for message in question.messages)


def shortened(text: str, most: int = KEPT) -> str:
    """The text, without its middle if it is long: what was asked and what was decided stand at the ends."""
    if len(text) <= most:
        return text
    begin = most // 4
    return f"{text[:begin]} […] {text[len(text) - (most - begin) :]}"
