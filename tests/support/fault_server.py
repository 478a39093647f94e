"""A judge's server that fails on demand: a real HTTP server with enough of the OpenAI API to answer requests.

The prompt says how to fail: 'reset:2 why?' resets the connection the first two times, 'reset why?' always. In a test it runs in a
thread; as a program (`python tests/support/fault_server.py --latency 0.2`) in a separate process, for bench/judges.py.
"""

import argparse
import asyncio
import contextlib
import json
import re
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from aiohttp import web

FAULTS = (
    "500", "503", "429", "400", "401", "403", "hang", "half", "reset", "notjson", "schema", "empty", "notext", "nan", "toolong",
    "unknownfield",
)  # fmt: skip
BAD_ANSWERS = {
    "notjson": "<html>502 Bad Gateway</html>",
    "schema": '{"object": "something else"}',
    "empty": '{"choices": [], "data": []}',
    "notext": '{"choices": [{"message": {"role": "assistant"}}], "data": [{"probs": [], "embedding": []}]}',
    "nan": '{"choices": [{"message": 5}], "data": [{"probs": [NaN], "embedding": [NaN]}]}',
}
STATUSES = {
    "500": "the engine broke",
    "503": "overloaded",
    "429": "too many requests",
    "400": "temperature must not be negative",
    "401": "invalid key",
    "403": "forbidden",
    "unknownfield": "Unrecognized request argument supplied: top_k",
    "toolong": "This model's maximum context length is 64 tokens. However, your prompt contains 80 input tokens.",
}


@dataclass
class ReceivedRequest:
    """One request as received."""

    path: str
    body: dict[str, Any]
    key: str | None
    at: float


