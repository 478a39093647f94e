"""The native engine: continuous batching on the very weights that the trainer updates.

    while anything waits or runs:
        prefill prompts for which rows and memory are free     (one packed forward pass; a prompt's n samples share it)
        start their samples in free rows
        one token for every running sequence                   (on a GPU one CUDA graph, from embedding to sampled token;
                                                                on a CPU drafts may make it several)
        collect the results of the previous step               (so the device never waits for the host)
        yield the samples that have ended

On the trainer's own model a sync has nothing to copy. LoRA is sampled with the merged weights that it is trained with, where
it is (models/merged.py), else unmerged. The KV cache is allocated for the duration of a call; when it is full, the sequence that
has written least is preempted and resumed later.
"""

import math
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from plaudit.errors import PlauditError
from plaudit.models.heads import next_power_of_2
from plaudit.models.memory import COPIES_SHARE, total_memory
from plaudit.rollout.engine import MAX_SEQUENCES, PREFILL_TOKENS, Engine, Request, Sampling, Weights
from plaudit.rollout.lengths import require_lengths
from plaudit.rollout.native.batch import (
    AT_LIMIT,
    EMPTY_ROW,
    ENDED,
    IDLE,
    RUNNING,
    BatchRows,
    DeviceSampling,
    SamplingBuffers,
    device_sampling,
)
from plaudit.rollout.native.cache import KVCache, unused_memory
from plaudit.rollout.native.cpu_ops import computes_products
from plaudit.rollout.native.drafts import STEP_ROWS, Draft, Drafter
from plaudit.rollout.native.forward import Forward
from plaudit.rollout.native.graphs import rounded_rows
from plaudit.rollout.native.prefixes import SharedPrefixes
from plaudit.rollout.native.scheduler import RunningSequence, Scheduler
from plaudit.rollout.native.verify import shared_prefixes_are_exact, verify_decode
from plaudit.rollout.stopping import Stopping, end_tokens_of
from plaudit.types import Sample

# The cache's share of total memory less weights and trainer state: not of free memory, since batches must not depend on what else
# runs. The rest is for activations, and on a CPU for other processes.
CACHE_SHARE = {"cpu": 0.5, "cuda": 0.85}
STEPS_IN_FLIGHT = {"cpu": 0, "cuda": 1}
ROUND_LENGTH = 64


