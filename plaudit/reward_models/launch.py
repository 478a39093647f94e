"""placement: launch. A server (vLLM or SGLang) that is started for a reward model and ends with this process.

`open` waits until it answers (`limits.start_timeout_s`). If it dies or falls silent later it is started again, after a pause that
doubles each time, `limits.restarts` times in a run; the requests it lost are repeated. It is stopped with all its children:
gracefully when the model is closed, and by a guard process if this process is killed with -9.

With `sleep` it gives its GPU memory back between `unload` and `load`. A call that arrives meanwhile wakes it first. One that does
not go to sleep in time is stopped, so that the memory is free in any case; one that died or cannot be woken is started again.
"""

import asyncio
import contextlib
import os
import secrets
import shlex
import shutil
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import TypeVar

import aiohttp

from plaudit.errors import RecipeError
from plaudit.lora_folder import is_lora_folder
from plaudit.recipe.limits import ModelLimits
from plaudit.recipe.reward_models import EmbeddingModel, RewardModel
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
from plaudit.reward_models.embeddings import EmbeddingClient
from plaudit.reward_models.server_client import ServerClient
from plaudit.reward_models.server_program import PROGRAMS, ControlRequest
from plaudit.servers.process import HOST, LONGEST_PAUSE_S, STOP_S, ServerProcess, Startup, free_port
from plaudit.types import Failure, Message

Item = TypeVar("Item")
Result = TypeVar("Result", Answer, ScalarScore)
PAUSE_S = 2.0
"""Before the first restart; twice as long before each further one."""
PROBE_S = 60.0
"""Time limit for the shortest of calls, made when others were not answered in theirs."""
DEATH_CAUSES = ("refused", "reset", "half", "http")
"""How calls fail whose server dies (vLLM answers 500 before it exits)."""


