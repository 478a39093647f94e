"""Requests per second of `plaudit serve` with two cheap rules, and how long `/health` takes while it is attacked.

python bench/serve.py                 # server and clients on this machine
python bench/serve.py --attacks       # the second table only
"""

import argparse
import asyncio
import contextlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from plaudit.host import raise_open_file_limit

RULES = "{kind: exact}, {kind: length, unit: words, at_most: 3, weight: 0.1}"
ATTACKED = "{kind: regex, pattern: '(a|aa)+$', limits: {timeout_s: 0.5}}, {kind: repetition, weight: 0.1}"
ITEM = {"prompt": "2 + 2 =", "responses": ["4", "5"], "ground_truth": "4"}


def item(responses: int, text: str = "a", **fields: Any) -> dict[str, Any]:
    return {**ITEM, "responses": [text] * responses, **fields}


ATTACKS: dict[str, tuple[list[dict[str, Any]], int]] = {
    "nothing": ([], 0),
    "8 responses of 0.5 KB for `(a|aa)+$`": ([item(8, "a" * 500 + "b")], 1),
    "256 items of 64 letters": ([item(64)] * 256, 1),
    "16 items of 1,024 letters": ([item(1024)] * 16, 1),
    "the same in 2 requests": ([item(1024)] * 16, 2),
    "64 requests of 32 items": ([ITEM] * 32, 64),
    "16 responses of 1 MB": ([item(1, "one two three " * 70_000)] * 16, 1),
    "240,000 empty lists": ([item(1, extra_info={"lists": [[]] * 60_000})] * 4, 1),
    "500,000 fields": ([item(1, extra_info={str(i): i for i in range(62_500)})] * 8, 1),
}
"""Items of a request, and how many such requests are sent at the same time."""


@contextlib.contextmanager
def running_server(rewards: str) -> Iterator[tuple[str, psutil.Process]]:
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "rewards.yaml"
        recipe.write_text(f"rewards: [{rewards}]")
        command = [sys.executable, "-m", "plaudit", "serve", str(recipe), "--port", "0"]
        server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            assert server.stderr is not None
            address = re.search(r"listening on (\S+);", server.stderr.readline())
            assert address is not None
            server.stderr.readline()  # ready
            yield address[1], psutil.Process(server.pid)
        finally:
            server.terminate()
            server.wait()


async def measure(url: str, server: psutil.Process, connections: int, items: int, seconds: float) -> str:
    """Throughput of this many connections, each sending its next request as soon as the last is answered."""
    body, took = {"items": [ITEM] * items}, []
    end = time.perf_counter() + seconds
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def send_requests() -> None:
            while (began := time.perf_counter()) < end:
                async with session.post(f"{url}/score", json=body) as answer:
                    assert answer.status == 200, await answer.text()
                    await answer.read()
                took.append(time.perf_counter() - began)

        began, processor_s = time.perf_counter(), _processor_s(server)
        await asyncio.gather(*(send_requests() for _ in range(connections)))
        rate = len(took) / (time.perf_counter() - began)
    each = 1000 * (_processor_s(server) - processor_s) / len(took)
    p50, p99 = _percentiles(took)
    return (
        f"{rate:7,.0f} requests/s {2 * items * rate:7,.0f} responses/s   p50 {p50:6.1f} ms   p99 {p99:6.1f} ms   "
        f"server {each:6.2f} CPU ms each"
    )


async def measure_health(url: str, items: list[dict[str, Any]], requests: int) -> str:
    """How long `/health` takes, asked every 10 ms on a connection of its own, until the attack is answered."""
    body, took = json.dumps({"items": items}).encode(), []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def attack() -> tuple[int, float]:
            began = time.perf_counter()
            async with session.post(f"{url}/score", data=body, headers={"Content-Type": "application/json"}) as answer:
                await answer.read()
                return answer.status, time.perf_counter() - began

        async def ask() -> None:
            while True:
                began = time.perf_counter()
                async with session.get(f"{url}/health") as answer:
                    await answer.read()
                took.append(time.perf_counter() - began)
                await asyncio.sleep(0.01)

        asking = asyncio.create_task(ask())
        answers = await asyncio.gather(*(attack() for _ in range(requests))) or [await asyncio.sleep(1.0, (0, 1.0))]
        asking.cancel()
    return _health_row(took, f"{len(body) / 1e6:.1f} MB, {max(seconds for _, seconds in answers):.1f} s")


async def measure_half_open(url: str, connections: int) -> str:
    """The same beside connections that have sent a part of a header."""
    host, port = url.removeprefix("http://").split(":")
    took, writers = [], []
    try:
        for _ in range(connections):
            _, writer = await asyncio.open_connection(host, int(port))
            writers.append(writer)
            writer.write(b"POST /score HTTP/1.1\r\nHost: x\r\nX-")
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
            for _ in range(100):
                began = time.perf_counter()
                async with session.get(f"{url}/health") as answer:
                    await answer.read()
                took.append(time.perf_counter() - began)
    finally:
        for writer in writers:
            writer.close()
    return _health_row(took, "")


def _health_row(took: list[float], attack: str) -> str:
    return "".join(f"{ms:8.1f}" for ms in (*_percentiles(took), 1000 * max(took))) + f"   {attack}"


def _percentiles(took: list[float]) -> tuple[float, float]:
    ordered = sorted(took)
    return 1000 * ordered[len(ordered) // 2], 1000 * ordered[int(len(ordered) * 0.99)]


def _processor_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--attacks", action="store_true", help="the second table only")
    args = parser.parse_args()
    raise_open_file_limit()
    load = psutil.getloadavg()[0]
    print(f"{psutil.cpu_count()} cores, load before the start {load:.1f}")
    if not args.attacks:
        with running_server(RULES) as (url, server):
            for connections, items in ((1, 1), (args.connections, 1), (args.connections, 32)):
                row = asyncio.run(measure(url, server, connections, items, args.seconds))
                print(f"{connections:4} connections, {items:3} items: {row}", flush=True)
    with running_server(f"{RULES}, {ATTACKED}") as (url, server):
        print(f"{'/health during':40} p50, ms     p99     max   the attack's body and time")
        for name, (items, requests) in ATTACKS.items():
            print(f"{name:39}{asyncio.run(measure_health(url, items, requests))}", flush=True)
        print(f"{'1,100 half-open connections':39}{asyncio.run(measure_half_open(url, 1100))}")
        print(f"memory of the server: {server.memory_info().rss / 1e6:,.0f} MB")


if __name__ == "__main__":
    main()
