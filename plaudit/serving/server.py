"""`plaudit serve`: listens, opens the rewards, and shuts down gracefully.

The socket is opened first: a port in use is reported before any model is loaded, and `/health` responds while rewards open. The
first SIGTERM or SIGINT rejects new requests, finishes those in flight within the grace period, closes the rewards and exits with 0;
the second one exits at once (processes started by rewards end with this one).
"""

import asyncio
import contextlib
import gc
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import uvicorn

from plaudit.data.rollouts import token_counter
from plaudit.recipe import RewardSettings
from plaudit.report.progress import print_line
from plaudit.rewards.runner import RewardRunner
from plaudit.serving.admission import Limits
from plaudit.serving.app import make_app
from plaudit.serving.connections import MAX_HEADER_BYTES, ClientConnection, ConnectionLimits, Connections
from plaudit.serving.listening import WAITING_CONNECTIONS, address_of, listening
from plaudit.serving.metrics import Metrics
from plaudit.serving.service import Service

SIGNAL_POLL_S = 0.1
SWITCH_INTERVAL_S = 0.001
"""How long a thread that computes may keep the event loop waiting for the interpreter lock: several times in a request. Python's
default is 5 ms."""
COLLECT_EVERY_S, COLLECT_AT_LAST_S = 2.0, 300.0
COLLECTIONS_BEFORE_FULL, QUIET_RESPONSES = 50, 1024
"""Garbage collections of younger objects before a full one, and responses in flight during it."""
SEND_TIMEOUT_S = 5.0
"""Time after the grace period for sending the responses of aborted requests."""


@dataclass(frozen=True)
class ServeJob:
    rewards: Sequence[RewardSettings]
    host: str
    port: int
    limits: Limits
    connections: ConnectionLimits
    timeout_s: float
    grace_s: float
    token: str | None = field(default=None, repr=False)
    cache: Path | None = None
    tokenizer: str | None = None


class _Server(uvicorn.Server):
    """Without uvicorn's signal handlers, which would exit with the signal instead of 0."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        # asyncio's `backlog` is also how many it accepts at once; further ones can wait in the queue.
        for listener in sockets or []:
            listener.listen(WAITING_CONNECTIONS)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(job: ServeJob) -> None:
    """Serve until SIGTERM or SIGINT."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    runner = RewardRunner(job.rewards, cache=job.cache, tolerant=True)
    with listening(job.host, job.port) as listener, _signals() as stop:
        runner.start()
        try:
            serving = runner.run(_serve(job, runner, listener, stop))
            while not serving.done():
                # Python handles signals on this thread, and only when it wakes up.
                wait([serving], timeout=SIGNAL_POLL_S)
            metrics = serving.result()
        finally:
            runner.close()
    print_line(f"serve: stopped after {metrics.requests.total():,} requests and {metrics.samples:,} responses")


async def _serve(job: ServeJob, runner: RewardRunner, listener: socket.socket, stop: Future[None]) -> Metrics:
    service = Service(runner, job.timeout_s)
    app = make_app(service, job.limits, token=job.token, count_tokens=token_counter(job.tokenizer))
    connections = Connections(job.connections, service.metrics)
    server = _Server(
        uvicorn.Config(
            app, lifespan="off", log_level="error", access_log=False, server_header=False, ws="none",
            http=partial(ClientConnection, connections),  # pyright: ignore[reportArgumentType] (it is only called)
            backlog=job.connections.accepted_at_once, h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            timeout_graceful_shutdown=int(job.grace_s + SEND_TIMEOUT_S) + 1,
        )
    )  # fmt: skip
    address, count = address_of(listener), len(job.rewards)
    names = ", ".join(reward.label for reward in job.rewards)
    print_line(f"serve: listening on {address}; opening {count} reward{'s'[: count > 1]}: {names}")
    if (allowed := job.connections.allowed) < job.connections.max_connections:
        print_line(f"serve: at most {allowed} connections, half of the files that this process may open (ulimit -n)")
    start = time.monotonic()
    serving, opening = asyncio.create_task(server.serve(sockets=[listener])), asyncio.create_task(service.open())
    stopped = asyncio.wrap_future(stop)
    try:
        await asyncio.wait({opening, stopped, serving}, return_when=asyncio.FIRST_COMPLETED)
        if opening.done():
            opening.result()  # raises if a reward could not be opened
            collecting = asyncio.create_task(_collect_when_quiet(service))
            stopped.add_done_callback(lambda _: collecting.cancel())
            print_line(f"serve: ready after {time.monotonic() - start:.1f} s; API documentation: {address}/docs")
            await asyncio.wait({stopped, serving}, return_when=asyncio.FIRST_COMPLETED)
        in_flight = service.metrics.in_flight
        finishing = f"; finishing {in_flight} request{'s'[: in_flight > 1]}, for {job.grace_s:g} s at most" if in_flight else ""
        print_line(f"serve: stopping{finishing} (signal again to stop at once)")
    finally:
        service.state = "stopping"
        opening.cancel()
        server.should_exit = True
        abort = asyncio.get_running_loop().call_later(job.grace_s, service.abort)
        await serving
        abort.cancel()
    return service.metrics


async def _collect_when_quiet(service: Service) -> None:
    """A full garbage collection stops everything while it traverses all objects: for a tenth of a second, if tens of thousands of
    responses are in flight. So it leaves out what is there from the start, and waits until few are in flight; not for ever,
    because requests leave some reference cycles behind."""
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, 2**30)
    due_s = 0.0
    while True:
        await asyncio.sleep(COLLECT_EVERY_S)
        if gc.get_count()[2] >= COLLECTIONS_BEFORE_FULL:
            due_s += COLLECT_EVERY_S
            if service.responses_in_flight <= QUIET_RESPONSES or due_s >= COLLECT_AT_LAST_S:
                gc.collect()
                due_s = 0.0


@contextlib.contextmanager
def _signals() -> Iterator[Future[None]]:
    """A future that is done on the first SIGTERM or SIGINT; the second one exits at once."""
    first: Future[None] = Future()

    def handle(number: int, _: object) -> None:
        if first.done():
            os._exit(128 + number)
        first.set_result(None)

    previous = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield first
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
