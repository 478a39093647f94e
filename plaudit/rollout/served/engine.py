"""The engine that is a server: every sample is a request, and the policy's weights are sent to it after every step.

    sync        weights → server, layer by layer; checked; from then on the server has this version, and samples no other
    generate    n requests for each prompt, each with a seed from our keys; samples as they are answered
    rest        the server gives its GPU memory to the trainer

A server that dies, or falls silent, is started again, gets the weights of the last sync, and gets the lost requests again:
nothing is sampled twice, since a sample counts once it has arrived.

Differs from the native engine: log-probs come from another program, so they differ from the trainer's by rounding
(`mismatch`), and other requests in a batch may change the last bits of a sample's logits. The same seeds then usually draw the
same tokens, not always.
"""

import os
import queue
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar

import numpy as np

from plaudit.errors import PlauditError, RecipeError, ServerGone, TrainingStopped
from plaudit.models.lora import Adapters
from plaudit.models.sharded import is_sharded
from plaudit.rollout.engine import Engine, EngineSetup, Request, Sampling, Weights
from plaudit.rollout.lengths import require_lengths
from plaudit.rollout.served.dialect import Dialect, Launch, ServerLost
from plaudit.rollout.served.gathered import sync_together
from plaudit.rollout.served.launched import LaunchedServer
from plaudit.rollout.served.placement import server_gpus, share_urls
from plaudit.rollout.served.running import RunningServer
from plaudit.rollout.served.server import PolicyServer
from plaudit.rollout.served.sglang import Sglang
from plaudit.rollout.served.shares import Job, SampleAnswer, Share
from plaudit.rollout.served.vllm import Vllm
from plaudit.rollout.stopping import Stopping, end_tokens_of
from plaudit.seeding import stable_seed
from plaudit.servers.process import LONGEST_PAUSE_S
from plaudit.types import Sample

POLL_S = 0.1
PAUSE_S = 2.0
"""Before the first restart; twice as long before each further one."""
IF_AGAIN = "If that happens again, fix the cause, then run the same command to resume."
"""Several processes start again by themselves first (`cluster.restarts`)."""


