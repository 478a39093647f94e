"""Calls per second of a judge's HTTP client: plaudit's compared with httpx and the openai client.

    python bench/judges.py                 512 calls in flight, a server that takes 200 ms, both on this machine

The server (tests/support/fault_server.py) and each client run in separate processes. Ideal: every call takes exactly the latency,
so `in flight / latency` calls per second. httpx and openai come from .venv-clients if it exists:

    python3 -m venv .venv-clients && .venv-clients/bin/pip install -r bench/requirements-clients.txt

Each client does the same work: the same chat requests, the same number in flight, and the answer's text parsed from JSON. httpx and
openai have their connection limits raised to the calls in flight; with their defaults they are slower.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / ".venv-clients" / "bin" / "python"
QUESTION = "Is the answer right? " * 50  # about a kilobyte, like a short judge prompt
Ask = Callable[[str], Awaitable[str]]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--in-flight", type=int, default=512)
    parser.add_argument("--latency", type=float, default=0.2, help="the server's latency in seconds")
    parser.add_argument("--calls", type=int, default=10240)
    parser.add_argument("--clients", default="plaudit,httpx,openai")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(asyncio.run(measure(arguments.one, arguments.url, arguments.in_flight, arguments.calls))))
        return
    import psutil  # not in .venv-clients, where this file runs with --one

    server = subprocess.Popen(
        [sys.executable, str(ROOT / "tests/support/fault_server.py"), "--latency", str(arguments.latency)], stdout=subprocess.PIPE
    )
    try:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        compare(arguments, url, psutil.Process(server.pid))
    finally:
        server.kill()
        server.wait()


def compare(arguments: argparse.Namespace, url: str, server: "psutil.Process") -> None:
    """Print the table. On a busy machine (see the load) calls per second mean little, but CPU time per call still does."""
    ideal = arguments.in_flight / arguments.latency
    print(f"{arguments.in_flight} calls in flight, {arguments.latency * 1000:.0f} ms latency, ideal {ideal:,.0f} calls/s, ", end="")
    print(f"{os.cpu_count()} cores with a load of {os.getloadavg()[0]:.1f}, best of {arguments.repeat}\n")
    print("| client | calls | calls/s (lowest…highest) | of the ideal | client CPU ms per call | server's | failed |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for client in arguments.clients.split(","):
        before = server.cpu_times()
        runs = [found for _ in range(arguments.repeat) if (found := run(client, url, arguments))]
        after = server.cpu_times()
        served = sum(one["calls"] + arguments.in_flight for one in runs)  # including the calls that open the connections
        if not runs:
            print(
                f"| {client} | | not run: no {client} in {PEERS.parent.parent.name} (see the top of this file) | | | | |",
                flush=True,
            )
            continue
        server_ms = (after.user + after.system - before.user - before.system) / served * 1000
        best, rates = max(runs, key=lambda one: one["rate"]), [one["rate"] for one in runs]
        print(
            f"| {client} {best['version']} | {best['calls']:,} | {best['rate']:,.0f} ({min(rates):,.0f}…{max(rates):,.0f}) "
            f"| {best['rate'] / ideal:.0%} | {best['processor_s'] / best['calls'] * 1000:.2f} "
            f"| {server_ms:.2f} | {best['failed']} |",
            flush=True,
        )


def run(client: str, url: str, arguments: argparse.Namespace) -> dict | None:
    python = str(PEERS) if client != "plaudit" and PEERS.exists() else sys.executable
    # httpx takes 16 ms per call with 512 in flight, so the peers get fewer calls.
    calls = arguments.calls if client == "plaudit" else min(arguments.calls, arguments.in_flight)
    command = [python, __file__, "--one", client, "--url", url, "--in-flight", str(arguments.in_flight), "--calls", str(calls)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    if done.returncode:
        print(done.stderr.strip().splitlines()[-1], file=sys.stderr)
        return None
    return json.loads(done.stdout)


async def measure(client: str, url: str, in_flight: int, calls: int) -> dict:
    """A few calls to open connections, then the timed ones."""
    ask, version = await CLIENTS[client](url, in_flight)
    await ask([QUESTION] * in_flight)
    began, cpu_s = time.perf_counter(), time.process_time()
    answers = await ask([f"question {i} {QUESTION}" for i in range(calls)])
    seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu_s
    good = sum(answer == f"answer to question {i} {QUESTION}" for i, answer in enumerate(answers))
    return {"calls": calls, "rate": calls / seconds, "processor_s": cpu_s, "failed": calls - good, "version": version}


async def plaudit(url: str, in_flight: int):
    from plaudit import __version__
    from plaudit.recipe.limits import ModelLimits
    from plaudit.recipe.reward_models import RewardModel
    from plaudit.reward_models.backend import GenerationRequest, SamplingParams
    from plaudit.reward_models.server_client import ServerClient

    client = ServerClient(RewardModel(placement="server", url=(url,)), limits=ModelLimits(max_concurrent_calls=in_flight))
    await client.open()

    async def ask(questions: list[str]) -> list[str | None]:
        requests = [GenerationRequest([{"role": "user", "content": question}], key=question[:14]) for question in questions]
        return [answer.text for answer in await client.generate(requests, SamplingParams(256))]

    return ask, __version__


def concurrently(ask: Ask, in_flight: int):
    """Calls `ask` for all questions with one task per call in flight, the cheapest way in asyncio."""

    async def ask_all(questions: list[str]) -> list[str | None]:
        answers: list[str | None] = [None] * len(questions)
        left = iter(enumerate(questions))

        async def work() -> None:
            for i, question in left:
                try:
                    answers[i] = await ask(question)
                except Exception as error:
                    answers[i] = f"{type(error).__name__}: {error}"

        await asyncio.gather(*(work() for _ in range(in_flight)))
        return answers

    return ask_all


async def httpx(url: str, in_flight: int):
    import httpx

    limits = httpx.Limits(max_connections=in_flight, max_keepalive_connections=in_flight)
    client = httpx.AsyncClient(limits=limits, timeout=120.0, trust_env=False)

    async def ask(question: str) -> str:
        body = {"model": "judge", "messages": [{"role": "user", "content": question}], "max_tokens": 256, "temperature": 0.0}
        answer = await client.post(f"{url}/v1/chat/completions", json=body)
        return answer.json()["choices"][0]["message"]["content"]

    return concurrently(ask, in_flight), httpx.__version__


async def openai(url: str, in_flight: int):
    import httpx
    import openai

    limits = httpx.Limits(max_connections=in_flight, max_keepalive_connections=in_flight)
    http_client = httpx.AsyncClient(limits=limits, timeout=120.0, trust_env=False)
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", http_client=http_client, max_retries=4)

    async def ask(question: str) -> str:
        answer = await client.chat.completions.create(
            model="judge", messages=[{"role": "user", "content": question}], max_tokens=256, temperature=0.0
        )
        return answer.choices[0].message.content or ""

    return concurrently(ask, in_flight), openai.__version__


CLIENTS = {"plaudit": plaudit, "httpx": httpx, "openai": openai}

if __name__ == "__main__":
    main()
