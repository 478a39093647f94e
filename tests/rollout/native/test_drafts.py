"""Drafts change how many steps a sample takes, and not a bit of it."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
import torch

from plaudit.data.templates import load_tokenizer
from plaudit.models.trainable import load_model
from plaudit.recipe import ModelSettings
from plaudit.rollout.engine import Request, Sampling
from plaudit.rollout.native import cpu_ops, drafts, engine, forward
from plaudit.rollout.native.drafts import STEP_ROWS, Draft, Drafter
from plaudit.rollout.native.engine import NativeEngine
from plaudit.rollout.native.scheduler import RunningSequence
from plaudit.types import Sample
from support.engine_contract import sharpen
from support.models import KINDS

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
LIMITS = (24, 1, 7, 2)
SAMPLINGS = {
    "greedy": Sampling(24, temperature=0.0),
    "temperature 1": Sampling(24),
    "temperature 0.7": Sampling(24, temperature=0.7),
    "top-k": Sampling(24, top_k=7),
    "top-p": Sampling(24, temperature=1.3, top_p=0.8),
    "min-p": Sampling(24, min_p=0.05),
}


def engine_for(folder, dtype: Literal["float32", "bfloat16"] = "float32", **settings) -> NativeEngine:
    model = load_model(ModelSettings(path=str(folder), dtype=dtype), torch.device("cpu"))
    sharpen(model)
    made = NativeEngine(model, None, **settings)
    made.end_tokens = frozenset()
    return made


@pytest.fixture(scope="module")
def _llama(tiny_models) -> NativeEngine:
    return engine_for(tiny_models["llama"])


@pytest.fixture
def llama(_llama, monkeypatch) -> NativeEngine:
    """As it was built, for every test."""
    for name in ("end_tokens", "tokenizer", "drafts", "max_sequences", "on_step"):
        monkeypatch.setattr(_llama, name, getattr(_llama, name))
    return _llama


def requests_of(counts: Sequence[int] = (2, 1, 1, 2)) -> list[Request]:
    rng = np.random.default_rng(5)
    return [
        Request(f"p{i}", rng.integers(5, 250, 3 + 11 * i), n=n, max_new_tokens=limit)
        for i, (n, limit) in enumerate(zip(counts, LIMITS, strict=False))
    ]


def bits_of(samples: Sequence[Sample]) -> dict[tuple[str, int], tuple]:
    found = {}
    for s in samples:
        assert s.sampler_logprobs is not None
        assert s.untempered_logprobs is not None
        bits = (s.tokens.tobytes(), s.sampler_logprobs.tobytes(), s.untempered_logprobs.tobytes())
        found[s.prompt_id, s.index] = (*bits, s.text, s.status)
    return found


class Oracle:
    """Drafts the tokens that samples without drafts have, three of four right, and others after their end."""

    def __init__(self, samples: Sequence[Sample]):
        self.answers = {(s.prompt_id, s.index): s.tokens.tolist() for s in samples}
        self.rng, self.drafted_for = np.random.default_rng(7), set()

    def propose(self, sequences: Sequence[RunningSequence]) -> list[Draft]:
        chosen, room = [], STEP_ROWS - len(sequences)
        for sequence in sequences:
            written, answer = len(sequence.tokens), self.answers[sequence.request.prompt_id, sequence.index]
            for ahead in range(1, min(room, sequence.limit - written - 1, int(self.rng.integers(6))) + 1):
                right = written + ahead - 1 < len(answer) and self.rng.random() < 0.75
                chosen.append(Draft(sequence, answer[written + ahead - 1] if right else 3, ahead))
                room -= 1
                self.drafted_for.add(sequence.request.prompt_id)
        return chosen


def assert_same_with_oracle(made: NativeEngine, requests: Sequence[Request], sampling: Sampling, monkeypatch) -> Oracle:
    new_tokens: dict[bool, list[int]] = {False: [], True: []}
    made.drafts, made.on_step = False, new_tokens[False].append
    without = list(made.generate(requests, sampling))
    assert made.drafted == 0
    oracle = Oracle(without)
    monkeypatch.setattr(engine, "Drafter", lambda: oracle)
    made.drafts, made.on_step = True, new_tokens[True].append
    assert bits_of(list(made.generate(requests, sampling))) == bits_of(without)
    assert 0 < made.accepted < made.drafted
    assert len(new_tokens[True]) < len(new_tokens[False])
    return oracle


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_drafts_change_no_bit(llama, sampling, monkeypatch):
    assert_same_with_oracle(llama, requests_of(), sampling, monkeypatch)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "llama"])
def test_of_any_model(tiny_models, kind, monkeypatch):
    assert_same_with_oracle(engine_for(tiny_models[kind]), requests_of(), Sampling(24), monkeypatch)


@pytest.mark.parametrize("window", [2, 8])
def test_with_sliding_windows(tiny_models, tmp_path, window, monkeypatch):
    shutil.copytree(tiny_models["mistral"], tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"sliding_window": window}))
    assert_same_with_oracle(engine_for(tmp_path / "model"), requests_of(), Sampling(24), monkeypatch)


def test_in_bf16(tiny_models, monkeypatch):
    monkeypatch.setattr(cpu_ops, "multiplies_bf16", lambda: False)
    assert_same_with_oracle(engine_for(tiny_models["llama"], "bfloat16"), requests_of(), Sampling(24), monkeypatch)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_with_packed_weights(tiny_models, dtype, monkeypatch):
    """They are packed while many sequences run; drafts begin when few are left."""
    monkeypatch.setattr(cpu_ops, "multiplies_bf16", lambda: False)
    monkeypatch.setattr(forward, "PREPACK_AFTER_STEPS", 2)
    made, packed = engine_for(tiny_models["llama"], dtype), []
    few, *_ = requests_of()
    many = replace(few, prompt_id="many", n=9, max_new_tokens=4)
    made.forward.decoder.prepack = lambda prepack=made.forward.decoder.prepack: packed.append(True) or prepack()
    assert_same_with_oracle(made, [replace(few, n=2, max_new_tokens=24), many], Sampling(24), monkeypatch)
    assert packed == [True, True], "once in each call"


def test_samples_that_end_inside_a_draft(llama, monkeypatch):
    """Every fifth token ends a response, and drafts continue after it."""
    llama.end_tokens = frozenset(range(0, 300, 5))
    requests = [replace(request, max_new_tokens=None) for request in requests_of()]
    assert_same_with_oracle(llama, requests, Sampling(24), monkeypatch)


def test_stop_strings_inside_a_draft(llama, tiny_models, monkeypatch):
    llama.tokenizer = load_tokenizer(str(tiny_models["llama"]))
    requests = [replace(request, max_new_tokens=None) for request in requests_of()]
    texts = [s.text for s in llama.generate(requests, Sampling(24))]
    stop = (texts[0][12:14], texts[1][9:10])
    assert_same_with_oracle(llama, requests, Sampling(24, stop=stop), monkeypatch)
    assert any(s.status == "finished" for s in llama.generate(requests, Sampling(24, stop=stop)))


def test_new_tokens_are_counted_once(llama, monkeypatch):
    counts = []
    assert_same_with_oracle(llama, requests_of(), Sampling(24), monkeypatch)  # and leaves the oracle as the drafter
    llama.on_step = counts.append
    samples = list(llama.generate(requests_of(), Sampling(24)))
    assert sum(counts) == sum(len(s) for s in samples)


def test_nothing_is_drafted_while_prompts_wait(llama, monkeypatch):
    """Which prompts are prefilled together must not depend on drafts."""
    llama.max_sequences = 2
    requests = [replace(request, max_new_tokens=12) for request in requests_of((2, 1, 1, 2))]
    oracle = assert_same_with_oracle(llama, requests, Sampling(24), monkeypatch)
    assert oracle.drafted_for == {"p3"}


def test_repeated_text_is_drafted(llama):
    """With the drafts that the engine itself makes: the likeliest tokens of a small model repeat."""
    requests, sampling = [Request("p", np.tile(np.arange(10, 22), 4), n=2)], Sampling(60, temperature=0.0)
    with_drafts = bits_of(list(llama.generate(requests, sampling)))
    assert 5 < llama.accepted <= llama.drafted
    llama.drafts = False
    assert bits_of(list(llama.generate(requests, sampling))) == with_drafts
    assert llama.drafted == 0


@pytest.mark.parametrize("without", ["library", "fused layers", "one block per sequence"])
def test_no_drafts_where_bits_may_depend_on_the_batch(tiny_models, without, monkeypatch):
    if without == "library":
        monkeypatch.setattr(cpu_ops, "library_for", lambda dtype: None)
    elif without == "fused layers":
        monkeypatch.setattr(forward, "can_fuse", lambda model: False)
    made = engine_for(tiny_models["llama"], block_tokens=8 if without == "one block per sequence" else None)
    assert len(list(made.generate([Request("p", np.tile(np.arange(10, 22), 4))], Sampling(30, temperature=0.0)))) == 1
    assert made.drafted == 0


# Which tokens are drafted --------------------------------------------------------------------------------------------


def sequence_of(prompt: Sequence[int], response: Sequence[int] = (), limit: int = 100) -> RunningSequence:
    return RunningSequence(Request("p", np.array(prompt)), 0, limit, 0, tokens=list(response))


def drafted(drafter: Drafter, *sequences: RunningSequence) -> list[list[int]]:
    found = drafter.propose(sequences)
    of_each = [[draft for draft in found if draft.sequence is sequence] for sequence in sequences]
    assert all([draft.ahead for draft in one] == list(range(1, len(one) + 1)) for one in of_each)
    return [[draft.token for draft in one] for one in of_each]


def test_drafts_continue_the_last_occurrence():
    text = list(range(20, 32))
    assert drafted(Drafter(), sequence_of([*text, 7, *text[:3], 99, 8, *text[:4]], text[4:6])) == [text[6:9]]
    assert drafted(Drafter(), sequence_of([1, 2, 3, 4, 5, 6, 7, 8])) == [[]]
    assert drafted(Drafter(), sequence_of([1])) == [[]]


def test_longer_matches_first():
    long, short = sequence_of([*range(20), 1, 2, 3, 4, 5, 6, 7, 8]), sequence_of([1, 5, 9, 1])
    [of_long, of_short] = drafted(Drafter(), long, short)
    assert of_long[:2] == [9, 10]
    assert of_short == []


def test_a_loop_is_drafted_beyond_its_end():
    drafter, sequence = Drafter(), sequence_of([5, 6, 7] * 12)
    for token in [5, 6, 7] * 10:
        drafter.propose([sequence])
        sequence.tokens.append(token)
    assert drafted(drafter, sequence) == [[5, 6, 7, 5, 6, 7, 5]]


def test_drafts_stay_below_the_limit():
    prompt = [5, 6, 7] * 12
    assert drafted(Drafter(), sequence_of(prompt, limit=1)) == [[]]
    assert drafted(Drafter(), sequence_of(prompt, [5], limit=3)) == [[6]]
    assert drafted(Drafter(), sequence_of(prompt, [5, 6], limit=3)) == [[]]


def test_drafts_that_are_always_wrong_stop():
    """And begin again when they would be right."""
    drafter, sequence = Drafter(), sequence_of([*range(10, 20), 1, 2, 3], limit=10_000)
    lengths = []
    for i in range(60):
        sequence.tokens += [1, 2, 3, 500 + i]  # what follows 3 is never what followed it before
        drafter.propose([sequence])
        sequence.tokens += [10 + i % 7, 1, 2, 3]
        lengths.append(len(drafter.propose([sequence])))
        sequence.tokens.append(900 + i)
    assert lengths[0] > 0
    assert not any(lengths[-20:])
    for i in range(200):
        sequence.tokens.append(sequence.tokens[-4] if i > 3 else i)
        lengths.append(len(drafter.propose([sequence])))
    assert lengths[-1] > 3


@pytest.mark.parametrize("count", [1, 3, 5, 7, 8, 20])
def test_many_sequences_leave_no_rows_for_drafts(count):
    drafter = Drafter()
    sequences = [sequence_of([5, 6, 7] * 12) for _ in range(count)]
    for at in range(30):
        assert len(drafter.propose(sequences)) <= max(STEP_ROWS - count, 0)
        for sequence in sequences:
            sequence.tokens.append((5, 6, 7)[at % 3])
    assert bool(drafter.propose(sequences)) == (count < STEP_ROWS)


def test_probabilities_are_those_of_what_was_drawn(monkeypatch):
    """A match of one token, right in 30 of 40 cases: (0.1 · 4 + 30) / (4 + 40)."""
    monkeypatch.setattr(drafts, "INDEXED", 1)
    drafter = Drafter()
    for i in range(40):
        sequence = sequence_of([50, 1, 2, 60, 1])
        drafter.propose([sequence])
        sequence.tokens.append(2 if i < 30 else 3)
        drafter.propose([sequence])
    assert drafter._probability(1) == pytest.approx((0.4 + 30) / 44)
