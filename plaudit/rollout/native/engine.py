"""The native engine: continuous batching in torch, on the very modules and weights that the trainer updates.

    while anything waits or runs:
        read prompts for which rows are free                   (one packed forward pass; a prompt's n samples share it)
        start their samples: first token, keys and values copied to a row each
        one token for every running sequence                   (one forward pass)
        those that ended leave, and go out

Nothing is synced, for there is nothing but the trainer's weights. LoRA adapters are used as they stand.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from plaudit.errors import PlauditError
from plaudit.models.memory import total_memory
from plaudit.rollout.engine import Engine, Request, Sampling
from plaudit.rollout.native.cache import KVCache
from plaudit.rollout.native.forward import Forward
from plaudit.rollout.native.noise import position_keys
from plaudit.rollout.native.sampler import Drawn, draw
from plaudit.rollout.native.scheduler import Running, Scheduler
from plaudit.rollout.native.stopping import Stopping
from plaudit.rollout.native.verify import verify_decode
from plaudit.types import Sample

# Prompt tokens read in one pass: enough to keep the device busy, few enough that running sequences do not wait long.
PREFILL_TOKENS = {"cpu": 1024, "cuda": 16384}
CACHE_SHARE = (
    0.5  # at most, of what training leaves of all memory: not of what is free, for batches must not depend on what else runs
)
TRAINING_BYTES = 16  # per trained weight: fp32 master, gradient and two moments
ROUND_LENGTH = 64


class NativeEngine(Engine):
    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, max_sequences: int = 256):
        self.model, self.tokenizer, self.max_sequences = model, tokenizer, max_sequences
        self.end_tokens = _end_tokens(model)
        self.forward = Forward(model)
        self.shape = self.forward.shape
        verify_decode(self.forward)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Sample]:
        if not requests:
            return
        length = self._longest(requests, sampling)
        cache = KVCache(self.shape, self._rows(sum(r.n for r in requests), length), length)
        scheduler = Scheduler(requests, sampling, rows=cache.rows, prefill_tokens=PREFILL_TOKENS[self.shape.device.type])
        stopping = Stopping(self.tokenizer, self.end_tokens, sampling.stop)
        try:
            while scheduler.busy:
                if prompts := scheduler.next_prompts():
                    scheduler.read.extend(self.forward.read(prompts))
                yield from self._start(scheduler, cache, stopping)
                if scheduler.running:
                    _append(scheduler.running, self._decode(scheduler.running, cache, sampling))
                    yield from self._retire(scheduler, cache, stopping)
        finally:
            self.forward.end()
            if self.shape.device.type == "cuda":
                # One block of that size, or training's small tensors settle in it and the next call needs another.
                del cache
                torch.cuda.empty_cache()

    # The phases of one round

    @torch.inference_mode()
    def _start(self, scheduler: Scheduler, cache: KVCache, stopping: Stopping) -> list[Sample]:
        """First tokens of the samples that get a row now. (One that ends at once gives its row back.)"""
        started = scheduler.start()
        if not started:
            return []
        logits_BV = torch.stack([read.logits_V for read, _ in started])
        sequences = [sequence for _, sequence in started]
        _append(sequences, self._draw(logits_BV, sequences, scheduler.sampling))
        ended = []
        for read, sequence in started:
            if status := stopping.status(sequence):
                ended.append(self._sample(sequence, status, stopping))
            else:
                cache.fill(len(scheduler.running), read.prefix)
                scheduler.running.append(sequence)
        return ended

    @torch.inference_mode()
    def _decode(self, running: list[Running], cache: KVCache, sampling: Sampling) -> Drawn:
        """The next token of every running sequence."""
        device = self.shape.device
        positions = [sequence.position for sequence in running]
        positions_B = torch.tensor(positions, device=device)
        tokens_B = torch.tensor([sequence.tokens[-1] for sequence in running], device=device)
        logits_BV = self.forward.next_logits(cache, tokens_B, positions_B, longest=max(positions) + 1)
        return self._draw(logits_BV, running, sampling)

    @torch.inference_mode()
    def _retire(self, scheduler: Scheduler, cache: KVCache, stopping: Stopping) -> list[Sample]:
        """Samples that have ended; rows close up behind them."""
        ended = []
        for row in range(len(scheduler.running) - 1, -1, -1):  # from the last: what moves has been looked at
            sequence = scheduler.running[row]
            if status := stopping.status(sequence):
                ended.append(self._sample(sequence, status, stopping))
                moved = scheduler.leave(row)
                if moved != row:
                    cache.move(moved, row, scheduler.running[row].position)
        return ended

    # Parts of a phase

    def _draw(self, logits_BV: Tensor, sequences: list[Running], sampling: Sampling) -> Drawn:
        keys_B = torch.tensor([sequence.key for sequence in sequences], device=logits_BV.device)
        written_B = torch.tensor([len(sequence.tokens) for sequence in sequences], device=logits_BV.device)
        return draw(logits_BV, position_keys(keys_B, written_B), sampling)

    def _sample(self, sequence: Running, status, stopping: Stopping) -> Sample:
        return Sample(
            prompt_id=sequence.request.prompt_id,
            index=sequence.index,
            tokens=np.asarray(sequence.tokens, dtype=np.int32),
            text=stopping.text(sequence.tokens),
            status=status,
            sampler_logprobs=np.asarray(sequence.logprobs, dtype=np.float32),
            untempered_logprobs=np.asarray(sequence.untempered, dtype=np.float32),
            version=self.version,
        )

    # Room

    def _longest(self, requests: Sequence[Request], sampling: Sampling) -> int:
        """Positions that the longest sequence may come to need."""
        context = getattr(self.model.config, "max_position_embeddings", None)
        longest = 0
        for request in requests:
            if not len(request.tokens):
                raise PlauditError(f"prompt {request.prompt_id} is empty: there is nothing to continue")
            needed = len(request.tokens) + (request.max_new_tokens or sampling.max_new_tokens)
            if context is not None and needed > context:
                raise PlauditError(
                    f"prompt {request.prompt_id}: {len(request.tokens):,} tokens and up to {needed - len(request.tokens):,} new "
                    f"ones are more than the {context:,} that the model takes. Lower max_new_tokens, or leave out longer prompts."
                )
            longest = max(longest, needed)
        return -(-longest // ROUND_LENGTH) * ROUND_LENGTH

    def _rows(self, samples: int, length: int) -> int:
        """As many as were asked for, if their cache fits into its share of what training's own tensors leave."""
        taken = sum(p.numel() * (p.element_size() + (TRAINING_BYTES if p.requires_grad else 0)) for p in self.model.parameters())
        room = max(0.0, CACHE_SHARE * (total_memory(self.shape.device) - taken))
        return max(1, min(samples, self.max_sequences, int(room) // (self.shape.bytes_per_token * length)))


def _append(sequences: list[Running], drawn: Drawn) -> None:
    numbers = zip(*(column.tolist() for column in drawn), strict=True)
    for sequence, (token, logprob, untempered) in zip(sequences, numbers, strict=True):
        sequence.tokens.append(token)
        sequence.logprobs.append(logprob)
        sequence.untempered.append(untempered)


def _end_tokens(model: PreTrainedModel) -> frozenset[int]:
    ends = model.generation_config.eos_token_id  # pyright: ignore
    return frozenset([] if ends is None else ends if isinstance(ends, list) else [ends])
