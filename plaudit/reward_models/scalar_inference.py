"""Scalar models: conversations → scores, packed into as few forward passes as possible.

Identical conversations are scored once. That saves work and makes their scores bit-identical: rounding depends on what a sequence
is packed with, and a group of identical answers whose scores differ by 1e-7 would have a standard deviation to divide by.
"""

import math
from collections.abc import Iterator, Sequence
from typing import ClassVar

from transformers import PretrainedConfig

from plaudit.data.templates import RENDER_ERRORS
from plaudit.data.transcript import Transcript
from plaudit.models.folder import require_matching_tokenizer
from plaudit.models.fused import can_fuse
from plaudit.models.scalar import ScalarModel, load_scalar, scalar_form, transcript_of
from plaudit.reward_models.backend import ScalarScore
from plaudit.reward_models.batch_bisection import bisect_failures, failure_of
from plaudit.reward_models.inference import Inference
from plaudit.reward_models.model_thread import Closed
from plaudit.rollout.native.scoring_pass import ScoringPass
from plaudit.types import Failure, Message

Conversation = list[Message]


class ScalarInference(Inference[Conversation, ScalarScore]):
    gather_s: ClassVar[float] = 0.005
    transcript: Transcript
    model: ScalarModel | None = None
    _verified = False

    def check(self, config: PretrainedConfig) -> None:
        scalar_form(self.settings, config)
        self.transcript = transcript_of(self.settings)
        require_matching_tokenizer(self.path, config, self.transcript.tokenizer)

    def load(self) -> ScalarModel:
        return load_scalar(self.settings, self.device)

    def attach(self, model: ScalarModel) -> None:
        self.model = model
        if can_fuse(model.decoder):
            model.states, self._verified = ScoringPass(model.decoder, verify=not self._verified), True

    def detach(self) -> None:
        if self.model is not None:
            self.model.states = None
        self.model = None

    def failed(self, failure: Failure) -> ScalarScore:
        return ScalarScore(None, failure)

    def compute(self, items: list[Conversation]) -> list[ScalarScore]:
        tokenised = [self._tokens(messages) for messages in items]
        unique = list(dict.fromkeys(tokens for tokens in tokenised if isinstance(tokens, tuple)))
        scores = dict(zip(unique, bisect_failures(unique, self._score, self.failed), strict=True))
        return [scores[tokens] if isinstance(tokens, tuple) else tokens for tokens in tokenised]

    def _tokens(self, messages: Conversation) -> tuple[int, ...] | ScalarScore:
        """The conversation's tokens, or the result of one that cannot be scored."""
        try:
            tokens = tuple(self.transcript.tokens(messages))
        except RENDER_ERRORS as error:
            return self.failed(Failure("render", f"the chat template cannot render these messages: {error}"))
        except Exception as error:
            return self.failed(failure_of(error))
        if not tokens:
            return self.failed(Failure("render", "the chat template renders these messages as nothing"))
        longest = self.settings.max_prompt_tokens or self.context or math.inf
        return tokens if len(tokens) <= longest else ScalarScore(None, prompt_tokens=len(tokens), too_long=True)

    def _score(self, sequences: Sequence[tuple[int, ...]]) -> Iterator[tuple[int, ScalarScore]]:
        assert self.model is not None
        for indices, values in self.model.score_in_passes(sequences):
            if self.closing():
                raise Closed("the model was closed during scoring")
            for i, value in zip(indices, values.tolist(), strict=True):
                yield i, _result(value, len(sequences[i]))


def _result(value: float, tokens: int) -> ScalarScore:
    if math.isfinite(value):
        return ScalarScore(value, prompt_tokens=tokens)
    return ScalarScore(None, Failure("not_a_number", f"the model's score is {value}"), prompt_tokens=tokens)
