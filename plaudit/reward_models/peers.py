"""A run of several processes has each reward model once: one process has it, and the others call it there.

    resident, offload, launch   in the process that `model.rank` names; otherwise models are dealt to the processes in turn
    rank: all                   a copy in each
    rank: [0, 1]                a block of its layers in each of these; the first owns the model (`divided.py`)
    gpus: 2                     in a process alongside those that train (`worker.py`), on a machine with that many free
    server                      every process is a client, with its share of the limits

The process that has a model answers the calls of all: its backend counts them, and batches them as those of one process. A model
that is not always on the device is loaded when all processes have called `load`, so that none has other uses for it (an offloaded
model: none is sampling any more; a server that sleeps: none is training), and unloaded when all have called `unload`.
"""

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from plaudit.errors import PeerFailed, PeerLost, PlauditError, RecipeError, StopRequested
from plaudit.host import address_towards
from plaudit.recipe.limits import ModelLimits
from plaudit.recipe.model_owners import ModelKey, deal_models, divide_limits, models_of, models_with_gpus, named_ranks
from plaudit.recipe.rewards import RewardSettings
from plaudit.reward_models.backend import Answer, Backend, GenerationRequest, ModelInfo, SamplingParams, ScalarScore, Usage
from plaudit.reward_models.divided import ModelPart
from plaudit.reward_models.peer_channel import BadMessage, PeerClient, PeerServer, gone
from plaudit.types import TOKEN_BYTES, Failure, Message, RewardWorkers

if TYPE_CHECKING:
    import torch

    from plaudit.world import World

T = TypeVar("T")
RunOnLoop = Callable[[Coroutine[Any, Any, T]], Future[T]]


class ModelPeers:
    """The reward models of all processes, as seen from one of them. Lives on the rewards' event loop."""

    def __init__(self, owners: dict[ModelKey, int], *, rank: int, size: int, token: bytes, device: "torch.device | None" = None):
        self.rank, self.size, self.device = rank, size, device
        self._owners, self._token = owners, token
        self._numbers = {key: number for number, key in enumerate(owners)}
        self._addresses: Sequence[tuple[str, int] | None] = []
        self._clients: dict[int, PeerClient] = {}
        self._server: PeerServer | None = None
        self._hosted: dict[int, asyncio.Future[HostedModel | HostedBlock]] = {}
        self._remote: list[RemoteModel] = []

    @classmethod
    def join(cls, world: "World", rewards: Iterable[RewardSettings], run: RunOnLoop[Any]) -> "ModelPeers":
        """Called by all processes at the same time, before any opens its models. `run`: runs a coroutine on the rewards' loop."""
        owners = deal_models(models_of(rewards), world.size)
        if not owners:
            return cls(owners, rank=world.rank, size=world.size, token=b"", device=world.device)
        workers = _require_workers(world, owners)
        token = workers.token or world.agree(secrets.token_bytes(TOKEN_BYTES), "the reward models' token")
        machines = world.gather((socket.gethostname(), _boot_id()), "the machines' names")
        peers = cls(owners, rank=world.rank, size=world.size, token=token, device=world.device)
        address = run(peers.listen(LOOPBACK if len(set(machines)) == 1 else own_address([name for name, _ in machines]))).result()
        peers.connect([*world.gather(address, "the addresses of reward models"), *workers.addresses])
        return peers

    async def listen(self, host: str) -> tuple[str, int] | None:
        """Returns the address at which the others call this process; None if it has no model, nor a block of one."""
        numbers = [number for key, number in self._numbers.items() if self.rank in (self._owners[key], *named_ranks(key[0]))]
        if not numbers:
            return None
        self._hosted = {number: asyncio.get_running_loop().create_future() for number in numbers}
        self._server = PeerServer(self._token, self._answer, self._lost)
        try:
            return host, await self._server.listen(host)
        except OSError as error:
            raise RecipeError(f"rank {self.rank} cannot listen at {host} for calls to its reward models: {error}") from None

    def connect(self, addresses: Sequence[tuple[str, int] | None]) -> None:
        """`addresses`: of all ranks in their order, then of the reward workers."""
        self._addresses = addresses

    def backend(self, key: ModelKey, limits: ModelLimits, build: Callable[[ModelLimits, ModelPart | None], Backend]) -> Backend:
        """The model as this process uses it. `build` makes the backend of a model, or of a part of one, that it has itself."""
        owner = self._owners.get(key)
        if owner is None:
            return build(divide_limits(limits, self.size) if key[0].placement == "server" else limits, None)
        part, number = self._part(key), self._numbers[key]
        if owner == self.rank:
            hosted = HostedModel(build(limits, part), self.rank, self.size)
        elif part is not None:
            hosted = HostedBlock(key, number, self._client(owner), build(limits, part))
        else:
            self._remote.append(remote := RemoteModel(key, number, self._client(owner)))
            return remote
        self._hosted[number].set_result(hosted)
        return hosted

    def _part(self, key: ModelKey) -> ModelPart | None:
        """What this process has of a divided model."""
        ranks = key[0].rank
        if not isinstance(ranks, tuple) or self.rank not in ranks:
            return None
        at, number = ranks.index(self.rank), self._numbers[key]

        async def call(method: str, *arguments: Any) -> Any:
            return await self._client(ranks[at + 1]).call(method, number, *arguments)

        return ModelPart(at, ranks, call if at + 1 < len(ranks) else None)

    async def leave(self) -> None:
        """This process has stopped scoring: no other must wait for it before it loads or unloads a model. The run ends."""
        self._stop(StopRequested())
        owners = set(self._owners.values()) - {self.rank}
        await asyncio.gather(*(self._client(owner).call("leave") for owner in owners), return_exceptions=True)

    def close(self) -> None:
        for client in self._clients.values():
            client.close()
        if self._server is not None:
            self._server.close()

    async def refresh_usage(self) -> None:
        """What a reward worker has counted, rank 0 reports."""
        remote = [model for model in self._remote if self.rank == 0 and self._owners[model.key] >= self.size]
        await asyncio.gather(*(model.refresh_usage() for model in remote))

    def _client(self, owner: int) -> PeerClient:
        if owner not in self._clients:
            address = self._addresses[owner]
            assert address is not None, f"rank {owner} has a model, so it listens"
            self._clients[owner] = PeerClient(address, self._token, self.rank, owner)
        return self._clients[owner]

    # Calls of other processes

    async def _answer(self, rank: int, call: tuple[Any, ...]) -> Any:
        method, *rest = call
        if method == "leave":
            return self._stop(StopRequested())
        number, *arguments = rest
        hosted = await asyncio.shield(self._hosted[number])  # an early caller waits until this process opens it
        return await hosted.answer(rank, method, *arguments)

    def _lost(self, rank: int) -> None:
        self._stop(PeerLost(gone(rank)))

    def _stop(self, why: BaseException) -> None:
        """A process makes no more calls."""
        for future in self._hosted.values():
            if future.done():
                future.result().stop(why)


