"""Reward models of several processes: each is loaded by one of them, and scores are those of one process. The processes are threads
here, each with its own runner and event loop; their models are real but tiny, and the connections between them real sockets."""

import asyncio
import pickle
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from plaudit.errors import PeerFailed, PeerLost, RecipeError, StopRequested, TrainingStopped
from plaudit.models.weights import RESIDENT_MODELS
from plaudit.recipe.limits import ModelLimits
from plaudit.recipe.model_owners import deal_models, divide_limits, models_of
from plaudit.recipe.reward_models import RewardModel
from plaudit.reward_models import peer_channel
from plaudit.reward_models.backend import Backend, GenerationRequest, SamplingParams
from plaudit.reward_models.peer_channel import COUNT, LENGTH, RANK, PeerClient, PeerServer
from plaudit.reward_models.peers import LOOPBACK, ModelPeers, own_address
from plaudit.rewards.cache import reward_digest
from plaudit.rewards.runner import RewardRunner
from plaudit.types import Group
from support.fault_server import FaultServer
from support.judges import Scripted
from support.peers import GROUPS, ThreadWorld, in_threads, model, rewards_of, score
from support.rewards import group
from support.servers import events, length_judge

JUDGING = {"kind": "judge", "sampling": {"max_new_tokens": 4}, "limits": {"unreadable_retries": 0}}
TOKEN = b"t" * peer_channel.TOKEN_BYTES


# Scores --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "models"), [(2, 2), *(pytest.param(size, 4, marks=pytest.mark.slow) for size in (2, 3))])
def test_scores_are_those_of_one_process_and_each_model_is_loaded_once(folders, loads, size, models):
    rewards = [
        {"kind": "scalar_model", "name": "kind", "model": model(folders["kind"])},
        {**JUDGING, "model": model(folders["grader"], "offload")},
        {"kind": "scalar_model", "name": "short", "model": model(folders["short"], "offload")},
        {**JUDGING, "name": "raw", "raw": True, "model": model(folders["grader"]), "gate": {"reward": "judge", "above": -1}},
    ][:models]
    alone, counted_alone = score(1, rewards)
    loaded_alone = Counter(loads)
    loads.clear()
    together, counted = score(size, rewards)
    assert together == alone
    assert counted == counted_alone
    assert counted["judge/calls"] == models * 15
    assert Counter(loads) == loaded_alone
    assert RESIDENT_MODELS.models() == []


def test_rank_all_is_a_copy_in_each_process(folders, loads):
    rewards = [{"kind": "scalar_model", "model": model(folders["kind"], rank="all")}]
    alone, counted_alone = score(1, rewards)
    together, counted = score(2, rewards)
    assert loads == ["kind"] * 3
    assert together == alone
    assert counted == counted_alone


@pytest.mark.parametrize(("size", "limit"), [(2, 3), (3, 2)], ids=["divided", "one process calls"])
def test_a_judge_behind_a_url_sees_the_limits_of_the_recipe(size, limit):
    with FaultServer(latency_s=0.02) as server:
        judge = {"path": None, "placement": "server", "url": server.url}
        limits = {"unreadable_retries": 0, "max_concurrent_calls": limit}
        reward = {**JUDGING, "model": judge, "limits": limits, "max_failure_rate": 1.0, "on_failure": 0.0}
        _, counted = score(size, [reward])
    assert counted["judge/calls"] == len(server.requests) == 15
    assert server.max_in_flight <= limit


# Faults --------------------------------------------------------------------------------------------------------------


def test_a_model_that_cannot_be_opened_is_reported_by_all(tmp_path):
    def work(world: ThreadWorld) -> str:
        reward = {"kind": "scalar_model", "model": model(tmp_path / "none", rank=1)}
        with pytest.raises(RecipeError) as caught, RewardRunner(rewards_of(reward), world=world):
            pass
        return str(caught.value)

    other, owner = in_threads(2, work)
    assert "no such folder" in owner
    assert other == owner


@pytest.mark.parametrize("owner", [0, 1])
def test_no_process_waits_for_one_that_has_stopped(folders, loads, owner):
    """An offloaded model is loaded when all have sampled; the process that stops never calls for it."""

    def sample(world: ThreadWorld) -> Iterator[Group]:
        yield GROUPS[world.rank]
        if world.rank == 0:
            raise KeyError("the engine failed")

    def work(world: ThreadWorld) -> type[BaseException]:
        reward = {"kind": "scalar_model", "model": model(folders["kind"], "offload", rank=owner)}
        with RewardRunner(rewards_of(reward), world=world) as runner:
            with pytest.raises((KeyError, StopRequested)) as caught:
                runner.score_all(sample(world))
            world.gather(None, "the end")
        return caught.type

    assert in_threads(2, work) == [KeyError, StopRequested]
    assert loads == []


