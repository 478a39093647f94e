"""Embedding models, in this process, behind a URL and launched: cosines by hand, and whose fault a missing one is."""

import asyncio
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from plaudit.errors import RecipeError
from plaudit.recipe.limits import ModelLimits
from plaudit.recipe.reward_models import EmbeddingModel, RewardModel
from plaudit.reward_models.backend import Backend, ScalarScore, Usage
from plaudit.reward_models.launch import LaunchedModel
from plaudit.reward_models.model_registry import build_backend
from plaudit.rewards.judges.similarity import Similarity
from plaudit.scoring import Scorer
from plaudit.types import Message
from support.fault_server import FaultServer
from support.processes import gone
from support.servers import events, starts

QUICK = ModelLimits(backoff_s=0.001, retries=2)


@pytest.fixture
def server():
    with FaultServer() as one:
        yield one


def pair(reference: str, response: str) -> list[Message]:
    return [{"role": "user", "content": reference}, {"role": "assistant", "content": response}]


def scores(backend: Backend, *pairs: tuple[str, str]) -> tuple[list[ScalarScore], Usage]:
    async def run() -> list[ScalarScore]:
        try:
            await backend.open()
            return await backend.score([pair(*one) for one in pairs])
        finally:
            await backend.close()

    return asyncio.run(run()), backend.usage


def served(server: FaultServer, **settings: Any) -> Backend:
    model = EmbeddingModel.model_validate({"placement": "server", "url": server.url, **settings})
    return build_backend(model, QUICK, scalar=True)


# Behind a URL --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", ["vllm", "sglang", "openai"])
def test_a_servers_embeddings_are_compared(server, dialect):
    """Its embeddings are counts of a, b and c. Every text is sent once."""
    found, usage = scores(served(server, dialect=dialect), ("a", "aaa"), ("a", "ab"), ("bb", "ab"), ("a", "c"), ("a", "x"))
    assert [one.value for one in found] == pytest.approx([1.0, 2**-0.5, 2**-0.5, 0.0, 0.0])
    asked = [request for request in server.requests if "1 + 1" not in str(request.body) and request.body["input"] != "2"]
    assert {request.path for request in asked} == {"/v1/embeddings"}
    assert sorted(request.body["input"] for request in asked) == sorted(["a", "aaa", "ab", "bb", "c", "x"])
    assert asked[0].body.keys() == {"input", "encoding_format", "model"}
    assert (usage.calls, usage.prompt_tokens) == (6, len("aaaaabbbcx"))


def test_faults_of_a_server_fail_their_pairs_alone(server):
    pairs = (("a", "500 a"), ("a", "500:1 a"), ("a", "nan"), ("a", "toolong"), ("toolong", "a"), ("a", "aa"))
    found, usage = scores(served(server), *pairs)
    assert [one.failure and one.failure.cause for one in found] == ["http", None, "garbage", None, "context", None]
    assert [one.too_long for one in found] == [False, False, False, True, False, False]
    assert [one.value for one in found] == [None, 1.0, None, None, None, 1.0]
    assert usage.failures == {"http": 1, "garbage": 1}


def test_a_text_longer_than_max_prompt_tokens_is_the_responses_fault(server):
    found, _ = scores(served(server, max_prompt_tokens=20), ("a", "a" * 20), ("a", "a" * 21))
    assert [(one.value, one.too_long) for one in found] == [(1.0, False), (None, True)]


def test_a_server_without_embeddings_is_reported_when_it_is_opened(server):
    server.fault_for_all = "schema"
    with pytest.raises(RecipeError, match=r"the model does not score: .*/v1/embeddings: not the expected JSON"):
        scores(served(server))


def test_a_recipe_scores_with_a_server(server):
    reward = {"kind": "similarity", "model": {"placement": "server", "url": server.url}}
    with Scorer([reward]) as scorer:
        [row] = scorer.score([{"prompt": "p", "responses": ["aab", "c", ""], "ground_truth": ["ab", "a"]}])
    assert row["reward"] == pytest.approx([3 / (5 * 2) ** 0.5, 0.0, 0.0])
    assert row["malformed"] == [False, False, True]


# Launched ------------------------------------------------------------------------------------------------------------


def test_an_embedding_server_is_started_for_a_recipe(program):
    arguments = [f"--{kind} {program.parent / kind}.jsonl" for kind in ("starts", "events")]
    model = {"path": "models/embedder", "placement": "launch", "program": f"{sys.executable} {program}", "arguments": arguments}
    with Scorer([{"kind": "similarity", "model": model}]) as scorer:
        [row] = scorer.score([{"prompt": "p", "response": "ab", "ground_truth": "a"}])
    assert row["reward"] == pytest.approx(2**-0.5)
    [start] = starts(program)
    assert start["arguments"][start["arguments"].index("--runner") + 1] == "pooling"
    assert set(events(program)) == {"/v1/embeddings"}
    assert gone(start["pid"])


