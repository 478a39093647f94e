"""Scalar models whose layers several processes have: scores to the bit of the undivided model, and faults of any of them."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from plaudit.errors import PeerLost, RecipeError, TrainingStopped
from plaudit.models import scalar
from plaudit.models.scalar import ScalarModel, scalar_blocks
from plaudit.models.weights import RESIDENT_MODELS
from plaudit.recipe.model_owners import deal_models, models_of
from plaudit.recipe.reward_models import RewardModel
from plaudit.reward_models import divided, peer_channel, scalar_inference
from plaudit.reward_models.divided import BlockInput, ModelPart
from plaudit.reward_models.local import LocalModel
from plaudit.reward_models.peers import LOOPBACK, ModelPeers
from plaudit.rewards.runner import RewardRunner
from plaudit.types import Group
from support.models import make_classifier
from support.peers import GROUPS, ThreadWorld, in_threads, model, rewards_of, score

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def classifier(tiny_models, tmp_path_factory) -> Path:
    return make_classifier(tiny_models["llama"], tmp_path_factory.mktemp("divided") / "rm", num_hidden_layers=5)


def reward(folder: Path, placement: str = "resident", **settings) -> dict[str, Any]:
    return {"kind": "scalar_model", "model": model(folder, placement, **settings)}


@pytest.mark.parametrize(
    ("size", "ranks", "placement"), [(2, [0, 1], "resident"), (3, [2, 0, 1], "offload"), (3, [1, 2], "resident")]
)
def test_scores_have_the_bits_of_the_undivided_model(classifier, size, ranks, placement):
    alone, counted_alone = score(1, [reward(classifier, placement)])
    together, counted = score(size, [reward(classifier, placement, rank=ranks)])
    assert together == alone
    assert counted == counted_alone
    assert RESIDENT_MODELS.models() == []


def test_each_process_holds_its_block_only(classifier):
    def work(world: ThreadWorld) -> list[int]:
        with RewardRunner(rewards_of(reward(classifier, rank=[0, 1, 2])), world=world):
            world.gather(None, "all are open")
            held = [one.bytes for one in RESIDENT_MODELS.models()]
            world.gather(None, "the end")
        return held

    blocks = scalar_blocks(RewardModel(path=str(classifier), device="cpu", rank=(0, 1, 2)))
    [held, *_] = in_threads(3, work)
    bias = 1  # of the head, which adds zero
    assert sorted(held) == sorted(4 * (block.parameters + bias * block.is_last) for block in blocks)
    assert max(held) < 0.5 * sum(held)


def test_blocks_compute_while_their_process_samples(classifier):
    """The second process samples until the first has all its scores."""
    scored = threading.Event()

    def sample(world: ThreadWorld) -> Iterator[Group]:
        assert world.rank == 0 or scored.wait(60)
        yield GROUPS[world.rank]

    def work(world: ThreadWorld) -> float | None:
        with RewardRunner(rewards_of(reward(classifier, rank=[0, 1])), world=world) as runner:
            [result] = runner.score_all(sample(world))
            scored.set()
            world.gather(None, "the end")
        return result.scores["scalar_model"][0].value

    first, second = in_threads(2, work)
    assert first is not None
    assert second is not None


def test_blocks_compute_different_batches_at_the_same_time(classifier, monkeypatch):
    """The last block waits until the first has sent a second batch."""
    monkeypatch.setitem(scalar.TOKENS_PER_PASS, "cpu", 40)
    alone, _ = score(1, [reward(classifier)], repeatable=False)
    monkeypatch.setitem(scalar_inference.TOKENS_PER_PASS_OF_BLOCKS, "cpu", 40)
    sent, second = [], threading.Event()
    send, run_block = ModelPart.send, ScalarModel.run_block

    def count(self: ModelPart, given: BlockInput) -> Any:
        sent.append(given)
        if len(sent) == 2:
            second.set()
        return send(self, given)

    def wait_for_second(self: ScalarModel, *arguments: Any) -> Any:
        assert self.head is None or second.wait(60)
        return run_block(self, *arguments)

    monkeypatch.setattr(ModelPart, "send", count)
    monkeypatch.setattr(ScalarModel, "run_block", wait_for_second)
    together, _ = score(2, [reward(classifier, rank=[0, 1])], repeatable=False)
    values = [[[one.value for one in by["scalar_model"]] for by in scores.values()] for scores in (together, alone)]
    assert np.allclose(values[0], values[1], rtol=1e-4), "what is packed together is a matter of timing"


def test_a_batch_that_is_too_large_for_a_later_block_is_halved(classifier, monkeypatch):
    alone, _ = score(1, [reward(classifier)])
    run_block = ScalarModel.run_block

    def run_one(self: ScalarModel, batch: Any, states: Any) -> Any:
        if self.head is not None and len(batch.starts_S1) > 2:
            raise torch.OutOfMemoryError("more than one sequence")
        return run_block(self, batch, states)

    monkeypatch.setattr(ScalarModel, "run_block", run_one)
    together, _ = score(2, [reward(classifier, rank=[0, 1])])
    values = [[[one.value for one in by["scalar_model"]] for by in scores.values()] for scores in (together, alone)]
    assert np.allclose(values[0], values[1], rtol=1e-4)


def test_in_one_process_block_by_block(classifier):
    """As the doctor scores with it."""
    settings = RewardModel(path=str(classifier), device="cpu", rank=(0, 1, 2))
    conversations = [[{"role": "user", "content": "x" * n}, {"role": "assistant", "content": "y"}] for n in (1, 20, 5)]

    async def scores(settings: RewardModel) -> list[float | None]:
        backend = LocalModel(settings, scalar=True)
        await backend.open()
        try:
            return [one.value for one in await backend.score(conversations)]
        finally:
            await backend.close()

    assert asyncio.run(scores(settings)) == asyncio.run(scores(settings.model_copy(update={"rank": None})))


# Faults --------------------------------------------------------------------------------------------------------------


def test_a_lost_block_stops_the_run_and_its_rank_is_named(classifier):
    def work(world: ThreadWorld) -> str:
        settings = {**reward(classifier, rank=[0, 1, 2]), "max_failure_rate": 1.0}
        with RewardRunner(rewards_of(settings), world=world) as runner:
            world.gather(None, "all are open")
            if world.rank == 2:
                assert runner._peers is not None
                runner.run(close(runner._peers)).result()
            world.gather(None, "the last block is gone")
            message = ""
            if world.rank != 2:
                with pytest.raises(TrainingStopped) as caught:
                    runner.score_all(GROUPS[:1])
                message = str(caught.value)
            world.gather(None, "the end")
        return message

    async def close(peers: ModelPeers) -> None:
        peers.close()

    owner, caller, _ = in_threads(3, work)
    for message in (owner, caller):
        assert "the process with rank 2 cannot be reached any more" in message


def test_a_block_that_cannot_be_loaded_is_reported_by_all(classifier, tmp_path):
    folder = make_classifier(classifier, tmp_path / "rm")
    weights = {name: tensor for name, tensor in load_file(folder / "model.safetensors").items() if ".layers.4." not in name}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    def work(world: ThreadWorld) -> str:
        with pytest.raises(RecipeError) as caught, RewardRunner(rewards_of(reward(folder, rank=[0, 1])), world=world):
            pass
        return str(caught.value)

    messages = in_threads(2, work)
    assert messages[0] == messages[1]
    assert "weights are missing" in messages[0]


def test_the_process_that_hangs_is_named(monkeypatch):
    """By the one that waits for it, whose time limit ends first."""
    monkeypatch.setattr(divided, "CALL_LIMIT_S", 0.05)

    async def hang(*_: Any) -> None:
        await asyncio.Event().wait()

    async def run() -> None:
        second = ModelPart(1, (4, 5, 6), hang)
        first = ModelPart(0, (4, 5, 6), second.call_next)
        with pytest.raises(PeerLost, match=r"the process with rank 6 has not .* within 0\.05 s"):
            await asyncio.wait_for(first.call_next("run_block"), 30)

    asyncio.run(run())


# Settings ------------------------------------------------------------------------------------------------------------


def test_one_process_cannot_divide_a_model(classifier):
    message = r"model\.rank is \[0, 2\], but there is only one process\. To train with it, set cluster\.gpus=3;"
    with pytest.raises(RecipeError, match=message), RewardRunner(rewards_of(reward(classifier, rank=[0, 2]))):
        pass


def test_every_rank_has_to_be_there():
    models = models_of(rewards_of({"kind": "scalar_model", "model": {"path": "a", "rank": [1, 0]}}))
    assert list(deal_models(models, 2).values()) == [1], "the first owns it"
    models |= models_of(rewards_of({"kind": "judge", "model": {"path": "b"}}))
    assert list(deal_models(models, 3).values()) == [1, 2], "the third has no block yet"
    models = models_of(rewards_of({"kind": "scalar_model", "model": {"path": "a", "rank": [0, 2]}}))
    with pytest.raises(RecipeError, match=r"a: model\.rank is \[0, 2\], but there are 2 processes, with ranks 0 to 1"):
        deal_models(models, 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": [0]}, r"at least two ranks, each named once, such as \[0, 1\]"),
        ({"rank": []}, "at least two ranks"),
        ({"rank": [1, 1]}, "each named once"),
        ({"rank": [0, 1], "placement": "launch"}, r"arguments: --tensor-parallel-size 2"),
        ({"rank": [0, 1], "placement": "server", "url": "http://127.0.0.1:1"}, "rank belongs to placement"),
    ],
)
def test_lists_of_ranks_that_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        RewardModel.model_validate({"path": None if "url" in settings else "a", **settings})


@pytest.mark.parametrize("kind", ["judge", "group_judge", "pairwise_judge"])
def test_generative_models_are_divided_by_their_server(kind):
    with pytest.raises(ValueError, match="placement: launch, with arguments: --tensor-parallel-size 3"):
        rewards_of({"kind": kind, "model": {"path": "a", "rank": [0, 1, 2]}})


# Messages with arrays ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hidden_states_cross_the_channel_unchanged(dtype, monkeypatch):
    states = torch.randn(300, 128).to(dtype)
    [(_, batch)] = scalar.batches_of([list(range(100)), list(range(200))], CPU, 300)
    sizes: list[int] = []
    receive_chunk = peer_channel._receive_chunk

    async def note(reader: asyncio.StreamReader, length: int) -> bytearray:
        sizes.append(length)
        return await receive_chunk(reader, length)

    monkeypatch.setattr(peer_channel, "_receive_chunk", note)

    async def answer(rank: int, call: Any) -> Any:
        return call[0]

    async def run() -> BlockInput:
        server = peer_channel.PeerServer(b"t" * peer_channel.TOKEN_BYTES, answer, lambda _: None)
        client = peer_channel.PeerClient((LOOPBACK, await server.listen(LOOPBACK)), b"t" * peer_channel.TOKEN_BYTES, 1, 0)
        try:
            return await client.call(BlockInput.of(batch, states))
        finally:
            client.close()
            server.close()

    back, returned = asyncio.run(run()).on(CPU)
    assert sizes.count(300 * 128 * dtype.itemsize) == 2, "there and back, apart from the pickle"
    assert returned.dtype == dtype
    assert torch.equal(returned, states)
    assert back.longest == batch.longest
    for name in ("tokens_T", "positions_T", "starts_S1"):
        assert torch.equal(getattr(back, name), getattr(batch, name))


def test_arrays_that_are_too_large_are_not_sent(monkeypatch):
    monkeypatch.setattr(peer_channel, "MAX_ARRAY_BYTES", 1_000_000)
    with pytest.raises(peer_channel.BadMessage, match="a message of 2 MB; the limit is 1 MB"):
        peer_channel.pack(np.zeros(2_000_000, dtype=np.uint8))
