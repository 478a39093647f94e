"""Calls to a model's servers: many at once, each within its time, again where that may help, and counted.

A call that failed is made again, at another server if there is one, after

    wait = backoff_s · 2^tries · random in [0.5, 1],   or what Retry-After says if that is longer

as long as its deadline allows. The random part keeps calls that failed together from coming back together.
"""

import asyncio
import email.utils
import errno
import itertools
import json
import os
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import aiohttp

from plaudit.errors import RecipeError, redact
from plaudit.recipe.reward_models import CallLimits as Limits
from plaudit.reward_models.backend import Usage
from plaudit.reward_models.rate_limit import RateLimiter
from plaudit.reward_models.replicas import Replica, Replicas
from plaudit.types import Failure

T = TypeVar("T")
IDLE_S = 4.0
"""How long an unused connection is kept: less than servers keep it (uvicorn: 5 s), or we would write into one they just closed."""
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=str)
BYTES_PER_TOKEN = 4
"""Of text, about."""
WORDS_KEPT = 300
"""Characters of a server's answer that go into a message."""


class Garbage(Exception):
    """An answer that is not what was asked for."""


class TooLong(Exception):
    """The server says that the prompt does not fit into its context."""


@dataclass(frozen=True)
class Fault:
    """What went wrong with one try."""

    cause: str
    message: str
    passing: bool = True
    """It may work when tried again."""
    wait_s: float = 0.0
    """How long the server asks us to wait."""