def _require_workers(world: "World", owners: dict[ModelKey, int]) -> RewardWorkers:
    workers, expected = world.reward_workers or RewardWorkers(b""), models_with_gpus(owners)
    if len(workers.addresses) < len(expected):
        raise RecipeError(
            f"{expected[0][0].path}: model.gpus needs the processes that plaudit starts on a Ray cluster (cluster.nodes). torchrun "
            "and srun start none for reward models: leave model.gpus out, or use placement: server"
        )
    return workers


def open_together(world: "World", open_own: Callable[[], None]) -> None:
    """`open_own` opens the rewards of this process. None leaves before all know why a model could not be opened: the others may
    still have to ask it."""
    error: Exception | None = None
    try:
        open_own()
    except Exception as problem:
        error = problem
    bug = None if error is None else PeerFailed(f"rank {world.rank}: {type(error).__name__}: {error}")
    everyone = world.gather(error if isinstance(error, PlauditError) else bug, "the reward models")
    for one in (error, *everyone):
        if one is not None:
            raise one


LOOPBACK = "127.0.0.1"


def _boot_id() -> str:
    """Tells machines of the same name apart, such as `localhost`, where the system has one."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except OSError:
        return ""


def own_address(machines: Sequence[str]) -> str:
    """This machine's address on the network that connects it with rank 0, or with another of the machines named."""
    for there in filter(None, dict.fromkeys([os.environ.get("MASTER_ADDR"), *machines])):
        with contextlib.suppress(OSError):
            own = address_towards(there)
            if not ip_address(own.partition("%")[0]).is_loopback:  # as a machine's own name often leads to
                return own
    raise RecipeError(
        f"{socket.gethostname()} has no address at which the other machines ({', '.join(sorted(set(machines)))}) could call its "
        "reward models. Set MASTER_ADDR to the address of rank 0's machine, the same on all."
    )


# The model in the process that has it, and in the others -------------------------------------------------------------


class AllTogether:
    """Something that is done once all processes have called for it."""

    def __init__(self, size: int, do: Callable[[], Awaitable[None]]):
        self._size, self._do = size, do
        self._ranks: set[int] = set()
        self._done: asyncio.Future[None] | None = None
        self._doing: asyncio.Task[None] | None = None
        self._stopped: BaseException | None = None

    async def call(self, rank: int) -> None:
        """Until it is done. Raises StopRequested if a process has left, and PeerLost if it is gone: it will never call."""
        if self._stopped is not None:
            raise self._stopped
        done = self._done = self._done or asyncio.get_running_loop().create_future()
        self._ranks.add(rank)
        if len(self._ranks) == self._size:
            # A task of its own: a caller that is cancelled must not cancel what the others wait for.
            self._doing = asyncio.create_task(self._finish(done))
            self._ranks, self._done = set(), None
        await asyncio.shield(done)

    def stop(self, why: BaseException) -> None:
        self._stopped = self._stopped or why
        if self._done is not None and not self._done.done():
            self._done.set_exception(self._stopped)

    async def _finish(self, done: asyncio.Future[None]) -> None:
        try:
            await self._do()
        except Exception as error:
            done.set_exception(error)
        else:
            done.set_result(None)


