"""The connection between plaudit and a worker process: every answer is proven to belong to its call.

    calls     length | pickle | key | key | …         one random key for each call
    answer    opening | length | tag | JSON           tag = BLAKE2b(JSON; key, number of the call)

The key of a call is sent behind the calls, and the worker reads it only after the user's function has returned: while that runs,
the key is in a buffer of the kernel, not in the memory of the process. Walking frames or `gc` objects finds no key. Its first bytes
open the answer, so that the first stray byte is noticed; the rest signs it and is never sent back. Each key is used once, and the
number of the call is signed too: no answer can be replayed, doubled, or put in another's place. Whatever does not match is
`Tampered`: the process is killed, the call in progress fails, and the next ones go to a new process.

What this rules out: everything written by accident (a stray `os.write`, a library that takes our descriptor for its own, a forked
child that returns), and every answer made up without a key. Programs and forked children that the function starts do not inherit
the connection, and its descriptor has a number far above those that programs open, close in a loop, or guess.

What it cannot rule out: code inside the process that searches its descriptors (`/proc/self/fd`, `fstat` on every number), reads the
key from the connection and signs an answer itself; a thread that is left running and looks at the moment an answer is signed; code
that replaces the function, or this module, in memory. No secret is safe from code in the same process. Such code sets scores of its
own process only, which the function decides anyway, and a key that was taken is missing when this module needs it, so the worker is
killed at the next answer. Nor is this a defence against the system's own means, debuggers and `/proc/PID/mem`, by which a program
can get at all others of the same user. Code that must not decide a score, such as programs written by the policy, needs a process,
better a container, of its own.

Only the standard library is imported, because this file is loaded in every worker.
"""

import fcntl
import os
import pickle
import resource
import struct
from contextlib import suppress
from hashlib import blake2b
from hmac import compare_digest
from json import dumps

# Bound here, so that user code which patches these modules (gevent does) does not change the protocol.
from os import _exit, getpid, readv, write
from typing import Any

KEY_BYTES, OPENING_BYTES = 24, 8
LENGTH = struct.Struct(">Q")
HEADER = struct.Struct(">8sI16s")
LONGEST_ANSWER = 64 << 20
"""Bytes of an answer."""
HIGHEST_DESCRIPTOR = 4096
CONNECTION_LOST = 97
"""Exit code of a worker that can no longer read or write the connection."""


class Tampered(Exception):
    """Bytes that are not the answer to the call; `start` has the first of them."""

    def __init__(self, start: bytes):
        super().__init__(start)
        self.start = start


def new_keys(count: int) -> list[bytes]:
    random = os.urandom(KEY_BYTES * count)
    return [random[i : i + KEY_BYTES] for i in range(0, len(random), KEY_BYTES)]


def calls(content: Any, keys: list[bytes]) -> bytes:
    pickled = content if isinstance(content, bytes) else pickle.dumps(content)
    return b"".join((LENGTH.pack(len(pickled)), pickled, *keys))


def sign(answer: bytes, key: bytes | bytearray, number: int) -> bytes:
    return HEADER.pack(key[:OPENING_BYTES], len(answer), _tag(answer, key, number)) + answer


def take_answer(received: bytearray, key: bytes, number: int) -> bytes | None:
    """Take the next answer out of `received`; None while it is incomplete. Raises Tampered if it does not answer this call."""
    opening = received[:OPENING_BYTES]
    if not key.startswith(opening):
        raise Tampered(bytes(received[:60]))
    if len(received) < HEADER.size:
        return None
    _, length, tag = HEADER.unpack_from(received)
    if length > LONGEST_ANSWER:
        raise Tampered(bytes(received[:60]))
    if len(received) < (end := HEADER.size + length):
        return None
    answer = bytes(received[HEADER.size : end])
    if not compare_digest(tag, _tag(answer, key, number)):
        raise Tampered(answer[:60])
    del received[:end]
    return answer


def _tag(answer: bytes, key: bytes | bytearray, number: int) -> bytes:
    return blake2b(answer, digest_size=16, key=key[OPENING_BYTES:], salt=number.to_bytes(8, "big")).digest()


class WorkerEnd:
    """The worker's end of the connection. It never reads ahead: keys stay in the kernel until they are due."""

    def __init__(self, descriptor: int):
        self._descriptor = out_of_the_way(descriptor)
        self._number, self._pid = 0, getpid()
        os.register_at_fork(after_in_child=self._close)

    def receive(self) -> Any:
        """The next calls. Raises EOFError when there are no more: the parent is done, or dead."""
        [length] = LENGTH.unpack(self._read(LENGTH.size))
        return pickle.loads(self._read(length))

    def answer(self, answer: dict[str, Any]) -> None:
        """Answer the first call that has no answer yet."""
        if getpid() != self._pid:
            _exit(0)  # a child forked by the user's function that returned from it
        encoded = dumps(answer).encode()
        if len(encoded) > LONGEST_ANSWER:
            too_long = f"it returned {len(encoded) / 1e6:,.0f} MB; the limit is {LONGEST_ANSWER / 1e6:.0f} MB"
            encoded = dumps({"cause": "bad_result", "message": too_long}).encode()
        signed = memoryview(sign(encoded, self._read(KEY_BYTES), self._number))
        self._number += 1
        try:
            while signed:
                signed = signed[write(self._descriptor, signed) :]
        except OSError:
            _exit(CONNECTION_LOST)

    def _read(self, count: int) -> bytearray:
        """Exactly this many bytes."""
        content = bytearray(count)
        left = memoryview(content)
        while left:
            try:
                read = readv(self._descriptor, (left,))
            except OSError:
                _exit(CONNECTION_LOST)
            if not read:
                raise EOFError
            left = left[read:]
        return content

    def _close(self) -> None:
        with suppress(OSError):
            os.close(self._descriptor)


def out_of_the_way(descriptor: int) -> int:
    """Move a descriptor to a high number, where no loop over small numbers closes or writes to it; not inherited by programs."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = HIGHEST_DESCRIPTOR if soft == resource.RLIM_INFINITY else min(soft, HIGHEST_DESCRIPTOR)
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, max(3, highest - 32))
    os.close(descriptor)
    return moved
