"""A judge's server that sends any bytes: answers that no HTTP library would produce."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterable
from typing import Any, Self

MODELS = {"data": [{"id": "judge"}]}
Reply = Callable[[str, dict[str, Any]], Iterable[bytes] | None]


class RawServer:
    """`with RawServer(reply) as server: … server.url …`. `reply(path, body)` gives the bytes of a response, header included, which
    may never end; None for a good list of models."""

    def __init__(self, reply: Reply):
        self.reply, self.requests, self.sent = reply, 0, 0
        self.port = 0
        self._loop = asyncio.new_event_loop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _stop(self) -> None:
        self._server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            length = next((int(line[15:]) for line in head.split("\r\n") if line.lower().startswith("content-length:")), 0)
            path, body = head.split(" ")[1], json.loads(await reader.readexactly(length) or b"{}")
            self.requests += path != "/v1/models"
            chunks = self.reply(path, body)
            for chunk in chunks if chunks is not None else [response(MODELS)]:
                writer.write(chunk)
                await writer.drain()
                self.sent += len(chunk)
        writer.close()


def response(body: Any, status: str = "200 OK", headers: str = "") -> bytes:
    """A complete response: JSON, or text as it is."""
    data = body if isinstance(body, bytes) else (body if isinstance(body, str) else json.dumps(body)).encode()
    return f"HTTP/1.1 {status}\r\n{headers}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data


def chat(text: str, **fields: Any) -> dict[str, Any]:
    """A chat completion."""
    return {"choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}], **fields}
