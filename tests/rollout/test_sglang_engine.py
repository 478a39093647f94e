"""SGLang as the engine, with a stand-in for its server: the contract of engines, new weights, faults, sleep."""

from collections.abc import Generator, Iterator
from contextlib import closing
from pathlib import Path
from typing import cast

import psutil
import pytest
import torch

from plaudit.errors import RecipeError, TrainingStopped
from plaudit.recipe import RolloutSettings
from plaudit.rollout.engine import EngineSetup, Request, Sampling
from plaudit.rollout.served import engine as served
from plaudit.rollout.served.engine import ServedEngine, SglangEngine
from plaudit.rollout.served.sglang import Sglang
from plaudit.types import Sample
from plaudit.world import World
from support.engine_contract import EngineContract, Subject, changed_weights, prompt_of, requests_of
from support.served_subject import served_subject
from support.sglang import stand_in, stand_ins

SILENCE_S = 5.0
REQUESTS, GREEDY = requests_of((6, 20, 9), n=4), Sampling(max_new_tokens=24, temperature=0.0)


@pytest.fixture(scope="module")
def fault(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("faults") / "fault"


@pytest.fixture(scope="module")
def subject(tiny_model, fault) -> Iterator[Subject]:
    server = stand_in("--enable-memory-saver", f"--fault-file {fault}", restarts=100, silence_s=SILENCE_S)
    with pytest.MonkeyPatch.context() as patch, served_subject("sglang", tiny_model, server) as subject:
        patch.setattr(served, "PAUSE_S", 0.0)
        subject.sync(0)
        yield subject


def tokens_of(subject: Subject) -> dict[tuple[str, int], list[int]]:
    return {(s.prompt_id, s.index): s.tokens.tolist() for s in subject.engine.generate(REQUESTS, GREEDY)}


def engine_of(subject: Subject) -> ServedEngine:
    assert isinstance(subject.engine, ServedEngine)
    return subject.engine


def server_process() -> psutil.Process:
    [found] = stand_ins()
    return found


@pytest.mark.slow
class TestContract(EngineContract):
    pass


def test_the_key_is_not_on_the_command_line(subject: Subject):
    words = server_process().cmdline()
    assert all(engine_of(subject)._servers[0]._token not in word for word in words)


def test_a_killed_server_is_started_again_and_nothing_is_sampled_twice(subject: Subject):
    requests = [Request("short", prompt_of(5), max_new_tokens=1), *requests_of((6, 20, 9), n=4)]
    sampling = Sampling(max_new_tokens=60, temperature=0.0)
    expected = {(s.prompt_id, s.index): s.tokens.tolist() for s in subject.engine.generate(requests, sampling)}
    samples = subject.engine.generate(requests, sampling)
    got, killed = [next(samples)], server_process()
    killed.kill()
    got += samples
    assert server_process().pid != killed.pid, "or all samples were there before"
    assert len(got) == len(expected)
    assert {(s.prompt_id, s.index): s.tokens.tolist() for s in got} == expected


@pytest.mark.slow
def test_a_killed_server_gets_the_weights_of_the_last_sync(subject: Subject):
    before = tokens_of(subject)
    with changed_weights(subject), torch.no_grad():
        for name, parameter in subject.model.named_parameters():
            if "layers." in name and parameter.ndim == 2:
                parameter.mul_(1.5)
        subject.sync(7)
        after = tokens_of(subject)
        server_process().kill()
        assert tokens_of(subject) == after != before
    assert tokens_of(subject) == before


def test_samples_by_other_weights_are_refused(subject: Subject, capfd):
    """The server says which weights it sampled with; it is started again, and gets the right ones."""
    expected, server, dialect = tokens_of(subject), server_process(), engine_of(subject)._dialect
    assert isinstance(dialect, Sglang)
    dialect._label = "another"  # as if the last sync had not reached the server
    assert tokens_of(subject) == expected
    assert "it sampled with weights 'plaudit-" in capfd.readouterr().err
    assert server_process().pid != server.pid


SILENT = rf"its server is lost \(no sample for {SILENCE_S:g} s \(rollout.server.silence_s\)\), again, without a sample"
LOST = "its server is lost .*, again, without a sample since it was started again"
STALE = r"its server is lost \(it sampled with weights 'of another run' instead of 'plaudit-.*'\), again"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("garbage", r"no tokens with log-probs and weight_version in its answer .*: SGLang 0\.5\.3 or later is needed"),
        ("no json", "its answer at /generate is no JSON"),
        ("error", "HTTP 400 at /generate: .*out of luck"),
        ("not finite", "its logits are not finite"),
        pytest.param("stale", STALE, marks=pytest.mark.slow),
        pytest.param("die", LOST, marks=pytest.mark.slow),
        pytest.param("hang", SILENT, marks=pytest.mark.slow),
    ],
)
def test_a_server_that_misbehaves_ends_the_run_with_one_clear_error(subject: Subject, fault: Path, what: str, message: str):
    fault.write_text(what)
    try:
        with pytest.raises(TrainingStopped, match=f"^rollout.engine sglang: {message}"):
            tokens_of(subject)
    finally:
        fault.unlink()
        engine_of(subject)._has_sampled = True  # so that other tests can use the engine
        subject.sync(subject.engine.version)
    assert len(tokens_of(subject)) == 12


def test_a_server_that_slept_has_the_next_weights(subject: Subject):
    engine = engine_of(subject)
    expected = tokens_of(subject)
    engine._sleeps = True
    try:
        with closing(cast("Generator[Sample]", engine.generate(REQUESTS, Sampling(max_new_tokens=200)))) as closed:
            next(closed)
        # Its other requests may still be running when the server is put to sleep.
        engine.rest()
        assert engine._asleep
        with pytest.raises(TrainingStopped, match="the memory was released"):
            tokens_of(subject)
        subject.sync(3)
        assert tokens_of(subject) == expected
    finally:
        engine._sleeps = False


def test_weights_as_a_stream_are_refused(subject: Subject):
    rollout = RolloutSettings(engine="sglang", server=stand_in(weights="stream"))  # pyright: ignore
    with pytest.raises(RecipeError, match=r"rollout\.server\.weights: SGLang takes them as files"):
        SglangEngine(EngineSetup(rollout, subject.model, subject.tokenizer, World.alone()))
