"""HTTP requests of a program that has no event loop: they run on one in a thread of its own."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import aiohttp

T = TypeVar("T")
MAX_CONNECTIONS = 4096


class HttpLoop:
    """An event loop in a thread, with a session for requests."""

    def __init__(self, headers: dict[str, str]):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine requests", daemon=True)
        self._thread.start()
        self.session = self.submit(self._open(headers)).result()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Ends what is running."""
        if self._loop.is_closed():
            return
        self.submit(self._end()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _open(self, headers: dict[str, str]) -> aiohttp.ClientSession:
        # Servers close idle connections after some seconds; one that we use at that moment would look like a dead server.
        connector = aiohttp.TCPConnector(limit=MAX_CONNECTIONS, keepalive_timeout=2.0)
        return aiohttp.ClientSession(connector=connector, headers=headers, timeout=aiohttp.ClientTimeout(total=None))

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self.session.close()
