"""Several servers with the same model: which of them is asked next.

The least loaded one that works. Questions that belong together (`affinity`) go where the first of them went, while that one works.
A server that fails is left alone for a while; then one call tries it again.
"""

import json
import re
import time
from collections import OrderedDict
from collections.abc import Sequence

from yarl import URL

FAULTS_IN_A_ROW = 3
"""So many, with no answer between them, and a server is left alone …"""
REST_S, LONGEST_REST_S = 2.0, 60.0
"""… for so long, twice as long each further time."""
AFFINITIES_KEPT = 65536


class Replica:
    """One server: where it is, how busy, and whether it works."""

    def __init__(self, url: str):
        trimmed = url.rstrip("/")
        versioned = re.search(r"/v\d+$", trimmed)
        self.root = trimmed[: versioned.start()] if versioned else trimmed
        self.api = trimmed if versioned else f"{trimmed}/v1"
        """People give either: http://host:8000, or what the OpenAI client calls its base URL, http://host:8000/v1."""
        self.model = ""
        """The name that it serves the model under, once it is known."""
        self.weights = ""
        """The folder or hub name that it was loaded from, if it tells."""
        self.max_tokens: int | None = None
        """Its longest context, if it tells."""
        self.under_way = self.asked = 0
        self.rests_until = 0.0
        self._faults, self._rests = 0, 0
        self._urls: dict[str, URL] = {}

    def url(self, path: str) -> URL:
        """'/v1/models' → where that is here. Parsed once: parsing costs as much as a quarter of a call."""
        found = self._urls.get(path)
        if found is None:
            whole = self.api + path.removeprefix("/v1") if path.startswith("/v1/") else self.root + path
            found = self._urls[path] = URL(whole)
        return found

    def named(self, body: bytes) -> bytes:
        """The body, a JSON object, with the model's name at this server put into it."""
        return b'{"model":' + json.dumps(self.model).encode() + b"," + body[1:] if self.model else body

    def answered(self) -> None:
        self._faults = self._rests = 0
        self.rests_until = 0.0

    def failed(self, *, gone: bool = False, for_s: float = 0.0) -> None:
        """`gone`: nobody listens there, so no further try is needed to know. `for_s`: it asked to be left alone so long."""
        self._faults += 1
        now = time.monotonic()
        if for_s:
            self.rests_until = max(self.rests_until, now + min(for_s, LONGEST_REST_S))
        elif (gone or self._faults >= FAULTS_IN_A_ROW) and self.rests_until <= now:  # calls that fail together count once
            self.rest()

    def rest(self) -> None:
        self.rests_until = time.monotonic() + min(REST_S * 2**self._rests, LONGEST_REST_S)
        self._rests = min(self._rests + 1, 10)


class Replicas:
    """All servers of one model."""

    def __init__(self, urls: Sequence[str]):
        self.all = [Replica(url) for url in urls]
        self._affinities: OrderedDict[str, Replica] = OrderedDict()

    def choose(self, affinity: str = "", avoid: Replica | None = None) -> Replica:
        """`avoid`: the one that has just failed for this question; another one is better, if there is one."""
        if len(self.all) == 1:
            return self.all[0]
        now = time.monotonic()
        working = [replica for replica in self.all if replica.rests_until <= now]
        usual = self._affinities.get(affinity) if affinity else None
        if usual is not None and usual is not avoid and usual in working:
            return _tried(usual)
        # If none works, the one that may do so soonest: its answer, or its fault, is the question's.
        among = [replica for replica in working if replica is not avoid] or working
        if among:
            chosen = min(among, key=lambda replica: (replica.under_way, replica.asked))
        else:
            chosen = min(self.all, key=lambda replica: replica.rests_until)
        if affinity and (usual is None or usual not in working):
            self._affinities[affinity] = chosen
            if len(self._affinities) > AFFINITIES_KEPT:
                self._affinities.popitem(last=False)
        return _tried(chosen)


def _tried(replica: Replica) -> Replica:
    if 0.0 < replica.rests_until <= time.monotonic():  # its rest is over: this call finds out whether it works, no other does
        replica.rest()
    return replica
