"""Admission control: bearer token, body size, requests in flight.

Plain ASGI middleware: the application only sees complete bodies within the limits, and rejected bodies are never stored. A request
is in flight once its body is complete, so that slow bodies keep no other request out. They share `MAX_BODIES` times the memory of
the largest; when that is used up, the body that has been arriving for the longest time is given up.
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

from plaudit.serving.json_size import ValueCounter
from plaudit.serving.schemas import dump
from plaudit.serving.service import Service

PUBLIC_PATHS = ("/health", "/docs", "/openapi.json")
"""Paths without a token: they expose neither the recipe nor users' data."""
MAX_BODIES = 16
"""Bodies of the largest size that fit into memory at the same time, those arriving and those in flight each."""
MAX_JSON_VALUES, MAX_JSON_TEXT = 2**19, 4 * 2**20
"""Commas and brackets of a body, and bytes of a text in it: parsing millions of empty lists would take seconds, and parsing a text
blocks everything else."""
SMALL_BYTES, SMALL_VALUES = 64 * 1024, 512
"""Requests with at most this many bytes, and commas and brackets, are read on the event loop; larger ones in a thread."""
IS_SMALL = "plaudit.is_small"
"""In a request's scope: whether it is such a request."""
DRAIN_TIMEOUT_S, DRAIN_BYTES = 5.0, 256 * 2**20
"""A rejected body is drained up to these limits: many clients read the response only after sending all of it."""
CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that disconnected before the response."""


@dataclass(frozen=True)
class Limits:
    max_body_bytes: int
    max_items: int
    max_responses: int
    max_in_flight: int
    body_timeout_s: float

    @property
    def max_held_bytes(self) -> int:
        return MAX_BODIES * self.max_body_bytes


def error_response(
    status: int, cause: str, message: str, problems: Sequence[Mapping[str, str]] = (), headers: Mapping[str, str] | None = None
) -> Response:
    body = {"cause": cause, "message": message, "problems": list(problems)}
    return Response(dump(body), status, headers, media_type="application/json")


class AdmissionControl:
    def __init__(self, app: ASGIApp, service: Service, limits: Limits, token: str | None, paths: Sequence[str]):
        """`paths`: the known paths for the request metrics; all others are counted as "other"."""
        self._app, self._service, self._limits, self._paths = app, service, limits, frozenset(paths)
        self._token = None if token is None else token.encode()
        self._arriving: dict[asyncio.Timeout, int] = {}
        """Bytes of each body that has not arrived completely, by its time limit; the oldest first."""
        self._arriving_bytes = self._in_flight_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, status = time.perf_counter(), CLIENT_CLOSED_REQUEST

        async def record_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._admit(scope, receive, record_status)
        finally:
            path = scope["path"] if scope["path"] in self._paths else "other"
            self._service.metrics.count_request(path, status, time.perf_counter() - start)

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers, metrics = Headers(scope=scope), self._service.metrics
        rejection = self._reject(scope, headers)
        if rejection is not None:
            await _drain(headers, receive)
            await rejection(scope, receive, send)
        elif scope["method"] != "POST":
            await self._app(scope, receive, send)
        else:
            values = ValueCounter()
            body = await self._read_body(headers, receive, values)
            if isinstance(body, bytes):
                body = self._busy(len(body)) or body
            if isinstance(body, Response):
                await body(scope, receive, send)
            elif body is not None:
                metrics.in_flight += 1
                self._in_flight_bytes += len(body)
                try:
                    small = len(body) <= SMALL_BYTES and values.count <= SMALL_VALUES
                    await self._app({**scope, IS_SMALL: small}, _replay(body, receive), send)
                finally:
                    metrics.in_flight -= 1
                    self._in_flight_bytes -= len(body)

    def _reject(self, scope: Scope, headers: Headers) -> Response | None:
        """The error response for a request rejected before its body is read, or None."""
        state = self._service.state
        if self._token is not None and scope["path"] not in PUBLIC_PATHS and not self._authorised(headers.get("authorization", "")):
            message = "missing or wrong token; send Authorization: Bearer TOKEN"
            return error_response(401, "unauthorised", message, headers={"WWW-Authenticate": "Bearer"})
        if scope["method"] != "POST":
            return None
        if state != "ready":
            return error_response(503, state, f"the service is {state}", headers={"Retry-After": "1"})
        return self._busy()

    def _busy(self, size: int = 0) -> Response | None:
        in_flight = self._service.metrics.in_flight
        if in_flight >= self._limits.max_in_flight:
            message = f"{in_flight} requests are in flight; retry later, or start the service with a larger --max-in-flight"
        elif self._in_flight_bytes + size > self._limits.max_held_bytes:
            message = f"{in_flight} requests of {self._in_flight_bytes:,} bytes are in flight; retry later"
        else:
            return None
        return error_response(429, "busy", message, headers={"Retry-After": "1"})

    def _authorised(self, authorization: str) -> bool:
        scheme, _, token = authorization.partition(" ")
        assert self._token is not None
        return hmac.compare_digest(token.strip().encode(), self._token) and scheme.lower() == "bearer"

    async def _read_body(self, headers: Headers, receive: Receive, values: ValueCounter) -> bytes | Response | None:
        """The complete body, an error response if it is too large or too slow, or None if the client disconnected."""
        limit, size, chunks = self._limits.max_body_bytes, 0, []
        content_length = headers.get("content-length", "")
        too_large = content_length.isdecimal() and int(content_length[:20]) > limit
        deadline = asyncio.timeout(self._limits.body_timeout_s)
        try:
            async with deadline:
                while not too_large:
                    message = await receive()
                    if message["type"] != "http.request":
                        return None
                    chunk = message.get("body", b"")
                    chunks.append(chunk)
                    size += len(chunk)
                    values.add(chunk)
                    too_large = size > limit or values.count > MAX_JSON_VALUES or values.longest_text > MAX_JSON_TEXT
                    if not message.get("more_body", False):
                        break
                    self._hold(deadline, len(chunk))
        except TimeoutError:
            message = f"the body did not arrive within {self._limits.body_timeout_s:g} s, or memory was needed for other bodies"
            return error_response(408, "slow", message, headers={"Connection": "close"})
        finally:
            self._arriving_bytes -= self._arriving.pop(deadline, 0)
        if not too_large:
            return b"".join(chunks)
        await _drain(headers, receive)
        if values.longest_text > MAX_JSON_TEXT:
            message = f"a text in the body exceeds {MAX_JSON_TEXT:,} bytes"
        elif values.count > MAX_JSON_VALUES:
            message = f"the body exceeds {MAX_JSON_VALUES:,} commas and brackets; send fewer items per request"
        else:
            hint = "send fewer items per request, or start the service with a larger --max-body-bytes"
            message = f"the body exceeds {limit:,} bytes; {hint}"
        return error_response(413, "too_large", message, headers={"Connection": "close"})

    def _hold(self, deadline: asyncio.Timeout, size: int) -> None:
        """Count `size` more bytes of an arriving body; give up the oldest ones when there are too many."""
        self._arriving[deadline] = self._arriving.get(deadline, 0) + size
        self._arriving_bytes += size
        while self._arriving_bytes > self._limits.max_held_bytes:
            oldest = next(iter(self._arriving))
            self._arriving_bytes -= self._arriving.pop(oldest)
            if not oldest.expired():
                oldest.reschedule(asyncio.get_running_loop().time())


async def _drain(headers: Headers, receive: Receive) -> None:
    if headers.get("expect") is not None:  # the client sends the body only after 100 Continue
        return
    remaining = DRAIN_BYTES
    with suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_TIMEOUT_S):
            while remaining > 0:
                message = await receive()
                if not message.get("more_body", False):
                    return
                remaining -= len(message.get("body", b""))


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that returns the body in one message, then passes through (to the client's disconnect)."""
    sent = False

    async def receive_body() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_body
