"""Checks of rewards with a model: the model is opened as in training and scores sanity pairs.

Its inputs are recorded, so that the report can show the first one as the model reads it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.text import Text

from plaudit.data.templates import RENDER_ERRORS, ChatTemplate, load_template, load_tokenizer
from plaudit.data.transcript import Transcript
from plaudit.doctor.findings import Excerpt, Finding, quoted
from plaudit.doctor.recording import SLOW, ModelInput, RecordingBackend
from plaudit.doctor.rewards import synthetic_group
from plaudit.doctor.sanity_pairs import BUILT_IN_IDS, Pair, make_pairs
from plaudit.errors import PlauditError, RecipeError, TrainingStopped
from plaudit.models.devices import resolve_device
from plaudit.models.folder import architecture, read_config
from plaudit.models.memory import count_parameters
from plaudit.models.scalar import scalar_blocks
from plaudit.models.trainable import resolve_dtype
from plaudit.recipe.limits import JudgeLimits, Limits
from plaudit.recipe.model_owners import deal_models, models_of
from plaudit.recipe.reward_models import EmbeddingModel
from plaudit.recipe.rewards import RewardSettings, View
from plaudit.redaction import redact
from plaudit.reward_models.backend import Backend, GenerationRequest, ModelInfo
from plaudit.reward_models.divided import require_several_processes
from plaudit.reward_models.model_registry import build_backend
from plaudit.rewards.client import ROW_FAULTS
from plaudit.rewards.judges.model_rewards import ModelReward, find_live_model_rewards, inner_rewards, shortened
from plaudit.rewards.judges.templates import question_of
from plaudit.rewards.reward import LiveReward
from plaudit.rewards.runner import RewardRunner
from plaudit.types import Prompt, Score

MAX_RETRIES = 1
"""Retries of unparsable answers: enough for a check, whatever the recipe allows."""


@dataclass(frozen=True)
class InputRenderer:
    """Renders a model's input to the text and tokens that it reads."""

    template: ChatTemplate | Transcript

    @property
    def tokenizer(self) -> Any:
        return self.template.tokenizer

    @property
    def template_text(self) -> str:
        return self.template.text if isinstance(self.template, ChatTemplate) else self.template.template

    def text(self, model_input: ModelInput) -> str:
        if isinstance(model_input, list):
            return self.template.render(model_input)
        if model_input.text is not None:
            return model_input.text
        assert isinstance(self.template, ChatTemplate), "only generative models take requests"
        return self.template.render(model_input.messages, generation_prompt=True)

    def tokens(self, model_input: ModelInput) -> list[int]:
        if isinstance(model_input, list):
            template = self.template
            return template.tokens(model_input) if isinstance(template, Transcript) else template.conversation_tokens(model_input)
        if model_input.text is not None:
            return self.template.control_tokens.text_tokens(model_input.marked or model_input.text)
        assert isinstance(self.template, ChatTemplate), "only generative models take requests"
        return self.template.prompt_tokens(model_input.messages)


