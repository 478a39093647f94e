"""HTTP calls to a model's servers: concurrent, with time limits and retries, and counted.

A failed call is retried, on another server if there is one, after

    wait = backoff_s · 2^attempts · random in [0.5, 1],   or Retry-After if that is longer

as long as its deadline allows. The random factor keeps calls that failed together from being retried together.

A rejected key ends all calls at once: those in flight and those that wait for a slot or a retry fail with the same message. So do
the calls of the next `REJECTED_S`, which are not sent.
"""

import asyncio
import email.utils
import errno
import itertools
import json
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import aiohttp
from yarl import URL

from plaudit.errors import RecipeError
from plaudit.recipe.limits import ModelLimits
from plaudit.redaction import redact
from plaudit.reward_models.backend import REJECTED, UNAUTHORISED, Usage
from plaudit.reward_models.rate_limit import RateLimiter
from plaudit.reward_models.replicas import Replica, Replicas
from plaudit.turns import turns
from plaudit.types import Failure

T = TypeVar("T")
IDLE_S = 4.0
"""How long an idle connection is kept: shorter than servers keep theirs (uvicorn: 5 s), or requests would go into closed ones."""
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=str)
BYTES_PER_TOKEN = 4
"""Of text, roughly."""
REJECTED_S = 30.0
"""How long no call is sent after a key was rejected: the run stops meanwhile, and a service tries again then."""
VLLM_FIELDS = ("top_k", "min_p", "repetition_penalty", "add_special_tokens")
"""Of requests, which vLLM and SGLang have and OpenAI's API has not."""
MAX_QUOTED = 300
"""Characters of a server's response that are quoted in a message."""
MAX_ERROR_BYTES = 2**16
"""Of a response with an error that are read."""


class Garbage(Exception):
    """A response that is not what the request asked for."""


class TooLarge(Exception):
    """A response that exceeds limits.max_answer_bytes."""


class TooLong(Exception):
    """The server reports that the prompt does not fit into its context."""


class NoCookies(aiohttp.DummyCookieJar):
    """Does not even parse them: aiohttp logs those that it cannot."""

    def update_cookies_from_headers(self, headers: Sequence[str], response_url: URL) -> None:
        pass


@dataclass(frozen=True)
class Fault:
    """Why one attempt failed."""

    cause: str
    message: str
    temporary: bool = True
    """A retry may succeed."""
    wait_s: float = 0.0
    """How long the server asks clients to wait."""


@dataclass
class Attempts:
    """Of one call, as counted so far."""

    made: int = 0
    failed: int = 0


