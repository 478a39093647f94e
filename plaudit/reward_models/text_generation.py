"""A judge at work: prompts → answers, sampled by plaudit's own engine on the judge's own weights.

What is drawn depends on a question's key, its prompt, the seed and max_new_tokens, never on what is asked beside it. So a question
that is asked twice at once is answered once; at temperature 0 neither key nor seed matters.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any, ClassVar, NamedTuple

import numpy as np
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, PreTrainedModel

from plaudit.data.templates import RENDER_ERRORS, ChatTemplate, load_model_template
from plaudit.errors import RecipeError
from plaudit.models.folder import architecture, require_matching_tokenizer
from plaudit.models.trainable import load_policy
from plaudit.recipe import ModelSettings
from plaudit.reward_models.backend import Answer, GenerationRequest, SamplingParams
from plaudit.reward_models.batch_bisection import bisect_failures, failure_of
from plaudit.reward_models.inference import Inference
from plaudit.reward_models.model_thread import Closed
from plaudit.rollout.engine import Request, Sampling
from plaudit.rollout.native.engine import NativeEngine
from plaudit.seeding import stable_seed
from plaudit.types import Failure, Sample

Asked = tuple[GenerationRequest, SamplingParams]


class _Manner(NamedTuple):
    """Of writing: what all answers of one call of the engine have in common."""

    temperature: float
    top_p: float
    stop: tuple[str, ...]


class TextGeneration(Inference[Asked, Answer]):
    # An answer takes seconds, and what comes a moment late would wait for all of them.
    gather_s: ClassVar[float] = 0.02
    template: ChatTemplate
    engine: NativeEngine | None = None

    def check(self, config: PretrainedConfig) -> None:
        kind = architecture(config)
        if kind.endswith("ForSequenceClassification"):
            raise RecipeError(f"{self.path}: {kind} gives a number and writes nothing; use it with kind: scalar_model")
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not hasattr(config, "auto_map"):
            raise RecipeError(f"{self.path}: {kind or type(config).__name__} is no causal language model, so it cannot be a judge")
        self.template = load_model_template(self._recipe)
        require_matching_tokenizer(self.path, config, self.template.tokenizer)

    @property
    def _recipe(self) -> ModelSettings:
        s = self.settings
        return ModelSettings(
            path=self.path,
            tokenizer=s.tokenizer,
            chat_template=s.chat_template,
            dtype=s.dtype,
            trust_remote_code=s.trust_remote_code,
        )

    def read(self) -> PreTrainedModel:
        return load_policy(self._recipe, self.template, self.device).model.eval().requires_grad_(False)

    def take(self, model: PreTrainedModel) -> None:
        self.engine = NativeEngine(model, self.template.tokenizer)

    def release(self) -> None:
        self.engine = None

    def failed(self, failure: Failure) -> Answer:
        return Answer(None, failure)

    # Prompts ----------------------------------------------------------------------------------------------------------

    def compute(self, items: list[Asked]) -> list[Answer]:
        answers: list[Answer | str] = []
        """Or the request that has it."""
        calls: dict[_Manner, dict[str, Request]] = defaultdict(dict)
        for question, writing in items:
            made = self._request(question, writing)
            if isinstance(made, Request):
                calls[_Manner(writing.temperature, writing.top_p, writing.stop)][made.prompt_id] = made
            answers.append(made if isinstance(made, Answer) else made.prompt_id)
        written: dict[str, Answer] = {}
        for manner, requests in calls.items():
            of_call = bisect_failures(list(requests.values()), lambda some, manner=manner: self._write(manner, some), self.failed)
            written |= dict(zip(requests, of_call, strict=True))
        return [answer if isinstance(answer, Answer) else written[answer] for answer in answers]

    def _request(self, question: GenerationRequest, writing: SamplingParams) -> Request | Answer:
        """What the engine is asked; or what becomes of a question that it cannot be asked."""
        try:
            tokens = self._tokens(question)
        except RENDER_ERRORS as error:
            return self.failed(Failure("render", f"the chat template cannot render these messages: {error}"))
        except Exception as error:
            return self.failed(failure_of(error))
        if not tokens:
            return self.failed(Failure("empty", "the prompt is empty: there is nothing to continue"))
        limit = writing.max_new_tokens
        if self.context is not None:
            longest = self.settings.max_prompt_tokens or self.context - writing.max_new_tokens
            if longest < 1:
                message = f"max_new_tokens is {limit:,}, which leaves no room for a prompt in the judge's {self.context:,} tokens"
                return self.failed(Failure("context", message))
            limit = min(limit, self.context - len(tokens))
        else:
            longest = self.settings.max_prompt_tokens or len(tokens)
        if len(tokens) > longest or limit < 1:
            return Answer(None, prompt_tokens=len(tokens), too_long=True)
        drawn_by = (writing.seed, question.key) if writing.temperature else ()
        manner = (writing.max_new_tokens, writing.temperature, writing.top_p, *writing.stop)
        name = stable_seed(*drawn_by, repr(manner), repr(tokens), bits=128)
        return Request(f"{name:032x}", np.asarray(tokens, dtype=np.int32), max_new_tokens=limit)

    def _tokens(self, question: GenerationRequest) -> list[int]:
        if question.text is None:
            return self.template.prompt_tokens(question.messages)
        encoded: Any = self.template.tokenizer(question.text, add_special_tokens=False)
        return encoded["input_ids"]

    # Answers ----------------------------------------------------------------------------------------------------------

    def _write(self, manner: _Manner, requests: Sequence[Request]) -> Iterator[tuple[int, Answer]]:
        assert self.engine is not None
        at = {request.prompt_id: i for i, request in enumerate(requests)}
        most = max(request.max_new_tokens or 0 for request in requests)
        sampling = Sampling(most, temperature=manner.temperature, top_p=manner.top_p, stop=manner.stop)
        samples: Any = self.engine.generate(requests, sampling)
        with closing(samples):
            for sample in samples:
                i = at[sample.prompt_id]
                yield i, _answer(sample, len(requests[i].tokens), manner.stop)
                if self.closing():
                    raise Closed("the model was closed while it wrote this")


def _answer(sample: Sample, prompt_tokens: int, stop: Sequence[str]) -> Answer:
    ends = [sample.text.index(s) for s in stop if s in sample.text]
    text = sample.text[: min(ends)] if ends else sample.text
    return Answer(text, prompt_tokens=prompt_tokens, new_tokens=len(sample), truncated=sample.status == "truncated")
