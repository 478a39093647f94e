"""Inside a vLLM server: plaudit's key on every route.

vLLM's own key guards the routes that generate, and leaves open those that put the server to sleep. `--middleware
plaudit_gate.KeyGate` stands before all of them. Loaded in the server's environment, in which plaudit is not: only the standard
library is imported.
"""

import hmac
import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

KEY = "PLAUDIT_SERVER_TOKEN"
"""The environment variable that has the key."""
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class KeyGate:
    """ASGI middleware: without the key, the server answers nothing but `/health`."""

    def __init__(self, app: Any):
        self.app = app
        self._key = os.environ[KEY]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":  # plaudit opens none
            await send({"type": "websocket.close", "code": 1008})
        elif scope["type"] != "http" or scope["path"] == "/health":
            await self.app(scope, receive, send)
        elif hmac.compare_digest(dict(scope["headers"]).get(b"authorization", b"").removeprefix(b"Bearer "), self._key.encode()):
            await self.admit(scope, receive, send)
        else:
            await answer(send, 401, {"error": "this server belongs to a plaudit run, and takes requests from it only"})

    async def admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A request with the key."""
        await self.app(scope, receive, send)


async def answer(send: Send, status: int, content: dict[str, Any]) -> None:
    body = json.dumps(content).encode()
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": body})
