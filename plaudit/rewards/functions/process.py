"""One worker process: it takes batches of calls, answers them one by one, and can be killed with all its descendants at any time.

Three connections: the channel has calls and answers (`channel.py`), the control connection ends the worker and reports its end
(`guard.py`), and a pipe collects what the user's code prints. The worker's stdin, stdout and stderr are none of the first two.
"""

import json
import os
import re
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

from plaudit.host import describe_exit
from plaudit.rewards.functions import channel, guard

PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from plaudit.rewards.functions.guard import main
main(*map(int, sys.argv[2:]))
"""
"""What guard and worker run: this plaudit, without our main module."""
PLAUDIT = Path(__file__).parents[3]
OUTPUT_BYTES = 8192
"""How much of a process's latest output is kept."""
GRACE_S = 2.0
"""How long a hanging process may take to report its line."""
REPORT_S = 5.0
"""How long a guard may take to report its worker's end."""

Answer = dict[str, Any]
"""`value` with `parts`, `malformed` and `trace`; or `entries`, a list of these; or `cause` and `message`."""


class Silent(Exception):
    """No answer within the limit."""


class Died(Exception):
    """The process is gone, or has closed its end of the channel."""


class WorkerProcess:
    """One process with its guard."""

    def __init__(self, start: bytes, program: Path, memory_gb: float | None):
        self.program, self._memory_gb = program, memory_gb
        self._received, self._output, self._to_send = bytearray(), b"", memoryview(b"")
        self._keys: deque[bytes] = deque()
        self._answered = 0
        self._mark = secrets.token_hex(16)
        self._channel, theirs = socket.socketpair()
        self._control, guards = socket.socketpair()
        limit = 0 if memory_gb is None else int(memory_gb * 1e9)
        with theirs, guards:
            try:
                self._guard = subprocess.Popen(
                    # -P: files in this folder must not shadow modules of the same name.
                    [sys.executable, "-P", "-c", PROGRAM, str(PLAUDIT), *map(str, (theirs.fileno(), guards.fileno(), limit))],
                    stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0, process_group=0,
                    pass_fds=(theirs.fileno(), guards.fileno()), env={"OMP_NUM_THREADS": "1", **os.environ, guard.MARK: self._mark},
                )  # fmt: skip
            except OSError:
                self._channel.close()
                self._control.close()
                raise
        assert self._guard.stdout is not None
        self._pipe = self._guard.stdout
        self._channel.setblocking(False)
        os.set_blocking(self._pipe.fileno(), False)
        self._poll = select.poll()  # select.select is limited to 1024 open files
        for source in (self._channel, self._control, self._pipe):
            self._poll.register(source, select.POLLIN)
        self._send(start, 1)

    @property
    def idle(self) -> bool:
        """Alive, with nothing to read: what comes when no call is being made is no answer."""
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        poll.register(self._control, select.POLLIN)
        return not self._received and not poll.poll(0) and self._guard.poll() is None

    def has_more(self, wait_s: float) -> bool:
        """Whether another answer, or part of one, comes within this time. Raises Died when none can come."""
        return bool(self._received) or self._exchange(wait_s)

    def send(self, batch: list[bytes]) -> None:
        """Queue a batch; it is written while we wait for the answers."""
        self._send(batch, len(batch))

    def _send(self, content: Any, count: int) -> None:
        keys = channel.new_keys(count)
        self._keys.extend(keys)
        self._to_send = memoryview(channel.calls(content, keys))
        self._poll.modify(self._channel, select.POLLIN | select.POLLOUT)

    def answer(self, limit_s: float) -> Answer:
        """The next answer. Raises Silent after `limit_s`, Died when none can come, Tampered when what comes is none."""
        deadline = time.monotonic() + limit_s
        key = self._keys.popleft()
        while (answer := channel.take_answer(self._received, key, self._answered)) is None:
            left = deadline - time.monotonic()
            if not self._exchange(max(left, 0.0)) and left <= 0:
                raise Silent
        self._answered += 1
        return json.loads(answer)

    def _exchange(self, wait_s: float) -> bool:
        """Write and read what is ready; true if an answer, or part of one, was read."""
        ready = dict(self._poll.poll(wait_s * 1000))
        events = ready.get(self._channel.fileno(), 0)
        if self._pipe.fileno() in ready:
            self._read_output()
        if events & select.POLLOUT:
            self._write()
        if events & ~select.POLLOUT:
            try:
                chunk = self._channel.recv(65536)
            except ConnectionError:
                chunk = b""
            if not chunk:
                raise Died
            self._received += chunk
            return True
        if self._control.fileno() in ready:  # the guard's report: the worker has ended
            raise Died
        return False

    def _write(self) -> None:
        try:
            self._to_send = self._to_send[self._channel.send(self._to_send) :]
        except BlockingIOError:
            pass
        except ConnectionError:
            self._to_send = memoryview(b"")
        if not self._to_send:
            self._poll.modify(self._channel, select.POLLIN)

    def _read_output(self) -> None:
        chunk = os.read(self._pipe.fileno(), 65536)
        if not chunk:
            self._poll.unregister(self._pipe)
        self._output = (self._output + chunk)[-OUTPUT_BYTES:]

    def _wait_for_output(self, wait_s: float) -> bool:
        poll = select.poll()
        poll.register(self._pipe, select.POLLIN)
        return any(events & select.POLLIN for _, events in poll.poll(wait_s * 1000))

    # Why it gave no answer ---------------------------------------------------------------------------------------------

    def timeout(self, limit_s: float) -> Answer:
        """It hangs: 'after 10 s, at reward.py:12', if it can still report the line it is executing."""
        with suppress(OSError):
            self._control.send(b"?")
        deadline = time.monotonic() + GRACE_S
        while not self._line() and (left := deadline - time.monotonic()) > 0 and self._wait_for_output(left):
            self._read_output()
        return {"cause": "timeout", "message": f"after {limit_s:g} s{self._line()}"}

    def tampering(self, error: channel.Tampered) -> Answer:
        message = (
            f"code in its process wrote {error.start!r} to its connection to plaudit, in place of the answer to this call; "
            "the process was killed, and nothing that it sent after this was used"
        )
        return {"cause": "tampered", "message": message}

    def death(self) -> Answer:
        """How it ended: 'killed by SIGSEGV, at reward.py:12'."""
        self._control.settimeout(REPORT_S)
        try:
            report = self._control.recv(1024)
        except TimeoutError:
            return _died("its connection to plaudit was closed")
        except ConnectionError:
            report = b""
        if not report:
            return _died("its guard, a process of plaudit's, was killed")
        while self._wait_for_output(0.0):
            self._read_output()
        ended = json.loads(report)
        if (used := ended.get("memory")) is not None:
            message = f"it used {used / 1e9:.2f} GB with its children; limits.worker_memory_gb is {self._memory_gb:g}{self._line()}"
            return {"cause": "memory", "message": message}
        code = ended["code"]
        if code == channel.CONNECTION_LOST:
            return _died(f"its connection to plaudit was closed (exit code {code})")
        if code == -signal.SIGKILL:
            return _died("killed by SIGKILL, as happens when the system's memory runs out")
        last_output = self._output.decode(errors="replace").strip().rsplit("\n", 1)[-1][-200:]
        return _died(describe_exit(code) + (self._line() or (f", after printing '{last_output}'" if last_output else "")))

    def _line(self) -> str:
        # faulthandler's format: the innermost frame comes first, so the first one in the last traceback is the line at fault.
        last = self._output.decode(errors="replace").rsplit("(most recent call first):", 1)
        found = re.search(rf'File "{re.escape(str(self.program))}", line (\d+)', last[1]) if len(last) == 2 else None
        return f", at {self.program.name}:{found[1]}" if found else ""

    # The end -----------------------------------------------------------------------------------------------------------

    def kill(self) -> None:
        """Have it killed with all its descendants; does not wait. The guard sees the end of its input."""
        with suppress(OSError):  # the guard has ended already
            self._control.shutdown(socket.SHUT_WR)

    def end(self) -> None:
        """Kill it with all its descendants, and release its connections."""
        self.kill()
        try:
            ended_all = self._guard.wait(GRACE_S + guard.ENDING_S) == 0
        except subprocess.TimeoutExpired:  # stopped by a signal, for one
            self._guard.kill()
            self._guard.wait()
            ended_all = False
        if not ended_all:
            guard.kill(guard.marked(self._mark))
        for connection in (self._channel, self._control, self._pipe):
            connection.close()


def _died(message: str) -> Answer:
    return {"cause": "died", "message": message}