class ServedEngine(Engine):
    """Samples with servers that speak a dialect."""

    dialect: ClassVar[type[Dialect]]
    own_weights = True

    def __init__(self, setup: EngineSetup):
        settings, world = setup.rollout.server, setup.world
        self._dialect = self.dialect(settings)
        if settings.lora == "adapters" and not self._dialect.takes_adapters:
            raise RecipeError(f"rollout.server.lora: rollout.engine {self._dialect.name} takes merged weights only; remove it")
        self._settings, self._model, self._tokenizer, self._world = settings, setup.model, setup.tokenizer, world
        self._may_stop = True
        self._end_tokens = end_tokens_of(setup.model)
        self._weights: Weights | None = None
        self._restarts = 0
        self._asleep = False
        """Only of a server that shares the trainer's GPU, so of the only one."""
        self._has_sampled = True
        """Since a server was last started again: one that cannot sample at all need not be tried again and again."""
        on_gpu = world.device.type == "cuda"
        self._sleeps = settings.sleep and on_gpu and not settings.gpus and not settings.url
        with ExitStack() as stack:
            self._servers = self._join(stack) if settings.url else [self._launch(setup, stack, on_gpu=on_gpu)]
            for server in self._servers:
                server.start()
            self._resources = stack.pop_all()

    def _launch(self, setup: EngineSetup, stack: ExitStack, *, on_gpu: bool) -> PolicyServer:
        """The server of this process."""
        settings, world = self._settings, self._world
        if problem := self._dialect.command.find_problem(settings.program, "rollout.server.program"):
            raise RecipeError(f"rollout.engine {self._dialect.name}: {problem}")
        environment = server_gpus(settings, world, os.environ)
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="plaudit-policy-", ignore_cleanup_errors=True)))
        self._dialect.save_model(folder, setup.model, setup.tokenizer)
        adapters = None if is_sharded(setup.model) else Adapters.of(setup.model)
        dtype, context = str(setup.model.dtype).removeprefix("torch."), getattr(setup.model.config, "max_position_embeddings", None)
        server = LaunchedServer(
            self._dialect,
            Launch(folder, dtype, context, on_gpu=on_gpu, sleeps=self._sleeps, lora_rank=adapters and adapters.rank),
            environment,
            shares_gpu=on_gpu and settings.weights == "auto" and settings.tensor_parallel == 1 and not settings.gpus,
            log=setup.folder and setup.folder / f"engine_{world.rank}.log",
            check=self._check,
        )
        stack.callback(server.close)
        return server

    def _join(self, stack: ExitStack) -> list[PolicyServer]:
        """This process's share of the servers that run already."""
        if not self._dialect.own_calls:
            raise RecipeError(f"rollout.server.url: rollout.engine {self._dialect.name} starts its own servers; remove url")
        self._dialect.run_key = self._world.agree(f"{secrets.token_hex(4)}-", "the run's key")
        servers: list[PolicyServer] = []
        for url in share_urls(self._settings.url, self._world):
            servers.append(RunningServer(self._dialect, url, self._check))
            stack.callback(servers[-1].close)
        return servers

    # The contract ------------------------------------------------------------------------------------------------------

    def sync(self, version: int, weights: Weights) -> None:
        self._weights = weights
        self._dialect.syncs += 1
        if weights.gathered:
            sync_together(self._servers, weights, self._world, load=partial(self._load, version), restart=self._restart)
        else:
            for server in self._servers:
                self._load_until_done(server, version)
        self.version = version

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Sample]:
        requests = [request for request in requests if request.n]
        require_lengths(requests, sampling, self._model.config)
        stopping = Stopping(self._tokenizer, self._end_tokens, sampling.stop)
        if self._weights is None and requests:
            raise PlauditError("the engine has no weights yet: call sync first")
        jobs = [job for request in requests for job in self._jobs(request, sampling, stopping)]
        answers: queue.SimpleQueue[SampleAnswer] = queue.SimpleQueue()
        count = len(self._servers)
        shares = [Share(server, jobs[i::count], self.version, answers) for i, server in enumerate(self._servers)]
        for share in shares:
            share.ask()
        try:
            while any(share.left for share in shares):
                try:
                    answer = answers.get(timeout=POLL_S)
                except queue.Empty:
                    self.on_step(0)
                    for share in shares:
                        if share.silent_for() > self._dialect.silence_s:
                            what = "token" if share.server.reports_progress else "sample"
                            self._replace(share, f"no {what} for {self._dialect.silence_s:g} s (rollout.server.silence_s)")
                    continue
                if not answer.is_current:
                    continue
                if isinstance(answer.result, ServerLost):
                    self._replace(answer.share, str(answer.result))
                    continue
                if isinstance(answer.result, BaseException):
                    raise answer.result
                self._has_sampled = True
                answer.share.arrived(answer.job)
                tokens, logprobs = answer.result
                sample = self._sample(answer.job, tokens, logprobs, stopping)
                self.on_step(len(sample.tokens))
                yield sample
        finally:
            for share in shares:
                share.cancel()

    def rest(self) -> None:
        """A stop that was asked for waits until the step is complete."""
        if not self._sleeps or self._asleep:
            return
        self._may_stop = False
        try:
            for server in self._servers:
                server.sleep()
            self._asleep = True
        except ServerLost:
            for server in self._servers:
                server.kill()  # the next sync starts it again
        finally:
            self._may_stop = True

    def close(self) -> None:
        self._resources.close()

    def _check(self) -> None:
        """While we wait for a server."""
        self._world.heartbeat.beat()
        if self._may_stop:
            self.on_step(0)

    # Weights -----------------------------------------------------------------------------------------------------------

    def _load(self, version: int, server: PolicyServer, weights: Weights) -> None:
        if self._asleep:
            server.wake("weights")
        server.load(weights, version)
        if self._asleep:
            server.wake("kv_cache")
            self._asleep = False

    def _load_until_done(self, server: PolicyServer, version: int) -> None:
        assert self._weights is not None
        while True:
            try:
                self._load(version, server, self._weights)
                return
            except ServerLost as error:
                self._restart(server, str(error))

    def _replace(self, share: Share, why: str) -> None:
        """Start the server again, give it the weights, and ask it for what is left."""
        share.cancel()
        assert self._weights is not None
        if self._weights.gathered:
            raise ServerGone(
                f"rollout.engine {self._dialect.name}: a server is lost ({share.server.lost or why}). With cluster.sharding full "
                f"only all processes together can give it weights again. {IF_AGAIN}"
            )
        self._restart(share.server, why)
        self._load_until_done(share.server, self.version)
        share.ask()

    def _restart(self, server: PolicyServer, why: str) -> None:
        why = server.lost or why
        problem = None
        if self._restarts == self._settings.restarts:
            problem = f"and was started again {self._restarts} times already (rollout.server.restarts)"
        elif not self._has_sampled:
            problem = "again, without a sample since it was started again"
        if problem is not None:
            raise ServerGone(
                f"rollout.engine {self._dialect.name}: its server is lost ({why}), {problem}. {server.where_to_look}. {IF_AGAIN}"
            )
        self._has_sampled = False
        pause_until = time.monotonic() + min(PAUSE_S * 2**self._restarts, LONGEST_PAUSE_S)
        self._restarts += 1
        while time.monotonic() < pause_until:
            self._check()
            time.sleep(POLL_S)
        try:
            server.restart(why)
        except RecipeError as error:  # it did start before, so this is no mistake in the recipe
            raise ServerGone(f"{str(error).rstrip('.')}. {IF_AGAIN}") from None
        self._asleep = False

    # Samples -----------------------------------------------------------------------------------------------------------

    def _jobs(self, request: Request, sampling: Sampling, stopping: Stopping) -> list[Job]:
        limit = request.max_new_tokens or sampling.max_new_tokens
        ends = sorted(stopping.end_tokens)
        seeds = (stable_seed("sample", sampling.seed, sampling.step, request.prompt_id, index) for index in range(request.n))
        bodies = (self._dialect.request(request.tokens, sampling, limit, seed, ends) for seed in seeds)
        return [Job(request, index, limit, body) for index, body in enumerate(bodies)]

    def _sample(self, job: Job, tokens: list[int], logprobs: list[float], stopping: Stopping) -> Sample:
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
