"""placement: launch. A vLLM server that is started for a reward model, and gone when we are.

It is waited for (`start_timeout_s`), started once more if it dies after it had worked, and stopped with all its children: politely
when the model is closed, and by a guard if we are killed with -9. What was asked while it was down is asked again.
"""

import asyncio
import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import TypeVar

import aiohttp

from plaudit.errors import RecipeError, redact
from plaudit.recipe.reward_models import RewardModel
from plaudit.report.progress import print_line
from plaudit.reward_models.backend import Answer, Backend, GenerationRequest, ModelInfo, SamplingParams, ScalarScore, Usage
from plaudit.reward_models.connection import Limits
from plaudit.reward_models.server_client import ServerClient
from plaudit.types import Failure, Message

Item = TypeVar("Item")
Result = TypeVar("Result", Answer, ScalarScore)
HOST = "127.0.0.1"
SAY_EVERY_S = 10.0
STOP_S = 15.0
"""How long a server may take to stop when asked to; then it is killed."""
RESTARTS = 1
GONE = ("refused", "reset", "half", "http")
"""How calls end whose server dies (vLLM's answers 500 before it goes)."""


class ServerProcess:
    """A server with all its children, and the shell that ends them if we cannot."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str]):
        self.log = log
        # The guard comes first and leads the process group, so there is no moment at which the server has none. It reads until
        # the other end of its stdin, which only we hold, is closed; then `kill 0` ends the group.
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", "trap '' TERM INT HUP; read line; kill -KILL 0"],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, process_group=0,
        )  # fmt: skip
        try:
            with log.open("ab") as file:
                self._log_from = file.tell()
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, process_group=self._guard.pid, env=environment
                )
        except OSError:
            self._end_guard()
            raise

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def last_line(self) -> str:
        """What it printed last."""
        with self.log.open("rb") as file:
            file.seek(max(self._log_from, file.seek(0, os.SEEK_END) - 4096))
            lines = file.read().decode(errors="replace").strip().splitlines()
        return redact(lines[-1].strip()[-300:]) if lines else ""

    def epitaph(self) -> str:
        """'exit code 1, after printing …': how it ended."""
        code = self._process.poll()
        how = "it runs" if code is None else f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
        words = self.last_line()
        return how + (f", after printing '{words}'" if words else "")

    def stop(self, grace_s: float = STOP_S) -> None:
        """Ask it to stop, then kill what is left. The second time there is nothing to do."""
        if self._guard.returncode is not None:
            return  # it has been waited for: its number may be another's by now
        if self.alive:
            self._process.terminate()  # vLLM's own children are its to stop
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_s)
        # The guard, not waited for yet, keeps the group's number from being another's.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._guard.pid, signal.SIGKILL)
        self._process.wait()
        self._end_guard()

    def _end_guard(self) -> None:
        assert self._guard.stdin is not None
        self._guard.kill()
        self._guard.stdin.close()
        self._guard.wait()


class LaunchedServer(Backend):
    def __init__(
        self,
        model: RewardModel,
        *,
        scalar: bool = False,
        limits: Limits | None = None,
        log: Path | None = None,
        program: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        stop_s: float = STOP_S,
    ):
        """`log`: the file for what the server prints (default: a new one among the temporary files). `program`: what is started,
        before its arguments (default: the vLLM that the recipe names). `environment`: added to ours."""
        self.model, self.scalar, self._limits, self._stop_s = model, scalar, limits, stop_s
        self._log = log or Path(mkdtemp(prefix="plaudit-server-")) / "server.log"
        self._program, self._environment = tuple(program) or _vllm(model.program), {**os.environ, **(environment or {})}
        self._server: ServerProcess | None = None
        self._client: ServerClient | None = None
        self._restarts = 0
        self._restarting: asyncio.Task[None] | None = None
        self._given_up: Failure | None = None
        self.port = 0
        self.usage = Usage()

    @property
    def command(self) -> list[str]:
        """What is started, as the user's arguments and the model's settings have it; the user's come last and win."""
        model = self.model
        given = [word for argument in model.arguments for word in shlex.split(argument)]
        ours: dict[str, str | None] = {"--model": str(model.path), "--host": HOST, "--port": str(self.port)}
        named: list[str] = []
        if self._program[-1] == "serve":
            named = [str(ours.pop("--model"))]  # it takes no option of that name
        if model.tokenizer:
            ours["--tokenizer"] = model.tokenizer
        if model.dtype != "auto":
            ours["--dtype"] = model.dtype
        if model.trust_remote_code:
            ours["--trust-remote-code"] = None
        if self.scalar:
            ours["--runner"] = "pooling"
        theirs = {word.partition("=")[0] for word in given if word.startswith("--")}
        words = [word for name, value in ours.items() if name not in theirs for word in (name, value) if word is not None]
        return [*self._program, *named, *words, *given]

    @property
    def name(self) -> str:
        return str(self.model.path)

    # Starting and stopping --------------------------------------------------------------------------------------------

    async def open(self) -> None:
        self.port = self._port()
        # A key in this variable is what vLLM will ask for.
        key = self.model.credential or ("VLLM_API_KEY" if self._environment.get("VLLM_API_KEY") else None)
        model = self.model.model_copy(update={"credential": key})
        url = f"http://{HOST}:{self.port}"
        self._client = ServerClient(model, urls=[url], scalar=self.scalar, limits=self._limits, wait_s=10.0)
        self.usage = self._client.usage
        try:
            await self._start()
            await self._first_answer(self._client)
        except BaseException:
            await self.close()
            raise

    async def _first_answer(self, client: ServerClient) -> None:
        try:
            await client.open()
        except RecipeError as error:
            assert self._server is not None
            if await _is_dead(self._server):
                error = RecipeError(f"the server for {self.model.path} died at once ({self._server.epitaph()}): {error}")
            raise RecipeError(f"{error} All it said: {self._log}") from None

    def _port(self) -> int:
        given = [word for argument in self.model.arguments for word in shlex.split(argument.replace("=", " "))]
        in_arguments = given[given.index("--port") + 1] if "--port" in given[:-1] else "0"
        wanted = self.model.port or (int(in_arguments) if in_arguments.isdigit() else 0)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: a port just left is free
            try:
                probe.bind((HOST, wanted))
            except OSError as error:
                raise RecipeError(
                    f"{self.model.path}: port {wanted} cannot be used ({error.strerror}). Leave out port for a free one."
                ) from None
            return probe.getsockname()[1]

    async def _start(self) -> None:
        """Start the server and wait until it answers."""
        began = time.monotonic()
        self._log.parent.mkdir(parents=True, exist_ok=True)
        print_line(f"starting a server for {self.model.path} on port {self.port}; it writes to {self._log}")
        try:
            self._server = ServerProcess(self.command, self._log, self._environment)
        except OSError as error:
            raise RecipeError(f"{self._program[0]} cannot be started: {error.strerror}") from None
        await self._wait(self._server, began)
        print_line(f"the server for {self.model.path} answers after {time.monotonic() - began:.0f} s")

    async def _wait(self, server: ServerProcess, began: float) -> None:
        said, limit = began, self.model.start_timeout_s
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5.0)) as session:
            while True:
                if not server.alive:
                    how = server.epitaph()
                    hint = " Install it there, or set program to a vllm elsewhere." if "No module named 'vllm'" in how else ""
                    raise RecipeError(
                        f"the server for {self.model.path} ended before it answered ({how}).{hint} All it said: {self._log}"
                    )
                with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
                    async with session.get(f"http://{HOST}:{self.port}/health") as response:
                        if response.status == 200:
                            return
                now = time.monotonic()
                if now - began > limit:
                    raise RecipeError(
                        f"the server for {self.model.path} did not answer within start_timeout_s, {limit:g} s (it said last: "
                        f"'{server.last_line()}'). All it said: {self._log}"
                    )
                if now - said > SAY_EVERY_S:
                    said = now
                    print_line(f"waiting for the server, {now - began:.0f} of {limit:g} s: {server.last_line()}")
                await asyncio.sleep(0.2)

    async def close(self) -> None:
        if self._restarting is not None:
            self._restarting.cancel()
            await asyncio.wait([self._restarting])
            self._restarting = None
        if self._client is not None:
            await self._client.close()
        if self._server is not None:
            server, self._server = self._server, None
            # Shielded: a task that is cancelled here must not leave a server behind.
            await asyncio.shield(asyncio.to_thread(server.stop, self._stop_s))

    def info(self) -> ModelInfo:
        assert self._client is not None, "it was never opened"
        return self._client.info()

    # Asking -----------------------------------------------------------------------------------------------------------

    async def generate(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> list[Answer]:
        return await self._asked(requests, lambda client, part: client.generate(part, params), lambda why: Answer(None, why))

    async def score(self, conversations: Sequence[list[Message]]) -> list[ScalarScore]:
        return await self._asked(conversations, lambda client, part: client.score(part), lambda why: ScalarScore(None, why))

    async def _asked(
        self,
        items: Sequence[Item],
        ask: Callable[[ServerClient, list[Item]], Awaitable[list[Result]]],
        fail: Callable[[Failure], Result],
    ) -> list[Result]:
        """What the server says to each; what it could not say because it died, the restarted one is asked."""
        assert self._client is not None, "a model is opened before it is asked"
        results: dict[int, Result] = {}
        left = list(range(len(items)))
        while left:
            dead = await self._work()
            if dead is not None:
                results |= {i: fail(self._client.count_failure(dead)) for i in left}
                break
            server = self._server
            assert server is not None
            results |= zip(left, await ask(self._client, [items[i] for i in left]), strict=True)
            lost = [i for i in left if (why := results[i].failure) is not None and why.cause in GONE]
            refusals_only = all(why.cause == "http" for i in lost if (why := results[i].failure))
            left = lost if lost and await _is_dead(server, within_s=0.0 if refusals_only else 1.0) else []
            for i in left:
                self._take_back(results[i].failure)
        return [results[i] for i in range(len(items))]

    def _take_back(self, failure: Failure | None) -> None:
        """It was not the last word: in the counts, a try that is repeated."""
        assert failure is not None
        self.usage.failures[failure.cause] -= 1
        self.usage.retries += 1

    async def _work(self) -> Failure | None:
        """Wait until the server works; or why it does not, and will not again."""
        assert self._server is not None
        if self._restarting is None and self._given_up is None and not self._server.alive:
            # A task of its own: whoever asked may run out of time, the others still wait for it.
            self._restarting = asyncio.create_task(self._restart(self._server))
        if self._restarting is not None:
            await asyncio.shield(self._restarting)
        return self._given_up

    async def _restart(self, server: ServerProcess) -> None:
        try:
            what = f"the server for {self.model.path} died ({server.epitaph()})"
            if self._restarts == RESTARTS:
                raise RecipeError(f"{what}, after it had been restarted. All it said: {self._log}")
            self._restarts += 1
            print_line(f"{what}: starting it once more", "yellow")
            await asyncio.to_thread(server.stop, 0.0)  # its children, if it left any
            await self._start()
        except RecipeError as error:
            self._given_up = Failure("died", str(error))
        finally:
            self._restarting = None


def _vllm(program: str | None) -> tuple[str, ...]:
    """How vLLM is started, by its own command or by a Python that has it."""
    words = [os.path.expanduser(word) for word in shlex.split(program or "")] or [sys.executable]
    name = Path(words[-1]).name
    if name == "vllm":
        words.append("serve")
    elif name.startswith("python"):
        words += ["-m", "vllm.entrypoints.openai.api_server"]
    return tuple(words)


async def _is_dead(server: ServerProcess, within_s: float = 1.0) -> bool:
    """Connections end a moment before the process is seen to have ended."""
    deadline = time.monotonic() + within_s
    while server.alive and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
    return not server.alive