def in_peers(size: int, key: tuple[RewardModel, bool], owner: int, inner: Backend, work: Callable[..., Any]) -> Any:
    """`work` with the backends of `size` processes on one event loop, the owner's first, and their peers."""

    async def run() -> Any:
        peers = [ModelPeers({key: owner}, rank=rank, size=size, token=TOKEN) for rank in range(size)]
        addresses = [await one.listen(LOOPBACK) for one in peers]
        try:
            for one in peers:
                one.connect(addresses)
            backends = [one.backend(key, ModelLimits(), lambda *_: inner) for one in peers]
            await asyncio.gather(*(backend.open() for backend in backends))
            return await asyncio.wait_for(work(backends, peers), 30)
        finally:
            for one in peers:
                one.close()

    return asyncio.run(run())


JUDGE = (RewardModel(path="models/judge", placement="offload"), False)
REQUEST = GenerationRequest([{"role": "user", "content": "\ud800 an unpaired surrogate"}], key="k")


def test_a_lost_owner_fails_the_calls_that_wait_for_it_and_those_that_follow():
    class Waits(Scripted):
        async def generate(self, questions, writing):
            called.set()
            await asyncio.Event().wait()

    called = asyncio.Event()

    async def work(backends: list[Backend], peers: list[ModelPeers]) -> None:
        waiting = asyncio.create_task(backends[1].generate([REQUEST] * 2, SamplingParams(4)))
        await called.wait()
        peers[0].close()
        for call in (waiting, backends[1].generate([REQUEST] * 2, SamplingParams(4)), backends[1].load()):
            with pytest.raises(PeerLost, match="the process with rank 0 cannot be reached any more"):
                await call

    in_peers(2, JUDGE, 0, Waits(""), work)


def test_a_lost_process_is_not_taken_for_one_that_was_asked_to_stop():
    """Those that wait for it before a model is loaded stop with the cause."""

    async def work(backends: list[Backend], peers: list[ModelPeers]) -> None:
        loading = [asyncio.create_task(backend.load()) for backend in backends[:2]]
        await backends[2].generate([REQUEST], SamplingParams(4))  # time for the others' calls to come
        peers[2].close()
        for call in (*loading, backends[0].unload()):
            with pytest.raises(PeerLost, match="the process with rank 2 cannot be reached any more"):
                await call

    in_peers(3, JUDGE, 0, Scripted("fine"), work)


def test_a_lost_owner_stops_the_run_whatever_failure_rate_is_allowed(folders):
    def work(world: ThreadWorld) -> str:
        reward = {"kind": "scalar_model", "model": model(folders["kind"], rank=0), "max_failure_rate": 1.0}
        with RewardRunner(rewards_of(reward), world=world) as runner:
            world.gather(None, "all are open")
            if world.rank == 0:
                assert runner._peers is not None
                runner.run(close(runner._peers)).result()
            world.gather(None, "the owner is gone")
            if world.rank == 0:
                return ""
            with pytest.raises(TrainingStopped) as caught:
                runner.score_all(GROUPS)
        return str(caught.value)

    async def close(peers: ModelPeers) -> None:
        peers.close()

    assert "the process with rank 0 cannot be reached any more" in in_threads(2, work)[1]


def test_offloaded_weights_move_when_all_processes_have_called():
    class Moves(Scripted):
        async def load(self):
            moves.append("load")

        async def unload(self):
            moves.append("unload")

    moves: list[str] = []

    async def work(backends: list[Backend], peers: list[ModelPeers]) -> None:
        for _ in range(2):
            for method in ("load", "unload"):
                early = [asyncio.create_task(getattr(backend, method)()) for backend in backends[:2]]
                await backends[2].generate([REQUEST], SamplingParams(4))  # time for the others' calls to come
                assert not any(task.done() for task in early)
                await getattr(backends[2], method)()
                await asyncio.gather(*early)

    in_peers(3, JUDGE, 1, Moves("fine"), work)
    assert moves == ["load", "unload"] * 2


