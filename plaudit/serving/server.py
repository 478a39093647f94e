"""`plaudit serve`, from the socket to the last answer.

The socket comes first: a port in use is told before a model is loaded, and `/health` answers while it is. The first SIGTERM or
SIGINT lets nobody in any more, waits for what is under way as long as it may take, closes the rewards and ends well; the second one
ends it at once (what rewards have started ends by itself when we do).
"""

import asyncio
import contextlib
import ipaddress
import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn

from plaudit.data.rollouts import token_counter
from plaudit.errors import PlauditError
from plaudit.recipe import RewardSettings
from plaudit.report.progress import print_line
from plaudit.rewards.runner import RewardRunner
from plaudit.serving.app import make_app
from plaudit.serving.door import Limits
from plaudit.serving.metrics import Metrics
from plaudit.serving.service import Service

HEAR_EVERY_S = 0.1
LAST_WORDS_S = 5.0
"""After the time for what is under way: for sending the answers that say so."""


@dataclass(frozen=True)
class ServeJob:
    rewards: Sequence[RewardSettings]
    host: str
    port: int
    limits: Limits
    timeout_s: float
    grace_s: float
    token: str | None = field(default=None, repr=False)
    cache: Path | None = None
    tokenizer: str | None = None


class _Server(uvicorn.Server):
    """Signals are ours: uvicorn would end with the signal it got, and not with 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(job: ServeJob) -> None:
    """Serve until a signal comes."""
    runner = RewardRunner(job.rewards, cache=job.cache, tolerant=True)
    with _listening(job.host, job.port) as listener, _signals() as stop:
        runner.start()
        try:
            serving = runner.run(_serve(job, runner, listener, stop))
            while not serving.done():
                # A signal may be given to another thread, and Python hears of it in this one, once it is awake.
                wait([serving], timeout=HEAR_EVERY_S)
            done = serving.result()
        finally:
            runner.close()
    print_line(f"serve: stopped after {done.requests.total():,} requests and {done.samples:,} responses")


async def _serve(job: ServeJob, runner: RewardRunner, listener: socket.socket, stop: Future[None]) -> Metrics:
    service = Service(runner, job.timeout_s)
    app = make_app(service, job.limits, token=job.token, count_tokens=token_counter(job.tokenizer))
    server = _Server(
        uvicorn.Config(
            app, lifespan="off", log_level="warning", access_log=False, server_header=False, ws="none",
            timeout_graceful_shutdown=int(job.grace_s + LAST_WORDS_S) + 1,
        )
    )  # fmt: skip
    address, count = _address(listener), len(job.rewards)
    names = ", ".join(reward.label for reward in job.rewards)
    print_line(f"serve: listening on {address}; opening {count} reward{'s'[: count > 1]}: {names}")
    began = time.monotonic()
    serving, opening = asyncio.create_task(server.serve(sockets=[listener])), asyncio.create_task(service.open())
    stopped = asyncio.wrap_future(stop)
    try:
        await asyncio.wait({opening, stopped, serving}, return_when=asyncio.FIRST_COMPLETED)
        if opening.done():
            opening.result()  # raises what a reward raised that cannot be opened
            print_line(f"serve: ready after {time.monotonic() - began:.1f} s; what can be asked: {address}/docs")
            await asyncio.wait({stopped, serving}, return_when=asyncio.FIRST_COMPLETED)
        under_way = service.metrics.in_flight
        finishing = f"; finishing {under_way} request{'s'[: under_way > 1]}, for {job.grace_s:g} s at most" if under_way else ""
        print_line(f"serve: stopping{finishing} (once more to end at once)")
    finally:
        service.state = "stopping"
        opening.cancel()
        server.should_exit = True
        cut = asyncio.get_running_loop().call_later(job.grace_s, service.cut_short)
        await serving
        cut.cancel()
    return service.metrics


@contextlib.contextmanager
def _signals() -> Iterator[Future[None]]:
    """Done when the first SIGTERM or SIGINT comes. The second one does not wait for anything."""
    first: Future[None] = Future()

    def hear(number: int, _: object) -> None:
        if first.done():
            os._exit(128 + number)
        first.set_result(None)

    before = {number: signal.signal(number, hear) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield first
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextlib.contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as problem:
        raise PlauditError(f"--host {host}: {problem.strerror or problem}") from None
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
            listener.listen(2048)
        except OSError as problem:
            raise PlauditError(
                f"cannot listen on {host}:{port}: {problem.strerror or problem}. Choose another --port (0: any that is free)."
            ) from None
        yield listener


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