async def _open(model: Backend, opened: asyncio.Future[None]) -> None:
    try:
        await model.open()
    except Exception as error:
        opened.set_exception(error)
        opened.exception()  # retrieved, should no other process call
        raise
    opened.set_result(None)


class HostedModel(Backend):
    """A model of this process that others call too."""

    def __init__(self, inner: Backend, rank: int, size: int):
        self.inner, self._rank = inner, rank
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._loading, self._unloading = AllTogether(size, inner.load), AllTogether(size, inner.unload)

    @property
    def usage(self) -> Usage:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.inner.usage

    @property
    def name(self) -> str:
        return self.inner.name

    async def open(self) -> None:
        await _open(self.inner, self._opened)

    async def close(self) -> None:
        await self.inner.close()

    async def generate(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> list[Answer]:
        return await self.inner.generate(requests, params)

    async def score(self, conversations: Sequence[list[Message]]) -> list[ScalarScore]:
        return await self.inner.score(conversations)

    async def load(self) -> None:
        await self._loading.call(self._rank)

    async def unload(self) -> None:
        await self._unloading.call(self._rank)

    def info(self) -> ModelInfo:
        return self.inner.info()

    async def answer(self, rank: int, method: str, *arguments: Any) -> Any:
        """The result of another process's call."""
        await asyncio.shield(self._opened)
        match method:
            case "open":
                info = self.inner.info()
                return ModelInfo(None, info.context, info.name, info.weights), info.template is not None, self.inner.name
            case "usage":
                return self.usage
            case "generate":
                return await self.inner.generate(*arguments)
            case "score":
                return await self.inner.score(*arguments)
            case "load":
                return await self._loading.call(rank)
            case "unload":
                return await self._unloading.call(rank)
            case _:
                raise BadMessage(f"there is no call {method!r}")

    def stop(self, why: BaseException) -> None:
        """A process makes no more calls."""
        self._loading.stop(why)
        self._unloading.stop(why)


class RemoteModel(Backend):
    """A model that another process has. `usage` stays at zero: that process counts, unless it is a reward worker."""

    def __init__(self, key: ModelKey, number: int, client: PeerClient):
        self.key = key
        self.settings, self.scalar = key
        self.usage = Usage()
        self._number, self._client = number, client
        self._info, self._name = ModelInfo(), ""

    @property
    def name(self) -> str:
        return self._name

    async def open(self) -> None:
        try:
            self._info, renders, self._name = await self._call("open")
        except PeerLost as error:
            raise PeerLost(f"{self.settings.path}: {error}, and it has this model") from None
        if renders and not self.scalar:
            self._info = await asyncio.to_thread(self._with_template, self._info)

    async def close(self) -> None:
        pass

    async def generate(self, requests: Sequence[GenerationRequest], params: SamplingParams) -> list[Answer]:
        try:
            return await self._call("generate", list(requests), params)
        except BadMessage as error:
            return [Answer(None, self._failure(error)) for _ in requests]

    async def score(self, conversations: Sequence[list[Message]]) -> list[ScalarScore]:
        try:
            return await self._call("score", list(conversations))
        except BadMessage as error:
            return [ScalarScore(None, self._failure(error)) for _ in conversations]

    async def load(self) -> None:
        await self._call("load")

    async def unload(self) -> None:
        await self._call("unload")

    async def refresh_usage(self) -> None:
        self.usage = await self._call("usage")

    def info(self) -> ModelInfo:
        return self._info

    async def _call(self, method: str, *arguments: Any) -> Any:
        return await self._client.call(method, self._number, *arguments)

    def _failure(self, error: BadMessage) -> Failure:
        return Failure("too_large", f"{self._name or self.settings.path}: {error}")

    def _with_template(self, info: ModelInfo) -> ModelInfo:
        """With the template that the model's own process has: raw prompts quote its control tokens."""
        from plaudit.data.templates import load_template, load_tokenizer

        served = self.settings.placement == "server"
        source = self.settings.tokenizer or (None if served else self.settings.path) or info.weights or info.name
        tokenizer = load_tokenizer(source, trust_remote_code=self.settings.trust_remote_code)
        return ModelInfo(load_template(tokenizer, self.settings.chat_template), info.context, info.name, info.weights)


class HostedBlock(RemoteModel):
    """A model that another process owns, and of which this one has a block."""

    def __init__(self, key: ModelKey, number: int, client: PeerClient, block: Backend):
        super().__init__(key, number, client)
        self.block = block
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def open(self) -> None:
        await _open(self.block, self._opened)
        await super().open()

    async def close(self) -> None:
        await self.block.close()

    async def answer(self, rank: int, method: str, *arguments: Any) -> Any:
        """The result of a call by the process of the block before."""
        await asyncio.shield(self._opened)
        if method not in ("run_block", "load", "unload"):
            raise BadMessage(f"there is no call {method!r}")
        return await getattr(self.block, method)(*arguments)

    def stop(self, why: BaseException) -> None:
        """Nothing waits here for another process's call."""
