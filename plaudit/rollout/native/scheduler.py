"""Assigns prompts and their samples to batch rows and cache blocks.

Prompts wait in order. Each is prefilled once, in chunks if it is long, and its samples take rows as they become free. Prefill
covers all prompt tokens but the last. Samples share the prompt's full blocks, and each starts as if the prompt's last token had
just been written, so the first token of a response is an ordinary decode step. The same holds for a preempted sequence, which is
prefilled again with the tokens it has written.

All decisions depend on the requests, the sampled tokens and the number of blocks, never on time: a repeated run batches the same
sequences together and computes the same bits.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from plaudit.rollout.engine import Request, Sampling
from plaudit.rollout.native.blocks import BlockAllocator
from plaudit.seeding import stable_seed


@dataclass(eq=False)
class RunningSequence:
    """A sample that is being generated."""

    request: Request
    index: int
    limit: int
    key: int
    """Noise key: 64 bits, signed, since torch has no arithmetic on unsigned integers."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    untempered: list[float] = field(default_factory=list)
    launched: int = 0
    """Tokens written so far, or about to be by the steps in flight."""
    row: int | None = None
    device_row: int | None = None
    """The row it has in the device's state, if any."""
    blocks: list[int] = field(default_factory=list)
    shared_blocks: int = 0
    """How many of them, at the beginning, are shared with the other sequences of the same prefill."""

    @property
    def position(self) -> int:
        """Position of the token that the next step reads."""
        return len(self.request.tokens) - 1 + self.launched


@dataclass(eq=False)
class PrefillJob:
    """Tokens to prefill, and the sequences that continue them."""

    tokens: np.ndarray
    sequences: deque[RunningSequence]
    prefilled: int = 0
    blocks: list[int] = field(default_factory=list)

    @property
    def prefill_length(self) -> int:
        return len(self.tokens) - 1


@dataclass(frozen=True)
class PrefillChunk:
    """Tokens begin … end − 1 of a job, to be prefilled into its blocks."""

    job: PrefillJob
    begin: int
    end: int