class Connection:
    """The connections to all servers of a model. Belongs to one event loop."""

    def __init__(self, replicas: Replicas, limits: ModelLimits, credential: str | None = None, key: str = ""):
        """`credential`: the environment variable that has the servers' key, unless `key` is given."""
        self.replicas, self.limits, self.usage = replicas, limits, Usage()
        self._credential, self._key = credential, key
        self._key_accepted = False
        """A call has been answered. A 403 after that is about one prompt (gateways reject some), not about the key."""
        self._rejection: Failure | None = None
        """How the last rejected key was reported."""
        self._rejected_at = 0.0
        self._under_way: set[asyncio.Timeout] = set()
        """One per call, by which it can be ended."""
        self._session: aiohttp.ClientSession | None = None
        self._slots = asyncio.Semaphore(limits.max_concurrent_calls)
        self.rate_limiter = RateLimiter(limits.calls_per_s, limits.tokens_per_minute)

    async def __aenter__(self) -> Self:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._credential and not self._key:
            self._key = os.environ.get(self._credential, "")
            if not self._key:
                raise RecipeError(
                    f"{self.replicas.all[0].root}: the environment variable {self._credential}, which should hold its key, is not "
                    f"set. Set it (export {self._credential}=…), or leave out model.credential if the server needs no key."
                )
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        self._session = aiohttp.ClientSession(
            headers=headers,
            # limit=0: `_slots` is the limit. A lower one here would make calls wait while their time limit runs.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S, ttl_dns_cache=60),
            cookie_jar=NoCookies(),
            # Looking up a proxy takes as long as the rest of a call, and local servers are not behind one.
            trust_env=not all(_is_local(replica) for replica in self.replicas.all),
        )
        return self

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    # A call -----------------------------------------------------------------------------------------------------------

    async def call(
        self, path: str, body: Mapping[str, Any], read: Callable[[Any], T], *, affinity: str = "", deadline_s: float | None = None
    ) -> T | Failure:
        """The response, parsed by `read`, or why there is none. `read` gets JSON, and raises Garbage (or KeyError, …) if it cannot.

        Raises TooLong if the server reports that.
        """
        attempts = Attempts()
        if self._rejection is not None and time.monotonic() < self._rejected_at + REJECTED_S:
            return self._count_rejected(attempts)
        limit_s = deadline_s or self.limits.call_timeout_s()
        if (turn := turns()).over:  # a group's long responses would be encoded all at once
            await turn.take()
        # Unpaired surrogates cannot be encoded: they become '?'.
        data = _ENCODER.encode(body).encode("utf-8", "replace")
        try:
            async with asyncio.timeout(None) as under_way:  # without a limit, until a key is rejected
                self._under_way.add(under_way)
                try:
                    async with self._slots:
                        return await self._in_slot(path, data, read, affinity, limit_s, attempts)
                finally:
                    self._under_way.discard(under_way)
        except TimeoutError:
            return self._count_rejected(attempts)

    async def _in_slot(
        self, path: str, data: bytes, read: Callable[[Any], T], affinity: str, limit_s: float, attempts: Attempts
    ) -> T | Failure:
        reserved = await self.rate_limiter.begin(guess=len(data) / BYTES_PER_TOKEN)
        began = time.monotonic()
        try:
            return await self._with_retries(path, data, read, affinity, began + limit_s, attempts)
        finally:
            self.usage.seconds += time.monotonic() - began
            self.rate_limiter.release(reserved)

    async def _with_retries(
        self, path: str, data: bytes, read: Callable[[Any], T], affinity: str, deadline: float, attempts: Attempts
    ) -> T | Failure:
        avoid = None
        for attempt in itertools.count():
            replica = self.replicas.choose(affinity, avoid)
            attempts.made += 1
            self.usage.calls += 1
            self.usage.retries += attempt > 0
            left = deadline - time.monotonic()
            result = await self._attempt(replica, path, data, read, min(left, self.limits.attempt_timeout_s or left))
            if not isinstance(result, Fault):
                return result
            attempts.failed += 1
            self.usage.faults[result.cause] = self.usage.faults.get(result.cause, 0) + 1
            wait = max(result.wait_s, self.limits.backoff_s * 2**attempt * random.uniform(0.5, 1.0))
            if not result.temporary or attempt == self.limits.retries or time.monotonic() + wait >= deadline:
                self.usage.failures[result.cause] = self.usage.failures.get(result.cause, 0) + 1
                after = f" ({attempts.made} attempts)" if attempt else ""
                failure = Failure(result.cause, f"{replica.url(path)}: {result.message}{after}")
                if failure.cause == UNAUTHORISED:
                    self._reject(failure)
                return failure
            await asyncio.sleep(wait)
            self.rate_limiter.repeat()
            avoid = replica
        raise AssertionError("unreachable")

    def _reject(self, failure: Failure) -> None:
        """End all calls: none of them can succeed with this key."""
        self._rejection, self._rejected_at = failure, time.monotonic()
        ended, self._under_way = self._under_way, set()
        for call in ended:
            call.reschedule(asyncio.get_running_loop().time())

    def _count_rejected(self, attempts: Attempts) -> Failure:
        """Count a call that was ended, or not sent, as one that failed in its last attempt."""
        assert self._rejection is not None
        cause = self._rejection.cause
        self.usage.calls += attempts.made == 0
        if attempts.made == 0 or attempts.failed < attempts.made:
            self.usage.faults[cause] = self.usage.faults.get(cause, 0) + 1
        self.usage.failures[cause] = self.usage.failures.get(cause, 0) + 1
        return self._rejection

    async def _attempt(self, replica: Replica, path: str, data: bytes, read: Callable[[Any], T], limit_s: float) -> T | Fault:
        replica.in_flight += 1
        replica.calls += 1
        try:
            result = await self._post(replica, path, data, read, limit_s)
        except TooLong:
            replica.answered()
            raise
        finally:
            replica.in_flight -= 1
        if not isinstance(result, Fault) or not result.temporary:
            replica.answered()  # the server works; the request is at fault
        else:
            replica.failed(gone=result.cause == "refused", for_s=result.wait_s)
        return result

    async def _post(self, replica: Replica, path: str, data: bytes, read: Callable[[Any], T], limit_s: float) -> T | Fault:
        assert self._session is not None, "a connection is opened before it is used"
        timeout = aiohttp.ClientTimeout(total=max(limit_s, 0.001), sock_connect=self.limits.connect_timeout_s)
        try:
            async with self._session.post(
                replica.url(path), data=replica.named(data), timeout=timeout, allow_redirects=False
            ) as response:
                raw = await self._read(response)
        except TooLarge:
            return self._too_large()
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            return fault_of(error, limit_s, self.limits)
        if response.status == 401 or (response.status == 403 and not self._key_accepted):
            return self._unauthorised(response.status, raw)
        if response.status != 200:
            return _status_fault(response, raw)
        self._key_accepted = True
        try:
            return read(json.loads(raw))
        # Whatever a server sends fails this call alone: JSON that is too deep (RecursionError) or has too long a number, …
        except Exception as error:
            why = str(error) if isinstance(error, Garbage) else "not the expected JSON"
            return Fault("garbage", f"{why}: {_message(raw)!r}. Is this the right server, with the right dialect?")

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        """The body, counted as it arrives and after decompression, which aiohttp does in chunks of bounded size. Of an error, the
        beginning: what is quoted of it."""
        is_error = response.status != 200
        limit = min(MAX_ERROR_BYTES, self.limits.max_answer_bytes) if is_error else self.limits.max_answer_bytes
        body = bytearray()
        async for chunk in response.content.iter_any():
            body += chunk
            if len(body) > limit:
                response.close()  # and its connection: the rest is never read
                if is_error:
                    return _whole_words(bytes(body[:limit]))
                raise TooLarge
        return bytes(body)

    def _too_large(self) -> Fault:
        limit = self.limits.max_answer_bytes
        message = f"the response exceeds limits.max_answer_bytes, {limit:,}. Is this the right server? If so, raise the limit."
        return Fault("too_large", message, temporary=False)

    def _unauthorised(self, status: int, raw: bytes) -> Fault:
        return Fault(UNAUTHORISED, f"{quote_error(status, raw)} {key_hint(self._credential)}", temporary=False)

    # Other calls ------------------------------------------------------------------------------------------------------

    async def send(
        self, replica: Replica, path: str, limit_s: float, body: Mapping[str, Any] | None = None
    ) -> tuple[int, bytes] | Fault:
        """One request without retries, not counted: status and body. With a body it is a POST."""
        assert self._session is not None
        try:
            timeout = aiohttp.ClientTimeout(total=limit_s)
            method, data = ("GET", None) if body is None else ("POST", _ENCODER.encode(body))
            async with self._session.request(
                method, replica.url(path), data=data, timeout=timeout, allow_redirects=False
            ) as response:
                return response.status, await self._read(response)
        except TooLarge:
            return self._too_large()
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            return fault_of(error, limit_s, self.limits)


