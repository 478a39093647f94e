"""Calls from one process of a run to another.

    connection   token | rank of the caller, then messages in both directions
    message      number of chunks | length of each | chunks: a pickle, then the large arrays in it
    call         (number, call), or (number, None) to cancel it
    answer       (number, kind, result)

Many calls may be in flight on one connection. The token is random and known to the processes of this run only: nothing is unpickled
before it has come. A message's length is checked before it is read.
"""

import asyncio
import contextlib
import hmac
import itertools
import pickle
import struct
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from plaudit import errors
from plaudit.errors import PeerFailed, PeerLost, PlauditError, RecipeError, StopRequested
from plaudit.types import TOKEN_BYTES

LENGTH, RANK, COUNT = struct.Struct("!Q"), struct.Struct("!I"), struct.Struct("!I")
MAX_MESSAGE_BYTES = 256 * 2**20
"""Without arrays: a group's conversations are a few megabytes."""
MAX_ARRAY_BYTES = 8 * 2**30
"""Hidden states of the longest sequence: 131,072 tokens of a model that is 8,192 wide are 4 GiB."""
LARGE_ARRAY_BYTES = 2**16
MAX_CHUNKS = 64
BUFFER_BYTES = 2**20
ADMISSION_S = 30.0
"""How long a connection may take to send its token, and to be made."""


class BadMessage(Exception):
    """What was sent is not one of our messages, or is too large."""


def gone(rank: int) -> str:
    return f"the process with rank {rank} cannot be reached any more"


def pack(message: Any) -> list[bytes | memoryview]:
    """What is sent, in order. Arrays are not copied."""
    arrays: list[memoryview] = []

    def pickle_inside(buffer: pickle.PickleBuffer) -> bool:
        if (array := buffer.raw()).nbytes >= LARGE_ARRAY_BYTES:
            arrays.append(array)
            return False
        return True

    content = pickle.dumps(message, pickle.HIGHEST_PROTOCOL, buffer_callback=pickle_inside)
    lengths = [len(content), *(array.nbytes for array in arrays)]
    _require_limits(lengths)
    return [b"".join((COUNT.pack(len(lengths)), *map(LENGTH.pack, lengths), content)), *arrays]


def send(writer: asyncio.StreamWriter, packed: Sequence[bytes | memoryview]) -> None:
    """Without a pause in which another message could be sent."""
    for chunk in packed:
        writer.write(chunk)


def _require_limits(lengths: Sequence[int]) -> None:
    for length, limit in zip(lengths, (MAX_MESSAGE_BYTES, *[MAX_ARRAY_BYTES] * (len(lengths) - 1)), strict=True):
        if length > limit:
            raise BadMessage(f"a message of {length / 1e6:,.0f} MB; the limit is {limit / 1e6:,.0f} MB")
    if len(lengths) > MAX_CHUNKS:
        raise BadMessage(f"a message of {len(lengths):,} chunks; the limit is {MAX_CHUNKS}")


async def receive(reader: asyncio.StreamReader) -> Any:
    """The next message of an admitted peer."""
    [count] = COUNT.unpack(await reader.readexactly(COUNT.size))
    if not 1 <= count <= MAX_CHUNKS:
        raise BadMessage(f"a message of {count:,} chunks is announced")
    lengths = [LENGTH.unpack(await reader.readexactly(LENGTH.size))[0] for _ in range(count)]
    _require_limits(lengths)
    content, *arrays = [await _receive_chunk(reader, length) for length in lengths]
    try:
        return pickle.loads(content, buffers=arrays)
    except Exception as error:
        raise BadMessage(f"a message cannot be read: {error}") from None


async def _receive_chunk(reader: asyncio.StreamReader, length: int) -> bytearray:
    chunk, at = bytearray(length), 0
    while at < length:
        received = await reader.read(min(length - at, BUFFER_BYTES))
        if not received:
            raise asyncio.IncompleteReadError(b"", length - at)
        chunk[at : at + len(received)] = received
        at += len(received)
    return chunk


