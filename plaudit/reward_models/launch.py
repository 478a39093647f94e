"""placement: launch. A vLLM server that is started for a reward model and ends with this process.

`open` waits until it answers (`limits.start_timeout_s`). If it dies later it is restarted once, and the requests it lost are
repeated. It is stopped with all its children: gracefully when the model is closed, and by a guard
process if this process is killed with -9.
"""

import asyncio
import contextlib
import os
import shlex
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import TypeVar

import aiohttp

from plaudit.errors import RecipeError
from plaudit.lora_folder import is_lora_folder
from plaudit.recipe.limits import ModelLimits
from plaudit.recipe.reward_models import RewardModel
from plaudit.report.progress import print_line, print_own_warning
from plaudit.reward_models.backend import (
    SERVER_DIED,
    Answer,
    Backend,
    GenerationRequest,
    ModelInfo,
    SamplingParams,
    ScalarScore,
    Usage,
)
from plaudit.reward_models.server_client import ServerClient
from plaudit.servers.process import HOST, STOP_S, ServerProcess, Startup, free_port
from plaudit.servers.vllm_command import vllm_command
from plaudit.types import Failure, Message

Item = TypeVar("Item")
Result = TypeVar("Result", Answer, ScalarScore)
RESTARTS = 1
DEATH_CAUSES = ("refused", "reset", "half", "http")
"""How calls fail whose server dies (vLLM answers 500 before it exits)."""


