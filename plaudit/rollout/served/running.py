"""A server that runs already, perhaps on another machine: joined, waited for while it is gone, never started or stopped."""

import os
import shutil
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from plaudit.errors import RecipeError, TrainingStopped
from plaudit.host import address_towards
from plaudit.report.progress import print_line, print_own_warning
from plaudit.rollout.served.dialect import Dialect, ServerLost
from plaudit.rollout.served.server import POLL_S, PolicyServer

REPORT_EVERY_S = 10.0
HOW_TO_START = "Start it as `plaudit engine-command R.yaml` prints."


def key_of(credential: str | None) -> str:
    """The servers' key, from the environment variable of that name."""
    if credential is None:
        raise RecipeError(
            "rollout.server.url needs rollout.server.credential, the NAME of the environment variable that holds the servers' key"
        )
    if key := os.environ.get(credential):
        return key
    raise RecipeError(
        f"rollout.server.credential: the environment variable {credential}, which should hold the servers' key, is not set. Set it "
        f"(export {credential}=…), here and where they are started"
    )


class RunningServer(PolicyServer):
    def __init__(self, dialect: Dialect, url: str, check: Callable[[], None]):
        super().__init__(dialect, key_of(dialect.settings.credential), check)
        self.url = url.rstrip("/").removesuffix("/v1")
        self.where_to_look = f"See the output of the server at {self.url}"

    def start(self) -> None:
        began = reported = time.monotonic()
        limit_s = self.settings.start_timeout_s
        while not self._answers():
            now = time.monotonic()
            if now - began > limit_s:
                raise RecipeError(
                    f"rollout.server.url: {self.url} did not answer within rollout.server.start_timeout_s, {limit_s:g} s. "
                    f"{HOW_TO_START}"
                )
            if now - reported > REPORT_EVERY_S:
                reported = now
                print_line(f"waiting for the server at {self.url}, {now - began:.0f} of {limit_s:g} s")
            self.check()
            time.sleep(POLL_S)
        self._require_ours()
        self.listen_on = self._own_address()

    def restart(self, why: str) -> None:
        print_own_warning(f"the server at {self.url} is lost ({why}): waiting for it, to give it the weights again")
        self._has_weights = False
        self.start()

    def kill(self) -> None:
        """It is not ours to end."""

    def close(self) -> None:
        self._http.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _require_ours(self) -> None:
        """It takes weights from plaudit, and our key."""
        for path, body in self._dialect.own_calls:
            try:
                problem = self.refusal(path, body)
            except ServerLost as error:
                problem = str(error)
            if problem is not None and problem.startswith("HTTP 401"):
                raise RecipeError(
                    f"rollout.server.url: {self.url} does not accept the key in {self.settings.credential}: start the server with "
                    "the same one"
                )
            if problem is not None:
                raise RecipeError(
                    f"rollout.server.url: the server at {self.url} takes no weights from plaudit ({problem}). {HOW_TO_START}"
                )

    def _own_address(self) -> str:
        """Of the network interface that leads to the server."""
        parts = urlsplit(self.url)
        try:
            return address_towards(parts.hostname or "")
        except OSError as error:
            raise TrainingStopped(f"rollout.server.url: there is no route to {self.url}: {error.strerror or error}") from None
