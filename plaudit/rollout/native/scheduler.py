"""Who runs where: prompts wait in order, each is read once, its samples take free rows as they come.

A prompt's keys and values are computed for all its tokens but the last, in pieces if it is long. Its samples share the blocks that
are full, and each begins as if the prompt's last token had just been written: so the first token of a response is a decode step
like any other, and so is the next one of a sequence that had to give up its memory, for which what it has written is read again.

All decisions depend on the requests, on what was sampled and on how many blocks there are, never on time: a run that is repeated
puts the same sequences side by side, and so computes the same bits.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from plaudit.rollout.engine import Request, Sampling
from plaudit.rollout.native.blocks import Blocks
from plaudit.seeding import stable_seed


@dataclass(eq=False)
class Running:
    """A sample in the making."""

    request: Request
    index: int
    limit: int
    key: int
    """64 bits, signed: torch has no unsigned integers to compute with."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    untempered: list[float] = field(default_factory=list)
    launched: int = 0
    """Tokens that are written, or will be by the steps under way."""
    row: int | None = None
    device_row: int | None = None
    """The row that the device has it in."""
    blocks: list[int] = field(default_factory=list)

    @property
    def position(self) -> int:
        """Of the token that the next step reads."""
        return len(self.request.tokens) - 1 + self.launched


@dataclass(eq=False)
class Job:
    """Something to read, and the sequences that go on from there."""

    tokens: np.ndarray
    sequences: deque[Running]
    read: int = 0
    blocks: list[int] = field(default_factory=list)

    @property
    def to_read(self) -> int:
        return len(self.tokens) - 1


@dataclass(frozen=True)
class Piece:
    """Tokens begin … end − 1 of a job, to be read into its blocks."""

    job: Job
    begin: int
    end: int


