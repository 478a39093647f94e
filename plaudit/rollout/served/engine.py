"""The engine that is a server: every sample is a request, and the policy's weights are sent to it after every step.

    sync        weights → server, layer by layer; checked; from then on the server has this version, and samples no other
    generate    n requests for each prompt, each with a seed from our keys; samples as they are answered
    rest        the server gives its GPU memory to the trainer

A server that dies, or falls silent, is started again, gets the weights of the last sync, and is asked again for what was lost:
nothing is sampled twice, since a sample counts once it has arrived.

Differs from the native engine: log-probs come from another program, so they differ from the trainer's by rounding
(`mismatch`), and other requests in a batch may change the last bits of a sample's logits. The same seeds then usually draw the
same tokens, not always.
"""

import os
import queue
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, ClassVar

import numpy as np

from plaudit.errors import PlauditError, RecipeError, ServerGone, TrainingStopped
from plaudit.rollout.engine import Engine, EngineSetup, Request, Sampling, Weights
from plaudit.rollout.lengths import require_lengths
from plaudit.rollout.served.dialect import Dialect, Launch, ServerLost
from plaudit.rollout.served.server import PolicyServer
from plaudit.rollout.served.sglang import Sglang
from plaudit.rollout.served.vllm import Vllm
from plaudit.rollout.stopping import Stopping, end_tokens_of
from plaudit.seeding import stable_seed
from plaudit.types import Sample

POLL_S = 0.1
PAUSE_S = 2.0
"""Before the first restart; twice as long before each further one."""
IF_AGAIN = "If that happens again, fix the cause, then run the same command to resume."
"""Several processes start again by themselves first (`cluster.restarts`)."""


@dataclass(frozen=True)
class _Job:
    """One sample to be drawn."""

    request: Request
    index: int
    limit: int
    """Of new tokens."""
    body: dict[str, Any]