def test_a_server_sleeps_once_all_processes_rest(program):
    def work(world: ThreadWorld) -> list[list[str]]:
        seen: list[list[str]] = []
        with RewardRunner(rewards_of(length_judge(program, sleep=True, rank=0)), world=world) as runner:
            for _ in range(2):
                [scored] = runner.score_all([group("four", id=str(world.rank))], 2)
                assert [score.value for score in scored.scores["judge"]] == [4.0]
                world.gather(None, "scores")
                if world.rank == 1:
                    time.sleep(0.2)  # the other one is resting by now
                seen.append(events(program))
                runner.rest()
            world.gather(None, "the end")
        return seen

    late = in_threads(2, work)[1]
    calls = ["/v1/chat/completions"] * 2
    assert late[0] == calls
    assert late[1] == [*calls, "/sleep?level=1", "/wake_up", *calls]
    assert events(program) == [*late[1], "/sleep?level=1"]


def test_a_cancelled_call_is_cancelled_at_the_owner():
    class Waits(Scripted):
        async def generate(self, questions, writing):
            assert questions == [REQUEST]
            called.set()
            try:
                return await asyncio.Event().wait()
            finally:
                cancelled.set()

    called, cancelled = asyncio.Event(), asyncio.Event()

    async def work(backends: list[Backend], peers: list[ModelPeers]) -> None:
        task = asyncio.create_task(backends[1].generate([REQUEST], SamplingParams(4)))
        await called.wait()
        task.cancel()
        await cancelled.wait()

    in_peers(2, JUDGE, 0, Waits(""), work)


def test_what_the_model_raises_reaches_the_caller():
    def say(text: str) -> str:
        raise KeyError(text)

    async def work(backends: list[Backend], peers: list[ModelPeers]) -> None:
        with pytest.raises(PeerFailed, match="rank 0: KeyError"):
            await backends[1].generate([REQUEST], SamplingParams(4))

    in_peers(2, JUDGE, 0, Scripted(say), work)


# The channel ---------------------------------------------------------------------------------------------------------


class Unpickled:
    """Pickled, it is a call of `note`."""

    noted: list[str] = []  # noqa: RUF012

    def __reduce__(self):
        return note, ("unpickled",)


def note(text: str) -> None:
    Unpickled.noted.append(text)


HARMFUL = pickle.dumps((0, Unpickled()))


@pytest.mark.parametrize(
    ("sent", "unpickled"),
    [
        (b"x" * len(TOKEN) + RANK.pack(1) + COUNT.pack(1) + LENGTH.pack(len(HARMFUL)) + HARMFUL, False),
        (TOKEN[:-1] + b"x" + RANK.pack(1) + COUNT.pack(1) + LENGTH.pack(len(HARMFUL)) + HARMFUL, False),
        (b"GET / HTTP/1.1\r\n\r\n" + COUNT.pack(1) + LENGTH.pack(len(HARMFUL)) + HARMFUL, False),
        (TOKEN + RANK.pack(1) + COUNT.pack(1) + LENGTH.pack(2**63), False),
        (TOKEN + RANK.pack(1) + COUNT.pack(1) + LENGTH.pack(5) + b"spam!", False),
        (TOKEN + RANK.pack(1) + COUNT.pack(1) + LENGTH.pack(len(HARMFUL)) + HARMFUL, True),
    ],
    ids=["another token", "almost the token", "no token", "too large", "no pickle", "the token"],
)
def test_nothing_is_unpickled_without_the_token(sent, unpickled):
    """… and what is not a message closes its own connection only."""
    Unpickled.noted.clear()
    left: list[int] = []

    async def answer(rank: int, call: Any) -> Any:
        return rank, *call

    async def run() -> None:
        server = PeerServer(TOKEN, answer, left.append)
        port = await server.listen(LOOPBACK)
        client = PeerClient((LOOPBACK, port), TOKEN, 7, 0)
        assert await client.call("before") == (7, "before")
        reader, writer = await asyncio.open_connection(LOOPBACK, port)
        writer.write(sent)
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(), 30) == b"", "it is closed without an answer"
        writer.close()
        assert await client.call("after") == (7, "after")
        client.close()
        server.close()

    asyncio.run(run())
    assert Unpickled.noted == ["unpickled"] * unpickled
    assert left[:1] == ([1] if sent.startswith(TOKEN) else [7])


