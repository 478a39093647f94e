"""Who comes in: the token, the sizes, how many at a time. What is turned away is never kept.

Plain ASGI around the application, which therefore sees whole bodies of an allowed size only.
"""

import asyncio
import hmac
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from plaudit.serving.service import Service
from plaudit.serving.wire import dump

OPEN = ("/health", "/docs", "/openapi.json")
"""Paths that need no token: nothing of the recipe's or the users' is there."""
BODY_S = 60.0
"""How long a body may take to arrive."""
LINGER_S, LINGER_BYTES = 5.0, 256 * 2**20
"""A body that is not taken is read for a while and thrown away, or its sender would not come to read the answer."""
GONE = 499
"""Logged where nobody waits for the answer; nginx' number for it."""


@dataclass(frozen=True)
class Limits:
    max_body_bytes: int
    max_items: int
    max_in_flight: int


def error(
    status: int, cause: str, message: str, problems: Sequence[Mapping[str, str]] = (), headers: Mapping[str, str] | None = None
) -> Response:
    body = {"cause": cause, "message": message, "problems": list(problems)}
    return Response(dump(body), status, headers, media_type="application/json")


class Door:
    def __init__(self, app: ASGIApp, service: Service, limits: Limits, token: str | None, paths: Sequence[str]):
        """`paths`: those that there are, for counting; all others are counted as one."""
        self._app, self._service, self._limits, self._paths = app, service, limits, frozenset(paths)
        self._token = None if token is None else token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.perf_counter(), GONE

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._admit(scope, receive, note)
        finally:
            path = scope["path"] if scope["path"] in self._paths else "other"
            self._service.metrics.count_request(path, status, time.perf_counter() - began)

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers, metrics = Headers(scope=scope), self._service.metrics
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            await _throw_away(headers, receive)
            await refusal(scope, receive, send)
        elif scope["method"] != "POST":
            await self._app(scope, receive, send)
        else:
            metrics.in_flight += 1
            try:
                body = await self._body(headers, receive)
                if isinstance(body, Response):
                    await body(scope, receive, send)
                elif body is not None:
                    await self._app(scope, _again(body, receive), send)
            finally:
                metrics.in_flight -= 1

    def _refusal(self, scope: Scope, headers: Headers) -> Response | None:
        """The answer to a request that is not even read."""
        state, under_way = self._service.state, self._service.metrics.in_flight
        if self._token is not None and scope["path"] not in OPEN and not self._knows(headers.get("authorization", "")):
            why = "this service wants its token: Authorization: Bearer TOKEN"
            return error(401, "unauthorised", why, headers={"WWW-Authenticate": "Bearer"})
        if scope["method"] != "POST":
            return None
        if state != "ready":
            return error(503, state, f"the service is {state}", headers={"Retry-After": "1"})
        if under_way >= self._limits.max_in_flight:
            message = f"{under_way} requests are under way; try again, or start the service with a larger --max-in-flight"
            return error(429, "busy", message, headers={"Retry-After": "1"})
        return None

    def _knows(self, authorization: str) -> bool:
        scheme, _, given = authorization.partition(" ")
        assert self._token is not None
        return hmac.compare_digest(given.strip().encode(), self._token) and scheme.lower() == "bearer"

    async def _body(self, headers: Headers, receive: Receive) -> bytes | Response | None:
        """All of it; or the answer to one that cannot be taken; or None if the client has gone."""
        most, size, parts = self._limits.max_body_bytes, 0, []
        stated = headers.get("content-length", "")
        too_large = stated.isdecimal() and int(stated[:20]) > most
        try:
            async with asyncio.timeout(BODY_S):
                while not too_large:
                    message = await receive()
                    if message["type"] != "http.request":
                        return None
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    too_large = size > most
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            return error(408, "slow", f"the body did not arrive within {BODY_S:g} s", headers={"Connection": "close"})
        if not too_large:
            return b"".join(parts)
        await _throw_away(headers, receive)
        message = f"a body may have {most:,} bytes; send fewer items at a time, or start the service with a larger --max-body-bytes"
        return error(413, "too_large", message, headers={"Connection": "close"})


async def _throw_away(headers: Headers, receive: Receive) -> None:
    if headers.get("expect") is not None:  # the client waits for leave to send it
        return
    left = LINGER_BYTES
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while left > 0:
                message = await receive()
                if not message.get("more_body", False):
                    return
                left -= len(message.get("body", b""))


def _again(body: bytes, receive: Receive) -> Receive:
    """The body in one piece; then whatever else comes, which is that the client goes."""
    given = False

    async def from_here() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return from_here