class Connection:
    """A pool of connections to all servers of a model. Lives on one event loop."""

    def __init__(self, replicas: Replicas, limits: Limits, credential: str | None = None):
        self.replicas, self.limits, self.usage = replicas, limits, Usage()
        self._credential = credential
        self._key = ""
        self._session: aiohttp.ClientSession | None = None
        self._places = asyncio.Semaphore(limits.at_once)
        self.rate_limiter = RateLimiter(limits.per_s, limits.tokens_per_minute)

    async def __aenter__(self) -> Self:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._credential:
            self._key = os.environ.get(self._credential, "")
            if not self._key:
                raise RecipeError(
                    f"{self.replicas.all[0].root}: its key should be in the environment variable {self._credential}, which is not "
                    f"set. Set it (export {self._credential}=…), or leave out credential if the server needs none."
                )
            headers["Authorization"] = f"Bearer {self._key}"
        self._session = aiohttp.ClientSession(
            headers=headers,
            # limit=0: `_places` is the limit. A second one below it would make calls wait with their clocks running.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S, ttl_dns_cache=60),
            cookie_jar=aiohttp.DummyCookieJar(),
            # Looking for a proxy takes as long as the rest of a call, and servers nearby are not behind one.
            trust_env=not all(_is_near(replica) for replica in self.replicas.all),
        )
        return self

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    # A question -------------------------------------------------------------------------------------------------------

    async def ask(
        self, path: str, body: Mapping[str, Any], read: Callable[[Any], T], *, affinity: str = "", deadline_s: float | None = None
    ) -> T | Failure:
        """What `read` makes of the answer's JSON, or why there is none. `read` raises Garbage (or KeyError, …) if it cannot.

        Raises TooLong if the server says so.
        """
        limit_s = deadline_s or self.limits.deadline_s
        # Text may hold half of a surrogate pair, which no server can read: UTF-8 with '?' instead.
        data = _ENCODER.encode(body).encode("utf-8", "replace")
        async with self._places:
            reserved = await self.rate_limiter.begin(guess=len(data) / BYTES_PER_TOKEN)
            began = time.monotonic()
            try:
                return await self._with_retries(path, data, read, affinity, began + limit_s)
            finally:
                self.usage.seconds += time.monotonic() - began
                self.rate_limiter.release(reserved)

    async def _with_retries(self, path: str, data: bytes, read: Callable[[Any], T], affinity: str, deadline: float) -> T | Failure:
        avoid = None
        for tried in itertools.count():
            replica = self.replicas.choose(affinity, avoid)
            self.usage.calls += 1
            self.usage.retries += tried > 0
            left = deadline - time.monotonic()
            found = await self._try(replica, path, data, read, min(left, self.limits.call_timeout_s or left))
            if not isinstance(found, Fault):
                return found
            self.usage.faults[found.cause] = self.usage.faults.get(found.cause, 0) + 1
            wait = max(found.wait_s, self.limits.backoff_s * 2**tried * random.uniform(0.5, 1.0))
            if not found.passing or tried == self.limits.retries or time.monotonic() + wait >= deadline:
                self.usage.failures[found.cause] = self.usage.failures.get(found.cause, 0) + 1
                tries = f" ({tried + 1} tries)" if tried else ""
                return Failure(found.cause, self.clean(f"{replica.url(path)}: {found.message}{tries}"))
            await asyncio.sleep(wait)
            self.rate_limiter.repeat()
            avoid = replica
        raise AssertionError("not reached")

    async def _try(self, replica: Replica, path: str, data: bytes, read: Callable[[Any], T], limit_s: float) -> T | Fault:
        replica.under_way += 1
        replica.asked += 1
        try:
            found = await self._call(replica, path, data, read, limit_s)
        except TooLong:
            replica.answered()
            raise
        finally:
            replica.under_way -= 1
        if not isinstance(found, Fault) or not found.passing:
            replica.answered()  # it works; it only does not like this question
        else:
            replica.failed(gone=found.cause == "refused", for_s=found.wait_s)
        return found

    async def _call(self, replica: Replica, path: str, data: bytes, read: Callable[[Any], T], limit_s: float) -> T | Fault:
        assert self._session is not None, "a connection is opened before it is used"
        limits = self.limits
        timeout = aiohttp.ClientTimeout(
            total=max(limit_s, 0.001), sock_connect=limits.connect_timeout_s, sock_read=limits.read_timeout_s
        )
        try:
            async with self._session.post(
                replica.url(path), data=replica.named(data), timeout=timeout, allow_redirects=False
            ) as response:
                raw = await response.read()
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            return fault_of(error, limit_s, limits)
        if response.status != 200:
            return _refusal(response, raw)
        try:
            return read(json.loads(raw))
        except (Garbage, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            why = str(error) if isinstance(error, Garbage) else "not the JSON that was asked for"
            return Fault("garbage", f"{why}: {_words(raw)!r}. Is this the right server, and the right dialect?")

    # Other calls ------------------------------------------------------------------------------------------------------

    async def get(self, replica: Replica, path: str, limit_s: float) -> tuple[int, bytes] | Fault:
        """One plain GET, not counted: status and body."""
        assert self._session is not None
        try:
            timeout = aiohttp.ClientTimeout(total=limit_s)
            async with self._session.get(replica.url(path), timeout=timeout, allow_redirects=False) as response:
                return response.status, await response.read()
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            return fault_of(error, limit_s, self.limits)

    def clean(self, text: str) -> str:
        """Without the key: some servers repeat it when they do not like it."""
        return redact(text.replace(self._key, f"${self._credential}") if self._key else text)


def fault_of(error: Exception, limit_s: float, limits: Limits = Limits()) -> Fault:  # noqa: B008 (frozen)
    """The cause of an error that came instead of an answer, and what to do about it."""
    match error:
        case aiohttp.ConnectionTimeoutError():
            within = min(limits.connect_timeout_s, limit_s)
            return Fault("timeout", f"no connection within {within:g} s. Is the host right, and reachable from here?")
        case aiohttp.SocketTimeoutError() if limits.read_timeout_s is not None:
            return Fault("timeout", f"silent for {limits.read_timeout_s:g} s (read_timeout_s).")
        case TimeoutError():
            return Fault("timeout", f"no answer within {limit_s:.3g} s. Raise timeout_s, or ask fewer at once.")
        case aiohttp.InvalidURL():
            return Fault("refused", "this is not a URL; it should look like http://127.0.0.1:8000", passing=False)
        case aiohttp.ClientSSLError():
            return Fault("refused", f"no secure connection ({error}). Should the URL begin with http:// ?", passing=False)
        case aiohttp.ClientConnectorDNSError():
            return Fault("refused", f"there is no host of this name ({error.os_error.strerror or error.os_error}).")
        case OSError(errno=errno.EMFILE):
            return Fault("refused", "too many open files. Raise the limit (ulimit -n), or ask fewer at once.")
        case aiohttp.ClientConnectorError():
            why = error.os_error.strerror or error.os_error
            return Fault("refused", f"nobody listens there ({why}). Is the server still running? Its log says why not.")
        case aiohttp.ClientPayloadError():
            return Fault("half", "the connection was closed in the middle of the answer. The server's log may say why.")
        case aiohttp.ServerDisconnectedError() | OSError():
            return Fault("reset", "the connection was closed before the answer came. The server's log may say why.")
        case _:
            return Fault("garbage", f"not an HTTP answer ({type(error).__name__}: {str(error)[:WORDS_KEPT]}).")


def _refusal(response: aiohttp.ClientResponse, raw: bytes) -> Fault:
    """An answer with another status than 200."""
    status, words = response.status, _words(raw)
    said = f"HTTP {status}" + (f", {words!r}" if words else "")
    if status == 429 or status >= 500:
        wait = _retry_after(response.headers.get("Retry-After"))
        what = "Ask fewer at once." if status == 429 else "The server's log says why."
        return Fault("http", f"{said}. {what}", wait_s=wait)
    if status in (400, 413, 422) and _means_too_long(words):
        raise TooLong(words)
    match status:
        case 401 | 403:
            hint = "Set credential to the NAME of the environment variable that holds the right key."
        case 404 | 405:
            hint = "Does this server do this at all (a scalar model: vllm serve … --runner pooling), and is the model's name right?"
        case 301 | 302 | 307 | 308:
            hint = f"It has moved to {response.headers.get('Location')}: put that into url."
        case _:
            hint = "The server does not take this request."
    return Fault("http", f"{said}. {hint}", passing=False)


def _means_too_long(words: str) -> bool:
    """vLLM: 'maximum context length is', SGLang: 'longer than the model's context length', OpenAI: 'context_length_exceeded'."""
    lowered = words.lower()
    return any(sign in lowered for sign in ("context length", "context_length", "maximum model length", "max_model_len"))


def _words(raw: bytes) -> str:
    """What a server says, on one line: the message in its JSON, if it has one."""
    text = raw[:4096].decode(errors="replace")
    try:
        said = json.loads(raw)
        said = said.get("error", said)
        text = str(said.get("message", said.get("detail", text)) if isinstance(said, dict) else said)
    except (ValueError, AttributeError):
        pass
    return " ".join(text.split())[:WORDS_KEPT]


def _retry_after(value: str | None) -> float:
    """Seconds, or a date."""
    if not value:
        return 0.0
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return 0.0


def _is_near(replica: Replica) -> bool:
    return replica.url("/health").host in ("localhost", "127.0.0.1", "::1")
