"""A real vLLM server as the engine: the contract of engines, new weights, a server that is killed."""

from collections.abc import Iterator

import psutil
import pytest

from plaudit.prepare.tiny_model import make_tiny_model
from plaudit.rollout.engine import Sampling
from plaudit.rollout.served.engine import ServedEngine
from plaudit.rollout.served.vllm import Vllm
from support.engine_contract import EngineContract, Subject, requests_of
from support.served_subject import served_subject
from support.vllm import ARGUMENTS, ENVIRONMENT, PYTHON, needs_vllm

pytestmark = [pytest.mark.slow, needs_vllm]


@pytest.fixture(scope="module")
def subject(tmp_path_factory, rows_file) -> Iterator[Subject]:
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model([rows_file], folder, hidden_size=128, layers=2, vocabulary=320)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        with served_subject("vllm", folder, {"program": str(PYTHON), "arguments": ARGUMENTS}) as subject:
            subject.sync(0)
            yield subject


class TestContract(EngineContract):
    pass


def test_twenty_syncs_take_no_memory(subject: Subject):
    engine = subject.engine
    assert isinstance(engine, ServedEngine)

    [server] = engine._servers

    def used() -> int:
        return sum(worker["host"] for worker in Vllm(server.settings).on_workers(server, "plaudit_memory"))

    for version in range(5):
        subject.sync(version)
    before = used()
    for version in range(20):
        subject.sync(version)
    weights = sum(p.numel() * p.element_size() for p in subject.model.parameters())
    assert used() - before < 5 * weights, "twenty copies would be more"


def test_a_killed_server_is_started_again_and_nothing_is_sampled_twice(subject: Subject):
    engine = subject.engine
    assert isinstance(engine, ServedEngine)
    requests, sampling = requests_of((6, 20, 9), n=4), Sampling(max_new_tokens=24, temperature=0.0)
    expected = {(s.prompt_id, s.index): s.tokens.tolist() for s in engine.generate(requests, sampling)}
    samples = engine.generate(requests, sampling)
    first = next(samples)
    for process in psutil.Process().children(recursive=True):
        if str(PYTHON) in process.cmdline():
            process.kill()
    rest = list(samples)
    got = {(s.prompt_id, s.index): s.tokens.tolist() for s in [first, *rest]}
    assert len(rest) == len(expected) - 1
    assert got == expected