class ServedEngine(Engine):
    """Samples with a server that speaks a dialect."""

    dialect: ClassVar[type[Dialect]]

    def __init__(self, setup: EngineSetup):
        settings = setup.rollout.server
        self._dialect = self.dialect(settings)
        if problem := self._dialect.command.find_problem(settings.program, "rollout.server.program"):
            raise RecipeError(f"rollout.engine {self._dialect.name}: {problem}")
        if settings.tensor_parallel > 1 and setup.world.size > 1:
            raise RecipeError(
                "rollout.server.tensor_parallel: with cluster.gpus each process has a server on its own GPU; set it to 1"
            )
        self._settings, self._model, self._tokenizer = settings, setup.model, setup.tokenizer
        self._world, self._device = setup.world, setup.world.device
        self._may_stop = True
        self._end_tokens = end_tokens_of(setup.model)
        self._weights: Weights | None = None
        self._asleep, self._restarts = False, 0
        self._has_sampled = True
        """Since it was last started again: one that cannot sample at all need not be tried again and again."""
        self._folder = Path(mkdtemp(prefix="plaudit-policy-"))
        """The model without weights: its config and tokenizer."""
        self._dialect.save_model(self._folder, setup.model, setup.tokenizer)
        on_gpu = self._device.type == "cuda"
        self._sleeps = settings.sleep and on_gpu
        dtype, context = str(setup.model.dtype).removeprefix("torch."), getattr(setup.model.config, "max_position_embeddings", None)
        self._server = PolicyServer(
            self._dialect,
            Launch(self._folder, dtype, context, on_gpu=on_gpu, sleeps=self._sleeps),
            self._gpu_environment(),
            shares_gpu=on_gpu and settings.weights == "auto" and settings.tensor_parallel == 1,
            log=setup.folder and setup.folder / f"engine_{setup.world.rank}.log",
            check=self._check,
        )
        try:
            self._server.start()
        except BaseException:
            self.close()
            raise

    def _gpu_environment(self) -> dict[str, str]:
        """The server's GPU is ours. With several, it takes the first of those that we see."""
        if self._device.type != "cuda" or self._settings.tensor_parallel > 1:
            return {}
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        index = self._device.index or 0
        return {"CUDA_VISIBLE_DEVICES": visible.split(",")[index] if visible else str(index)}

    # The contract ------------------------------------------------------------------------------------------------------

    def sync(self, version: int, weights: Weights) -> None:
        self._weights = weights
        while True:
            try:
                self._load(version)
                break
            except ServerLost as error:
                self._restart(str(error))
        self.version = version

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Sample]:
        requests = [request for request in requests if request.n]
        require_lengths(requests, sampling, self._model.config)
        stopping = Stopping(self._tokenizer, self._end_tokens, sampling.stop)
        if self._weights is None and requests:
            raise PlauditError("the engine has no weights yet: call sync first")
        left = {(job.request.prompt_id, job.index): job for request in requests for job in self._jobs(request, sampling, stopping)}
        answers: queue.SimpleQueue[tuple[_Job, Any]] = queue.SimpleQueue()
        pending = self._ask(left.values(), answers)
        heard = time.monotonic()
        try:
            while left:
                try:
                    job, answer = answers.get(timeout=POLL_S)
                except queue.Empty:
                    self.on_step(0)
                    if time.monotonic() - heard > self._settings.silence_s:
                        silent = f"no sample for {self._settings.silence_s:g} s (rollout.server.silence_s)"
                        answers.put((next(iter(left.values())), ServerLost(silent)))
                    continue
                if isinstance(answer, ServerLost):
                    for future in pending:
                        future.cancel()
                    self._restart_with_weights(str(answer))
                    answers = queue.SimpleQueue()
                    pending, heard = self._ask(left.values(), answers), time.monotonic()
                    continue
                if isinstance(answer, BaseException):
                    raise answer
                heard, self._has_sampled = time.monotonic(), True
                del left[job.request.prompt_id, job.index]
                tokens, logprobs = answer
                sample = self._sample(job, tokens, logprobs, stopping)
                self.on_step(len(sample.tokens))
                yield sample
        finally:
            for future in pending:
                future.cancel()  # closes its connection, which ends its request

    def rest(self) -> None:
        """A stop that was asked for waits until the step is complete."""
        if not self._sleeps or self._asleep:
            return
        self._may_stop = False
        try:
            self._server.sleep()
            self._asleep = True
        except ServerLost:
            self._server.kill()  # the next sync starts it again
        finally:
            self._may_stop = True

    def close(self) -> None:
        self._server.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _check(self) -> None:
        """While we wait for the server."""
        self._world.heartbeat.beat()
        if self._may_stop:
            self.on_step(0)

    # Weights -----------------------------------------------------------------------------------------------------------

    def _load(self, version: int) -> None:
        assert self._weights is not None
        if self._asleep:
            self._server.wake("weights")
        self._server.load(self._weights, version)
        if self._asleep:
            self._server.wake("kv_cache")
            self._asleep = False

    def _restart_with_weights(self, why: str) -> None:
        while True:
            self._restart(why)
            try:
                self._load(self.version)
                return
            except ServerLost as error:
                why = str(error)

    def _restart(self, why: str) -> None:
        why = self._server.lost or why
        problem = None
        if self._restarts == self._settings.restarts:
            problem = f"and was started again {self._restarts} times already (rollout.server.restarts)"
        elif not self._has_sampled:
            problem = "again, without a sample since it was started again"
        if problem is not None:
            raise ServerGone(
                f"rollout.engine {self._dialect.name}: its server is lost ({why}), {problem}. Its output: {self._server.log}. "
                f"{IF_AGAIN}"
            )
        self._has_sampled = False
        pause_until = time.monotonic() + PAUSE_S * 2**self._restarts
        self._restarts += 1
        while time.monotonic() < pause_until:
            self.on_step(0)
            time.sleep(POLL_S)
        try:
            self._server.restart(why)
        except RecipeError as error:  # it did start before, so this is no mistake in the recipe
            raise ServerGone(f"{error} {IF_AGAIN}") from None
        self._asleep = False

    # Samples -----------------------------------------------------------------------------------------------------------

    def _jobs(self, request: Request, sampling: Sampling, stopping: Stopping) -> list[_Job]:
        limit = request.max_new_tokens or sampling.max_new_tokens
        ends = sorted(stopping.end_tokens)
        seeds = (stable_seed("sample", sampling.seed, sampling.step, request.prompt_id, index) for index in range(request.n))
        bodies = (self._dialect.request(request.tokens, sampling, limit, seed, ends) for seed in seeds)
        return [_Job(request, index, limit, body) for index, body in enumerate(bodies)]

    def _ask(self, jobs: Any, answers: "queue.SimpleQueue[tuple[_Job, Any]]") -> list[Any]:
        version = self.version

        async def ask(job: _Job) -> None:
            try:
                answer: Any = await self._server.sample(job.body, version)
            except Exception as error:
                answer = error
            answers.put((job, answer))

        return [self._server.submit(ask(job)) for job in list(jobs)]

    def _sample(self, job: _Job, tokens: list[int], logprobs: list[float], stopping: Stopping) -> Sample:
        """The server may see a stop string later than we do: what follows it is cut off."""
        end = stopping.end_of(tokens)
        if end is None and len(tokens) < job.limit:
            raise TrainingStopped(
                f"rollout.engine {self._dialect.name}: prompt {job.request.prompt_id}, sample {job.index}: its server ended it "
                f"after {len(tokens)} of {job.limit} tokens, and neither an end token nor a stop string is in it"
            )
        tokens = tokens[: len(tokens) if end is None else end + 1]
        return Sample(
            prompt_id=job.request.prompt_id,
            index=job.index,
            tokens=np.array(tokens, dtype=np.int32),
            text=stopping.text(tokens),
            status="truncated" if end is None else "finished",
            sampler_logprobs=np.array(logprobs[: len(tokens)], dtype=np.float32),
            untempered_logprobs=None,
            version=self.version,
        )


class VllmEngine(ServedEngine):
    dialect, capabilities = Vllm, Vllm.capabilities


class SglangEngine(ServedEngine):
    dialect, capabilities = Sglang, Sglang.capabilities


SERVED: dict[str, type[ServedEngine]] = {kind.dialect.name: kind for kind in (VllmEngine, SglangEngine)}
