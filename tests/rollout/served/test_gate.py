"""What stands before vLLM's own routes: who may call, which weights a sample is drawn by, and which process loads new ones."""

import asyncio
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plaudit.recipe.rollout import EngineServerSettings
from plaudit.rollout.served import vllm
from plaudit.rollout.served.vllm import WORKER_FOLDER, Vllm
from plaudit.servers.server_command import INSIDE
from plaudit.servers.server_command import KEY as KEY_VARIABLE

KEY = "of-this-run"


@pytest.fixture
def gate(monkeypatch) -> Any:
    """In front of an application that answers everything with 200."""
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    monkeypatch.setattr(sys, "path", [str(WORKER_FOLDER), str(INSIDE), *sys.path])
    from plaudit_vllm import VersionGate  # pyright: ignore[reportMissingImports]

    async def behind(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    return VersionGate(behind)


def call(gate: Any, path: str, key: str = KEY, method: str = "POST", **headers: str) -> tuple[int, dict[str, Any]]:
    named = {f"x-plaudit-{name.replace('_', '-')}": value for name, value in headers.items()}
    encoded = [(name.encode(), value.encode()) for name, value in {"authorization": f"Bearer {key}", **named}.items()]
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(gate({"type": "http", "path": path, "method": method, "headers": encoded}, None, send))
    return sent[0]["status"], json.loads(sent[1]["body"])


def sample(gate: Any, version: str) -> int:
    return call(gate, "/v1/completions", version=version)[0]


def claim(gate: Any, version: str, claimant: str, seconds: float = 60.0) -> str:
    return call(gate, "/plaudit/claim", version=version, claimant=claimant, claim_s=str(seconds))[1]["claim"]


def test_without_the_key_only_health_is_answered(gate):
    assert call(gate, "/health", key="wrong")[0] == 200
    for path in ("/v1/completions", "/metrics", "/plaudit/state", "/plaudit/claim", "/collective_rpc"):
        assert call(gate, path, key="wrong")[0] == 401


def test_samples_need_the_version_that_was_set(gate):
    assert sample(gate, "3") == sample(gate, "") == 409, "a new server has none"
    call(gate, "/plaudit/state", version="3", base="b", adapter="a-3")
    assert (sample(gate, "3"), sample(gate, "4"), sample(gate, "")) == (200, 409, 409)
    call(gate, "/plaudit/state", version="")
    assert sample(gate, "3") == 409, "while weights are loaded"
    assert call(gate, "/plaudit/state")[1] == {"version": None, "base": "b", "adapter": "a-3"}, "what is not named stays"


def test_one_process_loads_a_version_and_the_others_wait_for_it(gate):
    call(gate, "/plaudit/state", version="1")
    assert claim(gate, "2", "rank 0") == "yours"
    assert sample(gate, "1") == 409, "from now on its weights may change"
    assert claim(gate, "2", "rank 1") == "wait"
    assert claim(gate, "2", "rank 0") == "yours", "a second attempt of the same process"
    call(gate, "/plaudit/state", version="2", claimant="rank 0")
    assert claim(gate, "2", "rank 1") == "has"
    assert sample(gate, "2") == 200
    assert claim(gate, "3", "rank 1") == "yours"


def test_a_process_that_is_gone_is_not_waited_for_longer_than_it_said(gate):
    assert claim(gate, "2", "rank 0", seconds=0.0) == "yours"
    assert claim(gate, "2", "rank 1") == "yours"
    assert call(gate, "/plaudit/state", version="2", claimant="rank 0")[0] == 409, "its weights may be overwritten"
    assert sample(gate, "2") == 409
    call(gate, "/plaudit/state", version="2", claimant="rank 1")
    assert sample(gate, "2") == 200


def test_the_worker_folder_is_where_it_is_said_to_be():
    assert {file.name for file in Path(WORKER_FOLDER).glob("*.py")} >= {"plaudit_vllm.py", "plaudit_weight_stream.py"}


class GateServer:
    """The gate, called as a server is; notes the claims."""

    def __init__(self, gate: Any):
        self.gate, self.claims = gate, 0

    def call(self, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Any:
        named = {name.removeprefix("x-plaudit-").replace("-", "_"): value for name, value in (headers or {}).items()}
        status, answer = call(self.gate, path, **named)
        assert status == 200, answer
        self.claims += path == "/plaudit/claim"
        return answer


def test_a_process_that_loads_for_long_renews_its_claim(gate, monkeypatch):
    """So that a claim can be short: one that is killed while it loads keeps the others waiting for no longer."""
    monkeypatch.setattr(vllm, "CLAIM_S", 0.2)
    dialect, server = Vllm(EngineServerSettings()), GateServer(gate)

    def load(*_: Any, **__: Any) -> dict[str, str]:
        deadline = time.monotonic() + 60.0
        while server.claims < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        return {"base": "", "adapter": ""}

    monkeypatch.setattr(dialect, "_load_claimed", load)
    monkeypatch.setattr(dialect, "label", str)
    dialect.load(server, SimpleNamespace(gathered=False), 2, first=True)  # pyright: ignore[reportArgumentType]
    claims = server.claims
    assert claims >= 4
    assert claim(gate, "2", "rank 1") == "has"
    time.sleep(0.2)
    assert server.claims == claims, "it is loaded"
