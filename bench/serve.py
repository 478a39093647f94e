"""Requests per second of `plaudit serve` with two cheap rules, server and clients on this machine: python bench/serve.py"""

import argparse
import asyncio
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import aiohttp

RECIPE = "rewards: [{kind: exact}, {kind: length, unit: words, at_most: 3, weight: 0.1}]"
ITEM = {"prompt": "2 + 2 =", "responses": ["4", "5"], "ground_truth": "4"}


async def measure(url: str, connections: int, items: int, seconds: float) -> str:
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

        began = time.perf_counter()
        await asyncio.gather(*(send_requests() for _ in range(connections)))
        rate = len(took) / (time.perf_counter() - began)
    took.sort()
    p50, p99 = (1000 * took[int(len(took) * share)] for share in (0.5, 0.99))
    return f"{rate:7,.0f} requests/s {2 * items * rate:7,.0f} responses/s   p50 {p50:6.1f} ms   p99 {p99:6.1f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=6.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "rewards.yaml"
        recipe.write_text(RECIPE)
        command = [sys.executable, "-m", "plaudit", "serve", str(recipe), "--port", "0"]
        server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            assert server.stderr is not None
            url = re.search(r"listening on (\S+);", server.stderr.readline())[1]  # pyright: ignore
            server.stderr.readline()  # ready
            for connections, items in ((1, 1), (args.connections, 1), (args.connections, 32)):
                print(
                    f"{connections:4} connections, {items:3} items: {asyncio.run(measure(url, connections, items, args.seconds))}"
                )
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
