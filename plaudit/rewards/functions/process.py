"""One worker process: it takes batches of requests, answers line by line, and can be killed with all its children at any time."""

import contextlib
import json
import os
import pickle
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from plaudit.host import describe_exit

WORKER = Path(__file__).with_name("worker.py")
OUTPUT_BYTES = 8192
"""How much of a process's latest output is kept."""
GRACE_S = 2.0
"""How long a hanging process may take to report its line, and one that closed its pipes to exit."""

Answer = dict[str, Any]
"""`value` with `parts`, `malformed` and `trace`; or `entries`, a list of these; or `cause` and `message`."""


class Silent(Exception):
    """No answer within the limit."""


class Died(Exception):
    """The process is gone, or has closed its end of the pipe."""


class WorkerProcess:
    """One process, and the guard shell that kills it if we cannot."""

    def __init__(self, start: bytes, program: Path):
        self.program = program
        self._answers, self._output, self._to_send = b"", b"", memoryview(start)
        self._process = subprocess.Popen(
            # -P: files next to worker.py must not shadow modules of the same name.
            [sys.executable, "-P", str(WORKER)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0, process_group=0,
            env={"OMP_NUM_THREADS": "1", **os.environ},
        )  # fmt: skip
        # In the worker's process group, which `kill 0` ends. It reads until the other end of its stdin, which only we hold, is
        # closed. A thread in the worker could not do this: a function stuck in C code lets no other thread run.
        try:
            self._guard = subprocess.Popen(
                ["/bin/sh", "-c", "read line; kill -KILL 0"],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, process_group=self._process.pid,
            )  # fmt: skip
        except OSError:
            self._process.kill()
            raise
        pipes = (self._process.stdin, self._process.stdout, self._process.stderr)
        self._in, self._out, self._err = (pipe.fileno() for pipe in pipes if pipe is not None)
        self._err_open = True
        for descriptor in (self._in, self._out, self._err):
            os.set_blocking(descriptor, False)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def send(self, batch: list[bytes]) -> None:
        """Queue a batch; it is written while we wait for the answers."""
        self._to_send = memoryview(pickle.dumps(batch))

    def answer(self, limit_s: float) -> Answer:
        """The next answer. Raises Silent after `limit_s`, Died when none can come."""
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._answers:
            left = deadline - time.monotonic()
            was_alive = self.alive
            # In slices, because a child of a dead worker may hold its pipe open.
            if not self._exchange(min(max(left, 0.0), 0.1)):
                if not was_alive:
                    raise Died
                if left <= 0:
                    raise Silent
        line, self._answers = self._answers.split(b"\n", 1)
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise Died
        return answer

    def _exchange(self, wait_s: float) -> bool:
        """Write and read what is ready; true if an answer, or part of one, was read."""
        poll = select.poll()
        poll.register(self._out, select.POLLIN)
        if self._err_open:
            poll.register(self._err, select.POLLIN)
        if self._to_send:
            poll.register(self._in, select.POLLOUT)
        ready = {descriptor for descriptor, _ in poll.poll(wait_s * 1000)}
        if self._in in ready:
            try:
                self._to_send = self._to_send[os.write(self._in, self._to_send) :]
            except BlockingIOError:
                pass
            except BrokenPipeError:
                self._to_send = memoryview(b"")
        if self._err in ready:
            self._read_output()
        if self._out not in ready:
            return False
        chunk = os.read(self._out, 65536)
        if not chunk:
            raise Died
        self._answers += chunk
        return True

    def _read_output(self) -> None:
        chunk = os.read(self._err, 65536)
        self._err_open = bool(chunk)
        self._output = (self._output + chunk)[-OUTPUT_BYTES:]

    def current_line(self) -> str:
        """', at reward.py:12': the line it is executing, if it can still report it."""
        self._process.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + GRACE_S
        while not self._line() and (left := deadline - time.monotonic()) > 0 and self._has_output(left):
            self._read_output()
        return self._line()

    def exit_reason(self) -> str:
        """How it ended: 'killed by SIGSEGV, at reward.py:12'."""
        try:
            code = self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            return "it stopped answering"
        if self._has_output(0.0):
            self._read_output()
        if code == -signal.SIGKILL:
            return "killed by SIGKILL, as happens when memory runs out"
        reason = describe_exit(code)
        last_output = self._output.decode(errors="replace").strip().rsplit("\n", 1)[-1][-200:]
        return reason + (self._line() or (f", after printing '{last_output}'" if last_output else ""))

    def _has_output(self, wait_s: float) -> bool:
        poll = select.poll()  # select.select is limited to 1024 open files
        poll.register(self._err, select.POLLIN)
        return self._err_open and bool(poll.poll(wait_s * 1000))

    def _line(self) -> str:
        # faulthandler's format: the innermost frame comes first, so the first one in the last traceback is the line at fault.
        last = self._output.decode(errors="replace").rsplit("(most recent call first):", 1)
        found = re.search(rf'File "{re.escape(str(self.program))}", line (\d+)', last[1]) if len(last) == 2 else None
        return f", at {self.program.name}:{found[1]}" if found else ""

    def kill(self) -> None:
        """Kill it with all its children. Until `end`, the guard keeps the process group's id from being reused."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # all of them are dead already
            os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill it, and release its pipes."""
        self.kill()
        for process in (self._process, self._guard):
            process.wait()
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
