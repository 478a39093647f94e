"""Connections: how many, and how long each may wait for its client.

uvicorn limits the size of headers and the time between requests, but waits for ever for the rest of a header, or for a client that
does not read its response. Here every wait ends:

    for a header            header_timeout_s after the connection was opened, or after the header's first byte
    for a body              body_timeout_s (`admission.py`)
    between requests        keep_alive_s
    for a client to read    send_timeout_s without MIN_SENT_BYTES read

When there are more than max_connections, the one that has waited longest for its client is closed: a client that sends its request
at once gets through, however many others were opened and left. (A limit for each address would hit clients behind one proxy.)
"""

import asyncio
from dataclasses import dataclass
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from plaudit.host import open_file_limit
from plaudit.serving.metrics import Metrics

MAX_HEADER_BYTES = 64 * 1024
HEADER_TIMEOUT = b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
MIN_SENT_BYTES = 64 * 1024
"""A client that reads less than this in send_timeout_s is disconnected."""


@dataclass(frozen=True)
class ConnectionLimits:
    max_connections: int
    header_timeout_s: float
    keep_alive_s: float
    send_timeout_s: float

    @property
    def allowed(self) -> int:
        """As many as the limit of open files allows: half of them are for rewards, and for connections not yet counted here."""
        files = open_file_limit()
        return self.max_connections if files is None else max(1, min(self.max_connections, files // 2))

    @property
    def accepted_at_once(self) -> int:
        """Connections accepted before the first of them is counted."""
        return max(1, self.allowed // 4)


class Connections:
    """The open connections of a server."""

    def __init__(self, limits: ConnectionLimits, metrics: Metrics):
        self.limits, self._metrics, self._allowed = limits, metrics, limits.allowed
        self._open: set[ClientConnection] = set()
        self._waiting: dict[ClientConnection, None] = {}
        """Those that wait for their client, in the order in which they began to."""

    def add(self, connection: "ClientConnection") -> None:
        self._open.add(connection)
        self._waiting[connection] = None
        if len(self._open) > self._allowed:  # the new one itself, if all others are busy
            self.drop(next(iter(self._waiting)), "limit")
        self._metrics.connections = len(self._open)

    def set_waiting(self, connection: "ClientConnection", waiting: bool) -> None:
        if not waiting:
            self._waiting.pop(connection, None)
        elif connection in self._open:
            self._waiting.setdefault(connection)

    def drop(self, connection: "ClientConnection", cause: str) -> None:
        """Close it without sending what is left."""
        connection.transport.abort()
        self.remove(connection, cause)

    def remove(self, connection: "ClientConnection", cause: str = "") -> None:
        """`cause`: why it is closed here, and not by the client."""
        if connection in self._open and cause:
            self._metrics.closed_connections[cause] += 1
        self._open.discard(connection)
        self._waiting.pop(connection, None)
        self._metrics.connections = len(self._open)


class ClientConnection(H11Protocol):
    """One connection. Header and body are parsed by h11, even if uvicorn could use httptools, which limits no header's size."""

    def __init__(self, connections: Connections, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._connections, self._limits = connections, connections.limits
        self.timeout_keep_alive = self._limits.keep_alive_s  # pyright: ignore[reportAttributeAccessIssue] (passed to call_later)
        self._header_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._connections.add(self)
        self._follow()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._connections.remove(self)
        for timer in (self._header_timer, self._send_timer):
            if timer is not None:
                timer.cancel()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._follow()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._follow()

    def _follow(self) -> None:
        """Whether it waits for its client, and whether for a header."""
        cycle = self.cycle
        in_request = cycle is not None and not cycle.response_complete
        self._connections.set_waiting(self, not in_request or cycle.more_body)
        if in_request and self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
        elif not in_request and self._header_timer is None and self.timeout_keep_alive_task is None:
            self._header_timer = self.loop.call_later(self._limits.header_timeout_s, self._end_wait, "header_timeout")

    def timeout_keep_alive_handler(self) -> None:
        self._end_wait("idle")

    def _end_wait(self, cause: str) -> None:
        partial_header = self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]
        if partial_header and not self.transport.is_closing():
            self.transport.write(HEADER_TIMEOUT)
        if self.transport.get_write_buffer_size():  # it would stay open until the client has read this
            self._connections.drop(self, cause)
        else:
            self._connections.remove(self, cause)
            self.transport.close()

    # A client that does not read ----------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_sending()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _watch_sending(self, before: int | None = None) -> None:
        """Called again after every send_timeout_s, with what was left to send before it."""
        left = self.transport.get_write_buffer_size()
        if before is not None and before - left < MIN_SENT_BYTES:
            self._connections.drop(self, "send_timeout")
        else:
            self._send_timer = self.loop.call_later(self._limits.send_timeout_s, self._watch_sending, left)
