"""A server that plaudit starts for sampling, starts again, and stops."""

import os
import secrets
import shlex
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from plaudit.errors import RecipeError
from plaudit.report.progress import print_line, print_own_warning
from plaudit.rollout.served.dialect import Dialect, Launch
from plaudit.rollout.served.server import POLL_S, PolicyServer
from plaudit.servers.process import HOST, ServerProcess, Startup, free_port


class LaunchedServer(PolicyServer):
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
        super().__init__(dialect, secrets.token_hex(32), check)
        self._launch, self.shares_gpu = launch, shares_gpu
        self._environment = dict(environment)
        self.log = log or self.folder / "server.log"
        self.where_to_look = f"Its output: {self.log}"
        self._process: ServerProcess | None = None
        self._failed = False

    def start(self) -> None:
        port = free_port()
        self.url = f"http://{HOST}:{port}"
        environment = {**os.environ, **self._dialect.environment(self._token, os.environ), **self._environment}
        print_line(f"starting the {self._title} server on port {port} for sampling; its output: {self.log}")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        words = [word for argument in self.settings.arguments for word in shlex.split(argument)]
        program = self._dialect.command.words(self.settings.program)
        command = [*program, *self._dialect.arguments(self._launch, port, self._token), *words]
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
                has_no_lora = self._launch.lora_rank is not None and "lora" in self._process.last_error().lower()
                advice = " To send it merged weights instead of adapters, set rollout.server.lora=merged." if has_no_lora else ""
                raise RecipeError(f"rollout.engine {self._dialect.name}: {error} {self.where_to_look}.{advice}") from None
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
        assert self._process is not None
        return None if self._process.alive else self._process.last_error() or self._process.epitaph()
