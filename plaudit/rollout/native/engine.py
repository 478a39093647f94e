"""The native engine: continuous batching on the very weights that the trainer updates.

    while anything waits or runs:
        read prompts for which rows and memory are free        (one packed forward pass; a prompt's n samples share it)
        start their samples in free rows
        one token for every running sequence                   (on a GPU one CUDA graph, from embedding to drawn token)
        look at what the step before that one has drawn        (so the device never waits for the host)
        those that ended leave, and go out

Nothing is synced, for there is nothing but the trainer's weights. LoRA adapters are used as they stand. Memory for keys and values
is taken for the time of a call; when it runs out, the sequence that has written least gives up its place and goes on later.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from plaudit.errors import PlauditError
from plaudit.models.heads import next_power_of_2
from plaudit.models.memory import total_memory
from plaudit.rollout.engine import MAX_SEQUENCES, Engine, Request, Sampling
from plaudit.rollout.native.cache import CacheView
from plaudit.rollout.native.forward import Forward
from plaudit.rollout.native.graphs import rounded_rows
from plaudit.rollout.native.rows import AT_LIMIT, ENDED, IDLE, NOBODY, Draw, Memory, Rows, draw_of
from plaudit.rollout.native.scheduler import Running, Scheduler
from plaudit.rollout.native.stopping import Stopping
from plaudit.rollout.native.verify import verify_decode
from plaudit.types import Sample

# Prompt tokens read in one pass: enough to keep the device busy, few enough that running sequences do not wait long.
PREFILL_TOKENS = {"cpu": 1024, "cuda": 16384}
# At most, of what weights and trainer leave of all memory: not of what is free, for batches should not depend on what else runs.
# The rest is for activations; a CPU has others to think of.
CACHE_SHARE = {"cpu": 0.5, "cuda": 0.85}
STEPS_UNDER_WAY = {"cpu": 0, "cuda": 1}
ROUND_LENGTH = 64


@dataclass(frozen=True)
class Launched:
    """A step that has been asked for: who was in its rows, and what it will have said of them."""

    rows: list[Running | None]
    results: Tensor
    done: torch.cuda.Event | None


class NativeEngine(Engine):
    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        max_sequences: int | None = None,
        reserved_bytes: int = 0,
        block_tokens: int | None = None,
    ):
        """Without a tokenizer samples have no text. `reserved_bytes`: what others keep on the device while we sample."""
        self.model, self.tokenizer, self.reserved_bytes = model, tokenizer, reserved_bytes
        self.end_tokens = _end_tokens(model)
        self.forward = Forward(model)
        self.device = self.forward.shape.device
        self.max_sequences = max_sequences or MAX_SEQUENCES[self.device.type]
        self.block_tokens = block_tokens or (self.forward.shape.gpu_block_tokens if self.device.type == "cuda" else None)
        self._rows: Rows | None = None
        self._cache: CacheView | None = None
        self._draw_memory: Memory = {}
        self.preempted = 0
        """How often, in the last call, a prompt or a sequence had to give up its memory for a while."""
        self._busy = False
        verify_decode(self.forward)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Sample]:
        requests = [request for request in requests if request.n]
        if not requests:
            return
        longest, stopping = self._longest(requests, sampling), Stopping(self.tokenizer, self.end_tokens, sampling.stop)
        if self._busy:
            raise PlauditError("a call of this engine is under way: take its samples, or close it, before the next one")
        self._busy = True
        try:
            self.forward.begin(longest)
            rows = min(sum(r.n for r in requests), self.max_sequences)
            cache, blocks = self._take_cache(rows, longest, requests, sampling)
            draw = draw_of(sampling, stopping.end_tokens, self.device, self._draw_memory)
            prefill_tokens = PREFILL_TOKENS[self.device.type]
            scheduler = Scheduler(
                requests, sampling, rows=rows, blocks=blocks, block_tokens=cache.block_tokens, prefill_tokens=prefill_tokens
            )
            call = _Call(self.forward, scheduler, self._rows_for(rows), cache, draw, stopping, self.version)
            yield from call.run(STEPS_UNDER_WAY[self.device.type])
            self.preempted = scheduler.preempted
        finally:
            self._busy = False
            self.forward.end()
            if self._cache is not None:
                self._cache.release_memory()

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

    def _take_cache(self, rows: int, longest: int, requests: Sequence[Request], sampling: Sampling) -> tuple[CacheView, int]:
        """A cache with memory for what these requests may come to need, or for what there is; and its blocks."""
        block_tokens = self.block_tokens or longest
        per_row = -(-longest // block_tokens)
        cache, tables = self._cache, (rounded_rows(rows), next_power_of_2(per_row))
        if cache is None or not cache.serves(self.forward.shape, block_tokens, tables):
            # No smaller than before: engines are asked for more and for less in turn.
            tables = tables if cache is None else (max(tables[0], cache.tables.shape[0]), max(tables[1], cache.tables.shape[1]))
            cache = self._cache = CacheView(self.forward.shape, *tables, block_tokens=block_tokens)
            self.forward.graphs.forget()
        blocks = max(per_row + 1, min(_blocks_wanted(requests, sampling, rows, block_tokens), self._room() // cache.block_bytes))
        cache.in_order = per_row == 1 and self.device.type == "cpu"
        return cache, cache.take_memory(blocks, least=per_row + 1)

    def _room(self) -> int:
        weights = sum(p.numel() * p.element_size() for p in self.model.parameters())
        return max(0, int(CACHE_SHARE[self.device.type] * (total_memory(self.device) - weights - self.reserved_bytes)))

    def _rows_for(self, count: int) -> Rows:
        if self._rows is None or len(self._rows.state_RC) < rounded_rows(count):
            self._rows = Rows(rounded_rows(count), self.device)
            self.forward.graphs.forget()
        self._rows.clear()
        return self._rows


class _Call:
    """One call of `generate`."""

    def __init__(
        self, forward: Forward, scheduler: Scheduler, rows: Rows, cache: CacheView, draw: Draw, stopping: Stopping, version: int
    ):
        self.forward, self.scheduler, self.rows, self.cache = forward, scheduler, rows, cache
        self.draw, self.stopping, self.version = draw, stopping, version
        self.launched: deque[Launched] = deque()

    def run(self, under_way: int) -> Iterator[Sample]:
        scheduler = self.scheduler
        while scheduler.busy or self.launched:
            if pieces := scheduler.next_pieces():
                self.forward.read(pieces, self.cache)
            self._start()
            if not scheduler.running and scheduler.ready:
                scheduler.make_room()
            while not scheduler.grow():
                while self.launched:  # what a sequence has written must be known before it is put off
                    yield from self._look()
                if not scheduler.grow():
                    scheduler.make_room()
            if scheduler.running:
                self._launch()
            while len(self.launched) > (under_way if scheduler.running else 0):
                yield from self._look()

    def _start(self) -> None:
        copies = self.scheduler.start()
        if copies:
            self.cache.copy_blocks(copies, self.cache.block_tokens)

    # A step

    @torch.inference_mode()
    def _launch(self) -> None:
        scheduler = self.scheduler
        count = self._arrange()
        self._tell_device()
        longest = 0
        for sequence in scheduler.rows[:count]:
            if sequence is not None:
                longest = max(longest, sequence.position + 1)
                sequence.launched = min(sequence.launched + 1, sequence.limit)
        self.forward.step(self.rows, count, self.cache, longest, self.draw)
        results, done = self.rows.results_R4[:count], None
        if results.is_cuda:
            pinned = torch.empty(results.shape, dtype=results.dtype, pin_memory=True)
            results, done = pinned.copy_(results, non_blocking=True), torch.cuda.Event()
            done.record()
        else:
            results = results.clone()
        occupants = scheduler.rows[:count]
        self.launched.append(Launched(occupants + [None] * (count - len(occupants)), results, done))

    def _arrange(self) -> int:
        """How many rows the step has. Rows close up where that makes it smaller."""
        scheduler = self.scheduler
        if self.rows.device.type == "cpu":
            scheduler.close_up()
            if self.cache.in_order and (moves := scheduler.put_in_order()):
                self.cache.copy_blocks(moves, scheduler.longest)
            return scheduler.running
        if rounded_rows(scheduler.running) < rounded_rows(scheduler.extent):
            scheduler.close_up()
        return rounded_rows(scheduler.extent)

    def _tell_device(self) -> None:
        """Who has come, gone or moved, and whose blocks have changed."""
        scheduler = self.scheduler
        if scheduler.changed:
            changes = [(row, *self._state(row)) for row in sorted(scheduler.changed)]
            self.rows.change(changes)
            scheduler.changed.clear()
        if scheduler.grown:
            rows = [row for row in sorted(scheduler.grown) if scheduler.rows[row] is not None]
            tables = np.zeros((len(rows), self.cache.tables.shape[1]), dtype=np.int32)
            for table, row in zip(tables, rows, strict=True):
                blocks = scheduler.rows[row].blocks  # pyright: ignore
                table[: len(blocks)] = blocks
            self.cache.set_tables(rows, tables)
            scheduler.grown.clear()

    def _state(self, row: int) -> tuple[int, ...]:
        """Where the row's state comes from: another row (or −1), or what stands behind it."""
        sequence = self.scheduler.rows[row]
        if sequence is None:
            return (-1, *NOBODY)
        before, sequence.device_row = sequence.device_row, row
        if before is not None:
            return (before, *NOBODY)
        token = sequence.tokens[-1] if sequence.tokens else int(sequence.request.tokens[-1])
        return (-1, token, sequence.position, sequence.key, len(sequence.tokens), sequence.limit)

    # What came of it

    def _look(self) -> Iterator[Sample]:
        """Take in the oldest step under way; samples that have ended with it."""
        step = self.launched.popleft()
        if step.done is not None:
            step.done.synchronize()
        results = step.results.numpy()
        numbers = (*results[:, :2].T.tolist(), *results[:, 2:].view(np.float32).T.tolist())
        for sequence, status, token, logprob, untempered in zip(step.rows, *numbers, strict=True):
            if status == IDLE or sequence is None or sequence.row is None:
                continue  # it had ended by a stop string
            sequence.tokens.append(token)
            sequence.logprobs.append(logprob)
            sequence.untempered.append(untempered)
            stopped = status == ENDED or self.stopping.stops(sequence.tokens)
            if stopped or status == AT_LIMIT:
                self.scheduler.leave(sequence)
                yield self._sample(sequence, "finished" if stopped else "truncated")

    def _sample(self, sequence: Running, status) -> Sample:
        return Sample(
            prompt_id=sequence.request.prompt_id,
            index=sequence.index,
            tokens=np.asarray(sequence.tokens, dtype=np.int32),
            text=self.stopping.text(sequence.tokens),
            status=status,
            sampler_logprobs=np.asarray(sequence.logprobs, dtype=np.float32),
            untempered_logprobs=np.asarray(sequence.untempered, dtype=np.float32),
            version=self.version,
        )


def _blocks_wanted(requests: Sequence[Request], sampling: Sampling, rows: int, block_tokens: int) -> int:
    """With which few sequences, if any, have to wait for memory: those of the longest samples, as many as there are rows."""
    needs = []
    for request in requests:
        shared, written = divmod(len(request.tokens) - 1, block_tokens)
        written += request.max_new_tokens or sampling.max_new_tokens
        needs += [(-(-written // block_tokens), shared / request.n)] * request.n
    needs.sort(reverse=True)
    # And some for prompts that are read while all rows are in use.
    return 1 + sum(own for own, _ in needs[:rows]) + math.ceil(sum(shared for _, shared in needs[:rows])) + rows // 4


def _end_tokens(model: PreTrainedModel) -> frozenset[int]:
    ends = model.generation_config.eos_token_id  # pyright: ignore
    return frozenset([] if ends is None else ends if isinstance(ends, list) else [ends])
