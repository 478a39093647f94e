"""Scalar models: conversations → scores, packed into as few forward passes as possible. They are tokenised in a thread of their
own, while the device computes those before.

Identical conversations are scored once. That saves work and makes their scores bit-identical: rounding depends on what a sequence
is packed with, and a group of identical answers whose scores differ by 1e-7 would have a standard deviation to divide by.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from typing import ClassVar

import numpy as np
from torch import Tensor, nn
from transformers import PretrainedConfig

from plaudit.data.templates import RENDER_ERRORS
from plaudit.data.transcript import Transcript
from plaudit.models.folder import require_matching_tokenizer
from plaudit.models.fused import can_fuse
from plaudit.models.layer_blocks import LayerBlock
from plaudit.models.scalar import (
    TOKENS_PER_PASS_OF_BLOCKS,
    ScalarModel,
    batches_of,
    load_scalar,
    scalar_blocks,
    scalar_form,
    transcript_of,
)
from plaudit.models.weights import release_memory
from plaudit.reward_models.backend import ScalarScore
from plaudit.reward_models.batch_bisection import bisect_failures, failure_of
from plaudit.reward_models.divided import BlockInput, ModelPart
from plaudit.reward_models.inference import Inference
from plaudit.reward_models.model_thread import Closed
from plaudit.rollout.native.scoring_pass import ScoringPass
from plaudit.types import Batch, Failure, Message

Conversation = list[Message]
Tokens = tuple[int, ...]
POLL_S = 0.2


class ScalarInference(Inference[Conversation, ScalarScore]):
    gather_s: ClassVar[float] = 0.005
    most_items: ClassVar[int | None] = 512  # enough for many passes, so that packing loses little
    transcript: Transcript
    model: ScalarModel | None = None
    part: ModelPart | None = None
    """If the model is divided: what this process has of it."""
    block: LayerBlock | None = None
    _verified = False

    def check(self, config: PretrainedConfig) -> None:
        scalar_form(self.settings, config)
        if self.part is not None:
            self.block = scalar_blocks(self.settings)[self.part.number]
        self.transcript = transcript_of(self.settings)
        require_matching_tokenizer(self.path, config, self.transcript.tokenizer)

    def load(self) -> ScalarModel:
        return load_scalar(self.settings, self.device, self.block)

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

    def prepare(self, item: Conversation) -> "Tokens | ScalarScore":
        return self._tokens(item)

    def compute(self, items: "list[Tokens | ScalarScore]") -> list[ScalarScore]:
        unique = list(dict.fromkeys(tokens for tokens in items if isinstance(tokens, tuple)))
        scores = dict(zip(unique, bisect_failures(unique, self._score, self.failed), strict=True))
        return [scores[tokens] if isinstance(tokens, tuple) else tokens for tokens in items]

    def _tokens(self, messages: Conversation) -> Tokens | ScalarScore:
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

    def _score(self, sequences: Sequence[Tokens]) -> Iterator[tuple[int, ScalarScore]]:
        for indices, values in self._score_in_passes(sequences):
            if self.closing():
                raise Closed("the model was closed during scoring")
            for i, value in zip(indices, values.tolist(), strict=True):
                yield i, _result(value, len(sequences[i]))

    def _score_in_passes(self, sequences: Sequence[Tokens]) -> Iterator[tuple[list[int], np.ndarray]]:
        assert self.model is not None
        if self.part is None:
            yield from self.model.score_in_passes(sequences)
            return
        # This block computes a batch while later ones compute those before.
        in_flight: deque[tuple[list[int], Future[np.ndarray]]] = deque()
        try:
            for indices, batch in self._batches(sequences):
                if len(in_flight) == len(self.part.ranks):
                    yield in_flight[0][0], self._wait_for(in_flight[0][1])
                    in_flight.popleft()
                in_flight.append((indices, self.part.send(BlockInput.of(batch, self.model.run_block(batch, None)))))
            while in_flight:
                yield in_flight[0][0], self._wait_for(in_flight[0][1])
                in_flight.popleft()
        finally:
            for _, scores in in_flight:
                scores.cancel()

    def _batches(self, sequences: Sequence[Tokens]) -> Iterator[tuple[list[int], Batch]]:
        return batches_of(sequences, self.device, TOKENS_PER_PASS_OF_BLOCKS.get(self.device.type, 4096))

    def _wait_for(self, scores: "Future[np.ndarray]") -> np.ndarray:
        while not wait([scores], POLL_S).done:
            if self.closing():
                raise Closed("the model was closed during scoring")
        return scores.result()

    def run_block(self, given: BlockInput) -> "BlockInput | np.ndarray":
        """What the next block is given; of the last block, the scores."""
        assert self.model is not None
        assert self.block is not None
        batch, states_TD = given.on(self.device)
        result = self.model.run_block(batch, states_TD)
        return result.cpu().numpy() if self.block.is_last else BlockInput.of(batch, result)


class BlockByBlockInference(ScalarInference):
    """A divided model in a single process, which has never more than one of its blocks: slow, and enough to check a model that is
    too large for one device."""

    most_items: ClassVar[int | None] = None  # the blocks are loaded once for all

    def check(self, config: PretrainedConfig) -> None:
        super().check(config)
        self._blocks = scalar_blocks(self.settings)

    def load(self) -> nn.Module:  # pyright: ignore[reportIncompatibleMethodOverride]
        return nn.Module()  # each batch of calls loads the blocks

    def attach(self, model: nn.Module) -> None: ...

    def _score_in_passes(self, sequences: Sequence[Tokens]) -> Iterator[tuple[list[int], np.ndarray]]:
        passes = list(self._batches(sequences))
        results: list[Tensor | None] = [None] * len(passes)
        for block in self._blocks:
            self._verified = False
            super().attach(model := load_scalar(self.settings, self.device, block))
            results = [model.run_block(batch, states) for (_, batch), states in zip(passes, results, strict=True)]
            self.detach()
            del model
            release_memory()
        for (indices, _), scores in zip(passes, results, strict=True):
            assert scores is not None
            yield indices, scores.cpu().numpy()


def _result(value: float, tokens: int) -> ScalarScore:
    if math.isfinite(value):
        return ScalarScore(value, prompt_tokens=tokens)
    return ScalarScore(None, Failure("not_a_number", f"the model's score is {value}"), prompt_tokens=tokens)