class LaunchedModel(Backend):
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
        before its arguments (default: the recipe's). `environment`: added to this process's."""
        self.model, self.scalar, self._limits, self._stop_s = model, scalar, limits, stop_s
        self._log, self._temporary, self._failed = log, log is None, False
        self._kind = PROGRAMS[model.dialect]
        self._program = tuple(program) or self._kind.starts.words(model.program)
        self._environment = {**os.environ, **(environment or {})}
        self._key_arguments: list[str] = []
        self._private: Path | None = None
        """A folder for the server's key."""
        self._server: ServerProcess | None = None
        self._client: ServerClient | None = None
        self._changing: asyncio.Task[None] | None = None
        """It is being started again, woken, or put to sleep."""
        self._asleep, self._restarts = False, 0
        self._lost: str | None = None
        """Why it has to be started again, if not because it died."""
        self._in_use, self._idle = 0, asyncio.Event()
        self._idle.set()
        self._given_up: Failure | None = None
        self.port = 0
        self.usage = Usage()

    @property
    def command(self) -> list[str]:
        return self._kind.command(self._program, self.model, self.port, scalar=self.scalar, key=self._key_arguments)

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
        variable = self.model.credential or ("VLLM_API_KEY" if self._environment.get("VLLM_API_KEY") else None)
        key = ""
        if self.model.sleep:  # others on this machine must not put it to sleep, or wake it while the trainer computes
            key = self._environment.get(variable or "") or secrets.token_hex(32)
            self._private = Path(mkdtemp(prefix="plaudit-key-"))
            self._key_arguments, added = self._kind.with_key(key, self._private / "key.yaml", self._environment)
            self._environment |= added
        model = self.model.model_copy(update={"credential": variable})
        url = f"http://{HOST}:{self.port}"
        if isinstance(model, EmbeddingModel):
            self._client = EmbeddingClient(model, self._limits, urls=[url], wait_s=10.0, key=key)
        else:
            self._client = ServerClient(model, self._limits, urls=[url], scalar=self.scalar, wait_s=10.0, key=key)
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
                error = RecipeError(f"{self._named} died right after it started ({self._server.epitaph()}): {error}")
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
        startup = Startup(server, self._named, self._limits.start_timeout_s, "limits.start_timeout_s")
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5.0)) as session:
            while True:
                try:
                    startup.check()
                except RecipeError as error:
                    package, hint = self._kind.starts.package, ""
                    if f"No module named '{package}'" in str(error):
                        hint = f" Install it, or set program to a {package} installed elsewhere."
                    elif self.model.sleep and server.has_printed("Sleep mode is not supported"):
                        hint = " It can sleep on a GPU only: leave out model.sleep."
                    raise self._failure(f"{error}{hint}") from None
                with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
                    async with session.get(f"http://{HOST}:{self.port}/health") as response:
                        if response.status == 200:
                            return startup.ready()
                await asyncio.sleep(0.2)

    async def close(self) -> None:
        if self._changing is not None:
            self._changing.cancel()
            await asyncio.wait([self._changing])
            self._changing = None
        if self._client is not None:
            await self._client.close()
        if self._server is not None:
            server, self._server = self._server, None
            # Shielded: a cancelled task must not leave a server behind.
            await asyncio.shield(asyncio.to_thread(server.stop, self._stop_s))
        if self._private is not None:
            shutil.rmtree(self._private, ignore_errors=True)
        if self._temporary and self._log is not None and not self._failed:
            shutil.rmtree(self._log.parent, ignore_errors=True)
            self._log = None

    def info(self) -> ModelInfo:
        assert self._client is not None, "open it first"
        return self._client.info()

    # Ready, or asleep -------------------------------------------------------------------------------------------------

    async def load(self) -> None:
        """Wake it. If that fails, so do the calls that follow."""
        if self.model.sleep:
            await self._wait_until_ready()

    async def unload(self) -> None:
        """Put it to sleep, once the calls in flight are answered."""
        while self._changing is not None:
            await asyncio.shield(self._changing)
        if self.model.sleep and not self._asleep:
            await asyncio.shield(self._change(self._fall_asleep()))

    async def _wait_until_ready(self) -> Failure | None:
        """Wait until it is alive and awake; returns why if it stays dead."""
        while self._given_up is None:
            assert self._server is not None
            if self._changing is not None:
                await asyncio.shield(self._changing)
            elif self._asleep or self._lost or not self._server.alive:
                await asyncio.shield(self._change(self._revive(self._server)))
            else:
                break
        return self._given_up

    def _change(self, work: Coroutine[None, None, None]) -> "asyncio.Task[None]":
        """One at a time. A separate task: a caller that times out must not cancel what the others wait for."""

        async def change() -> None:
            try:
                await work
            finally:
                self._changing = None

        self._changing = asyncio.create_task(change())
        return self._changing

    async def _fall_asleep(self) -> None:
        await self._idle.wait()  # servers drop the requests that they have, or refuse to sleep
        if self._server is not None and self._server.alive and not self._lost:
            problem = await self._control(self._kind.sleep)
            self._asleep = problem is None
            if problem is not None:
                self._lost = f"did not go to sleep ({problem})"
                self._failed = True
                print_own_warning(
                    f"{self._named} {self._lost}: stopping it, so that its GPU memory is free; its output: {self._log}"
                )
                await asyncio.to_thread(self._server.stop, 0.0)

    async def _revive(self, server: ServerProcess) -> None:
        """Wake it, or start it again."""
        why = self._lost or (None if server.alive else f"died ({server.epitaph()})")
        if why is None and self._asleep:
            problem = await self._control(self._kind.wake)
            why = problem and (f"could not be woken ({problem})" if server.alive else f"died ({server.epitaph()})")
        if why is not None:
            await self._restart(server, why)
        self._asleep, self._lost = False, None

    async def _control(self, requests: Sequence[ControlRequest]) -> str | None:
        """Why the server did not do it, if so."""
        assert self._client is not None
        limit = self._limits.sleep_timeout_s
        deadline = time.monotonic() + limit
        for request in requests:
            while fault := await self._client.control(request.path, request.body, max(deadline - time.monotonic(), 0.001)):
                if fault.cause == "timeout":
                    return f"no answer within limits.sleep_timeout_s, {limit:g} s"
                if fault.cause != "http" or not request.until_done:
                    return fault.message.rstrip(".")
                await asyncio.sleep(0.2)
        return None

    async def _restart(self, server: ServerProcess, why: str) -> None:
        """Start it again, as often as that is allowed."""
        problem = f"{self._named} {why}"
        while True:
            await asyncio.to_thread(server.stop, 0.0)  # and any children it left
            if self._restarts == self._limits.restarts:
                times = f"{self._restarts} time{'s' if self._restarts != 1 else ''}"
                error = self._failure(f"{problem}, and was started again {times} before (limits.restarts).")
                self._given_up = Failure(SERVER_DIED, str(error))
                break
            pause = min(PAUSE_S * 2**self._restarts, LONGEST_PAUSE_S)
            self._restarts += 1
            self._failed = True
            print_own_warning(f"{problem}: starting it again in {pause:g} s; its output: {self._log}")
            await asyncio.sleep(pause)
            try:
                await self._start()
                break
            except RecipeError as error:
                problem = str(error).removesuffix(f". Its output: {self._log}")
                server = self._server or server

    @property
    def _named(self) -> str:
        return f"the server for {self.model.path}"

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
        """A result for each item; items that were lost with the server are sent to the restarted one."""
        assert self._client is not None, "open it first"
        results: dict[int, Result] = {}
        left = list(range(len(items)))
        while left:
            failure = await self._wait_until_ready()
            if failure is not None:
                results |= {i: fail(self._client.count_failure(failure)) for i in left}
                break
            server, began = self._server, time.monotonic()
            assert server is not None
            with self._using():
                results |= zip(left, await call(self._client, [items[i] for i in left]), strict=True)
            failures = {i: why for i in left if (why := results[i].failure) is not None}
            left = await self._find_lost(server, began, failures)
            for i in left:
                self._count_as_retry(failures[i])
        return [results[i] for i in range(len(items))]

    @contextlib.contextmanager
    def _using(self) -> Iterator[None]:
        self._in_use += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._in_use -= 1
            if not self._in_use:
                self._idle.set()

    async def _find_lost(self, server: ServerProcess, began: float, failures: Mapping[int, Failure]) -> list[int]:
        """Of the requests that failed, those to be repeated: their server is dead, or silent."""
        lost = [i for i, why in failures.items() if why.cause in DEATH_CAUSES]
        unanswered = [i for i, why in failures.items() if why.cause == "timeout"]
        if unanswered and await self._is_silent(server, began):
            return lost + unanswered
        only_http_errors = all(failures[i].cause == "http" for i in lost)
        return lost if lost and await _is_dead(server, within_s=0.0 if only_http_errors else 1.0) else []

    async def _is_silent(self, server: ServerProcess, began: float) -> bool:
        """Whether it has answered no call since then, for as long as a call may take, and does not answer the shortest one either.
        (Otherwise it is slow, and starting it again would not make it faster.)"""
        assert self._client is not None
        if self._client.answered_at > began:
            return False
        if self._changing is None and self._server is server and not self._lost:
            self._change(self._probe(server, self._client))
        if self._changing is not None:
            await asyncio.shield(self._changing)
        return self._lost is not None or self._server is not server or not server.alive

    async def _probe(self, server: ServerProcess, client: ServerClient) -> None:
        if not await client.responds(PROBE_S) and server.alive:
            self._lost = f"is alive but silent (no call was answered within its time limit, nor the shortest one in {PROBE_S:g} s)"

    def _count_as_retry(self, failure: Failure) -> None:
        """The request is repeated, so its failure counts as a failed attempt only."""
        self.usage.failures[failure.cause] -= 1
        self.usage.retries += 1


async def _is_dead(server: ServerProcess, within_s: float = 1.0) -> bool:
    """Whether it is dead by then: connections break a moment before the process is seen to have ended."""
    deadline = time.monotonic() + within_s
    while server.alive and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
    return not server.alive
