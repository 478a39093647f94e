"""A server that samples for the policy: started, awaited, called, given weights, put to sleep, started again, stopped."""

import json
import os
import secrets
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import aiohttp

from plaudit.errors import RecipeError, TrainingStopped
from plaudit.report.progress import print_line, print_own_warning
from plaudit.rollout.engine import Weights
from plaudit.rollout.served.dialect import BadAnswer, Dialect, Launch, ServerLost
from plaudit.rollout.served.http_loop import HttpLoop
from plaudit.servers.process import HOST, ServerProcess, Startup, free_port

POLL_S = 0.2


class Refused(TrainingStopped):
    """The server answered that it will not do what it was called for."""


class PolicyServer:
    """One server, for one process that trains."""

    def __init__(
        self,
        dialect: Dialect,
        launch: Launch,
        environment: Mapping[str, str],
        *,
        shares_gpu: bool,
        log: Path | None = None,
        check: Callable[[], None],
    ):
        """`shares_gpu`: its GPU is the one that we train on. `check` is called several times per second while we wait, and may
        raise."""
        self._dialect, self._launch, self.shares_gpu, self.check = dialect, launch, shares_gpu, check
        self.settings = dialect.settings
        self._title = dialect.command.title
        self._environment = dict(environment)
        self.folder = Path(mkdtemp(prefix="plaudit-engine-"))
        self.log = log or self.folder / "server.log"
        self._token = secrets.token_hex(32)
        self._process: ServerProcess | None = None
        self._port = 0
        self._http = HttpLoop({"Authorization": f"Bearer {self._token}"})
        self._has_weights, self._failed = False, False

    # Life --------------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start it and wait until it answers."""
        self._port = free_port()
        environment = {**os.environ, **self._dialect.environment(self._token, os.environ), **self._environment}
        print_line(f"starting the {self._title} server on port {self._port} for sampling; its output: {self.log}")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        words = [word for argument in self.settings.arguments for word in shlex.split(argument)]
        program = self._dialect.command.words(self.settings.program)
        command = [*program, *self._dialect.arguments(self._launch, self._port, self._token), *words]
        try:
            self._process = ServerProcess(command, self.log, environment)
        except OSError as error:
            raise RecipeError(f"rollout.server.program: {command[0]} cannot be started: {error.strerror}") from None
        limit_s = self.settings.start_timeout_s
        startup = Startup(self._process, f"the {self._title} server for sampling", limit_s, "rollout.server.start_timeout_s")
        while not self._answers():
            try:
                startup.check()
            except RecipeError as error:
                self._failed = True
                raise RecipeError(f"rollout.engine {self._dialect.name}: {error} Its output: {self.log}") from None
            self.check()
            time.sleep(POLL_S)
        startup.ready()

    def restart(self, why: str) -> None:
        print_own_warning(f"the {self._title} server is lost ({why}): starting it again")
        self._failed = True
        self.kill()
        self._has_weights = False
        self.start()

    def kill(self) -> None:
        """End it at once, so that its GPU memory is free."""
        if self._process is not None:
            self._process.stop(grace_s=0.0)

    def close(self) -> None:
        self._http.close()
        if self._process is not None:
            self._process.stop()
        if not self._failed or self.log.parent != self.folder:  # else the log may be read
            shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def lost(self) -> str | None:
        """Why it is lost, if it is."""
        assert self._process is not None
        return None if self._process.alive else self._process.last_error() or self._process.epitaph()

    def _answers(self) -> bool:
        async def ask() -> bool:
            url, limit = self._url(self._dialect.health_path), aiohttp.ClientTimeout(total=5.0)
            with suppress(aiohttp.ClientError, TimeoutError, OSError):
                async with self._http.session.get(url, timeout=limit) as response:
                    return response.status == 200
            return False

        return self._http.submit(ask()).result()

    # Requests ----------------------------------------------------------------------------------------------------------

    async def sample(self, body: dict[str, Any], version: int) -> tuple[list[int], list[float]]:
        """Tokens and log-probs of one sample, by these weights. Raises ServerLost. On the event loop."""
        answer = await self._post(self._dialect.sample_path, body, self._dialect.request_headers(version))
        with self._bad_answers():
            return self._dialect.read(answer, version)

    def submit(self, work: Any) -> "Future[Any]":
        return self._http.submit(work)

    def _url(self, path: str) -> str:
        return f"http://{HOST}:{self._port}{path}"

    async def _post(self, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Any:
        text = ""
        try:
            async with self._http.session.post(self._url(path), json=body, headers=headers) as response:
                text = await response.text()
                if response.status == 200:
                    return json.loads(text) if response.content_type == "application/json" else text
        except json.JSONDecodeError:
            raise TrainingStopped(self._message(f"its answer at {path} is no JSON: {text[:200]!r}")) from None
        except (aiohttp.ClientError, OSError) as error:
            raise ServerLost(str(error) or type(error).__name__) from error
        if response.status >= 500:
            raise ServerLost(f"HTTP {response.status} at {path}: {text[:500]}")
        raise Refused(self._message(f"HTTP {response.status} at {path}: {text[:500]}"))

    def call(self, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Any:
        """The answer, for a caller that has no event loop. Raises ServerLost, also if there is none within the time limit."""
        return self.wait(self._http.submit(self._post(path, body, headers)), path)

    def until_done(self, path: str) -> None:
        """The same, again and again while the server says that it cannot do it yet (HTTP 400)."""
        deadline = time.monotonic() + self.settings.call_timeout_s
        while True:
            try:
                self.call(path)
                return
            except Refused:
                if time.monotonic() > deadline:
                    raise ServerLost(f"not done within rollout.server.call_timeout_s: {path}") from None
            time.sleep(POLL_S)

    def begin(self, path: str, body: Any = None) -> "Future[Any]":
        """The same, without waiting."""
        return self._http.submit(self._post(path, body))

    def wait(self, answer: "Future[Any]", what: str) -> Any:
        deadline = time.monotonic() + self.settings.call_timeout_s
        while True:
            try:
                return answer.result(POLL_S)
            except TimeoutError:
                if time.monotonic() > deadline:
                    answer.cancel()
                    raise ServerLost(f"no answer to {what} within rollout.server.call_timeout_s") from None
            self.check()

    # What dialects differ in -------------------------------------------------------------------------------------------

    def load(self, weights: Weights, version: int) -> None:
        """Give it these weights. Until they are loaded and checked, it samples nothing that counts."""
        with self._bad_answers():
            self._dialect.load(self, weights, version, first=not self._has_weights)
        self._has_weights = True

    def sleep(self) -> None:
        """Give its GPU memory back: weights too, which the next sync sends again."""
        with self._bad_answers():
            self._dialect.sleep(self)

    def wake(self, what: str) -> None:
        """`weights` or `kv_cache`."""
        with self._bad_answers():
            self._dialect.wake(self, what)

    @contextmanager
    def _bad_answers(self) -> Iterator[None]:
        try:
            yield
        except BadAnswer as error:
            raise TrainingStopped(self._message(str(error))) from error

    def _message(self, why: str) -> str:
        return f"rollout.engine {self._dialect.name}: {why}. Its output: {self.log}"
