"""A server program with all its children: started, watched, stopped, and never left behind."""

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from plaudit.errors import RecipeError
from plaudit.expandable_segments import without_own_setting
from plaudit.host import describe_exit
from plaudit.redaction import redact
from plaudit.report.progress import print_line

HOST = "127.0.0.1"
NEVER_GIVEN_OUT = range(20_000, 32_000)
"""Ports that neither the system nor Ray chooses for a process by themselves."""
ERROR = re.compile(r"\b(?!EngineDeadError)\w+Error: .+")
"""vLLM's EngineDeadError only says that there was another."""
REPORT_EVERY_S = 10.0
LONGEST_PAUSE_S = 300.0
"""Before a lost server is started again."""
STOP_S = 15.0
"""Time a server has to stop gracefully before it is killed."""


class ServerProcess:
    """A server with all its children, and the shell that kills them if this process cannot."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str]):
        self.log = log
        # The guard starts first and leads the process group, so the server is never without one. It reads until the other end of
        # its stdin, which only this process holds, is closed; then `kill 0` ends the group.
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", "trap '' TERM INT HUP; read line; kill -KILL 0"],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, process_group=0,
        )  # fmt: skip
        try:
            with log.open("ab") as file:
                self._log_from = file.tell()
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, process_group=self._guard.pid,
                    env=without_own_setting(environment),
                )  # fmt: skip
        except OSError:
            self._end_guard()
            raise

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def last_line(self) -> str:
        """The last line it printed."""
        lines = self._last_lines(4096)
        return redact(lines[-1].strip())[-300:] if lines else ""

    def last_error(self) -> str:
        """The error that it printed last: 'RuntimeError: …', without what precedes it in the line."""
        found = [match[0] for line in self._last_lines(1 << 17) if "WARNING" not in line and (match := ERROR.search(line))]
        return redact(found[-1].strip())[:300] if found else ""

    def has_printed(self, text: str) -> bool:
        return any(text in line for line in self._last_lines(1 << 17))

    def _last_lines(self, size: int) -> list[str]:
        with self.log.open("rb") as file:
            file.seek(max(self._log_from, file.seek(0, os.SEEK_END) - size))
            return file.read().decode(errors="replace").strip().splitlines()

    def epitaph(self) -> str:
        """'exit code 1, after printing …': how it ended."""
        code = self._process.poll()
        how = "still running" if code is None else describe_exit(code)
        words = self.last_line()
        return how + (f", after printing '{words}'" if words else "")

    def stop(self, grace_s: float = STOP_S) -> None:
        """Stop it gracefully, then kill what is left. A second call does nothing."""
        if self._guard.returncode is not None:
            return  # already reaped: its pid may belong to another process by now
        if self.alive:
            self._process.terminate()  # vLLM stops its own children
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_s)
        # The guard is not reaped yet, so the group's id cannot belong to another process.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._guard.pid, signal.SIGKILL)
        self._process.wait()
        self._end_guard()

    def _end_guard(self) -> None:
        assert self._guard.stdin is not None
        self._guard.kill()
        self._guard.stdin.close()
        self._guard.wait()


class Startup:
    """The time between a server's start and its first answer: reported, and limited."""

    def __init__(self, server: ServerProcess, name: str, limit_s: float, limit_setting: str):
        """`name`: of the server, at the beginning of messages."""
        self._server, self._name = server, name
        self._limit_s, self._limit_setting = limit_s, limit_setting
        self._began = self._reported = time.monotonic()

    def check(self) -> None:
        """Called while it does not answer yet. Raises if it is dead or has taken too long."""
        now = time.monotonic()
        if not self._server.alive:
            raise RecipeError(f"{self._name} ended before it was ready ({self._server.epitaph()}).")
        if now - self._began > self._limit_s:
            raise RecipeError(
                f"{self._name} was not ready within {self._limit_setting}, {self._limit_s:g} s (its last line: "
                f"'{self._server.last_line()}')."
            )
        if now - self._reported > REPORT_EVERY_S:
            self._reported = now
            print_line(f"waiting for the server, {now - self._began:.0f} of {self._limit_s:g} s: {self._server.last_line()}")

    def ready(self) -> None:
        print_line(f"{self._name} is ready after {time.monotonic() - self._began:.0f} s")


def free_port(port: int = 0) -> int:
    """This port, or with 0 any that is free. Raises OSError if it is taken."""
    if port == 0:
        return _any_free_port()
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: a port just released is free
        probe.bind((HOST, port))
    return port


def _any_free_port() -> int:
    # Not by binding to port 0: a server listens only when it has loaded its model, and until then the system may give that port to
    # any process that connects somewhere.
    for port in random.SystemRandom().sample(NEVER_GIVEN_OUT, 100):
        with contextlib.suppress(OSError):
            return free_port(port)
    raise OSError(f"no free port between {NEVER_GIVEN_OUT[0]} and {NEVER_GIVEN_OUT[-1]}")
