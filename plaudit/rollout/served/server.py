"""A server that samples for the policy: called, given weights, put to sleep. `launched.py` starts one, `running.py` joins one."""

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import aiohttp

from plaudit.errors import TrainingStopped
from plaudit.rollout.engine import Weights
from plaudit.rollout.served.dialect import BadAnswer, Dialect, ServerLost
from plaudit.rollout.served.http_loop import HttpLoop
from plaudit.servers.process import HOST

POLL_S = 0.2
STALE = 409
"""What a server answers that has other weights than a request names."""


class Refused(TrainingStopped):
    """The server answered that it will not do what it was called for."""


class PolicyServer(ABC):
    """One server, as one process that trains sees it."""

    url: str
    """Without a path."""
    where_to_look: str
    """For messages: where the server's output is."""
    shares_gpu = False
    """Its GPU is the one that we train on."""
    listen_on = HOST
    """Where its workers reach this process."""

    def __init__(self, dialect: Dialect, token: str, check: Callable[[], None]):
        """`token`: the key to the server. `check` is called several times per second while we wait, and may raise."""
        self._dialect, self._token, self.check = dialect, token, check
        self.settings = dialect.settings
        self._title = dialect.command.title
        parent = self.settings.weights_folder and self.settings.weights_folder.expanduser().resolve()
        if parent is not None:
            parent.mkdir(parents=True, exist_ok=True)
        self.folder = Path(mkdtemp(prefix="plaudit-engine-", dir=parent))
        self._http = HttpLoop({"Authorization": f"Bearer {token}"})
        self._has_weights = False

    # Life --------------------------------------------------------------------------------------------------------------

    @abstractmethod
    def start(self) -> None:
        """Return once it answers."""

    @abstractmethod
    def restart(self, why: str) -> None:
        """The same for one that was lost: it has no weights."""

    @abstractmethod
    def kill(self) -> None:
        """Give up on it, at once, so that its GPU memory is free."""

    @abstractmethod
    def close(self) -> None: ...

    @property
    def lost(self) -> str | None:
        """Why it is lost, if that is known."""
        return None

    def _answers(self) -> bool:
        return self._http.submit(self._get(self._dialect.health_path)).result() is not None

    # Requests ----------------------------------------------------------------------------------------------------------

    @property
    def reports_progress(self) -> bool:
        return self._dialect.metrics_path is not None

    async def tokens_computed(self) -> float | None:
        """Since its start; None if it does not answer."""
        assert self._dialect.metrics_path is not None
        metrics = await self._get(self._dialect.metrics_path)
        return None if metrics is None else self._dialect.tokens_computed(metrics)

    async def _get(self, path: str) -> str | None:
        """What it answers within a few seconds; None for nothing, or an error."""
        with suppress(aiohttp.ClientError, TimeoutError, OSError):
            async with self._http.session.get(self.url + path, timeout=aiohttp.ClientTimeout(total=5.0)) as response:
                return await response.text() if response.status == 200 else None
        return None

    async def sample(self, body: dict[str, Any], version: int) -> tuple[list[int], list[float]]:
        """Tokens and log-probs of one sample, by these weights. Raises ServerLost. On the event loop."""
        answer = await self._post(self._dialect.sample_path, body, self._dialect.request_headers(version))
        with self._bad_answers():
            return self._dialect.read(answer, version)

    def submit(self, work: Any) -> "Future[Any]":
        return self._http.submit(work)

    async def _post(self, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Any:
        text = ""
        try:
            async with self._http.session.post(self.url + path, json=body, headers=headers) as response:
                text = await response.text()
                if response.status == 200:
                    return json.loads(text) if response.content_type == "application/json" else text
        except json.JSONDecodeError:
            raise TrainingStopped(self._message(f"its answer at {path} is no JSON: {text[:200]!r}")) from None
        except (aiohttp.ClientError, OSError) as error:
            raise ServerLost(str(error) or type(error).__name__) from error
        if response.status >= 500 or response.status == STALE:
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

    def refusal(self, path: str, body: Any) -> str | None:
        """What the server says if it does not do what a POST request says."""

        async def ask() -> str | None:
            try:
                async with self._http.session.post(self.url + path, json=body) as response:
                    text = await response.text()
                    return None if response.status == 200 else f"HTTP {response.status}: {' '.join(text.split())[:300]}"
            except (aiohttp.ClientError, OSError) as error:
                raise ServerLost(str(error) or type(error).__name__) from error

        return self.wait(self._http.submit(ask()), path)

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
        return f"rollout.engine {self._dialect.name}: {why}. {self.where_to_look}"
