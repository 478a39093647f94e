"""Generative models: prompts → answers, sampled with plaudit's own engine.

An answer depends on the request's key, its prompt, the seed and max_new_tokens, never on the rest of the batch. So duplicate
requests in a batch are computed once; at temperature 0 neither key nor seed matters.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
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

Item = tuple[GenerationRequest, SamplingParams]


class _BatchParams(NamedTuple):
    """What all requests of one engine call have in common."""

    temperature: float
    top_p: float
    stop: tuple[str, ...]


class TextGeneration(Inference[Item, Answer]):
    # A batch takes seconds, so a request that comes a moment late would wait long.
    gather_s: ClassVar[float] = 0.02
    template: ChatTemplate
    engine: NativeEngine | None = None

    def check(self, config: PretrainedConfig) -> None:
        kind = architecture(config)
        if kind.endswith("ForSequenceClassification"):
            raise RecipeError(f"{self.path}: {kind} scores and does not generate; use it with kind: scalar_model")
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not hasattr(config, "auto_map"):
            raise RecipeError(
                f"{self.path}: {kind or type(config).__name__} is not a causal language model, so it cannot be a judge"
            )
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

    def load(self) -> PreTrainedModel:
        return load_policy(self._recipe, self.template, self.device).model.eval().requires_grad_(False)

    def attach(self, model: PreTrainedModel) -> None:
        self.engine = NativeEngine(model, self.template.tokenizer, packs=False)  # what is judged together is up to chance

    def detach(self) -> None:
        self.engine = None

    def failed(self, failure: Failure) -> Answer:
        return Answer(None, failure)

    # Prompts ----------------------------------------------------------------------------------------------------------

    def compute(self, items: list[Item]) -> list[Answer]:
        answers: list[Answer | str] = []
        """Or the id of the engine request that produces it."""
        batches: dict[_BatchParams, dict[str, Request]] = defaultdict(dict)
        for request, params in items:
            prepared = self._engine_request(request, params)
            if isinstance(prepared, Request):
                batches[_BatchParams(params.temperature, params.top_p, params.stop)][prepared.prompt_id] = prepared
            answers.append(prepared if isinstance(prepared, Answer) else prepared.prompt_id)
        generated: dict[str, Answer] = {}
        for params, requests in batches.items():
            results = bisect_failures(list(requests.values()), partial(self._generate, params), self.failed)
            generated |= dict(zip(requests, results, strict=True))
        return [answer if isinstance(answer, Answer) else generated[answer] for answer in answers]

    def _engine_request(self, request: GenerationRequest, params: SamplingParams) -> Request | Answer:
        """The request for the engine, or the result of one that cannot be made."""
        try:
            tokens = self._tokens(request)
        except RENDER_ERRORS as error:
            return self.failed(Failure("render", f"the chat template cannot render these messages: {error}"))
        except Exception as error:
            return self.failed(failure_of(error))
        if not tokens:
            return self.failed(Failure("empty", "the prompt is empty"))
        limit = params.max_new_tokens
        if self.context is not None:
            longest = self.settings.max_prompt_tokens or self.context - params.max_new_tokens
            if longest < 1:
                message = f"max_new_tokens is {limit:,}, which leaves no room for a prompt in a context of {self.context:,}"
                return self.failed(Failure("context", message))
            limit = min(limit, self.context - len(tokens))
        else:
            longest = self.settings.max_prompt_tokens or len(tokens)
        if len(tokens) > longest or limit < 1:
            return Answer(None, prompt_tokens=len(tokens), too_long=True)
        noise_key = (params.seed, request.key) if params.temperature else ()
        settings = (params.max_new_tokens, params.temperature, params.top_p, *params.stop)
        name = stable_seed(*noise_key, repr(settings), repr(tokens), bits=128)
        return Request(f"{name:032x}", np.asarray(tokens, dtype=np.int32), max_new_tokens=limit)

    def _tokens(self, request: GenerationRequest) -> list[int]:
        if request.text is None:
            return self.template.prompt_tokens(request.messages)
        return self.template.control_tokens.text_tokens(request.marked or request.text)

    # Answers ----------------------------------------------------------------------------------------------------------

    def _generate(self, params: _BatchParams, requests: Sequence[Request]) -> Iterator[tuple[int, Answer]]:
        assert self.engine is not None
        index = {request.prompt_id: i for i, request in enumerate(requests)}
        longest = max(request.max_new_tokens or 0 for request in requests)
        sampling = Sampling(longest, temperature=params.temperature, top_p=params.top_p, stop=params.stop)
        samples: Any = self.engine.generate(requests, sampling)
        with closing(samples):
            for sample in samples:
                i = index[sample.prompt_id]
                yield i, _answer(sample, len(requests[i].tokens), params.stop)
                if self.closing():
                    raise Closed("the model was closed during generation")


def _answer(sample: Sample, prompt_tokens: int, stop: Sequence[str]) -> Answer:
    ends = [sample.text.index(s) for s in stop if s in sample.text]
    text = sample.text[: min(ends)] if ends else sample.text
    return Answer(text, prompt_tokens=prompt_tokens, new_tokens=len(sample), truncated=sample.status == "truncated")