class PeerServer:
    """Answers the calls of the other processes."""

    def __init__(self, token: bytes, answer: Callable[[int, Any], Awaitable[Any]], lost: Callable[[int], None]):
        """`answer(rank, call)`: the result of a call. `lost(rank)`: the connection to that process is closed."""
        assert len(token) == TOKEN_BYTES
        self._token, self._answer, self._lost = token, answer, lost
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def listen(self, host: str) -> int:
        """Returns the port."""
        self._server = await asyncio.start_server(self._serve, host, 0, limit=BUFFER_BYTES)
        return self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in self._writers:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rank: int | None = None
        calls: dict[int, asyncio.Task[None]] = {}
        self._writers.add(writer)
        try:
            async with asyncio.timeout(ADMISSION_S):
                if not hmac.compare_digest(await reader.readexactly(TOKEN_BYTES), self._token):
                    return
                rank = int(RANK.unpack(await reader.readexactly(RANK.size))[0])
            while True:
                number, call = await receive(reader)
                if call is not None:
                    calls[number] = task = asyncio.create_task(self._reply(writer, rank, number, call))
                    task.add_done_callback(lambda _, number=number: calls.pop(number, None))
                elif number in calls:
                    calls[number].cancel()
        except (asyncio.IncompleteReadError, BadMessage, OSError, TimeoutError, asyncio.CancelledError):
            pass  # it is gone, or no process of ours; cancelled: the rewards are closed
        finally:
            for task in list(calls.values()):
                task.cancel()
            self._writers.discard(writer)
            writer.close()
            if rank is not None:
                self._lost(rank)

    async def _reply(self, writer: asyncio.StreamWriter, rank: int, number: int, call: Any) -> None:
        try:
            reply = pack((number, "result", await self._answer(rank, call)))
        except StopRequested:
            reply = pack((number, "stopped", None))
        except PlauditError as error:
            reply = pack((number, "user error", (type(error).__name__, str(error))))
        except Exception as error:
            reply = pack((number, "failed", f"{type(error).__name__}: {error}"[:2000]))
        with contextlib.suppress(OSError):
            send(writer, reply)
            await writer.drain()


class PeerClient:
    """This process's connection to another, made with the first call."""

    def __init__(self, address: tuple[str, int], token: bytes, rank: int, owner: int):
        """`rank`: of this process. `owner`: of the other."""
        self._address, self._token, self._rank, self.owner = address, token, rank, owner
        self._connecting = asyncio.Lock()
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._lost: str | None = None

    async def call(self, *call: Any) -> Any:
        """The other process's result. Cancelling it cancels the call there."""
        writer = await self._connect()
        number = next(self._numbers)
        message = pack((number, call))
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            send(writer, message)
            await writer.drain()
            return await future
        except OSError as error:
            raise PeerLost(self._gone(error)) from None
        except asyncio.CancelledError:
            if self._lost is None:
                send(writer, pack((number, None)))
            raise
        finally:
            self._waiting.pop(number, None)

    def close(self) -> None:
        self._fail("the connection was closed")
        if self._reading is not None:
            self._reading.cancel()
        if self._writer is not None:
            self._writer.close()

    async def _connect(self) -> asyncio.StreamWriter:
        async with self._connecting:
            if self._writer is None and self._lost is None:
                try:
                    async with asyncio.timeout(ADMISSION_S):
                        reader, self._writer = await asyncio.open_connection(*self._address, limit=BUFFER_BYTES)
                except OSError as error:  # TimeoutError is one
                    self._fail(self._gone(error))
                else:
                    self._writer.write(self._token + RANK.pack(self._rank))
                    self._reading = asyncio.create_task(self._read(reader))
            if self._lost is not None:
                raise PeerLost(self._lost)
            assert self._writer is not None
            return self._writer

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                number, kind, result = await receive(reader)
                if (future := self._waiting.get(number)) is None or future.done():
                    continue  # cancelled meanwhile
                match kind:
                    case "result":
                        future.set_result(result)
                    case "stopped":
                        future.set_exception(StopRequested())
                    case "user error":
                        kind, message = result
                        future.set_exception(getattr(errors, kind, RecipeError)(message))
                    case _:
                        future.set_exception(PeerFailed(f"rank {self.owner}: {result}"))
        except (asyncio.IncompleteReadError, OSError):
            self._fail(self._gone())
        except BadMessage as error:
            self._fail(self._gone(error))

    def _gone(self, error: Exception | None = None) -> str:
        why = f" ({error or type(error).__name__})" if error is not None else ""
        return f"{gone(self.owner)}{why}"

    def _fail(self, why: str) -> None:
        self._lost = self._lost or why
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(PeerLost(self._lost))
