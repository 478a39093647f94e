"""A real SGLang server as the engine, by the contract of engines. PLAUDIT_SGLANG_PYTHON: what has SGLang."""

import os
from collections.abc import Iterator

import pytest

from plaudit.prepare.tiny_model import make_tiny_model
from support.engine_contract import EngineContract, Subject
from support.served_subject import served_subject

PYTHON = os.environ.get("PLAUDIT_SGLANG_PYTHON")
ARGUMENTS = [
    "--attention-backend torch_native",
    "--disable-overlap-schedule",
    "--max-total-tokens 20000",
    "--mem-fraction-static 0.3",
]
pytestmark = [pytest.mark.slow, pytest.mark.skipif(PYTHON is None, reason="needs SGLang: set PLAUDIT_SGLANG_PYTHON")]


@pytest.fixture(scope="module")
def subject(tmp_path_factory, rows_file) -> Iterator[Subject]:
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model([rows_file], folder, hidden_size=128, layers=2, vocabulary=320)
    with served_subject("sglang", folder, {"program": PYTHON, "arguments": ARGUMENTS}) as subject:
        subject.sync(0)
        yield subject


class TestContract(EngineContract):
    def test_samples_are_yielded_while_others_run(self, subject):
        pytest.skip("needs seeds, which SGLang uses only with --enable-deterministic-inference, and that not on a CPU")
