"""Rewards with a model behind them: the model is opened where it would live, and asked about a good and a bad answer.

What it is asked is noted on the way, so that the page can show it as the model reads it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.text import Text

from plaudit.data.templates import RENDER_ERRORS, ChatTemplate, load_template, load_tokenizer
from plaudit.doctor.findings import Finding, quoted
from plaudit.doctor.pairs import BUILT_IN_IDS, Pair, pairs_for
from plaudit.doctor.rewards import pretended
from plaudit.doctor.watched import SLOW, Asked, Watched
from plaudit.errors import PlauditError, RecipeError, redact
from plaudit.models.folder import architecture, read_config
from plaudit.models.memory import count_parameters
from plaudit.models.scalar import Transcript
from plaudit.models.trainable import resolve_device, resolve_dtype
from plaudit.recipe.rewards import Limits, View
from plaudit.reward_models.backend import Backend, GenerationRequest, ModelInfo
from plaudit.reward_models.model_registry import build_backend
from plaudit.rewards.client import ROWS_FAULTS
from plaudit.rewards.judges.model_rewards import ModelReward, live_models_of, rewards_inside, shortened
from plaudit.rewards.judges.templates import question_of
from plaudit.rewards.reward import LiveReward
from plaudit.rewards.runner import RewardRunner
from plaudit.types import Prompt, Score

MOST_RETRIES = 1
"""Of answers that cannot be read: a doctor need not be as patient as a run."""


@dataclass(frozen=True)
class Reader:
    """What a model is asked → what it reads."""

    template: ChatTemplate | Transcript

    @property
    def tokenizer(self) -> Any:
        return self.template.tokenizer

    @property
    def template_text(self) -> str:
        return self.template.text if isinstance(self.template, ChatTemplate) else self.template.template

    def text(self, asked: Asked) -> str:
        if isinstance(asked, list):
            return self.template.render(asked)
        if asked.text is not None:
            return asked.text
        assert isinstance(self.template, ChatTemplate), "only what writes is asked questions"
        return self.template.render(asked.messages, generation_prompt=True)

    def tokens(self, asked: Asked) -> list[int]:
        return self.tokenizer(self.text(asked), add_special_tokens=False)["input_ids"]


class Patient:
    """One reward under examination."""

    def __init__(self, name: str, reward: ModelReward):
        self.name = name
        self.watched: dict[str, tuple[ModelReward, Watched]] = {}
        """The models behind it, by name: its own, and its scorer's."""
        self.reward = _calm(reward)
        self.live = self._with_backends(self._watch)
        self.readers: dict[str, Reader | None] = {}

    def _watch(self, name: str, reward: ModelReward) -> Backend:
        watched = Watched(build_backend(reward.model, scalar=reward.scalar), reward.model)
        self.watched[name] = reward, watched
        return watched

    def noting(self, backends: dict[str, Backend]) -> LiveReward:
        """The same reward, asking these about text that its view has left."""
        return self._with_backends(lambda name, _: backends[name], view=View())

    def _with_backends(self, backend: Callable[[str, ModelReward], Backend], **changed: Any) -> LiveReward:
        live = self.reward.model_copy(update=changed).build()
        for name, one in live_models_of(live, self.name):
            one.use(backend(name, one.settings))
        return live

    # Findings ---------------------------------------------------------------------------------------------------------

    def examine(self, prompts: Sequence[Prompt]) -> Iterator[Finding]:
        """Open it, say what it is, and have it score a few pairs."""
        pairs = pairs_for(self.reward, prompts)
        groups = [pretended(pair.prompt, [pair.good, pair.bad]) for pair in pairs]
        try:
            with RewardRunner([self.live], tolerant=True) as runner:
                scored = [one.by_reward[self.reward.label] for one in runner.collect(groups)]
        except PlauditError as error:
            yield "✗", f"{self.name}: {error}"
            return
        except Exception as error:  # whatever a model's folder or its code may do: the other checks are still made
            yield "✗", f"{self.name}: {type(error).__name__}: {shortened(str(error), 300)}"
            return
        for name, (reward, watched) in self.watched.items():
            yield "✓", f"{name}: {self._what_it_is(reward, watched)}"
            self.readers[name] = _reader(reward, watched.reads)
        yield from self._told(pairs, scored)

    def _what_it_is(self, reward: ModelReward, watched: Watched) -> str:
        model, reads = reward.model, watched.reads
        words = [reward.kind]
        if model.placement == "server":
            words.append(f"model {reads.name or model.path} at {', '.join(model.url)}")
        folder = model.path if model.placement != "server" else reads.weights
        words.append(_in_the_folder(folder, model.trust_remote_code) if folder else "")
        if model.placement in ("resident", "offload"):
            device = resolve_device(model.device, "model.device")
            words.append(f"{str(resolve_dtype(model.dtype, device)).removeprefix('torch.')} on {device.type}, {model.placement}")
        elif model.placement == "launch":
            words.append("a server started for it")
        words.append(f"takes {reads.context:,} tokens" if reads.context else "context unknown")
        own = "the server renders messages" if reads.template is None else "its own chat template"
        words.append(f"chat template {model.chat_template}" if model.chat_template else own)
        words.append(f"{'answers' if model.placement == 'server' else 'loaded'} after {watched.seconds:.1f} s")
        return "; ".join(word for word in words if word)

    def _told(self, pairs: Sequence[Pair], scored: Sequence[Sequence[Score]]) -> Iterator[Finding]:
        nothing = all(score.value is None for scores in scored for score in scores)
        for pair, (good, bad) in zip(pairs, scored, strict=True):
            failed = good if good.failure is not None else bad
            if failed.failure is not None:
                yield self._failed(pair, failed, nothing=nothing)
                continue
            question = quoted(question_of(pair.prompt))
            assert good.value is not None
            assert bad.value is not None
            text = f"{self.name}: {good.value:g} for {quoted(pair.good)}, {bad.value:g} for {quoted(pair.bad)}, asked {question}"
            odd = next((score.trace.get("malformed", "malformed") for score in (good, bad) if score.malformed), None)
            if odd is not None:
                yield "!", f"{text}: {odd}"
            elif good.value > bad.value:
                yield "✓", text
            else:
                yield "!", f"{text}: {'it sees no difference' if good.value == bad.value else 'it prefers the bad answer'}"

    def _failed(self, pair: Pair, score: Score, *, nothing: bool) -> Finding:
        assert score.failure is not None
        said, cause = score.trace.get("answer"), score.failure.cause
        text = f"{self.name}: no score, asked {quoted(question_of(pair.prompt))}: {cause}: {score.failure.message}"
        text += f". It said: {quoted(shortened(said, 300), 320)}" if said and cause == "unparsable" else ""
        if cause == SLOW:
            return "!", text
        if cause in ROWS_FAULTS and pair.prompt.id in BUILT_IN_IDS:
            return "!", f"{text} (a built-in question: your rows may have it)"
        return "✗" if nothing else "!", text

    # What it reads ----------------------------------------------------------------------------------------------------

    def shown(self) -> Iterator[tuple[str, Text]]:
        """What each model was asked first, as it reads it."""
        for name, (reward, watched) in self.watched.items():
            if not watched.asked:
                continue
            asked, reader = watched.asked[0], self.readers.get(name)
            try:
                if reader is not None:
                    where = "" if watched.reads.template is not None else ", rendered here as its server should"
                    yield f"What the model of reward {name} reads{where}", _marked(redact(reader.text(asked)), reader)
                    continue
            except RENDER_ERRORS:
                pass
            what = "text" if isinstance(asked, GenerationRequest) and asked.text is not None else "messages"
            yield (
                f"The {what} that reward {name} sends to {', '.join(reward.model.url)}, which renders them itself",
                Text(redact(as_sent(asked))),
            )


