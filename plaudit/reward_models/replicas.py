"""Load balancing over several servers with the same model.

A call goes to the least loaded server that works. Calls with the same `affinity` go to the same server as long as it works. A
server that fails is paused for a while; then a single call tries it again.
"""

import json
import re
import time
from collections import OrderedDict
from collections.abc import Sequence

from yarl import URL

MAX_FAULTS_IN_A_ROW = 3
"""After this many faults in a row a server is paused …"""
PAUSE_S, MAX_PAUSE_S = 2.0, 60.0
"""… for this long, and twice as long each further time."""
MAX_AFFINITIES = 65536


class Replica:
    """One server: its address, its load, and whether it works."""

    def __init__(self, url: str):
        trimmed = url.rstrip("/")
        versioned = re.search(r"/v\d+$", trimmed)
        self.root = trimmed[: versioned.start()] if versioned else trimmed
        self.api = trimmed if versioned else f"{trimmed}/v1"
        """Users give either http://host:8000 or the OpenAI client's base URL, http://host:8000/v1."""
        self.model = ""
        """The served name of the model, once it is known."""
        self.weights = ""
        """The folder or hub name the server loaded, if it reports it."""
        self.max_tokens: int | None = None
        """Its context length, if it reports it."""
        self.in_flight = self.calls = 0
        self.answered_at = 0.0
        """When it last answered."""
        self.paused_until = 0.0
        self._faults, self._pauses = 0, 0
        self._urls: dict[str, URL] = {}

    def url(self, path: str) -> URL:
        """The URL of a path such as '/v1/models'. Cached: parsing costs as much as a quarter of a call."""
        url = self._urls.get(path)
        if url is None:
            text = self.api + path.removeprefix("/v1") if path.startswith("/v1/") else self.root + path
            url = self._urls[path] = URL(text)
        return url

    def named(self, body: bytes) -> bytes:
        """The body, a JSON object, with the model's name on this server added."""
        return b'{"model":' + json.dumps(self.model).encode() + b"," + body[1:] if self.model else body

    def answered(self) -> None:
        self._faults = self._pauses = 0
        self.paused_until, self.answered_at = 0.0, time.monotonic()

    def failed(self, *, gone: bool = False, for_s: float = 0.0) -> None:
        """`gone`: nothing listens there, so it is paused at once. `for_s`: the pause that the server asked for."""
        self._faults += 1
        now = time.monotonic()
        if for_s:
            self.paused_until = max(self.paused_until, now + min(for_s, MAX_PAUSE_S))
        elif (gone or self._faults >= MAX_FAULTS_IN_A_ROW) and self.paused_until <= now:  # calls that fail together count once
            self.pause()

    def pause(self) -> None:
        self.paused_until = time.monotonic() + min(PAUSE_S * 2**self._pauses, MAX_PAUSE_S)
        self._pauses = min(self._pauses + 1, 10)


class Replicas:
    """All servers of one model."""

    def __init__(self, urls: Sequence[str]):
        self.all = [Replica(url) for url in urls]
        self._affinities: OrderedDict[str, Replica] = OrderedDict()

    def choose(self, affinity: str = "", avoid: Replica | None = None) -> Replica:
        """The server for the next call. `avoid`: the one that has just failed this call; another is preferred if there is one."""
        if len(self.all) == 1:
            return self.all[0]
        now = time.monotonic()
        working = [replica for replica in self.all if replica.paused_until <= now]
        usual = self._affinities.get(affinity) if affinity else None
        if usual is not None and usual is not avoid and usual in working:
            return _claim(usual)
        # If none works, the one whose pause ends first: its answer, or its fault, is the call's.
        candidates = [replica for replica in working if replica is not avoid] or working
        if candidates:
            chosen = min(candidates, key=lambda replica: (replica.in_flight, replica.calls))
        else:
            chosen = min(self.all, key=lambda replica: replica.paused_until)
        if affinity and (usual is None or usual not in working):
            self._affinities[affinity] = chosen
            if len(self._affinities) > MAX_AFFINITIES:
                self._affinities.popitem(last=False)
        return _claim(chosen)


def _claim(replica: Replica) -> Replica:
    if 0.0 < replica.paused_until <= time.monotonic():  # its pause is over: this call alone tries it
        replica.pause()
    return replica
