"""The socket of a server, and who can reach it."""

import contextlib
import ipaddress
import socket
from collections.abc import Iterator

from plaudit.errors import PlauditError

WAITING_CONNECTIONS = 2048
"""Connections that the system keeps until they are accepted."""


def address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextlib.contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that accepts connections."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as problem:
        raise PlauditError(f"--host {host}: {problem.strerror or problem}") from None
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
            listener.listen(WAITING_CONNECTIONS)
        except OSError as problem:
            raise PlauditError(
                f"cannot listen on {host}:{port}: {problem.strerror or problem}. Choose another --port (0: any free port)."
            ) from None
        yield listener


def is_loopback(host: str) -> bool:
    """Whether the address is reachable from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