def _calm(reward: ModelReward) -> ModelReward:
    """A copy that neither stops a run nor goes on for long."""
    calm: dict[str, Any] = {
        "on_failure": "drop", "max_failure_rate": 1.0, "gate": None, "normalise": "none", "when": {}, "cache": False,
        "limits": Limits(give_up_after=None),
    }  # fmt: skip
    if (sampling := getattr(reward, "sampling", None)) is not None:
        calm["sampling"] = sampling.model_copy(update={"retry": min(sampling.retry, MOST_RETRIES)})
    for field, inner in rewards_inside(reward):
        if isinstance(inner, ModelReward):
            calm[field] = _calm(inner)
    return reward.model_copy(update=calm)


def _in_the_folder(path: str, trust_remote_code: bool) -> str:
    """Architecture and size, where the folder is here."""
    if not Path(path).is_dir():
        return path
    try:
        kind = architecture(read_config(path, trust_remote_code=trust_remote_code))
        return f"{kind} of {count_parameters(path):,} parameters from {path}"
    except RecipeError:
        return path


def _reader(reward: ModelReward, reads: ModelInfo) -> Reader | None:
    if reads.template is not None:
        return Reader(reads.template)
    model = reward.model
    folder = model.tokenizer or (model.path if model.placement == "launch" else reads.weights or model.path)
    if folder is None or not Path(folder).is_dir():
        return None
    try:
        return Reader(load_template(load_tokenizer(folder, trust_remote_code=model.trust_remote_code), model.chat_template))
    except RecipeError:
        return None


def _marked(text: str, reader: Reader) -> Text:
    shown = Text(text)
    shown.highlight_words([token for token in reader.tokenizer.get_added_vocab() if token], "bold magenta")
    return shown


def as_sent(asked: Asked) -> str:
    if isinstance(asked, GenerationRequest):
        if asked.text is not None:
            return asked.text
        asked = asked.messages
    return "\n\n".join(f"[{message['role']}]\n{message['content']}" for message in asked)