@pytest.mark.parametrize(("dialect", "option"), [("vllm", "--runner"), ("sglang", "--is-embedding")])
def test_the_command_of_an_embedding_server(dialect, option):
    model = EmbeddingModel(path="m", placement="launch", dialect=dialect)
    backend = build_backend(model, QUICK, scalar=True)
    assert isinstance(backend, LaunchedModel)
    assert option in backend.command


# In this process -----------------------------------------------------------------------------------------------------


class Letters:
    """In place of sentence-transformers' model: counts of a, b and c; a token for each character, and eight at most."""

    max_seq_length = 8

    def __init__(self, path: str, **settings: Any):
        if path == "gone":
            raise OSError("no such model")
        self.calls: list[list[str]] = []

    def tokenizer(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [[0] * len(text) for text in texts]}

    def encode(self, texts: list[str], **_: Any) -> np.ndarray:
        if "boom" in texts:
            raise RuntimeError("out of ideas")
        return np.array([[text.count(letter) for letter in "abc"] for text in texts], dtype=np.float32)


@pytest.fixture
def letters(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", SimpleNamespace(SentenceTransformer=Letters))


def local(path: str = "org/letters", **settings: Any) -> Backend:
    return build_backend(EmbeddingModel(path=path, device="cpu", **settings), QUICK, scalar=True)


@pytest.mark.usefixtures("letters")
def test_a_model_in_this_process_does_not_truncate():
    """Otherwise all that follows the part it reads would be free."""
    found, usage = scores(local(), ("a", "ab"), ("a", "a" * 8), ("a", "a" * 9), ("b" * 9, "b"))
    assert [one.value for one in found] == [pytest.approx(2**-0.5), 1.0, None, None]
    assert [one.too_long for one in found] == [False, False, True, False]
    assert [one.failure and one.failure.cause for one in found] == [None, None, None, "context"]
    assert (usage.calls, usage.prompt_tokens) == (6, 1 + 2 + 8 + 1)


@pytest.mark.usefixtures("letters")
def test_an_exception_in_the_model_is_a_failure():
    [one], usage = scores(local(), ("a", "boom"))
    assert one.failure is not None
    assert "out of ideas" in one.failure.message
    assert sum(usage.failures.values()) == 2


@pytest.mark.usefixtures("letters")
def test_a_model_that_cannot_be_loaded_is_reported(monkeypatch):
    monkeypatch.setattr("plaudit.reward_models.embeddings.find_problem", lambda *_: "the hub has none")
    with pytest.raises(RecipeError, match="from gone: there is no such folder, and the hub has none"):
        scores(local("gone"))


def test_what_to_install_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(RecipeError, match=r"pip install 'sentence-transformers>=.*placement to server or launch"):
        scores(local())


@pytest.mark.slow
def test_a_real_embedding_model(tiny_model, tmp_path):
    """A tiny model's mean-pooled hidden states, compared with sentence-transformers' own."""
    sentence_transformers = pytest.importorskip("sentence_transformers", reason="needs plaudit[similarity]")
    embedder = sentence_transformers.SentenceTransformer(str(tiny_model), device="cpu")  # pools by the mean
    embedder.save(str(tmp_path / "embedder"))
    truths, responses = ["four", "the number 4"], ["four", "It is 4.", "no"]
    vectors = embedder.encode([*truths, *responses], convert_to_numpy=True).astype(np.float64)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    expected = (vectors[2:] @ vectors[:2].T).max(1)
    with Scorer([{"kind": "similarity", "model": {"path": str(tmp_path / "embedder"), "device": "cpu"}}]) as scorer:
        [row] = scorer.score([{"prompt": "p", "responses": responses, "ground_truth": truths}])
    assert row["reward"] == pytest.approx(expected.tolist(), abs=1e-5)
    assert row["reward"][0] == pytest.approx(1.0)


# Settings ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        ({"path": "m", "placement": "offload"}, "resident, or on a server"),
        ({"path": "m", "chat_template": "chatml"}, "it has no chat_template"),
        ({"path": "m", "tokenizer": "t"}, "tokenizer belongs to placement: launch"),
        ({"path": "m", "rank": [0, 1]}, "not divided"),
        ({}, "path is missing"),
    ],
)
def test_settings_that_an_embedding_model_cannot_have(model, problem):
    with pytest.raises(ValidationError, match=problem):
        Similarity.model_validate({"kind": "similarity", "model": model})


def test_the_same_model_embeds_and_scores_separately():
    """Models are shared by their settings: what embeds must not share a backend with what scores."""
    assert EmbeddingModel(path="m") != RewardModel(path="m")
