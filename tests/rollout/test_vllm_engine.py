"""A real vLLM server as the engine: the contract of engines, and new weights. (A server that is killed: test_vllm_lora.py.)"""

from collections.abc import Iterator

import pytest

from plaudit.prepare.tiny_model import make_tiny_model
from plaudit.rollout.served.engine import ServedEngine
from plaudit.rollout.served.vllm import Vllm
from support.engine_contract import EngineContract, Subject
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
