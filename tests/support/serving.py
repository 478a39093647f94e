"""`plaudit serve` in a separate process, for tests over real sockets."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from support.paths import REPOSITORY


@dataclass
class HttpResponse:
    status: int
    body: bytes
    headers: dict[str, str]

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class ServerProcess:
    """A running server."""

    process: subprocess.Popen
    url: str
    log: Path
    token: str | None = None

    def request(
        self, path: str, body: Any = None, *, method: str | None = None, token: str | None = None, **headers: str
    ) -> HttpResponse:
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **headers} if data is not None else headers
        if token or self.token:
            headers["Authorization"] = f"Bearer {token or self.token}"
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return HttpResponse(response.status, response.read(), dict(response.headers))
        except urllib.error.HTTPError as error:
            with error:
                return HttpResponse(error.code, error.read(), dict(error.headers))

    def score(self, *items: dict, **fields: Any) -> list[dict]:
        answer = self.request("/score", {"items": items, **fields})
        assert answer.status == 200, answer.body
        return answer.json["items"]

    def connect(self) -> socket.socket:
        host, port = self.url.removeprefix("http://").split(":")
        connection = socket.create_connection((host, int(port)))
        connection.settimeout(60)
        return connection

    def metric(self, line: str) -> float:
        text = self.request("/metrics").body.decode()
        return next((float(sample.rpartition(" ")[2]) for sample in text.splitlines() if sample.startswith(f"{line} ")), 0.0)

    def wait_until(self, condition: Any, seconds: float = 20.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"timed out; the server's log: {self.log.read_text()}"
            time.sleep(0.02)

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(100)


@contextlib.contextmanager
def run_server(
    folder: Path,
    rewards: list[dict],
    *arguments: object,
    ready: bool = True,
    before_start: Callable[[], object] | None = None,
    **environment: str,
) -> Iterator[ServerProcess]:
    """`before_start` is called in the new process."""
    recipe, log = folder / "serve.yaml", folder / "serve.log"
    recipe.write_text(yaml.safe_dump({"rewards": rewards}))
    command = [sys.executable, "-m", "plaudit", "serve", str(recipe), "--port", "0", *map(str, arguments)]
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stderr=file, stdout=file, cwd=REPOSITORY, env={**os.environ, **environment}, preexec_fn=before_start
        )
    try:
        served = ServerProcess(process, "", log)
        served.wait_until(
            lambda: re.search("ready after" if ready else "listening on", log.read_text()) or process.poll() is not None, 200
        )
        address = re.search(r"listening on (http://\S+);", log.read_text())
        served.url = address[1] if address else ""
        yield served
    finally:
        process.kill()
        process.wait()