def fault_of(error: Exception, limit_s: float, limits: ModelLimits = ModelLimits()) -> Fault:  # noqa: B008 (frozen)
    """The cause of an exception during a call, and what to do about it."""
    match error:
        case aiohttp.ConnectionTimeoutError():
            within = min(limits.connect_timeout_s, limit_s)
            return Fault("timeout", f"no connection within {within:g} s. Is the host right and reachable?")
        case TimeoutError():
            return Fault(
                "timeout", f"no answer within {limit_s:.3g} s. Raise limits.timeout_s or lower limits.max_concurrent_calls."
            )
        case aiohttp.InvalidURL():
            return Fault("refused", "not a URL; it should look like http://127.0.0.1:8000", temporary=False)
        case aiohttp.ClientSSLError():
            return Fault("refused", f"no secure connection ({error}). Should the URL start with http://?", temporary=False)
        case aiohttp.ClientConnectorDNSError():
            return Fault("refused", f"the host name cannot be resolved ({error.os_error.strerror or error.os_error}).")
        case OSError(errno=errno.EMFILE):
            return Fault("refused", "too many open files. Raise the limit (ulimit -n) or lower limits.max_concurrent_calls.")
        case aiohttp.ClientConnectorError():
            why = error.os_error.strerror or error.os_error
            return Fault("refused", f"nothing listens there ({why}). Is the server still running? If not, see its log.")
        case aiohttp.ClientPayloadError() if "content-encoding" in str(error).lower():
            return Fault("garbage", "its compression cannot be read.", temporary=False)
        case aiohttp.ClientPayloadError():
            return Fault("half", "the connection was closed in the middle of the response. See the server's log.")
        case aiohttp.ServerDisconnectedError() | OSError():
            return Fault("reset", "the connection was closed before the response. See the server's log.")
        case _:
            # Its text quotes what was sent, cut anywhere: it may end with half a key.
            return Fault("garbage", f"not an HTTP response ({type(error).__name__}).")


