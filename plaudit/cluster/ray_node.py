"""This machine as a node of a Ray cluster: `python -m plaudit.cluster.ray_node` is `ray start` in the foreground.

A node is found by that program's name, so that `plaudit cluster down` ends those that plaudit has started and no others. Its Ray
processes end with it, however it ends.
"""

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from plaudit.cluster.nodes import CONNECT_S
from plaudit.errors import PlauditError
from plaudit.report.progress import print_line

PORT = 6379
START_S = 120.0
STARTED = "Ray runtime started"
PROGRAM = ["-P", "-m", "plaudit.cluster.ray_node"]
"""-P: files in this folder must not shadow modules of the same name."""
OBJECT_STORE_BYTES = 200_000_000
"""Ray would take a third of the memory; plaudit puts next to nothing there."""
TOKEN_FILE = Path("~/.ray/auth_token")
TIED = "--tied"
SETTINGS = {"RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
"""Niceness: Ray would run ranks at low priority."""


# Tokens --------------------------------------------------------------------------------------------------------------


def token_source() -> str | None:
    """Where Ray finds the token that all machines of a cluster share; None: nowhere."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return "RAY_AUTH_TOKEN"
    if path := os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return path
    return str(TOKEN_FILE) if TOKEN_FILE.expanduser().exists() else None


def prepare_token() -> str:
    """Make a token if there is none; returns where it is."""
    if source := token_source():
        return source
    file = TOKEN_FILE.expanduser()
    file.parent.mkdir(mode=0o700, exist_ok=True)
    with contextlib.suppress(FileExistsError), os.fdopen(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as opened:
        opened.write(secrets.token_hex(32))
    return str(TOKEN_FILE)


def use_token() -> None:
    """If there is a token, it is used: Ray itself would use it for clusters of one machine only. Before Ray is imported."""
    if token_source() is not None:
        os.environ.setdefault("RAY_AUTH_MODE", "token")


# Nodes ---------------------------------------------------------------------------------------------------------------


def free_address(port: int = 0) -> str:
    """HOST:PORT for a cluster that starts here; 0: at a free port."""
    import ray

    host = ray.util.get_node_ip_address()
    with socket.socket() as probe:
        try:
            probe.bind((host, port))
        except OSError as error:
            raise PlauditError(f"port {port} of this machine is in use ({error.strerror}): choose another with --port") from None
        return f"{host}:{probe.getsockname()[1]}"


def wait_for_address(address: str, within_s: float) -> str:
    """Until something listens at HOST:PORT; returns it with the host's address in the network."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise PlauditError(f"{address} should be HOST:PORT, as `plaudit cluster up` prints it on the first machine")
    deadline, waited = time.monotonic() + within_s, False
    while True:
        try:
            with socket.create_connection((host, int(port)), CONNECT_S) as connection:
                found = connection.getpeername()[0]
            return f"{found}:{port}" if not found.startswith("127.") else f"{free_address().rpartition(':')[0]}:{port}"
        except OSError as error:
            if time.monotonic() > deadline:
                raise NoCluster(
                    f"no Ray cluster answers at {address} ({error}). Start one there with `plaudit cluster up`; firewalls must let "
                    "its machines reach each other at all ports."
                ) from None
        if not waited:
            print_line(f"waiting for the Ray cluster at {address}, up to {within_s:g} s")
        waited = True
        time.sleep(0.5)


class NoCluster(PlauditError):
    """Nothing listens at the address."""


def node_command(
    *,
    head: str | None = None,
    join: str | None = None,
    cpus: int | None = None,
    gpus: int | None = None,
    temp_dir: Path | None = None,
    tied: bool = False,
) -> list[str]:
    """The program of a node. `tied`: it ends with its stdin."""
    host, _, port = (head or "").rpartition(":")
    place = ["--head", f"--node-ip-address={host}", f"--port={port}"] if head else [f"--address={join}"]
    options = {"num-cpus": cpus, "num-gpus": gpus, "temp-dir": temp_dir, "object-store-memory": OBJECT_STORE_BYTES}
    given = [f"--{name}={value}" for name, value in options.items() if value is not None]
    return [sys.executable, *PROGRAM, *([TIED] if tied else []), *place, *given, "--block"]


def start_node(command: Sequence[str], stdin: int = subprocess.DEVNULL) -> "subprocess.Popen[bytes]":
    """Returns when Ray has started. Ctrl-C does not reach it."""
    with tempfile.NamedTemporaryFile(prefix="plaudit_ray_", suffix=".log", delete=False) as log:
        process = subprocess.Popen(command, stdin=stdin, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    output, deadline = Path(log.name), time.monotonic() + START_S
    while STARTED not in (text := output.read_text(errors="replace")):
        if process.poll() is not None or time.monotonic() > deadline:
            process.terminate()
            raise PlauditError(f"Ray has not started on this machine. Its last words, of {output}: {' '.join(text.split()[-60:])}")
        time.sleep(0.1)
    return process


def running_nodes() -> list[int]:
    """Process ids of this user's nodes on this machine that `plaudit cluster up` has started."""
    found = []
    for process in psutil.process_iter(["cmdline", "uids"]):
        command, user = process.info["cmdline"] or [], process.info["uids"]
        is_node = command[1:4] == PROGRAM and command[4] != TIED
        if is_node and user is not None and user.real == os.getuid():
            found.append(process.pid)
    return found


def main(arguments: Sequence[str]) -> None:
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    if arguments and arguments[0] == TIED:
        threading.Thread(target=_end_with_stdin, daemon=True).start()
        arguments = arguments[1:]
    from ray.scripts.scripts import main as ray_main

    sys.argv = ["ray", "start", *arguments]
    ray_main()


def _end_with_stdin() -> None:
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main(sys.argv[1:])
