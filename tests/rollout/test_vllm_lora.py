"""A real vLLM server that is given LoRA adapters: the base's weights once, then only the adapters. It is killed."""

from collections.abc import Iterator

import psutil
import pytest
import torch

from plaudit.prepare.tiny_model import make_tiny_model
from plaudit.recipe import LoraSettings
from plaudit.rollout.engine import Sampling
from plaudit.rollout.served.vllm import Vllm
from support.engine_contract import Subject, assert_logprobs, reference_logits, requests_of
from support.served_subject import served_subject
from support.vllm import ARGUMENTS, ENVIRONMENT, PYTHON, needs_vllm

pytestmark = [pytest.mark.slow, needs_vllm]


@pytest.fixture(scope="module")
def subject(tmp_path_factory, rows_file) -> Iterator[Subject]:
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model([rows_file], folder, hidden_size=128, layers=2, vocabulary=320)
    server = {"program": str(PYTHON), "arguments": ARGUMENTS, "lora": "adapters"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        with served_subject("vllm", folder, server, LoraSettings(rank=4, alpha=8.0)) as subject:
            yield subject


def test_samples_are_the_adapted_models_after_every_update(subject: Subject, monkeypatch):
    sent: list[str] = []
    send, send_adapter = Vllm._send, Vllm._send_adapter
    monkeypatch.setattr(Vllm, "_send", lambda *a, **k: (sent.append("all weights"), send(*a, **k))[1])
    monkeypatch.setattr(Vllm, "_send_adapter", lambda *a, **k: (sent.append("adapter"), send_adapter(*a, **k))[1])
    torch.manual_seed(0)
    for version in (0, 1, 2):
        change_adapters(subject)
        subject.sync(version)
        assert_samples_by_the_trainers_model(subject)
    assert sent == ["all weights", "adapter", "adapter", "adapter"]


def test_a_killed_server_is_started_again_with_base_and_adapters_and_nothing_is_sampled_twice(subject: Subject):
    change_adapters(subject)
    subject.sync(3)
    requests, sampling = requests_of((6, 20, 9), n=4), Sampling(max_new_tokens=24, temperature=0.0)
    expected = {(s.prompt_id, s.index): s.tokens.tolist() for s in subject.engine.generate(requests, sampling)}
    samples = subject.engine.generate(requests, sampling)
    first = next(samples)
    for process in psutil.Process().children(recursive=True):
        if str(PYTHON) in process.cmdline():
            process.kill()
    rest = list(samples)
    assert len(rest) == len(expected) - 1
    assert {(s.prompt_id, s.index): s.tokens.tolist() for s in [first, *rest]} == expected
    assert_samples_by_the_trainers_model(subject)


def change_adapters(subject: Subject) -> None:
    with torch.no_grad():
        for name, parameter in subject.model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)


def assert_samples_by_the_trainers_model(subject: Subject) -> None:
    requests = requests_of((3, 40, 9), n=2)
    samples = subject.sample(requests, Sampling(max_new_tokens=16))
    prompts = {request.prompt_id: request.tokens for request in requests}
    subject.model.eval()
    logits = reference_logits(subject.model, [(prompts[sample.prompt_id], sample.tokens) for sample in samples])
    for sample, expected in zip(samples, logits, strict=True):
        assert_logprobs(sample, expected, temperature=1.0)
        assert sample.version == subject.engine.version