class ModelRewardCheck:
    """The check of one reward with its models."""

    def __init__(self, name: str, reward: ModelReward):
        self.name = name
        self.backends: dict[str, tuple[ModelReward, RecordingBackend]] = {}
        """Its models by name: its own, and its scorer's."""
        self.reward = _lenient_copy(reward)
        self.live = self._build(self._record)
        self.renderers: dict[str, InputRenderer | None] = {}

    def _record(self, name: str, reward: ModelReward) -> Backend:
        backend = RecordingBackend(build_backend(reward.model, reward.limits, scalar=reward.scalar), reward.model, reward.limits)
        self.backends[name] = reward, backend
        return backend

    def with_backends(self, backends: dict[str, Backend]) -> LiveReward:
        """The same reward with other backends and without its view, for responses that stand for extracted text."""
        return self._build(lambda name, _: backends[name], view=View())

    def _build(self, backend: Callable[[str, ModelReward], Backend], **overrides: Any) -> LiveReward:
        live = self.reward.model_copy(update=overrides).build()
        for name, model in find_live_model_rewards(live, self.name):
            model.use(backend(name, model.settings))
        return live

    # Findings ---------------------------------------------------------------------------------------------------------

    def run(self, prompts: Sequence[Prompt]) -> Iterator[Finding]:
        """Open the models, describe them, and score a few sanity pairs."""
        pairs = make_pairs(self.reward, prompts)
        groups = [synthetic_group(pair.prompt, [pair.good, pair.bad]) for pair in pairs]
        try:
            with RewardRunner([self.live], tolerant=True) as runner:
                scored = [group.by_reward[self.reward.label] for group in runner.collect(groups)]
        except TrainingStopped as error:  # a rejected key; nothing is trained here, so there is nothing to resume
            yield "✗", f"{self.name}: {error.failed[-1]['message'] if error.failed else error}"
            return
        except PlauditError as error:
            yield "✗", f"{self.name}: {error}"
            return
        except Exception as error:  # a broken folder or remote code must not stop the other checks
            yield "✗", f"{self.name}: {type(error).__name__}: {shortened(str(error), 300)}"
            return
        for name, (reward, backend) in self.backends.items():
            yield "✓", f"{name}: {self._description(reward, backend)}"
            self.renderers[name] = _renderer(reward, backend.model_info)
        yield from self._compare(pairs, scored)

    def _description(self, reward: ModelReward, backend: RecordingBackend) -> str:
        model, info = reward.model, backend.model_info
        facts = [reward.kind]
        if model.placement == "server":
            facts.append(f"model {info.name or model.path} at {', '.join(model.url)}")
        folder = model.path if model.placement != "server" else info.weights
        facts.append(_architecture(folder, model.trust_remote_code) if folder else "")
        if model.placement in ("resident", "offload"):
            device = resolve_device(model.device, "model.device")
            facts.append(f"{str(resolve_dtype(model.dtype, device)).removeprefix('torch.')} on {device.type}, {model.placement}")
            if isinstance(model.rank, tuple):
                ranks = zip(model.rank, scalar_blocks(model), strict=True)
                facts.append(f"divided: {', '.join(f'{block} on rank {rank}' for rank, block in ranks)}")
        elif model.placement == "launch":
            facts.append("in a launched server")
        if model.gpus is not None:
            facts.append(f"in the run on {model.gpus} GPU{'s' if model.gpus > 1 else ''} of its own")
        facts.append(f"context {info.context:,} tokens" if info.context else "context unknown")
        if not isinstance(model, EmbeddingModel):
            default = "messages rendered by the server" if info.template is None else "its own chat template"
            facts.append(f"chat template {model.chat_template}" if model.chat_template else default)
        facts.append(f"{'responded' if model.placement == 'server' else 'loaded'} in {backend.load_s:.1f} s")
        return "; ".join(fact for fact in facts if fact)

    def _compare(self, pairs: Sequence[Pair], scored: Sequence[Sequence[Score]]) -> Iterator[Finding]:
        all_failed = all(score.value is None for scores in scored for score in scores)
        for pair, (good, bad) in zip(pairs, scored, strict=True):
            failed = good if good.failure is not None else bad
            if failed.failure is not None:
                yield self._failure(pair, failed, all_failed=all_failed)
                continue
            question = quoted(question_of(pair.prompt))
            assert good.value is not None
            assert bad.value is not None
            text = f"{self.name}: {good.value:g} for {quoted(pair.good)}, {bad.value:g} for {quoted(pair.bad)}, to {question}"
            malformed = next((score.trace.get("malformed", "malformed") for score in (good, bad) if score.malformed), None)
            if malformed is not None:
                yield "!", f"{text}: {malformed}"
            elif good.value > bad.value:
                yield "✓", text
            else:
                yield "!", f"{text}: {'it sees no difference' if good.value == bad.value else 'it prefers the bad answer'}"

    def _failure(self, pair: Pair, score: Score, *, all_failed: bool) -> Finding:
        assert score.failure is not None
        answer, cause = score.trace.get("answer"), score.failure.cause
        text = f"{self.name}: no score for {quoted(question_of(pair.prompt))}: {cause}: {score.failure.message}"
        text += f". Its answer: {quoted(shortened(answer, 300), 320)}" if answer and cause == "unparsable" else ""
        if cause == SLOW:
            return "!", text
        if cause in ROW_FAULTS and pair.prompt.id in BUILT_IN_IDS:
            return "!", f"{text} (a built-in question: your rows may have it)"
        return "✗" if all_failed else "!", text

    # Recorded inputs --------------------------------------------------------------------------------------------------

    def first_inputs(self) -> Iterator[Excerpt]:
        """Each model's first input as the model reads it."""
        for name, (reward, backend) in self.backends.items():
            if not backend.inputs or isinstance(reward.model, EmbeddingModel):
                continue
            first, renderer = backend.inputs[0], self.renderers.get(name)
            try:
                if renderer is not None:
                    note = "" if backend.model_info.template is not None else ", rendered locally as its server should"
                    text = _highlight(redact(renderer.text(first)), renderer)
                    yield Excerpt(f"What the model of reward {name} reads{note}", text)
                    continue
            except RENDER_ERRORS:
                pass
            content = "text" if isinstance(first, GenerationRequest) and first.text is not None else "messages"
            title = f"The {content} that reward {name} sends to {', '.join(reward.model.url)}, rendered by the server"
            yield Excerpt(title, Text(redact(plain_text(first))))