class Scheduler:
    def __init__(
        self, requests: Sequence[Request], sampling: Sampling, *, rows: int, blocks: int, block_tokens: int, prefill_tokens: int
    ):
        self.sampling, self.block_tokens, self.prefill_tokens = sampling, block_tokens, prefill_tokens
        self.waiting = deque(PrefillJob(request.tokens, self._sequences(request)) for request in requests)
        self.prefilling: deque[PrefillJob] = deque()
        self.ready: deque[PrefillJob] = deque()
        self.rows: list[RunningSequence | None] = [None] * rows
        self.blocks = BlockAllocator(blocks)
        self.running = 0
        self.changed_rows: set[int] = set()
        """Rows whose sequence has changed since the last step."""
        self.changed_tables: set[int] = set()
        """Rows whose block table has changed since the last step."""
        self.preempted = 0

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.prefilling or self.ready or self.running)

    @property
    def extent(self) -> int:
        """Number of rows up to the last one in use."""
        return next((row + 1 for row in range(len(self.rows) - 1, -1, -1) if self.rows[row] is not None), 0)

    @property
    def longest(self) -> int:
        """Most tokens that any sequence or job has in the cache."""
        running = (sequence.position for sequence in self.rows if sequence is not None)
        return max((*running, *(job.prefilled for job in (*self.prefilling, *self.ready))), default=0)

    # Prefill

    def next_chunks(self) -> list[PrefillChunk]:
        """What to prefill now: jobs whose sequences have free rows and blocks, within the token budget."""
        self._admit()
        chunks, budget = [], self.prefill_tokens
        while self.prefilling and (budget > 0 or not self.prefilling[0].prefill_length):
            job = self.prefilling[0]
            if chunks and job.prefill_length - job.prefilled > budget:
                break  # only a job too long for a single pass is split
            end = min(job.prefill_length, job.prefilled + budget)
            if end > job.prefilled:
                chunks.append(PrefillChunk(job, job.prefilled, end))
            budget -= end - job.prefilled
            job.prefilled = end
            if job.prefilled < job.prefill_length:
                break
            self.ready.append(self.prefilling.popleft())
        return chunks

    def _admit(self) -> None:
        """Move waiting jobs to prefill. Waits until several rows are free: one pass over several prompts is cheaper than many."""
        pending = sum(len(job.sequences) for job in (*self.prefilling, *self.ready))
        free_rows = len(self.rows) - self.running - pending
        if self.running and free_rows < min(len(self.rows) // 16, sum(len(job.sequences) for job in self.waiting)):
            return
        prefill_tokens = sum(job.prefill_length - job.prefilled for job in self.prefilling)
        # The first blocks of sequences about to start, and one more for each running sequence that will outgrow its own.
        reserved = sum(self._blocks_to_start(job) for job in (*self.prefilling, *self.ready)) + self._blocks_to_grow()
        while self.waiting and free_rows > 0 and prefill_tokens < self.prefill_tokens:
            job = self.waiting[0]
            needed, to_start = self._blocks_for(job.prefill_length), self._blocks_to_start(job)
            if (self.running or pending) and self.blocks.free < needed + to_start + reserved:
                return
            self.waiting.popleft()
            job.blocks = [self.blocks.allocate() for _ in range(needed)]
            free_rows -= len(job.sequences)
            pending += len(job.sequences)
            reserved += to_start
            prefill_tokens += job.prefill_length
            self.prefilling.append(job)

    # Starting

    def start(self) -> list[tuple[int, int]]:
        """Start as many sequences as have a row and a block. Returns the blocks to copy, as (source, target)."""
        copies: list[tuple[int, int]] = []
        free = iter([row for row, sequence in enumerate(self.rows) if sequence is None])
        while self.ready:
            job = self.ready[0]
            full = job.prefill_length // self.block_tokens
            last = len(job.sequences) == 1
            partial = job.blocks[full] if job.prefill_length % self.block_tokens else None
            if self.blocks.free < (0 if partial is not None and last else 1) or (row := next(free, None)) is None:
                break
            sequence = job.sequences.popleft()
            sequence.blocks = [self.blocks.share(block) for block in job.blocks[:full]]
            sequence.shared_blocks = full
            if partial is None:
                sequence.blocks.append(self.blocks.allocate())
            elif last:
                sequence.blocks.append(self.blocks.share(partial))
            else:
                copies.append((partial, self.blocks.allocate()))
                sequence.blocks.append(copies[-1][1])
            self._assign(row, sequence)
            self.running += 1
            if not job.sequences:
                self._release(job.blocks)
                self.ready.popleft()
        return copies

    # Decode

    def extend_blocks(self) -> bool:
        """Allocate a block for every sequence whose next token needs a new one; False if blocks run out."""
        for sequence in self.rows:
            if sequence is None or sequence.launched >= sequence.limit:
                continue  # at its limit: the steps in flight will end it
            if sequence.position // self.block_tokens >= len(sequence.blocks):
                if not self.blocks.free:
                    return False
                sequence.blocks.append(self.blocks.allocate())
                assert sequence.row is not None
                self.changed_tables.add(sequence.row)
        return True

    def preempt(self) -> None:
        """Free blocks where least is lost: of the prompt prefilled last, else of the sequence that has written least."""
        self.preempted += 1
        for jobs in (self.ready, self.prefilling):
            if jobs:
                job = jobs.pop()
                self._release(job.blocks)
                job.prefilled, job.blocks = 0, []
                self.waiting.appendleft(job)
                return
        victim = min((s for s in self.rows if s is not None), key=lambda s: (len(s.tokens), -(s.row or 0)))
        assert self.running > 1, "a single sequence always fits"
        self.remove(victim)
        victim.launched = len(victim.tokens)
        tokens = np.concatenate([victim.request.tokens, np.asarray(victim.tokens, dtype=victim.request.tokens.dtype)])
        self.waiting.appendleft(PrefillJob(tokens, deque([victim])))

    def remove(self, sequence: RunningSequence) -> None:
        assert sequence.row is not None
        self.rows[sequence.row] = None
        self.changed_rows.add(sequence.row)
        self._release(sequence.blocks)
        sequence.row, sequence.device_row, sequence.blocks = None, None, []
        self.running -= 1

    def compact(self) -> None:
        """Move running sequences to the first rows."""
        free = [row for row in range(self.running) if self.rows[row] is None]
        for row in range(self.running, len(self.rows)):
            if (sequence := self.rows[row]) is not None:
                self.rows[row] = None
                self.changed_rows.add(row)
                self._assign(free.pop(), sequence)

    def align_blocks(self) -> list[tuple[int, int]]:
        """With one block per sequence: give row i block i. Returns the blocks to move, as (source, target), all at once."""
        owners: dict[int, PrefillJob | RunningSequence] = {s.blocks[0]: s for s in self.rows if s is not None}
        owners |= {job.blocks[0]: job for job in (*self.prefilling, *self.ready) if job.blocks}
        before = [(owner, block) for block, owner in owners.items()]
        for row, sequence in enumerate(self.rows[: self.running]):
            assert sequence is not None, "rows are compact"
            block = sequence.blocks[0]
            if block == row:
                continue
            if (other := owners.pop(row, None)) is None:
                self.blocks.swap(block, row)
                del owners[block]
            else:
                other.blocks[0] = block
                owners[block] = other
            sequence.blocks[0], owners[row] = row, sequence
            self.changed_tables.add(row)
        return [(block, owner.blocks[0]) for owner, block in before if owner.blocks[0] != block]

    # Details

    def _sequences(self, request: Request) -> deque[RunningSequence]:
        limit = request.max_new_tokens or self.sampling.max_new_tokens
        sequences = deque()
        for index in range(request.n):
            key = stable_seed(self.sampling.seed, self.sampling.step, request.prompt_id, index)
            sequences.append(RunningSequence(request, index, limit, key - (1 << 64) if key >> 63 else key))
        return sequences

    def _assign(self, row: int, sequence: RunningSequence) -> None:
        self.rows[row] = sequence
        sequence.row = row
        self.changed_rows.add(row)
        self.changed_tables.add(row)

    def _blocks_to_start(self, job: PrefillJob) -> int:
        """Blocks that a job's sequences need to start. One of them can continue in the job's partly filled last block."""
        return len(job.sequences) - bool(job.prefill_length % self.block_tokens)

    def _blocks_to_grow(self) -> int:
        final_lengths = ((s, len(s.request.tokens) - 1 + s.limit) for s in self.rows if s is not None)
        return sum(len(s.blocks) * self.block_tokens < tokens for s, tokens in final_lengths)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def _release(self, blocks: list[int]) -> None:
        for block in blocks:
            self.blocks.release(block)