def test_large_calls_are_refused_before_they_are_sent(monkeypatch):
    monkeypatch.setattr(peer_channel, "MAX_MESSAGE_BYTES", 10_000)

    async def work(backends: list[Backend], peers: list[ModelPeers]) -> None:
        large = GenerationRequest([{"role": "user", "content": "x" * 20_000}])
        [answer] = await backends[1].generate([large], SamplingParams(4))
        assert answer.failure is not None
        assert answer.failure.cause == "too_large"
        [answer] = await backends[1].generate([REQUEST], SamplingParams(4))
        assert answer.text == "fine"

    in_peers(2, JUDGE, 0, Scripted("fine"), work)


def test_nobody_listens_there():
    async def run() -> None:
        with pytest.raises(PeerLost, match="rank 3"):
            await PeerClient((LOOPBACK, 1), TOKEN, 0, 3).call("open", 0)

    asyncio.run(run())


# Who has which model -------------------------------------------------------------------------------------------------


def dealt(size: int, *models: dict[str, Any], calls: int = 512) -> list[int | None]:
    """The rank of each model; None: each process for itself."""
    rewards = [
        {"kind": "judge", "name": f"judge {i}", "model": one, "limits": {"max_concurrent_calls": calls} if "url" in one else {}}
        for i, one in enumerate(models)
    ]
    of_rewards = models_of(rewards_of(*rewards))
    owners = deal_models(of_rewards, size)
    return [owners.get(key) for key in of_rewards]


def test_models_are_dealt_in_the_order_of_the_recipe():
    served = {"placement": "server", "url": "http://127.0.0.1:1"}
    assert dealt(2, {"path": "a"}, {"path": "b"}, {"path": "c", "placement": "launch"}) == [0, 1, 0]
    assert dealt(2, {"path": "a"}, {"path": "b", "rank": 0}, {"path": "c"}) == [1, 0, 0]
    assert dealt(3, {"path": "a", "rank": "all"}, served, {"path": "b"}) == [None, None, 0]
    assert dealt(3, served, {"path": "b"}, calls=2) == [0, 1], "its limits cannot be divided by three"
    with pytest.raises(RecipeError, match=r"model\.rank is 2, but there are 2 processes, with ranks 0 to 1"):
        dealt(2, {"path": "a", "rank": 2})


def test_models_of_inner_rewards_and_shared_ones_are_dealt_once():
    judge = {"kind": "judge", "model": {"path": "a"}}
    rule = {"kind": "exact"}
    of_rewards = models_of(
        rewards_of(judge, {"kind": "cascade", "rule": rule, "judge": judge}, {"kind": "scalar_model", "model": {"path": "a"}})
    )
    assert [(settings.path, scalar) for settings, scalar in of_rewards] == [("a", False), ("a", True)]


def test_shares_of_limits_add_up_to_no_more():
    limits = divide_limits(ModelLimits(max_concurrent_calls=11, calls_per_s=3.0, tokens_per_minute=1000), 3)
    assert (limits.max_concurrent_calls, limits.calls_per_s, limits.tokens_per_minute) == (3, 1.0, 333)
    assert divide_limits(ModelLimits(), 2).calls_per_s is None


def test_the_rank_changes_no_score(folders):
    [here] = rewards_of({"kind": "scalar_model", "model": model(folders["kind"])})
    [there] = rewards_of({"kind": "scalar_model", "model": model(folders["kind"], rank=1)})
    assert reward_digest(here) == reward_digest(there)
    with pytest.raises(ValueError, match="rank belongs to placement"):
        RewardModel(placement="server", url=("http://127.0.0.1:1",), rank=0)


def test_a_machine_is_not_called_at_its_loopback_address(monkeypatch):
    """Which its own name leads to on many machines."""

    class Probe:
        def __init__(self, *_: object):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def connect(self, address: tuple[str, int]) -> None:
            self.own = "127.0.1.1" if address[0] == "127.0.1.1" else "10.0.0.7"

        def getsockname(self) -> tuple[str, int]:
            return self.own, 1

    addresses = {"here": "127.0.1.1", "there": "10.0.0.8"}

    def getaddrinfo(host: str, port: int, type: int) -> list[Any]:
        if host not in addresses:
            raise socket.gaierror(f"{host} is unknown")
        return [(socket.AF_INET, type, 0, "", (addresses[host], port))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(socket, "socket", Probe)
    monkeypatch.setenv("MASTER_ADDR", "here")
    assert own_address(["here", "unknown", "there"]) == "10.0.0.7"
    with pytest.raises(RecipeError, match="Set MASTER_ADDR"):
        own_address(["here", "unknown"])
