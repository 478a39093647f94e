"""Who runs: prompts wait in order, each is read once, its samples take free rows as they come.

All decisions depend on the requests and on what was sampled, never on time or on free memory: a run that is repeated puts the same
sequences side by side, and so computes the same bits.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from plaudit.rollout.engine import Request, Sampling
from plaudit.seeding import stable_seed


@dataclass
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

    @property
    def position(self) -> int:
        """Of its newest token, in its row."""
        return len(self.request.tokens) + len(self.tokens) - 1


@dataclass
class Read:
    """A prompt that has been read and has samples still to start."""

    request: Request
    prefix: Tensor
    """Its keys and values: [layer, 2, kv head, position, head size]."""
    logits_V: Tensor
    started: int = 0


class Scheduler:
    def __init__(self, requests: Sequence[Request], sampling: Sampling, *, rows: int, prefill_tokens: int):
        self.sampling, self.rows, self.prefill_tokens = sampling, rows, prefill_tokens
        self.waiting = deque(request for request in requests if request.n)
        self.read: deque[Read] = deque()
        self.running: list[Running] = []
        """By row."""

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.read or self.running)

    def next_prompts(self) -> list[Request]:
        """Prompts to read now: as many as have free rows for their samples, within the token budget (a longer one goes alone)."""
        free, budget, prompts = self.rows - len(self.running), self.prefill_tokens, []
        if self.read:
            return prompts
        while self.waiting and free > 0 and (not prompts or len(self.waiting[0].tokens) <= budget):
            request = self.waiting.popleft()
            free, budget = free - request.n, budget - len(request.tokens)
            prompts.append(request)
        return prompts

    def start(self) -> list[tuple[Read, Running]]:
        """Samples that begin now, as many as there are free rows."""
        started = []
        for _ in range(self.rows - len(self.running)):
            if not self.read:
                break
            read = self.read[0]
            started.append((read, self._begin(read.request, read.started)))
            read.started += 1
            if read.started == read.request.n:
                self.read.popleft()
        return started

    def _begin(self, request: Request, index: int) -> Running:
        limit = request.max_new_tokens or self.sampling.max_new_tokens
        key = stable_seed(self.sampling.seed, self.sampling.step, request.prompt_id, index)
        return Running(request, index, limit, key - (1 << 64) if key >> 63 else key)

    def leave(self, row: int) -> int:
        """Free a row; returns the row whose sequence moves into it (itself, if it was the last)."""
        last = len(self.running) - 1
        self.running[row] = self.running[last]
        self.running.pop()
        return last
