"""vLLM's servers as stand-ins: those that run already, those of a sharded policy, and what an error leaves behind."""

import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from plaudit.data.templates import load_template, load_tokenizer
from plaudit.errors import RecipeError
from plaudit.models.trainable import load_policy
from plaudit.recipe import ModelSettings, RolloutSettings
from plaudit.rollout.build import build_engine
from plaudit.rollout.engine import EngineSetup, Sampling
from plaudit.rollout.served import engine as served
from plaudit.rollout.served.vllm import Vllm
from plaudit.servers.process import free_port
from plaudit.world import World
from support.engine_contract import Subject, assert_logprobs, reference_logits, requests_of, sharpen
from support.paths import TESTS
from support.processes import Command
from support.served_ranks import REQUESTS, double

STAND_IN = TESTS / "support" / "vllm_server.py"
LAUNCHED = {"program": f"{sys.executable} {STAND_IN}"}
KEY = "POLICY_KEY"


@contextmanager
def stand_in(folder: Path, port: int, key: str = "secret") -> Iterator[str]:
    """A server that runs already."""
    environment = {**os.environ, **Vllm(RolloutSettings(engine="vllm").server).environment(key, {})}
    command = [
        sys.executable,
        str(STAND_IN),
        "--model",
        str(folder),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--dtype",
        "float32",
    ]
    server = subprocess.Popen(command, env=environment)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5)
                break
            except (urllib.error.URLError, OSError):
                assert server.poll() is None
                time.sleep(0.1)
        yield url
    finally:
        server.kill()
        server.wait()


@pytest.fixture
def subject_for(tiny_model, monkeypatch) -> Any:
    monkeypatch.setenv(KEY, "secret")
    monkeypatch.setattr(served, "PAUSE_S", 0.0)
    tokenizer = load_tokenizer(str(tiny_model))
    settings = ModelSettings(path=str(tiny_model), dtype="float32")
    model = sharpen(load_policy(settings, load_template(tokenizer, None), torch.device("cpu")).model)

    @contextmanager
    def make(**server: Any) -> Iterator[Subject]:
        setup = EngineSetup(RolloutSettings(engine="vllm", server=server), model, tokenizer, World.alone())  # pyright: ignore
        with closing(build_engine(setup)) as engine:
            yield Subject(engine, model, tokenizer)

    return make


def assert_sampled_by(model: Any, samples: list[Any], requests: Any) -> None:
    prompts = {request.prompt_id: request.tokens for request in requests}
    for sample, logits in zip(samples, reference_logits(model, [(prompts[s.prompt_id], s.tokens) for s in samples]), strict=True):
        assert_logprobs(sample, logits, temperature=1.0)


@pytest.mark.slow
def test_servers_that_run_already_share_the_samples_and_get_weights_again_after_a_restart(subject_for, tiny_model, monkeypatch):
    requests, sampling = requests_of((4, 9), n=3), Sampling(max_new_tokens=6)
    ports = free_port(), free_port()
    with stand_in(tiny_model, ports[0]) as first:
        with stand_in(tiny_model, ports[1]) as second, subject_for(url=[first, second], credential=KEY) as subject:
            subject.sync(0)
            samples = subject.sample(requests, sampling)
            assert len(samples) == 6
            assert_sampled_by(subject.model, samples, requests)
        with subject_for(url=[first], credential=KEY) as subject:  # a later run
            subject.sync(0)
            [server] = subject.engine._servers
            server.call("/plaudit/state", headers={"x-plaudit-version": ""})  # as one that was started again
            assert_sampled_by(subject.model, subject.sample(requests, sampling), requests)
            assert subject.engine._restarts == 1
        monkeypatch.setenv(KEY, "another")
        with pytest.raises(RecipeError, match=f"does not accept the key in {KEY}"), subject_for(url=[first], credential=KEY):
            pass


class NoExtension(BaseHTTPRequestHandler):
    """A server that is healthy, and knows nothing of plaudit."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def do_POST(self) -> None:
        self.send_error(404)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_a_server_without_plaudits_extension_is_refused_with_how_to_start_it(subject_for):
    with ThreadingHTTPServer(("127.0.0.1", 0), NoExtension) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        with (
            pytest.raises(RecipeError, match=r"takes no weights from plaudit \(HTTP 404.*plaudit engine-command"),
            subject_for(url=url, credential=KEY),
        ):
            pass
        server.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True], ids=["a server each", "a shared server that runs already"])
def test_a_sharded_policy_is_sampled_whole(tiny_model, tmp_path, shared, subject_for):
    with stand_in(tiny_model, free_port()) if shared else nullcontext() as url:
        server = {"url": [url], "credential": KEY} if shared else LAUNCHED
        arguments = [tiny_model, tmp_path, json.dumps(server)]
        ranks = [Command(rank, *arguments, script="from support.served_ranks import main; main()") for rank in range(2)]
        assert [rank.ended() for rank in ranks] == [0, 0], "\n".join(rank.output for rank in ranks)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [one["restarts"] for one in found] == ([0, 0] if shared else [0, 1])
    prompts = {request.prompt_id: request.tokens for request in REQUESTS}
    model = sharpen(load_policy(*policy_arguments(tiny_model)).model)
    for version in ("0", "1"):
        if version == "1":
            double(model)
        for one in found:
            assert len(one[version]) == 4
            for prompt, tokens, logprobs in one[version]:
                logits = reference_logits(model, [(prompts[prompt], np.array(tokens))])[0]
                expected = logits.log_softmax(-1)[range(len(tokens)), tokens]
                np.testing.assert_allclose(logprobs, expected.numpy(), rtol=0, atol=1e-4)


def policy_arguments(folder: Path) -> tuple[Any, ...]:
    template = load_template(load_tokenizer(str(folder)), None)
    return ModelSettings(path=str(folder), dtype="float32"), template, torch.device("cpu")


@pytest.mark.parametrize(
    ("server", "message"),
    [
        ({"program": "no-such-program"}, "there is no command no-such-program"),
        ({"program": "/bin/sh -c false"}, "ended before it was ready"),
        ({"program": f"{sys.executable} -c 1", "gpus": [0], "tensor_parallel": 1}, "ended before it was ready"),
        ({"url": ["http://127.0.0.1:9"]}, "needs rollout.server.credential"),
        ({"url": ["http://127.0.0.1:9"], "credential": "NOT_SET"}, "the environment variable NOT_SET"),
        ({"url": ["http://127.0.0.1:9"], "credential": KEY, "start_timeout_s": 0.1}, "did not answer within"),
    ],
    ids=["no program", "a program that ends", "GPUs of its own", "no credential", "no key", "no server"],
)
def test_an_engine_that_cannot_be_built_leaves_nothing(subject_for, server, message, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(RecipeError, match=message), subject_for(**server):
        pass
    left = [file for file in tmp_path.rglob("*") if file.is_file() and file.name != "server.log"]
    assert not left
