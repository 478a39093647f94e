"""The scheduler, run by the engine's own loop on a simulated device that is made of lists.

The device caches tokens instead of keys and values. Before it draws a token it checks everything that its row attends to: the
prompt and the sample so far, each token in its place. This detects any error while prompts are prefilled in chunks, shared and
copied, and while sequences grow, move, are preempted and resume.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plaudit.models.heads import Heads
from plaudit.rollout.engine import Request, Sampling
from plaudit.rollout.native.batch import AT_LIMIT, EMPTY_ROW, ENDED, IDLE, KEY, LIMIT, POSITION, RUNNING, TOKEN, WRITTEN
from plaudit.rollout.native.blocks import BlockAllocator
from plaudit.rollout.native.engine import _blocks_needed, _Call
from plaudit.rollout.native.graphs import rounded_rows
from plaudit.rollout.native.prefixes import WORTHWHILE_BYTES, SharedPrefixes
from plaudit.rollout.native.scheduler import PrefillChunk, RunningSequence, Scheduler
from plaudit.seeding import stable_seed
from plaudit.types import Sample

SAMPLING = Sampling(max_new_tokens=4, seed=1, step=2)


@dataclass(frozen=True)
class Answer:
    """The response to be sampled: `length` distinct tokens that occur nowhere else."""

    request: Request
    index: int
    length: int
    by_host: bool = False
    """Ended by a stop string, which the device does not see."""

    @property
    def key(self) -> int:
        key = stable_seed(SAMPLING.seed, SAMPLING.step, self.request.prompt_id, self.index)
        return key - (1 << 64) if key >> 63 else key

    @property
    def limit(self) -> int:
        return self.request.max_new_tokens or SAMPLING.max_new_tokens

    @property
    def tokens(self) -> list[int]:
        first = 1_000_000 + 10_000 * int(self.request.prompt_id) + 100 * self.index
        return list(range(first, first + self.limit + 2))  # one too many may be drawn before the host sees a stop string

    def seen_at(self, written: int) -> list[int]:
        """The tokens that its newest token attends to, itself included."""
        return self.request.tokens.tolist() + self.tokens[:written]

    @property
    def status(self) -> str:
        return "finished" if self.length <= self.limit else "truncated"


@dataclass(frozen=True)
class Setting:
    answers: Sequence[Answer]
    rows: int
    block_tokens: int
    more_blocks: int | None = None
    """Blocks beyond what a single sequence may need; default: as many as the engine would request."""
    prefill_tokens: int = 1000
    device: str = "cpu"

    @property
    def requests(self) -> list[Request]:
        return list({id(answer.request): answer.request for answer in self.answers}.values())

    @property
    def per_row(self) -> int:
        return -(-max(len(a.request.tokens) + a.limit for a in self.answers) // self.block_tokens)

    @property
    def blocks(self) -> int:
        least = self.per_row + 1
        if self.more_blocks is not None:
            return least + self.more_blocks
        return max(least, _blocks_needed(self.requests, SAMPLING, self.rows, self.block_tokens))

    @property
    def max_steps(self) -> int:
        """One token at a time, plus one step in flight per sequence."""
        return sum(min(a.length, a.limit) + 1 for a in self.answers)

    @property
    def blocks_match_rows(self) -> bool:
        return self.device == "cpu" and self.per_row == 1


# The device ----------------------------------------------------------------------------------------------------------


class Cache:
    shape = SimpleNamespace(bytes_per_token=1 << 30, layers=1)  # so much that a prefix is always read only once

    def __init__(self, setting: Setting):
        self.block_tokens, self.blocks_match_rows = setting.block_tokens, setting.blocks_match_rows
        self.block_tables = np.full((setting.rows, setting.per_row), -1)
        self.cells: list[list[int | None]] = [[None] * setting.block_tokens for _ in range(setting.blocks)]

    def copy_blocks(self, moves: Sequence[tuple[int, int]], tokens: int) -> None:
        sources = [list(self.cells[source]) for source, _ in moves]
        assert len({target for _, target in moves}) == len(moves)
        for (_, target), cells in zip(moves, sources, strict=True):
            self.cells[target] = cells[:tokens] + [None] * (self.block_tokens - tokens)

    def set_block_tables(self, rows: Sequence[int], tables: np.ndarray) -> None:
        self.block_tables[rows] = tables

    def write(self, blocks: Sequence[int], position: int, token: int) -> None:
        self.cells[blocks[position // self.block_tokens]][position % self.block_tokens] = token

    def read(self, blocks: Sequence[int], tokens: int) -> list[int | None]:
        return [self.cells[blocks[at // self.block_tokens]][at % self.block_tokens] for at in range(tokens)]


class BatchRows:
    def __init__(self, setting: Setting):
        count = rounded_rows(setting.rows)
        self.device = SimpleNamespace(type=setting.device)
        self.state = [list(EMPTY_ROW) for _ in range(count)]
        self.results_R4 = torch.zeros(count, 4, dtype=torch.int32)

    def update(self, changes: Sequence[tuple[int, ...]]) -> None:
        before = [list(state) for state in self.state]
        for row, source, *state in changes:
            self.state[row] = before[source] if source >= 0 else list(state)


class Forward:
    def __init__(self, setting: Setting):
        self.setting, self.tokens_read, self.steps = setting, 0, 0
        self.answers = {answer.key: answer for answer in setting.answers}
        self.drawn: set[tuple[int, int]] = set()
        self.most_tiles = 0

    def prefill(self, chunks: Sequence[PrefillChunk], cache: Cache) -> None:
        assert sum(chunk.end - chunk.begin for chunk in chunks) <= self.setting.prefill_tokens
        assert all(chunk.begin == 0 and chunk.end == chunk.job.prefill_length for chunk in chunks[1:]), "only the first may be cut"
        assert len({id(chunk.job) for chunk in chunks}) == len(chunks)
        for chunk in chunks:
            assert chunk.begin < chunk.end
            known = chunk.job.tokens.tolist()
            assert cache.read(chunk.job.blocks, chunk.begin) == known[: chunk.begin], "earlier chunks are still cached"
            for at in range(chunk.begin, chunk.end):
                cache.write(chunk.job.blocks, at, known[at])
            self.tokens_read += chunk.end - chunk.begin

    def step(
        self, rows: BatchRows, count: int, cache: Cache, longest: int, draw: object, prefixes: SharedPrefixes | None
    ) -> None:  # fmt: skip
        self.steps += 1
        assert self.steps <= self.setting.max_steps
        used = [row for row in range(count) if rows.state[row][POSITION] >= 0]
        for row in used:
            cache.write(cache.block_tables[row], rows.state[row][POSITION], rows.state[row][TOKEN])
        read_for_rows = self.read_prefixes(rows, cache, prefixes)
        for row in used:
            _, position, key, written, limit = rows.state[row]
            answer = self.answers[key]
            in_tile = read_for_rows.get(row, [])
            assert in_tile == answer.seen_at(written)[: len(in_tile)]
            assert len(in_tile) <= position, "a row reads at least its newest token"
            assert prefixes is None or len(in_tile) == prefixes.tokens_R[row]
            blocks = [row] if cache.blocks_match_rows else cache.block_tables[row]
            assert cache.read(blocks, position + 1) == answer.seen_at(written)
            assert position < longest
            assert limit == answer.limit
        for row in range(count):
            rows.results_R4[row] = torch.tensor(self._draw(rows.state[row]) if row in used else (IDLE, 0, 0, 0))

    def read_prefixes(self, rows: BatchRows, cache: Cache, prefixes: SharedPrefixes | None) -> dict[int, list[int | None]]:
        """What tiles read for each of their rows."""
        found: dict[int, list[int | None]] = {}
        if prefixes is None or not prefixes.in_use:
            return found
        tiles = [tile for tile in prefixes.tiles_TS[: prefixes.tile_count].tolist() if tile[0]]
        assert not prefixes.tiles_TS[prefixes.tile_count :, 0].any(), "none is beyond those that are launched"
        self.most_tiles = max(self.most_tiles, len(tiles))
        for shared, *of_tile in tiles:
            some_rows = [row for row in of_tile if row >= 0]
            assert len(some_rows) > 1
            assert not found.keys() & set(some_rows), "a row is in one tile"
            found |= dict.fromkeys(some_rows, cache.read(cache.block_tables[of_tile[0]], shared))
        return found

    def _draw(self, state: list[int]) -> tuple[int, int, int, int]:
        answer = self.answers[state[KEY]]
        assert (answer.key, state[WRITTEN]) not in self.drawn, "drawn tokens are kept, even by preempted sequences"
        self.drawn.add((answer.key, state[WRITTEN]))
        state[TOKEN] = answer.tokens[state[WRITTEN]]
        state[WRITTEN] += 1
        ended = state[WRITTEN] == answer.length and not answer.by_host
        status = ENDED if ended else AT_LIMIT if state[WRITTEN] >= state[LIMIT] else RUNNING
        state[POSITION] = state[POSITION] + 1 if status == RUNNING else -1
        return status, state[TOKEN], 0, 0


class Stopping:
    def __init__(self, answers: Sequence[Answer]):
        self.last = {answer.tokens[answer.length - 1] for answer in answers if answer.by_host and answer.length <= answer.limit}

    def stops(self, tokens: list[int]) -> bool:
        return tokens[-1] in self.last

    def text(self, tokens: list[int]) -> str:
        return ""


# The scheduler with checks -------------------------------------------------------------------------------------------


class CheckedScheduler(Scheduler):
    """Checks its invariants after every operation."""

    def __init__(self, setting: Setting):
        super().__init__(
            setting.requests, SAMPLING, rows=setting.rows, blocks=setting.blocks, block_tokens=setting.block_tokens,
            prefill_tokens=setting.prefill_tokens,
        )  # fmt: skip
        self.started: list[tuple[str, int]] = []
        self.preempted_samples: list[tuple[str, int]] = []
        # Every step adds a token to some sequence. Between two steps everything may have to be prefilled again, in chunks.
        longest_read = sum(-(-(len(a.request.tokens) + a.limit) // setting.prefill_tokens) for a in setting.answers)
        self.turns_left = (1 + longest_read) * setting.max_steps

    def next_chunks(self) -> list[PrefillChunk]:
        self.turns_left -= 1
        assert self.turns_left >= 0, "it makes no progress"
        read = {id(job): job.prefilled for job in self.prefilling}
        chunks = super().next_chunks()
        for chunk in chunks:
            assert chunk.begin == read.get(id(chunk.job), 0)
        assert chunks or self.ready or self.running or self.prefilling, "there must always be work"
        self.check_invariants()
        return chunks

    def start(self) -> list[tuple[int, int]]:
        before = list(self.rows)
        copies = super().start()
        for row, sequence in enumerate(self.rows):
            if sequence is not before[row]:
                assert before[row] is None
                assert sequence is not None
                assert sequence.device_row is None
                self.started.append((sequence.request.prompt_id, sequence.index))
        if self.ready:
            job = self.ready[0]
            in_its_last_block = len(job.sequences) == 1 and job.prefill_length % self.block_tokens
            assert None not in self.rows or (not self.blocks.free and not in_its_last_block), "nothing waits that could start"
        self.check_invariants()
        return copies

    def preempt(self) -> None:
        before, free = list(self.rows), self.blocks.free
        super().preempt()
        for sequence in before:
            if sequence is not None and sequence.row is None:
                self.preempted_samples.append((sequence.request.prompt_id, sequence.index))
                assert self.waiting[0].tokens.tolist() == sequence.request.tokens.tolist() + sequence.tokens
        assert self.blocks.free >= free
        self.check_invariants()

    def extend_blocks(self) -> bool:
        enough = super().extend_blocks()
        self.check_invariants()
        if enough:
            for sequence in self._running():
                if sequence.launched < sequence.limit:
                    assert sequence.position < len(sequence.blocks) * self.block_tokens
                    assert self.refcounts()[sequence.blocks[sequence.position // self.block_tokens]] == 1, "the block is not shared"
        return enough

    def remove(self, sequence: RunningSequence) -> None:
        super().remove(sequence)
        self.check_invariants()

    def compact(self) -> None:
        super().compact()
        assert all(sequence is not None for sequence in self.rows[: self.running])
        self.check_invariants()

    def align_blocks(self) -> list[tuple[int, int]]:
        moves = super().align_blocks()
        assert [sequence.blocks for sequence in self._running()] == [[row] for row in range(self.running)]
        self.check_invariants()
        return moves

    def refcounts(self) -> Counter[int]:
        """The number of holders of each block."""
        holders = [*self._running(), *self.prefilling, *self.ready]
        return Counter(block for holder in holders for block in holder.blocks)

    def check_invariants(self) -> None:
        running = self._running()
        assert len(running) == self.running <= len(self.rows)
        assert all(sequence.row == row for row, sequence in enumerate(self.rows) if sequence is not None)
        assert len({id(sequence) for sequence in running}) == len(running)
        assert not any(job.blocks or job.prefilled for job in self.waiting)
        assert self.blocks.free + len(self.refcounts()) == self.blocks.total

    def _running(self) -> list[RunningSequence]:
        return [sequence for sequence in self.rows if sequence is not None]


@dataclass
class Outcome:
    scheduler: CheckedScheduler
    forward: Forward
    samples: list[Sample] = field(default_factory=list)


def simulate(setting: Setting) -> Outcome:
    """Run a call of the engine; every sample must be returned exactly once, with its own tokens."""
    scheduler, forward = CheckedScheduler(setting), Forward(setting)
    stopping = Stopping(setting.answers)
    new_tokens: list[int] = []
    shared = SharedPrefixes(setting.rows, Heads(20, 1, 16), torch.device("cpu"))  # three rows to a tile
    state, cache = BatchRows(setting), Cache(setting)
    call = _Call(forward, scheduler, state, cache, None, stopping, 7, new_tokens.append, None, shared)  # pyright: ignore
    outcome = Outcome(scheduler, forward)
    outcome.samples += call.run(0 if setting.device == "cpu" else 1)
    assert sum(new_tokens) >= sum(map(len, outcome.samples)), "every step is reported"
    answers = {(a.request.prompt_id, a.index): a for a in setting.answers}
    assert sorted((s.prompt_id, s.index) for s in outcome.samples) == sorted(answers)
    for sample in outcome.samples:
        answer = answers[sample.prompt_id, sample.index]
        assert sample.tokens.tolist() == answer.tokens[: min(answer.length, answer.limit)]
        assert sample.status == answer.status
    assert not scheduler.busy
    assert scheduler.blocks.free == scheduler.blocks.total
    again = Counter(scheduler.preempted_samples)
    assert Counter(scheduler.started) == {name: 1 + again[name] for name in answers}
    if not scheduler.preempted:
        assert scheduler.started == list(answers), "first come, first served"
        assert forward.tokens_read == sum(len(r.tokens) - 1 for r in setting.requests), "each prompt is prefilled once"
    return outcome


def answers_of(*groups: tuple[int, int, int, Sequence[int]]) -> list[Answer]:
    """From (prompt length, samples, limit, response lengths), of which the last is used for all further samples."""
    made = []
    for name, (prompt, n, limit, lengths) in enumerate(groups):
        tokens = np.arange(1000 * (name + 1), 1000 * (name + 1) + prompt)
        request = Request(str(name), tokens, n, limit)
        made += [Answer(request, index, lengths[min(index, len(lengths) - 1)]) for index in range(n)]
    return made


# Random settings -----------------------------------------------------------------------------------------------------


@st.composite
def answers(draw) -> list[Answer]:
    made = []
    for name in range(draw(st.integers(1, 7))):
        prompt = draw(st.integers(1, 4) | st.integers(1, 40))
        limit = draw(st.none() | st.integers(1, 20))
        request = Request(str(name), np.arange(1000 * (name + 1), 1000 * (name + 1) + prompt), draw(st.integers(1, 6)), limit)
        for index in range(request.n):
            made.append(Answer(request, index, draw(st.integers(1, (limit or 4) + 1)), draw(st.booleans())))
    return made


budgets = st.integers(1, 12) | st.integers(1, 200)
rows = st.integers(1, 7) | st.sampled_from([16, 33])
few = st.integers(0, 3) | st.integers(0, 60)


@pytest.mark.slow
@settings(max_examples=250, deadline=None, derandomize=True)
@given(answers(), rows, st.sampled_from([1, 2, 3, 4, 8, 16]), few, budgets, st.sampled_from(["cpu", "cuda"]))
def test_random_settings_with_small_blocks(answers, rows, block_tokens, more_blocks, prefill_tokens, device):
    simulate(Setting(answers, rows, block_tokens, more_blocks, prefill_tokens, device))


@settings(max_examples=250, deadline=None, derandomize=True)
@given(answers(), rows, st.integers(0, 9), budgets)
@pytest.mark.slow
def test_random_settings_with_a_block_per_row(answers, rows, more_blocks, prefill_tokens):
    """As on a CPU: no sequence needs a second block, and row i uses block i."""
    setting = Setting(answers, rows, 64, more_blocks, prefill_tokens)
    assert setting.blocks_match_rows
    simulate(setting)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(answers(), rows, st.sampled_from([1, 4, 16, 64]), budgets, st.sampled_from(["cpu", "cuda"]))
def test_nothing_is_preempted_with_enough_blocks(answers, rows, block_tokens, prefill_tokens, device):
    all_at_once = sum(-(-(len(a.request.tokens) + a.limit) // block_tokens) + 1 for a in answers)
    outcome = simulate(Setting(answers, rows, block_tokens, all_at_once, prefill_tokens, device))
    assert outcome.scheduler.preempted == 0


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 17])
@pytest.mark.parametrize("block_tokens", [4, 64])
def test_blocks_needed_are_enough_for_different_prompts(rows, block_tokens, device):
    answers = answers_of(*[(13, 1, 18, [length]) for length in (19, 1, 7, 19, 18, 3) * 6])
    assert simulate(Setting(answers, rows, block_tokens, device=device)).scheduler.preempted == 0


# Single behaviours ---------------------------------------------------------------------------------------------------


def test_requests_become_sequences():
    scheduler = Scheduler(
        [Request("a", np.arange(3), n=2, max_new_tokens=9), Request("b", np.arange(1))],
        SAMPLING, rows=4, blocks=9, block_tokens=2, prefill_tokens=9,
    )  # fmt: skip
    made = [sequence for job in scheduler.waiting for sequence in job.sequences]
    assert [(s.request.prompt_id, s.index, s.limit, s.position) for s in made] == [("a", 0, 9, 2), ("a", 1, 9, 2), ("b", 0, 4, 0)]
    for sequence in made:
        assert -(1 << 63) <= sequence.key < 1 << 63
        assert sequence.key % (1 << 64) == stable_seed(1, 2, sequence.request.prompt_id, sequence.index)


def scheduler_of(answers: list[Answer], rows: int = 8, block_tokens: int = 4, blocks: int = 100, prefill_tokens: int = 20):
    setting = Setting(answers, rows, block_tokens)
    return Scheduler(setting.requests, SAMPLING, rows=rows, blocks=blocks, block_tokens=block_tokens, prefill_tokens=prefill_tokens)


def test_samples_of_a_prompt_share_its_full_blocks():
    """Ten tokens are prefilled: two full blocks of four, and half of a third, which all samples but one copy."""
    scheduler = scheduler_of(answers_of((11, 3, 5, [6])))
    (chunk,) = scheduler.next_chunks()
    assert (chunk.begin, chunk.end, chunk.job.blocks) == (0, 10, [0, 1, 2])
    copies = scheduler.start()
    first, second, third = (sequence.blocks for sequence in scheduler.rows[:3])
    assert (first, second, third) == ([0, 1, 3], [0, 1, 4], [0, 1, 2])
    assert copies == [(2, 3), (2, 4)]
    assert scheduler.blocks.free == 95
    for sequence in scheduler.rows[:3]:
        scheduler.remove(sequence)
    assert scheduler.blocks.free == 100


def test_tiles_of_rows_that_share_a_prefix():
    """Seven samples with two full blocks in common, at most three to a tile; one without siblings and one without a full block."""
    scheduler = scheduler_of(answers_of((11, 7, 5, [6]), (11, 1, 5, [6]), (4, 2, 5, [6])), rows=16, prefill_tokens=100)
    scheduler.next_chunks()
    scheduler.start()
    prefixes, cache = SharedPrefixes(16, Heads(20, 1, 16), torch.device("cpu")), SimpleNamespace(block_tokens=4, shape=Cache.shape)
    prefixes.update(scheduler.rows, cache)  # pyright: ignore
    assert prefixes.in_use
    assert prefixes.tiles_TS[: prefixes.tile_count].tolist() == [[8, 0, 1, -1], [8, 2, 3, -1], [8, 4, 5, 6], [0, 0, 0, 0]]
    assert prefixes.tokens_R.tolist() == [8] * 7 + [0] * 9
    assert prefixes.unread_tokens == (1 + 1 + 2) * 8
    for row in (0, 2, 3, 4, 6):
        scheduler.remove(scheduler.rows[row])
    prefixes.update(scheduler.rows, cache)  # pyright: ignore
    assert prefixes.tiles_TS[: prefixes.tile_count].tolist() == [[8, 1, 5, -1], *[[0, 0, 0, 0]] * 3], "as many as were launched"
    scheduler.remove(scheduler.rows[1])
    prefixes.update(scheduler.rows, cache)  # pyright: ignore
    assert (prefixes.in_use, prefixes.unread_tokens) == (False, 0)


@pytest.mark.parametrize(("bytes_per_token", "worthwhile"), [(WORTHWHILE_BYTES // 16, True), (1000, False)])
def test_prefixes_are_read_by_tiles_where_that_spares_enough(bytes_per_token, worthwhile):
    scheduler = scheduler_of(answers_of((11, 3, 5, [6])), prefill_tokens=100)
    scheduler.next_chunks()
    scheduler.start()
    shape = SimpleNamespace(bytes_per_token=3 * bytes_per_token, layers=3)
    shared, cache = SharedPrefixes(8, Heads(4, 1, 16), torch.device("cpu")), SimpleNamespace(block_tokens=4, shape=shape)
    shared.update(scheduler.rows, cache)  # pyright: ignore
    assert shared.unread_tokens == 2 * 8
    assert shared.in_use == worthwhile


def test_rows_read_a_prefix_once_while_others_come_and_go():
    answers = answers_of(*[(9 + 4 * i, 5, 9, [3, 10, 6, 2, 10]) for i in range(6)])
    outcome = simulate(Setting(answers, 17, 4, device="cuda"))
    assert outcome.forward.most_tiles >= 5


def test_prompts_are_prefilled_in_chunks():
    """Prompts that fit are prefilled together; one that is too long is split, and finished before others begin."""
    scheduler = scheduler_of(answers_of(*[(length, 1, 5, [6]) for length in (6, 13, 9, 46, 5, 1, 1, 30)]), prefill_tokens=20)
    passes = []
    while scheduler.waiting or scheduler.prefilling:
        passes.append([(int(p.job.tokens[0]) // 1000 - 1, p.begin, p.end) for p in scheduler.next_chunks()])
        scheduler.start()
    assert passes[:2] == [[(0, 0, 5), (1, 0, 12)], [(2, 0, 8)]]
    assert passes[2:5] == [[(3, 0, 20)], [(3, 20, 40)], [(3, 40, 45), (4, 0, 4)]]
    assert passes[5:] == [[(7, 0, 20)], [(7, 20, 29)]]


def test_prompts_wait_for_free_rows():
    scheduler = scheduler_of(answers_of((6, 2, 5, [6]), (6, 2, 5, [6]), (6, 2, 5, [6])), rows=3)
    assert len(scheduler.next_chunks()) == 2, "two of one prompt, one of the next"
    scheduler.start()
    assert not scheduler.next_chunks()
    scheduler.remove(scheduler.rows[1])
    assert not scheduler.next_chunks(), "the row is for the second sample of the second prompt"
    scheduler.start()
    assert [s.request.prompt_id for s in scheduler.rows] == ["0", "1", "1"]
    scheduler.remove(scheduler.rows[0])
    assert len(scheduler.next_chunks()) == 1


def test_prompts_are_prefilled_in_batches_as_rows_become_free():
    """With many rows, prefill does not run for every single free row."""
    scheduler = scheduler_of(answers_of(*[(6, 1, 5, [6])] * 100), rows=48, prefill_tokens=1000, blocks=1000)
    scheduler.next_chunks()
    scheduler.start()
    assert scheduler.running == 48
    read = []
    for row in range(6):
        scheduler.remove(scheduler.rows[row])
        read.append(len(scheduler.next_chunks()))
        scheduler.start()
    assert read == [0, 0, 3, 0, 0, 3]


def test_which_sequences_are_preempted():
    """First prompts without a running sample, the last one first; then the shortest sequence, which keeps its tokens."""
    scheduler = scheduler_of(answers_of((6, 3, 9, [10]), (6, 1, 9, [10]), (30, 1, 9, [10])), rows=8, prefill_tokens=20)
    scheduler.next_chunks()
    scheduler.start()
    assert len(scheduler.next_chunks()) == 1, "a chunk of the long one"
    for written, sequence in zip((3, 1, 4, 1), scheduler.rows, strict=False):
        sequence.tokens = list(range(written))
        sequence.launched = written
    scheduler.preempt()
    assert (scheduler.running, len(scheduler.waiting), len(scheduler.prefilling)) == (4, 1, 0)
    assert scheduler.waiting[0].prefilled == 0
    scheduler.preempt()
    scheduler.preempt()
    assert [s.index for s in scheduler.rows if s is not None and s.request.prompt_id == "0"] == [0, 2]
    assert [job.tokens.tolist()[:1] for job in scheduler.waiting] == [[1000], [2000], [3000]], "in their original order"
    assert scheduler.waiting[0].tokens.tolist() == [*range(1000, 1006), 0]
    assert scheduler.preempted == 3
    scheduler.preempt()
    with pytest.raises(AssertionError, match="a single sequence always fits"):
        scheduler.preempt()


def test_a_partly_prefilled_prompt_survives_compaction():
    """It is longer than everything that runs alongside it."""
    answers = answers_of((1, 2, 9, [10]), (30, 1, 9, [10]), (1, 3, 9, [2, 3]))
    outcome = simulate(Setting(answers, rows=5, block_tokens=64, prefill_tokens=4))
    assert outcome.scheduler.preempted == 0


@pytest.mark.parametrize("rows", [3, 5, 6, 7, 33])
def test_a_gpu_step_may_have_more_rows_than_the_call(rows):
    assert rounded_rows(rows) > rows
    simulate(Setting(answers_of((9, rows, 9, [10])), rows=rows, block_tokens=8, device="cuda"))


def test_far_more_samples_than_fit_in_memory():
    """There is just enough memory for one sequence; all samples still finish, taking turns."""
    outcome = simulate(Setting(answers_of(*[(9, 4, 16, [17])] * 5), rows=6, block_tokens=4, more_blocks=0, prefill_tokens=5))
    assert outcome.scheduler.preempted > 0
    assert outcome.scheduler.preempted_samples


# BlockAllocator ------------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_block_allocator(data):
    """Against reference counts kept here."""
    total = data.draw(st.integers(1, 8))
    blocks, refcounts = BlockAllocator(total), Counter()
    for _ in range(data.draw(st.integers(0, 30))):
        held, free = sorted(+refcounts), sorted(set(range(total)) - set(+refcounts))
        assert blocks.free == len(free)
        can = ["take"] * bool(free) + ["share", "give back"] * bool(held) + ["exchange"] * bool(free and held)
        match data.draw(st.sampled_from(can)):
            case "take":
                assert blocks.allocate() == free[0], "the lowest"
                refcounts[free[0]] = 1
            case "share":
                block = data.draw(st.sampled_from(held))
                assert blocks.share(block) == block
                refcounts[block] += 1
            case "give back":
                block = data.draw(st.sampled_from(held))
                blocks.release(block)
                refcounts[block] -= 1
            case "exchange":
                block, other = data.draw(st.sampled_from(held)), data.draw(st.sampled_from(free))
                blocks.swap(block, other)
                refcounts[other] = refcounts.pop(block)
    for block in refcounts.elements():
        blocks.release(block)
    assert blocks.free == blocks.total == total
    assert [blocks.allocate() for _ in range(total)] == list(range(total))


def test_free_blocks_cannot_be_released_or_shared():
    blocks = BlockAllocator(2)
    with pytest.raises(AssertionError):
        blocks.release(0)
    with pytest.raises(AssertionError):
        blocks.share(1)
    taken = blocks.allocate()
    blocks.release(taken)
    with pytest.raises(AssertionError):
        blocks.release(taken)
