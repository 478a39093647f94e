"""A server that samples for the policy: started, awaited, asked, given weights, put to sleep, started again, stopped."""

import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

import aiohttp

from plaudit.errors import RecipeError, TrainingStopped
from plaudit.report.progress import print_line, print_own_warning
from plaudit.rollout.engine import Weights
from plaudit.rollout.served import vllm
from plaudit.rollout.served.http_loop import HttpLoop
from plaudit.rollout.served.worker.plaudit_weight_stream import TOKEN_BYTES, Named, Sums, WeightSender, add_sums
from plaudit.servers.process import HOST, ServerProcess, Startup, free_port

if TYPE_CHECKING:
    from plaudit.recipe.rollout import EngineServerSettings

POLL_S = 0.2
BUCKET_BYTES = 256 << 20
"""Weights sent together: enough to make the round trip cheap, few enough not to take memory that is needed."""
SUMS_AGREE = 1e-5
"""Largest relative difference of sums of weights: they are added in another order."""


class ServerLost(Exception):
    """The server is gone, or does not answer any more; a new one may do better."""


class PolicyServer:
    """One server, for one process that trains."""

    def __init__(
        self,
        settings: "EngineServerSettings",
        command: Callable[[int], Sequence[str]],
        environment: Mapping[str, str],
        *,
        shares_gpu: bool,
        log: Path | None = None,
        check: Callable[[], None],
    ):
        """`command`: the command line, given a port. `shares_gpu`: its GPU is the one that we train on. `check` is called several
        times per second while we wait, and may raise."""
        self._settings, self._command, self._shares_gpu, self._check = settings, command, shares_gpu, check
        self._environment = dict(environment)
        self._folder = Path(mkdtemp(prefix="plaudit-engine-"))
        self.log = log or self._folder / "server.log"
        self._token = secrets.token_hex(TOKEN_BYTES)
        self._process: ServerProcess | None = None
        self._port = 0
        self._http = HttpLoop({"Authorization": f"Bearer {self._token}"})
        self._weights_checked, self._failed = False, False

    # Life --------------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start it and wait until it answers."""
        self._port = free_port()
        environment = {**os.environ, **vllm.environment(self._token, os.environ), **self._environment}
        print_line(f"starting a vLLM server on port {self._port} for sampling; its output: {self.log}")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        command = self._command(self._port)
        try:
            self._process = ServerProcess(command, self.log, environment)
        except OSError as error:
            raise RecipeError(f"rollout.server.program: {command[0]} cannot be started: {error.strerror}") from None
        limit_s = self._settings.start_timeout_s
        startup = Startup(self._process, "the vLLM server for sampling", limit_s, "rollout.server.start_timeout_s")
        while not self._answers():
            try:
                startup.check()
            except RecipeError as error:
                self._failed = True
                raise RecipeError(f"rollout.engine vllm: {error} Its output: {self.log}") from None
            self._check()
            time.sleep(POLL_S)
        startup.ready()

    def restart(self, why: str) -> None:
        print_own_warning(f"the vLLM server is lost ({why}): starting it again")
        self._failed = True
        self.kill()
        self._weights_checked = False
        self.start()

    def kill(self) -> None:
        """End it at once, so that its GPU memory is free."""
        if self._process is not None:
            self._process.stop(grace_s=0.0)

    def close(self) -> None:
        self._http.close()
        if self._process is not None:
            self._process.stop()
        if not self._failed or self.log.parent != self._folder:  # else the log may be read
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def lost(self) -> str | None:
        """Why it is lost, if it is."""
        assert self._process is not None
        return None if self._process.alive else self._process.last_error() or self._process.epitaph()

    def _answers(self) -> bool:
        async def ask() -> bool:
            with suppress(aiohttp.ClientError, TimeoutError, OSError):
                async with self._http.session.get(self._url("/health"), timeout=aiohttp.ClientTimeout(total=5.0)) as response:
                    return response.status == 200
            return False

        return self._http.submit(ask()).result()

    # Requests ----------------------------------------------------------------------------------------------------------

    async def sample(self, body: dict[str, Any], version: int) -> tuple[list[int], list[float]]:
        """Tokens and log-probs of one sample, by these weights. Raises ServerLost. On the event loop."""
        answer = await self._post(vllm.SAMPLE_PATH, body, {vllm.VERSION_HEADER: str(version)})
        try:
            return vllm.tokens_and_logprobs(answer)
        except ValueError as error:
            raise TrainingStopped(f"rollout.engine vllm: its server answered with {error}") from None

    def submit(self, work: Any) -> "Future[Any]":
        return self._http.submit(work)

    def _url(self, path: str) -> str:
        return f"http://{HOST}:{self._port}{path}"

    async def _post(self, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Any:
        try:
            async with self._http.session.post(self._url(path), json=body, headers=headers) as response:
                text = await response.text()
                if response.status == 200:
                    return json.loads(text) if text else None  # some routes of older versions answer nothing
        except (aiohttp.ClientError, OSError) as error:
            raise ServerLost(str(error) or type(error).__name__) from error
        if response.status >= 500:
            raise ServerLost(f"HTTP {response.status} at {path}: {text[:500]}")
        raise TrainingStopped(f"rollout.engine vllm: HTTP {response.status} at {path}: {text[:500]}. Its output: {self.log}")

    def call(self, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Any:
        """The answer, for a caller that has no event loop. Raises ServerLost, also if there is none within the time limit."""
        future = self._http.submit(self._post(path, body, headers))
        return self._await(future, path)

    def _await(self, future: "Future[Any]", what: str) -> Any:
        deadline = time.monotonic() + self._settings.call_timeout_s
        while True:
            try:
                return future.result(POLL_S)
            except TimeoutError:
                if time.monotonic() > deadline:
                    future.cancel()
                    raise ServerLost(f"no answer to {what} within rollout.server.call_timeout_s") from None
            self._check()

    def on_workers(self, method: str, *arguments: str) -> list[Any]:
        """The result of each worker of the server."""
        return self.call("/collective_rpc", {"method": method, "args": list(arguments)})["results"]

    # Weights -----------------------------------------------------------------------------------------------------------

    def load(self, weights: Weights, version: int) -> None:
        """Give it these weights. Until they are loaded and checked, it samples nothing."""
        self.call("/plaudit/version", headers={vllm.VERSION_HEADER: ""})
        sums: Sums = {}
        named = iter(weights) if self._weights_checked else _with_sums(weights, sums)
        if self._settings.weights == "files":
            self._send_files(named)
        else:
            self._send_stream(named)
        if not self._weights_checked:
            self._compare_sums(sums)
            self._weights_checked = True
        self.call("/reset_prefix_cache")
        self.call("/plaudit/version", headers={vllm.VERSION_HEADER: str(version)})

    def _send_stream(self, weights: Iterator[Named]) -> None:
        token = secrets.token_bytes(TOKEN_BYTES)
        limit = self._settings.call_timeout_s
        sender = WeightSender(token, shared=self._shares_gpu, bucket_bytes=BUCKET_BYTES, timeout_s=limit)
        workers = self._settings.tensor_parallel
        body = {"method": "plaudit_load", "args": [sender.address, token.hex()]}
        loading = self._http.submit(self._post("/collective_rpc", body))

        def check() -> None:
            self._check()
            if loading.done():
                loading.result()
                raise ServerLost("it ended loading before all weights were sent")

        try:
            count, size = sender.send(weights, workers, check)
            self._require_all(self._await(loading, "new weights")["results"], count, size)
        except OSError as error:
            with suppress(TimeoutError):
                loading.result(10.0)  # raises the server's own account of what went wrong, which is better
            raise ServerLost(f"while weights were sent: {error}") from error
        finally:
            sender.close()

    def _send_files(self, weights: Iterator[Named]) -> None:
        from safetensors.torch import save_file

        folder = self._folder / "weights"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        count = size = 0
        for count, (name, tensor) in enumerate(weights, 1):
            size += tensor.nbytes
            save_file({name: tensor.detach().cpu().contiguous()}, folder / f"{count:06d}.safetensors")
        self._require_all(self.on_workers("plaudit_load_files", str(folder)), count, size)
        shutil.rmtree(folder)

    def _require_all(self, loaded: Iterable[Mapping[str, Any]], count: int, size: int) -> None:
        for worker in loaded:
            if worker["tensors"] != count or worker["bytes"] != size:
                raise TrainingStopped(
                    f"rollout.engine vllm: {worker['tensors']} weights ({worker['bytes']:,} bytes) arrived, of {count} ({size:,})"
                )
            if missing := worker["missing"]:
                raise TrainingStopped(
                    f"rollout.engine vllm: its model has weights that the policy has not: {', '.join(missing[:3])}. It cannot "
                    "sample this model."
                )

    def _compare_sums(self, ours: Mapping[str, Sequence[float]]) -> None:
        """The sums of each layer's weights are the trainer's, so they were loaded where they belong, and completely. Layers that
        the server has packed into another form (as vLLM does on a CPU) cannot be compared."""
        if self._settings.tensor_parallel > 1:
            return  # each worker has a part of some weights and all of others
        [theirs] = self.on_workers("plaudit_sums")
        for name, (count, total, squares) in ours.items():
            got_count, got_total, got_squares = theirs.get(name, (0, 0.0, 0.0))
            if got_count != count:
                continue
            agree = abs(got_squares - squares) <= SUMS_AGREE * squares
            if not agree or abs(got_total - total) > SUMS_AGREE * max(abs(total), squares**0.5):
                raise TrainingStopped(
                    f"rollout.engine vllm: after the first sync its weights of {name} are not the policy's (Σw² is "
                    f"{got_squares:.6g}, and should be {squares:.6g}): it cannot sample this model correctly"
                )

    # Memory ------------------------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Give its GPU memory back: weights too, which the next sync sends again."""
        self.call("/plaudit/version", headers={vllm.VERSION_HEADER: ""})
        self.call("/sleep?level=2")

    def wake(self, what: str) -> None:
        """`weights` or `kv_cache`."""
        self.call(f"/wake_up?tags={what}")


def _with_sums(weights: Iterable[Named], sums: Sums) -> Iterator[Named]:
    for name, tensor in weights:
        add_sums(sums, name, tensor)
        yield name, tensor