class Scheduler:
    def __init__(
        self, requests: Sequence[Request], sampling: Sampling, *, rows: int, blocks: int, block_tokens: int, prefill_tokens: int
    ):
        self.sampling, self.block_tokens, self.prefill_tokens = sampling, block_tokens, prefill_tokens
        self.waiting = deque(Job(request.tokens, self._sequences(request)) for request in requests)
        self.reading: deque[Job] = deque()
        self.ready: deque[Job] = deque()
        self.rows: list[Running | None] = [None] * rows
        self.blocks = Blocks(blocks)
        self.running = 0
        self.changed: set[int] = set()
        """Rows that have another sequence, or none, since the last step."""
        self.grown: set[int] = set()
        """Rows whose blocks have changed."""
        self.preempted = 0

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.reading or self.ready or self.running)

    @property
    def extent(self) -> int:
        """Rows up to the last that is in use."""
        return next((row + 1 for row in range(len(self.rows) - 1, -1, -1) if self.rows[row] is not None), 0)

    @property
    def longest(self) -> int:
        """Tokens that anyone has in the cache."""
        running = (sequence.position for sequence in self.rows if sequence is not None)
        return max((*running, *(job.read for job in (*self.reading, *self.ready))), default=0)

    # Reading

    def next_pieces(self) -> list[Piece]:
        """What to read now: jobs for whose sequences rows and blocks are free, within the token budget."""
        self._admit()
        pieces, budget = [], self.prefill_tokens
        while self.reading and (budget > 0 or not self.reading[0].to_read):
            job = self.reading[0]
            if pieces and job.to_read - job.read > budget:
                break  # only what is too long for a pass of its own is cut
            end = min(job.to_read, job.read + budget)
            if end > job.read:
                pieces.append(Piece(job, job.read, end))
            budget -= end - job.read
            job.read = end
            if job.read < job.to_read:
                break
            self.ready.append(self.reading.popleft())
        return pieces

    def _admit(self) -> None:
        """Jobs that are read next. Not for every row that falls free: one pass over several prompts is cheaper than several."""
        promised = sum(len(job.sequences) for job in (*self.reading, *self.ready))
        free_rows = len(self.rows) - self.running - promised
        if self.running and free_rows < min(len(self.rows) // 16, sum(len(job.sequences) for job in self.waiting)):
            return
        to_read = sum(job.to_read - job.read for job in self.reading)
        # Blocks to begin with for those that are about to, and one more for those that will outgrow what they have.
        spoken_for = sum(self._to_begin(job) for job in (*self.reading, *self.ready)) + self._growing()
        while self.waiting and free_rows > 0 and to_read < self.prefill_tokens:
            job = self.waiting[0]
            needed, to_begin = self._blocks_for(job.to_read), self._to_begin(job)
            if (self.running or promised) and self.blocks.free < needed + to_begin + spoken_for:
                return
            self.waiting.popleft()
            job.blocks = [self.blocks.take() for _ in range(needed)]
            free_rows -= len(job.sequences)
            promised += len(job.sequences)
            spoken_for += to_begin
            to_read += job.to_read
            self.reading.append(job)

    # Starting

    def start(self) -> list[tuple[int, int]]:
        """Begin sequences, as many as have a row and a block. Returns blocks to be copied, and to where."""
        copies: list[tuple[int, int]] = []
        free = iter([row for row, sequence in enumerate(self.rows) if sequence is None])
        while self.ready:
            job = self.ready[0]
            full = job.to_read // self.block_tokens
            last = len(job.sequences) == 1
            partial = job.blocks[full] if job.to_read % self.block_tokens else None
            if self.blocks.free < (0 if partial is not None and last else 1) or (row := next(free, None)) is None:
                break
            sequence = job.sequences.popleft()
            sequence.blocks = [self.blocks.share(block) for block in job.blocks[:full]]
            if partial is None:
                sequence.blocks.append(self.blocks.take())
            elif last:
                sequence.blocks.append(self.blocks.share(partial))
            else:
                copies.append((partial, self.blocks.take()))
                sequence.blocks.append(copies[-1][1])
            self._put(row, sequence)
            self.running += 1
            if not job.sequences:
                self._give_back(job.blocks)
                self.ready.popleft()
        return copies

    # Running

    def grow(self) -> bool:
        """A block for every sequence that will write into a new one; False if there are not enough."""
        for sequence in self.rows:
            if sequence is None or sequence.launched >= sequence.limit:
                continue  # the latter will turn out to have ended
            if sequence.position // self.block_tokens >= len(sequence.blocks):
                if not self.blocks.free:
                    return False
                sequence.blocks.append(self.blocks.take())
                assert sequence.row is not None
                self.grown.add(sequence.row)
        return True

    def make_room(self) -> None:
        """Take memory from what can best do without: the prompt read last, then the sequence that has written least."""
        self.preempted += 1
        for jobs in (self.ready, self.reading):
            if jobs:
                job = jobs.pop()
                self._give_back(job.blocks)
                job.read, job.blocks = 0, []
                self.waiting.appendleft(job)
                return
        victim = min((s for s in self.rows if s is not None), key=lambda s: (len(s.tokens), -(s.row or 0)))
        assert self.running > 1, "one sequence always has room"
        self.leave(victim)
        victim.launched = len(victim.tokens)
        known = np.concatenate([victim.request.tokens, np.asarray(victim.tokens, dtype=victim.request.tokens.dtype)])
        self.waiting.appendleft(Job(known, deque([victim])))

    def leave(self, sequence: Running) -> None:
        assert sequence.row is not None
        self.rows[sequence.row] = None
        self.changed.add(sequence.row)
        self._give_back(sequence.blocks)
        sequence.row, sequence.device_row, sequence.blocks = None, None, []
        self.running -= 1

    def close_up(self) -> None:
        """The rows in use become the first ones."""
        free = [row for row in range(self.running) if self.rows[row] is None]
        for row in range(self.running, len(self.rows)):
            if (sequence := self.rows[row]) is not None:
                self.rows[row] = None
                self.changed.add(row)
                self._put(free.pop(), sequence)

    def put_in_order(self) -> list[tuple[int, int]]:
        """Where a sequence is one block: give row i block i. Returns which block's contents have to go where, all at once."""
        owners: dict[int, Job | Running] = {s.blocks[0]: s for s in self.rows if s is not None}
        owners |= {job.blocks[0]: job for job in (*self.reading, *self.ready) if job.blocks}
        before = [(owner, block) for block, owner in owners.items()]
        for row, sequence in enumerate(self.rows[: self.running]):
            assert sequence is not None, "rows have closed up"
            block = sequence.blocks[0]
            if block == row:
                continue
            if (other := owners.pop(row, None)) is None:
                self.blocks.exchange(block, row)
                del owners[block]
            else:
                other.blocks[0] = block
                owners[block] = other
            sequence.blocks[0], owners[row] = row, sequence
            self.grown.add(row)
        return [(block, owner.blocks[0]) for owner, block in before if owner.blocks[0] != block]

    # Parts

    def _sequences(self, request: Request) -> deque[Running]:
        limit = request.max_new_tokens or self.sampling.max_new_tokens
        made = deque()
        for index in range(request.n):
            key = stable_seed(self.sampling.seed, self.sampling.step, request.prompt_id, index)
            made.append(Running(request, index, limit, key - (1 << 64) if key >> 63 else key))
        return made

    def _put(self, row: int, sequence: Running) -> None:
        self.rows[row] = sequence
        sequence.row = row
        self.changed.add(row)
        self.grown.add(row)

    def _to_begin(self, job: Job) -> int:
        """Blocks that a job's sequences need besides its own, one of them can go on in its last."""
        return len(job.sequences) - bool(job.to_read % self.block_tokens)

    def _growing(self) -> int:
        longest = ((s, len(s.request.tokens) - 1 + s.limit) for s in self.rows if s is not None)
        return sum(len(s.blocks) * self.block_tokens < tokens for s, tokens in longest)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def _give_back(self, blocks: list[int]) -> None:
        for block in blocks:
            self.blocks.give_back(block)