class LaunchedServer(Backend):
    def __init__(
        self,
        model: RewardModel,
        limits: ModelLimits = ModelLimits(),  # noqa: B008 (frozen)
        *,
        scalar: bool = False,
        log: Path | None = None,
        program: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        stop_s: float = STOP_S,
    ):
        """`log`: file for the server's output (default: a temporary one, which is kept if the server fails). `program`: the command
        before its arguments (default: the recipe's vLLM). `environment`: added to this process's."""
        self.model, self.scalar, self._limits, self._stop_s = model, scalar, limits, stop_s
        self._log, self._temporary, self._failed = log, log is None, False
        self._program, self._environment = tuple(program) or vllm_command(model.program), {**os.environ, **(environment or {})}
        self._server: ServerProcess | None = None
        self._client: ServerClient | None = None
        self._restarts = 0
        self._restarting: asyncio.Task[None] | None = None
        self._given_up: Failure | None = None
        self.port = 0
        self.usage = Usage()

    @property
    def command(self) -> list[str]:
        """The command line, from the model's settings and the user's arguments, which come last and win."""
        model = self.model
        user_words = [word for argument in model.arguments for word in shlex.split(argument)]
        options: dict[str, str | None] = {"--model": str(model.path), "--host": HOST, "--port": str(self.port)}
        positional: list[str] = []
        if self._program[-1] == "serve":
            positional = [str(options.pop("--model"))]  # `vllm serve` has no --model option
        if model.tokenizer:
            options["--tokenizer"] = model.tokenizer
        if model.dtype != "auto":
            options["--dtype"] = model.dtype
        if model.trust_remote_code:
            options["--trust-remote-code"] = None
        if self.scalar:
            options["--runner"] = "pooling"
        overridden = {word.partition("=")[0] for word in user_words if word.startswith("--")}
        words = [word for name, value in options.items() if name not in overridden for word in (name, value) if word is not None]
        return [*self._program, *positional, *words, *user_words]

    @property
    def name(self) -> str:
        return str(self.model.path)

    # Starting and stopping --------------------------------------------------------------------------------------------

    async def open(self) -> None:
        if is_lora_folder(self.name):
            raise RecipeError(
                f"{self.name}: a LoRA adapter, and placement: launch needs a complete model. Merge it first: "
                f"plaudit merge {self.name} --out FOLDER"
            )
        self.port = self._port()
        # vLLM requires the key in this variable.
        key = self.model.credential or ("VLLM_API_KEY" if self._environment.get("VLLM_API_KEY") else None)
        model = self.model.model_copy(update={"credential": key})
        url = f"http://{HOST}:{self.port}"
        self._client = ServerClient(model, self._limits, urls=[url], scalar=self.scalar, wait_s=10.0)
        self.usage = self._client.usage
        try:
            await self._start()
            await self._connect(self._client)
        except BaseException:
            await self.close()
            raise

    async def _connect(self, client: ServerClient) -> None:
        try:
            await client.open()
        except RecipeError as error:
            assert self._server is not None
            if await _is_dead(self._server):
                error = RecipeError(
                    f"the server for {self.model.path} died right after it started ({self._server.epitaph()}): {error}"
                )
            raise self._failure(str(error)) from None

    def _failure(self, message: str) -> RecipeError:
        """The error, with where to read more about it."""
        self._failed = True
        return RecipeError(f"{message} Its output: {self._log}")

    def _port(self) -> int:
        words = [word for argument in self.model.arguments for word in shlex.split(argument.replace("=", " "))]
        in_arguments = words[words.index("--port") + 1] if "--port" in words[:-1] else "0"
        port = self.model.port or (int(in_arguments) if in_arguments.isdigit() else 0)
        try:
            return free_port(port)
        except OSError as error:
            raise RecipeError(
                f"{self.model.path}: port {port} cannot be used ({error.strerror}). Leave out port to use a free one."
            ) from None

    async def _start(self) -> None:
        """Start the server and wait until it answers."""
        if self._log is None:
            self._log = Path(mkdtemp(prefix="plaudit-server-")) / "server.log"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        print_line(f"starting a server for {self.model.path} on port {self.port}; its output: {self._log}")
        try:
            self._server = ServerProcess(self.command, self._log, self._environment)
        except OSError as error:
            raise RecipeError(f"{self._program[0]} cannot be started: {error.strerror}") from None
        await self._wait(self._server)

    async def _wait(self, server: ServerProcess) -> None:
        name = f"the server for {self.model.path}"
        startup = Startup(server, name, self._limits.start_timeout_s, "limits.start_timeout_s")
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5.0)) as session:
            while True:
                try:
                    startup.check()
                except RecipeError as error:
                    absent = "No module named 'vllm'" in str(error)
                    hint = " Install it, or set program to a vllm installed elsewhere." if absent else ""
                    raise self._failure(f"{error}{hint}") from None
                with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
                    async with session.get(f"http://{HOST}:{self.port}/health") as response:
                        if response.status == 200:
                            return startup.ready()
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
            # Shielded: a cancelled task must not leave a server behind.
            await asyncio.shield(asyncio.to_thread(server.stop, self._stop_s))
        if self._temporary and self._log is not None and not self._failed:
            shutil.rmtree(self._log.parent, ignore_errors=True)
            self._log = None

    def info(self) -> ModelInfo:
        assert self._client is not None, "open it first"
        return self._client.info()

    # Requests ---------------------------------------------------------------------------------------------------------

    async def generate(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> list[Answer]:
        return await self._call(requests, lambda client, part: client.generate(part, params), lambda why: Answer(None, why))

    async def score(self, conversations: Sequence[list[Message]]) -> list[ScalarScore]:
        return await self._call(conversations, lambda client, part: client.score(part), lambda why: ScalarScore(None, why))

    async def _call(
        self,
        items: Sequence[Item],
        call: Callable[[ServerClient, list[Item]], Awaitable[list[Result]]],
        fail: Callable[[Failure], Result],
    ) -> list[Result]:
        """A result for each item; items that were lost because the server died are sent to the restarted one."""
        assert self._client is not None, "open it first"
        results: dict[int, Result] = {}
        left = list(range(len(items)))
        while left:
            failure = await self._wait_until_ready()
            if failure is not None:
                results |= {i: fail(self._client.count_failure(failure)) for i in left}
                break
            server = self._server
            assert server is not None
            results |= zip(left, await call(self._client, [items[i] for i in left]), strict=True)
            lost = [i for i in left if (why := results[i].failure) is not None and why.cause in DEATH_CAUSES]
            only_http_errors = all(why.cause == "http" for i in lost if (why := results[i].failure))
            left = lost if lost and await _is_dead(server, within_s=0.0 if only_http_errors else 1.0) else []
            for i in left:
                self._count_as_retry(results[i].failure)
        return [results[i] for i in range(len(items))]

    def _count_as_retry(self, failure: Failure | None) -> None:
        """The request is repeated, so its failure counts as a failed attempt only."""
        assert failure is not None
        self.usage.failures[failure.cause] -= 1
        self.usage.retries += 1

    async def _wait_until_ready(self) -> Failure | None:
        """Wait for a restart if the server is dead; returns why if it stays dead."""
        assert self._server is not None
        if self._restarting is None and self._given_up is None and not self._server.alive:
            # A separate task: a caller that times out must not cancel the restart the others wait for.
            self._restarting = asyncio.create_task(self._restart(self._server))
        if self._restarting is not None:
            await asyncio.shield(self._restarting)
        return self._given_up

    async def _restart(self, server: ServerProcess) -> None:
        try:
            problem = f"the server for {self.model.path} died ({server.epitaph()})"
            if self._restarts == RESTARTS:
                raise self._failure(f"{problem} again after a restart.")
            self._restarts += 1
            self._failed = True
            print_own_warning(f"{problem}: restarting it; its output: {self._log}")
            await asyncio.to_thread(server.stop, 0.0)  # and any children it left
            await self._start()
        except RecipeError as error:
            self._given_up = Failure(SERVER_DIED, str(error))
        finally:
            self._restarting = None


async def _is_dead(server: ServerProcess, within_s: float = 1.0) -> bool:
    """Whether it is dead by then: connections break a moment before the process is seen to have ended."""
    deadline = time.monotonic() + within_s
    while server.alive and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
    return not server.alive
