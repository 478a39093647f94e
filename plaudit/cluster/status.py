"""What a rank reports to the process that watches it: a JSON object per line, through a pipe. Imports no torch."""

import json
import os
import re
import threading
import time
import traceback
from dataclasses import asdict, dataclass
from typing import Any

from plaudit import errors
from plaudit.errors import Interrupted, PlauditError, ProcessFailed
from plaudit.redaction import redact

SAME_AGAIN_S = 1.0
"""A heartbeat that repeats the last one is sent this often at most."""
SHOWN = 200
"""Characters of what a rank is doing. A line must fit into what a pipe takes at once (512 bytes on macOS), or be dropped."""
COLLECTIVE = re.compile(r"gloo/|NCCL|TCPStore")
"""In the messages of torch's backends, of which some are plain RuntimeErrors. Our own errors blame others by class."""


@dataclass(frozen=True)
class RankFailure:
    kind: str
    """The exception's class."""
    message: str
    trace: str = ""
    """The traceback of an error that the user cannot be blamed for."""
    lost_peer: bool = False
    """Whether all it says is that another process is gone."""

    @classmethod
    def of(cls, error: BaseException) -> "RankFailure":
        lost = _blames_peer(error)
        if isinstance(error, PlauditError):
            # One that another module derives from ours is what it is derived from.
            kind = next(kind.__name__ for kind in type(error).__mro__ if getattr(errors, kind.__name__, None) is kind)
            return cls(kind, str(error), lost_peer=lost)
        if isinstance(error, KeyboardInterrupt):
            return cls("KeyboardInterrupt", "stopped")
        return cls(type(error).__name__, redact(str(error)), redact("".join(traceback.format_exception(error))), lost)

    def error(self, message: str) -> PlauditError:
        """As it was raised in its process, with another message."""
        kind = getattr(errors, self.kind, None)
        return kind(message) if isinstance(kind, type) and issubclass(kind, PlauditError) else ProcessFailed(message)

    @property
    def is_interruption(self) -> bool:
        return self.kind in (Interrupted.__name__, "KeyboardInterrupt")


def _blames_peer(error: BaseException | None) -> bool:
    """An error of ours may be the message for one of torch's, or for another of ours."""
    if isinstance(error, PlauditError):
        return error.blames_peer or _blames_peer(error.__cause__ or error.__context__)
    return error is not None and (type(error).__name__.startswith("Dist") or bool(COLLECTIVE.search(str(error))))


class StatusPipe:
    """A rank's end of the pipe. Its threads share it: none writes into the line of another."""

    def __init__(self, fd: int):
        self._fd = fd
        self._writing = threading.Lock()
        self._ended = False
        """The last message is being written; it may wait for the watching process, and heartbeats must not."""
        self._last: tuple[str, bool] | None = None
        self._sent_at = 0.0
        os.set_inheritable(fd, False)

    def beat(self, doing: str, waiting: bool) -> None:
        """Never waits: while the watching process is suspended, heartbeats are dropped."""
        now = time.monotonic()
        if self._ended or (self._last == (doing, waiting) and now - self._sent_at < SAME_AGAIN_S):
            return
        with self._writing:
            self._last, self._sent_at = (doing, waiting), now
            os.set_blocking(self._fd, False)
            try:
                self._write({"doing": doing[:SHOWN], "waiting": waiting})
            except BlockingIOError:
                pass
            except BrokenPipeError:  # then the lifeline ends this process
                pass

    def port(self, port: int) -> None:
        self._send({"port": port})

    def listening(self, host: str, port: int) -> None:
        """For calls to its reward model."""
        self._send({"listening": [host, port]})

    def done(self, result: Any) -> None:
        self._ended = True
        self._send({"done": None if result is None else str(result)})

    def failed(self, failure: RankFailure) -> None:
        self._ended = True
        self._send({"failure": asdict(failure)})

    def _send(self, message: dict[str, Any]) -> None:
        with self._writing:
            os.set_blocking(self._fd, True)
            self._write(message)

    def _write(self, message: dict[str, Any]) -> None:
        line = json.dumps(message).encode() + b"\n"
        while line:
            line = line[os.write(self._fd, line) :]