class FaultServer:
    """`with FaultServer() as server: … server.url …`"""

    def __init__(
        self, *, model: str = "judge", latency_s: float = 0.0, port: int = 0, key: str | None = None, retry_after: str = ""
    ):
        self.model, self.latency_s, self.port, self.key, self.retry_after = model, latency_s, port, key, retry_after
        self.max_model_len: int | None = None
        self.longest_prompt: int | None = None
        """In words, or in tokens if it gets tokens: longer ones do not fit."""
        self.others: list[str] = []
        """Further models that it lists."""
        self.fault_for_all: str | None = None
        self.reply: Callable[[str], str] = "answer to {}".format
        """Its answer to a prompt."""
        self.dies_after: int | None = None
        self.requests: list[ReceivedRequest] = []
        self.tries: Counter[str] = Counter()
        self.in_flight = self.max_in_flight = 0
        self.connections: set[Any] = set()
        self._loop = asyncio.new_event_loop()
        self._runner: web.AppRunner | None = None
        self._held: socket.socket | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def contents(self) -> list[str]:
        return [_content(request.body) for request in self.requests]

    # Start and stop ---------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.live()
        return self

    def __exit__(self, *_: object) -> None:
        self.die()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        if self._held is not None:
            self._held.close()

    def live(self) -> None:
        """Start listening, also after `die`."""
        asyncio.run_coroutine_threadsafe(self.listen(), self._loop).result()

    def die(self) -> None:
        """Stop listening, and cut all connections."""
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()

    async def listen(self) -> None:
        app = web.Application(client_max_size=2**26)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        for path in ("/v1/chat/completions", "/v1/completions", "/classify", "/v1/embeddings"):
            app.router.add_post(path, self._answer)
        if self._held is None:
            # Bound but not listening: connections are refused while it is dead, and no other process takes the port.
            self._held = socket.socket()
            self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._held.bind(("127.0.0.1", self.port))
            self.port = self._held.getsockname()[1]
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.01)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, backlog=2048, reuse_address=True)
        await site.start()

    async def _stop(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            for site in list(runner.sites):
                await site.stop()
            for transport in list(self.connections):
                transport.abort()
            await runner.cleanup()

    # Answers ----------------------------------------------------------------------------------------------------------

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        if self._locked(request):
            return self._refusal("401", request)
        others = [{"id": name} for name in self.others]
        return web.json_response({"data": [{"id": self.model, "max_model_len": self.max_model_len}, *others]})

    def _locked(self, request: web.Request) -> bool:
        return self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}"

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        self.requests.append(ReceivedRequest(request.path, body, request.headers.get("Authorization"), time.monotonic()))
        if self.dies_after is not None and len(self.requests) > self.dies_after:
            self._loop.create_task(self._stop())
            if request.transport is not None:  # accepted while stopping, so _stop does not abort it
                request.transport.abort()
            await asyncio.sleep(60)
        self.connections.add(request.transport)
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        try:
            if self.latency_s:
                await asyncio.sleep(self.latency_s)
            content = _content(body)
            fault = "401" if self._locked(request) else self.fault_for_all or self._fault(content)
            return await self._go_wrong(fault, request) if fault else web.json_response(self._good(request.path, body, content))
        finally:
            self.in_flight -= 1
            self.connections.discard(request.transport)

    def _fault(self, content: str) -> str | None:
        """'reset:2 …': reset, for the first two tries."""
        found = re.match(rf"({'|'.join(FAULTS)})(?::(\d+))?\b", content)
        self.tries[content] += 1
        if self.longest_prompt is not None and len(content.split()) > self.longest_prompt:
            return "toolong"
        return found[1] if found and (found[2] is None or self.tries[content] <= int(found[2])) else None

    def _good(self, path: str, body: dict[str, Any], content: str) -> dict[str, Any]:
        usage = {"prompt_tokens": len(content), "completion_tokens": 2}  # a token for each character
        if path == "/classify":
            if "text" in body or "input_ids" in body:  # SGLang's
                return {"embedding": [len(content) / 4], "meta_info": {"prompt_tokens": len(content)}}
            return {"data": [{"index": 0, "label": None, "probs": [len(content) / 4], "num_classes": 1}], "usage": usage}
        if path == "/v1/embeddings":  # how often a text has each of these letters
            return {"data": [{"index": 0, "embedding": [content.count(letter) for letter in "abc"]}], "usage": usage}
        text, reason = self.reply(content), "length" if content.startswith("long") else "stop"
        choice = {"text": text} if path == "/v1/completions" else {"message": {"role": "assistant", "content": text}}
        return {"choices": [{"index": 0, "finish_reason": reason, **choice}], "usage": usage}

    async def _go_wrong(self, fault: str, request: web.Request) -> web.StreamResponse:
        transport = request.transport
        assert transport is not None
        match fault:
            case "hang":
                await asyncio.sleep(3600)
            case "half":
                response = web.StreamResponse(headers={"Content-Length": "1000", "Content-Type": "application/json"})
                await response.prepare(request)
                await response.write(b'{"choices": [{"index": 0, "mess')
                transport.close()
                return response
            case "reset":
                linger = struct.pack("ii", 1, 0)  # close with RST instead of FIN
                transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                transport.abort()
                await asyncio.sleep(0)
        return web.Response(text=BAD_ANSWERS[fault]) if fault in BAD_ANSWERS else self._refusal(fault, request)

    def _refusal(self, fault: str, request: web.Request) -> web.Response:
        headers = {"Retry-After": self.retry_after} if self.retry_after and fault in ("429", "503") else {}
        key = request.headers.get("Authorization", "").removeprefix("Bearer ")
        message = STATUSES.get(fault, "") + (f" (got {key})" if fault == "401" else "")
        status = 400 if fault in ("toolong", "unknownfield") else int(fault) if fault.isdigit() else 500
        return web.json_response({"error": {"message": message}}, status=status, headers=headers)


def _content(body: dict[str, Any]) -> str:
    """The prompt, in whatever form it was sent."""
    if "messages" in body:
        return body["messages"][-1]["content"]
    found = next(body[name] for name in ("prompt", "input", "input_ids", "text") if name in body)
    return found if isinstance(found, str) else " ".join(map(str, found))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--latency", type=float, default=0.0)
    parser.add_argument("--port", type=int, default=0)
    arguments = parser.parse_args()

    async def serve() -> None:
        server = FaultServer(latency_s=arguments.latency, port=arguments.port)
        await server.listen()
        print(server.port, flush=True)
        while True:
            await asyncio.sleep(1)
            server.requests.clear()
            server.tries.clear()

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve())


if __name__ == "__main__":
    main()