def _status_fault(response: aiohttp.ClientResponse, raw: bytes) -> Fault:
    """A response with a status other than 200."""
    status, message, shown = response.status, _message(raw), quote_error(response.status, raw)
    if status == 429 or status >= 500:
        wait = _retry_after(response.headers.get("Retry-After"))
        hint = "Lower limits.calls_per_s or limits.max_concurrent_calls." if status == 429 else "See the server's log."
        return Fault("http", f"{shown} {hint}", wait_s=wait)
    if status in (400, 413, 422) and _means_too_long(message):
        raise TooLong(message)
    match status:
        case 403:
            hint = "The server rejects this prompt; it has accepted others."
        case 404 | 405:
            hint = "Does the server have this endpoint (scalar models: vllm serve … --runner pooling)? Is the model's name right?"
        case 301 | 302 | 307 | 308:
            hint = f"It has moved to {_shorten(response.headers.get('Location', ''))}: put that into url."
        case _ if any(field in message for field in VLLM_FIELDS):
            hint = "The server does not know vLLM's settings: set model.dialect to openai in this reward."
        case _:
            hint = "The server rejects this request."
    return Fault(REJECTED, f"{shown} {hint}", temporary=False)


def _means_too_long(message: str) -> bool:
    """vLLM: 'maximum context length is', SGLang: 'longer than the model's context length', OpenAI: 'context_length_exceeded'."""
    lowered = message.lower()
    return any(phrase in lowered for phrase in ("context length", "context_length", "maximum model length", "max_model_len"))


def quote_error(status: int, raw: bytes) -> str:
    """`HTTP 401, 'invalid API key'.`: the status, with what the server says about it."""
    message = _message(raw)
    return f"HTTP {status}" + (f", {message!r}." if message else ".")


def _message(raw: bytes) -> str:
    """A server's error on one line: the message in its JSON, if it has one."""
    text = raw[:MAX_ERROR_BYTES].decode(errors="replace")
    with suppress(ValueError, AttributeError, RecursionError):
        body = json.loads(raw)
        body = body.get("error", body)
        text = str(body.get("message", body.get("detail", text)) if isinstance(body, dict) else body)
    return _shorten(text)


def _shorten(text: str) -> str:
    """On one line. Servers repeat keys in their errors: they are removed before the text is cut."""
    return redact(" ".join(text.split()))[:MAX_QUOTED]


def _whole_words(raw: bytes) -> bytes:
    """Without the last word, which may be half a key."""
    return raw[: max(raw.rfind(b" "), raw.rfind(b"\n"), 0)]


def _retry_after(value: str | None) -> float:
    """Seconds to wait, from a number or a date."""
    if not value:
        return 0.0
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, OverflowError, TypeError):
        return 0.0


def _is_local(replica: Replica) -> bool:
    return replica.url("/health").host in ("localhost", "127.0.0.1", "::1")


def key_hint(credential: str | None) -> str:
    """What to do when a server refuses the key."""
    if credential is None:
        return "The server needs a key: set model.credential to the NAME of the environment variable that holds it."
    return f"The key in {credential} is not accepted: set that environment variable to the right one."