def check_ranks(rewards: Sequence[RewardSettings], size: int, *, training: bool) -> Iterator[Finding]:
    """Whether there are processes with the ranks that `model.rank` names."""
    if size > 1:
        deal_models(models_of(rewards), size)
        return
    for model, _ in models_of(rewards):
        try:
            require_several_processes(model)
        except RecipeError as error:
            yield "!" if training else "✗", str(error)


def _lenient_copy(reward: ModelReward) -> ModelReward:
    """A copy that never stops on failures and retries little."""
    overrides: dict[str, Any] = {
        "on_failure": "drop", "max_failure_rate": 1.0, "gate": None, "normalise": "none", "when": {}, "cache": False,
    }  # fmt: skip
    limits: dict[str, Any] = {**Limits().model_dump(), "give_up_after": None}
    if isinstance(reward.limits, JudgeLimits):
        limits["unreadable_retries"] = min(reward.limits.unreadable_retries, MAX_RETRIES)
    overrides["limits"] = reward.limits.model_copy(update=limits)
    for field, inner in inner_rewards(reward):
        if isinstance(inner, ModelReward):
            overrides[field] = _lenient_copy(inner)
    return reward.model_copy(update=overrides)


def _architecture(path: str, trust_remote_code: bool) -> str:
    """Architecture and size of a local folder; the bare path otherwise."""
    if not Path(path).is_dir():
        return path
    try:
        kind = architecture(read_config(path, trust_remote_code=trust_remote_code))
        return f"{kind} with {count_parameters(path):,} parameters from {path}"
    except RecipeError:
        return path


def _renderer(reward: ModelReward, info: ModelInfo) -> InputRenderer | None:
    if info.template is not None:
        return InputRenderer(info.template)
    model = reward.model
    if isinstance(model, EmbeddingModel):
        return None  # it reads texts as they are
    folder = model.tokenizer or (model.path if model.placement == "launch" else info.weights or model.path)
    if folder is None or not Path(folder).is_dir():
        return None
    try:
        return InputRenderer(load_template(load_tokenizer(folder, trust_remote_code=model.trust_remote_code), model.chat_template))
    except RecipeError:
        return None


def _highlight(text: str, renderer: InputRenderer) -> Text:
    """The text with special tokens highlighted."""
    highlighted = Text(text)
    highlighted.highlight_words([token for token in renderer.tokenizer.get_added_vocab() if token], "bold magenta")
    return highlighted


def plain_text(model_input: ModelInput) -> str:
    if isinstance(model_input, GenerationRequest):
        if model_input.text is not None:
            return model_input.text
        model_input = model_input.messages
    return "\n\n".join(f"[{message['role']}]\n{message['content']}" for message in model_input)