@dataclass(frozen=True)
class LaunchedStep:
    """A step in flight: the sequences in its rows, the drafts in the rows after them, and where its results will be."""

    rows: list[RunningSequence | None]
    drafts: list[Draft]
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
        drafts: bool = True,
        returns_memory: bool = True,
        packs: bool = True,
        shares_prefixes: bool = True,
    ):
        """Without a tokenizer, samples have no text. `reserved_bytes`: device memory that others hold while we sample;
        `returns_memory`: whether they need what is unused afterwards; `packs`: whether weights may be packed
        on a CPU even where a sample's last bits then depend on how many others run; `shares_prefixes`: whether attention on a
        GPU reads what samples of a prompt share for several of them at once, where that is faster."""
        self.model, self.tokenizer, self.reserved_bytes, self.returns_memory = model, tokenizer, reserved_bytes, returns_memory
        self.packs, self.shares_prefixes = packs, shares_prefixes
        self.end_tokens = end_tokens_of(model)
        self.forward = Forward(model)
        self.device = self.forward.shape.device
        self.max_sequences = max_sequences or MAX_SEQUENCES[self.device.type]
        self.block_tokens = block_tokens or (self.forward.shape.gpu_block_tokens if self.device.type == "cuda" else None)
        self._rows: BatchRows | None = None
        self._cache: KVCache | None = None
        self._prefixes: SharedPrefixes | None = None
        self._sampling_buffers: SamplingBuffers = {}
        self.preempted = 0
        """Preemptions of prompts and sequences in the last call."""
        self.drafts, self.drafted, self.accepted = drafts, 0, 0
        """Whether to draft; tokens drafted in the last call, and how many of them were right."""
        self._busy = False
        verify_decode(self.forward)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Sample]:
        requests = [request for request in requests if request.n]
        if not requests:
            return
        longest, stopping = self._max_length(requests, sampling), Stopping(self.tokenizer, self.end_tokens, sampling.stop)
        if self._busy:
            raise PlauditError("this engine is still generating: take all samples of the last call, or close it, first")
        self._busy = True
        try:
            rows = min(sum(r.n for r in requests), self.max_sequences)
            self._begin(longest)
            prefixes = self._prefixes_for(requests, rows, longest)  # before the cache takes the memory
            cache, blocks = self._allocate_cache(rows, longest, requests, sampling)
            on_device = device_sampling(sampling, stopping.end_tokens, self.device, self._sampling_buffers)
            prefill_tokens = PREFILL_TOKENS[self.device.type]
            scheduler = Scheduler(
                requests, sampling, rows=rows, blocks=blocks, block_tokens=cache.block_tokens, prefill_tokens=prefill_tokens
            )
            drafter = Drafter() if self.drafts and cache.blocks_match_rows and self.forward.rows_are_independent else None
            state = self._rows_for(max(rows, STEP_ROWS))
            call = _Call(self.forward, scheduler, state, cache, on_device, stopping, self.version, self.on_step, drafter, prefixes)
            yield from call.run(STEPS_IN_FLIGHT[self.device.type])
            self.preempted, self.drafted, self.accepted = scheduler.preempted, call.drafted, call.accepted
        finally:
            self._busy = False
            self.forward.end()
            if self._cache is not None:
                self._cache.release(to_driver=self.returns_memory)

    def sync(self, version: int, weights: Weights) -> None:
        """Nothing to do for the trainer's own model."""
        if not weights.are_of(self.model):
            weights.copy_to(self.model)
        self.version = version

    # Memory

    def _max_length(self, requests: Sequence[Request], sampling: Sampling) -> int:
        """Upper bound on the length of any sequence, prompt and response."""
        longest = require_lengths(requests, sampling, self.model.config)
        return -(-longest // ROUND_LENGTH) * ROUND_LENGTH

    def _allocate_cache(self, rows: int, longest: int, requests: Sequence[Request], sampling: Sampling) -> tuple[KVCache, int]:
        """A cache with as many blocks as these requests may need, or as fit; and their number."""
        block_tokens = self.block_tokens or longest
        per_row = -(-longest // block_tokens)
        cache, tables = self._cache, (rounded_rows(max(rows, STEP_ROWS)), next_power_of_2(per_row))
        if cache is None or not cache.fits(self.forward.shape, block_tokens, tables):
            # Never shrink: calls alternate between larger and smaller ones.
            tables = (
                tables
                if cache is None
                else (max(tables[0], cache.block_tables.shape[0]), max(tables[1], cache.block_tables.shape[1]))
            )
            cache = self._cache = KVCache(self.forward.shape, *tables, block_tokens=block_tokens)
            self.forward.graphs.clear()
        blocks = max(
            per_row + 1, min(_blocks_needed(requests, sampling, rows, block_tokens), self._cache_budget() // cache.block_bytes)
        )
        cache.blocks_match_rows = per_row == 1 and self.device.type == "cpu"
        return cache, cache.allocate(blocks, min_blocks=per_row + 1)

    def _begin(self, longest: int) -> None:
        room, packs = COPIES_SHARE * self._unused_memory(), self.packs or not computes_products(self.forward.shape.dtype)
        if self.device.type == "cuda":  # where nothing is packed, and what is free just now may decide: other copies change no bit
            room = min(room, COPIES_SHARE * unused_memory(self.device))
        self.forward.begin(longest, room, packs=packs)

    def _cache_budget(self) -> int:
        return int(CACHE_SHARE[self.device.type] * (self._unused_memory() - self.forward.kept_bytes))

    def _unused_memory(self) -> int:
        """What the weights and others leave of the device's memory, whatever is free just now."""
        tensors = (*self.model.parameters(), *self.model.buffers())
        weights = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return max(0, total_memory(self.device) - weights - self.reserved_bytes)

    def _rows_for(self, count: int) -> BatchRows:
        if self._rows is None or len(self._rows.state_RC) < rounded_rows(count):
            self._rows = BatchRows(rounded_rows(count), self.device)
            self.forward.graphs.clear()
        self._rows.clear()
        return self._rows

    def _prefixes_for(self, requests: Sequence[Request], rows: int, longest: int) -> SharedPrefixes | None:
        block = self.block_tokens
        if not (self.shares_prefixes and self.forward.reads_shared_prefixes and block):
            return None
        if not any(request.n > 1 and len(request.tokens) > block for request in requests):
            return None
        if self._prefixes is None:
            exact = shared_prefixes_are_exact(self.forward, block)
            self._begin(longest)
            if exact is False:
                self.shares_prefixes = False
                warnings.warn(
                    "sampling is slower than it could be: reading a prompt once for several samples "
                    "does not give the same bits on this GPU",
                    stacklevel=2,
                )
            if not exact:
                return None
        if self._prefixes is None or self._prefixes.rows < rows:
            self._prefixes = SharedPrefixes(rounded_rows(rows), self.forward.shape.heads, self.device)
            self.forward.graphs.clear()
        return self._prefixes


class _Call:
    """One call of `generate`."""

    def __init__(
        self,
        forward: Forward,
        scheduler: Scheduler,
        rows: BatchRows,
        cache: KVCache,
        sampling: DeviceSampling,
        stopping: Stopping,
        version: int,
        on_step: Callable[[int], None],
        drafter: Drafter | None = None,
        prefixes: SharedPrefixes | None = None,
    ):
        self.forward, self.scheduler, self.rows, self.cache = forward, scheduler, rows, cache
        self.sampling, self.stopping, self.version, self.on_step = sampling, stopping, version, on_step
        self.drafter, self.drafted, self.accepted = drafter, 0, 0
        self.prefixes = prefixes
        self.launched: deque[LaunchedStep] = deque()

    def run(self, in_flight: int) -> Iterator[Sample]:
        scheduler = self.scheduler
        while scheduler.busy or self.launched:
            if chunks := scheduler.next_chunks():
                self.forward.prefill(chunks, self.cache)
            self._start()
            if not scheduler.running and scheduler.ready:
                scheduler.preempt()
            while not scheduler.extend_blocks():
                while self.launched:  # a sequence's tokens must be known before it is preempted
                    yield from self._collect_results()
                if not scheduler.extend_blocks():
                    scheduler.preempt()
            if scheduler.running:
                self._launch()
            while len(self.launched) > (in_flight if scheduler.running else 0):
                yield from self._collect_results()

    def _start(self) -> None:
        copies = self.scheduler.start()
        if copies:
            self.cache.copy_blocks(copies, self.cache.block_tokens)

    # A step

    @torch.inference_mode()
    def _launch(self) -> None:
        scheduler = self.scheduler
        count = self._arrange()
        drafts = self._draft()
        self._update_device()
        self._add_rows(drafts)
        longest = max((draft.sequence.position + draft.ahead + 1 for draft in drafts), default=0)
        for sequence in scheduler.rows[:count]:
            if sequence is not None:
                longest = max(longest, sequence.position + 1)
                sequence.launched = min(sequence.launched + 1, sequence.limit)
        sequences = scheduler.rows[:count]
        rows = sequences + [None] * (count - len(sequences)) + [draft.sequence for draft in drafts]
        count = len(rows)
        prefixes = self.prefixes if self.prefixes is not None and self.prefixes.in_use else None
        self.forward.step(self.rows, count, self.cache, longest, self.sampling, prefixes)
        results, done = self.rows.results_R4[:count], None
        if results.is_cuda:
            pinned = torch.empty(results.shape, dtype=results.dtype, pin_memory=True)
            results, done = pinned.copy_(results, non_blocking=True), torch.cuda.Event()
            done.record()
        else:
            results = results.clone()
        self.launched.append(LaunchedStep(rows, drafts, results, done))

    def _arrange(self) -> int:
        """Compact the batch where that makes the step smaller. Returns the number of rows."""
        scheduler = self.scheduler
        if self.rows.device.type == "cpu":
            scheduler.compact()
            if self.cache.blocks_match_rows and (moves := scheduler.align_blocks()):
                self.cache.copy_blocks(moves, scheduler.longest)
            return scheduler.running
        if rounded_rows(scheduler.running) < rounded_rows(scheduler.extent):
            scheduler.compact()
        return rounded_rows(scheduler.extent)

    def _draft(self) -> list[Draft]:
        """Not while prompts wait: with drafts other prompts would be prefilled together, and prefill's bits depend on that."""
        scheduler = self.scheduler
        if self.drafter is None or scheduler.waiting or scheduler.prefilling:
            return []
        return self.drafter.propose([sequence for sequence in scheduler.rows[: scheduler.running] if sequence is not None])

    def _add_rows(self, drafts: Sequence[Draft]) -> None:
        """After the running sequences' rows, one for each draft, in its sequence's block."""
        if not drafts:
            return
        rows = range(self.scheduler.running, self.scheduler.running + len(drafts))
        self.rows.update([(row, -1, *self._columns(d.sequence, d.token, d.ahead)) for row, d in zip(rows, drafts, strict=True)])
        self._set_block_tables(rows, [draft.sequence for draft in drafts])
        self.drafted += len(drafts)

    def _update_device(self) -> None:
        """Copy changed rows and block tables to the device."""
        scheduler = self.scheduler
        if scheduler.changed_rows:
            if self.prefixes is not None:
                self.prefixes.update(scheduler.rows, self.cache)
            changes = [(row, *self._state(row)) for row in sorted(scheduler.changed_rows)]
            self.rows.update(changes)
            scheduler.changed_rows.clear()
        if scheduler.changed_tables:
            changed = [(row, sequence) for row in sorted(scheduler.changed_tables) if (sequence := scheduler.rows[row]) is not None]
            self._set_block_tables([row for row, _ in changed], [sequence for _, sequence in changed])
            scheduler.changed_tables.clear()

    def _set_block_tables(self, rows: Sequence[int], sequences: Sequence[RunningSequence]) -> None:
        tables = np.zeros((len(rows), self.cache.block_tables.shape[1]), dtype=np.int32)
        for table, sequence in zip(tables, sequences, strict=True):
            table[: len(sequence.blocks)] = sequence.blocks
        self.cache.set_block_tables(rows, tables)

    def _state(self, row: int) -> tuple[int, ...]:
        """(The row it is copied from, or −1; else the columns themselves.)"""
        sequence = self.scheduler.rows[row]
        if sequence is None:
            return (-1, *EMPTY_ROW)
        source, sequence.device_row = sequence.device_row, row
        if source is not None:
            return (source, *EMPTY_ROW)
        return (-1, *self._columns(sequence, sequence.tokens[-1] if sequence.tokens else int(sequence.request.tokens[-1]), 0))

    def _columns(self, sequence: RunningSequence, token: int, ahead: int) -> tuple[int, ...]:
        return (token, sequence.position + ahead, sequence.key, len(sequence.tokens) + ahead, sequence.limit)

    # Results

    def _collect_results(self) -> Iterator[Sample]:
        """Wait for the oldest step in flight, append its tokens, and yield the samples that it ended."""
        step = self.launched.popleft()
        if step.done is not None:
            step.done.synchronize()
        results = step.results.numpy()
        statuses, tokens = results[:, :2].T.tolist()
        kept = self._kept(step, statuses, tokens)
        self.on_step(sum(kept))
        columns = (statuses, tokens, *results[:, 2:].view(np.float32).T.tolist())
        for row, (sequence, status, token, logprob, untempered) in enumerate(zip(step.rows, *columns, strict=True)):
            if not kept[row] or sequence is None or sequence.row is None:
                continue  # unused, a wrong draft, or already ended by a stop string
            if row >= len(step.rows) - len(step.drafts):
                self._move_on(sequence, row)
            sequence.tokens.append(token)
            sequence.logprobs.append(logprob)
            sequence.untempered.append(untempered)
            stopped = status == ENDED or self.stopping.stops(sequence.tokens)
            if stopped or status == AT_LIMIT:
                self.scheduler.remove(sequence)
                yield self._sample(sequence, "finished" if stopped else "truncated")

    def _kept(self, step: LaunchedStep, statuses: list[int], tokens: list[int]) -> list[bool]:
        """By row: whether its token was drawn after the tokens that the sequence has."""
        kept = [status != IDLE for status in statuses[: len(step.rows) - len(step.drafts)]]
        if not step.drafts:
            return kept
        newest = {sequence: row for row, sequence in enumerate(step.rows[: len(kept)])}
        for row, draft in enumerate(step.drafts, len(kept)):
            before = newest[draft.sequence]
            kept.append(kept[before] and statuses[before] == RUNNING and tokens[before] == draft.token)
            newest[draft.sequence] = row
        self.accepted += sum(kept[len(kept) - len(step.drafts) :])
        return kept

    def _move_on(self, sequence: RunningSequence, row: int) -> None:
        """Continue a sequence from the state of a right draft's row."""
        assert sequence.row is not None
        sequence.device_row = row
        sequence.launched += 1
        self.scheduler.changed_rows.add(sequence.row)

    def _sample(self, sequence: RunningSequence, status) -> Sample:
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


def _blocks_needed(requests: Sequence[Request], sampling: Sampling, rows: int, block_tokens: int) -> int:
    """Enough that few sequences, if any, wait for memory: the blocks of the longest samples, one per row."""
    needs = []
    for request in requests:
        shared, written = divmod(len(request.tokens) - 1, block_tokens)
        written += request.max_new_tokens or sampling.max_new_tokens
        needs += [(-(-written // block_tokens), shared / request.n)] * request.n
    needs.sort(reverse=True)
    # And some for prompts that are prefilled while all rows are in use.
    return 1 + sum(private for private, _ in needs[:rows]) + math.ceil(sum(shared for _, shared in needs[:rows])) + rows // 4
